"""Progress of a run: a bar on the terminal or messages, the time left, tables."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from bert.errors import require
from bert.messages import LOGGER, PRINT_HANDLER, are_printed, format_number


@dataclass(frozen=True)
class StepCosts:
    """How the time of a run is spread over its steps.

    Attributes:
        phases: last step, and seconds of each step, of each phase.
        once: (step, seconds) of what is done a single time, before the step is finished: compilations, the scoring at
            the end.
        evaluations: last step, steps between two evaluations, and seconds of each evaluation, of each phase.
    """

    phases: tuple[tuple[int, float], ...]
    once: tuple[tuple[int, float], ...] = ()
    evaluations: tuple[tuple[int, int, float], ...] = ()

    def cost(self, first: int, last: int) -> float:
        """Seconds of the steps first + 1 to last, with all that is done between them."""
        total, begin = sum(seconds for step, seconds in self.once if first < step <= last), 0
        for end, each in self.phases:
            total += each * max(0, min(last, end) - max(first, begin))
            begin = end
        begin = 0
        for end, every, seconds in self.evaluations:
            low, high = max(first, begin), min(last, end)
            if low < high:
                total += seconds * (high // every - low // every + (high == end and end % every > 0))
            begin = end
        return total

    def each(self, step: int) -> float:
        """Seconds of the step after ``step`` alone."""
        return next((each for end, each in self.phases if step < end), self.phases[-1][1])


ESTIMATE_AFTER_SECONDS = 5
"""How long the first steps of a run are watched before its end is estimated: the first ones of all are slower."""


QUIET_SECONDS = 30
"""Longest time without a line while steps are done, where there is no bar: steps may be slow, or log lines rare."""


class Progress:
    """How far a run is: a bar on a terminal, otherwise a message at most every ``every`` steps."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        label: str = "training",
        every: int = 1,
    ) -> None:
        self.total_steps, self.label, self.every = total_steps, label, every
        self._pace = StepCosts(((total_steps, 1.0),))
        self._step = self._last_line = start_step
        self._last_time: float | None = None
        self._since: tuple[float, int] | None = None  # (time, step) of the first update: compilation is behind it
        self._is_estimated = True
        self._bar = _bar() if are_printed() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
        if self._bar is not None:
            self._task = self._bar.add_task(label, total=total_steps, completed=start_step, metrics="", left="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            PRINT_HANDLER.console = self._bar.console
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            PRINT_HANDLER.console = None
            self._bar.stop()

    def follow(self, pace: StepCosts) -> None:
        """Takes another estimate of how the time is spread; the first steps then tell how fast the run is, and `update`
        says when it is estimated to end."""
        self._pace, self._is_estimated = pace, False

    def set_total_steps(self, total_steps: int) -> None:
        """Changes the number of steps."""
        self.total_steps = total_steps
        if self._bar is not None:
            self._bar.update(self._task, total=total_steps)

    def update(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Says that step steps are done; metrics, where there are new ones, are shown."""
        self._step, now = step, time.monotonic()
        if self._since is None:
            self._since, self._last_time = (now, step), now
        began, first = self._since
        expected, left = self._pace.cost(first, step), ""
        if expected > 0 and step < self.total_steps:
            slowness = (now - began) / expected
            seconds_left = slowness * self._pace.cost(step, self.total_steps)
            left = f"{format_duration(seconds_left)} left"
            if not self._is_estimated and (metrics is not None or now - began >= ESTIMATE_AFTER_SECONDS):
                self._say_estimate(slowness * self._pace.each(step), seconds_left)
        if self._bar is not None:
            fields = {} if metrics is None else {"metrics": _short(metrics)}
            self._bar.update(self._task, completed=step, left=left, **fields)
        elif now - require(self._last_time, "the first update") >= QUIET_SECONDS or (
            metrics is not None and (step - self._last_line >= self.every or step >= self.total_steps)
        ):
            self._last_line, self._last_time = (self._last_line if metrics is None else step), now
            percent = 100 * step // max(self.total_steps, 1)
            texts = [f"step {step}/{self.total_steps} ({percent}%)", *_format_metrics(metrics or {}), left]
            LOGGER.info("  ".join(text for text in texts if text))

    def _say_estimate(self, step_seconds: float, seconds_left: float) -> None:
        """Says once when the run is estimated to end."""
        self._is_estimated = True
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds_left)
        LOGGER.info(
            f"about {step_seconds:.3g} s a step: {self.label} is estimated to end {end:%Y-%m-%d %H:%M}, "
            f"in {format_duration(seconds_left)}, with compilation and evaluations"
        )


def _bar() -> Any:
    """rich's bar, not started; None where rich is not installed."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=24),
        TextColumn("step"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}", style="cyan"),
        TextColumn("{task.fields[left]}", style="dim"),
        refresh_per_second=4,
    )


def format_metrics(split: str, step: int, metrics: dict[str, Any]) -> str:
    """One line for people: ``eval  step 500  loss 2.345  mlm_accuracy 0.412``."""
    return "  ".join([split, f"step {step}", *_format_metrics(metrics)])


def format_duration(seconds: float) -> str:
    """45s, 3m10s, 2h05m, 3d04h."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def progress_lines(say: Callable[[str], None]) -> Callable[[str, int, int | None], None]:
    """Progress of preprocessing as lines, no more than one every few seconds a stage."""
    last: dict[str, float] = {}

    def tell(stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage not in last or now - last[stage] > 5 or (total and done == total):
            last[stage] = now
            say(f"{stage}: {done:,}" + (f" of {total:,}" if total else "") if done else stage)

    return tell


def log_table(rows: list[tuple[str, str]]) -> None:
    """Logs the facts of a run, names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *more = str(value).splitlines() or [""]
        LOGGER.info(f"  {name:{width}}  {first}".rstrip())
        for line in more:
            LOGGER.info(f"  {'':{width}}  {line}")


def align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need; the first one to the left, numbers to the right."""
    first, *others = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    return [
        f"  {name:{max(first)}}"
        + "".join(f"  {cell:>{max(widths)}}" for cell, widths in zip(cells, others, strict=True)).rstrip()
        for name, *cells in rows
    ]


def _format_metrics(metrics: dict[str, Any]) -> list[str]:
    """Each number with its name, as short as it stays readable."""
    texts = []
    for name, value in metrics.items():
        if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
            continue
        value = value.item() if hasattr(value, "item") else value  # NumPy's and JAX's scalars
        as_float = float(value)
        if name == "learning_rate":
            texts.append(f"lr {as_float:.1e}")
        elif name.endswith("_per_second"):
            texts.append(f"{as_float:,.0f} {name.removesuffix('_per_second')}/s")
        elif isinstance(value, int):
            texts.append(f"{name} {value:,}")
        else:
            small = 0 < abs(as_float) < 0.001
            texts.append(f"{name} {as_float:.1e}" if small else f"{name} {format_number(as_float, 3)}")
    return texts


def _short(metrics: dict[str, Any]) -> str:
    """What fits next to a bar."""
    names = ("phase", "loss", "tokens_per_second")
    return "  ".join(_format_metrics({name: metrics[name] for name in names if name in metrics}))
