"""A baseline that reads words but no order: TF-IDF with a linear model. A pair is compared word by word."""

from __future__ import annotations

import itertools
from typing import Any

from bert.tasks.base import Task
from bert.tasks.multilabel import MultilabelTask
from bert.tasks.sequence import ClassificationPredictions, ClassificationTask, Examples, RegressionTask

INVERSE_REGULARISATION = 10.0
"""C of the logistic regression. On a few hundred short texts 1, scikit-learn's default, is too strong."""


def lexical_baseline(task: Task, train: Any, dev: Any) -> tuple[str, dict[str, float]] | None:
    """Name and scores on dev of TF-IDF with logistic regression, or with ridge regression for scores; else None.

    None also for texts without a word of two letters, and for a single label.

    Args:
      task: fitted to ``train``.
      train, dev: its examples.
    """
    if not isinstance(task, ClassificationTask | MultilabelTask | RegressionTask):
        return None
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    analyze = vectorizer.build_analyzer()
    if not any(map(analyze, itertools.chain(*_columns(train)))):
        return None
    vectorizer.fit(itertools.chain(*_columns(train)))
    inputs, dev_inputs = (_features([vectorizer.transform(column) for column in _columns(of)]) for of in (train, dev))
    if isinstance(task, RegressionTask):
        scores = Ridge().fit(inputs, train.known_labels).predict(dev_inputs)
        return "tf_idf_ridge_regression", task.score(scores, dev)
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=1000)
    if isinstance(task, MultilabelTask):
        shares = OneVsRestClassifier(model).fit(inputs, train.known_labels).predict_proba(dev_inputs)
        shares = shares[:, -task.num_labels :]  # of a single label there is a column for its absence as well
        return "tf_idf_logistic_regression", task.score(task.with_best_thresholds(shares, dev).decide(shares), dev)
    if len(set(train.known_labels)) == 1:
        return None
    model.fit(inputs, train.known_labels)
    predictions = ClassificationPredictions(model.predict(dev_inputs), model.predict_proba(dev_inputs))
    return "tf_idf_logistic_regression", task.score(predictions, dev)


def _columns(examples: Examples) -> list[list[str]]:
    """The texts of all rows; of pairs the first ones, and the second ones."""
    return [examples.texts_a] if examples.texts_b is None else [examples.texts_a, examples.texts_b]


def _features(columns: list[Any]) -> Any:
    """[N, words] of the texts -> the same; of each of two -> their products and differences, and the cosine."""
    if len(columns) == 1:
        return columns[0]
    from scipy.sparse import csr_matrix, hstack

    first, second = columns
    products = first.multiply(second)
    return hstack([products, abs(first - second), csr_matrix(products.sum(axis=1))], format="csr")
