"""What people see of a run: progress, one line a log step in metrics.jsonl and TensorBoard, results.json.

rich and tensorboardX are imported at the moment of use. A machine without them gets plain lines and no
TensorBoard; metrics.jsonl has everything.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bert import nonfinite
from bert.files import replacing
from bert.nonfinite import SkippedStep
from bert.tensorboard import EventFile
from bert.values import known

if TYPE_CHECKING:
    from bert.curves import Subject


class MetricsLog:
    """metrics.jsonl and its twin in TensorBoard. Only one process may hold it.

    On resume both go back to start_step: later lines, and a half line left by a kill, are cut off, so that
    the files are those of a run never interrupted. At start_step 0 the run begins anew, and so do they.
    """

    def __init__(self, folder: Path | str, start_step: int) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(folder) if line["step"] <= start_step] if start_step else []
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        try:
            self._events: EventFile | None = EventFile(folder / "tensorboard", kept)
        except ImportError:
            self._events = None

    def write(self, split: str, step: int, metrics: dict[str, Any]) -> None:
        """Appends one line; split is "train" or "eval". NaN and infinities become null: JSON has neither."""
        line = plain({"step": step, "split": split, **metrics})
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()  # a kill may lose the step, never the lines before it
        if self._events is not None:
            self._events.write(line)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none where there is no file."""
    path = Path(folder) / "metrics.jsonl"
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the half line of a kill
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


@dataclass(frozen=True)
class Pace:
    """How the time of a run is spread over its steps.

    Attributes:
        parts: last step, and seconds of each step, of each phase.
        once: (step, seconds) of what is done a single time, before the step is finished: compilations, the scoring at
            the end.
        evaluations: last step, steps between two evaluations, and seconds of each evaluation, of each phase.
    """

    parts: tuple[tuple[int, float], ...]
    once: tuple[tuple[int, float], ...] = ()
    evaluations: tuple[tuple[int, int, float], ...] = ()

    def cost(self, first: int, last: int) -> float:
        """Seconds of the steps first + 1 to last, with all that is done between them."""
        total, begin = sum(seconds for step, seconds in self.once if first < step <= last), 0
        for end, each in self.parts:
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
        return next((each for end, each in self.parts if step < end), self.parts[-1][1])

    def scaled(self, factor: float) -> Pace:
        """The pace of a machine that takes ``factor`` times as long."""
        return Pace(
            tuple((end, each * factor) for end, each in self.parts),
            tuple((step, seconds * factor) for step, seconds in self.once),
            tuple((end, every, seconds * factor) for end, every, seconds in self.evaluations),
        )


class Progress:
    """How far a run is: a bar on a terminal, otherwise a plain line at most every ``every`` steps."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        label: str = "training",
        every: int = 1,
        pace: Pace | None = None,
    ) -> None:
        self.total_steps, self.label, self.every = total_steps, label, every
        self._pace = pace or Pace(((total_steps, 1.0),))
        self._step = self._last_line = start_step
        self._since: tuple[float, int] | None = None  # (time, step) of the first update: compilation is behind it
        self._bar = _bar() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
        if self._bar is not None:
            self._task = self._bar.add_task(label, total=total_steps, completed=start_step, metrics="", left="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def follow(self, pace: Pace) -> None:
        """Takes another estimate of how the time is spread."""
        self._pace = pace

    def update(self, step: int, metrics: dict[str, Any] | None = None) -> None:
        """Says that step steps are done; metrics, where there are new ones, are shown."""
        self._step = step
        if self._since is None:
            self._since = (time.monotonic(), step)
        left = self._left()
        if self._bar is not None:
            fields = {} if metrics is None else {"metrics": _short(metrics)}
            self._bar.update(self._task, completed=step, left=left, **fields)
        elif metrics is not None and (step - self._last_line >= self.every or step >= self.total_steps):
            self._last_line = step
            percent = 100 * step // max(self.total_steps, 1)
            parts = [f"step {step}/{self.total_steps} ({percent}%)", *_formatted(metrics), left]
            print("  ".join(part for part in parts if part), flush=True)

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _left(self) -> str:
        began, first = known(self._since, "the first update")
        seconds, done = time.monotonic() - began, self._pace.cost(first, self._step)
        if done <= 0 or self._step >= self.total_steps:
            return ""
        return f"{format_duration(seconds / done * self._pace.cost(self._step, self.total_steps))} left"


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
    return "  ".join([split, f"step {step}", *_formatted(metrics)])


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


def startup_table(rows: list[tuple[str, str]]) -> None:
    """Prints the facts of a run, names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        first, *more = str(value).splitlines() or [""]
        print(f"  {name:{width}}  {first}".rstrip())
        for line in more:
            print(f"  {'':{width}}  {line}")
    sys.stdout.flush()


def write_results(folder: Path | str, results: dict[str, Any]) -> None:
    """results.json, whole or not at all; numbers that are not finite become null."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.json") as temporary:
        text = json.dumps(plain(results), indent=2, allow_nan=False)
        # A row of a matrix on one line. No text matches: in JSON it has no line ends.
        text = re.sub(r"\[\n +(-?\d+(?:,\n +-?\d+)*)\n +\]", lambda row: f"[{' '.join(row[1].split())}]", text)
        temporary.write_text(text + "\n", encoding="utf-8")


def scored_splits(results: dict[str, Any]) -> list[str]:
    """The splits that a fine-tuning run's results have scores of, the one that chooses checkpoints first."""
    return [name for name in results if name in ("dev", "test") or name.startswith("dev_")]


def plain(value: Any) -> Any:
    """The value as JSON has it: arrays as lists, NaN and infinities as None, paths as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and JAX's arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _formatted(metrics: dict[str, Any]) -> list[str]:
    """Each number with its name, as short as it stays readable."""
    parts = []
    for name, value in metrics.items():
        if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
            continue
        value = value.item() if hasattr(value, "item") else value  # NumPy's and JAX's scalars
        number = float(value)
        if name == "learning_rate":
            parts.append(f"lr {number:.1e}")
        elif name.endswith("_per_second"):
            parts.append(f"{number:,.0f} {name.removesuffix('_per_second')}/s")
        elif isinstance(value, int):
            parts.append(f"{name} {value:,}")
        else:
            small = 0 < abs(number) < 0.001
            parts.append(f"{name} {number:.1e}" if small else f"{name} {number:.3f}")
    return parts


def _short(metrics: dict[str, Any]) -> str:
    """What fits beside a bar."""
    names = ("phase", "loss", "tokens_per_second")
    return "  ".join(_formatted({name: metrics[name] for name in names if name in metrics}))


SECONDS_A_DRAWING = 20
"""At least between two pictures of the curves, each of which takes up to a second of a processor; the last is always
drawn."""


class RunReport:
    """What `bert.train.fit` tells goes to metrics.jsonl, TensorBoard, curves.png and the eyes of people."""

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        start_step: int,
        log_every: int,
        pace: Pace | None = None,
        subject: Subject | None = None,
    ) -> None:
        self._folder, self._total_steps, self._subject = folder, total_steps, subject
        self._pace = pace
        self._facts: dict[str, Any] = {}
        self._log = MetricsLog(folder, start_step)
        self._evaluated = {line["step"] for line in read_metrics(folder) if line["split"] == "eval"}
        self._progress = Progress(total_steps, start_step, every=log_every, pace=pace)
        self._draw_again = time.monotonic() + SECONDS_A_DRAWING

    def __enter__(self) -> RunReport:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)
        self._log.close()
        with contextlib.suppress(*([OSError] if any(error) else [])):  # what went wrong first is what is told
            self._draw()

    def enters(self, facts: dict[str, Any]) -> None:
        """A phase begins: from here on each line of figures has these facts as well."""
        self._facts = facts

    def begins(self, step: int, pace: Pace) -> None:
        """The first step is about to run, and what is to come has been timed; of several phases, this one."""
        if self._pace is not None:
            pace = self._pace.scaled(pace.each(step) / self._pace.each(step))
        self._progress.follow(pace)
        seconds = pace.cost(step, self._total_steps)
        end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        self.say(
            f"about {pace.each(step):.3g} s a step: estimated end {end:%Y-%m-%d %H:%M}, in {format_duration(seconds)}, "
            "with compilation and evaluations"
        )

    def step(self, step: int, loss: float) -> None:
        """A step is finished."""
        self._progress.update(step)

    def skipped(self, step: SkippedStep) -> None:
        """A step had no effect: its batch is written down."""
        file = step.write(self._folder / nonfinite.FOLDER)
        where = "as many are written down already" if file is None else f"its batch stands in {file}"
        self.say(f"step {step.step:,} was skipped: {step.diagnosis}; {where}")

    def metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        """There are new figures."""
        metrics = {**self._facts, **metrics}
        self._log.write(split, step, metrics)
        if split == "train":
            self._progress.update(step, metrics)
            return
        self._evaluated.add(step)
        self._progress.say(format_metrics(split, step, metrics))
        if time.monotonic() > self._draw_again:
            self._draw()

    def evaluated(self, step: int) -> bool:
        """Whether metrics.jsonl has an evaluation at this step."""
        return step in self._evaluated

    def say(self, text: str) -> None:
        """A line for people."""
        self._progress.say(text)

    def _draw(self) -> None:
        from bert.curves import draw_curves

        draw_curves(self._folder, self._subject)
        self._draw_again = time.monotonic() + SECONDS_A_DRAWING
