"""Texts that are read through windows: a text's windows share a batch, and their outputs are pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bert.data.rows import QueryDocumentRows, Rows, TokenRows, digest_of, fill_rows


@dataclass(frozen=True, kw_only=True)
class TextWindows(TokenRows):
    """N windows over texts as rows, in the order of the texts and without labels."""

    texts: np.ndarray
    """[N] index of the text of each window."""

    @property
    def input_numbers(self) -> np.ndarray:
        return self.texts


@dataclass(frozen=True)
class WindowedRows:
    """R texts, which are read through one or more windows each. The outputs of a text's windows are pooled."""

    windows: TextWindows
    offsets: np.ndarray
    """[R + 1] int64: the windows of text r are offsets[r] to offsets[r + 1] - 1."""
    labels: np.ndarray | None
    """[R, ...], as in `TokenRows`; None if the split has no labels."""
    max_train_windows: int
    """Maximum number of windows of a text in a training batch."""
    maximum: bool = False
    """Whether the output of a text is the maximum of its windows' outputs, per feature, instead of their mean."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of the longest window of each text."""
        return np.maximum.reduceat(self.windows.lengths, self.offsets[:-1])

    @cached_property
    def counts(self) -> np.ndarray:
        """[R] number of windows of each text."""
        return np.diff(self.offsets)

    @cached_property
    def train_counts(self) -> np.ndarray:
        """[R] number of windows of each text in a training batch."""
        return np.minimum(self.counts, self.max_train_windows)

    @property
    def sizes(self) -> np.ndarray:
        """[R] number of tokens that each text occupies in a training batch."""
        return self.lengths * self.train_counts

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the training batch of some texts, padded to T = ``length`` tokens and B = ``batch_size`` rows.

        W is the smallest power of two that holds the windows of every text, at most ``max_train_windows``. A text with
        more windows contributes that many, from the first to the last at equal distances.

        Returns:
          The arrays of `TokenRows.batch`. If W exceeds 1, input_ids, token_type_ids and attention_mask are [B, W, T],
          and there is window_mask [B, W] int32, 0 for windows that only fill a row and copy its first window.
        """
        rows = np.asarray(rows)
        filled = fill_rows(rows, batch_size)
        used, total = self.train_counts[filled], self.counts[filled]
        width = min(1 << int(used.max() - 1).bit_length(), self.max_train_windows)
        columns = np.arange(width)
        has = columns < used[:, None]
        gaps = np.maximum(used - 1, 1)[:, None]
        spread = (2 * columns * (total[:, None] - 1) + gaps) // (2 * gaps)  # rounded to the nearest window
        windows = self.offsets[filled][:, None] + np.where(has, spread, 0)
        batch = self.windows.batch(windows.ravel(), length, windows.size)
        weights = (np.arange(batch_size) < len(rows)).astype(np.float32)
        labels = np.zeros(batch_size, np.int32)
        if self.labels is not None:
            labels = np.zeros((batch_size, *self.labels.shape[1:]), self.labels.dtype)
            labels[: len(rows)] = self.labels[rows]
        if width > 1:
            names = ("input_ids", "token_type_ids", "attention_mask")
            batch |= {name: batch[name].reshape(*has.shape, length) for name in names}
            batch["window_mask"] = has.astype(np.int32)
        return {**batch, "labels": labels, "weights": weights}

    def pool(self, outputs: Sequence[np.ndarray], normalize: bool = False) -> list[np.ndarray]:
        """Returns the mean or maximum of the outputs of each text's windows; one window's output is unchanged.

        Args:
          outputs: N arrays [L].
          normalize: scale the outputs to length 1 first.
        """
        stacked = np.asarray(outputs)
        if normalize:
            scaled = stacked / np.maximum(np.linalg.norm(stacked, axis=-1, keepdims=True), 1e-12)
            stacked = np.where((self.counts > 1)[self.windows.texts, None], scaled, stacked)
        if self.maximum:
            return list(np.maximum.reduceat(stacked, self.offsets[:-1]))
        return list(np.add.reduceat(stacked, self.offsets[:-1]) / self.counts[:, None].astype(stacked.dtype))

    def digest(self) -> str:
        """Returns a hash of the tokens, windows and labels."""
        return digest_of(np.frombuffer(self.windows.digest().encode(), np.uint8), self.offsets, self.labels)


def windowed_parts(rows: Rows) -> list[WindowedRows]:
    """Returns the texts among the rows that are read through windows; [] if there are none."""
    parts = [rows.queries, rows.documents.sequences] if isinstance(rows, QueryDocumentRows) else [rows]
    return [part for part in parts if isinstance(part, WindowedRows)]


def outputs_of_texts(
    rows: Rows, compute: Callable[[TokenRows], Sequence[np.ndarray]], normalize: bool = False
) -> Sequence[np.ndarray]:
    """Computes the outputs of rows from the outputs of their windows or texts.

    Args:
      compute: rows without windows -> one array [L] per row.
      normalize: see `WindowedRows.pool`.
    """
    if isinstance(rows, WindowedRows):
        return rows.pool(compute(rows.windows), normalize)
    if isinstance(rows, QueryDocumentRows):
        parts = (rows.queries, rows.documents.sequences)
        return rows.join(*(outputs_of_texts(part, compute, normalize) for part in parts))
    if not isinstance(rows, TokenRows):
        raise TypeError(f"{type(rows).__name__} has no outputs of single texts")
    return compute(rows)


def row_shape(rows: Rows) -> tuple[int, ...]:
    """Returns the shape of one row of the model's input without its length: (1,), or (1, C) with choices."""
    if isinstance(rows, QueryDocumentRows):  # whose texts are rows of the model
        rows = rows.queries
    batch = rows.batch(np.arange(1), int(rows.lengths[0]), 1)
    return batch["input_ids"].shape[: -2 if "window_mask" in batch else -1]
