"""confusion_matrix.png: which labels a classifier takes for which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert.files import atomic_write

COUNTED = 25
"""Most labels with a count in every cell."""

LONGEST_NAME = 28
"""Characters of a label's name that are shown."""


def draw_confusion_matrix(path: Path, matrix: np.ndarray, names: Sequence[str], title: str) -> Path | None:
    """Writes the PNG and returns its path; None without matplotlib.

    Args:
      matrix: [L, L] rows by their label and their prediction. Colours are shares of a label's rows, under a square
        root, so that a share of 0.02 is still seen.
      names: L labels.
    """
    try:
        # The Agg canvas without pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError:
        return None
    count = len(names)
    side = min(max(2.6, 0.42 * count), 20.0)
    font = max(3.0, min(9.0, 62 * side / count))
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shown = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    figure = Figure(figsize=(side + 2.8, side + 1.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    axes.set_xticks(range(count))
    axes.set_yticks(range(count))
    axes.set_xticklabels(shown, rotation=90 if count > 2 else 0, parse_math=False)
    axes.set_yticklabels(shown, parse_math=False)
    axes.tick_params(length=0, labelsize=font)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    if count <= COUNTED:
        for (label, prediction), count in np.ndenumerate(matrix):
            colour = "white" if shares[label, prediction] > 0.35 else "black"
            axes.text(prediction, label, f"{count:,}", ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02).set_label("share of the label's rows")
    figure.suptitle(title, fontsize=10, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
