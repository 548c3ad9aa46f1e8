"""Classification and regression: one label or one score for each text or pair of texts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from bert import metrics
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.errors import UserError, require
from bert.metrics.calibration import Hits, calibration, fit_temperature
from bert.runs.prediction_plots import draw_confusion_matrix, draw_reliability
from bert.tasks.bag_of_words import INVERSE_REGULARISATION
from bert.tasks.base import Outputs, Task
from bert.tasks.columns import Columns, label_text
from bert.tasks.error_files import file_prefix
from bert.tasks.sequence_classification.base import Examples, LabelTask, SequenceClassificationTask
from bert.tasks.sequence_classification.multilabel import MultilabelTask

LARGEST = float(np.finfo(np.float32).max)
"""The largest score of a label."""


class ClassificationPredictions(NamedTuple):
    """Predicted label indices [R], and the probability of each label [R, L]."""

    labels: np.ndarray
    probabilities: np.ndarray


class Label(NamedTuple):
    """An answer: the most likely label, and the probability of each label. None: the model abstains."""

    label: str | None
    probabilities: dict[str, float]


class Score(NamedTuple):
    """An answer: a score on the scale of the task."""

    score: float


@dataclass(frozen=True, kw_only=True)
class ClassificationTask(LabelTask):
    """One label per row."""

    min_confidence: float = 0.0
    """Probability below which `format_predictions` abstains."""
    baseline: str = "majority_class"
    one_label: ClassVar[bool] = True
    answer_type: ClassVar[type] = Label

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | ({"rank"} if self.reads_pairs else frozenset())

    def pair_score(self, answer: Label, label: str) -> float:
        return answer.probabilities[label]

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """The second label if there are two labels: f1 refers to it."""
        return {"f1": self.label_names[1]} if "f1" in self.metrics and self.num_labels == 2 else {}

    def rows_by_label(self, examples: Examples) -> np.ndarray:
        return np.bincount(examples.known_labels, minlength=self.num_labels)

    def predict(self, outputs: Outputs, features: TokenRows, examples: Examples) -> ClassificationPredictions:
        """Returns the most likely label of each row for logits [L]; NaN counts as 0."""
        probabilities = metrics.softmax(self._logits(outputs) / np.float32(self.temperature))
        return ClassificationPredictions(probabilities.argmax(-1), probabilities)

    def tune(self, outputs: Outputs, features: TokenRows, examples: Examples) -> Self:
        """Returns the task with the temperature of the least cross-entropy, if ``calibration`` is temperature."""
        if self.calibration != "temperature":
            return self
        fitted = fit_temperature(self._logits(outputs), examples.known_labels)
        return self if fitted is None else dataclasses.replace(self, calibration=fitted)

    def score(self, predictions: ClassificationPredictions, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(self.metrics, predictions.labels, examples.known_labels)

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Returns the scores of always predicting the most frequent label of the split."""
        return metrics.majority_class(self.metrics, examples.known_labels)

    def is_degenerate(self, predictions: ClassificationPredictions, examples: Examples) -> bool:
        """Returns whether all rows have one label, or no metric beats the majority class (Mosbach et al. 2021)."""
        one_label = len(np.unique(predictions.labels)) == 1 < len(np.unique(examples.known_labels))
        return one_label or self.is_no_better(self.score(predictions, examples), self.baseline_scores(examples))

    def never_predicted(self, predictions: ClassificationPredictions, examples: Examples) -> list[str]:
        missing = np.setdiff1d(examples.known_labels, predictions.labels)
        return [self.label_names[label] for label in missing]

    def write_predictions(
        self, folder: Path, split: str, predictions: ClassificationPredictions, examples: Examples
    ) -> list[Path]:
        if not len(examples) == len(predictions.labels) == len(predictions.probabilities):
            raise ValueError(
                f"{len(examples)} rows, {len(predictions.labels)} predictions, "
                f"{len(predictions.probabilities)} probabilities"
            )
        words = [self.labels[label] for label in predictions.labels]
        right = {"label": [self.labels[label] for label in examples.known_labels]} if examples.labelled else {}
        more = {**right, "probability": [f"{share:.6f}" for share in _chosen(predictions)]}
        return self._write(folder, split, examples, words, more)

    def hits(self, predictions: ClassificationPredictions, examples: Examples) -> Hits:
        return Hits(predictions.labels == examples.known_labels, _chosen(predictions))

    def details(self, predictions: ClassificationPredictions, examples: Examples) -> dict[str, Any]:
        """Returns the scores of each label and the confusion matrix."""
        return metrics.by_class(self.label_names, predictions.labels, examples.known_labels)

    def write_details(
        self, folder: Path, split: str, predictions: ClassificationPredictions, examples: Examples
    ) -> list[Path]:
        """Writes errors.tsv, most confident errors first, and two pictures; with a prefix for test splits."""
        labels, shares = examples.known_labels, _chosen(predictions)
        wrong = np.flatnonzero(predictions.labels != labels)
        rows = (
            (row, self.label_names[predictions.labels[row]], self.label_names[labels[row]], f"{shares[row]:.6f}")
            for row in wrong[np.argsort(-shares[wrong], kind="stable")]
        )
        errors = self._write_errors(folder, split, examples, ("prediction", "label", "probability"), rows)
        matrix = np.array(self.details(predictions, examples)["confusion_matrix"])
        name = f"{self.name}, {split}" if split else self.name
        title = f"{name}: {len(wrong):,} errors in {len(labels):,} rows"
        prefix, reliability = file_prefix(split), calibration(self.hits(predictions, examples))
        pictures = (
            draw_confusion_matrix(folder / f"{prefix}confusion_matrix.png", matrix, self.label_names, title),
            draw_reliability(folder / f"{prefix}reliability.png", reliability, name),
        )
        return [errors, *(picture for picture in pictures if picture is not None)]

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Self:
        """Returns the task with ``min_confidence``, if it is set."""
        others = {name: value for name, value in settings.items() if name != "min_confidence"}
        least = settings.get("min_confidence")
        task = super().with_answer_settings(others)
        if least is None:
            return task
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1:
            raise UserError(f"min_confidence is {least!r}: pass a probability from 0 to 1")
        return dataclasses.replace(task, min_confidence=float(least))

    def format_predictions(self, predictions: ClassificationPredictions, examples: Any) -> list[Label]:
        names = (*self.label_names, None)
        sure = _chosen(predictions) >= self.min_confidence
        return [
            Label(names[label], dict(zip(self.label_names, map(float, shares), strict=True)))
            for label, shares in zip(np.where(sure, predictions.labels, -1), predictions.probabilities, strict=True)
        ]

    def _encode(self, records: Records, columns: Columns, is_train: bool) -> tuple[np.ndarray, tuple[str, ...]]:
        """Accepts labels as the files write them or, in data sets, their names; a training split may define them."""
        rows, faults = [], list(columns.faults)
        for line_number, label in zip(columns.line_numbers, require(columns.labels, "the labels")[0], strict=True):
            if isinstance(label, list):
                fault = f"{self.label_column} is a list, but {self.name} has one label per row"
                raise records.error(line_number, f"{fault}: set task to multilabel, or fix the row")
            try:
                # A space around a label is never intended, and hard to notice.
                rows.append([label_text(records, line_number, self.label_column, label).strip()])
            except UserError as error:
                faults.append((line_number, error))
                rows.append([])
        numbers, labels = self._number_labels(records, columns.line_numbers, rows, is_train, faults)
        return np.array(numbers, np.int32)[:, 0], labels


@dataclass(frozen=True, kw_only=True)
class RegressionTask(SequenceClassificationTask):
    """One score per row, from ``lowest`` to ``highest``; predictions are the R float32 outputs of the head."""

    lowest: float
    highest: float
    baseline: str = "mean"
    answer_type: ClassVar[type] = Score
    num_labels = 1
    problem_type = "regression"

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | ({"rank"} if self.reads_pairs else frozenset())

    def pair_score(self, answer: Score, label: str) -> float:
        return answer.score

    def without_limits(self) -> Self:
        return dataclasses.replace(self, lowest=-math.inf, highest=math.inf)

    def predict(self, outputs: Outputs, features: TokenRows, examples: Examples) -> np.ndarray:
        """Returns the scores [R]; NaN counts as 0."""
        return np.nan_to_num(np.reshape(outputs, len(outputs)))

    def score(self, predictions: np.ndarray, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(self.metrics, predictions, examples.known_labels)

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Returns the correlation of a constant prediction, which is 0 by definition."""
        return metrics.compute_metrics(self.metrics, np.zeros(len(examples)), examples.known_labels)

    def is_degenerate(self, predictions: np.ndarray, examples: Examples) -> bool:
        """Returns whether the main correlation is 0 or negative."""
        return self.score(predictions, examples)[self.main_metric] <= 0

    def write_predictions(self, folder: Path, split: str, predictions: np.ndarray, examples: Examples) -> list[Path]:
        """Writes SPLIT.tsv; scores for the leaderboard are clipped to the scale, scores next to labels are not."""
        if len(examples) != len(predictions):
            raise ValueError(f"{len(examples)} rows, {len(predictions)} predictions")
        shown = predictions if examples.labelled else self._within(predictions)
        right = {"score": list(map(_exact, examples.known_labels))} if examples.labelled else {}
        # Fewer digits would cause ties and change Spearman's correlation.
        words = [f"{score:.6f}" if math.isfinite(self.highest) else _exact(score) for score in shown]
        return self._write(folder, split, examples, words, right)

    def write_details(self, folder: Path, split: str, predictions: np.ndarray, examples: Examples) -> list[Path]:
        """Writes the rows to errors.tsv, the greatest deviation from the score first."""
        scores = examples.known_labels
        deviations = predictions - scores
        rows = (
            (row, _exact(predictions[row]), _exact(scores[row]), _exact(deviations[row]))
            for row in np.argsort(-np.abs(deviations), kind="stable")
        )
        return [self._write_errors(folder, split, examples, ("prediction", "score", "deviation"), rows)]

    def format_predictions(self, predictions: np.ndarray, examples: Any) -> list[Score]:
        return [Score(float(score)) for score in self._within(predictions)]

    def _within(self, scores: np.ndarray) -> np.ndarray:
        return np.clip(scores, self.lowest, self.highest)

    def _encode(self, records: Records, columns: Columns, is_train: bool) -> tuple[np.ndarray, tuple[str, ...]]:
        scale = f"from {self.lowest:g} to {self.highest:g}" if math.isfinite(self.highest) else "finite numbers"
        scores, faults = [], list(columns.faults)
        for line_number, label in zip(columns.line_numbers, require(columns.labels, "the labels")[0], strict=True):
            fault = ""
            try:
                score = float(str(label))
            except ValueError:
                score, fault = math.nan, "not a number"
            if not (fault or (abs(score) <= LARGEST and self.lowest <= score <= self.highest)):
                fault = "out of range"
            if fault:
                message = f"{self.label_column} is {str(label)[:40]!r}: {fault}, but {self.name} has scores {scale}"
                faults.append((line_number, records.error(line_number, f"{message}: fix it")))
            scores.append(score)
        records.require_sound(faults)
        return np.array(scores, np.float32), ()


def _chosen(predictions: ClassificationPredictions) -> np.ndarray:
    """Returns the probability [R] of each predicted label."""
    return np.take_along_axis(predictions.probabilities, predictions.labels[:, None], axis=1)[:, 0]


def _exact(score: np.floating) -> str:
    """Returns the shortest decimal that is read as the same number."""
    return np.format_float_positional(score, trim="-")


def lexical_baseline(task: Task, train: Any, dev: Any, max_ngram: int = 1) -> tuple[str, dict[str, float]] | None:
    """Returns name and scores on dev of TF-IDF with logistic regression, or with ridge regression for scores.

    Returns None for texts that have no word of two letters, and for a single label. For other tasks, returns the result
    of their ``bag_of_words``.

    Args:
      task: the task, fitted to ``train``.
      train, dev: the examples of the splits.
      max_ngram: maximum number of adjacent words that are counted together.
    """
    if not isinstance(task, ClassificationTask | MultilabelTask | RegressionTask):
        return task.bag_of_words(train, dev)
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, max_ngram))
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
        shares = shares[:, -task.num_labels :]  # a single label also has a column for its absence
        return "tf_idf_logistic_regression", task.score(task.with_best_thresholds(shares, dev).decide(shares), dev)
    if len(set(train.known_labels)) == 1:
        return None
    model.fit(inputs, train.known_labels)
    predictions = ClassificationPredictions(model.predict(dev_inputs), model.predict_proba(dev_inputs))
    return "tf_idf_logistic_regression", task.score(predictions, dev)


def _columns(examples: Examples) -> list[list[str]]:
    """Returns the first texts and, for pairs, the second texts of all rows."""
    return [examples.texts_a] if examples.texts_b is None else [examples.texts_a, examples.texts_b]


def _features(columns: list[Any]) -> Any:
    """Returns the features [N, words] of texts; for pairs products, differences and cosines of both sides."""
    if len(columns) == 1:
        return columns[0]
    from scipy.sparse import csr_matrix, hstack

    first, second = columns
    products = first.multiply(second)
    return hstack([products, abs(first - second), csr_matrix(products.sum(axis=1))], format="csr")
