"""Calibration of probabilities: expected calibration error, reliability by bin, and temperature scaling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BINS = 15

TEMPERATURES = (0.01, 100.0)
"""Least and greatest temperature that is fitted."""


class Hits(NamedTuple):
    """Whether each of R predictions is correct, and its probability."""

    correct: np.ndarray
    """[R] bool."""
    confidences: np.ndarray
    """[R] probability of the predicted label."""


class Calibration(NamedTuple):
    """Reliability of probabilities in bins of equal width (Guo et al. 2017).

    Attributes:
      ece: expected calibration error: mean of |accuracy - confidence| over the bins, weighted by their rows.
      counts: [BINS] number of rows.
      confidences: [BINS] mean confidence of the rows; 0 without rows.
      accuracies: [BINS] share of correct rows; 0 without rows.
    """

    ece: float
    counts: list[int]
    confidences: list[float]
    accuracies: list[float]


def calibration(hits: Hits, bins: int = BINS) -> Calibration:
    """Returns the calibration of predictions. The bins are (0, 1/15], (1/15, 2/15], ..., (14/15, 1]."""
    confidences = np.asarray(hits.confidences, np.float64)
    numbers = np.clip(np.ceil(confidences * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(numbers, minlength=bins)
    sums = (np.bincount(numbers, values, bins) for values in (confidences, hits.correct.astype(np.float64)))
    confidence, accuracy = (values / np.maximum(counts, 1) for values in sums)
    ece = float((counts * np.abs(accuracy - confidence)).sum() / len(confidences))
    return Calibration(ece, counts.tolist(), confidence.tolist(), accuracy.tolist())


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Returns the temperature by which to divide logits [R, L] for the least mean cross-entropy (Guo et al. 2017).

    The cross-entropy is convex in the inverse of the temperature. Returns None if all rows are right, since it then
    falls without end for lower temperatures.
    """
    from scipy.optimize import minimize_scalar

    logits = np.asarray(logits, np.float64)
    margins = logits - np.take_along_axis(logits, labels[:, None], axis=1)
    if not (margins > 0).any():
        return None

    def cross_entropy(log_temperature: float) -> float:
        return float(np.logaddexp.reduce(margins / np.exp(log_temperature), axis=1).mean())

    found = minimize_scalar(cross_entropy, bounds=np.log(TEMPERATURES), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))
