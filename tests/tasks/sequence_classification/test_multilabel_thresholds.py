"""Thresholds of multi-label classification, next to an exhaustive search and to scikit-learn's F1."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.metrics import f1_score

from bert.tasks.sequence_classification.multilabel import best_thresholds


def best_by_search(probabilities: np.ndarray, labels: np.ndarray, average: str) -> float:
    """The best F1 over all combinations of one threshold per label."""
    choices = [[-1.0, *np.unique(column) + 1e-9] for column in probabilities.T]
    return max(
        f1_score(labels, probabilities > np.array(chosen), average=average, zero_division=0)
        for chosen in itertools.product(*choices)
    )


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("average", ["micro", "macro"])
def test_no_thresholds_are_better(average: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = (rng.random((7, 3)) < [0.6, 0.3, 0.1]).astype(np.int8)
    labels[0, 0] = 1
    probabilities = np.round(np.clip(0.3 * labels + rng.random((7, 3)) * 0.7, 0, 1), 1)  # some are the same
    thresholds = best_thresholds(probabilities, labels, micro=average == "micro")
    reached = f1_score(labels, probabilities >= thresholds, average=average, zero_division=0)
    assert reached == pytest.approx(best_by_search(probabilities, labels, average), abs=1e-9)


def test_of_equal_thresholds_the_one_nearest_to_one_half_is_taken() -> None:
    probabilities = np.array([[0.9, 0.3, 0.2, 0.8], [0.6, 0.2, 0.1, 0.7], [0.2, 0.1, 0.3, 0.6]])
    labels = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    for micro in (False, True):
        thresholds = best_thresholds(probabilities, labels, micro)
        np.testing.assert_allclose(thresholds[:3], [0.5, 0.15, 0.5])
    assert best_thresholds(probabilities, labels, micro=True)[3] == 0.9, "never, where no row has the label"
    assert best_thresholds(probabilities, labels, micro=False)[3] == 0.5, "no threshold gives it a score"


def test_certain_probabilities_keep_their_order() -> None:
    neighbours = np.array([[1.0], [np.nextafter(0.25, 1)], [0.25], [0.0]])
    thresholds = best_thresholds(neighbours, np.array([[1], [1], [0], [0]]), micro=False)
    assert (neighbours >= thresholds)[:, 0].tolist() == [True, True, False, False]
    always = best_thresholds(np.zeros((2, 1)), np.array([[1], [0]]), micro=True)
    assert (np.zeros((2, 1)) >= always).all()
    assert (np.ones((2, 1)) >= best_thresholds(np.ones((2, 1)), np.array([[1], [0]]), micro=True)).all()
