"""Rows of several texts that are tokenized separately: a source and its target, a query and its documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from bert.data.batching import bucket_length
from bert.data.encoding import plain_ids, tokenize
from bert.data.rows import IGNORE_INDEX, ChoiceRows, TokenRows
from bert.errors import UserError
from bert.tokenizer.special_tokens import special_ids


@dataclass(frozen=True)
class SourceTargetRows:
    """R sources and their targets w1 ... wn. The decoder reads ``[CLS] w1 ... wn`` and predicts ``w1 ... wn [SEP]``.

    Both sides of a batch are padded to one length, the targets at most to their maximum. A run then compiles a program
    per length instead of per pair of lengths.
    """

    sources: TokenRows
    targets: TokenRows | None
    """Rows ``[CLS] w1 ... wn [SEP]``; None if the split has no targets."""
    tokenizer: Tokenizer
    """Tokenizer of the targets."""
    max_target_length: int
    """Maximum number of tokens that the decoder reads in a row."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def labels(self) -> np.ndarray | None:
        """The targets' token ids; None if the split has no targets."""
        return None if self.targets is None else self.targets.ids

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of the longer side of each row."""
        if self.targets is None:
            return self.sources.lengths
        return np.maximum(self.sources.lengths, self.targets.lengths - 1)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, padded to S = ``length`` tokens of source and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, S] int32 of the sources; target_ids [B, T] int32, the input of
          the decoder; labels [B, T] int32, the tokens that follow them, IGNORE_INDEX in padding; weights [B] float32,
          0 for fill rows.
        """
        batch = self.sources.batch(rows, length, batch_size)
        target_length = min(length, self.max_target_length)
        target_ids = np.zeros((batch_size, target_length), np.int32)
        labels = np.full((batch_size, target_length), IGNORE_INDEX, np.int32)
        if self.targets is not None:
            full = self.targets.batch(rows, target_length + 1, batch_size)
            real = full["attention_mask"][:, 1:] > 0
            target_ids[real] = full["input_ids"][:, :-1][real]
            labels[real] = full["input_ids"][:, 1:][real]
        return {**batch, "target_ids": target_ids, "labels": labels}

    def digest(self) -> str:
        """Returns a hash of the tokens of both sides."""
        return self.sources.digest() + ("" if self.targets is None else self.targets.digest())


def tokenize_sources(
    tokenizers: tuple[Tokenizer, Tokenizer],
    sources: Sequence[str],
    targets: Sequence[str] | None,
    max_lengths: tuple[int, int],
) -> SourceTargetRows:
    """Encodes sources and targets as rows.

    Args:
      tokenizers: tokenizer of the sources, and of the targets.
      targets: a text for each source, or None.
      max_lengths: maximum tokens of a source with its special tokens, and of a target with its start or end token.

    Raises:
      UserError: the target vocabulary has no token for the start or the end of a text.
    """
    tokenizer, target_tokenizer = tokenizers
    rows = tokenize(tokenizer, sources, max_lengths[0])
    start, end = target_boundaries(target_tokenizer)
    if targets is None:
        return SourceTargetRows(rows, None, target_tokenizer, max_lengths[1])
    max_tokens = max_lengths[1] - 1
    texts = [
        np.concatenate([[start], ids[:max_tokens], [end]]).astype(np.int32)
        for ids in plain_ids(target_tokenizer, targets, literal=True)
    ]
    lengths = np.array([len(ids) for ids in texts], np.int64)
    target_rows = TokenRows(
        ids=np.concatenate([np.zeros(0, np.int32), *texts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_a_lengths=lengths.astype(np.int32),
        labels=None,
    )
    return SourceTargetRows(rows, target_rows, target_tokenizer, max_lengths[1])


def target_boundaries(tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns the ids of the start and end tokens of a target. Raises UserError for a vocabulary without them."""
    ids = special_ids(tokenizer)
    roles = {"start": ("cls", "bos"), "end": ("eos", "sep")}
    boundaries = {name: next((i for i in map(ids.find, names) if i is not None), None) for name, names in roles.items()}
    for name, number in boundaries.items():
        if number is None:
            raise UserError(
                f"the target vocabulary has no {name} token ([CLS] and [SEP], <s> and </s>, or <|endoftext|>): use one "
                "that has it"
            )
    return int(boundaries["start"] or 0), int(boundaries["end"] or 0)


@dataclass(frozen=True)
class QueryDocumentRows:
    """R queries, each with one or more documents; the first document is the right one.

    Documents are padded to the length of the batch, queries at most to ``max_query_length``. A run then compiles a
    program per length instead of per pair of lengths.
    """

    queries: TokenRows
    """Labels are the scores of the rows, [R] float32, or None."""
    documents: ChoiceRows
    query_numbers: np.ndarray
    """[R] int32: equal texts have equal numbers."""
    document_numbers: np.ndarray
    """[documents of all rows] int32: equal texts have equal numbers."""
    max_query_length: int
    """Maximum length to which queries are padded."""
    has_loss: bool = True
    """Whether a loss can be computed."""

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def labels(self) -> np.ndarray | None:
        """The scores, or the numbers of the documents; None if no loss can be computed."""
        if not self.has_loss:
            return None
        return self.document_numbers if self.queries.labels is None else self.queries.labels

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of the longest text of each row."""
        return np.maximum(self.queries.lengths, self.documents.lengths)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, with C documents padded to T = ``length`` and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, Q] int32 of the queries; document_ids, document_types,
          document_mask [B, C, T] int32; query_numbers [B] and document_numbers [B, C] int32, -1 for documents that only
          fill a row; labels [B] float32, the scores or 0; weights [B] float32, 0 for fill rows.
        """
        rows = np.asarray(rows)
        used = slice(0, len(rows))
        batch = self.queries.batch(rows, min(length, self.max_query_length), batch_size)
        documents = self.documents.batch(rows, length, batch_size)
        query_numbers = np.full(batch_size, -1, np.int32)
        query_numbers[used] = self.query_numbers[rows]
        has = documents["choice_mask"][used] > 0
        indices = self.documents.offsets[rows][:, None] + np.arange(has.shape[1])
        document_numbers = np.full((batch_size, has.shape[1]), -1, np.int32)
        document_numbers[used][has] = self.document_numbers[indices[has]]
        return {
            **batch,
            "labels": batch["labels"].astype(np.float32),
            "document_ids": documents["input_ids"],
            "document_types": documents["token_type_ids"],
            "document_mask": documents["attention_mask"],
            "query_numbers": query_numbers,
            "document_numbers": document_numbers,
        }

    def digest(self) -> str:
        """Returns a hash of the tokens and scores."""
        return self.queries.digest() + self.documents.digest()


def tokenize_queries(
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[Sequence[str]],
    scores: np.ndarray | None,
    max_length: int,
    buckets: Sequence[int],
    has_loss: bool = True,
) -> QueryDocumentRows:
    """Encodes queries and their documents as rows.

    Args:
      documents: one or more documents for each of R queries.
      scores: [R] float32, or None.
      max_length: maximum tokens of a text, special tokens included.
      buckets: lengths to which batches are padded.
    """
    flat = [text for texts in documents for text in texts]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    rows = tokenize(tokenizer, queries, max_length, scores)
    max_query_length = bucket_length(int(rows.lengths.max(initial=0)), buckets, max_length)
    return QueryDocumentRows(
        rows,
        ChoiceRows(tokenize(tokenizer, flat, max_length), offsets, None),
        number_texts(queries),
        number_texts(flat),
        max_query_length,
        has_loss,
    )


def number_texts(texts: Sequence[str]) -> np.ndarray:
    """Numbers texts in order of first occurrence, int32 [texts]; equal texts have equal numbers."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
