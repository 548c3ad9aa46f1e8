"""Reports of a run: progress on the terminal, metrics.jsonl, curves, tables, and the calls of its callbacks."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from bert.config import PretrainConfig
from bert.errors import LOGGER, PRINT_HANDLER, Log, UserError, are_printed, format_number, require
from bert.runs.folder import RunFolder
from bert.runs.loggers import Callback, RunStart
from bert.runs.metrics_log import MAX_DUMPED_BATCHES, SKIPPED_STEPS_FOLDER, MetricsLog, SkippedStep, read_metrics
from bert.runs.plots import Subject

QUIET_SECONDS = 30
"""Maximum seconds without a line if there is no bar, since steps may be slow or log lines rare."""

MILESTONES = 3
"""Minimum number of lines of a run without a bar, if there are as many log lines. Others follow after QUIET_SECONDS."""


class Progress:
    """Progress of a run: a bar on a terminal, otherwise a message at most every ``every`` steps.

    ``unit`` is the name of a step in the bar and in the messages.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        label: str = "training",
        every: int = 1,
        unit: str = "step",
        compiled: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Starts with no estimate of the remaining time.

        Args:
            compiled: returns the seconds of compilation so far, which the estimate leaves out.
        """
        self._compiled = compiled
        self.total_steps, self.every, self.unit = total_steps, every, unit
        self._label: str | None = None  # of lines; set by `set_label`
        self._step: float = start_step
        self._last_line: float = start_step
        self._last_time: float | None = None
        self._metrics: dict[str, Any] = {}  # the newest ones
        self._since: tuple[float, float] | None = None  # (time without compilation, step) of the first update
        self._bar = _bar(unit) if are_printed() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
        if self._bar is not None:
            self._task = self._bar.add_task(label, total=total_steps, completed=start_step, metrics="", left="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            PRINT_HANDLER.console = self._bar.console
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            PRINT_HANDLER.console = None
            self._bar.stop()

    def set_total_steps(self, total_steps: int) -> None:
        """Changes the number of steps."""
        self.total_steps = total_steps
        if self._bar is not None:
            self._bar.update(self._task, total=total_steps)

    def log(self, message: str) -> None:
        """Logs a message, which counts as a line."""
        LOGGER.info(message)
        self._last_time = time.monotonic()

    def set_label(self, label: str) -> None:
        """Changes the description of the current work, which starts the bar or each line."""
        self._label = label
        if self._bar is not None:
            self._bar.update(self._task, description=label)

    def update(self, step: float, metrics: dict[str, Any] | None = None) -> None:
        """Records that ``step`` steps are done, the last one partly if it is no integer, and shows new metrics."""
        self._step, now = step, time.monotonic()
        self._metrics = self._metrics if metrics is None else metrics
        working = now - self._compiled()
        if self._since is None:
            self._since, self._last_time = (working, step), now
        (began, first), left = self._since, ""
        if first < step < self.total_steps:
            seconds_left = (working - began) / (step - first) * (self.total_steps - step)
            left = f"{format_duration(seconds_left)} left"
        if self._bar is not None:
            names = [name for name in ("phase", "loss", "tokens_per_second") if name in (metrics or {})]
            fields = {} if metrics is None else {"metrics": "  ".join(_format_metrics({n: metrics[n] for n in names}))}
            self._bar.update(self._task, completed=step, left=left, **fields)
        elif now - require(self._last_time, "the first update") >= QUIET_SECONDS or (
            metrics is not None and (step - self._last_line >= self.every or step >= self.total_steps)
        ):
            self._last_line, self._last_time = (self._last_line if metrics is None else step), now
            percent = int(100 * step / max(self.total_steps, 1))
            count = f"{self.unit} {int(step)}/{self.total_steps} ({percent}%)"
            texts = [self._label, count, *_format_metrics(self._metrics), left]
            LOGGER.info("  ".join(text for text in texts if text))


def _bar(unit: str) -> Any:
    """Returns the bar of rich, not started; None if rich is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=24),
        TextColumn(unit),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}", style="cyan"),
        TextColumn("{task.fields[left]}", style="dim"),
        refresh_per_second=4,
    )


def format_metrics(split: str, step: int, metrics: dict[str, Any]) -> str:
    """Formats metrics as one line: ``eval  step 500  loss 2.345  mlm_accuracy 0.412``."""
    return "  ".join([split, f"step {step}", *_format_metrics(metrics)])


def format_duration(seconds: float) -> str:
    """Formats a duration as 45s, 3m10s, 2h05m or 3d04h."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def progress_lines(log: Log) -> Callable[[str, int, int | None], None]:
    """Returns a function that logs the start of each stage of preprocessing, then a line every ``QUIET_SECONDS``."""
    last: dict[str, float] = {}

    def log_progress(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage not in last or now - last[stage] >= QUIET_SECONDS:
            last[stage] = now
            log(f"{stage}: {done:,}" + (f" of {total:,}" if total else "") if done else stage)

    return log_progress


def log_table(rows: list[tuple[str, str]]) -> None:
    """Logs names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *more = str(value).splitlines() or [""]
        LOGGER.info(f"  {name:{width}}  {first}".rstrip())
        for line in more:
            LOGGER.info(f"  {'':{width}}  {line}")


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Formats rows as columns: the first column is aligned to the left, all others to the right."""
    first, *others = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    return [
        f"  {name:{max(first)}}"
        + "".join(f"  {cell:>{max(widths)}}" for cell, widths in zip(cells, others, strict=True)).rstrip()
        for name, *cells in rows
    ]


def _format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Formats each number with its name, with few digits."""
    texts, loss = [], metrics.get("loss")
    for name, value in metrics.items():
        if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
            continue
        if name.endswith("_loss") and value == loss:  # the only objective
            continue
        value = value.item() if hasattr(value, "item") else value  # NumPy's and JAX's scalars
        if name == "learning_rate":
            texts.append(f"lr {value:.1e}")
        elif name.endswith("_per_second"):
            texts.append(f"{value:,.0f} {name.removesuffix('_per_second')}/s")
        elif isinstance(value, int):
            texts.append(f"{name} {value:,}")
        else:
            texts.append(f"{name} {value:.1e}" if 0 < abs(value) < 0.001 else f"{name} {format_number(value, 3)}")
    return texts


PLOT_INTERVAL_SECONDS = 20
"""Minimum seconds between two plots of the curves, which cost up to a CPU second each. The last one is always drawn."""

DIVERGED = 3
"""A run has diverged if its training loss is higher than the first one by this factor; losses below 1 count as 1.

Noise of batches, a high learning rate, and rows of another length change a loss by less.
"""

DIVERGED_BASELINE = 2
"""The same for the loss per predicted token, compared with the loss of the token-frequency baseline."""


class Divergence:
    """Detects a training loss that is far above its start, or above the token-frequency baseline."""

    def __init__(self, lines: Sequence[dict[str, Any]], baseline: tuple[str, float] | None) -> None:
        """Takes the lines of metrics.jsonl of a resumed run, and the name and value of the baseline's loss, if any."""
        known = [line for line in lines if line["split"] == "train" and isinstance(line.get("loss"), float | int)]
        self._start = known[0]["loss"] if known else None
        self._baseline = baseline
        self._is_reported = False
        self.sentence: str | None = None
        for line in known:
            self.update(line["step"], line)

    def start(self, loss: float) -> None:
        """Sets the loss of the first step."""
        self._start = loss if math.isfinite(loss) else None

    def update(self, step: int, metrics: dict[str, Any]) -> str | None:
        """Returns a warning for the first line of training metrics with a diverged loss, else None."""
        loss = metrics.get("loss", math.nan)
        if math.isnan(loss):  # every step was skipped, which is reported elsewhere
            return None
        self.sentence = None
        start = self._start
        if start is not None and loss > DIVERGED * max(start, 1.0):
            self.sentence = f"the training loss is {loss:.4g} at step {step:,}, but it started at {start:.4g}"
        elif self._baseline is not None and (start is None or loss > start):
            name, expected = self._baseline
            if (value := metrics.get(name, 0.0)) > DIVERGED_BASELINE * max(expected, 1.0):
                self.sentence = f"{name} is {value:.4g} at step {step:,}, but {expected:.4g} with token frequencies"
        if self.sentence is None:
            return None
        self.sentence += ": it diverged; lower optimizer.learning_rate, or lengthen the warm-up"
        is_first, self._is_reported = not self._is_reported, True
        return self.sentence if is_first else None


class Report:
    """Receives the events of a run. This base class ignores them: it is the report of hosts that write nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the report, also after an error."""

    def set_phase(self, facts: dict[str, Any]) -> None:
        """Starts a phase: each line of metrics includes these facts."""

    def set_total_steps(self, total_steps: int) -> None:
        """Changes the number of steps of the run."""

    def step(self, step: int) -> None:
        """Records that a step is finished."""

    def first_loss(self, loss: float) -> None:
        """Records the loss of the first step of a run, before its update."""

    def skipped(self, step: SkippedStep) -> None:
        """Records a skipped step."""

    def spike(self, step: int, loss: float, norm: float, number: int, is_skipped: bool) -> None:
        """Records a spike of the loss or of the gradient norm, and the number of spikes so far."""

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        """Records metrics of the split ``train`` or ``eval``."""

    def has_line(self, step: int, split: str) -> bool:
        """Returns whether there are metrics of a split at this step."""
        return False

    @property
    def divergence(self) -> str | None:
        """A warning if the last training loss is far above the first one, else None."""
        return None

    @property
    def stop_reason(self) -> str | None:
        """``callback`` if a callback ends the run, ``error`` if a callback has failed, else None."""
        return None

    def raise_error(self) -> NoReturn:
        """Raises the error of the callback that failed; UserError on other hosts."""
        raise UserError("a callback failed on the first host: see the output of that host")


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
        compiled: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._folder, self._total_steps, self._subject = folder, total_steps, subject
        self._callbacks, self._stopped = callbacks, False
        self._error: Exception | None = None
        self._facts: dict[str, Any] = {}
        self._log = MetricsLog(folder, start_step, provisional)
        lines = read_metrics(folder)
        self._divergence = Divergence(lines, baseline)
        self._written = {(line["step"], line["split"]) for line in lines}
        every = max(log_every, total_steps // MILESTONES)
        self._progress = Progress(total_steps, start_step, every=every, compiled=compiled)
        self._draw_again = time.monotonic() + PLOT_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._log.close()
        with contextlib.suppress(*([OSError] if any(error) else [])):  # only the first error is reported
            self._draw()

    def set_phase(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def set_total_steps(self, total_steps: int) -> None:
        self._progress.set_total_steps(total_steps)

    def step(self, step: int) -> None:
        self._progress.update(step)

    def first_loss(self, loss: float) -> None:
        self._divergence.start(loss)

    def skipped(self, step: SkippedStep) -> None:
        file = step.write(self._folder / SKIPPED_STEPS_FOLDER)
        where = f"there are {MAX_DUMPED_BATCHES} batches in nonfinite/" if file is None else f"its batch is in {file}"
        LOGGER.info(f"step {step.step:,} was skipped: {step.diagnosis}; {where}")

    def spike(self, step: int, loss: float, norm: float, number: int, is_skipped: bool) -> None:
        LOGGER.info(
            f"step {step:,} {'was skipped' if is_skipped else 'is a spike'}: its loss is {loss:.4g}, its gradient norm "
            f"{norm:.4g}; {number:,} spikes so far"
        )

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        metrics = {**self._facts, **metrics}
        self._log.write(split, step, metrics)
        self._written.add((step, split))
        if split == "train":
            self._progress.update(step, metrics)
            if (sentence := self._divergence.update(step, metrics)) is not None:
                LOGGER.warning(sentence)
        else:
            self._progress.log(format_metrics(split, step, metrics))
            if time.monotonic() > self._draw_again:
                self._draw()
        self._call_callbacks(step, split, metrics)

    def _call_callbacks(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        try:
            stops = [callback.on_metrics(step, split, dict(metrics)) for callback in self._callbacks]
        except Exception as error:  # raised by `raise_error` after the state is saved
            self._error = error
            return
        if any(stops) and not self._stopped:
            self._stopped = True
            LOGGER.info(f"a callback ends the run at step {step:,}")

    @property
    def divergence(self) -> str | None:
        return self._divergence.sentence

    @property
    def stop_reason(self) -> str | None:
        if self._error is not None:
            return "error"
        return "callback" if self._stopped else None

    def raise_error(self) -> NoReturn:
        raise require(self._error, "the error of a callback")

    def has_line(self, step: int, split: str) -> bool:
        return (step, split) in self._written

    def _draw(self) -> None:
        from bert.runs.plots import plot_curves

        plot_curves(self._folder, self._subject)
        self._draw_again = time.monotonic() + PLOT_INTERVAL_SECONDS


def make_report(
    run: RunFolder[Any],
    total_steps: int,
    start_step: int,
    subject: Subject | None = None,
    callbacks: Sequence[Callback] = (),
    baseline: tuple[str, float] | None = None,
    compiled: Callable[[], float] = lambda: 0.0,
) -> Report:
    """Returns the report of a run, and calls `Callback.on_start`. On hosts that do not write, the report ignores all
    events.

    Args:
        compiled: returns the seconds of compilation so far.
    """
    if not run.is_writer:
        return Report()
    for callback in callbacks:
        callback.on_start(RunStart(run.path, run.config, start_step, total_steps))
    provisional = _lines_of_earlier_end(run) if run.extended_from == start_step else ()
    every = run.config.training.log_every
    return RunReport(run.path, total_steps, start_step, every, subject, callbacks, provisional, baseline, compiled)


def _lines_of_earlier_end(run: RunFolder[Any]) -> list[str]:
    """Returns the splits whose last line was written only because the run ended there, before it was extended.

    Fine-tuning keeps its evaluation: the best checkpoint may be of this step.
    """
    training, end = run.config.training, require(run.extended_from, "extended_from")
    splits = ["train"] if end % training.log_every else []
    is_pretraining = isinstance(run.config, PretrainConfig)
    return [*splits, "eval"] if is_pretraining and end % require(training.eval_every, "eval_every") else splits
