"""Metrics against worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bert import metrics

LABELS = np.array([1, 1, 1, 0, 0])
PREDICTIONS = np.array([1, 1, 0, 1, 0])


def test_accuracy_and_f1_by_hand():
    assert metrics.accuracy(PREDICTIONS, LABELS) == pytest.approx(3 / 5)
    # 2 true positives, 1 false, 1 missed: precision and recall are both 2/3
    assert metrics.f1(PREDICTIONS, LABELS) == pytest.approx(2 / 3)
    assert metrics.scores(("accuracy", "f1"), PREDICTIONS, LABELS) == {
        "accuracy": pytest.approx(0.6),
        "f1": pytest.approx(2 / 3),
    }


def test_f1_is_that_of_the_positive_class():
    """Three true positives, one false: 2 * 3 / (2 * 3 + 1), whatever the negatives."""
    assert metrics.f1(np.array([1, 1, 1, 1]), np.array([1, 1, 1, 0])) == pytest.approx(6 / 7)


@pytest.mark.filterwarnings("error")
def test_f1_is_0_where_nothing_is_predicted():
    assert metrics.f1(np.zeros(3, int), np.array([1, 0, 1])) == 0
    assert metrics.f1(np.zeros(3, int), np.zeros(3, int)) == 0


def test_majority_class():
    assert metrics.majority_class(("accuracy", "f1"), LABELS) == {"accuracy": 0.6, "f1": pytest.approx(6 / 8)}


def test_matthews_by_hand():
    # 2 true positives, 1 true negative, 1 false positive, 1 missed: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2)
    assert metrics.matthews(PREDICTIONS, LABELS) == pytest.approx(1 / 6)
    assert metrics.matthews(LABELS, LABELS) == pytest.approx(1)
    assert metrics.matthews(np.ones(5, int), LABELS) == 0


@pytest.mark.filterwarnings("error")
def test_correlations_by_hand():
    predictions, scores = np.array([1.0, 2.0, 4.0], np.float32), np.array([0.0, 2.0, 1.0], np.float32)
    # about their means: (-4/3, -1/3, 5/3) and (-1, 1, 0): 1 / sqrt(42/9 * 2)
    assert metrics.pearson(predictions, scores) == pytest.approx(1 / math.sqrt(42 / 9 * 2))
    # ranks 1 2 3 and 1 3 2: 1 - 6 * 2 / (3 * 8)
    assert metrics.spearman(predictions, scores) == pytest.approx(0.5)
    # ties share a rank: 1 2 3 against 1.5 1.5 3
    assert metrics.spearman(predictions, np.array([1, 1, 5])) == pytest.approx(1.5 / math.sqrt(2 * 1.5))
    for constant in ((np.full(3, 2.5), scores), (predictions, np.zeros(3)), (np.full(3, np.nan), scores)):
        assert metrics.pearson(*constant) == metrics.spearman(*constant) == 0


def test_softmax_of_large_logits():
    np.testing.assert_allclose(metrics.softmax(np.array([[1e4, 1e4 + np.log(3)]])), [[0.25, 0.75]], rtol=1e-6)


def test_unigram_baseline_by_hand():
    # add one: 4, 2, 1, 1 of 8
    result = metrics.unigram_baseline(np.array([3, 1, 0, 0]), np.array([0, 0, 1, 3]))
    assert result["loss"] == pytest.approx((math.log(2) * 2 + math.log(4) + math.log(8)) / 4)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["accuracy"] == 0.5


def test_unigram_baseline_of_uniform_counts_is_the_size_of_the_vocabulary():
    assert metrics.unigram_baseline(np.zeros(100, int), np.arange(50))["perplexity"] == pytest.approx(100)
    with pytest.raises(ValueError, match="nothing to predict"):
        metrics.unigram_baseline(np.ones(4, int), np.array([], int))


def test_perplexity_does_not_overflow():
    assert metrics.perplexity(0.0) == 1
    assert math.isfinite(metrics.perplexity(1e9))
    assert math.isfinite(metrics.perplexity(math.inf))
    assert math.isnan(metrics.perplexity(math.nan))
