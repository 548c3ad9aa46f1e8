"""The curves of several runs in one picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.files import atomic_write
from bert.runs.curves import (
    COLOURS,
    GREY,
    SPLITS,
    STYLES,
    Subject,
    collect_garbage_after,
    draw_line,
    format_axes,
    metric_names,
    series,
    style_handles,
)

SOFTWARE = "bert compare"
"""The PNG's entry ``Software``, by which a picture of an earlier comparison is recognised."""

MARKERS = "os^Dv"
"""Markers of evaluations; a new one when all colours are used."""


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run.

    Attributes:
        name: in the legend.
        group: runs of another one have panels of their own: the task, or "pretraining".
        lines: of metrics.jsonl, for each seed of the run.
        subject: the run's main metric and baselines.
    """

    name: str
    group: str
    lines: Sequence[list[dict[str, Any]]]
    subject: Subject

    def metrics(self) -> list[str]:
        """The losses of the evaluations, without their sum, and the main metric."""
        names = list(dict.fromkeys(name for lines in self.lines for name in metric_names(lines, "eval")))
        losses = [name for name in names if name.endswith("_loss")] or [name for name in names if name == "loss"]
        return [*losses, *(name for name in names if name == self.subject.main_metric and name not in losses)]


def plot_comparison(path: Path, runs: Sequence[RunCurves]) -> bool:
    """Writes a PNG with a row of panels per group, a panel per held-out metric and a colour per run.

    Returns:
        False, and no picture is written, if no run has been evaluated.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = {
        run.group: list(dict.fromkeys(name for one in runs if one.group == run.group for name in one.metrics()))
        for run in runs
    }
    columns = max(map(len, metrics.values()))
    if not columns:
        return False
    looks = _looks(runs)
    with collect_garbage_after():
        figure = Figure(figsize=(1 + 4.8 * columns, 1 + 3.6 * len(metrics)), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(metrics), columns, squeeze=False)
        drawn: set[str] = set()
        for row, (group, names) in zip(grid, metrics.items(), strict=True):
            members = [(run, look) for run, look in zip(runs, looks, strict=True) if run.group == group]
            for axes, name in zip(row, names, strict=False):
                drawn |= _draw(axes, name, members)
                format_axes(axes, (f"{group} " if len(metrics) > 1 else "") + name.replace("_", " "))
            for axes in row[len(names) :]:
                axes.remove()
        figure.suptitle(f"{', '.join(metrics)}: {len(runs)} run{'s'[: len(runs) > 1]}", fontsize=11, parse_math=False)
        handles = _legend(runs, looks, drawn)
        figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, frameon=False, fontsize=9)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": SOFTWARE})
    return True


def is_comparison(path: Path) -> bool:
    """Whether a file is a picture of `plot_comparison`."""
    with path.open("rb") as file:
        return f"Software\0{SOFTWARE}".encode() in file.read(512)


def _looks(runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """A colour for each run; with more runs than colours, other markers."""
    places = (divmod(index, len(COLOURS)) for index in range(len(runs)))
    return [{"color": COLOURS[colour], "marker": MARKERS[turn % len(MARKERS)]} for turn, colour in places]


def _draw(axes: Any, name: str, runs: Sequence[tuple[RunCurves, dict[str, Any]]]) -> set[str]:
    """Draws one metric of the runs that have it, and returns the kinds of lines it took."""
    drawn: set[str] = set()
    baselines: dict[float, list[str]] = {}
    for run, look in runs:
        for (split, style), lines in itertools.product(SPLITS.items(), run.lines):
            steps, values = series(lines, split, name)
            if steps:
                drawn.add(style)
                thin = {"linewidth": 0.8, "marker": "" if len(steps) > 1 else "."} if split == "train" else {}
                draw_line(axes, steps, values, style, **{**look, **thin})
        if name in run.subject.baselines:
            baselines.setdefault(run.subject.baselines[name], []).append(look["color"])
    for value, colours in baselines.items():
        drawn.add("baseline")
        is_shared = len(baselines) == 1 or len(colours) > 1
        axes.axhline(value, color=GREY if is_shared else colours[0], **STYLES["baseline"])
    return drawn


def _legend(runs: Sequence[RunCurves], looks: Sequence[dict[str, Any]], drawn: set[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    names = {run.subject.baseline for run in runs if run.subject.baselines}
    handles = [Line2D([], [], label=run.name, **look) for run, look in zip(runs, looks, strict=True)]
    return [*handles, *style_handles(drawn, names.pop() if len(names) == 1 else "baseline")]
