"""Bootstrap intervals of metrics, and tests of the difference between two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from bert.metrics.weighted import Scores, WeightedScores

RESAMPLES = 1000
LEVEL = 0.95
"""Share of the samples inside of an interval."""

CELLS_AT_ONCE = 1 << 21
"""Number of weights of samples in memory at a time."""


class Interval(NamedTuple):
    """A percentile interval."""

    low: float
    high: float


class McNemar(NamedTuple):
    """McNemar's exact test of two accuracies on the same rows.

    Attributes:
      only_first: number of rows that only the first model predicts correctly.
      only_second: number of rows that only the second model predicts correctly.
      p_value: two-sided probability of such a difference between equally accurate models.
    """

    only_first: int
    only_second: int
    p_value: float


def sample_weights(count: int, seed: int = 0, resamples: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Yields the weights [B, U] of bootstrap samples: how often each of ``count`` units is drawn.

    The draws are the same as in ``scipy.stats.bootstrap`` with ``rng=numpy.random.default_rng(seed)``.
    """
    rng = np.random.default_rng(seed)
    at_once = max(1, CELLS_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        samples = min(at_once, resamples - start)
        draws = rng.integers(0, count, (samples, count))
        draws += np.arange(samples)[:, None] * count
        yield np.bincount(draws.ravel(), minlength=samples * count).reshape(samples, count).astype(np.float64)


def bootstrap_intervals(scores: WeightedScores, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Returns the percentile interval of each metric over samples of the units (Efron 1979).

    Samples in which a metric is NaN, because it is about a part of the units and none was drawn, do not count for it.
    """
    return _intervals(scores.num_units, scores.compute, seed, resamples)


def difference_intervals(
    first: WeightedScores, second: WeightedScores, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, Interval]:
    """Returns the interval of first minus second, for the metrics of both, on the same samples (paired bootstrap).

    Raises:
      ValueError: the numbers of units differ.
    """
    if first.num_units != second.num_units:
        raise ValueError(f"{first.num_units} units against {second.num_units}: score both models on the same rows")

    def compute(weights: np.ndarray) -> Scores:
        ours, theirs = first.compute(weights), second.compute(weights)
        return {name: score - theirs[name] for name, score in ours.items() if name in theirs}

    return _intervals(first.num_units, compute, seed, resamples)


def _intervals(count: int, compute: Callable[[np.ndarray], Scores], seed: int, resamples: int) -> dict[str, Interval]:
    parts = [compute(weights) for weights in sample_weights(count, seed, resamples)]
    tails = [50 * (1 - LEVEL), 50 * (1 + LEVEL)]
    return {
        name: Interval(*np.nanpercentile(np.concatenate([part[name] for part in parts]), tails).tolist())
        for name in parts[0]
    }


def mcnemar(first: np.ndarray, second: np.ndarray) -> McNemar:
    """Tests whether two models have the same accuracy (McNemar 1947), by the exact binomial distribution.

    Args:
      first, second: [R] whether each prediction is correct.
    """
    from scipy.stats import binomtest

    only_first, only_second = int(np.sum(first & ~second)), int(np.sum(second & ~first))
    different = only_first + only_second
    p_value = binomtest(only_first, different).pvalue if different else 1.0
    return McNemar(only_first, only_second, float(p_value))


def supported(scores: WeightedScores, expected: Mapping[str, float]) -> WeightedScores:
    """Returns the metrics whose value for weights of 1 is the expected value; other metrics have another definition."""
    reached = scores.compute(np.ones((1, scores.num_units)))
    names = [name for name in reached if name in expected and np.isclose(reached[name][0], expected[name], atol=1e-6)]

    def compute(weights: np.ndarray) -> Scores:
        computed = scores.compute(weights)
        return {name: computed[name] for name in names}

    return WeightedScores(scores.num_units, compute)
