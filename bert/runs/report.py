"""What people see of a run: progress, one line a log step in metrics.jsonl, curves, and the calls of its callbacks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from bert.errors import UserError, require
from bert.messages import LOGGER
from bert.runs import skipped_steps
from bert.runs.callbacks import Callback
from bert.runs.metrics_log import MetricsLog, read_metrics
from bert.runs.progress import Progress, StepCosts, format_metrics
from bert.runs.skipped_steps import SkippedStep

if TYPE_CHECKING:
    from bert.runs.curves import Subject


PLOT_INTERVAL_SECONDS = 20
"""At least between two pictures of the curves, each of which takes up to a second of a processor; the last is always
drawn."""


DIVERGED = 3
"""Factor by which a training loss is far above the first one; a lower loss than 1 counts as 1.

Noise of batches, a schedule with a high rate, and rows of another length change a loss by less.
"""

DIVERGED_BASELINE = 2
"""The same for the loss per predicted token, compared with that of token frequencies alone."""


class Divergence:
    """Finds a training loss that is far above its start, or above a model that knows token frequencies alone."""

    def __init__(self, lines: Sequence[dict[str, Any]], baseline: tuple[str, float] | None) -> None:
        """
        Args:
            lines: of metrics.jsonl, if the run resumes.
            baseline: name of a loss, and its value for a model that knows token frequencies alone; None without one.
        """
        losses = [line.get("loss") for line in lines if line["split"] == "train"]
        self._start = next((loss for loss in losses if isinstance(loss, float | int)), None)
        self._baseline = baseline
        self._is_reported = False
        self.sentence: str | None = None

    def start(self, loss: float) -> None:
        """The loss of the first step."""
        self._start = loss if math.isfinite(loss) else None

    def update(self, step: int, metrics: dict[str, Any]) -> str | None:
        """Returns a sentence for the first line of training metrics that is far above, else None."""
        loss = metrics.get("loss", math.nan)
        if math.isnan(loss):  # every step was skipped, which is reported elsewhere
            return None
        self.sentence = None
        start = self._start
        if start is not None and loss > DIVERGED * max(start, 1.0):
            self.sentence = f"the training loss is {loss:.4g} at step {step:,}, and it began at {start:.4g}"
        elif self._baseline is not None and (start is None or loss > start):
            name, expected = self._baseline
            if metrics.get(name, 0.0) > DIVERGED_BASELINE * max(expected, 1.0):
                self.sentence = (
                    f"{name} is {metrics[name]:.4g} at step {step:,}, and token frequencies alone have {expected:.4g}"
                )
        if self.sentence is None:
            return None
        self.sentence += ": it diverged; lower optimizer.learning_rate, or lengthen the warm-up"
        is_first, self._is_reported = not self._is_reported, True
        return self.sentence if is_first else None


class Report:
    """Receives what happens in a run. This one ignores it, for hosts that write nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the report, also after an error."""

    def on_start(self, costs: StepCosts) -> None:
        """Training starts, at these measured costs."""

    def set_phase(self, facts: dict[str, Any]) -> None:
        """A phase begins: each line of metrics has these facts as well."""

    def set_total_steps(self, total_steps: int) -> None:
        """The run is to have another number of steps."""

    def step(self, step: int) -> None:
        """A step is finished."""

    def first_loss(self, loss: float) -> None:
        """The loss of the first step of a run, before its update."""

    def skipped(self, step: SkippedStep) -> None:
        """A step had no effect."""

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        """There are new metrics, of the split ``train`` or ``eval``."""

    def has_line(self, step: int, split: str) -> bool:
        """Whether there are metrics of a split at this step."""
        return False

    @property
    def divergence(self) -> str | None:
        """A sentence if the last training loss is far above the first one."""
        return None

    @property
    def stop_reason(self) -> str | None:
        """``asked`` if a callback has asked to end the run, ``error`` if one has failed."""
        return None

    def raise_error(self) -> NoReturn:
        """Raises the error of the callback that has failed; on other hosts, UserError."""
        raise UserError("a callback has failed on the first host: see its output")


class RunReport(Report):
    """Writes what `bert.training.loop.TrainLoop` reports to metrics.jsonl, curves.png, callbacks and the terminal."""

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        start_step: int,
        log_every: int,
        subject: Subject | None = None,
        callbacks: Sequence[Callback] = (),
        provisional: Sequence[str] = (),
        baseline: tuple[str, float] | None = None,
    ) -> None:
        self._folder, self._total_steps, self._subject = folder, total_steps, subject
        self._callbacks, self._asked = callbacks, False
        self._error: Exception | None = None
        self._facts: dict[str, Any] = {}
        self._log = MetricsLog(folder, start_step, provisional)
        lines = read_metrics(folder)
        self._divergence = Divergence(lines, baseline)
        self._written = {(line["step"], line["split"]) for line in lines}
        self._progress = Progress(total_steps, start_step, every=log_every)
        self._draw_again = time.monotonic() + PLOT_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._log.close()
        with contextlib.suppress(*([OSError] if any(error) else [])):  # the first error is reported
            self._draw()

    def set_phase(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def on_start(self, costs: StepCosts) -> None:
        self._progress.follow(costs)

    def set_total_steps(self, total_steps: int) -> None:
        self._progress.set_total_steps(total_steps)

    def step(self, step: int) -> None:
        self._progress.update(step)

    def first_loss(self, loss: float) -> None:
        self._divergence.start(loss)

    def skipped(self, step: SkippedStep) -> None:
        file = step.write(self._folder / skipped_steps.FOLDER)
        where = "as many are written down already" if file is None else f"its batch is in {file}"
        LOGGER.info(f"step {step.step:,} was skipped: {step.diagnosis}; {where}")

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        metrics = {**self._facts, **metrics}
        self._log.write(split, step, metrics)
        self._written.add((step, split))
        if split == "train":
            self._progress.update(step, metrics)
            if (sentence := self._divergence.update(step, metrics)) is not None:
                LOGGER.warning(sentence)
        else:
            LOGGER.info(format_metrics(split, step, metrics))
            if time.monotonic() > self._draw_again:
                self._draw()
        self._call_callbacks(step, split, metrics)

    def _call_callbacks(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        try:
            asked = [callback.on_metrics(step, split, dict(metrics)) for callback in self._callbacks]
        except Exception as error:  # raised by `raise_error`, once the state is saved
            self._error = error
            return
        if any(asked) and not self._asked:
            self._asked = True
            LOGGER.info(f"a callback ends the run at step {step:,}")

    @property
    def divergence(self) -> str | None:
        return self._divergence.sentence

    @property
    def stop_reason(self) -> str | None:
        if self._error is not None:
            return "error"
        return "asked" if self._asked else None

    def raise_error(self) -> NoReturn:
        raise require(self._error, "the error of a callback")

    def has_line(self, step: int, split: str) -> bool:
        return (step, split) in self._written

    def _draw(self) -> None:
        from bert.runs.curves import plot_curves

        plot_curves(self._folder, self._subject)
        self._draw_again = time.monotonic() + PLOT_INTERVAL_SECONDS
