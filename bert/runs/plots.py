"""Plots of runs: curves.png, and the curves of several runs in one picture."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert import metrics
from bert.files import atomic_write
from bert.runs.metrics_log import read_metrics, read_transfer_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
GREY = "#666666"

STYLES: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.2, "alpha": 0.45},  # faint, because evaluation is more important
    "evaluation": {"linewidth": 1.6, "marker": "o", "markersize": 4.5},
    "baseline": {"linewidth": 1.2, "linestyle": "--"},
}
LEGEND_COLUMNS = 2
LEGEND_TOP = -0.17
"""Upper edge of a legend, as a share of the height of the axes: below the label of the horizontal axis."""
LEGEND_ROW = 0.2
"""Height of a row of the legend, in inches."""
SPLITS = {"train": "training", "eval": "evaluation", "transfer": "evaluation"}


@dataclass(frozen=True)
class Bars:
    """A bar chart next to the curves, instead of the learning rate.

    Attributes:
        title: title of the chart.
        groups: name of a group -> name of a bar -> mean and standard deviation; None for a single score.
    """

    title: str
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]]


@dataclass(frozen=True)
class Subject:
    """Titles, baselines and scores for the plot of a run.

    Attributes:
        title: task and model.
        baseline: name of the baseline that ignores the text, such as ``majority_class``.
        baselines: its scores, by metric of the evaluation.
        main_metric: the score that is always drawn.
        higher_is_better: metric -> whether higher is better; None for metrics without a direction.
        bars: a panel of bars; None for no panel.
    """

    title: str = ""
    baseline: str = "baseline"
    baselines: Mapping[str, float] = field(default_factory=dict)
    main_metric: str = ""
    higher_is_better: Callable[[str], bool | None] = metrics.higher_is_better
    bars: Bars | None = None


def plot_curves(folder: Path | str, subject: Subject | None = None) -> Path | None:
    """Writes FOLDER/curves.png and returns its path; None if there is nothing to draw or no matplotlib."""
    path = Path(folder) / "curves.png"
    with collect_garbage_after():
        drawn = _draw(path, read_curves(folder), subject or Subject())
    return path if drawn else None


def read_curves(folder: Path | str) -> list[dict[str, Any]]:
    """Reads the lines of metrics.jsonl, and the scores of transfer.jsonl as lines of the split ``transfer``."""
    scores = [
        {"step": line["step"], "split": "transfer", f"{line['task']} {line['metric']}": line["mean"]}
        for line in read_transfer_scores(folder)
    ]
    return [*read_metrics(folder), *scores]


def _draw(path: Path, lines: list[dict[str, Any]], subject: Subject) -> bool:
    """Writes the curves. Returns False if there is nothing to draw or no matplotlib."""
    figure = make_curves(lines, subject)
    if figure is None:
        return False
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    return True


def make_curves(lines: list[dict[str, Any]], subject: Subject) -> Figure | None:
    """Returns a figure with a panel for losses, scores, fine-tuned checkpoints, the learning rate and bars.

    Args:
        lines: lines of metrics.jsonl, or the result of `read_curves`.
        subject: title, baselines and bars.

    Returns:
        None if there is nothing to draw or no matplotlib.
    """
    panels = {
        "loss": _losses(metric_names(lines)),
        "score": _scores(lines, subject),
        "fine-tuned": metric_names(lines, "transfer"),
        "learning rate": [name for name in metric_names(lines) if name == "learning_rate"],
    }
    if subject.bars is not None:
        del panels["learning rate"]
    panels = {title: members for title, members in panels.items() if members}
    count = len(panels) + (subject.bars is not None)
    figure = new_figure(5.2 * count, 3.9) if panels else None
    if figure is None:
        return None
    row = figure.subplots(1, count, squeeze=False)[0]
    legend_rows = [
        _draw_panel(axes, title, members, lines, subject)
        for axes, (title, members) in zip(row, panels.items(), strict=False)
    ]
    if subject.bars is not None:
        _draw_bars(row[-1], subject.bars)
    figure.suptitle(subject.title, fontsize=11, parse_math=False)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * max(legend_rows))
    return figure


def new_figure(width: float, height: float) -> Figure | None:
    """Returns an empty figure of a size in inches, without pyplot and its global state; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return None

    class NotebookFigure(Figure):
        """A figure that a notebook shows although pyplot does not know it."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    figure = NotebookFigure(figsize=(width, height), dpi=130, layout=ConstrainedLayoutEngine(wspace=0.04))
    FigureCanvasAgg(figure)
    return figure


def metric_names(lines: list[dict[str, Any]], split: str | None = None) -> list[str]:
    """Returns the names of metrics in lines of metrics.jsonl, of all splits or of one, in their order."""
    selected = (line for line in lines if split is None or line.get("split") == split)
    return list(dict.fromkeys(name for line in selected for name in line if name not in ("step", "split")))


def _losses(names: list[str]) -> list[str]:
    """Returns ``loss`` and its terms; a single term would be the same line."""
    terms = [name for name in names if name.endswith("_loss")]
    return [name for name in names if name == "loss" or (name in terms and (len(terms) > 1 or "loss" not in names))]


def _scores(lines: list[dict[str, Any]], subject: Subject) -> list[str]:
    """Returns the main metric and all metrics for which higher is better, from evaluations or else from training.

    If there are more metrics than colours, the scores of single labels are omitted.
    """
    main, names = subject.main_metric, metric_names(lines, "eval") or metric_names(lines, "train")
    scores = [name for name in names if subject.higher_is_better(name) or name == main]
    scores = [name for name in scores if name not in _losses(names)]
    if len(scores) > len(COLOURS):
        scores = [name for name in scores if name == main or metrics.higher_is_better(name) is not None]
    return sorted(scores, key=lambda name: name != main)[: len(COLOURS)]


@contextlib.contextmanager
def collect_garbage_after() -> Iterator[None]:
    """Collects the reference cycles of a matplotlib figure, which would otherwise be collected late in a long run.

    No collection happens within the block, so that its objects stay in the youngest generation and only that generation
    is searched. A full collection visits all of JAX's objects, and costs a third of a second per plot.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def _draw_panel(axes: Any, title: str, names: list[str], lines: list[dict[str, Any]], subject: Subject) -> int:
    """Draws the curves of some metrics, and returns the number of rows of the legend."""
    is_rate = title == "learning rate"
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    drawn: list[str] = []
    for name, colour in colours.items():
        for split, style in SPLITS.items():
            steps, values = series(lines, split, name)
            if steps:
                drawn.append(style)
                draw_line(axes, steps, values, style, color=colour, **({"alpha": 1} if is_rate else {}))
        if name in subject.baselines:
            drawn.append("baseline")
            axes.axhline(subject.baselines[name], color=colour, **STYLES["baseline"])

    format_axes(axes, names[0].replace("_", " ") if len(names) == 1 else title)
    if not is_rate:
        return _add_legend(axes, colours, drawn, subject.baseline)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.set_ylim(bottom=0)
    return 0


def draw_line(axes: Any, steps: list[int], values: list[float], style: str, **look: Any) -> None:
    """Draws one curve in one of the `STYLES`, modified by ``look``."""
    dot = {"marker": "."} if len(steps) == 1 else {}  # a single point is not a line
    axes.plot(steps, values, **{**dot, **STYLES[style], **look})


def format_axes(axes: Any, label: str) -> None:
    """Labels the axes of a metric over steps, without a frame."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250k, 1M


def style_handles(drawn: Container[str], baseline: str) -> list[Any]:
    """Returns the legend's entries for the styles of lines, in grey."""
    from matplotlib.lines import Line2D

    labels = {style: baseline.replace("_", " ") if style == "baseline" else style for style in STYLES}
    return [Line2D([], [], color=GREY, label=labels[style], **look) for style, look in STYLES.items() if style in drawn]


BAR_COLOURS = (COLOURS[0], "#BBBBBB", "#777777", "#DDDDDD")
"""Colours of the bars of a group; the first bar stands out."""


def _draw_bars(axes: Any, bars: Bars) -> None:
    names = list(dict.fromkeys(name for group in bars.groups.values() for name in group))
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        has_bar = [index for index, group in enumerate(bars.groups.values()) if name in group]
        scores = [group[name] for group in bars.groups.values() if name in group]
        drawn = axes.bar(
            [index + (number - (len(names) - 1) / 2) * width for index in has_bar],
            [mean for mean, _ in scores],
            width,
            yerr=[deviation or 0 for _, deviation in scores],
            color=BAR_COLOURS[number % len(BAR_COLOURS)],
            label=name.replace("_", " "),
        )
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    axes.set_xticks(range(len(bars.groups)), list(bars.groups), parse_math=False)
    axes.set_ylim(0, 1)
    axes.set_title(bars.title, fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, LEGEND_TOP), "ncols": len(names)}
    axes.legend(frameon=False, fontsize=9, **below)


def _add_legend(axes: Any, colours: Mapping[str, str], drawn: list[str], baseline: str) -> int:
    """Adds an entry for each metric and one for each style, which are fewer than the lines.

    The legend is below the axes: inside, curves, baselines and grid lines would cross its entries in many runs.

    Returns:
        the number of rows.
    """
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    handles += style_handles(drawn, baseline)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, LEGEND_TOP), "ncols": LEGEND_COLUMNS}
    axes.legend(handles=handles, frameon=False, fontsize=9, **below)
    return math.ceil(len(handles) / LEGEND_COLUMNS)


def series(lines: list[dict[str, Any]], split: str, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of one metric; null, which means NaN, is a gap."""
    points = [(line["step"], line[name]) for line in lines if line.get("split") == split and name in line]
    points = [(step, value) for step, value in points if value is None or isinstance(value, (int, float))]
    return [step for step, _ in points], [math.nan if value is None else float(value) for _, value in points]


SOFTWARE = "bert compare"
"""The PNG's entry ``Software``, which identifies plots of earlier comparisons."""

MARKERS = "os^Dv"
"""Markers of evaluations; the next one is used after all colours."""


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run.

    Attributes:
        name: name in the legend.
        group: the task, or "pretraining". Each group has its own panels.
        lines: lines of metrics.jsonl for each seed of the run, or results of `read_curves`.
        subject: the run's main metric and baselines.
    """

    name: str
    group: str
    lines: Sequence[list[dict[str, Any]]]
    subject: Subject

    def metrics(self) -> list[str]:
        """Returns the losses of the evaluations without their sum, the main metric, and scores of checkpoints."""
        names = list(dict.fromkeys(name for lines in self.lines for name in metric_names(lines, "eval")))
        losses = [name for name in names if name.endswith("_loss")] or [name for name in names if name == "loss"]
        main = [name for name in names if name == self.subject.main_metric and name not in losses]
        return [*losses, *main, *(name for lines in self.lines for name in metric_names(lines, "transfer"))]


def plot_comparison(path: Path, runs: Sequence[RunCurves]) -> bool:
    """Writes a PNG with a row of panels per group, a panel per held-out metric and a colour per run.

    Returns:
        False if no run has been evaluated; then no plot is written.
    """
    with collect_garbage_after():
        figure = make_comparison(runs)
        if figure is None:
            return False
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": SOFTWARE})
    return True


def make_comparison(runs: Sequence[RunCurves]) -> Figure | None:
    """Returns the figure of `plot_comparison`; None if no run has been evaluated or there is no matplotlib."""
    metrics = {
        run.group: list(dict.fromkeys(name for one in runs if one.group == run.group for name in one.metrics()))
        for run in runs
    }
    columns = max(map(len, metrics.values()))
    figure = new_figure(1 + 4.8 * columns, 1 + 3.6 * len(metrics)) if columns else None
    if figure is None:
        return None
    looks = _line_looks(runs)
    grid = figure.subplots(len(metrics), columns, squeeze=False)
    drawn: set[str] = set()
    for row, (group, names) in zip(grid, metrics.items(), strict=True):
        members = [(run, look) for run, look in zip(runs, looks, strict=True) if run.group == group]
        for axes, name in zip(row, names, strict=False):
            drawn |= _draw_metric(axes, name, members)
            format_axes(axes, (f"{group} " if len(metrics) > 1 else "") + name.replace("_", " "))
        for axes in row[len(names) :]:
            axes.remove()
    figure.suptitle(f"{', '.join(metrics)}: {len(runs)} run{'s'[: len(runs) > 1]}", fontsize=11, parse_math=False)
    handles = _comparison_legend(runs, looks, drawn)
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns, frameon=False, fontsize=9)
    return figure


def is_comparison(path: Path) -> bool:
    """Returns whether a file is a plot of `plot_comparison`."""
    with path.open("rb") as file:
        return f"Software\0{SOFTWARE}".encode() in file.read(512)


def _line_looks(runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Returns a colour for each run, with other markers once all colours are used."""
    places = (divmod(index, len(COLOURS)) for index in range(len(runs)))
    return [{"color": COLOURS[colour], "marker": MARKERS[turn % len(MARKERS)]} for turn, colour in places]


def _draw_metric(axes: Any, name: str, runs: Sequence[tuple[RunCurves, dict[str, Any]]]) -> set[str]:
    """Draws one metric of the runs that have it, and returns the styles of its lines."""
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


def _comparison_legend(runs: Sequence[RunCurves], looks: Sequence[dict[str, Any]], drawn: set[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    names = {run.subject.baseline for run in runs if run.subject.baselines}
    handles = [Line2D([], [], label=run.name, **look) for run, look in zip(runs, looks, strict=True)]
    return [*handles, *style_handles(drawn, names.pop() if len(names) == 1 else "baseline")]
