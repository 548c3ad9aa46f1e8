"""Assigns rows to the batches of fine-tuning, by pure functions of lengths, seed and epoch, and batches to hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from bert.config import FinetuneConfig
from bert.data.rows import SCORE_MASK, Rows, row_sizes, token_arrays
from bert.data.windows import row_shape

MASKS = ("attention_mask", SCORE_MASK)
"""Arrays of a batch in which one of them is 1 for each token of a sequence."""

USUAL = 0.75
"""Share of batches in which a group fits its minimum length."""

SAMPLED_BATCHES = 100
"""Maximum number of batches from which minimum lengths are derived."""

BATCHES_A_WINDOW = 16
"""Number of batches within which rows are sorted by length: enough to save padding, too few to order an epoch."""


def bucket_length(length: int, buckets: Sequence[int], max_length: int) -> int:
    """Returns the smallest of ``buckets`` and ``max_length`` that holds ``length`` tokens."""
    if length > max_length:
        raise ValueError(f"{length} tokens exceed max_length {max_length}")
    return min((size for size in buckets if length <= size < max_length), default=max_length)


def epoch_batches(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, by_length: bool = True
) -> list[np.ndarray]:
    """Returns the row indices of each training batch of an epoch. Every row occurs once; the last batch may be smaller.

    Args:
      lengths: [R] tokens of each row.
      seed, epoch: key of the Philox stream from which everything is drawn.
      by_length: put rows of similar lengths into a batch, which saves padding, instead of a random sample.
    """
    permutation = _permutations(seed, epoch)
    order = permutation(len(lengths))
    # The remainder is split off before sorting, so that it is a random sample, not the longest rows of the last window.
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


def token_batches(
    padded_lengths: np.ndarray, batch_sizes: Mapping[int, int], seed: int, epoch: int
) -> list[np.ndarray]:
    """Returns the row indices of each training batch of an epoch whose batch size depends on the length of its rows.

    Every row occurs once. Rows of one length that do not fill a batch join the rows of the next length. All epochs
    therefore have the same number of batches, and at most one batch is smaller than its length allows.

    Args:
      padded_lengths: [R] length to which each row is padded.
      batch_sizes: padded length -> rows of a batch.
      seed, epoch: key of the Philox stream from which everything is drawn.
    """
    permutation = _permutations(seed, epoch)
    order = permutation(len(padded_lengths))
    batches: list[np.ndarray] = []
    left = order[:0]
    for length, size in sorted(batch_sizes.items()):
        rows = np.concatenate([left, order[padded_lengths[order] == length]])
        whole = len(rows) - len(rows) % size
        batches += list(rows[:whole].reshape(-1, size))
        left = rows[whole:]
    if len(left):
        batches.append(left)
    return [batches[number] for number in permutation(len(batches))]


def _permutations(seed: int, epoch: int) -> Callable[[int], np.ndarray]:
    """Returns a function that draws the next random permutation of n numbers."""
    stream = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    # Not Generator.permutation: NumPy guarantees a stable stream of raw words, but not stable Generator methods.
    return lambda n: np.argsort(stream.random_raw(n), kind="stable")


def evaluation_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Returns the row indices of each evaluation batch, shortest rows first. The last batch may be smaller."""
    order = np.argsort(lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def host_slice(batch_size: int, process: tuple[int, int]) -> slice:
    """Returns the rows of a global batch that a host reads: the part ``index`` of ``count`` parts of equal size."""
    index, count = process
    rows = batch_size // count
    return slice(index * rows, (index + 1) * rows)


def host_rows(batch: dict[str, np.ndarray], process: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns a host's rows of a global batch."""
    return {name: array[host_slice(len(array), process)] for name, array in batch.items()}


class TrainingBatches(Protocol):
    """The training batches of every epoch."""

    @property
    def mean_rows(self) -> float | None:
        """Mean number of rows of a batch; None if all batches but the last have the same number."""

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the row indices of each batch of an epoch."""

    def padded_rows(self, length: int) -> int:
        """Returns the number of rows B, fill rows included, of a batch padded to a length."""


@dataclass(frozen=True)
class RowBatches:
    """Batches of ``batch_size`` rows (`epoch_batches`).

    Attributes:
        lengths: [R] tokens of each row, over all its windows.
    """

    lengths: np.ndarray
    batch_size: int
    seed: int
    by_length: bool = True
    mean_rows: float | None = None

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        return epoch_batches(self.lengths, self.batch_size, self.seed, epoch, self.by_length)

    def padded_rows(self, length: int) -> int:
        return self.batch_size


@dataclass(frozen=True)
class TokenBatches:
    """Batches with as many rows as their padded length allows (`token_batches`).

    Fill rows make the size of a batch a multiple of ``multiple``, the number of devices times micro-batches.
    """

    padded_lengths: np.ndarray
    batch_sizes: Mapping[int, int]
    seed: int
    multiple: int

    def __len__(self) -> int:
        return self._batches_per_epoch

    @cached_property
    def _batches_per_epoch(self) -> int:
        return len(self.epoch(0))

    @property
    def mean_rows(self) -> float | None:
        return len(self.padded_lengths) / len(self)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        return token_batches(self.padded_lengths, self.batch_sizes, self.seed, epoch)

    def padded_rows(self, length: int) -> int:
        return -(-self.batch_sizes[length] // self.multiple) * self.multiple


def make_batches(rows: Rows, config: FinetuneConfig, row_shares: int, by_length: bool) -> TrainingBatches:
    """Returns the training batches of a configuration.

    Args:
      row_shares: number of shares into which the devices divide the rows of a batch.
      by_length: see `epoch_batches`; batches sized by tokens always have rows of similar lengths.
    """
    training, data = config.training, config.data
    if training.tokens_per_batch is None:
        return RowBatches(row_sizes(rows), training.batch_size, config.seed, by_length)
    sequences = math.prod(row_shape(rows))  # a row with choices occupies several rows
    lengths, length_of_row = np.unique(rows.lengths, return_inverse=True)
    padded = [bucket_length(int(length), data.buckets, data.max_length) for length in lengths]
    sizes = {length: max(training.tokens_per_batch // (length * sequences), 1) for length in padded}
    multiple = row_shares * training.gradient_accumulation_steps
    return TokenBatches(np.array(padded)[length_of_row], sizes, config.seed, multiple)


@dataclass(frozen=True)
class LengthGroups:
    """Divides a batch into groups of similar lengths, which are padded separately.

    A batch whose rows are a random sample has rows of all lengths. The groups depend only on the global batch, not on
    the devices.

    Attributes:
        buckets, max_length: see `bucket_length`.
        multiple: the size of a group is a multiple of it: devices times micro-batches.
        by_rows: whether groups have whole rows, for losses that are sums over rows; otherwise single sequences.
        min_lengths: minimum padded length of each group, shortest first.
    """

    buckets: Sequence[int]
    max_length: int
    multiple: int
    by_rows: bool
    min_lengths: tuple[int, ...]

    def usual_for(self, batches: Iterable[np.ndarray]) -> LengthGroups:
        """Returns groups with the same padded lengths for most batches, so that few programs are compiled.

        Args:
          batches: the lengths in each of some batches.
        """
        longest = [[lengths[part].max(initial=1) for part in self._parts(lengths)] for lengths in batches]
        usual = np.quantile(longest, USUAL, axis=0, method="higher")
        lengths = tuple(bucket_length(int(length), self.buckets, self.max_length) for length in usual)
        return dataclasses.replace(self, min_lengths=lengths)

    def groups(self, lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Returns the padded length and the indices of each group. Groups of the same padded length are joined.

        Indices that fill a group to the multiple are ``len(lengths)``.
        """
        groups: list[tuple[int, np.ndarray]] = []
        for least, part in zip(self.min_lengths, self._parts(lengths), strict=True):
            padded = max(least, bucket_length(int(lengths[part].max(initial=1)), self.buckets, self.max_length))
            if groups and groups[-1][0] == padded:
                groups[-1] = padded, np.concatenate([groups[-1][1], part])
            elif len(part):
                groups.append((padded, part))
        return [(padded, self._fill(indices, len(lengths))) for padded, indices in groups]

    def _parts(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Returns the indices of parts of about equal size, shortest rows or sequences first."""
        return np.array_split(np.argsort(lengths, kind="stable"), len(self.min_lengths))

    def _fill(self, indices: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([indices, np.full(-len(indices) % self.multiple, fill)])

    def divide_sequences(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a batch with groups in place of its arrays of tokens [B, ..., T].

        Sequence s of N is the one with index s along the axes [B, ...]. Sequences that only fill a row have one token.

        Returns:
          The other arrays of the batch, and for each group g of M sequences: input_ids_g, token_type_ids_g,
          attention_mask_g [M, T_g] int32 and sequences_g [M] int32, the numbers s. Sequences that fill a group have the
          number N. If the batch has score_mask, there is score_mask_g.
        """
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in token_arrays(batch)}
        lengths = sequence_lengths(batch)
        is_token = np.arange(flat["input_ids"].shape[1]) < lengths[:, None]
        flat |= {name: flat[name] * is_token for name in MASKS if name in flat}
        flat["attention_mask"][:, 0] = 1  # attention needs a token, also in fill rows
        divided = {name: array for name, array in batch.items() if name not in flat}
        for group, (padded, sequences) in enumerate(self.groups(lengths)):
            copied = np.where(sequences < len(lengths), sequences, sequences[0])
            divided |= {f"{name}_{group}": array[copied, :padded] for name, array in flat.items()}
            divided[f"sequences_{group}"] = sequences.astype(np.int32)
        return divided

    def divide_rows(self, features: Rows, rows: np.ndarray, batch_size: int) -> dict[str, np.ndarray]:
        """Returns a batch of groups of whole rows.

        Returns:
          ``rows`` [B], and the arrays of `Rows.batch` of each group g, padded to its length, as NAME_g; rows_g are the
          indices in the batch, at least the number of rows for fill rows.
        """
        lengths = row_lengths(features, rows, batch_size)
        divided = {"rows": np.arange(batch_size, dtype=np.int32)}
        for group, (padded, indices) in enumerate(self.groups(lengths)):
            indices = np.sort(indices)  # fill rows last
            batch = features.batch(rows[indices[indices < len(rows)]], padded, len(indices))
            batch["rows"] = indices.astype(np.int32)
            divided |= {f"{name}_{group}": array for name, array in batch.items()}
        return divided


def row_lengths(features: Rows, rows: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns the length of each row of a batch [B], 1 for fill rows."""
    lengths = np.ones(batch_size, np.int64)
    lengths[: len(rows)] = features.lengths[rows]
    return lengths


def sequence_lengths(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the length of each sequence of a batch [N], 1 for those that only fill a row."""
    mask = np.any([batch[name] > 0 for name in MASKS if name in batch], axis=0)
    is_real = np.ones(mask.shape[:-1], bool)
    is_real[batch["weights"] == 0] = False
    if "document_numbers" in batch:
        is_real[:, 1:][batch["document_numbers"] < 0] = False
    if "window_mask" in batch:
        is_real &= batch["window_mask"] > 0
    return np.where(is_real, mask.sum(axis=-1), 1).ravel()


class FinetuningLoader:
    """Makes the batch of a step: this host's rows, padded to a bucket, and fill rows of weight 0.

    Batches with different numbers of rows also have ``mean_rows`` [B], whose sum over the global batch is the mean
    number of rows.

    Args:
        process: index and number of the hosts.
        groups: None for batches in one piece. Minimum lengths are derived from the batches.
        flops_ramp_steps: number of steps over which the weight of the FLOPS regularizer grows quadratically (Formal et
            al. 2021), as its share ``flops_ramp`` [B] in each batch; None for no such array.
    """

    def __init__(
        self,
        features: Rows,
        config: FinetuneConfig,
        process: tuple[int, int],
        batches: TrainingBatches,
        groups: LengthGroups | None = None,
        flops_ramp_steps: int | None = None,
    ) -> None:
        self._features, self._config, self._process, self._batches = features, config, process, batches
        self._flops_ramp_steps = flops_ramp_steps
        self.steps_per_epoch = len(batches)
        self._epoch = lru_cache(maxsize=2)(batches.epoch)
        self._groups: LengthGroups | None = groups
        if groups is not None:
            sample = map(self._all_rows, range(min(self.steps_per_epoch, SAMPLED_BATCHES)))
            self._groups = groups.usual_for(self._lengths(rows, groups.by_rows) for rows in sample)

    def row_indices(self, step: int) -> np.ndarray:
        """Returns the indices of this host's rows of a batch, or of all rows of a batch in groups; no fill rows."""
        rows = self._all_rows(step)
        return rows if self._groups else rows[host_slice(self._size(rows), self._process)]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rows = self._all_rows(step)
        if self._groups is None:
            batch = self._padded(rows, self._padded_length(rows))
        elif self._groups.by_rows:
            batch = self._groups.divide_rows(self._features, rows, self._size(rows))
        else:
            length = max(self._padded_length(rows), *self._groups.min_lengths)
            batch = self._groups.divide_sequences(self._padded(rows, length))
        if self._flops_ramp_steps is not None:
            share = min(step / max(self._flops_ramp_steps, 1), 1.0) ** 2
            batch["flops_ramp"] = np.full(self._size(rows), share, np.float32)
        return host_rows(batch, self._process)

    def _padded(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Returns the global batch in one piece."""
        size = self._size(rows)
        batch = self._features.batch(rows, length, size)
        batch["rows"] = np.arange(size, dtype=np.int32)
        if self._batches.mean_rows is not None:
            batch["mean_rows"] = np.full(size, self._batches.mean_rows / size, np.float32)
        return batch

    def _size(self, rows: np.ndarray) -> int:
        """Returns the number of rows of a global batch, fill rows included."""
        return self._batches.padded_rows(self._padded_length(rows))

    def _lengths(self, rows: np.ndarray, by_rows: bool) -> np.ndarray:
        """Returns the lengths by which a batch is divided."""
        if by_rows:
            return row_lengths(self._features, rows, self._size(rows))
        return sequence_lengths(self._padded(rows, self._padded_length(rows)))

    def memory_key(self, step: int) -> tuple[int, int]:
        """Returns a sort key: steps whose batches need more memory have larger keys.

        A batch in one piece is compared by its largest row with its windows, and a batch in groups, or packed, by its
        number of tokens. Equal batches are compared by the padded length of their rows.
        """
        rows = self._all_rows(step)
        sizes, length = row_sizes(self._features)[rows], self._padded_length(rows)
        return int(sizes.sum()) if self._groups else max(length, int(sizes.max())), length

    def _padded_length(self, rows: np.ndarray) -> int:
        data, length = self._config.data, int(self._features.lengths[rows].max())
        return bucket_length(length, data.buckets, data.max_length)

    def _all_rows(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[index]
