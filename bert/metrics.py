"""Official metrics and trivial baselines over plain arrays. scikit-learn is imported when first needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of right predictions, 0 to 1."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of label 1 against label 0, as GLUE has it for MRPC and QQP; 0 where nothing is predicted as 1."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0))


METRICS = {"accuracy": accuracy, "f1": f1}
"""Metrics of a classification task by name."""


def classification(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of [R] predicted labels."""
    return {name: METRICS[name](predictions, labels) for name in names}


def majority_class(names: Sequence[str], labels: np.ndarray) -> dict[str, float]:
    """The named metrics of always answering the most frequent label: what any model has to beat."""
    labels = np.asarray(labels)
    return classification(names, np.full_like(labels, np.bincount(labels).argmax()), labels)


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
