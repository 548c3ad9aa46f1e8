"""Plots of predictions: confusion_matrix.png and reliability.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert.files import atomic_write
from bert.metrics.calibration import Calibration
from bert.runs.plots import COLOURS, GREY, new_figure

COUNTED = 25
"""Maximum number of labels for which cells show counts."""

MAX_NAME_LENGTH = 28
"""Maximum length of a label's name."""


def draw_confusion_matrix(path: Path, matrix: np.ndarray, names: Sequence[str], title: str) -> Path | None:
    """Writes the PNG and returns its path; None without matplotlib.

    Args:
      matrix: [L, L] counts by label and prediction. Colours are square roots of shares of a label's rows, so that a
        share of 0.02 is visible.
      names: L labels.
    """
    count = len(names)
    side = min(max(2.6, 0.42 * count), 20.0)
    figure = new_figure(side + 2.8, side + 1.6)
    if figure is None:
        return None
    from matplotlib.colors import PowerNorm

    font = max(3.0, min(9.0, 62 * side / count))
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shown = [name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…" for name in names]
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
    return _save(figure, path)


def draw_reliability(path: Path, calibration: Calibration, name: str) -> Path | None:
    """Writes the PNG and returns its path; None without matplotlib.

    Each point is a bin of confidences: the mean probability of the predicted label, and the share of right predictions.
    The bars show the share of all rows in the bin.
    """
    figure = new_figure(4.6, 4.2)
    if figure is None:
        return None
    counts = np.array(calibration.counts)
    used, bins = counts > 0, len(counts)
    axes = figure.subplots()
    centers = (np.arange(bins) + 0.5) / bins
    axes.bar(centers, counts / counts.sum(), width=0.9 / bins, color="#DDDDDD", label="share of the rows")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    points = (np.array(values)[used] for values in (calibration.confidences, calibration.accuracies))
    axes.plot(*points, color=COLOURS[0], marker="o", markersize=4.5, label="predictions")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("probability of the predicted label")
    axes.set_ylabel("accuracy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    title = f"{name}: expected calibration error {calibration.ece:.4f}"
    figure.suptitle(title, fontsize=10, parse_math=False)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
