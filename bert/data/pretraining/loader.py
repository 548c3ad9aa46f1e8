"""Examples on disk -> masked batches, as a function of (seed, step, process). NumPy only.

Nothing here has a state worth saving: a run resumes by asking for the next step's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bert.config import DataConfig
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

# Streams of randomness that must never meet: the first 64 bits of a Philox key. Seeds are below 2**32.
_ORDER, _MASKS, _HELD_OUT, _FROZEN = 1 << 40, 2 << 40, 3 << 40, 4 << 40

Batch = dict[str, np.ndarray]


class RowSource(Protocol):
    """Rows that can be fetched by number: `bert.data.pretraining.dataset.ShardReader`, or a stand-in."""

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class PretrainingLoader:
    """Batches of the training rows.

    Attributes:
        rows: the examples.
        predictions: which of their tokens are predicted, and what the model reads in their place.
        batch_size: rows B of a global batch.
        seed: seed of order and masks, below 2**32.
        process: (index, count) of this host among all; it reads its contiguous share of every batch only.
        static_masking: a row has the same masks at every visit, not fresh ones.
        first_step: the step of the first batch, where others have made those before it.
        first_row: how many rows of the same examples others have used.
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
        """This host's rows of the batch of ``step``, counted from 0: the arrays of `masked_batch`.

        ``rows`` numbers the rows within the global batch, so that dropout can be drawn for a row wherever it runs.
        """
        chosen = self.row_indices(step)
        first = self._host_slice.start
        examples = self.rows.take(chosen)
        words_per_row = random_uint64s_per_row(self.predictions, examples)
        if self.static_masking:
            words = philox_uint64_of_rows((_FROZEN + self.seed, 0), chosen, words_per_row)
        else:
            words = philox_uint64((_MASKS + self.seed, step), first, len(chosen), words_per_row)
        return masked_batch(examples, self.predictions, words, first)

    def row_indices(self, step: int) -> np.ndarray:
        """[B] indices, among all ``rows``, of this host's rows of the batch of ``step``."""
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
        # Not Generator.permutation: NumPy promises the raw words for ever, not what its generators make of them.
        return np.argsort(stream.random_raw(len(self.rows)), kind="stable")


def make_predictions(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Predictions:
    """Returns the predicted tokens of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    return NextTokens() if objective == "clm" else make_masking(config, tokenizer, objective)


def make_masking(config: DataConfig, tokenizer: Tokenizer, objective: str = "mlm") -> Masking:
    """Returns the masking of a pretraining objective. Raises UserError if a vocabulary has nothing to mask."""
    from bert.tokenizer.special_tokens import special_ids
    from bert.tokenizer.vocabulary import embedding_rows, subword_ids

    special = special_ids(tokenizer)
    return MASKINGS[objective](
        vocab_size=embedding_rows(tokenizer),
        mask_id=special.mask,
        special_ids=special.all,
        max_predictions=config.max_predictions_per_sequence,
        prob=config.masked_lm_prob,
        continuing_ids=subword_ids(tokenizer) if config.whole_word_masking else (),
    )


def random_uint64s_per_row(predictions: Predictions, examples: dict[str, np.ndarray]) -> int:
    """What a row of these, packed or not, takes of a random stream."""
    packed = examples.get(EXAMPLE_LENGTH)
    return predictions.uint64s_per_row(examples["input_ids"].shape[1], 1 if packed is None else packed.shape[1])


def held_out_batches(
    rows: RowSource, predictions: Predictions, batch_size: int, process: tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """This host's share of every held-out batch, each row once, with masks that depend on the row's number alone.

    The last batch is filled up with empty rows whose weights are 0, so that every batch has one shape and every row
    counts once.
    """
    own = host_slice(batch_size, process)
    for start in range(0, len(rows), batch_size):
        chosen = np.arange(start + own.start, min(start + own.stop, len(rows)))
        some = chosen if len(chosen) else np.zeros(1, dtype=np.int64)
        examples = rows.take(some)
        words = philox_uint64((_HELD_OUT, 0), int(some[0]), len(some), random_uint64s_per_row(predictions, examples))
        batch = masked_batch(examples, predictions, words, own.start)
        local = own.stop - own.start
        if len(chosen) < local:
            batch = {name: _pad_rows(value[: len(chosen)], local) for name, value in batch.items()}
        yield batch


def masked_batch(examples: dict[str, np.ndarray], predictions: Predictions, words: np.ndarray, first_row: int) -> Batch:
    """Examples -> one pretraining batch. The attention mask comes from the lengths, never from corrupted tokens.

    If the input format has a label, the batch has NAME_labels and NAME_weights, NAME being next_sentence or
    sentence_order: [B], or [B, K] where rows are packed. Then it also has the arrays of `packing_arrays`.
    """
    ids = examples["input_ids"]
    rows, length = ids.shape
    position = np.arange(length, dtype=np.int32)
    mask = position < examples["length"][:, None]
    example_length = examples.get(EXAMPLE_LENGTH)
    if example_length is None:
        of_examples = {"token_type_ids": mask & (position >= examples["segment_a_length"][:, None])}
        labelled = np.ones(rows, bool)
    else:
        of_examples = packing_arrays(example_length, examples["segment_a_length"], length)
        labelled = example_length > 0
    batch = {
        **predictions.batch_arrays(examples, words),
        **{name: value.astype(np.int32) for name, value in of_examples.items()},
        "attention_mask": mask.astype(np.int32),
        "rows": np.arange(first_row, first_row + rows, dtype=np.int32),
    }
    for column, label in examples.items():
        if column.endswith("_label"):
            batch[f"{column}s"] = label.astype(np.int32)
            batch[f"{column.removesuffix('_label')}_weights"] = labelled.astype(np.float32)
    return batch


def _pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), dtype=array.dtype)])
