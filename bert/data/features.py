"""Tokenized rows of a fine-tuning task, without padding, and the padded batches taken from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from bert.config.model import PairTruncation
from bert.data.row_template import RowTemplate, post_processor, row_template
from bert.errors import UserError
from bert.tokenizer.hf_settings import NO_LIMIT, truncation_side
from bert.tokenizer.library import encode_batch
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import literal_tokenizer

ROWS_AT_ONCE = 4096
"""Texts tokenized in one call: enough to make calls cheap, few enough to bound memory."""

IGNORE_INDEX = -1
"""Label of a token that has none: special tokens, padding, the tokens of a word after its first."""


@dataclass(frozen=True)
class Features:
    """R rows of different lengths, one after the other."""

    ids: np.ndarray
    """[tokens of all rows] int32, special ones included."""
    offsets: np.ndarray
    """[R + 1] int64: row r is ids[offsets[r] : offsets[r + 1]]."""
    segment_a_lengths: np.ndarray
    """[R] int32: tokens of type 0; the others of the row have type 1. In BERT's rows these are segment A, with [CLS]
    and its [SEP], and segment B; in RoBERTa's every token has type 0."""
    labels: np.ndarray | None
    """[R, ...]: [R] int32 labels, [R] float32 scores, [R, 2] int32 places of an answer; or, with ``token_labels``,
    [tokens of all rows] int32, one per token or IGNORE_INDEX. None where the split has none."""
    pad_token_id: int = 0
    token_labels: bool = False
    """Whether ``labels`` are those of tokens."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row. Kept: every batch asks for some, and there may be millions."""
        return np.diff(self.offsets)

    @property
    def input_numbers(self) -> np.ndarray:
        """[R] number of the input that each row was made from; several rows of a long input have the same one."""
        return np.arange(len(self))

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The given rows, padded to T = ``length`` tokens and B = ``batch_size`` rows; fill rows weigh 0.

        Returns:
          input_ids, token_type_ids, attention_mask [B, T] int32, labels [B, ...] or [B, T] (0, and IGNORE_INDEX for
          tokens, in fill rows and padding; [B] zeros where there are none), weights [B] float32, 1 for a row asked for.
        """
        rows = np.asarray(rows)
        lengths = self.lengths[rows]
        longest = lengths.max(initial=0)
        if len(rows) > batch_size or longest > length:
            raise ValueError(f"{len(rows)} rows of up to {longest} tokens do not fit a batch [{batch_size}, {length}]")
        used = slice(0, len(rows))
        columns = np.arange(length)
        real = np.zeros((batch_size, length), bool)
        real[used] = columns < lengths[:, None]
        starts = np.zeros((batch_size, 1), np.int64)
        starts[used, 0] = self.offsets[rows]
        segment_a = np.zeros((batch_size, 1), np.int64)
        segment_a[used, 0] = self.segment_a_lengths[rows]

        input_ids = np.full((batch_size, length), self.pad_token_id, np.int32)
        input_ids[real] = self.ids[(starts + columns)[real]]
        if self.labels is None:
            labels = np.zeros(batch_size, np.int32)
        elif self.token_labels:
            labels = np.full((batch_size, length), IGNORE_INDEX, np.int32)
            labels[real] = self.labels[(starts + columns)[real]]
        else:
            labels = np.zeros((batch_size, *self.labels.shape[1:]), self.labels.dtype)
            labels[used] = self.labels[rows]
        weights = np.zeros(batch_size, np.float32)
        weights[used] = 1
        return {
            "input_ids": input_ids,
            "token_type_ids": (real & (columns >= segment_a)).astype(np.int32),
            "attention_mask": real.astype(np.int32),
            "labels": labels,
            "weights": weights,
        }

    def digest(self) -> str:
        """Of tokens and labels."""
        return _digest(self.ids, self.offsets, self.segment_a_lengths, self.labels)


@dataclass(frozen=True)
class ChoiceFeatures:
    """R rows of two or more choices each; every choice is its own sequence."""

    sequences: Features
    """The choices of all rows, one after the other; without labels."""
    offsets: np.ndarray
    """[R + 1] int64: the choices of row r are the sequences offsets[r] to offsets[r + 1] - 1."""
    labels: np.ndarray | None
    """[R] int32, the number of the right choice within its row; or [choices of all rows] float32, the grade of each;
    None where the split has none."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row's longest choice."""
        return np.maximum.reduceat(self.sequences.lengths, self.offsets[:-1])

    @cached_property
    def choices(self) -> np.ndarray:
        """[R] choices of each row."""
        return np.diff(self.offsets)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The given rows, padded to C choices (the most that any row has), T = ``length`` tokens, B rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, C, T] int32, choice_mask [B, C] int32 (1 for a choice that
          the row has), labels [B] int32, or [B, C] float32 of grades (0 where there are none), weights [B] float32,
          1 for a row asked for. A choice that a row lacks is a copy of its first one, a fill row a copy of the first
          row: attention needs something to look at.
        """
        rows = np.asarray(rows)
        if len(rows) > batch_size:
            raise ValueError(f"{len(rows)} rows do not fit a batch of {batch_size}")
        filled = np.concatenate([rows, np.repeat(rows[:1], batch_size - len(rows))])
        columns = np.arange(self.choices.max())
        has = columns < self.choices[filled][:, None]
        sequence = self.offsets[filled][:, None] + np.where(has, columns, 0)
        flat = self.sequences.batch(sequence.ravel(), length, sequence.size)
        names = ("input_ids", "token_type_ids", "attention_mask")
        labels = np.zeros(batch_size, np.int32)
        if self.labels is not None and self.labels.dtype == np.float32:
            labels = np.where(has, self.labels[sequence], np.float32(0))
        elif self.labels is not None:
            labels[: len(rows)] = self.labels[rows]
        return {
            **{name: flat[name].reshape(*has.shape, length) for name in names},
            "choice_mask": has.astype(np.int32),
            "labels": labels,
            "weights": (np.arange(batch_size) < len(rows)).astype(np.float32),
        }

    def digest(self) -> str:
        """Of tokens, choices and labels."""
        return _digest(np.frombuffer(self.sequences.digest().encode(), np.uint8), self.offsets, self.labels)


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    max_length: int,
    labels: np.ndarray | None = None,
    pair_truncation: PairTruncation | None = None,
) -> Features:
    """Texts or pairs -> ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, at most ``max_length`` tokens; of RoBERTa
    ``<s> A </s>`` or ``<s> A </s></s> B </s>``.

    The longer text of a pair is cut first: as by ``longest_first`` of the library `tokenizers`, or with
    ``pair_truncation`` google as by ``_truncate_seq_pair`` of google-research/bert (run_classifier.py). ``tokenizer``
    stays as it is.

    Raises:
      UserError: ``max_length`` has no room for the special tokens, or the tokenizer fails on a text.
    """
    truncating = _truncating_tokenizer(tokenizer, max_length, tokenizer.get_vocab_size())
    has_pairs = any(isinstance(text, tuple) for text in texts)
    template = row_template(tokenizer, pair=True) if pair_truncation == "google" and has_pairs else None
    ids = [np.zeros(0, np.int32)]
    lengths: list[int] = []
    segment_a_lengths: list[int] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        batch = texts[start : start + ROWS_AT_ONCE]
        for text, encoding in zip(batch, encode_batch(truncating, batch), strict=True):
            if template is not None and isinstance(text, tuple) and len(encoding.ids) == max_length:
                row, segment_a_length = _google_row(tokenizer, template, text, max_length)
            else:
                row = np.array(encoding.ids, np.int32)
                segment_a_length = len(row) - sum(encoding.type_ids)
            ids.append(row)
            lengths.append(len(row))
            segment_a_lengths.append(segment_a_length)
    if max(lengths, default=0) > max_length:  # the library never cuts special tokens
        raise UserError(f"max_length is {max_length}, but the special tokens of a row are more: use a larger number")
    return Features(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        segment_a_lengths=np.array(segment_a_lengths, np.int32),
        labels=labels,
        pad_token_id=special_ids(truncating).find("pad") or 0,
    )


def _google_row(
    tokenizer: Tokenizer, template: RowTemplate, pair: tuple[str, str], max_length: int
) -> tuple[np.ndarray, int]:
    """The row of a pair that fills it, and its tokens of type 0."""
    first, second = plain_ids(tokenizer, pair)
    kept = google_pair_lengths(len(first), len(second), template.room(max_length))
    from_end = truncation_side(tokenizer) == "left"
    first, second = (
        text[len(text) - count :] if from_end else text[:count]
        for text, count in zip((first, second), kept, strict=True)
    )
    return template.row(first, second), template.segment_a_length(*kept)


def google_pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that are left of two texts. While both do not fit, the longer loses one, of equals the second."""
    excess = max(first + second - room, 0)
    cut = min(excess, abs(first - second))  # until both are equal
    first, second = (first - cut, second) if first > second else (first, second - cut)
    excess -= cut
    return first - excess // 2, second - (excess + 1) // 2


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str], literal: bool = False) -> list[np.ndarray]:
    """The int32 ids of each text alone, without special tokens around it.

    Args:
        tokenizer: stays as it is.
        texts: of any length.
        literal: whether the name of a special token in a text, such as "[SEP]", is ordinary characters.
    """
    whole = (
        prose_tokenizer(tokenizer)
        if literal
        else _truncating_tokenizer(tokenizer, NO_LIMIT, tokenizer.get_vocab_size())
    )
    return [np.array(encoding.ids, np.int32) for encoding in encode_batch(whole, texts, add_special_tokens=False)]


@lru_cache(maxsize=8)
def _truncating_tokenizer(tokenizer: Tokenizer, max_length: int, tokens: int) -> Tokenizer:
    """A copy that cuts and does not pad. Kept, since a copy of 30,000 tokens takes longer than a short answer should;
    ``tokens``, their number, is there to notice tokens that were added since."""
    copy = Tokenizer.from_str(tokenizer.to_str())  # truncation and padding are settings of the object itself
    copy.no_padding()
    copy.enable_truncation(max_length, strategy="longest_first", direction=truncation_side(tokenizer))
    copy.post_processor = post_processor(copy)
    return copy


def prose_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that neither cuts nor pads, to which "[SEP]" and its like in a text are ordinary characters; kept, too."""
    return _prose_tokenizer(tokenizer, tokenizer.get_vocab_size())[0]


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids [T] and the first and last characters [T, 2] int32 of each text's tokens, without special tokens.

    The library leaves the space in front of a word out of a byte-level token even if the pre-tokenizer has added that
    space, as RobBERT's does for each word: the token would begin one letter late. Here only spaces of the text are
    left out.
    """
    literal, trims = _prose_tokenizer(tokenizer, tokenizer.get_vocab_size())
    for first in range(0, len(texts), ROWS_AT_ONCE):
        batch = list(texts[first : first + ROWS_AT_ONCE])
        for text, encoding in zip(batch, encode_batch(literal, batch, False, offsets=True), strict=True):
            offsets = encoding.offsets
            if trims:
                offsets = [_without_spaces(text, start, end) for start, end in offsets]
            yield np.array(encoding.ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2)


def _without_spaces(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start] == " ":
        start += 1
    while start < end and text[end - 1] == " ":
        end -= 1
    return start, end


@lru_cache(maxsize=8)
def _prose_tokenizer(tokenizer: Tokenizer, tokens: int) -> tuple[Tokenizer, bool]:
    """The copy, and whether the original leaves spaces out of the characters that a token covers; the copy does not."""
    copy = literal_tokenizer(tokenizer)
    copy.no_padding()
    copy.no_truncation()
    copy.post_processor = post_processor(copy)
    content = json.loads(copy.to_str())
    ending = json.dumps(content["post_processor"])
    if not (trims := '"trim_offsets": true' in ending):
        return copy, trims
    content["post_processor"] = json.loads(ending.replace('"trim_offsets": true', '"trim_offsets": false'))
    untrimmed = Tokenizer.from_str(json.dumps(content))
    untrimmed.encode_special_tokens = True
    return untrimmed, trims


def pad_and_stack(arrays: Sequence[np.ndarray], empty: Sequence[int] = (0,)) -> np.ndarray:
    """R arrays [T_r, ...] as one [R, longest T_r, ...] with zeros behind each; [0, *empty] where there are none."""
    if not len(arrays):
        return np.zeros((0, *empty), np.float32)
    whole = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(whole, arrays, strict=True):
        row[: len(array)] = array
    return whole


def _digest(*arrays: np.ndarray | None) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class Rows(Protocol):
    """R rows ready for the model: `bert.data.features.Features`, `ChoiceFeatures`, or a task's own extension."""

    @property
    def labels(self) -> np.ndarray | None:
        """As the task's loss takes them; None where the rows have none, and so no loss (other than train's)."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row, by which rows are put into buckets."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The rows padded to T = ``length`` and B = ``batch_size``.

        Returns ``input_ids``, ``token_type_ids``, ``attention_mask`` ([B, T], or [B, C, T] with choices), ``labels``
        as the task's loss takes them, ``weights`` [B], 0 for rows that only fill the batch.
        """

    def digest(self) -> str:
        """Of tokens and labels: a run does not resume with others."""
