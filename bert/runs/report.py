"""What people see of a run: progress, one line a log step in metrics.jsonl, curves, and the calls of its callbacks."""

from __future__ import annotations

import contextlib
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

    def step(self, step: int) -> None:
        """A step is finished."""

    def skipped(self, step: SkippedStep) -> None:
        """A step had no effect."""

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        """There are new metrics, of the split ``train`` or ``eval``."""

    def evaluated(self, step: int) -> bool:
        """Whether there are metrics of ``eval`` at this step."""
        return False

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
    ) -> None:
        self._folder, self._total_steps, self._subject = folder, total_steps, subject
        self._callbacks, self._asked = callbacks, False
        self._error: Exception | None = None
        self._facts: dict[str, Any] = {}
        self._log = MetricsLog(folder, start_step)
        self._evaluated = {line["step"] for line in read_metrics(folder) if line["split"] == "eval"}
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

    def step(self, step: int) -> None:
        self._progress.update(step)

    def skipped(self, step: SkippedStep) -> None:
        file = step.write(self._folder / skipped_steps.FOLDER)
        where = "as many are written down already" if file is None else f"its batch is in {file}"
        LOGGER.info(f"step {step.step:,} was skipped: {step.diagnosis}; {where}")

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        metrics = {**self._facts, **metrics}
        self._log.write(split, step, metrics)
        if split == "train":
            self._progress.update(step, metrics)
        else:
            self._evaluated.add(step)
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
    def stop_reason(self) -> str | None:
        if self._error is not None:
            return "error"
        return "asked" if self._asked else None

    def raise_error(self) -> NoReturn:
        raise require(self._error, "the error of a callback")

    def evaluated(self, step: int) -> bool:
        return step in self._evaluated

    def _draw(self) -> None:
        from bert.runs.curves import plot_curves

        plot_curves(self._folder, self._subject)
        self._draw_again = time.monotonic() + PLOT_INTERVAL_SECONDS
