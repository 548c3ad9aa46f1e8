"""Custom tasks: columns of TSV, CSV and JSONL files, or of data sets, named in the configuration.

`CustomClassification` and `CustomRegression` read whatever `records` gives. A subclass that overrides it
(and ``splits``) reads data in any layout, see docs/own_task.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from bert.config import TaskDataConfig
from bert.data.records import Records
from bert.errors import UserError
from bert.tasks.readers.columns import KEYS, Columns, label_text, read_cells, split_names, split_records
from bert.tasks.sequence import ClassificationTask, Examples, RegressionTask, SentenceTask


@dataclass(frozen=True)
class OwnExamples(Examples):
    """Examples that tell which labels there are."""

    label_words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _FromColumns(SentenceTask):
    """Of tasks whose files and columns the configuration names."""

    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    allowed_metrics: ClassVar[Sequence[str]]

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return () if self.data.columns.id is None else (self.data.columns.id,)

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        return tuple(self.data.column_names or ())

    def records(self, folder: Path, split: str) -> Records:
        """The rows of a split, with the texts, the label and the id under the names that the columns have."""
        return split_records(folder, split, self.data)

    def from_config(self, data: TaskDataConfig) -> Self:
        columns, metrics = data.columns, tuple(data.metrics or self.metrics)
        for name in metrics:
            if name not in self.allowed_metrics:
                raise UserError(
                    f"data.metrics has {name!r}: {self.name} is measured by {', '.join(self.allowed_metrics)}"
                )
        return dataclasses.replace(
            self,
            data=data,
            text_columns=(columns.text_a, *([] if columns.text_b is None else [columns.text_b])),
            label_column=columns.label,
            written_id=columns.id or "index",
            metrics=metrics,
            main_metric=metrics[0],
        )

    def _cells(self, records: Records, split: str, max_rows: int | None) -> Columns:
        keys = ("data.columns.text_a", "data.columns.text_b")[: len(self.text_columns)]
        id = self.data.columns.id
        return read_cells(
            records,
            dict(zip(self.text_columns, keys, strict=True)),
            {self.label_column: "data.columns.label"},
            None if id is None else (id, "data.columns.id"),
            max_rows,
            needed=split != "test",
        )

    def _examples(self, cells: Columns, labels: np.ndarray | None, label_words: tuple[str, ...] = ()) -> OwnExamples:
        texts_b = cells.texts[1] if len(cells.texts) > 1 else None
        return OwnExamples(cells.texts[0], texts_b, labels, cells.ids, cells.notes, label_words=label_words)


@dataclass(frozen=True, kw_only=True)
class CustomClassification(_FromColumns, ClassificationTask):
    """One label a row. The labels are those of ``data.labels``, else those of the training file."""

    name: str = "classification"
    folder_name: str = ""
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    submissions: Mapping[str, str] = field(default_factory=lambda: {"test": "test.tsv"})
    labels: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    main_metric: str = "accuracy"
    data_keys = (*KEYS, "metrics")
    allowed_metrics = ("accuracy", "f1", "macro_f1", "matthews")

    def read(self, folder: Path, split: str, max_rows: int | None = None) -> OwnExamples:
        records = self.records(Path(folder), split)
        cells = self._cells(records, split, max_rows)
        if cells.labels is None:
            return self._examples(cells, None)
        pairs = zip(cells.numbers, cells.labels[0], strict=True)
        # A blank next to a label is nobody's intention, and nobody sees it.
        words = [label_text(records, number, self.label_column, label).strip() for number, label in pairs]
        labels = self.labels or (_in_order(words) if split == "train" else ())
        numbers = {word: number for number, word in enumerate(labels)}
        for number, word in zip(cells.numbers, words, strict=True):
            if word not in numbers:
                raise records.error(
                    number,
                    f"{self.label_column} is {word!r}, and the labels are {', '.join(map(repr, labels))[:200]}: fix "
                    "it, or list all labels as data.labels",
                )
        return self._examples(cells, self._labels([numbers[word] for word in words]), labels)

    def fit(self, train: OwnExamples) -> CustomClassification:
        labels = train.label_words
        if len(labels) < 2:
            raise UserError(f"every training row has the label {labels[0]!r}: a classifier needs two or more labels")
        if "f1" in self.metrics and len(labels) != 2:
            raise UserError(f"data.metrics has f1, which is for two labels, and there are {len(labels)}: take macro_f1")
        return dataclasses.replace(self, labels=labels, label_names=labels)

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return dataclasses.replace(data, labels=list(self.labels))

    def from_config(self, data: TaskDataConfig) -> Self:
        labels = tuple(label.strip() for label in data.labels or ())
        return dataclasses.replace(super().from_config(data), labels=labels, label_names=labels)


@dataclass(frozen=True, kw_only=True)
class CustomRegression(_FromColumns, RegressionTask):
    """One score a row, within ``data.score_range`` where that is set."""

    name: str = "regression"
    folder_name: str = ""
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    submissions: Mapping[str, str] = field(default_factory=lambda: {"test": "test.tsv"})
    metrics: tuple[str, ...] = ("pearson", "spearman")
    main_metric: str = "pearson"
    lowest: float = -math.inf
    highest: float = math.inf
    data_keys = (*KEYS, "metrics", "score_range")
    allowed_metrics = ("pearson", "spearman")

    def read(self, folder: Path, split: str, max_rows: int | None = None) -> OwnExamples:
        records = self.records(Path(folder), split)
        cells = self._cells(records, split, max_rows)
        if cells.labels is None:
            return self._examples(cells, None)
        scores = []
        for number, label in zip(cells.numbers, cells.labels[0], strict=True):
            try:
                scores.append(self._label(str(label)))
            except ValueError as error:
                raise records.error(number, f"{self.label_column} is {str(label)[:40]!r}: {error}") from None
        return self._examples(cells, self._labels(scores))

    def from_config(self, data: TaskDataConfig) -> Self:
        lowest, highest = data.score_range or (-math.inf, math.inf)
        return dataclasses.replace(super().from_config(data), lowest=lowest, highest=highest)


def _in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Each word once; numbers in their order, words in the alphabet's."""
    distinct = set(words)
    try:
        return tuple(sorted(distinct, key=lambda word: (int(word), word)))
    except ValueError:
        return tuple(sorted(distinct))


TASKS = (CustomClassification(), CustomRegression())
