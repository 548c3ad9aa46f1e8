"""Thresholds of multi-label classification: from which probability on a label is predicted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class _Cuts(NamedTuple):
    """Ways to divide the rows by the probability of one label.

    Attributes:
        thresholds: 0.5 for the cut that it makes, else half way between two probabilities, or one of them and 0 or 1.
        correct: predicted rows that have the label.
        total: predicted rows plus rows that have the label, so that F1 is 2 * correct / total.
    """

    thresholds: np.ndarray
    correct: np.ndarray
    total: np.ndarray


def best_thresholds(probabilities: np.ndarray, labels: np.ndarray, micro: bool) -> np.ndarray:
    """The thresholds [L] with the highest micro F1, or with the highest F1 of each label, and so the highest macro F1.

    Of several that are as good, it is the one nearest to 0.5.

    Micro F1 is 2 * correct / total over all labels. The cuts with the highest 2 * correct - f1 * total, which each
    label chooses by itself, have a higher micro F1 than f1 unless that is the highest (Dinkelbach 1967).

    Args:
      probabilities: [R, L], 0 to 1.
      labels: [R, L], 1 for a label that the row has, else 0.
      micro: whether micro F1 is the metric.
    """
    cuts = [_cuts_of_label(*columns) for columns in zip(probabilities.T, labels.T, strict=True)]
    if not micro:
        return np.array([of.thresholds[_first_best(2 * of.correct / np.maximum(of.total, 1))] for of in cuts])
    f1 = -1.0
    while True:
        chosen = [_first_best(2 * of.correct - max(f1, 0.0) * of.total) for of in cuts]
        correct, total = (
            sum(int(counts[cut]) for counts, cut in zip(columns, chosen, strict=True))
            for columns in ([of.correct for of in cuts], [of.total for of in cuts])
        )
        if (reached := 2 * correct / max(total, 1)) <= f1:
            return np.array([of.thresholds[cut] for of, cut in zip(cuts, chosen, strict=True)])
        f1 = reached


def _cuts_of_label(probabilities: np.ndarray, labels: np.ndarray) -> _Cuts:
    """The cuts of one label, the one nearest to 0.5 first."""
    order = np.argsort(-probabilities, kind="stable")
    ranked = np.concatenate([[1.0], probabilities[order].astype(np.float64), [0.0]])
    correct = np.concatenate([[0], np.cumsum(labels[order], dtype=np.int64)])
    upper, lower = ranked[:-1], ranked[1:]
    thresholds = np.where((lower < 0.5) & (upper >= 0.5), 0.5, (upper + lower) / 2)
    thresholds = np.where(thresholds > lower, thresholds, upper)  # half way between neighbours is one of them
    predicted = np.arange(len(upper))
    # Rows with the same probability are all predicted, or none of them is.
    cuts = np.flatnonzero((upper > lower) | (predicted == len(order)))
    cuts = cuts[np.argsort(np.abs(thresholds[cuts] - 0.5), kind="stable")]
    return _Cuts(thresholds[cuts], correct[cuts], predicted[cuts] + correct[-1])


def _first_best(values: np.ndarray) -> int:
    """The first of the highest values, but for rounding."""
    return int(np.argmax(values >= values.max() - 1e-9))
