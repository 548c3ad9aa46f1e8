"""Steps that were skipped because something in them was NaN or infinite: what is written down and said of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.files import atomic_write

FOLDER = "nonfinite"
MAX_DUMPED_BATCHES = 100
"""Batches that are written down at most: what has not shown by then takes disk space only."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that had no effect.

    Attributes:
        step: its number, as in metrics.jsonl.
        loss: of its batch.
        norms: of the gradient by groups of parameters, and of the whole ``update``.
        num_consecutive: skipped steps up to this one without another between them.
        num_total: skipped steps of the run up to this one.
        rows: [B] numbers of the batch's rows in the training data.
        batch: what the model was given.
    """

    step: int
    loss: float
    norms: Mapping[str, float]
    num_consecutive: int
    num_total: int
    rows: np.ndarray
    batch: Mapping[str, np.ndarray]

    @property
    def diagnosis(self) -> str:
        """What was not finite, in half a sentence."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        bad = [name for name, norm in self.norms.items() if name != "update" and not math.isfinite(norm)]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            return f"the loss is {self.loss:.4g}, the gradient of {', '.join(bad[:3])}{more} is not finite"
        largest = max((norm for name, norm in self.norms.items() if name != "update"), default=0.0)
        if math.isfinite(self.norms["update"]):  # groups that are finite one by one, and not together
            return f"the gradient has a norm of {largest:.1e} in one group alone, too large to be squared"
        return f"loss and gradient are finite (largest norm {largest:.3g}), the optimizer's update is not"

    def write(self, folder: Path) -> Path | None:
        """Writes STEP.json and STEP.npz, the arrays of the batch; None where there are `MAX_DUMPED_BATCHES` already."""
        folder.mkdir(exist_ok=True)
        file = folder / f"{self.step}.json"
        if not file.exists() and sum(1 for _ in folder.glob("*.json")) >= MAX_DUMPED_BATCHES:
            return None
        with atomic_write(file.with_suffix(".npz")) as temporary, temporary.open("wb") as arrays:
            batch: dict[str, Any] = dict(self.batch)
            np.savez_compressed(arrays, **batch)
        facts = {
            "step": self.step,
            "diagnosis": self.diagnosis,
            "loss": str(self.loss) if not math.isfinite(self.loss) else self.loss,
            "norms": {name: norm if math.isfinite(norm) else str(norm) for name, norm in self.norms.items()},
            "skipped_in_a_row": self.num_consecutive,
            "skipped_in_all": self.num_total,
            "rows": self.rows.tolist(),
        }
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return file


def nonfinite_error_message(last: SkippedStep, saved: int) -> str:
    """The sentence with which a run ends whose state after step ``saved`` is kept."""
    several = f"the last {last.num_consecutive} steps up to step {last.step:,} were skipped"
    return (
        f"{several if last.num_consecutive > 1 else f'step {last.step:,} was skipped'}, as something was not finite "
        f"({last.diagnosis}): the run's folder has the batches in nonfinite/ and the state before them as step "
        f"{saved:,}; look for damaged data, or start again with a lower optimizer.learning_rate or a longer warm-up"
    )
