"""Multi-label classification: any number of labels per text or pair of texts, with a threshold for each label."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from bert import metrics
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.errors import UserError, require
from bert.metrics.calibration import Hits, fit_temperature
from bert.tasks.base import Outputs
from bert.tasks.columns import Columns, is_missing, label_text
from bert.tasks.sequence_classification.base import Examples, LabelTask

SEPARATOR = ";"
"""Separator of the labels of a row in tables and prediction files."""

MULTI_HOT_LABEL = "LABEL_"
"""Prefix of generated label names if the data has only multi-hot lists."""

MULTI_HOT = {0: 0, 1: 1, "0": 0, "1": 1}
"""Values of a multi-hot list; false, true, 0.0 and 1.0 are equal to them."""

DEFAULT_THRESHOLD = 0.5
"""Threshold of models that define none."""


class MultilabelPredictions(NamedTuple):
    """Whether each row has each label [R, L], the probabilities [R, L], and the threshold of each label [L]."""

    labels: np.ndarray
    probabilities: np.ndarray
    thresholds: np.ndarray


class Labels(NamedTuple):
    """An answer: the labels of an input, and the probability of each label."""

    labels: list[str]
    probabilities: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MultilabelTask(LabelTask):
    """Any number of labels per row. A label is predicted if its probability reaches its threshold."""

    label_thresholds: tuple[float, ...] = ()
    """One threshold per label or one for all; () before tuning on dev: then DEFAULT_THRESHOLD is used."""
    baseline: str = "constant_labels"
    tuned_at_each_evaluation: ClassVar[bool] = True
    answer_type: ClassVar[type] = Labels
    problem_type = "multi_label_classification"

    @property
    def bundle_fields(self) -> dict[str, Any]:
        thresholds = self.label_thresholds * (self.num_labels if len(self.label_thresholds) == 1 else 1)
        return {**super().bundle_fields, "label_thresholds": thresholds}

    def rows_by_label(self, examples: Examples) -> np.ndarray:
        counts: np.ndarray = examples.known_labels.sum(axis=0, dtype=np.int64)
        return counts

    def predict(self, outputs: Outputs, features: TokenRows, examples: Examples) -> MultilabelPredictions:
        """Returns the labels of each row for logits [L]; NaN counts as 0."""
        return self.decide(self._probabilities(outputs))

    def reliability(self, predictions: MultilabelPredictions, examples: Examples) -> Hits:
        """Returns for each row and label [R * L] whether the row has the label, and the label's probability."""
        return Hits(examples.known_labels.ravel() > 0, predictions.probabilities.ravel())

    def decide(self, probabilities: np.ndarray) -> MultilabelPredictions:
        """Returns the labels for probabilities [R, L]."""
        thresholds = np.asarray(self.label_thresholds or (DEFAULT_THRESHOLD,))
        return MultilabelPredictions(
            probabilities >= thresholds, probabilities, np.broadcast_to(thresholds, self.num_labels)
        )

    def tune(self, outputs: Outputs, features: TokenRows, examples: Examples) -> MultilabelTask:
        """Returns the task with the temperature of the least binary cross-entropy of all labels, if ``calibration`` is
        temperature, and with the best thresholds for the main metric, unless thresholds are set."""
        task = self
        if self.calibration == "temperature":
            logits = self._logits(outputs).ravel()
            fitted = fit_temperature(np.stack([np.zeros_like(logits), logits], axis=1), examples.known_labels.ravel())
            task = self if fitted is None else dataclasses.replace(self, calibration=fitted)
        return task if task.label_thresholds else task.with_best_thresholds(task._probabilities(outputs), examples)

    def with_best_thresholds(self, probabilities: np.ndarray, examples: Examples) -> MultilabelTask:
        """Returns the task with the thresholds that maximize the main metric for probabilities [R, L]."""
        best = best_thresholds(probabilities, examples.known_labels, micro=self.main_metric == "micro_f1")
        return dataclasses.replace(self, label_thresholds=tuple(best.tolist()))

    def score(self, predictions: MultilabelPredictions, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(self.metrics, predictions.labels, examples.known_labels)

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Returns the scores of the best constant prediction for the main metric."""
        same = np.zeros(examples.known_labels.shape)
        return self.score(self.with_best_thresholds(same, examples).decide(same), examples)

    def is_degenerate(self, predictions: MultilabelPredictions, examples: Examples) -> bool:
        """Returns whether all rows have the same labels, or no metric beats the baseline."""
        constant = not _vary(predictions.labels) and _vary(examples.known_labels)
        return constant or self.is_no_better(self.score(predictions, examples), self.baseline_scores(examples))

    def never_predicted(self, predictions: MultilabelPredictions, examples: Examples) -> list[str]:
        missing = examples.known_labels.any(axis=0) & ~predictions.labels.any(axis=0)
        return [self.label_names[label] for label in np.flatnonzero(missing)]

    def write_predictions(
        self, folder: Path, split: str, predictions: MultilabelPredictions, examples: Examples
    ) -> list[Path]:
        if not len(examples) == len(predictions.labels) == len(predictions.probabilities):
            raise ValueError(f"{len(examples)} rows, {len(predictions.labels)} predictions")
        right = {"label": self._join(examples.known_labels)} if examples.labelled else {}
        shares = {
            f"probability_{name}": [f"{share:.6f}" for share in column]
            for name, column in zip(self.labels, predictions.probabilities.T, strict=True)
        }
        return self._write(folder, split, examples, self._join(predictions.labels), {**right, **shares})

    def details(self, predictions: MultilabelPredictions, examples: Examples) -> dict[str, Any]:
        """Returns scores and threshold of each label; there is no confusion matrix for several labels per row."""
        details = metrics.by_class(self.label_names, predictions.labels, examples.known_labels)
        for scores, threshold in zip(details["classes"].values(), predictions.thresholds.tolist(), strict=True):
            scores["threshold"] = threshold
        return details

    def write_details(
        self, folder: Path, split: str, predictions: MultilabelPredictions, examples: Examples
    ) -> list[Path]:
        """Writes the rows with a wrong or missing label, most confident errors first, to errors.tsv."""
        labels = examples.known_labels
        distances = np.where(predictions.labels != labels, np.abs(labels - predictions.probabilities), 0)
        worst, expected, predicted = distances.argmax(axis=1), self._join(labels), self._join(predictions.labels)
        wrong = np.flatnonzero((predictions.labels != labels).any(axis=1))
        rows = (
            (
                row,
                predicted[row],
                expected[row],
                self.labels[worst[row]],
                f"{predictions.probabilities[row, worst[row]]:.6f}",
            )
            for row in wrong[np.argsort(-distances.max(axis=1)[wrong], kind="stable")]
        )
        columns = ("prediction", "label", "surest_error", "probability")
        return [self._write_errors(folder, split, examples, columns, rows)]

    def format_predictions(self, predictions: MultilabelPredictions, examples: Any) -> list[Labels]:
        return [
            Labels(
                [name for name, has in zip(self.label_names, row, strict=True) if has],
                dict(zip(self.label_names, map(float, shares), strict=True)),
            )
            for row, shares in zip(predictions.labels, predictions.probabilities, strict=True)
        ]

    def _probabilities(self, outputs: Outputs) -> np.ndarray:
        return metrics.sigmoid(self._logits(outputs) / np.float32(self.temperature))

    def _join(self, labels: np.ndarray) -> list[str]:
        """Returns the labels [R, L] of each row as the text of a cell."""
        return [SEPARATOR.join(self.labels[label] for label in np.flatnonzero(row)) for row in labels]

    def _encode(self, records: Records, columns: Columns, is_train: bool) -> tuple[np.ndarray, tuple[str, ...]]:
        """Accepts lists of labels, separated labels, or multi-hot lists.

        If all rows are lists of 0 and 1 of one length, they are multi-hot: the n-th number is 1 if the row has the n-th
        label. Labels without names are called ``LABEL_0``, ``LABEL_1``, ... as in transformers.
        """
        known = set(self.labels) | set(self.label_names)
        cells = [_as_list(cell, known) for cell in require(columns.labels, "the labels")[0]]
        if not {"0", "1"} <= known and (multi_hot := _multi_hot(cells)) is not None:
            width = multi_hot.shape[1]
            labels = self.labels or tuple(f"{MULTI_HOT_LABEL}{label}" for label in range(width))
            if len(labels) != width:
                raise UserError(
                    f"{records.source}: {self.label_column} has multi-hot lists of {width} numbers, but there are "
                    f"{len(labels)} labels: list the {width} names of the labels as data.labels"
                )
            records.require_sound(columns.faults)
            return multi_hot, labels
        rows, faults = [], list(columns.faults)
        for line_number, cell in zip(columns.line_numbers, cells, strict=True):
            try:
                rows.append(_split_labels(records, line_number, self.label_column, cell))
            except UserError as error:
                faults.append((line_number, error))
                rows.append([])
        numbers, labels = self._number_labels(records, columns.line_numbers, rows, is_train, faults)
        encoded = np.zeros((len(rows), len(labels)), np.int8)
        for row, present in zip(encoded, numbers, strict=True):
            row[present] = 1
        return encoded, labels


def _as_list(cell: Any, known: Collection[str]) -> Any:
    """Returns the list that a cell contains as text, as pandas writes lists; other cells unchanged."""
    if not isinstance(cell, str) or cell.strip() in known or cell.strip()[:1] + cell.strip()[-1:] != "[]":
        return cell
    try:
        return list(ast.literal_eval(cell.strip()))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return cell


def _multi_hot(cells: Sequence[Any]) -> np.ndarray | None:
    """Returns multi-hot lists, some of which may be empty, as int8 [R, L]; None if the cells are not multi-hot."""
    rows = [cell.split(SEPARATOR) if isinstance(cell, str) and SEPARATOR in cell else cell for cell in cells]
    rows = [[] if is_missing(row) or row == "" else row for row in rows]
    widths = {len(row) if isinstance(row, list) else 1 for row in rows} - {0}
    if len(widths) != 1 or (width := widths.pop()) < 2 or not all(_is_bit(number) for row in rows for number in row):
        return None
    return np.array([[MULTI_HOT[number] for number in row] or [0] * width for row in rows], np.int8)


def _is_bit(number: Any) -> bool:
    return isinstance(number, str | int | float) and number in MULTI_HOT


def _split_labels(records: Records, line_number: int, name: str, cell: Any) -> list[str]:
    """Returns the labels of a row; [] for an empty cell, an empty list or null. Raises UserError."""
    if is_missing(cell) or (isinstance(cell, str) and not cell.strip()):
        return []
    parts = cell.split(SEPARATOR) if isinstance(cell, str) else cell if isinstance(cell, list) else [cell]
    if isinstance(cell, str) and not all(part.strip() for part in parts):
        fault = f"{name} is {cell[:40]!r}, with an empty label next to a {SEPARATOR}: remove that {SEPARATOR}"
        raise records.error(line_number, fault)
    words = [label_text(records, line_number, name, part).strip() for part in parts]
    for number, word in enumerate(words):
        if SEPARATOR in word:
            fault = f"{word[:40]!r}, but {SEPARATOR} separates labels in tables: use a name without it"
        elif word in words[:number]:
            fault = f"{word[:40]!r} twice: list each label of the row once"
            if set(words) <= {"0", "1"}:
                fault += ", or write multi-hot lists of one length in all rows"
        else:
            continue
        raise records.error(line_number, f"{name} has {fault}")
    return words


def _vary(labels: np.ndarray) -> bool:
    """Returns whether the rows of labels [R, L] differ."""
    return bool((labels != labels[:1]).any())


def check_label_names(labels: Sequence[str]) -> None:
    """Raises UserError for a label of ``data.labels`` that contains the separator."""
    for label in labels:
        if SEPARATOR in label:
            raise UserError(f"data.labels has {label!r}, but {SEPARATOR} separates labels: use a name without it")


class _Cuts(NamedTuple):
    """The possible cuts of the rows by the probability of one label.

    Attributes:
        thresholds: 0.5 if it makes the cut; otherwise the midpoint of two probabilities, or of one and 0 or 1.
        correct: number of predicted rows that have the label.
        total: number of predicted rows plus number of rows with the label; F1 is 2 * correct / total.
    """

    thresholds: np.ndarray
    correct: np.ndarray
    total: np.ndarray


def best_thresholds(probabilities: np.ndarray, labels: np.ndarray, micro: bool) -> np.ndarray:
    """Returns the thresholds [L] that maximize micro F1, or the F1 of each label and thereby macro F1.

    Among equally good thresholds, the one nearest to 0.5 is chosen.

    Micro F1 is 2 * correct / total over all labels. Maximizing 2 * correct - f1 * total for each label separately
    results in cuts with a micro F1 above f1, unless f1 is the maximum (Dinkelbach 1967).

    Args:
      probabilities: [R, L], from 0 to 1.
      labels: [R, L], 1 for the labels of a row, else 0.
    """
    cuts = [_cuts_of_label(*columns) for columns in zip(probabilities.T, labels.T, strict=True)]
    if not micro:
        return np.array([of.thresholds[_first_best(2 * of.correct / np.maximum(of.total, 1))] for of in cuts])
    f1 = -1.0
    while True:
        chosen = [_first_best(2 * of.correct - max(f1, 0.0) * of.total) for of in cuts]
        correct, total = (
            sum(int(counts[cut]) for counts, cut in zip(columns, chosen, strict=True))
            for columns in ([of.correct for of in cuts], [of.total for of in cuts])
        )
        if (reached := 2 * correct / max(total, 1)) <= f1:
            return np.array([of.thresholds[cut] for of, cut in zip(cuts, chosen, strict=True)])
        f1 = reached


def _cuts_of_label(probabilities: np.ndarray, labels: np.ndarray) -> _Cuts:
    """Returns the cuts of one label, sorted by the distance of the threshold to 0.5."""
    order = np.argsort(-probabilities, kind="stable")
    ranked = np.concatenate([[1.0], probabilities[order].astype(np.float64), [0.0]])
    correct = np.concatenate([[0], np.cumsum(labels[order], dtype=np.int64)])
    upper, lower = ranked[:-1], ranked[1:]
    thresholds = np.where((lower < 0.5) & (upper >= 0.5), 0.5, (upper + lower) / 2)
    thresholds = np.where(thresholds > lower, thresholds, upper)  # the midpoint of adjacent floats is one of them
    predicted = np.arange(len(upper))
    # Rows with the same probability are predicted together or not at all.
    cuts = np.flatnonzero((upper > lower) | (predicted == len(order)))
    cuts = cuts[np.argsort(np.abs(thresholds[cuts] - 0.5), kind="stable")]
    return _Cuts(thresholds[cuts], correct[cuts], predicted[cuts] + correct[-1])


def _first_best(values: np.ndarray) -> int:
    """Returns the index of the first maximum, with a tolerance for rounding."""
    return int(np.argmax(values >= values.max() - 1e-9))
