"""Phases of one pretraining run: short rows for most of the steps, then long ones (Devlin et al. 2018, appendix A.2).

Each phase resolves to the configuration of a single-phase run, so that later code needs no phases.
Parameters and the optimizer's moments are carried over, and steps are counted through: warm-up and decay are one
schedule over all steps, times the phase's own peak,

    rate(n) = learning_rate of the phase of n * min(n / warm-up, (steps - n) / (steps - warm-up))

for update n from 0 on, by the defaults of optimizer.schedule and final_rate. With the same peak in each phase this is
the schedule of the paper, which has no second warm-up.
Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bert.config.validation import InnerFraction, Positive, PositiveFloat, Range, check_fields
from bert.errors import UserError


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run; what it leaves out it takes from the rest of the configuration."""

    share: InnerFraction | None = None
    """Share of training.steps; the last phase has neither share nor steps, and takes what is left."""
    steps: Positive | None = None
    """Steps, in place of a share."""
    sequence_length: Annotated[int, Range(least=8)] | None = None
    """Tokens T per row. Defaults to data.sequence_length."""
    max_predictions_per_sequence: Positive | None = None
    """Maximum number of predictions P per row. Defaults to data.max_predictions_per_sequence, in proportion to the
    lengths; if that is null too, to data.masked_lm_prob x sequence_length, rounded up."""
    batch_size: Positive | None = None
    """Rows B of one optimizer step. Defaults to training.batch_size."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches per batch. Defaults to training.gradient_accumulation_steps."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Defaults to optimizer.learning_rate. Warm-up and decay are one schedule over all phases."""
    micro_batch_size: Positive | None = None
    """Maximum number of rows in a micro-batch, in place of gradient_accumulation_steps. Defaults to
    training.micro_batch_size."""

    def check(self, name: str, is_last: bool) -> None:
        """Raises UserError for values that no phase can have; ``name`` is its place in the list."""
        given = [key for key in ("share", "steps") if getattr(self, key) is not None]
        if is_last and given:
            raise UserError(f"{name}.{given[0]} is set, but the last phase takes the steps that are left: leave it out")
        if not is_last and len(given) != 1:
            state = "are both set" if given else "are both null"
            raise UserError(f"{name}.share and {name}.steps {state}: set exactly one of them, as another phase follows")
        check_fields(f"{name}.", self)
