"""Training with segment recurrence: the memory as an input and a result of a loss.

The rows of a batch continue the rows of the batch before (`bert.data.pretraining.loader.SegmentLoader`). A batch has
the memory of each row, as `MEMORY` and `MEMORY_TOKENS`, and the results of its loss have the memory after the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bert.config import ModelConfig
from bert.data.pretraining.loader import MEMORY_TOKENS
from bert.model.dropout import Dropout
from bert.model.recurrence import COLLECTION, SegmentMemory, kept_memory, memory_variables
from bert.training.losses import Batch, CollectingModel, Loss, WeightedSums

MEMORY = "memory"
"""States [B, layers, M, D] in batches and in the results of a loss."""


def with_memory(build: Callable[[Any], Loss], model: Any) -> Loss:
    """Returns a model's loss over rows with a memory. A batch without `MEMORY` is read without one.

    Args:
        build: returns the loss of a model, whose ``apply`` and ``config`` it uses.
    """
    plain = build(model)

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        if MEMORY not in batch:
            return plain.forward(params, batch, dropout)
        memory = memory_variables(SegmentMemory(batch[MEMORY], batch[MEMORY_TOKENS]))
        recurrent = CollectingModel(model, COLLECTION, memory)
        losses, counts = build(recurrent).forward(params, batch, dropout)
        after: dict[str, Any] = {MEMORY: kept_memory(recurrent.kept).states}
        return losses, counts | after

    return dataclasses.replace(plain, forward=forward)


def memory_shape(model: ModelConfig, rows: int) -> tuple[int, ...] | None:
    """Returns the shape of the states for a number of rows; None for a model without memory."""
    if model.memory_length is None:
        return None
    return rows, model.num_hidden_layers, model.memory_length, model.hidden_size


def gather_memory(memory: jax.Array | None, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the batch with the memory of its rows, given the memory of the global batch.

    A batch of all rows has them in order. Its memory is not indexed, so that a mesh does not gather it.
    """
    if memory is None:
        return batch
    rows = batch["rows"]
    return {**batch, MEMORY: memory[None] if rows.shape == (1, len(memory)) else memory[rows]}


def scatter_memory(sums: Mapping[str, Any], rows: jax.Array, num_rows: int) -> dict[str, Any]:
    """Returns results whose memory has all rows of the global batch: zeros for the rows of other batches and devices.

    The memory of the global batch is then the sum over micro-batches and devices, as for all other results.
    """
    sums, states = split_memory(sums)
    if states is None:
        return sums
    if len(rows) == num_rows:
        return {**sums, MEMORY: states}
    return {**sums, MEMORY: jnp.zeros((num_rows, *states.shape[1:]), states.dtype).at[rows].set(states)}


def split_memory(sums: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the results of a loss without the memory, and the memory; None without one."""
    return {name: value for name, value in sums.items() if name != MEMORY}, sums.get(MEMORY)
