"""Makes masked batches of the examples on disk, as a function of (seed, step, process). Uses only NumPy.

Loaders have no state to save: a resumed run requests the batch of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from bert.config import DataConfig
from bert.config.data import REPLACEMENT_KEYS
from bert.data.batching import host_slice
from bert.data.pretraining.input_formats import NEXT_ID
from bert.data.pretraining.masking import (
    MASKINGS,
    Masking,
    NextTokens,
    Predictions,
    philox_uint64,
    philox_uint64_of_rows,
)
from bert.data.pretraining.packing import EXAMPLE_LENGTH, packing_arrays
from bert.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Offsets that keep random streams apart: 64 bits of a Philox key are offset + seed, and seeds are below 2**32.
_ORDER, _MASKS, _HELD_OUT, _FROZEN = 1 << 40, 2 << 40, 3 << 40, 4 << 40

Batch = dict[str, np.ndarray]

MEMORY_TOKENS = "memory_tokens"
"""Number of tokens [B] before each row that are in its memory, in batches of rows that continue each other."""


def bits_of_static_masks(seed: int, rows: np.ndarray, words_per_row: int) -> np.ndarray:
    """Returns the random bits [R, W] of the masks of rows, by index, that are the same in each epoch."""
    return philox_uint64_of_rows((_FROZEN + seed, 0), rows, words_per_row)


class RowSource(Protocol):
    """Rows that can be read by index: `bert.data.pretraining.dataset.ShardReader`, or a substitute in tests."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class PretrainingLoader:
    """Batches of the training rows.

    Attributes:
        rows: the rows on disk.
        predictions: selects the predicted tokens and replaces them in the input.
        batch_size: rows B of a global batch.
        seed: seed of order and masks, below 2**32.
        process: (index, count) of this host, which reads its part of each batch (`host_slice`).
        static_masking: use the same masks in every epoch.
        first_step: step of the first batch, if an earlier phase made the batches before it.
        first_row: number of rows used by earlier phases.
    """

    rows: RowSource
    predictions: Predictions
    batch_size: int
    seed: int
    process: tuple[int, int] = (0, 1)
    static_masking: bool = False
    first_step: int = 0
    first_row: int = 0
    _permutation: Callable[[int], np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_permutation", lru_cache(maxsize=2)(self._draw_permutation))

    def batch(self, step: int) -> Batch:
        """Returns this host's rows of the batch of ``step``, counted from 0: the arrays of `masked_batch`.

        ``rows`` numbers the rows within the global batch, so that dropout does not depend on the device of a row.
        """
        chosen = self.row_indices(step)
        first = self._host_slice.start
        rows = self.rows.take(chosen)
        words_per_row = random_uint64s_per_row(self.predictions, rows)
        if self.static_masking:
            words = bits_of_static_masks(self.seed, chosen, words_per_row)
        else:
            words = philox_uint64((_MASKS + self.seed, step), first, len(chosen), words_per_row)
        return masked_batch(rows, self.predictions, words, first)

    def row_indices(self, step: int) -> np.ndarray:
        """Returns the indices of this host's rows of the batch of ``step``."""
        first = self.first_row + (step - self.first_step) * self.batch_size
        positions = np.arange(first, first + self.batch_size)[self._host_slice]
        epochs, within = np.divmod(positions, len(self.rows))
        chosen = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._permutation(int(epoch))[within[here]]
        return chosen

    @property
    def _host_slice(self) -> slice:
        return host_slice(self.batch_size, self.process)

    def _draw_permutation(self, epoch: int) -> np.ndarray:
        # Not Generator.permutation: NumPy guarantees a stable stream of raw words, but not stable Generator methods.
        return np.argsort(self._draw(epoch, len(self.rows)), kind="stable")

    def _draw(self, epoch: int, count: int) -> np.ndarray:
        """Returns the random words for the order of an epoch."""
        stream = np.random.Philox(key=np.array([_ORDER + self.seed, epoch], dtype=np.uint64))
        words: np.ndarray = stream.random_raw(count)
        return words


@dataclass(frozen=True)
class SegmentLoader(PretrainingLoader):
    """Batches in which each row continues the same row of the batch before, for segment recurrence.

    An epoch has S = rows // B steps. Row b of its step t is row (first + b S + t) mod rows of the data. The first row
    depends on seed and epoch, so that all rows are read in turn if B does not divide their number.

    Attributes:
        memory_length: M, the maximum number of tokens in the memory of a row.
    """

    memory_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) < self.batch_size:
            raise UserError(
                f"data.train has {len(self.rows):,} rows, but with model.memory_length each of the "
                f"{self.batch_size:,} rows of training.batch_size reads its own part of the text: use smaller batches"
            )

    def batch(self, step: int) -> Batch:
        before = (step - self.first_step) % self._steps_per_epoch
        memory = _memory_tokens(self.rows, self.row_indices(step), before, self.memory_length)
        return {**super().batch(step), MEMORY_TOKENS: memory}

    def row_indices(self, step: int) -> np.ndarray:
        epoch, within = divmod(step - self.first_step, self._steps_per_epoch)
        first = self._draw(epoch, 1)[0] % np.uint64(len(self.rows))
        places = np.arange(self.batch_size)[self._host_slice] * self._steps_per_epoch + within
        return (int(first) + places) % len(self.rows)

    @property
    def _steps_per_epoch(self) -> int:
        return len(self.rows) // self.batch_size


def _memory_tokens(rows: RowSource, indices: np.ndarray, before: int, memory_length: int) -> np.ndarray:
    """Returns the number of tokens [B] before each row that are in its memory, at most ``memory_length``.

    Args:
        before: number of batches with the rows before these.
    """
    joined, count, tokens = indices > 0, np.zeros(len(indices), np.int32), 0
    for distance in range(1, before + 1):
        earlier = rows.take(np.maximum(indices - distance, 0))
        joined = joined & (indices >= distance) & (earlier[NEXT_ID] >= 0)  # the next row of the file continues it
        count, tokens = count + joined * earlier["input_ids"].shape[1], tokens + earlier["input_ids"].shape[1]
        if tokens >= memory_length or not joined.any():
            break
    return np.minimum(count, memory_length).astype(np.int32)


def make_predictions(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Predictions:
    """Returns the predicted tokens of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    return NextTokens() if objective == "clm" else make_masking(config, tokenizer, objective)


def make_masking(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Masking:
    """Returns the masking of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    from bert.data.encoding import row_template
    from bert.tokenizer.library import special_ids
    from bert.tokenizer.vocabulary import embedding_rows, subword_ids

    special = special_ids(tokenizer)
    shares = {name: share for name in REPLACEMENT_KEYS if (share := getattr(config, name)) is not None}
    return MASKINGS[objective](
        vocab_size=embedding_rows(tokenizer),
        mask_id=special.mask,
        special_ids=special.all,
        max_predictions=config.predictions_per_row,
        prob=config.masked_lm_prob,
        continuing_ids=subword_ids(tokenizer) if config.whole_word_masking else (),
        third_type_id=special.cls if objective == "plm" and row_template(tokenizer).has_third_type else None,
        **shares,
    )


def random_uint64s_per_row(predictions: Predictions, rows: dict[str, np.ndarray]) -> int:
    """Returns the 64-bit random words per row, packed or not."""
    packed = rows.get(EXAMPLE_LENGTH)
    return predictions.uint64s_per_row(rows["input_ids"].shape[1], 1 if packed is None else packed.shape[1])


class HeldOutMemory(NamedTuple):
    """The memory of held-out rows.

    Attributes:
        max_tokens: maximum number of tokens in the memory of a row.
        num_rows: number of rows before a row on which its losses depend through the memory.
    """

    max_tokens: int
    num_rows: int


def held_out_batches(
    rows: RowSource,
    predictions: Predictions,
    batch_size: int,
    process: tuple[int, int] = (0, 1),
    memory: HeldOutMemory | None = None,
) -> Iterator[Batch]:
    """Yields this host's rows of every held-out batch, with masks that depend only on the row's index.

    Empty rows of weight 0 complete the batches, so that all batches have one shape and every row counts once.

    Args:
        memory: None for rows in the order of the file; otherwise each row continues the same row of the batch before,
            as in `SegmentLoader`. Up to ``num_rows`` batches of weight 0 come first, which fill the memory.
    """
    own, count = host_slice(batch_size, process), num_held_out_batches(len(rows), batch_size)
    within, across = (batch_size, 1) if memory is None else (1, count)
    num_before = num_held_out_batches(len(rows), batch_size, memory) - count
    for number in range(-num_before, count):
        chosen = number * within + np.arange(own.start, own.stop) * across
        is_row = (chosen >= 0) & (chosen < len(rows))
        some = np.where(is_row, chosen, 0)
        taken = rows.take(some)
        words = philox_uint64_of_rows((_HELD_OUT, 0), some, random_uint64s_per_row(predictions, taken))
        batch = masked_batch(taken, predictions, words, own.start)
        if memory is not None:
            batch[MEMORY_TOKENS] = _memory_tokens(rows, some, number + num_before, memory.max_tokens)
        for name, value in batch.items():
            if name != "rows":
                is_used = is_row & (number >= 0) if name.endswith("_weights") else is_row
                batch[name] = value * is_used.reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
        yield batch


def num_held_out_batches(num_rows: int, batch_size: int, memory: HeldOutMemory | None = None) -> int:
    """Returns the number of `held_out_batches`."""
    count = -(-num_rows // batch_size)
    return count if memory is None else count + min(memory.num_rows, (batch_size - 1) * count)


def masked_batch(rows: dict[str, np.ndarray], predictions: Predictions, words: np.ndarray, first_row: int) -> Batch:
    """Makes a pretraining batch of rows on disk, with an attention mask from the lengths, not the corrupted tokens.

    If the input format has a label, the batch has NAME_labels and NAME_weights, NAME being next_sentence or
    sentence_order: [B], or [B, K] if rows are packed. Packed batches also have the arrays of `packing_arrays`.
    """
    ids = rows["input_ids"]
    count, length = ids.shape
    position = np.arange(length, dtype=np.int32)
    mask = position < rows["length"][:, None]
    example_length = rows.get(EXAMPLE_LENGTH)
    if example_length is None:
        token_arrays = {"token_type_ids": mask & (position >= rows["segment_a_length"][:, None])}
        labelled = np.ones(count, bool)
    else:
        token_arrays = packing_arrays(example_length, rows["segment_a_length"], length)
        labelled = example_length > 0
    if predictions.third_type_id is not None:
        types = token_arrays["token_type_ids"]
        token_arrays["token_type_ids"] = np.where(mask & (ids == predictions.third_type_id), 2, types)
    batch = {
        **predictions.batch_arrays(rows, words),
        **{name: value.astype(np.int32) for name, value in token_arrays.items()},
        "attention_mask": mask.astype(np.int32),
        "rows": np.arange(first_row, first_row + count, dtype=np.int32),
    }
    for column, label in rows.items():
        if column.endswith("_label"):
            batch[f"{column}s"] = label.astype(np.int32)
            batch[f"{column.removesuffix('_label')}_weights"] = labelled.astype(np.float32)
    return batch
