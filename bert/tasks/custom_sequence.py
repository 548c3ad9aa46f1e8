"""Custom tasks: columns of TSV, CSV and JSONL files, or of data sets, named in the configuration.

`CustomClassification` and `CustomRegression` read whatever `records` gives. A subclass that overrides it
(and ``splits``) reads data in any layout, see docs/own_task.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from bert.config import TaskDataConfig
from bert.data.records import Records
from bert.errors import UserError
from bert.tasks.column_files import ColumnFilesTask
from bert.tasks.readers.columns import KEYS, Columns, read_columns
from bert.tasks.sequence import ClassificationTask, Examples, RegressionTask, SentenceTask


@dataclass(frozen=True, kw_only=True)
class _FromColumns(ColumnFilesTask, SentenceTask):
    """Of tasks whose files and columns the configuration names."""

    allowed_metrics: ClassVar[Sequence[str]]

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

    def _read_columns(self, records: Records, split: str) -> Columns:
        keys = ("data.columns.text_a", "data.columns.text_b")[: len(self.text_columns)]
        id = self.data.columns.id
        return read_columns(
            records,
            dict(zip(self.text_columns, keys, strict=True)),
            {self.label_column: "data.columns.label"},
            None if id is None else (id, "data.columns.id"),
            needed=split != "test",
        )


@dataclass(frozen=True, kw_only=True)
class CustomClassification(_FromColumns, ClassificationTask):
    """One label a row. The labels are those of ``data.labels``, else those of the training file."""

    name: str = "classification"
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    labels: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    main_metric: str = "accuracy"
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, "metrics")
    allowed_metrics = ("accuracy", "f1", "macro_f1", "matthews")

    def fit(self, train: Examples) -> CustomClassification:
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
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    metrics: tuple[str, ...] = ("pearson", "spearman")
    main_metric: str = "pearson"
    lowest: float = -math.inf
    highest: float = math.inf
    data_keys = (*KEYS, "metrics", "score_range")
    allowed_metrics = ("pearson", "spearman")

    def from_config(self, data: TaskDataConfig) -> Self:
        lowest, highest = data.score_range or (-math.inf, math.inf)
        return dataclasses.replace(super().from_config(data), lowest=lowest, highest=highest)


TASKS = (CustomClassification(), CustomRegression())
