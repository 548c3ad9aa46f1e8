"""The table of tasks, the task of a configuration, and the task of a published model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from bert.config import FinetuneConfig, TaskDataConfig
from bert.config.model import DECODER_KEYS, WINDOW_MODES
from bert.config.validation import check_unused
from bert.data.inputs import EXPECTED_TEXTS, TEXT_OR_PAIR, Text, as_text_or_pair
from bert.data.long_texts import LONG_TEXT_KEYS
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.metrics.tagging_schemes import other_spelling
from bert.tasks import embedding, multiple_choice, reranker, sequence_to_sequence
from bert.tasks.base import Outputs, Task
from bert.tasks.columns import Columns
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering import task as question_answering
from bert.tasks.question_answering.task import QUESTION_KEYS, QuestionAnsweringTask
from bert.tasks.sequence_classification import custom, glue
from bert.tasks.sequence_classification.base import Examples
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.sequence_classification.multilabel import MultilabelTask
from bert.tasks.token_classification import custom as custom_token_classification
from bert.tasks.token_classification import task as token_classification
from bert.tasks.token_classification.task import TAG_KEYS, TokenClassificationTask

MODULES = (
    glue,
    question_answering,
    token_classification,
    multiple_choice,
    custom,
    custom_token_classification,
    sequence_to_sequence,
    embedding,
    reranker,
)

BUILT_IN = tuple(task for module in MODULES for task in module.TASKS)

TASKS: dict[str, Task] = {task.name: task for task in BUILT_IN}

CUSTOM_TASK_KEYS = (
    "train", "dev", "test", "column_names", "columns", "metrics", "score_range",
    "source", "target", "max_target_length", "class_weights", "label_thresholds",
)  # fmt: skip
"""Keys of ``data`` that are read only by tasks that list them in `Task.data_keys`."""

BUILT_IN_KEYS = (*TAG_KEYS, *QUESTION_KEYS, *LONG_TEXT_KEYS)
"""Keys of ``data`` that only some built-in tasks read; registered tasks may read all of them."""

UNREAD_KEYS = {
    "sequence_to_sequence": {
        "language_model_weight": "has the loss of a decoder",
        "classifier_dropout": "has no classifier",
        "num_feature_layers": "has no head over a frozen encoder",
        "num_init_layers": "has a decoder of as many layers",
    },
    "embedding": {
        "language_model_weight": "neither classifies nor scores single texts",
        "classifier_dropout": "has no classifier",
        "num_feature_layers": "has no head over a frozen encoder",
    },
}
"""Keys of the configuration that tasks of a kind do not read, and the reason."""


def register_task(task: Task) -> None:
    """Registers a custom task under its name in this process, for fine-tuning, `bert.load` and prediction.

    A run's folder contains the name of its task but no code, so register the task before you load the run.

    Raises:
      ValueError: a built-in task has that name.
    """
    if any(task.name == other.name for other in BUILT_IN):
        raise ValueError(f"{task.name} is a built-in task: use another name")
    TASKS[task.name] = task


def find_task(name: str) -> Task:
    """Returns the task with that name. Raises UserError with the nearest names."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower().replace("-", ""), TASKS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TASKS)}"
    raise UserError(f"task is {name!r}, which is unknown: {hint} (bert.register_task registers a task of your own)")


def make_task(config: FinetuneConfig) -> Task:
    """Returns the task of a run. Raises UserError if a key is set that the task does not read."""
    task = find_task(config.task)
    _check_data_keys(task, config.data)
    _check_sections(task, config)
    task = task.from_config(config.data).with_settings(config)
    if config.data.bad_rows != "error":
        task = _with_field(task, "skips_bad_rows", True, f"data.bad_rows is skip, but {task.name} reads its own rows")
    if (value := config.data.calibration) is not None:
        reason = (
            f"data.calibration is {value}, but it is for classification and multilabel, and the task is {task.name}"
        )
        task = _with_field(task, "calibration", value, reason)
    return task


def _with_field(task: Task, name: str, value: Any, reason: str) -> Task:
    """Returns the task with the value of a field. Raises UserError if it has no such field."""
    if name not in {field.name for field in fields(cast(Any, task))}:
        raise UserError(f"{reason}: remove it")
    return replace(cast(Any, task), **{name: value})


def _check_data_keys(task: Task, data: TaskDataConfig) -> None:
    unset = TaskDataConfig()
    is_built_in = any(task.name == other.name for other in BUILT_IN)
    if is_built_in and "long_texts" in task.data_keys and data.long_texts not in WINDOW_MODES:
        for key in ("doc_stride", "max_train_windows"):
            if getattr(data, key) != getattr(unset, key):
                reason = f"but the task is {task.name} and data.long_texts is {data.long_texts}"
                raise UserError(f"data.{key} is set, {reason}: remove it, or set data.long_texts to windows")
    for key in (*CUSTOM_TASK_KEYS, *(BUILT_IN_KEYS if is_built_in else ())):
        if key not in task.data_keys and getattr(data, key) != getattr(unset, key):
            readers = ", ".join(other.name for other in BUILT_IN if key in other.data_keys)
            raise UserError(f"data.{key} is set, but it is for {readers}, and the task is {task.name}: remove it")


def _check_sections(task: Task, config: FinetuneConfig) -> None:
    for kind in ("embedding", "reranker"):
        if task.kind != kind:
            reason = f"but it is for {kind}, and the task is {task.name}: remove it"
            check_unused(f"{kind}.", getattr(config, kind), reason)
    if task.kind != "sequence_classification" and config.classifier_pooling != "init":
        raise UserError(
            f"classifier_pooling is {config.classifier_pooling}, but it is for tasks that classify or score texts, and "
            f"the task is {task.name}: remove it"
        )
    if config.classifier_training == "contrastive" and not (task.one_label and task.kind == "sequence_classification"):
        raise UserError(
            f"classifier_training is contrastive, but it is for tasks with one label per text, and the task is "
            f"{task.name}: remove it"
        )
    if task.kind in UNREAD_KEYS:
        check_unused("", config, f"but {task.name} has no head: remove it", ("head_init",))
        for key, reason in UNREAD_KEYS[task.kind].items():
            if value := getattr(config, key):
                raise UserError(f"{key} is {value}, but {task.name} {reason}: remove it")
    if task.kind != "sequence_to_sequence":
        writers = ", ".join(other.name for other in BUILT_IN if other.kind == "sequence_to_sequence")
        reason = f"but it is for {writers}, and the task is {task.name}: remove it"
        check_unused("model.", config.model, reason, DECODER_KEYS)
        check_unused("decoding.", config.decoding, reason)
        check_unused("target_tokenizer.", config.target_tokenizer, reason)
        check_unused("", config, reason, ("decoder_init",))
        check_unused("training.", config.training, reason, ("label_smoothing",))
    elif config.model.causal:
        raise UserError(
            f"model.causal is true, but the encoder of {task.name} sees the whole source: set it to false, or init "
            "to another model"
        )


@dataclass(frozen=True, kw_only=True)
class _FlexibleInputs:
    """Mixin for models whose inputs may be single texts, pairs, or both."""

    counts: tuple[int, ...] = (1, 2)
    """Allowed numbers of texts per input."""
    id_columns = ("id",)

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        expected = TEXT_OR_PAIR if len(self.counts) > 1 else f"the model takes {EXPECTED_TEXTS[self.counts[0]]}"
        texts = [as_text_or_pair(value, index, expected, self.counts) for index, value in enumerate(inputs, 1)]
        first = [text if isinstance(text, str) else text[0] for text in texts]
        return _MixedExamples(first, None, None, [str(row) for row in range(len(texts))], mixed=texts)

    def splits(self, folder: Path) -> list[str]:
        """Returns []: published models have no training files."""
        return []

    def records(self, folder: Path, split: str) -> Records:
        raise NotImplementedError("a model for inference has no files")

    def _read_columns(self, records: Records, split: str) -> Columns:
        raise NotImplementedError("a model for inference has no files")

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return tuple(names for names in (("text",), ("text_a", "text_b")) if len(names) in self.counts)

    def parse_line(self, line: str) -> str | tuple[str, ...]:
        columns = [line] if self.counts == (1,) else line.split("\t")
        if not all(column.strip() for column in columns):
            raise ValueError("an empty text: write it or remove the line")
        if len(columns) not in self.counts:
            taken, fix = ("two", "two texts") if self.counts == (2,) else ("one or two", "a text, or two")
            raise ValueError(f"{len(columns)} column(s) where {taken} are taken: write {fix} with a tab between")
        return line if len(columns) == 1 else tuple(columns)

    def input_fields(self, value: Any) -> dict[str, Any]:
        return {"text": value} if isinstance(value, str) else {"text_a": value[0], "text_b": value[1]}


@dataclass(frozen=True)
class _MixedExamples(Examples):
    """A mix of texts and pairs of texts."""

    mixed: Sequence[Text] = ()

    @property
    def texts(self) -> Sequence[Text]:
        return self.mixed


@dataclass(frozen=True, kw_only=True)
class _PublishedClassification(_FlexibleInputs, ClassificationTask):
    pass


@dataclass(frozen=True, kw_only=True)
class _PublishedMultilabel(_FlexibleInputs, MultilabelTask):
    pass


@dataclass(frozen=True, kw_only=True)
class _PublishedRegression(_FlexibleInputs, RegressionTask):
    activation: Callable[[np.ndarray], np.ndarray] | None = None
    """Function applied to the scores, or None."""

    def without_activation(self) -> Self:
        return replace(self, activation=None)

    def predict(self, outputs: Outputs, features: TokenRows, examples: Examples) -> np.ndarray:
        scores = super().predict(outputs, features, examples)
        return scores if self.activation is None else self.activation(scores)


def published_task(
    kind: str | None,
    name: str,
    outputs: tuple[str, ...],
    problem_type: str | None,
    null_score_diff_threshold: float | None = None,
    label_thresholds: tuple[float, ...] = (),
    texts_per_input: int | None = None,
    clitics: tuple[str, ...] | None = None,
    score_activation: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Task | None:
    """Returns the task of a published model.

    Args:
      kind: key of `bert.model.heads.HEADS`; None for a model without one of these heads.
      problem_type: ``problem_type`` in config.json, for sequence classification; None means regression for one output,
        and one of several labels otherwise.
      null_score_diff_threshold: threshold of question answering; None if every question has an answer.
      label_thresholds: the threshold of each label for multi-label classification; () for 0.5.
      texts_per_input: number of texts per input of sequence classification; None for single texts or pairs.
      clitics: word endings that are separated for token classification; None for CLITICS.
      score_activation: function applied to the scores of a regression, or None.

    Returns:
      None for other heads, or if the problem type does not fit the number of outputs.
    """
    if kind == "sequence_classification":
        counts = (1, 2) if texts_per_input is None else (texts_per_input,)
        task = _classifier(name, outputs, problem_type, label_thresholds, counts)
        return replace(task, activation=score_activation) if isinstance(task, _PublishedRegression) else task
    if kind == "token_classification" and outputs:
        spelling = other_spelling(outputs) if clitics is None else None  # exports of runs have the canonical spelling
        return TokenClassificationTask(name=name, labels=outputs, clitics=clitics, spelling=spelling)
    if kind == "question_answering":
        if null_score_diff_threshold is None:
            return QuestionAnsweringTask(name=name, version="1.1")
        return QuestionAnsweringTask(
            name=name, version="2.0", may_be_impossible=True, null_score_diff_threshold=null_score_diff_threshold
        )
    return MultipleChoiceTask(name=name) if kind == "multiple_choice" else None


def _classifier(
    name: str,
    outputs: tuple[str, ...],
    problem_type: str | None,
    label_thresholds: tuple[float, ...],
    counts: tuple[int, ...],
) -> Task | None:
    columns = ("text_a", "text_b") if counts == (2,) else ("text",)
    unknown: dict[str, Any] = {"name": name, "counts": counts, "text_columns": columns, "label_column": "label"}
    unknown |= {"metrics": (), "main_metric": ""}
    if len(outputs) == 1 and problem_type in (None, "regression"):
        return _PublishedRegression(**unknown, lowest=-math.inf, highest=math.inf)
    if len(outputs) > 1 and problem_type in (None, "single_label_classification"):
        return _PublishedClassification(**unknown, labels=outputs, label_names=outputs)
    if outputs and problem_type == "multi_label_classification":
        return _PublishedMultilabel(**unknown, labels=outputs, label_names=outputs, label_thresholds=label_thresholds)
    return None
