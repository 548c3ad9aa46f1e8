"""Reads labelled data for the evaluation of any model: the labels are matched with the model's by name.

A task of a run on columns reads the data itself. For other tasks and for published models, the custom task of the same
kind reads them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.config import ColumnsConfig, EmbeddingConfig, TaskDataConfig
from bert.data.inputs import EXPECTED_TEXTS
from bert.data.records import Records, is_dataset_dict, open_splits, read_records
from bert.errors import UserError, quoted, require
from bert.metrics.tagging_schemes import OUTSIDE, join_tag, split_tag
from bert.model.pooling import Pooling
from bert.tasks import multiple_choice, registry
from bert.tasks.base import Task
from bert.tasks.columns import ColumnFilesTask, require_split_of_files, split_path, table_files
from bert.tasks.embedding import EmbeddingTask, LabelledTextsTask
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering import squad
from bert.tasks.question_answering.task import CustomQuestionAnswering, QuestionAnsweringTask
from bert.tasks.sequence_classification.base import LabelTask, SequenceClassificationTask, whole_number
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.sequence_classification.custom import CustomClassification, CustomMultilabel, CustomRegression
from bert.tasks.sequence_classification.multilabel import MultilabelTask
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask
from bert.tasks.token_classification.custom import CustomTokenClassification
from bert.tasks.token_classification.task import TokenClassificationTask

TEXTS = (("text",), ("text_a", "text_b"))
LABELS = ("label", "labels", "score")
"""Usual names of columns, for models that declare none."""

_UNNAMED = re.compile(r"LABEL_(\d+)")


class Labelled(NamedTuple):
    """Labelled examples of one split.

    Attributes:
      task: makes the rows and the predictions.
      scorer: scores the predictions; the task itself, except for models that declare no metrics.
      examples: the examples, with the labels of ``scorer``.
    """

    task: Task
    scorer: Task
    examples: Any

    @property
    def inputs(self) -> Any:
        """The examples for `Task.features`; without tags, because a model may spell them differently."""
        is_tagged = isinstance(self.task, TokenClassificationTask)
        return replace(self.examples, tags=None) if is_tagged else self.examples


def embedding_task(name: str, pooling: Pooling) -> EmbeddingTask:
    """Returns the task that scores a published embedding model; `read_labelled` adapts it to the columns."""
    settings = EmbeddingConfig(
        lowercase=pooling.lowercase, query_prompt=pooling.query_prompt, document_prompt=pooling.document_prompt
    )
    interaction = pooling.interaction if pooling.has_token_vectors else None
    return EmbeddingTask(name=name, settings=settings, similarity=pooling.similarity, interaction=interaction)


def query_task(task: Any, pooling: Pooling) -> Any:
    """Returns the task of embeddings with the casing of a separate model for queries."""
    return replace(task, settings=replace(task.settings, lowercase=pooling.lowercase))


def read_labelled(task: Task, data: Any, split: str, columns: Mapping[str, str]) -> Labelled:
    """Returns the labelled examples of ``data`` for the evaluation of a task.

    Args:
      data: a file, a folder, a data set of the hub (``hub:NAME``), or rows in memory (see `bert.tasks.columns`).
      split: the split of a folder or data set.
      columns: names of columns by their key of ``data.columns``.

    Raises:
      UserError: the data cannot be read, or the labels are not the model's.
    """
    known = [field.name for field in dataclasses.fields(ColumnsConfig)]
    if unknown := [key for key in columns if key not in known]:
        raise UserError(f"columns has {unknown[0]!r}: use a key of data.columns: {', '.join(known)}")
    data = _in_memory(data)
    if isinstance(task, MultipleChoiceTask):
        return _of(task, _read_questions_with_choices(task, data, split))
    if isinstance(task, QuestionAnsweringTask):
        return _of_answers(task, data, split, columns)
    if isinstance(task, TokenClassificationTask):
        reader = _reader(task, CustomTokenClassification, columns, labels=task.labels, spelling=task.spelling)
        own = replace(reader, may_be_broken=True)  # as in conlleval, which reads all tags
        examples = own.labelled_examples(data, split)
        return _of(task, replace(examples, tags=_named_tags(examples.tags, task)))
    if isinstance(task, SequenceClassificationTask):
        return _of_sequences(task, data, split, columns)
    if isinstance(task, EmbeddingTask) and task.name not in registry.TASKS:
        task = _embedding_of_columns(task, _fields(data, split, task.data), columns)
        columns = {}
    if isinstance(task, ColumnFilesTask):
        task = _with_columns(task, columns)
        if isinstance(task, SequenceToSequenceTask) and not task.metrics:
            task = replace(task, metrics=("bleu", "chrf"))
    return _of(task, task.labelled_examples(data, split))


def _in_memory(data: Any) -> Any:
    """Returns rows of an iterator as a list, and other data unchanged."""
    if isinstance(data, str | os.PathLike | Mapping) or hasattr(data, "columns") or hasattr(data, "features"):
        return data
    return list(data) if isinstance(data, Iterable) else data


def _of(task: Task, examples: Any, scorer: Task | None = None) -> Labelled:
    if not examples.labelled:
        raise UserError("the data has no labels: name a split or a file with labels")
    return Labelled(task, scorer or task, examples)


def _with_columns(task: ColumnFilesTask, columns: Mapping[str, str]) -> Any:
    """Returns the task with the given columns."""
    if not columns:
        return task
    data = replace(task.data, columns=replace(task.data.columns, **columns))
    return task.from_config(data) if isinstance(task, SequenceClassificationTask) else replace(task, data=data)


def _read_folder(task: Task, data: Any, split: str) -> Any:
    """Returns the examples of a split of the folder ``data``, which has the layout of a built-in task."""
    there = task.splits(Path(data))
    if split not in there:
        raise UserError(f"{data} has no split {split!r} of {task.name}: use {', '.join(there)}")
    return task.read(Path(data), split)


def _reads_folder(task: Task, data: Any) -> bool:
    """Returns whether ``data`` is a folder that a built-in task reads in its own layout."""
    is_folder = isinstance(data, str | os.PathLike) and Path(data).is_dir() and not is_dataset_dict(os.fspath(data))
    return is_folder and task.name in registry.TASKS and not isinstance(task, ColumnFilesTask)


def _reader(task: Task, kind: type[Any], columns: Mapping[str, str], **values: Any) -> Any:
    """Returns the task itself if it reads columns, or else the task of class ``kind`` with these values."""
    if isinstance(task, ColumnFilesTask):
        return _with_columns(task, columns)
    clitics = getattr(task, "clitics", None)
    config = TaskDataConfig(columns=ColumnsConfig(**columns), clitics=None if clitics is None else list(clitics))
    return kind(name=task.name, data=config, **values)


# Columns


def _fields(data: Any, split: str, config: TaskDataConfig) -> Sequence[str]:
    """Returns the names of the columns of the data."""
    if not isinstance(data, str | os.PathLike):
        if hasattr(data, "column_names"):
            return list(data.column_names)
        if hasattr(data, "columns"):
            return [str(name) for name in data.columns]
        return list(data[0]) if isinstance(data, list) and data and isinstance(data[0], Mapping) else []
    if is_dataset_dict(os.fspath(data)):
        return next(iter(open_splits(os.fspath(data)).values())).column_names
    path = Path(data)
    if path.is_dir():
        require_split_of_files(split, data)
        path = split_path(path, split, replace(config, train=None, dev=None, test=None))
    records = read_records(path, config.column_names)
    return records.names or list(next(records.rows, (0, {}))[1])


def _embedding_of_columns(task: EmbeddingTask, fields: Sequence[str], columns: Mapping[str, str]) -> EmbeddingTask:
    """Returns the task for queries with documents, for pairs with a score or for texts with a label."""
    names = ColumnsConfig(**{"label": next((name for name in LABELS if name in fields), "label"), **columns})
    first = "text_a" if "text_a" in fields or "text_b" not in columns else "text"
    pairs = replace(names, **{"text_a": first, "text_b": "text_b", **columns})
    kind: type[EmbeddingTask] = EmbeddingTask
    if {names.query, names.positive} <= set(fields):
        settings = replace(task.settings, loss="in_batch")
    elif {pairs.text_a, pairs.text_b} <= set(fields):
        settings, names = replace(task.settings, loss="cosent"), pairs
    else:
        settings, kind = replace(task.settings, loss="same_label"), LabelledTextsTask
    if task.interaction is not None and kind is LabelledTextsTask:
        raise UserError(
            f"{task.name} compares queries with documents, and the data has the columns {', '.join(fields)}: name data "
            f"with {names.query} and {names.positive}, or with {pairs.text_a} and {pairs.text_b}"
        )
    data = replace(task.data, columns=names)
    return kind(name=task.name, data=data, settings=settings, similarity=task.similarity, interaction=task.interaction)


# Sequence classification


def _of_sequences(task: SequenceClassificationTask, data: Any, split: str, columns: Mapping[str, str]) -> Labelled:
    if isinstance(task, ColumnFilesTask):
        task = _with_columns(task, columns)
        return _of(task, _by_name(task).labelled_examples(data, split))
    if _reads_folder(task, data):
        return _of(task, _read_folder(task, data, split))
    reader = _sequence_reader(task, split, data, columns)
    if (count := len(reader.text_columns)) not in map(len, task.table_columns):
        read = "the column" if count == 1 else "the columns"
        expected = EXPECTED_TEXTS[len(task.table_columns[0])]
        raise UserError(
            f"{task.name} takes {expected}, and {read} {quoted(reader.text_columns)} would be read: name its columns "
            "with the keys text_a and text_b of columns (--data.columns.text_b)"
        )
    return _of(task, reader.labelled_examples(data, split), None if task.metrics else reader)


def _sequence_reader(task: SequenceClassificationTask, split: str, data: Any, columns: Mapping[str, str]) -> Any:
    """Returns the custom task with the labels of ``task`` and the columns of the data."""
    fields = _fields(data, split, TaskDataConfig())
    candidates = (task.text_columns, *task.table_columns, *TEXTS)
    texts = next((names for names in candidates if set(names) <= set(fields)), task.text_columns)
    if {"text_a", "text_b"} & columns.keys():
        texts = (columns.get("text_a", "text"), *([columns["text_b"]] if "text_b" in columns else ()))
    labels = (task.label_column, *LABELS)
    label = columns.get("label", next((name for name in labels if name in fields), task.label_column))
    text_b = texts[1] if len(texts) > 1 else None
    config = TaskDataConfig(columns=ColumnsConfig(text_a=texts[0], text_b=text_b, label=label))
    own: dict[str, Any] = {"name": task.name, "data": config, "text_columns": texts, "label_column": label}
    if isinstance(task, RegressionTask):
        return replace(CustomRegression(**own), lowest=task.lowest, highest=task.highest)
    if not isinstance(task, LabelTask):
        raise UserError(f"{task.name} reads its own files: name a split of the run's data")
    own |= {"labels": task.labels, "label_names": task.label_names}
    if isinstance(task, MultilabelTask):
        return _MultilabelByName(**own)
    f1 = ("f1",) if task.num_labels == 2 else ()
    return _ClassificationByName(**own, metrics=("accuracy", *f1, "macro_f1", "matthews"))


def _number_by_name(
    task: LabelTask,
    records: Records,
    line_numbers: Sequence[int],
    rows: Sequence[Sequence[str]],
    is_train: bool,
    faults: Sequence[tuple[int, UserError]] = (),
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Like `LabelTask._number_labels`, but finds the labels by `match_labels`."""
    records.require_sound(faults)
    words = sorted({word for row in rows for word in row})
    found = match_labels(words, (task.labels, task.label_names), records.source, task.name)
    return [[found[word] for word in row] for row in rows], task.labels


@dataclass(frozen=True, kw_only=True)
class _ClassificationByName(CustomClassification):
    _number_labels = _number_by_name


@dataclass(frozen=True, kw_only=True)
class _NewLabels(CustomClassification):
    """Reads labels that the data defines, as a training file."""

    def _number_labels(
        self, records: Records, line_numbers: Sequence[int], rows: Sequence[Sequence[str]], is_train: bool, *more: Any
    ) -> tuple[list[list[int]], tuple[str, ...]]:
        return super()._number_labels(records, line_numbers, rows, True, *more)


def _by_name(task: Any) -> Any:
    """Returns the task of a run with columns, which finds labels by `match_labels`."""
    kinds: dict[type, Any] = {CustomClassification: _ClassificationByName, CustomMultilabel: _MultilabelByName}
    if type(task) not in kinds:
        return task
    own = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return kinds[type(task)](**own)


def read_with_new_labels(data: Any, split: str, columns: Mapping[str, str]) -> Labelled:
    """Returns labelled texts, or pairs of texts, of which each has one of the labels of the data.

    Args:
      data, split, columns: see `read_labelled`.

    Raises:
      UserError: the data cannot be read, or has a single label.
    """
    data = _in_memory(data)
    found = _sequence_reader(CustomClassification(), split, data, columns)
    reader = _NewLabels(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
    examples = reader.labelled_examples(data, split)
    task = replace(reader, labels=examples.label_words, label_names=examples.label_words)
    if task.num_labels < 2:
        raise UserError(f"the data has one label, {quoted(task.labels)}: name data with two or more")
    f1 = ("f1",) if task.num_labels == 2 else ()
    return _of(replace(task, metrics=("accuracy", *f1, "macro_f1", "matthews")), examples)


@dataclass(frozen=True, kw_only=True)
class _MultilabelByName(CustomMultilabel):
    _number_labels = _number_by_name


def match_labels(words: Iterable[str], names: Sequence[Sequence[str]], source: str, model: str) -> dict[str, int]:
    """Returns the index of each label of the data among the labels of a model.

    A label has the same name, in another case if that is unique, or the number of LABEL_0, LABEL_1, ...

    Args:
      names: the labels of the model, in one or several spellings.

    Raises:
      UserError: the model lacks a label; the message has both sets.
    """
    words = list(words)
    exact: dict[str, int] = {}
    folded: dict[str, set[int]] = {}
    for spelling in names:
        for label, name in enumerate(spelling):
            number = _UNNAMED.fullmatch(name)
            for key in (name, whole_number(name), *([number[1]] if number else [])):
                exact.setdefault(key, label)
                folded.setdefault(key.casefold(), set()).add(label)
    found: dict[str, int] = {}
    for word in words:
        index = exact.get(word, exact.get(whole_number(word)))
        alike = folded.get(word.casefold(), set())
        if index is None and len(alike) == 1:
            index = next(iter(alike))
        if index is None:
            raise UserError(
                f"{source} has the labels {quoted(words)}, but the labels of {model} are "
                f"{quoted(dict.fromkeys(name for spelling in names for name in spelling))}: rename the labels in the "
                "data to the model's"
            )
        found[word] = index
    return found


# Other kinds


def _named_tags(tags: list[list[str]] | None, task: TokenClassificationTask) -> list[list[str]] | None:
    """Returns the tags with the model's spelling of types. Raises UserError if the model lacks a type or tag."""
    if tags is None:
        return None
    present = sorted({tag for sentence in tags for tag in sentence})
    if not task.marks_entities:
        found = match_labels(present, (task.tags,), "the data", task.name)
        return [[task.tags[found[tag]] for tag in sentence] for sentence in tags]
    types = sorted({split_tag(tag)[1] for tag in present if tag != OUTSIDE})
    found = match_labels(types, (task.types,), "the data", task.name)
    new = {tag: tag if tag == OUTSIDE else _renamed(tag, task.types, found) for tag in present}
    return [[new[tag] for tag in sentence] for sentence in tags]


def _renamed(tag: str, types: Sequence[str], found: Mapping[str, int]) -> str:
    prefix, type = split_tag(tag)
    return join_tag(prefix, types[found[type]])


def _of_answers(task: QuestionAnsweringTask, data: Any, split: str, columns: Mapping[str, str]) -> Labelled:
    """Reads SQuAD's JSON or columns. Questions without an answer are scored as in SQuAD 2.0."""
    if isinstance(data, str | os.PathLike) and Path(data).suffix == ".json" and Path(data).is_file():
        examples = squad.read(Path(data))
    elif _reads_folder(task, data):
        examples = _read_folder(replace(task, may_be_impossible=True), data, split)
    else:
        reader = _reader(task, CustomQuestionAnswering, columns)
        examples = replace(reader, may_be_impossible=True).labelled_examples(data, split)
    if any(example.is_impossible for example in examples.examples):
        task = replace(task, may_be_impossible=True)
    return _of(task, examples)


def _read_questions_with_choices(task: MultipleChoiceTask, data: Any, split: str) -> Any:
    if isinstance(data, str | os.PathLike):
        if Path(data).is_dir():
            return task.read(Path(data), split)
        return multiple_choice.read(Path(os.path.abspath(data)))
    with tempfile.TemporaryDirectory() as folder:
        for name, content in table_files(data, "data").items():
            (Path(folder) / name).write_text(content, encoding="utf-8")
        try:
            return multiple_choice.read(Path(folder) / "data.jsonl")
        except UserError as error:
            raise UserError(str(error).replace(f"{Path(folder) / 'data.jsonl'}, line ", "data, row ")) from None


# Two models


def relabelled(labelled: Labelled, other: Task) -> tuple[Labelled, list[int] | None]:
    """Returns the same examples for another model, with the same metrics.

    The labels of classifiers are in the order of the first model, because F1 scores the second label. Labels that only
    the other model has are last, and F1 is left out; of several labels per row, the mean F1 over the labels is.

    Returns:
      The examples, and the indices by which the other model's outputs are put into the order of its labels; None for
      outputs that are in order.

    Raises:
      UserError: the models are of different kinds, or the labels differ.
    """
    task, examples = labelled.task, labelled.examples
    pairs = ((RegressionTask, "a score"), (MultilabelTask, "several labels"), (ClassificationTask, "one label"))
    kinds = [next((name for kind, name in pairs if isinstance(one, kind)), one.kind) for one in (task, other)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{other.name} predicts {kinds[1]}, but {task.name} {kinds[0]}: compare models of one kind")
    if isinstance(task, TokenClassificationTask) and isinstance(other, TokenClassificationTask):
        return Labelled(other, other, replace(examples, tags=_named_tags(examples.tags, other))), None
    if isinstance(task, QuestionAnsweringTask) and isinstance(other, QuestionAnsweringTask):
        other = replace(other, may_be_impossible=task.may_be_impossible)
    if isinstance(task, EmbeddingTask) and isinstance(other, EmbeddingTask):
        if other.interaction is not None and isinstance(task, LabelledTextsTask):
            raise UserError(f"{other.name} compares queries with documents, but {task.name} texts: use other rows")
        other = type(task)(
            name=other.name,
            data=other.data,
            settings=replace(other.settings, loss=task.settings.loss),
            similarity=other.similarity,
            interaction=other.interaction,
        )
    if isinstance(labelled.scorer, SequenceClassificationTask) and isinstance(other, SequenceClassificationTask):
        other, examples, order = _in_label_order(task, examples, other)
        metrics, main_metric = labelled.scorer.metrics, labelled.scorer.main_metric
        if isinstance(task, LabelTask) and isinstance(other, LabelTask) and other.num_labels > task.num_labels:
            several = isinstance(task, MultilabelTask)
            kept = (name for name in metrics if name != ("macro_f1" if several else "f1"))
            metrics = tuple(kept) or ("micro_f1" if several else "accuracy",)
            main_metric = main_metric if main_metric in metrics else metrics[0]
        return Labelled(other, replace(other, metrics=metrics, main_metric=main_metric), examples), order
    if isinstance(task, SequenceToSequenceTask) and isinstance(other, SequenceToSequenceTask):
        other = replace(other, metrics=task.metrics)
    return Labelled(other, other, examples), None


def _in_label_order(
    task: Task, examples: Any, other: SequenceClassificationTask
) -> tuple[SequenceClassificationTask, Any, list[int] | None]:
    """Returns a task and examples whose labels are in one order, and the order of the task's outputs (`relabelled`)."""
    if not (isinstance(task, LabelTask) and isinstance(other, LabelTask)):
        return other, examples, None
    names = (other.labels, other.label_names)
    found = match_labels(task.label_names, names, f"the model {task.name}", other.name)
    order = [found[name] for name in task.label_names]
    if isinstance(other, ClassificationTask):
        order += [label for label in range(other.num_labels) if label not in order]
        labels, label_names = (tuple(of[label] for label in order) for of in names)
        return replace(other, labels=labels, label_names=label_names, class_weights=()), examples, order
    given = require(examples.labels, "the labels")
    new = np.zeros((len(given), other.num_labels), given.dtype)
    new[:, order] = given
    return other, replace(examples, labels=new), None
