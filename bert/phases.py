"""Phases of one pretraining run: short rows for most of the steps, then long ones (Devlin et al. 2018, appendix A.2).

Each phase comes to the configuration of a run of one phase, so that nothing behind it has to know of several.
Parameters and the optimizer's moments are carried over, and steps are counted through: warm-up and decay are one
schedule over all steps, times the phase's own peak,

    rate(n) = learning_rate of the phase of n * min(n / warm-up, (steps - n) / (steps - warm-up))

for update n from 0 on. With the same peak in each phase this is the schedule of the paper, which has no second warm-up.
Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert.values import Count, UserError

if TYPE_CHECKING:
    from bert.config import PretrainConfig


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run; what it leaves out it takes from the rest of the configuration."""

    share: float | None = None
    """Share of training.steps; the last phase has neither share nor steps, and takes what is left."""
    steps: Count | None = None
    """Steps, in place of a share."""
    sequence_length: int | None = None
    """Tokens T a row; null takes data.sequence_length."""
    max_predictions_per_sequence: int | None = None
    """Most predictions P a row; null takes data.max_predictions_per_sequence, in proportion to the lengths."""
    batch_size: int | None = None
    """Rows B of one optimizer step; null takes training.batch_size."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of each batch; null takes training.gradient_accumulation_steps."""
    learning_rate: float | None = None
    """Peak learning rate; null takes optimizer.learning_rate. Warm-up and decay are one schedule over all phases."""

    def check(self, name: str, is_last: bool) -> None:
        """Raises UserError for values that no phase can have; ``name`` is its place in the list."""
        given = [key for key in ("share", "steps") if getattr(self, key) is not None]
        if is_last and given:
            raise UserError(f"{name}.{given[0]} is set, but the last phase takes the steps that are left: leave it out")
        if not is_last and len(given) != 1:
            state = "are both set" if given else "are both null"
            raise UserError(f"{name}.share and {name}.steps {state}: set exactly one of them")
        if self.share is not None and not 0 < self.share < 1:
            raise UserError(f"{name}.share is {self.share}: it must be above 0 and below 1")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise UserError(f"{name}.learning_rate is {self.learning_rate}: it must be above 0")
        least = {"sequence_length": 8}
        for key in ("steps", "sequence_length", "max_predictions_per_sequence", "batch_size",
                    "gradient_accumulation_steps"):  # fmt: skip
            value = getattr(self, key)
            if value is not None and value < least.get(key, 1):
                raise UserError(f"{name}.{key} is {value}: it must be at least {least.get(key, 1)}")


@dataclass(frozen=True)
class Phase:
    """A phase of a run whose number of steps is known.

    Attributes:
        number: from 1 on.
        first, end: its steps are first + 1 to end, as they are counted in metrics and checkpoints.
        config: of a run that is this phase alone.
    """

    number: int
    first: int
    end: int
    config: PretrainConfig


def phases_of(config: PretrainConfig, total_steps: int) -> list[Phase]:
    """The phases of a run of ``total_steps``, one where the configuration has none."""
    ends = _ends(config.phases or [PhaseConfig()], total_steps)
    spans = itertools.pairwise([0, *ends])
    return [Phase(i, *span, one) for i, (span, one) in enumerate(zip(spans, phase_configs(config), strict=True), 1)]


def phase_configs(config: PretrainConfig) -> list[PretrainConfig]:
    """The configuration of each phase; of a run without phases its own."""
    return [config] if config.phases is None else [_alone(config, phase) for phase in config.phases]


def check_phases(config: PretrainConfig) -> None:
    """Raises UserError where the phases cannot follow one another, or one does not fit the model."""
    phases = config.phases
    if not phases:
        raise UserError("phases is an empty list: describe at least one phase, or set it to null")
    if config.training.steps is None:
        raise UserError(
            "phases are set, but training.steps is not, and rows of several lengths have no epochs in common: set "
            "training.steps instead of training.epochs, or phases to null"
        )
    for number, phase in enumerate(phases, 1):
        phase.check(f"phases.{number}", is_last=number == len(phases))
    total = int(config.training.steps)
    first = 0
    for number, (phase, end, alone) in enumerate(
        zip(phases, _ends(phases, total), phase_configs(config), strict=True), 1
    ):
        if end <= first:
            raise UserError(
                f"phases.{number} is left without a step, since those before it take {first:,} and training.steps is "
                f"{total:,}: enlarge training.steps, or set phases to null"
            )
        first = end
        _check_sizes(alone, phase, f"phases.{number}")


def _check_sizes(config: PretrainConfig, phase: PhaseConfig, name: str) -> None:
    length, predictions = config.data.sequence_length, config.data.max_predictions_per_sequence
    config.model.check_length(f"{name}.sequence_length", length)
    if length > config.model.max_position_embeddings:
        raise UserError(
            f"{name}.sequence_length ({length}) is over model.max_position_embeddings "
            f"({config.model.max_position_embeddings}): shorten the one or enlarge the other"
        )
    if predictions >= length:
        raise UserError(
            f"{name}.max_predictions_per_sequence ({predictions}) is not below {name}.sequence_length ({length}): "
            "lower the one or raise the other"
        )
    rows, parts = config.training.batch_size, config.training.gradient_accumulation_steps
    if rows % parts:
        raise UserError(
            f"{name}.batch_size ({rows}) is not divisible by {name}.gradient_accumulation_steps ({parts}): change one "
            "of them"
        )


def _ends(phases: list[PhaseConfig], total_steps: int) -> list[int]:
    """The last step of each phase; shares are added up before they are rounded, so that no step is lost."""
    ends, share, steps = [], 0.0, 0
    for phase in phases[:-1]:
        share, steps = share + (phase.share or 0.0), steps + int(phase.steps or 0)
        ends.append(min(total_steps, round(share * total_steps) + steps))
    return [*ends, total_steps]


def _alone(config: PretrainConfig, phase: PhaseConfig) -> PretrainConfig:
    """The configuration of a run that is this phase alone."""
    data, training, optimizer = config.data, config.training, config.optimizer
    length = phase.sequence_length or data.sequence_length
    in_proportion = -(-data.max_predictions_per_sequence * length // data.sequence_length)
    accumulation = phase.gradient_accumulation_steps or training.gradient_accumulation_steps
    return dataclasses.replace(
        config,
        phases=None,
        data=dataclasses.replace(
            data,
            sequence_length=length,
            max_predictions_per_sequence=phase.max_predictions_per_sequence or in_proportion,
        ),
        training=dataclasses.replace(
            training,
            batch_size=phase.batch_size or training.batch_size,
            gradient_accumulation_steps=accumulation,
        ),
        optimizer=dataclasses.replace(optimizer, learning_rate=phase.learning_rate or optimizer.learning_rate),
    )
