"""Rows of a query and its documents, each text tokenized by itself, and the padded batches taken from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

from bert.data.batching import bucket_length
from bert.data.features import ChoiceFeatures, Features, tokenize


@dataclass(frozen=True)
class TextGroups:
    """R queries, each with one or more documents, of which the first one is the right one.

    Documents are padded to the length of the batch, queries at most to that of the longest query: a run compiles a
    program for each length, and not for each pair of lengths.
    """

    queries: Features
    """Its labels are the scores of the rows, [R] float32; None for rows without scores."""
    documents: ChoiceFeatures
    query_numbers: np.ndarray
    """[R] int32: the same number for the same text."""
    document_numbers: np.ndarray
    """[documents of all rows] int32: the same number for the same text."""
    longest_query: int
    """Most tokens that a query is padded to."""
    has_loss: bool = True
    """Whether the rows have what the loss needs."""

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def labels(self) -> np.ndarray | None:
        """The scores, or the numbers of the documents; None for rows without a loss."""
        if not self.has_loss:
            return None
        return self.document_numbers if self.queries.labels is None else self.queries.labels

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of the longest text of each row."""
        return np.maximum(self.queries.lengths, self.documents.lengths)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """The given rows, padded to T = ``length`` tokens of each of C documents and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, Q] int32 of the queries; document_ids, document_types,
          document_mask [B, C, T] int32; query_numbers [B] and document_numbers [B, C] int32, -1 for a document that a
          row lacks; labels [B] float32, the scores, 0 where there are none; weights [B] float32, 1 for a row asked for.
        """
        rows = np.asarray(rows)
        used = slice(0, len(rows))
        batch = self.queries.batch(rows, min(length, self.longest_query), batch_size)
        documents = self.documents.batch(rows, length, batch_size)
        query_numbers = np.full(batch_size, -1, np.int32)
        query_numbers[used] = self.query_numbers[rows]
        has = documents["choice_mask"][used] > 0
        places = self.documents.offsets[rows][:, None] + np.arange(has.shape[1])
        document_numbers = np.full((batch_size, has.shape[1]), -1, np.int32)
        document_numbers[used][has] = self.document_numbers[places[has]]
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
        """Of the tokens and the scores."""
        return self.queries.digest() + self.documents.digest()


def tokenize_groups(
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[Sequence[str]],
    scores: np.ndarray | None,
    max_length: int,
    buckets: Sequence[int],
    has_loss: bool = True,
) -> TextGroups:
    """Queries and their documents as rows.

    Args:
      queries: R texts.
      documents: one or more for each.
      scores: [R] float32, or None.
      max_length: most tokens of a text, special ones included.
      buckets: lengths that batches are padded to.
    """
    flat = [text for texts in documents for text in texts]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    rows = tokenize(tokenizer, queries, max_length, scores)
    longest = bucket_length(int(rows.lengths.max(initial=0)), buckets, max_length)
    return TextGroups(
        rows,
        ChoiceFeatures(tokenize(tokenizer, flat, max_length), offsets, None),
        number_texts(queries),
        number_texts(flat),
        longest,
        has_loss,
    )


def number_texts(texts: Sequence[str]) -> np.ndarray:
    """[texts] int32: the same number for the same text, in the order in which they first come."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
