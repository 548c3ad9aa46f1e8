"""Which rows of a fine-tuning task go into which batch: pure functions of lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from bert.config import FinetuneConfig
from bert.data.features import Rows

BATCHES_A_WINDOW = 16
"""Rows are sorted by length within so many batches: enough to cut padding, too few to order the epoch."""


def bucket_length(length: int, buckets: Sequence[int], max_length: int) -> int:
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


def local_slice(batch: dict[str, np.ndarray], process: tuple[int, int]) -> dict[str, np.ndarray]:
    """The rows of this host, the index-th of count, in a batch of all."""
    index, count = process

    def share(array: np.ndarray) -> np.ndarray:
        rows = len(array) // count
        return array[index * rows : (index + 1) * rows]

    return {name: share(array) for name, array in batch.items()}


class FinetuningLoader:
    """Step -> its batch, padded to a bucket; the smaller batch at an epoch's end is filled with rows of no weight.

    Of several hosts, each has its own rows of it.
    """

    def __init__(
        self, features: Rows, config: FinetuneConfig, process: tuple[int, int], by_length: bool = True
    ) -> None:
        self._features, self._config, self._process = features, config, process
        self._lengths = features.lengths
        self._size = config.training.batch_size
        self.micro_batches = config.training.gradient_accumulation_steps
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: epoch_batches(self._lengths, self._size, config.seed, epoch, by_length)
        )

    def row_indices(self, step: int) -> np.ndarray:
        """[B] indices of this host's rows of a batch."""
        index, count = self._process
        share = self._size // count
        return self._all_rows(step)[index * share : (index + 1) * share]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rows, data = self._all_rows(step), self._config.data
        length = bucket_length(int(self._lengths[rows].max()), data.buckets, data.max_length)
        batch = {**self._features.batch(rows, length, self._size), "rows": np.arange(self._size, dtype=np.int32)}
        return local_slice(batch, self._process)

    def lengths(self, step: int) -> list[int]:
        """Padded lengths of the batches of the epoch to which a step belongs."""
        data, epoch = self._config.data, step // -(-len(self._features) // self._size)
        return [
            bucket_length(int(self._lengths[rows].max()), data.buckets, data.max_length) for rows in self._epoch(epoch)
        ]

    def _all_rows(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, -(-len(self._features) // self._size))
        return self._epoch(epoch)[index]
