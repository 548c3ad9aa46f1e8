"""How a global batch is split into micro-batches that fit a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from bert.analysis.memory_estimate import activation_bytes
from bert.analysis.step_memory import StepMemory, compiled_step_memory
from bert.config import PretrainConfig
from bert.config.training import Remat
from bert.parallel.backends import MeshParallel


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class BatchFit:
    """The most rows that fit a device at once, with one kind of rematerialisation.

    Attributes:
        remat: as ``training.remat`` has it.
        rows: rows of a micro-batch on one device; 0 if not even one fits.
        micro_batches: micro-batches of a step with these rows.
        memory: memory of a step with these rows; with one row if none fits, None if the compiler refuses even that.
    """

    remat: Remat
    rows: int
    micro_batches: int
    memory: StepMemory | None


def fit_rows(
    config: PretrainConfig, mesh: MeshParallel, memory: int, remat: Remat, progress: Callable[[str], None] = _silent
) -> BatchFit:
    """Finds the fewest micro-batches that fit into ``memory`` bytes of a device, by compiling the step.

    The rows that are compiled first are those of the rough estimate. From there they go up or down over the divisors of
    the batch, in strides of 1, 1, 2, 4 and so on; those between rows that fit and rows that do not are bisected. Two or
    three compilations are usual. ``progress`` gets a line before each.

    Raises:
        UserError: the batch cannot be sharded over the mesh.
    """
    mesh.check_batch("training.batch_size", config.training.batch_size)
    share = config.training.batch_size // (mesh.shape[0] * mesh.shape[1])
    choices = [rows for rows in range(1, share + 1) if share % rows == 0]
    measured: dict[int, StepMemory | None] = {}
    row_bytes = _row_bytes(config, mesh, remat)
    index = max((i for i, rows in enumerate(choices) if rows * row_bytes <= memory), default=0)
    fitting, too_many = -1, len(choices)
    while too_many - fitting > 1:
        rows = choices[index]
        progress(f"  compiling remat {remat}, {rows} rows of {config.data.sequence_length} tokens at once")
        training = dataclasses.replace(config.training, gradient_accumulation_steps=share // rows, remat=remat)
        measured[rows] = compiled_memory(dataclasses.replace(config, training=training), mesh)
        step = measured[rows]
        if step is not None and step.peak <= memory:
            fitting = index
        else:
            too_many = index
        index = _next_index(fitting, too_many, len(choices), len(measured))
    if fitting < 0:
        return BatchFit(remat, 0, share, measured[1])
    rows = choices[fitting]
    return BatchFit(remat, rows, share // rows, measured[rows])


def _row_bytes(config: PretrainConfig, mesh: MeshParallel, remat: Remat) -> int:
    """The rough estimate of a row; ``remat dots`` keeps all but the scores."""
    training = config.training
    itemsize, length = jnp.dtype(training.dtype).itemsize, config.data.sequence_length
    stores_scores = training.attention_implementation not in ("cudnn", "splash") and remat != "dots"
    return activation_bytes(config.model, length, itemsize, remat, stores_scores, tensor=mesh.shape[2])


def _next_index(fitting: int, too_many: int, count: int, tried: int) -> int:
    """The choice to compile after so many: halfway between fitting and too many, or further on until both are found."""
    stride = 2 ** max(0, tried - 2)
    if too_many == count:
        return min(fitting + stride, count - 1)
    if fitting < 0:
        return max(too_many - stride, 0)
    return (fitting + too_many) // 2


def compiled_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory | None:
    """`compiled_step_memory`; None if the compiler itself reports that the step does not fit, as that of TPUs does."""
    try:
        return compiled_step_memory(config, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
