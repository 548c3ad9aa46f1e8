"""A baseline that reads words but no order: TF-IDF with a linear model."""

from __future__ import annotations

from typing import Any

from bert.tasks.base import Task
from bert.tasks.sequence import ClassificationPredictions, ClassificationTask, Examples, RegressionTask

INVERSE_REGULARISATION = 10.0
"""C of the logistic regression. On a few hundred short texts 1, scikit-learn's default, is too strong."""


def lexical_baseline(task: Task, train: Any, dev: Any) -> tuple[str, dict[str, float]] | None:
    """Name and scores on dev of TF-IDF with logistic regression, or with ridge regression for scores; else None.

    Args:
      task: fitted to ``train``.
      train, dev: its examples.
    """
    if not isinstance(task, ClassificationTask | RegressionTask):
        return None
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    inputs, dev_inputs = vectorizer.fit_transform(_texts(train)), vectorizer.transform(_texts(dev))
    if isinstance(task, RegressionTask):
        scores = Ridge().fit(inputs, train.known_labels).predict(dev_inputs)
        return "tf_idf_ridge_regression", task.score(scores, dev)
    model = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=1000).fit(inputs, train.known_labels)
    predictions = ClassificationPredictions(model.predict(dev_inputs), model.predict_proba(dev_inputs))
    return "tf_idf_logistic_regression", task.score(predictions, dev)


def _texts(examples: Examples) -> list[str]:
    """A text, or the two of a pair, of each row."""
    return [text if isinstance(text, str) else " ".join(text) for text in examples.texts]
