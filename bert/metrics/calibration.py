"""Calibration of probabilities: the expected calibration error and the reliability by bin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BINS = 15


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
