"""Makes masked batches of the examples on disk, as a function of (seed, step, process). Uses only NumPy.

Loaders have no state to save: a resumed run requests the batch of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bert.config import DataConfig
from bert.config.data import OF_REPLACEMENTS
from bert.data.batching import host_slice
from bert.data.pretraining.masking import (
    MASKINGS,
    Masking,
    NextTokens,
    Predictions,
    philox_uint64,
    philox_uint64_of_rows,
)
from bert.data.pretraining.packing import EXAMPLE_LENGTH, packing_arrays

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Offsets that keep random streams apart: 64 bits of a Philox key are offset + seed, and seeds are below 2**32.
_ORDER, _MASKS, _HELD_OUT, _FROZEN = 1 << 40, 2 << 40, 3 << 40, 4 << 40

Batch = dict[str, np.ndarray]


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
            words = philox_uint64_of_rows((_FROZEN + self.seed, 0), chosen, words_per_row)
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
        stream = np.random.Philox(key=np.array([_ORDER + self.seed, epoch], dtype=np.uint64))
        # Not Generator.permutation: NumPy guarantees a stable stream of raw words, but not stable Generator methods.
        return np.argsort(stream.random_raw(len(self.rows)), kind="stable")


def make_predictions(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Predictions:
    """Returns the predicted tokens of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    return NextTokens() if objective == "clm" else make_masking(config, tokenizer, objective)


def make_masking(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Masking:
    """Returns the masking of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    from bert.data.encoding import row_template
    from bert.tokenizer.library import special_ids
    from bert.tokenizer.vocabulary import embedding_rows, subword_ids

    special = special_ids(tokenizer)
    shares = {name: share for name in OF_REPLACEMENTS if (share := getattr(config, name)) is not None}
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


def held_out_batches(
    rows: RowSource, predictions: Predictions, batch_size: int, process: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Yields this host's rows of every held-out batch, with masks that depend only on the row's index.

    Empty rows of weight 0 complete the last batch, so that all batches have one shape and every row counts once.
    """
    own = host_slice(batch_size, process)
    for start in range(0, len(rows), batch_size):
        chosen = np.arange(start + own.start, min(start + own.stop, len(rows)))
        some = chosen if len(chosen) else np.zeros(1, dtype=np.int64)
        taken = rows.take(some)
        words = philox_uint64((_HELD_OUT, 0), int(some[0]), len(some), random_uint64s_per_row(predictions, taken))
        batch = masked_batch(taken, predictions, words, own.start)
        local = own.stop - own.start
        if len(chosen) < local:
            real, missing = slice(0, len(chosen)), local - len(chosen)
            batch = {
                name: np.concatenate([value[real], np.zeros((missing, *value.shape[1:]), value.dtype)])
                for name, value in batch.items()
            }
        yield batch


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
