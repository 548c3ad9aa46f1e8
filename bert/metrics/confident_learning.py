"""Confident learning: finds doubtful labels with out-of-sample probabilities (Northcutt et al. 2021, section 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Doubts(NamedTuple):
    """Doubtful labels, most doubtful first.

    Attributes:
      rows: [D] numbers of the rows, by increasing probability of the given label (self-confidence).
      suggested: [D] the label that each row probably has.
      joint: [L, L] the confident joint: number of rows by given label and by confidently predicted label.
    """

    rows: np.ndarray
    suggested: np.ndarray
    joint: np.ndarray


def find_doubtful_labels(probabilities: np.ndarray, labels: np.ndarray) -> Doubts:
    """Returns the rows that are confidently another class.

    The threshold of a class is the mean probability of the class over the rows that are labelled with it. Among the
    classes whose thresholds a row reaches, the most likely one is its confident class. A label is doubtful if the
    confident class is another one, and more likely than the label.

    Args:
      probabilities: [R, L], predicted by models that were not trained on the row.
      labels: [R] given labels. A class without rows is never suggested.
    """
    rows, classes = np.arange(len(labels)), np.arange(probabilities.shape[1])
    thresholds = np.full(len(classes), np.inf)
    for label in np.unique(labels):
        thresholds[label] = probabilities[labels == label, label].mean()
    reached = np.where(probabilities >= thresholds, probabilities, -1.0)
    confident, is_confident = reached.argmax(axis=1), reached.max(axis=1) >= 0
    joint = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(joint, (labels[is_confident], confident[is_confident]), 1)
    given = probabilities[rows, labels]
    doubtful = np.flatnonzero(is_confident & (confident != labels) & (probabilities[rows, confident] > given))
    doubtful = doubtful[np.argsort(given[doubtful], kind="stable")]
    return Doubts(doubtful, confident[doubtful], joint)
