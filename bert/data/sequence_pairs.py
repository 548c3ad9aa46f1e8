"""Rows of a source and a target, each side tokenized by itself, and the padded batches taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from bert.data.features import IGNORE_INDEX, Features, plain_ids, tokenize
from bert.errors import UserError
from bert.tokenizer.special_tokens import special_ids


@dataclass(frozen=True)
class SequencePairs:
    """R sources, and their targets w1 to wn: the decoder reads ``[CLS] w1 ... wn`` and predicts ``w1 ... wn [SEP]``.

    Both sides of a batch are padded to one length, the targets at most to their maximum: a run compiles a program for
    each length, and not for each pair of lengths.
    """

    sources: Features
    """Without labels."""
    targets: Features | None
    """Rows ``[CLS] w1 ... wn [SEP]``; None where the split has no targets."""
    tokenizer: Tokenizer
    """Of the targets."""
    max_target_length: int
    """Most tokens that the decoder reads in a row."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def labels(self) -> np.ndarray | None:
        """The targets' token ids; None where the split has none."""
        return None if self.targets is None else self.targets.ids

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row's longer side."""
        if self.targets is None:
            return self.sources.lengths
        return np.maximum(self.sources.lengths, self.targets.lengths - 1)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The given rows, padded to S = ``length`` tokens of source and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, S] int32 of the sources; target_ids [B, T] int32, what the
          decoder reads; labels [B, T] int32, the tokens that follow them, IGNORE_INDEX in padding; weights [B] float32,
          1 for a row asked for.
        """
        batch = self.sources.batch(rows, length, batch_size)
        target_length = min(length, self.max_target_length)
        target_ids = np.zeros((batch_size, target_length), np.int32)
        labels = np.full((batch_size, target_length), IGNORE_INDEX, np.int32)
        if self.targets is not None:
            whole = self.targets.batch(rows, target_length + 1, batch_size)
            real = whole["attention_mask"][:, 1:] > 0
            target_ids[real] = whole["input_ids"][:, :-1][real]
            labels[real] = whole["input_ids"][:, 1:][real]
        return {**batch, "target_ids": target_ids, "labels": labels}

    def digest(self) -> str:
        """Of the tokens of both sides."""
        return self.sources.digest() + ("" if self.targets is None else self.targets.digest())


def tokenize_pairs(
    tokenizers: tuple[Tokenizer, Tokenizer],
    sources: Sequence[str],
    targets: Sequence[str] | None,
    max_lengths: tuple[int, int],
) -> SequencePairs:
    """Sources and targets as rows.

    Args:
      tokenizers: of the sources, and of the targets.
      sources: texts.
      targets: a text for each; None for none.
      max_lengths: most tokens of a source with its special tokens, and of a target with its start or its end.

    Raises:
      UserError: the target vocabulary has no token for the start or the end of a text.
    """
    tokenizer, target_tokenizer = tokenizers
    rows = tokenize(tokenizer, sources, max_lengths[0])
    start, end = target_boundaries(target_tokenizer)
    if targets is None:
        return SequencePairs(rows, None, target_tokenizer, max_lengths[1])
    most = max_lengths[1] - 1
    texts = [
        np.concatenate([[start], ids[:most], [end]]).astype(np.int32)
        for ids in plain_ids(target_tokenizer, targets, literal=True)
    ]
    lengths = np.array([len(ids) for ids in texts], np.int64)
    target_rows = Features(
        ids=np.concatenate([np.zeros(0, np.int32), *texts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_a_lengths=lengths.astype(np.int32),
        labels=None,
    )
    return SequencePairs(rows, target_rows, target_tokenizer, max_lengths[1])


def target_boundaries(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids of the tokens that start a target and end it. Raises UserError for a vocabulary without one of them."""
    ids = special_ids(tokenizer)
    roles = {"start": ("cls", "bos"), "end": ("eos", "sep")}
    found = {name: next((i for i in map(ids.find, names) if i is not None), None) for name, names in roles.items()}
    for name, number in found.items():
        if number is None:
            raise UserError(
                f"the target vocabulary has no {name} token ([CLS] and [SEP], <s> and </s>, or <|endoftext|>): use one "
                "that has it"
            )
    return int(found["start"] or 0), int(found["end"] or 0)
