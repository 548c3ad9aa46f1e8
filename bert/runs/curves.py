"""curves.png: the losses, scores and learning rate of metrics.jsonl over the steps."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert import metrics
from bert.files import atomic_write
from bert.runs.metrics_log import read_metrics

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
GREY = "#666666"

STYLES: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.2, "alpha": 0.45},  # faint: evaluation is what counts
    "evaluation": {"linewidth": 1.6, "marker": "o", "markersize": 4.5},
    "baseline": {"linewidth": 1.2, "linestyle": "--"},
}
SPLITS = {"train": "training", "eval": "evaluation"}


@dataclass(frozen=True)
class Bars:
    """A bar chart next to the curves.

    Attributes:
        title: above the bars.
        metric: that they show.
        scores: name of a bar -> its mean and standard deviation, None for a single score.
    """

    title: str
    metric: str
    scores: Mapping[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Subject:
    """What the curves are of.

    Attributes:
        title: task and model.
        baseline: name of the answer that looks at no text, such as ``majority_class``.
        baselines: its scores, by the names of the evaluation's metrics.
        main_metric: the score that is drawn in any case.
        higher_is_better: metric -> its direction, None for none.
        bars: a panel of bars; None for none.
    """

    title: str = ""
    baseline: str = "baseline"
    baselines: Mapping[str, float] = field(default_factory=dict)
    main_metric: str = ""
    higher_is_better: Callable[[str], bool | None] = metrics.higher_is_better
    bars: Bars | None = None


def plot_curves(folder: Path | str, subject: Subject | None = None) -> Path | None:
    """Writes FOLDER/curves.png and returns its path; None where there is nothing to draw or no matplotlib."""
    lines, subject = read_metrics(folder), subject or Subject()
    panels = {
        "loss": _losses(metric_names(lines)),
        "score": _scores(lines, subject),
        "learning rate": [name for name in metric_names(lines) if name == "learning_rate"],
    }
    panels = {title: members for title, members in panels.items() if members}
    if not panels:
        return None
    path = Path(folder) / "curves.png"
    with collect_garbage_after():
        drawn = _draw(path, panels, lines, subject)
    return path if drawn else None


def metric_names(lines: list[dict[str, Any]], split: str | None = None) -> list[str]:
    """The names of the metrics in lines of metrics.jsonl, of all or of one split, in their order."""
    held = (line for line in lines if split is None or line.get("split") == split)
    return list(dict.fromkeys(name for line in held for name in line if name not in ("step", "split")))


def _losses(names: list[str]) -> list[str]:
    """``loss`` and the losses it is the sum of; a single one of these is the same line."""
    terms = [name for name in names if name.endswith("_loss")]
    return [name for name in names if name == "loss" or (name in terms and (len(terms) > 1 or "loss" not in names))]


def _scores(lines: list[dict[str, Any]], subject: Subject) -> list[str]:
    """The main metric and all of which more is better, of the evaluations; of a run without one, of training.

    The axis has place for as many as there are colours: beyond that the scores of single labels are left out.
    """
    main, names = subject.main_metric, metric_names(lines, "eval") or metric_names(lines, "train")
    scores = [name for name in names if subject.higher_is_better(name) or name == main]
    scores = [name for name in scores if name not in _losses(names)]
    if len(scores) > len(COLOURS):
        scores = [name for name in scores if name == main or metrics.higher_is_better(name) is not None]
    return sorted(scores, key=lambda name: name != main)[: len(COLOURS)]


@contextlib.contextmanager
def collect_garbage_after() -> Iterator[None]:
    """Collects the reference cycles that a matplotlib figure leaves, which the garbage collector would otherwise
    reach only late in a long run.

    No collection within the block, so that all it makes stays in the youngest generation and only that is looked
    through: a whole collection walks all that JAX holds, a third of a second after each drawing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def _draw(path: Path, panels: dict[str, list[str]], lines: list[dict[str, Any]], subject: Subject) -> bool:
    """Draws the panels side by side; says whether there is matplotlib."""
    try:
        # The Agg canvas without pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return False
    count = len(panels) + (subject.bars is not None)
    figure = Figure(figsize=(5.2 * count, 3.9), dpi=130, layout=ConstrainedLayoutEngine(wspace=0.04))
    FigureCanvasAgg(figure)
    row = figure.subplots(1, count, squeeze=False)[0]
    for axes, (title, members) in zip(row, panels.items(), strict=False):
        _draw_panel(axes, title, members, lines, subject)
    if subject.bars is not None:
        _draw_bars(row[-1], subject.bars)
    figure.suptitle(subject.title, fontsize=11, parse_math=False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    return True


def _draw_panel(axes: Any, title: str, names: list[str], lines: list[dict[str, Any]], subject: Subject) -> None:
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
    if is_rate:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.set_ylim(bottom=0)
    else:
        _add_legend(axes, colours, drawn, subject.baseline)


def draw_line(axes: Any, steps: list[int], values: list[float], style: str, **look: Any) -> None:
    """Draws one curve in one of the `STYLES`, changed by ``look``."""
    dot = {"marker": "."} if len(steps) == 1 else {}  # one point makes no line
    axes.plot(steps, values, **{**dot, **STYLES[style], **look})


def format_axes(axes: Any, label: str) -> None:
    """Steps to the right, the metric upwards, and no frame."""
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
    """The legend's entries for the kinds of lines, in grey."""
    from matplotlib.lines import Line2D

    labels = {style: baseline.replace("_", " ") if style == "baseline" else style for style in STYLES}
    return [Line2D([], [], color=GREY, label=labels[style], **look) for style, look in STYLES.items() if style in drawn]


def _draw_bars(axes: Any, bars: Bars) -> None:
    names = [*bars.scores][::-1]  # the first one on top
    means, deviations = zip(*(bars.scores[name] for name in names), strict=True)
    drawn = axes.barh(
        [name.replace("_", " ") for name in names],
        means,
        xerr=[deviation or 0 for deviation in deviations],
        color=["#BBBBBB"] * (len(names) - 1) + [COLOURS[0]],
    )
    axes.bar_label(drawn, fmt="%.3f", padding=4, fontsize=9)
    axes.margins(x=0.2)
    axes.set_title(bars.title, fontsize=10, parse_math=False)
    axes.set_xlabel(bars.metric.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)


def _add_legend(axes: Any, colours: Mapping[str, str], drawn: list[str], baseline: str) -> None:
    """One entry for each metric and one for each kind of line: half as many as one for each line."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=[*handles, *style_handles(drawn, baseline)], frameon=False, fontsize=9)


def series(lines: list[dict[str, Any]], split: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; a null, which means NaN, is a gap."""
    points = [(line["step"], line[name]) for line in lines if line.get("split") == split and name in line]
    points = [(step, value) for step, value in points if value is None or isinstance(value, (int, float))]
    return [step for step, _ in points], [math.nan if value is None else float(value) for _, value in points]
