"""Scores of a fine-tuned model on labelled data, with intervals, and the comparison of two models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.config import FinetuneConfig
from bert.config.run_file import load_run_config
from bert.data.inputs import Text
from bert.data.rows import QueryDocumentRows
from bert.errors import UserError, format_number, on_one_line
from bert.metrics.calibration import Calibration, Hits, calibration
from bert.metrics.resampling import Interval, McNemar, bootstrap_intervals, difference_intervals, mcnemar, supported
from bert.metrics.weighted import WeightedScores
from bert.remote import fetch
from bert.runs.metrics_log import write_results
from bert.runs.report import align_columns
from bert.tasks.base import Outputs, Task
from bert.tasks.error_files import write_rows
from bert.tasks.labelled import Labelled, embedding_task, query_task, read_labelled, relabelled
from bert.tasks.splits import read_splits, require_dev
from bert.tasks.weighted_scores import hits, reliability, weighted_scores

MATRIX_SHOWN = 10
"""Maximum number of labels of a confusion matrix that is printed."""

DOUBTFUL_SHOWN = 10
TEXT_SHOWN = 60
"""Maximum number of doubtful labels that are printed, and of characters of their texts."""


class Answered(NamedTuple):
    """Rows whose prediction has at least a minimum probability.

    Attributes:
        min_confidence: the minimum probability.
        coverage: share of these rows.
        accuracy: share of correct rows among them; None if there are none.
    """

    min_confidence: float
    coverage: float
    accuracy: float | None

    @classmethod
    def from_hits(cls, predicted: Hits, min_confidence: float) -> Answered:
        """Returns the coverage and accuracy of predictions."""
        is_answered = np.asarray(predicted.confidences) >= min_confidence
        accuracy = float(np.asarray(predicted.correct)[is_answered].mean()) if is_answered.any() else None
        return cls(min_confidence, float(is_answered.mean()), accuracy)

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", with accuracy {self.accuracy:.4f}"
        return f"probability of at least {self.min_confidence:g}: {self.coverage:.1%} of the rows{accuracy}"


@dataclass(frozen=True)
class Comparison:
    """The difference between two models on the same rows.

    Attributes:
        other: source of the second model.
        metrics: scores of the second model.
        differences: first minus second, by metric.
        intervals: 95% intervals of the differences (paired bootstrap).
        mcnemar: test of the accuracies; None for tasks without one label per row.
        calibration: as in the `Evaluation` of the second model, like ``details`` and ``answered``.
    """

    other: str
    metrics: dict[str, float]
    differences: dict[str, float]
    intervals: dict[str, Interval]
    mcnemar: McNemar | None
    calibration: Calibration | None = None
    details: dict[str, Any] = field(default_factory=dict)
    answered: Answered | None = None

    def results(self) -> dict[str, Any]:
        """Returns the values for results.json."""
        test = {} if self.mcnemar is None else {"mcnemar": self.mcnemar._asdict()}
        return {
            "other": self.other,
            "metrics": self.metrics,
            "differences": self.differences,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            **test,
            **_optional(self),
        }


class DoubtfulLabel(NamedTuple):
    """A label that is probably wrong (`bert.metrics.confident_learning`).

    Attributes:
        line: line number in the file, or row number from 1.
        label: the given label.
        suggested_label: the label that the row probably has.
        probability: out-of-fold probability of the given label.
        suggested_probability: out-of-fold probability of the suggested label.
        text: the text, or the pair of texts.
    """

    line: int
    label: str
    suggested_label: str
    probability: float
    suggested_probability: float
    text: Text


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on labelled data. ``print`` shows them as tables.

    Attributes:
        source: the model.
        data: the data.
        rows: number of rows, sentences or questions.
        metrics: the scores by name.
        intervals: 95% intervals of the scores (percentile bootstrap over the rows), except of counts and thresholds.
        calibration: reliability of the probabilities, for multi-label tasks of all labels; None for other tasks than
            classification.
        details: scores of each label, and the confusion matrix, as in the results.json of a run.
        comparison: the comparison with another model, or None.
        answered: coverage and accuracy for a minimum probability, or None.
        folds: number of folds of a cross-validation; None for the scores of one model.
        doubtful: doubtful labels of a cross-validation, the most doubtful first.
    """

    source: str
    data: str
    rows: int
    metrics: dict[str, float]
    intervals: dict[str, Interval]
    calibration: Calibration | None
    details: dict[str, Any]
    comparison: Comparison | None = None
    answered: Answered | None = None
    folds: int | None = None
    doubtful: tuple[DoubtfulLabel, ...] = ()
    labelled: Labelled = field(repr=False, kw_only=True)
    predictions: Any = field(repr=False, kw_only=True)

    def results(self) -> dict[str, Any]:
        """Returns the values for results.json."""
        return {
            "model": self.source,
            "data": self.data,
            "rows": self.rows,
            "metrics": self.metrics,
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            **_optional(self),
            **({} if self.comparison is None else {"comparison": self.comparison.results()}),
            **({} if self.folds is None else {"folds": self.folds, "doubtful_labels": len(self.doubtful)}),
        }

    def write(self, folder: str | Path) -> list[Path]:
        """Writes results.json and, depending on the task, errors.tsv and pictures. Returns their paths.

        A cross-validation also writes doubtful_labels.tsv.
        """
        folder = Path(folder)
        write_results(folder, self.results())
        more = self.labelled.scorer.write_details(folder, "", self.predictions, self.labelled.examples)
        if self.folds is not None:
            more.append(_write_doubtful(folder / "doubtful_labels.tsv", self.doubtful))
        return [folder / "results.json", *more]

    def __str__(self) -> str:
        """Returns the tables of metrics, labels and confusions."""
        folds = "" if self.folds is None else f", predicted in {self.folds} folds"
        lines = [f"{self.rows:,} rows of {self.data}{folds}", "", *self._metrics_table()]
        other = self.comparison
        if other is not None and other.mcnemar is not None:
            first, second, p_value = other.mcnemar
            lines += ["", f"only this model is right: {first:,} rows; only {other.other}: {second:,} rows"]
            lines += [f"McNemar's exact p-value: {p_value:.3g}"]
        if other is None:
            lines += _tables(self)
        else:
            for source, one in ((self.source, self), (other.other, other)):
                if tables := _tables(one):
                    lines += ["", f"{source}:", *tables]
        if self.folds is not None:
            lines += ["", *_doubtful_table(self.doubtful)]
        return "\n".join(line.removeprefix("  ") for line in lines)

    def _metrics_table(self) -> list[str]:
        compared = self.comparison
        header = ["metric", "score", "95% interval"]
        header += [] if compared is None else [compared.other, "difference", "95% interval"]
        rows = [tuple(header)]
        for name, score in self.metrics.items():
            row = [name, _number(score), _span(self.intervals.get(name))]
            if compared is not None:
                row += [_number(scores.get(name)) for scores in (compared.metrics, compared.differences)]
                row.append(_span(compared.intervals.get(name)))
            rows.append(tuple(row))
        return align_columns(rows)


def _optional(scored: Evaluation | Comparison) -> dict[str, Any]:
    """Returns the values for results.json that not every task has."""
    return {
        **({} if scored.calibration is None else {"calibration": scored.calibration._asdict()}),
        **({} if scored.answered is None else {"answered": scored.answered._asdict()}),
        **({"details": scored.details} if scored.details else {}),
    }


def _tables(scored: Evaluation | Comparison) -> list[str]:
    """Returns the calibration error, the table of the labels and the confusion matrix of a model."""
    lines = []
    if scored.calibration is not None:
        lines += ["", f"expected calibration error: {scored.calibration.ece:.4f}"]
    if scored.answered is not None:
        lines += ["", str(scored.answered)]
    if classes := scored.details.get("classes"):
        lines += ["", *_classes_table(classes)]
    matrix = scored.details.get("confusion_matrix")
    if matrix and len(matrix) <= MATRIX_SHOWN:
        names = list(scored.details["classes"])
        rows = [("label \\ prediction", *names)]
        rows += [(name, *map(str, counts)) for name, counts in zip(names, matrix, strict=True)]
        lines += ["", *align_columns(rows)]
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else format_number(value, 4)


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else f"{_number(interval.low)} to {_number(interval.high)}"


def _classes_table(classes: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = list(next(iter(classes.values())))
    rows = [("label", *columns)]
    rows += [(name, *(_number(scores[column]) for column in columns)) for name, scores in classes.items()]
    return align_columns(rows)


def _doubtful_table(doubtful: Sequence[DoubtfulLabel]) -> list[str]:
    rows = [("line", "label", "suggested", "probability", "text")]
    for doubt in doubtful[:DOUBTFUL_SHOWN]:
        text = on_one_line(doubt.text if isinstance(doubt.text, str) else " / ".join(doubt.text))
        row = (str(doubt.line), doubt.label, doubt.suggested_label, f"{doubt.probability:.4f}", text[:TEXT_SHOWN])
        rows.append(row)
    shown = f", of which the first {DOUBTFUL_SHOWN}" if len(doubtful) > DOUBTFUL_SHOWN else ""
    return [f"{len(doubtful):,} doubtful labels{shown}", *(["", *align_columns(rows)] if doubtful else [])]


def _write_doubtful(path: Path, doubtful: Sequence[DoubtfulLabel]) -> Path:
    pairs = any(not isinstance(doubt.text, str) for doubt in doubtful)
    columns = (*DoubtfulLabel._fields[:-1], *(("text_a", "text_b") if pairs else ("text",)))
    rows = ((*doubt[:-1], *((doubt.text,) if isinstance(doubt.text, str) else doubt.text)) for doubt in doubtful)
    return write_rows(path, columns, rows)


def evaluate(
    model: Any,
    data: Any,
    *,
    split: str = "dev",
    columns: Mapping[str, str] | None = None,
    compare: Any = None,
    batch_size: int = 32,
    outputs: Callable[[Any, Any], Outputs] | None = None,
    min_confidence: float | None = None,
) -> Evaluation:
    """Scores the model on labelled data.

    Args:
        data: one of the following.

            - the path of a labelled file in the formats of fine-tuning;
            - a folder, or a data set of the hub (``hub:ORGANISATION/NAME[:CONFIG]``), of which ``split`` is read;
            - for a run, the name of a split of its data, such as ``dev`` or ``test``;
            - rows in memory: dictionaries by column, a ``pandas.DataFrame`` or a ``datasets.Dataset``.
        split: the split of a folder or data set.
        columns: names of columns by their key of ``data.columns``, such as ``{"label": "stars"}``.
        compare: another model, scored on the same rows.
        batch_size: number of rows per batch.
        outputs: computes the outputs from examples and their rows. Defaults to `bert.Pretrained.outputs`.
        min_confidence: for one label per row, also report the coverage and the accuracy of the predictions that have at
            least this probability, which are the answers of `bert.Pretrained.predict` with ``min_confidence``.

    Raises:
        UserError: the model is not fine-tuned, a row is invalid, the data has no labels, or the labels are not the
            model's.
    """
    if min_confidence is not None:
        task_of(model).with_answer_settings({"min_confidence": min_confidence})  # raises UserError
    labelled = labelled_data(model, data, split, columns or {})
    name = str(data) if isinstance(data, str | Path) else "the rows"
    compute = outputs or (lambda _, features: model.outputs(features, batch_size))
    evaluation, weighted = _score(model, name, labelled, compute)
    evaluation = _with_answered(evaluation, min_confidence)
    if compare is None:
        return evaluation
    theirs, order = relabelled(labelled, task_of(compare))

    def other_outputs(_: Any, features: Any) -> Outputs:
        found: Outputs = compare.outputs(features, batch_size)
        return found if order is None else [output[..., order] for output in found]

    other, other_weighted = _score(compare, name, theirs, other_outputs)
    other = _with_answered(other, min_confidence)
    return dataclasses.replace(evaluation, comparison=_compare(evaluation, other, weighted, other_weighted))


def labelled_data(model: Any, data: Any, split: str = "dev", columns: Mapping[str, str] | None = None) -> Labelled:
    """Returns the labelled examples that ``data`` names (see `evaluate`). Raises UserError."""
    task = task_of(model)
    if isinstance(data, str) and is_split_name(model, data):
        return Labelled(task, task, _run_split(model, task, data))
    data = fetch(data) if isinstance(data, str) and not data.startswith("hub:") else data
    return read_labelled(task, data, split, columns or {})


def task_of(model: Any) -> Task:
    """Returns the model's task; the task of embeddings for a published embedding model. Raises UserError."""
    if model.task is None and model.pooling is not None:
        return embedding_task(model.source, model.pooling)
    task: Task = model.require_task()
    return task


def is_split_name(model: Any, data: str) -> bool:
    """Returns whether ``data`` is the name of a split of a run, and not a file or folder."""
    return model.step is not None and re.fullmatch(r"\w[\w-]*", data) is not None and not Path(data).exists()


def _run_split(model: Any, task: Task, name: str) -> Any:
    """Returns the labelled examples of a split of the run's data. Raises UserError."""
    config = load_run_config(Path(model.source))
    if not isinstance(config, FinetuneConfig):
        raise UserError(f"{model.source} is not a fine-tuning run: use one")
    examples = read_splits(task, config).examples
    if name not in examples:
        raise UserError(f"{model.source} has no split {name!r}: name a file, or one of {', '.join(examples)}")
    if name == "dev":
        require_dev(examples, model.source)
    if not examples[name].labelled:
        raise UserError(f"the split {name} of {model.source} has no labels: name a split or a file with labels")
    return examples[name]


def predictions_of(model: Any, labelled: Labelled, outputs: Callable[[Any, Any], Outputs]) -> Any:
    """Returns the predictions of a model for labelled examples."""
    task = labelled.task
    features = _features(model, task, labelled.inputs)
    if model.query_model is not None and isinstance(features, QueryDocumentRows):
        of_queries = _features(model.query_model, query_task(task, model.query_model.pooling), labelled.inputs)
        features = dataclasses.replace(features, queries=of_queries.queries)
    return task.predict(outputs(labelled.examples, features), features, labelled.inputs)


def _features(model: Any, task: Any, inputs: Any) -> Any:
    """Returns the rows of labelled examples for a model, which may declare a shorter maximum length."""
    max_length = None if model.task is not None or model.pooling is None else model.pooling.max_length
    rows = model.data if max_length is None else dataclasses.replace(model.data, max_length=max_length)
    return task.features(model.tokenizer, inputs, rows)


def _score(
    model: Any, data: str, labelled: Labelled, outputs: Callable[[Any, Any], Outputs]
) -> tuple[Evaluation, WeightedScores | None]:
    return evaluation_of(str(model.source), data, labelled, predictions_of(model, labelled, outputs))


def evaluation_of(
    source: str, data: str, labelled: Labelled, predictions: Any
) -> tuple[Evaluation, WeightedScores | None]:
    """Returns the evaluation of predictions, and its metrics as a function of weights."""
    scorer, examples = labelled.scorer, labelled.examples
    scores = scorer.score(predictions, examples)
    weighted = weighted_scores(scorer, predictions, examples)
    weighted = None if weighted is None else supported(weighted, scores)
    correct = reliability(scorer, predictions, examples)
    evaluation = Evaluation(
        source=source,
        data=data,
        rows=len(examples),
        metrics=scores,
        intervals={} if weighted is None else bootstrap_intervals(weighted),
        calibration=None if correct is None else calibration(correct),
        details=scorer.details(predictions, examples),
        labelled=labelled,
        predictions=predictions,
    )
    return evaluation, weighted


def _with_answered(evaluation: Evaluation, min_confidence: float | None) -> Evaluation:
    """Returns the evaluation with the coverage and the accuracy for a minimum probability, if there is one."""
    predicted = hits(evaluation.labelled.scorer, evaluation.predictions, evaluation.labelled.examples)
    if min_confidence is None or predicted is None:
        return evaluation
    return dataclasses.replace(evaluation, answered=Answered.from_hits(predicted, min_confidence))


def _compare(
    evaluation: Evaluation, other: Evaluation, first: WeightedScores | None, second: WeightedScores | None
) -> Comparison:
    shared = [name for name in evaluation.metrics if name in other.metrics]
    both: Sequence[Any] = [
        hits(one.labelled.scorer, one.predictions, one.labelled.examples) for one in (evaluation, other)
    ]
    return Comparison(
        other=other.source,
        metrics=other.metrics,
        differences={name: evaluation.metrics[name] - other.metrics[name] for name in shared},
        intervals={} if first is None or second is None else difference_intervals(first, second),
        mcnemar=None if None in both else mcnemar(both[0].correct, both[1].correct),
        calibration=other.calibration,
        details=other.details,
        answered=other.answered,
    )
