"""Metrics as functions of the weights of the rows, for resampling without a new computation of the predictions.

A weighted score maps weights [B, U] to scores [B] by name. The weight of a unit (a row, a sentence, a question or a
query) is the number of times that it occurs in a sample. Weights of 1 give the metric itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Scores = dict[str, np.ndarray]


class WeightedScores(NamedTuple):
    """Metrics of U units as a function of their weights [B, U]."""

    num_units: int
    compute: Callable[[np.ndarray], Scores]


def means(values: Mapping[str, np.ndarray], included: Mapping[str, np.ndarray] | None = None) -> WeightedScores:
    """Returns weighted means.

    Args:
      values: [U] by metric.
      included: [U] whether a unit counts, by metric; all units count for other metrics. The mean of a sample without
        such a unit is NaN.
    """
    names, included = list(values), included or {}
    units = len(values[names[0]])
    numerators = np.stack([np.asarray(values[name], np.float64) for name in names], axis=1)
    masks = np.stack([np.asarray(included.get(name, np.ones(units)), np.float64) for name in names], axis=1)

    def compute(weights: np.ndarray) -> Scores:
        sums, counts = weights @ (numerators * masks), weights @ masks
        return dict(zip(names, np.where(counts > 0, _ratio(sums, counts), np.nan).T, strict=True))

    return WeightedScores(units, compute)


def classification(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> WeightedScores:
    """Returns accuracy, f1 (of label 1), macro_f1 and matthews for label indices [U]; see `bert.metrics`."""
    classes = np.union1d(predictions, labels)
    predicted, true = ((side[:, None] == classes).astype(np.float64) for side in (predictions, labels))

    def compute(weights: np.ndarray) -> Scores:
        hits, chosen, support = weights @ (predicted * true), weights @ predicted, weights @ true
        scores, total = {}, weights.sum(axis=1)
        f1 = _ratio(2 * hits, chosen + support)
        for name in names:
            if name == "accuracy":
                scores[name] = hits.sum(axis=1) / total
            elif name == "f1":
                scores[name] = f1[:, classes == 1].sum(axis=1)
            elif name == "macro_f1":
                scores[name] = f1.sum(axis=1) / ((chosen + support) > 0).sum(axis=1)
            elif name == "matthews":
                covariance = hits.sum(axis=1) * total - (chosen * support).sum(axis=1)
                spread = (total**2 - (chosen**2).sum(axis=1)) * (total**2 - (support**2).sum(axis=1))
                scores[name] = _ratio(covariance, np.sqrt(np.maximum(spread, 0)))
        return scores

    return WeightedScores(len(labels), compute)


def multilabel(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> WeightedScores:
    """Returns micro_f1 and macro_f1 for labels [U, L]."""
    predicted, true = (np.asarray(side, np.float64) for side in (predictions, labels))

    def compute(weights: np.ndarray) -> Scores:
        hits, total = weights @ (predicted * true), weights @ (predicted + true)
        scores = {
            "micro_f1": _ratio(2 * hits.sum(axis=1), total.sum(axis=1)),
            "macro_f1": _ratio(2 * hits, total).mean(axis=1),
        }
        return {name: scores[name] for name in names if name in scores}

    return WeightedScores(len(true), compute)


def correlations(names: Sequence[str], predictions: np.ndarray, scores: np.ndarray) -> WeightedScores:
    """Returns pearson and spearman for two sides [U]; 0 if one side is constant or not finite."""
    sides = [np.asarray(side, np.float64) for side in (predictions, scores)]
    finite = all(np.isfinite(side).all() for side in sides)
    centred = [side - side.mean() for side in sides] if finite else sides
    groups = [np.unique(side, return_inverse=True)[1] for side in sides]

    def compute(weights: np.ndarray) -> Scores:
        result = {}
        for name in names:
            if not finite:
                result[name] = np.zeros(len(weights))
            elif name == "pearson":
                result[name] = _correlation(weights, *(side[None] for side in centred))
            elif name == "spearman":
                result[name] = _correlation(weights, *(_ranks(weights, group) for group in groups))
        return result

    return WeightedScores(len(sides[0]), compute)


def _ranks(weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns the ranks [B, U] of values in samples: ties, and copies of one unit, have their mean rank.

    Args:
      groups: [U] index of each value among the sorted unique values.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    of_group = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: np.ndarray = (np.cumsum(of_group, axis=1) - (of_group - 1) / 2)[:, groups]
    return ranks


def _correlation(weights: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the weighted correlations [B] of values [B, U] or [1, U]."""
    total = weights.sum(axis=1, keepdims=True)
    first, second = (side - (weights * side).sum(axis=1, keepdims=True) / total for side in (first, second))
    covariance, *variances = (
        (weights * product).sum(axis=1) for product in (first * second, first * first, second * second)
    )
    spread = np.sqrt(variances[0] * variances[1])
    # A constant side has a variance of rounding errors.
    return np.where(spread > 1e-12 * total[:, 0], _ratio(covariance, spread), 0.0)


def entities(counts: Mapping[str, np.ndarray], types: Sequence[str], named: Sequence[str]) -> WeightedScores:
    """Returns the metrics of `bert.metrics.entity_metrics`, and f1_TYPE.

    Args:
      counts: ``correct``, ``predicted`` and ``support``: [U, types] number of entities of each sentence; ``hits`` and
        ``words``: [U] number of correct tags and of words.
      types: the types of the columns.
      named: types with a metric f1_TYPE; 0 for types that are not among ``types``.
    """

    def compute(weights: np.ndarray) -> Scores:
        correct, predicted, support = (weights @ counts[name] for name in ("correct", "predicted", "support"))
        f1, present = _ratio(2 * correct, predicted + support), (predicted + support) > 0
        sums = [values.sum(axis=1) for values in (correct, predicted, support)]
        scores = {
            "precision": sums[0] / np.maximum(sums[1], 1),
            "recall": sums[0] / np.maximum(sums[2], 1),
            "f1": 2 * sums[0] / np.maximum(sums[1] + sums[2], 1),
            "accuracy": (weights @ counts["hits"]) / np.maximum(weights @ counts["words"], 1),
            "macro_f1": f1.sum(axis=1) / np.maximum(present.sum(axis=1), 1),
            "weighted_f1": (f1 * support).sum(axis=1) / np.maximum(sums[2], 1),
        }
        zeros = np.zeros(len(weights))
        by_type = dict(zip(types, f1.T, strict=True))
        return {**scores, **{f"f1_{type}": by_type.get(type, zeros) for type in named}}

    return WeightedScores(len(counts["words"]), compute)


def best_scores(odds: np.ndarray, gains: Mapping[str, np.ndarray], unanswerable: np.ndarray) -> WeightedScores:
    """Returns the scores at the best no-answer threshold of each sample (`bert.metrics.best_null_threshold`).

    Args:
      odds: [U] odds of no answer.
      gains: [U] by metric: change of the number of correct questions if the question is answered.
      unanswerable: [U] whether a question has no answer.
    """
    order = np.argsort(odds, kind="stable")

    def compute(weights: np.ndarray) -> Scores:
        start, total = weights @ unanswerable.astype(np.float64), weights.sum(axis=1)
        scores = {}
        for name, gain in gains.items():
            reached = np.cumsum(weights[:, order] * gain[order], axis=1).max(axis=1)
            scores[name] = 100.0 * (start + np.maximum(reached, 0)) / total
        return scores

    return WeightedScores(len(odds), compute)


def combined(*parts: WeightedScores) -> WeightedScores:
    """Returns the metrics of several parts with the same units."""

    def compute(weights: np.ndarray) -> Scores:
        return {name: score for part in parts for name, score in part.compute(weights).items()}

    return WeightedScores(parts[0].num_units, compute)


def per_sample(count: int, score: Callable[[np.ndarray], Mapping[str, float]]) -> WeightedScores:
    """Returns the metrics of a function of the weights [U] of a single sample."""

    def compute(weights: np.ndarray) -> Scores:
        samples = [score(row) for row in weights]
        return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}

    return WeightedScores(count, compute)


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Divides; 0 where the denominator is 0."""
    return np.divide(numerators, denominators, out=np.zeros(np.shape(numerators)), where=denominators > 0)
