"""Weighted metrics and bootstrap intervals against scikit-learn, SciPy and the metrics of whole samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from bert.metrics import resampling, weighted
from bert.metrics.calibration import Hits, calibration

RNG = np.random.default_rng(3)
LABELS = RNG.integers(0, 4, 80)
PREDICTIONS = np.where(RNG.random(80) < 0.6, LABELS, RNG.integers(0, 4, 80))
BINARY = (LABELS > 1).astype(int), (PREDICTIONS > 1).astype(int)


def samples(count: int = 80) -> tuple[np.ndarray, list[np.ndarray]]:
    """Weights of ten samples, and the units of each."""
    [weights] = list(resampling.sample_weights(count, seed=5, resamples=10))
    return weights, [np.repeat(np.arange(count), row.astype(int)) for row in weights]


def check(scores: weighted.WeightedScores, metric: dict, *sides: np.ndarray) -> None:
    weights, drawn = samples()
    computed = scores.compute(weights)
    assert set(computed) == set(metric)
    for name, function in metric.items():
        expected = [function(*(side[rows] for side in sides)) for rows in drawn]
        np.testing.assert_allclose(computed[name], expected, atol=1e-12, err_msg=name)


def test_scores_of_samples_are_those_of_scikit_learn() -> None:
    labels, predictions = BINARY
    names = ("accuracy", "f1", "macro_f1", "matthews")
    functions = (sk.accuracy_score, sk.f1_score, lambda *of: sk.f1_score(*of, average="macro"), sk.matthews_corrcoef)
    check(weighted.classification(names, predictions, labels), dict(zip(names, functions, strict=True)), *BINARY)
    several = {name: function for name, function in zip(names, functions, strict=True) if name != "f1"}
    check(weighted.classification(tuple(several), PREDICTIONS, LABELS), several, LABELS, PREDICTIONS)


def test_scores_of_several_labels_are_those_of_scikit_learn() -> None:
    labels, predictions = (RNG.integers(0, 2, (80, 3)) for _ in range(2))
    labels[:, 2] = predictions[:, 2] = 0  # a label that never occurs has F1 0
    metric = {
        f"{average}_f1": lambda *of, average=average: sk.f1_score(*of, average=average, zero_division=0)
        for average in ("micro", "macro")
    }
    check(weighted.multilabel(tuple(metric), predictions, labels), metric, labels, predictions)


def test_correlations_of_samples_with_ties_are_those_of_scipy() -> None:
    scores = RNG.integers(0, 5, 80) / 2
    predictions = np.round(scores + RNG.normal(size=80), 1)
    metric = {
        "pearson": lambda *of: stats.pearsonr(*of).statistic,
        "spearman": lambda *of: stats.spearmanr(*of).statistic,
    }
    check(weighted.correlations(tuple(metric), predictions, scores), metric, scores, predictions)
    constant = weighted.correlations(("pearson", "spearman"), np.ones(80), scores).compute(samples()[0])
    assert not any(values.any() for values in constant.values())


@pytest.mark.medium
@pytest.mark.parametrize("name", ["macro_f1", "matthews"])
def test_the_interval_is_that_of_scipy(name: str) -> None:
    scores = weighted.classification((name,), PREDICTIONS, LABELS)
    interval = resampling.bootstrap_intervals(scores, seed=7, resamples=200)[name]
    function = (lambda *of: sk.f1_score(*of, average="macro")) if name == "macro_f1" else sk.matthews_corrcoef
    expected = stats.bootstrap(
        (LABELS, PREDICTIONS), function, paired=True, vectorized=False, n_resamples=200, method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    assert interval == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_intervals_do_not_depend_on_the_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = weighted.classification(("accuracy",), PREDICTIONS, LABELS)
    whole = resampling.bootstrap_intervals(scores)
    monkeypatch.setattr(resampling, "CELLS_AT_ONCE", 80 * 7)
    assert resampling.bootstrap_intervals(scores) == whole


def test_intervals_cover_the_true_score_in_about_95_percent() -> None:
    rng, covered = np.random.default_rng(11), 0
    for trial in range(200):
        labels = rng.integers(0, 2, 150)
        predictions = np.where(rng.random(150) < 0.8, labels, 1 - labels)
        scores = weighted.classification(("accuracy",), predictions, labels)
        low, high = resampling.bootstrap_intervals(scores, seed=trial, resamples=200)["accuracy"]
        covered += low <= 0.8 <= high
    assert 180 <= covered <= 199


def test_samples_without_a_row_of_a_group_do_not_count_for_its_mean() -> None:
    """One question of 30 has no answer: it is missing in about a third of the samples."""
    rows = np.arange(30) == 7
    scores = weighted.means({"NoAns_exact": np.full(30, 100.0)}, {"NoAns_exact": rows})
    assert resampling.bootstrap_intervals(scores)["NoAns_exact"] == (100, 100)
    assert resampling.difference_intervals(scores, scores)["NoAns_exact"] == (0, 0)
    none = weighted.means({"NoAns_exact": np.zeros(30)}, {"NoAns_exact": np.zeros(30)})
    assert not resampling.supported(none, {"NoAns_exact": 0.0}).compute(np.ones((1, 30)))


def test_the_difference_of_two_models_is_resampled_in_pairs() -> None:
    other = np.where(np.arange(80) < 8, LABELS, PREDICTIONS)
    first, second = (weighted.classification(("accuracy",), one, LABELS) for one in (other, PREDICTIONS))
    low, high = resampling.difference_intervals(first, second)["accuracy"]
    gains = (other == LABELS).astype(float) - (PREDICTIONS == LABELS)
    drawn = np.concatenate([of @ gains / 80 for of in resampling.sample_weights(80)])
    assert (low, high) == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])), abs=1e-12)
    assert resampling.difference_intervals(first, first)["accuracy"] == (0, 0)
    with pytest.raises(ValueError, match="80 units against 3"):
        resampling.difference_intervals(first, weighted.means({"accuracy": np.ones(3)}))


def test_mcnemar_is_the_binomial_test_of_the_rows_that_differ() -> None:
    first, second = RNG.random(100) < 0.8, RNG.random(100) < 0.6
    result = resampling.mcnemar(first, second)
    only_first, only_second = (first & ~second).sum(), (~first & second).sum()
    assert result[:2] == (only_first, only_second)
    assert result.p_value == stats.binomtest(int(only_second), int(only_first + only_second), 0.5).pvalue
    assert resampling.mcnemar(first, first) == (0, 0, 1.0)


def test_the_calibration_error_is_the_mean_over_the_bins() -> None:
    confidences, correct = np.array([0.95, 0.99, 0.5, 0.51, 1 / 15]), np.array([True, False, True, True, False])
    result = calibration(Hits(correct, confidences))
    # Bins (14/15, 1], (7/15, 8/15] and (0, 1/15].
    expected = (2 * abs(0.5 - 0.97) + 2 * abs(1 - 0.505) + abs(0 - 1 / 15)) / 5
    assert result.ece == pytest.approx(expected)
    assert [result.counts[bin] for bin in (0, 7, 14)] == [1, 2, 2]
    assert result.accuracies[14] == 0.5


def test_metrics_with_another_definition_have_no_interval() -> None:
    scores = weighted.means({"accuracy": np.array([1.0, 0.0]), "other": np.ones(2)})
    kept = resampling.supported(scores, {"accuracy": 0.5, "other": 0.3})
    assert list(kept.compute(np.ones((1, 2)))) == ["accuracy"]
