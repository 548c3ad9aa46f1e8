"""One phase of a pretraining run, and the settings of the run that it overrides.

A phase overrides keys of the sections ``data``, ``model``, ``optimizer`` and ``training``, by the names that they have
there (`OVERRIDES`). All other keys are the run's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from bert.config.data import DataConfig
from bert.config.training import OptimizerConfig, ScheduleName, TrainingConfig, num_micro_batches
from bert.config.validation import (
    Fraction,
    InnerFraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    Share,
    check_fields,
)
from bert.errors import UserError

OVERRIDES = {
    "data": ("train", "mixture_weights", "masked_lm_prob", "mask_share", "random_share", "sequence_length", "packing"),
    "model": ("rotary_base", "local_rotary_base", "attention_window"),
    "optimizer": ("learning_rate", "schedule", "warmup_steps", "decay_ratio", "final_rate", "weight_decay"),
    "training": ("batch_size", "gradient_accumulation_steps"),
}
"""Keys of each section that a phase may set. ``max_predictions_per_sequence`` depends on other keys of the phase."""

PHASE_SCHEDULE_KEYS = ("warmup_steps", "decay_ratio", "final_rate")
"""Keys of a schedule, which a phase with its own schedule does not inherit."""

MASK_KEYS = ("masked_lm_prob", "mask_share", "random_share")
"""Keys of masks, which only apply to the training rows of a phase."""


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run; unset keys default to the rest of the configuration."""

    share: InnerFraction | None = None
    """Share of training.steps. The last phase has neither share nor steps: it has the remaining steps."""
    steps: Positive | None = None
    """Number of steps, instead of a share."""
    sequence_length: Annotated[int, Range(minimum=8)] | None = None
    """Tokens T per row. Defaults to data.sequence_length."""
    max_predictions_per_sequence: Positive | None = None
    """Maximum number of predictions P per row. Defaults to data.max_predictions_per_sequence, in proportion to the
    lengths; if that is null too, or if the phase sets masked_lm_prob, to masked_lm_prob x sequence_length, rounded
    up."""
    batch_size: Positive | None = None
    """Rows B of one optimizer step. Defaults to training.batch_size."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches per batch. Defaults to training.gradient_accumulation_steps."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Defaults to optimizer.learning_rate. Without a schedule of the phase, warm-up and decay are
    one schedule over all phases."""
    micro_batch_size: Positive | None = None
    """Maximum number of rows in a micro-batch, in place of gradient_accumulation_steps. Defaults to
    training.micro_batch_size."""
    batch_size_ramp: list[Positive] | None = None
    """Batch sizes of the first steps of the phase, in order, with an equal number of steps each. Micro-batches have at
    most as many rows as with batch_size. null: no ramp."""
    ramp_share: InnerFraction | None = None
    """Share of the steps of the phase that batch_size_ramp takes."""
    ramp_steps: Positive | None = None
    """Number of steps of batch_size_ramp, instead of a share."""
    train: list[str] | str | None = None
    """Corpus, in the formats of data.train. Needs data.eval. The vocabulary is trained on data.train, which is also the
    default."""
    mixture_weights: list[PositiveFloat] | None = None
    """Share of the training text for each entry of the phase's corpus. Defaults to data.mixture_weights, or, if the
    phase sets train, to each document once."""
    masked_lm_prob: InnerFraction | None = None
    """Share of a row's tokens that are predicted. Held-out rows always have data.masked_lm_prob, which is also the
    default."""
    mask_share: Share | None = None
    """Share of the predicted tokens that become [MASK]. Defaults to data.mask_share."""
    random_share: Share | None = None
    """Share of the predicted tokens that become a random token. Defaults to data.random_share."""
    packing: bool | None = None
    """Put several short examples into one training row. Defaults to data.packing."""
    rotary_base: PositiveFloat | None = None
    """Base of rotary positions before the last phase, which has model.rotary_base."""
    local_rotary_base: PositiveFloat | None = None
    """Base of rotary positions in local layers before the last phase, which has model.local_rotary_base."""
    attention_window: Positive | None = None
    """Window of local layers before the last phase, which has model.attention_window."""
    schedule: ScheduleName | None = None
    """Learning rate over the steps of this phase alone, as optimizer.schedule. Defaults to one schedule over all
    phases."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up of the phase's schedule. Defaults to 0."""
    decay_ratio: InnerFraction | None = None
    """warmup_stable_decay: share of the phase's steps in which the learning rate decays. Defaults to 0.1."""
    final_rate: Fraction | None = None
    """Final learning rate of the phase's schedule as a share of the peak. Defaults to 0."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay. Defaults to optimizer.weight_decay."""

    def check(self, name: str, is_last: bool) -> None:
        """Raises UserError for invalid values; ``name`` is the key of the phase, such as phases.2."""
        lengths = [key for key in ("share", "steps") if getattr(self, key) is not None]
        if is_last and lengths:
            raise UserError(f"{name}.{lengths[0]} is set, but the last phase has the remaining steps: remove it")
        if not is_last and len(lengths) != 1:
            state = "are both set" if lengths else "are both null"
            raise UserError(f"{name}.share and {name}.steps {state}: set exactly one of them, as another phase follows")
        check_fields(f"{name}.", self)
        if is_last and (keys := [key for key in OVERRIDES["model"] if getattr(self, key) is not None]):
            raise UserError(
                f"{name}.{keys[0]} is set, but the last phase has the model of the run: set model.{keys[0]} to "
                f"{getattr(self, keys[0])}, and {keys[0]} in the phases before it"
            )
        if self.schedule is None and (keys := [key for key in PHASE_SCHEDULE_KEYS if getattr(self, key) is not None]):
            raise UserError(f"{name}.{keys[0]} is set, but {name}.schedule is null: set both, or optimizer.{keys[0]}")
        lengths = [key for key in ("ramp_share", "ramp_steps") if getattr(self, key) is not None]
        if len(lengths) != (self.batch_size_ramp is not None):
            given = ", ".join(lengths) or "no number of steps"
            raise UserError(
                f"{name}.batch_size_ramp is {self.batch_size_ramp}, with {given}: set it together with either "
                "ramp_share or ramp_steps"
            )
        if self.batch_size_ramp == []:
            raise UserError(f"{name}.batch_size_ramp is an empty list: list batch sizes, or set it to null")

    def overrides(self, section: str) -> dict[str, Any]:
        """Returns the values that the phase sets for the keys of a section."""
        return {key: value for key in OVERRIDES[section] if (value := getattr(self, key)) is not None}

    def describe(self) -> str:
        """Returns the keys that the phase sets, except its number of steps, with their values."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("share", "steps")]
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        shown = {True: "true", False: "false"}
        return ", ".join(
            f"{name} {shown[value] if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}"
            for name, value in values.items()
        )


def data_of_phase(data: DataConfig, phase: PhaseConfig, predicts_all: bool) -> DataConfig:
    """Returns the data of a phase.

    Args:
        predicts_all: whether every token is predicted, so that rows have no number of predictions.
    """
    changes = phase.overrides("data")
    if phase.train is not None:
        changes = {"mixture_weights": None, **changes}
    if phase.packing is False:
        changes["max_sequences_per_pack"] = DataConfig.max_sequences_per_pack
    predictions = phase.max_predictions_per_sequence
    if predictions is None and phase.masked_lm_prob is None:
        predictions = data.max_predictions_per_sequence
        if predictions and not predicts_all:
            length = phase.sequence_length or data.sequence_length
            predictions = -(-predictions * length // data.sequence_length)
    return dataclasses.replace(data, max_predictions_per_sequence=predictions, **changes)


def held_out_data(data: DataConfig, phase: PhaseConfig, predicts_all: bool) -> DataConfig:
    """Returns the data of the phase with the masks of the run, so that the held-out scores of phases compare."""
    changes: dict[str, Any] = dict.fromkeys(MASK_KEYS)
    if phase.masked_lm_prob is not None:
        changes["max_predictions_per_sequence"] = None
    return data_of_phase(data, dataclasses.replace(phase, **changes), predicts_all)


def optimizer_of_phase(optimizer: OptimizerConfig, phase: PhaseConfig) -> OptimizerConfig:
    """Returns the optimizer of a phase. If the phase has a schedule, no key of the run's schedule is inherited."""
    changes = phase.overrides("optimizer")
    if phase.schedule is not None:
        defaults = {key: getattr(OptimizerConfig, key) for key in ("warmup_ratio", *PHASE_SCHEDULE_KEYS)}
        changes = {**defaults, "warmup_steps": 0, **changes}
    return dataclasses.replace(optimizer, **changes)


def ramp_of_phase(training: TrainingConfig, phase: PhaseConfig) -> list[TrainingConfig]:
    """Returns the training settings of each batch size of the ramp, with the evaluation batches of the whole phase."""
    micro_batch = training.batch_size // training.gradient_accumulation_steps
    return [
        dataclasses.replace(
            training,
            batch_size=rows,
            gradient_accumulation_steps=num_micro_batches(rows, micro_batch),
            eval_batch_size=training.rows_per_evaluation,
        )
        for rows in phase.batch_size_ramp or ()
    ]


def phase_boundaries(phases: Sequence[PhaseConfig], total_steps: int) -> list[int]:
    """Returns the last step of each phase. Shares are summed before they are rounded, so that no step is lost. A phase
    with a share leaves at least one step for each later phase."""
    ends, share, steps = [], 0.0, 0
    for number, phase in enumerate(phases[:-1], 1):
        share, steps = share + (phase.share or 0.0), steps + int(phase.steps or 0)
        last = total_steps if phase.share is None else total_steps - (len(phases) - number)
        ends.append(min(last, round(share * total_steps) + steps))
    return [*ends, total_steps]


def ramp_boundaries(phase: PhaseConfig, first: int, end: int) -> list[int]:
    """Returns the last step of each batch size of a phase with the steps first + 1 to end."""
    count = len(phase.batch_size_ramp or ())
    steps = phase.ramp_steps or (phase.ramp_share or 0.0) * (end - first)
    return [min(end, first + round(steps * (i + 1) / count)) for i in range(count)] + [end]
