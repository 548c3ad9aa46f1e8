"""Which rows of a fine-tuning task go into which batch: pure functions of lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BATCHES_A_WINDOW = 16
"""Rows are sorted by length within so many batches: enough to cut padding, too few to order the epoch."""


def bucket(length: int, buckets: Sequence[int], max_length: int) -> int:
    """The smallest of ``buckets`` that holds ``length`` tokens; ``max_length`` is the largest."""
    if length > max_length:
        raise ValueError(f"{length} tokens are more than max_length {max_length}")
    return min((size for size in buckets if length <= size < max_length), default=max_length)


def epoch_batches(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, by_length: bool = True
) -> list[np.ndarray]:
    """Row numbers of each training batch of an epoch: every row once, the last batch smaller if rows run out.

    Args:
      lengths: [R] tokens of each row.
      seed, epoch: the key of the Philox stream that everything is drawn from.
      by_length: rows of a batch have similar lengths, which saves padding; otherwise they are a random sample.
    """
    stream = np.random.Philox(key=np.array([seed, epoch], np.uint64))

    def permutation(n: int) -> np.ndarray:
        # Not Generator.permutation: NumPy promises the raw words for ever, not what its generators make of them.
        return np.argsort(stream.random_raw(n), kind="stable")

    order = permutation(len(lengths))
    # The remainder is taken before any sorting: a random sample, not the longest rows of the last window.
    whole = len(order) - len(order) % batch_size
    batches: list[np.ndarray] = []
    for start in range(0, whole, BATCHES_A_WINDOW * batch_size):
        window = order[start : min(start + BATCHES_A_WINDOW * batch_size, whole)]
        if by_length:
            window = window[np.argsort(lengths[window], kind="stable")]
        window = window.reshape(-1, batch_size)
        batches += list(window[permutation(len(window))])
    if whole < len(order):
        batches.append(order[whole:])
    return batches


def evaluation_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Row numbers of each evaluation batch, shortest rows first: every row once, the last may be smaller."""
    order = np.argsort(lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
