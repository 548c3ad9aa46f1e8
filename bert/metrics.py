"""Official metrics and trivial baselines over plain arrays. scikit-learn and SciPy are imported when first needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of right predictions, 0 to 1."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of label 1 against label 0, as GLUE has it for MRPC and QQP; 0 where nothing is predicted as 1."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0))


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation, -1 to 1, as GLUE has it for CoLA; 0 where one label is predicted throughout."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Pearson's correlation, -1 to 1; 0 where it is undefined: a side is constant, or a run has diverged."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, scores)


def spearman(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where Pearson's is."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, scores)


def _correlation(of: Callable[..., Any], predictions: np.ndarray, scores: np.ndarray) -> float:
    sides = [np.asarray(side, np.float64) for side in (predictions, scores)]
    if not all(np.isfinite(side).all() and np.ptp(side) > 0 for side in sides):
        return 0.0
    return float(of(*sides).statistic)


METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "pearson": pearson, "spearman": spearman}
"""Metrics of a task with one label or one score a row, by name."""


def scores(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of [R] predicted labels, or scores."""
    return {name: METRICS[name](predictions, labels) for name in names}


def softmax(logits: np.ndarray) -> np.ndarray:
    """[..., L] logits -> [..., L] float64 probabilities."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def majority_class(names: Sequence[str], labels: np.ndarray) -> dict[str, float]:
    """The named metrics of always answering the most frequent label: what any model has to beat."""
    labels = np.asarray(labels)
    return scores(names, np.full_like(labels, np.bincount(labels).argmax()), labels)


def unigram_baseline(train_counts: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
    """Masked tokens predicted from how often each token occurs in the training text, whatever the context.

    Args:
      train_counts: [V] occurrences of each token.
      label_ids: [tokens] the held-out ones.

    Returns:
      loss (nats a token), perplexity, and accuracy of always answering the most frequent token.
    """
    if len(label_ids) == 0:
        raise ValueError("label_ids is empty: there is nothing to predict")
    log_probabilities = unigram_log_probabilities(train_counts)
    loss = -float(np.mean(log_probabilities[label_ids]))
    hits = float(np.mean(np.asarray(label_ids) == log_probabilities.argmax()))
    return {"loss": loss, "perplexity": perplexity(loss), "accuracy": hits}


def unigram_log_probabilities(counts: np.ndarray) -> np.ndarray:
    """[V] log relative frequencies; one is added to each count, so that a token never seen has a finite one."""
    counts = np.asarray(counts, np.float64) + 1
    return np.log(counts) - np.log(counts.sum())


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; a diverged run's stays finite, since JSON has no infinity."""
    return math.exp(min(loss, 700.0))  # exp overflows beyond 709
