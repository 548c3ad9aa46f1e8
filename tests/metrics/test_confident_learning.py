"""Confident learning by hand."""

from __future__ import annotations

import numpy as np

from bert.metrics.confident_learning import find_doubtful_labels


def test_the_confident_joint_and_the_doubtful_rows_by_hand() -> None:
    shares = np.array([0.9, 0.8, 0.1, 0.3, 0.05, 0.95, 0.45])  # of label 0
    labels = np.array([0, 0, 0, 1, 1, 1, 1])
    found = find_doubtful_labels(np.stack([shares, 1 - shares], axis=1), labels)
    # Thresholds: 0.6 for label 0, and (0.7 + 0.95 + 0.05 + 0.55) / 4 = 0.5625 for label 1.
    assert found.joint.tolist() == [[2, 1], [1, 2]]  # row 6 reaches no threshold
    assert found.rows.tolist() == [5, 2]  # the given labels have 0.05 and 0.1
    assert found.suggested.tolist() == [0, 1]


def test_clean_labels_are_not_doubtful() -> None:
    shares = np.full((60, 3), 0.1)
    labels = np.arange(60) % 3
    shares[np.arange(60), labels] = 0.8
    assert len(find_doubtful_labels(shares, labels).rows) == 0


def test_the_doubtful_rows_are_cleanlab_s() -> None:
    """Compared with find_label_issues(filter_by="confident_learning") and compute_confident_joint of cleanlab 2.9.0."""
    percent = """49 27 24  14 60 26  13 32 55  62 19 19  27 38 35  22 30 48  48 35 17  25 54 21
                 12 21 67  53 25 22  20 69 11  17 28 55  58 13 29  15 55 30  19 25 56  49 19 32"""
    labels = np.array([1, 1, 2, 1, 1, 0, 1, 1, 2, 0, 1, 2, 0, 2, 2, 0])
    found = find_doubtful_labels(np.array(percent.split(), float).reshape(16, 3) / 100, labels)
    assert found.rows.tolist() == [3, 0, 13, 6]
    assert found.joint.tolist() == [[3, 0, 0], [3, 3, 0], [0, 1, 4]]
