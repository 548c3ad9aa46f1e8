"""How a global batch is split into micro-batches that fit a device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from bert.analysis.memory_estimate import ESTIMATE_ERROR_PERCENT, estimate_step
from bert.analysis.step_memory import StepMemory, compiled_step_memory
from bert.config import PretrainConfig
from bert.errors import require
from bert.parallel.backends import MeshParallel

OVER_BUDGET_MARGIN = 1.15
"""How far over the memory an estimate has to be, once corrected by a compilation of fewer rows, to be believed."""


@dataclass(frozen=True)
class BatchFit:
    """The most rows that fit a device at once, with one kind of rematerialisation.

    Attributes:
        remat: as ``training.remat`` has it.
        rows: of a device in a micro-batch; 0 if not even one fits.
        micro_batches: of a step with them.
        memory: of a step with them; with one row where none fits, None where the compiler refuses even that.
    """

    remat: str
    rows: int
    micro_batches: int
    memory: StepMemory | None


def fit_rows(config: PretrainConfig, mesh: MeshParallel, memory: int, remat: str, compiled: bool = True) -> BatchFit:
    """As few micro-batches as fit into ``memory`` bytes a device.

    What is estimated has to fit with the estimate's error on top. What is compiled starts from the estimate; rows are
    told to fit only where a compilation of just so many did.

    Raises:
        UserError: the batch cannot be sharded over the mesh.
    """
    mesh.check_batch("training.batch_size", config.training.batch_size)
    share = config.training.batch_size // (mesh.shape[0] * mesh.shape[1])
    choices = [rows for rows in range(1, share + 1) if share % rows == 0]

    def split(rows: int) -> PretrainConfig:
        training = dataclasses.replace(config.training, gradient_accumulation_steps=share // rows, remat=remat)
        return dataclasses.replace(config, training=training)

    guesses = {rows: estimate_step(split(rows), mesh) for rows in choices}
    if not compiled:
        possible = [rows for rows in choices if guesses[rows].peak <= memory * (1 - ESTIMATE_ERROR_PERCENT / 100)]
        return _fit(remat, share, possible, {**guesses})
    measured: dict[int, StepMemory | None] = {}

    def fits(rows: int) -> bool:
        if rows not in measured:
            measured[rows] = compiled_memory(split(rows), mesh)
        found = measured[rows]
        return found is not None and found.peak <= memory

    place = max((n for n, rows in enumerate(choices) if guesses[rows].peak <= memory), default=0)
    while place and not fits(choices[place]):
        place -= 1
    while fits(choices[place]) and place + 1 < len(choices) and choices[place + 1] not in measured:
        here, above = choices[place], choices[place + 1]
        correction = require(measured[here], "what fits").working / guesses[here].working
        if guesses[above].state + guesses[above].working * correction > OVER_BUDGET_MARGIN * memory:
            break
        place += fits(above)
    return _fit(remat, share, [rows for rows in measured if fits(rows)], measured)


def compiled_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory | None:
    """`compiled_step_memory`; None if the compiler itself reports that the step does not fit, as that of TPUs does."""
    try:
        return compiled_step_memory(config, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _fit(remat: str, share: int, possible: list[int], memories: dict[int, StepMemory | None]) -> BatchFit:
    if possible:
        return BatchFit(remat, max(possible), share // max(possible), memories[max(possible)])
    return BatchFit(remat, 0, share, memories[1])
