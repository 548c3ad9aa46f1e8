"""Tokenized rows of a fine-tuning task, and the padded batches made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

TOKEN_ARRAYS = ("input_ids", "token_type_ids", "attention_mask")
"""Arrays of a batch with an axis of tokens, the last one."""

SCORE_MASK = "score_mask"
"""Array of a batch [..., T] in which 1 marks tokens with a vector, in rows with a vector per token."""

IGNORE_INDEX = -1
"""Label of tokens without a label: special tokens, padding, and all tokens of a word but the first."""


@dataclass(frozen=True)
class TokenRows:
    """R rows of different lengths, concatenated."""

    ids: np.ndarray
    """[tokens of all rows] int32, special tokens included."""
    offsets: np.ndarray
    """[R + 1] int64: row r is ids[offsets[r] : offsets[r + 1]]."""
    segment_a_lengths: np.ndarray
    """[R] int32: tokens of type 0 in a row; the rest has type 1. In BERT's rows type 0 is segment A with [CLS] and
    its [SEP]; in RoBERTa's rows all tokens have type 0."""
    labels: np.ndarray | None
    """[R, ...]: [R] int32 labels, [R] float32 scores, [R, 2] int32 positions of an answer; or, with ``token_labels``,
    [tokens of all rows] int32, a label or IGNORE_INDEX per token. None if the split has no labels."""
    pad_token_id: int = 0
    token_labels: bool = False
    """If true, there is a label per token instead of one per row."""
    has_third_type: bool = False
    """If true, the last token of each row has type 2, like XLNet's <cls>."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row. Cached, because every batch reads it and there may be millions of rows."""
        return np.diff(self.offsets)

    @property
    def input_numbers(self) -> np.ndarray:
        """[R] index of the input of each row; several rows of a long input have the same one."""
        return np.arange(len(self))

    @property
    def can_be_packed(self) -> bool:
        """Whether all tokens of a row attend to each other, so that rows may share a row of a batch."""
        return True

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, padded to T = ``length`` tokens and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, T] int32; labels [B, ...], or [B, T] for tokens (0 in fill rows,
          IGNORE_INDEX for tokens without a label; zeros [B] without labels); weights [B] float32, 0 for fill rows.
        """
        rows = np.asarray(rows)
        lengths = self.lengths[rows]
        max_length = lengths.max(initial=0)
        if len(rows) > batch_size or max_length > length:
            raise ValueError(
                f"{len(rows)} rows of up to {max_length} tokens do not fit a batch [{batch_size}, {length}]"
            )
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
        types = (real & (columns >= segment_a)).astype(np.int32)
        if self.has_third_type:
            types[used][columns == lengths[:, None] - 1] = 2
        return {
            "input_ids": input_ids,
            "token_type_ids": types,
            "attention_mask": real.astype(np.int32),
            "labels": labels,
            "weights": weights,
        }

    def digest(self) -> str:
        """Returns a hash of the tokens and labels."""
        return digest_of(self.ids, self.offsets, self.segment_a_lengths, self.labels)


@dataclass(frozen=True)
class ChoiceRows:
    """R rows of two or more choices each; each choice is a sequence."""

    sequences: Rows
    """The choices of all rows, concatenated, without labels: `TokenRows`, or `bert.data.windows.WindowedRows`."""
    offsets: np.ndarray
    """[R + 1] int64: the choices of row r are the sequences offsets[r] to offsets[r + 1] - 1."""
    labels: np.ndarray | None
    """[R] int32, index of the right choice within its row; or [choices of all rows] float32, the grade of each choice;
    None if the split has no labels."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of the longest choice of each row."""
        return np.maximum.reduceat(self.sequences.lengths, self.offsets[:-1])

    @property
    def sizes(self) -> np.ndarray:
        """[R] number of tokens of the choice that occupies most of a training batch."""
        return np.maximum.reduceat(row_sizes(self.sequences), self.offsets[:-1])

    @cached_property
    def choices(self) -> np.ndarray:
        """[R] number of choices of each row."""
        return np.diff(self.offsets)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, padded to C = the maximum of choices, T = ``length`` and B = ``batch_size``.

        Returns:
          input_ids, token_type_ids, attention_mask [B, C, T] int32; choice_mask [B, C] int32, 0 for choices that only
          fill a row; labels [B] int32, or grades [B, C] float32 (0 without labels); weights [B] float32, 0 for fill
          rows. A filled choice copies the first one of its row, a fill row copies the first row, because attention
          needs at least one token. If choices have W windows, the arrays are [B, C, W, T] and [B, C, W]
          (`WindowedRows.batch`).
        """
        rows = np.asarray(rows)
        if len(rows) > batch_size:
            raise ValueError(f"{len(rows)} rows do not fit a batch of {batch_size}")
        filled = fill_rows(rows, batch_size)
        columns = np.arange(self.choices.max())
        has = columns < self.choices[filled][:, None]
        sequence = self.offsets[filled][:, None] + np.where(has, columns, 0)
        flat = self.sequences.batch(sequence.ravel(), length, sequence.size)
        names = [name for name in flat if name not in ("labels", "weights")]
        labels = np.zeros(batch_size, np.int32)
        if self.labels is not None and self.labels.dtype == np.float32:
            labels = np.where(has, self.labels[sequence], np.float32(0))
        elif self.labels is not None:
            labels[: len(rows)] = self.labels[rows]
        return {
            **{name: flat[name].reshape(*has.shape, *flat[name].shape[1:]) for name in names},
            "choice_mask": has.astype(np.int32),
            "labels": labels,
            "weights": (np.arange(batch_size) < len(rows)).astype(np.float32),
        }

    def digest(self) -> str:
        """Returns a hash of the tokens, choices and labels."""
        return digest_of(np.frombuffer(self.sequences.digest().encode(), np.uint8), self.offsets, self.labels)


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


@dataclass(frozen=True)
class QueryDocumentRows:
    """R queries, each with one or more documents; the first document is the right one."""

    queries: Rows
    """`TokenRows`, or `bert.data.windows.WindowedRows`. Labels are the scores of the rows, [R] float32, or None."""
    documents: ChoiceRows
    query_numbers: np.ndarray
    """[R] int32: equal texts have equal numbers."""
    document_numbers: np.ndarray
    """[documents of all rows] int32: equal texts have equal numbers."""
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

    @property
    def sizes(self) -> np.ndarray:
        """[R] number of tokens of the text that occupies most of a training batch."""
        return np.maximum(row_sizes(self.queries), self.documents.sizes)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, with C documents, padded to T = ``length`` and B = ``batch_size`` rows.

        Returns:
          input_ids, token_type_ids, attention_mask [B, 1 + C, T] int32 of the query and the documents; query_numbers
          [B] and document_numbers [B, C] int32, -1 for documents that only fill a row; labels [B] float32, the scores
          or 0; weights [B] float32, 0 for fill rows. If texts have W windows, the arrays of tokens are
          [B, 1 + C, W, T], and there is window_mask [B, 1 + C, W] (`WindowedRows.batch`). If texts have a vector per
          token, there is score_mask [B, 1 + C, T].
        """
        rows = np.asarray(rows)
        used = slice(0, len(rows))
        batch = self.queries.batch(rows, length, batch_size)
        documents = self.documents.batch(rows, length, batch_size)
        query_numbers = np.full(batch_size, -1, np.int32)
        query_numbers[used] = self.query_numbers[rows]
        has = documents["choice_mask"][used] > 0
        indices = self.documents.offsets[rows][:, None] + np.arange(has.shape[1])
        document_numbers = np.full((batch_size, has.shape[1]), -1, np.int32)
        document_numbers[used][has] = self.document_numbers[indices[has]]
        return {
            **_join_texts(
                {name: batch[name][:, None] for name in (*token_arrays(batch), "window_mask") if name in batch},
                {name: documents[name] for name in (*token_arrays(documents), "window_mask") if name in documents},
            ),
            "labels": batch["labels"].astype(np.float32),
            "weights": batch["weights"],
            "query_numbers": query_numbers,
            "document_numbers": document_numbers,
        }

    def digest(self) -> str:
        """Returns a hash of the tokens and scores."""
        return self.queries.digest() + self.documents.digest()

    def join(self, queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the vectors [D] of each row's query and documents, concatenated. Missing documents are zero.

        If texts have a vector per token, [T_i, E], it returns arrays [1 + C_i, T, E], padded with zeros.
        """
        choices = self.documents.choices
        if len(queries) and np.ndim(queries[0]) == 2:
            ends = self.documents.offsets
            pairs = zip(queries, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
            return [pad_and_stack([query, *documents[start:end]]) for query, start, end in pairs]
        texts = np.zeros((len(self), 1 + choices.max(), np.shape(queries)[-1]), np.float32)
        texts[:, 0] = queries
        texts[:, 1:][np.arange(texts.shape[1] - 1) < choices[:, None]] = documents
        return list(texts.reshape(len(texts), -1))


def _join_texts(queries: dict[str, np.ndarray], documents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins the tokens of queries [B, 1, T] and documents [B, C, T], or [B, 1, W, T] and [B, C, W, T] with windows."""
    sides, names = [queries, documents], list(token_arrays(queries))
    width = max(side["window_mask"].shape[-1] if "window_mask" in side else 0 for side in sides)
    if width:
        sides, names = [_with_windows(side, width) for side in sides], [*names, "window_mask"]
    return {name: np.concatenate([side[name] for side in sides], axis=1) for name in names}


def _with_windows(texts: dict[str, np.ndarray], width: int) -> dict[str, np.ndarray]:
    """Returns texts with ``width`` windows each; the added ones copy the last one and have a ``window_mask`` of 0."""
    if "window_mask" not in texts:
        texts = {name: texts[name][:, :, None] for name in TOKEN_ARRAYS}
        texts["window_mask"] = np.ones(texts["input_ids"].shape[:3], np.int32)
    count = texts["window_mask"].shape[-1]
    wider = {name: array[:, :, np.minimum(np.arange(width), count - 1)] for name, array in texts.items()}
    wider["window_mask"] *= np.arange(width) < count
    return wider


def token_arrays(batch: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names of the arrays of a batch with an axis of tokens."""
    return (*TOKEN_ARRAYS, SCORE_MASK) if SCORE_MASK in batch else TOKEN_ARRAYS


def number_texts(texts: Sequence[str]) -> np.ndarray:
    """Numbers texts in order of first occurrence, int32 [texts]; equal texts have equal numbers."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)


def pad_and_stack(arrays: Sequence[np.ndarray], empty: Sequence[int] = (0,)) -> np.ndarray:
    """Stacks R arrays [T_r, ...], padded with zeros to the longest; returns [0, *empty] without arrays."""
    if not len(arrays):
        return np.zeros((0, *empty), np.float32)
    stacked = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def digest_of(*arrays: np.ndarray | None) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def fill_rows(rows: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns rows and copies of the first one, or row 0 if there are none, [B] in all."""
    first = int(rows[0]) if len(rows) else 0
    return np.concatenate([rows, np.full(batch_size - len(rows), first)]).astype(np.int64)


def row_sizes(rows: Rows) -> np.ndarray:
    """Returns [R] the number of tokens that each row occupies in a training batch; without windows, its length."""
    sizes: np.ndarray = getattr(rows, "sizes", rows.lengths)
    return sizes


class Rows(Protocol):
    """R rows for the model: `bert.data.rows.TokenRows`, `ChoiceRows`, or the rows of a task."""

    @property
    def labels(self) -> np.ndarray | None:
        """The labels that the task's loss needs; None if the rows have none, and then no loss is computed."""

    @property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of each row, which determines its bucket."""

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, padded to T = ``length`` and B = ``batch_size``.

        It has ``input_ids``, ``token_type_ids``, ``attention_mask`` ([B, T], or [B, C, T] with choices), the ``labels``
        that the task's loss needs, and ``weights`` [B], 0 for fill rows.
        """

    def digest(self) -> str:
        """Returns a hash of the tokens and labels, with which a run checks on resume that its data is the same."""
