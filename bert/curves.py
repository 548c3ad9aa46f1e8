"""curves.png: the losses, scores and learning rate of metrics.jsonl over the steps."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert.files import replacing
from bert.report import read_metrics

SCORES = ("accuracy", "f1", "exact_match", "matthews_correlation", "pearson", "spearman")
"""Ends of the names of metrics for which more is better."""

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw_curves(folder: Path | str) -> Path | None:
    """Writes FOLDER/curves.png and returns its path; None where there is nothing to draw or no matplotlib."""
    lines = read_metrics(folder)
    names = list(dict.fromkeys(name for line in lines for name in line if name not in ("step", "split")))
    panels = {
        "loss": [name for name in names if name.endswith("loss")],
        "score": [name for name in names if name.endswith(SCORES)],
        "learning rate": [name for name in names if name == "learning_rate"],
    }
    panels = {title: members for title, members in panels.items() if members}
    if not panels:
        return None
    path = Path(folder) / "curves.png"
    with _its_cycles_collected():
        drawn = _draw(path, panels, lines)
    return path if drawn else None


@contextlib.contextmanager
def _its_cycles_collected() -> Iterator[None]:
    """Frees what the block leaves behind: a figure is a web of cycles, and Python seldom looks for those of a long run.

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


def _draw(path: Path, panels: dict[str, list[str]], lines: list[dict[str, Any]]) -> bool:
    """Draws the panels side by side; says whether there is matplotlib."""
    try:
        # The Agg canvas without pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return False
    figure = Figure(figsize=(5.2 * len(panels), 3.9), dpi=130, layout=ConstrainedLayoutEngine(wspace=0.04))
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, members) in zip(row, panels.items(), strict=True):
        _draw_panel(axes, title, members, lines)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return True


def _draw_panel(axes: Any, title: str, names: list[str], lines: list[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator

    is_rate = title == "learning rate"
    train: dict[str, Any] = {"linewidth": 1.2, "alpha": 1 if is_rate else 0.45}  # faint: evaluation is what counts
    evaluation: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 4.5}
    styles = {"train": train, "eval": evaluation}
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    splits = set()
    for name, colour in colours.items():
        for split, style in styles.items():
            steps, values = _series(lines, split, name)
            if steps:
                splits.add(split)
                dot = {"marker": "."} if len(steps) == 1 else {}  # one point makes no line
                axes.plot(steps, values, color=colour, **{**dot, **style})

    axes.set_xlabel("step")
    axes.set_ylabel("accuracy" if all(name.endswith("accuracy") for name in names) else title)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250k, 1M
    if is_rate:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.set_ylim(bottom=0)
        return
    # One entry a metric and one a split: half the legend of one a line.
    handles = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    for split, label in (("train", "training"), ("eval", "evaluation")):
        if split in splits:
            handles.append(Line2D([], [], color="#666666", label=label, **styles[split]))
    axes.legend(handles=handles, frameon=False, fontsize=9)


def _series(lines: list[dict[str, Any]], split: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; a null, which stands for NaN, is a gap."""
    points = [(line["step"], line[name]) for line in lines if line.get("split") == split and name in line]
    points = [(step, value) for step, value in points if value is None or isinstance(value, (int, float))]
    return [step for step, _ in points], [math.nan if value is None else float(value) for _, value in points]
