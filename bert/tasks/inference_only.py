"""Tasks of published models, for inference only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert.data.inputs import TEXT_OR_PAIR, WANTED, Text, as_text_or_pair
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.metrics.tagging_schemes import other_spelling
from bert.tasks.base import Outputs, Task
from bert.tasks.columns import Columns
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering.task import QuestionAnsweringTask
from bert.tasks.sequence_classification.base import Examples
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.sequence_classification.multilabel import MultilabelTask
from bert.tasks.token_classification.task import TokenClassificationTask


@dataclass(frozen=True, kw_only=True)
class _FlexibleInputs:
    """Mixin for models whose inputs may be single texts, pairs, or both."""

    counts: tuple[int, ...] = (1, 2)
    """Allowed numbers of texts per input."""

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        wanted = TEXT_OR_PAIR if len(self.counts) > 1 else f"the model takes {WANTED[self.counts[0]]}"
        texts = [as_text_or_pair(given, index, wanted, self.counts) for index, given in enumerate(inputs, 1)]
        first = [text if isinstance(text, str) else text[0] for text in texts]
        return _MixedExamples(first, None, None, [str(row) for row in range(len(texts))], given=texts)

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

    @property
    def id_columns(self) -> tuple[str, ...]:
        return ("id",)

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

    given: Sequence[Text] = ()

    @property
    def texts(self) -> Sequence[Text]:
        return self.given


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
      name: the name of the model, for messages.
      outputs: names of its outputs.
      problem_type: ``problem_type`` in config.json, for sequence classification; None means regression for one output,
        and one of several labels otherwise.
      null_score_diff_threshold: for question answering; None if every question has an answer.
      label_thresholds: the threshold of each label for multi-label classification; () for 0.5.
      texts_per_input: for sequence classification; None if inputs may be single texts or pairs.
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
        spelling = other_spelling(outputs) if clitics is None else None  # an export of a run spells tags as here
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
