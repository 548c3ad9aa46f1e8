"""Losses of batches that are divided into groups of similar lengths (`bert.data.batching.LengthGroups`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from bert.data.rows import token_arrays
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.reductions import pool_outputs
from bert.parallel.backends import gather_rows_if_axis
from bert.training.losses import Batch, Loss, WeightedSums


def over_groups(loss: Loss) -> Loss:
    """Returns a loss that is a sum over rows, as the sum over the groups of a batch."""

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        parts = []
        for group in groups_of(batch, "rows"):
            parts.append(loss.forward(params, group, None if dropout is None else dropout.replace(rows=group["rows"])))
        return jax.tree.map(lambda *sums: sum(sums), *parts)

    def weights(batch: Batch) -> dict[str, Array]:
        return jax.tree.map(lambda *sums: sum(sums), *map(loss.weights, groups_of(batch, "rows")))

    return dataclasses.replace(loss, forward=forward, weights=weights)


def groups_of(batch: Batch, numbers: str) -> list[dict[str, Array]]:
    """Returns the arrays of each group of a batch, by their names without the number of the group.

    Args:
        numbers: name of an array that each group has: ``rows`` or ``sequences``.
    """
    count = sum(name.startswith(f"{numbers}_") for name in batch)
    return [
        {name.removesuffix(f"_{group}"): array for name, array in batch.items() if name.endswith(f"_{group}")}
        for group in range(count)
    ]


def apply_to_groups(apply: Callable[..., Any], batch: Batch, dropout: Dropout | None) -> Float[Array, "M *L"]:
    """Applies a model to rows [B, T], or to the groups of `bert.data.batching.LengthGroups`, [M, L] of all groups.

    Outputs per token, [N, T, E], are padded with zeros to the longest group.

    Args:
        apply: (input_ids, token_type_ids, attention_mask [N, T], dropout=...) -> outputs [N, L]; with score_mask [N, T]
            after them if the batch has it.
        dropout: the source for rows; each sequence of a group has its own dropout.
    """
    if "input_ids" in batch:
        return jnp.asarray(apply(*(batch[name] for name in token_arrays(batch)), dropout=dropout))
    outputs = []
    for group in groups_of(batch, "sequences"):
        source = None if dropout is None else dropout.replace(rows=group["sequences"])
        outputs.append(apply(*(group[name] for name in token_arrays(group)), dropout=source))
    width = max(array.shape[1] for array in outputs)
    return jnp.concatenate([_with_width(array, width) for array in outputs])


def _with_width(array: Array, width: int) -> Array:
    """Pads the second axis of an array with zeros."""
    return jnp.pad(array, [(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])


class SequenceOutputs(NamedTuple):
    """Outputs of the sequences of a batch in groups, in any order.

    Attributes:
        outputs: [M, L] of one device; [M, T, E] with a vector per token.
        numbers: [M], see `bert.data.batching.LengthGroups.divide_sequences`.
    """

    outputs: Float[Array, "M *L"]
    numbers: Int[Array, "M"]

    def of_rows(
        self, batch: Batch, axis: str | None, maximum: bool = False, normalize: bool = False
    ) -> Float[Array, "B numbers"]:
        """Returns the outputs of the texts of each row, concatenated; of texts with windows, the pooled outputs.

        Args:
            batch: has ``rows`` [B], the numbers of the rows in the global batch, and ``window_mask`` with windows.
            axis: name of the device axis over which the rows of a batch are sharded; None if an array has all rows.
            maximum, normalize: see `bert.model.reductions.pool_outputs`.
        """
        outputs, numbers = gather_rows_if_axis((self.outputs, self.numbers), axis)
        places = jnp.zeros(len(numbers), jnp.int32).at[numbers].set(jnp.arange(len(numbers)), mode="drop")
        rows = batch["rows"]
        texts = 1 + batch["document_numbers"].shape[-1] if "document_numbers" in batch else 1
        windows = batch["window_mask"].shape[-1] if "window_mask" in batch else 1
        found = outputs[places[rows[:, None] * texts * windows + jnp.arange(texts * windows)]]
        if "window_mask" in batch:
            mask = batch["window_mask"].reshape(len(rows), texts, windows)
            found = pool_outputs(found.reshape(*mask.shape, -1), mask, maximum, normalize)
        return found.reshape(len(rows), -1)
