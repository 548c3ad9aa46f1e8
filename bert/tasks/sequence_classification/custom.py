"""Sequence classification on columns of files or data sets that the configuration names.

Subclasses of `CustomClassification`, `CustomMultilabel` and `CustomRegression` that override ``splits`` and ``records``
read data in any layout, see docs/own_task.md. `Packages` is such a task that needs no download.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from bert.config import DOCSTRINGS_PREFIX, TaskDataConfig
from bert.data.corpus.docstrings import SPLITS, parse_source, read_prose
from bert.data.long_texts import LONG_TEXT_KEYS
from bert.data.records import Records
from bert.errors import UserError, WarningText, quoted
from bert.tasks.columns import KEYS, ColumnFilesTask, Columns, read_columns
from bert.tasks.sequence_classification.base import Examples, LabelTask, SequenceClassificationTask
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.sequence_classification.multilabel import MultilabelTask, check_label_names


@dataclass(frozen=True, kw_only=True)
class _FromColumns(ColumnFilesTask, SequenceClassificationTask):
    """Base class: the configuration names files, columns and metrics."""

    pools_as_declared: ClassVar[bool] = True
    writes_texts: ClassVar[bool] = True
    allowed_metrics: ClassVar[Sequence[str]]
    unlabelled: ClassVar[tuple[Any, ...]] = (None, "")
    """Values of a missing label in test files."""
    leaves_out_unlabelled: ClassVar[bool] = True
    """Whether rows of data sets without a label are skipped."""

    def from_config(self, data: TaskDataConfig) -> Self:
        columns, metrics = data.columns, tuple(data.metrics or self.metrics)
        for name in metrics:
            if name not in self.allowed_metrics:
                raise UserError(
                    f"data.metrics has {name!r}, but {self.name} has the metrics {', '.join(self.allowed_metrics)}"
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
        return self._read(records, split, {self.label_column: "data.columns.label"})

    def _read(
        self, records: Records, split: str, labels: dict[str, str], unlabelled: tuple[Any, ...] | None = None
    ) -> Columns:
        keys = ("data.columns.text_a", "data.columns.text_b")[: len(self.text_columns)]
        id = self.data.columns.id
        return read_columns(
            records,
            dict(zip(self.text_columns, keys, strict=True)),
            labels,
            None if id is None else (id, "data.columns.id"),
            needed=split != "test",
            unlabelled=self.unlabelled if unlabelled is None else unlabelled,
            leave_out=self.leaves_out_unlabelled,
            raise_faults=False,
        )


@dataclass(frozen=True, kw_only=True)
class _FromLabelColumn(_FromColumns, LabelTask):
    """Base class: labels come from ``data.labels`` or from the training file."""

    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    labels: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, *LONG_TEXT_KEYS, "labels", "metrics", "class_weights")

    def fit(self, train: Examples) -> Self:
        labels, weights = train.label_words, self.data.class_weights
        task = dataclasses.replace(self, labels=labels, label_names=labels)
        if weights is None:
            return task
        balanced = self.balanced_weights(task.rows_by_label(train), len(train))
        return dataclasses.replace(task, class_weights=class_weights(weights, labels, balanced))

    @abstractmethod
    def balanced_weights(self, counts: np.ndarray, rows: int) -> np.ndarray:
        """Returns the balanced weights [L] for the number of training rows with each label."""

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return dataclasses.replace(super().to_config(data), labels=data.labels or list(self.labels))

    def from_config(self, data: TaskDataConfig) -> Self:
        labels = tuple(label.strip() for label in data.labels or ())
        return dataclasses.replace(super().from_config(data), labels=labels, label_names=labels)


@dataclass(frozen=True, kw_only=True)
class CustomClassification(_FromLabelColumn, ClassificationTask):
    """One label per row."""

    name: str = "classification"
    metrics: tuple[str, ...] = ("accuracy",)
    main_metric: str = "accuracy"
    allowed_metrics = ("accuracy", "f1", "macro_f1", "matthews")

    def fit(self, train: Examples) -> CustomClassification:
        labels, present = train.label_words, np.unique(train.known_labels)
        if len(present) < 2:
            label = labels[present[0]]
            raise UserError(f"every training row has the label {label!r}, but a classifier needs at least two labels")
        if "f1" in self.metrics and len(labels) != 2:
            raise UserError(f"data.metrics has f1, which is for two labels, but there are {len(labels)}: use macro_f1")
        return super().fit(train)

    def balanced_weights(self, counts: np.ndarray, rows: int) -> np.ndarray:
        """Returns weights with the same total for each label, and mean 1 over the rows, as in scikit-learn."""
        weights: np.ndarray = rows / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return weights


@dataclass(frozen=True, kw_only=True)
class CustomMultilabel(_FromLabelColumn, MultilabelTask):
    """Any number of labels per row."""

    name: str = "multilabel"
    metrics: tuple[str, ...] = ("micro_f1", "macro_f1")
    main_metric: str = "micro_f1"
    data_keys: ClassVar[tuple[str, ...]] = (*_FromLabelColumn.data_keys, "label_thresholds")
    allowed_metrics = ("micro_f1", "macro_f1")
    unlabelled = (None,)  # "" is a row with no label
    leaves_out_unlabelled = False

    def fit(self, train: Examples) -> CustomMultilabel:
        counts, labels = train.known_labels.sum(axis=0), train.label_words
        if not counts.any():
            raise UserError("no training row has a label: set data.columns.label to the column of labels")
        if np.isin(counts, (0, len(train))).all():
            same = quoted(label for label, count in zip(labels, counts, strict=True) if count)
            raise UserError(f"every training row has the same labels ({same}): add rows without one of them")
        if len(self.label_thresholds) not in (0, 1, len(labels)):
            raise UserError(
                f"data.label_thresholds has {len(self.label_thresholds)} numbers, but there are {len(labels)} labels: "
                "set one per label, or one for all labels"
            )
        return super().fit(train)

    def balanced_weights(self, counts: np.ndarray, rows: int) -> np.ndarray:
        """Returns weights with the same total for rows with and without a label; 1 if every row has the label."""
        weights: np.ndarray = np.where(counts == rows, 1, (rows - counts) / np.maximum(counts, 1))
        return weights

    def from_config(self, data: TaskDataConfig) -> Self:
        check_label_names(data.labels or ())
        return dataclasses.replace(super().from_config(data), label_thresholds=tuple(data.label_thresholds or ()))

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return dataclasses.replace(super().to_config(data), label_thresholds=list(self.label_thresholds) or None)

    def _read_columns(self, records: Records, split: str) -> Columns:
        """Reads one label column, or one column per label; a test split is labelled if any row has labels."""
        first = next(records.rows, None)
        fields = {} if first is None else first[1]
        if first is not None:
            records = dataclasses.replace(records, rows=itertools.chain([first], records.rows))
        if self.label_column not in fields and self.labels and set(self.labels) <= set(fields):
            return self._read_label_columns(records, split)
        try:
            columns = super()._read_columns(records, split)
        except UserError as error:
            if fields and self.label_column not in fields and not self.labels:
                raise UserError(f"{error}; if each label has a column, list these columns as data.labels") from None
            raise
        if split == "test" and columns.labels and all(cell in (None, "", []) for cell in columns.labels[0]):
            return columns._replace(labels=None)
        return columns

    def _read_label_columns(self, records: Records, split: str) -> Columns:
        """Reads a column for each label, which is 1 for rows with the label."""
        columns = self._read(records, split, dict.fromkeys(self.labels, "data.labels"), (None, ""))
        if columns.labels is None:
            return columns
        faults, rows, kept = list(columns.faults), [], []
        for row, (line_number, *cells) in enumerate(zip(columns.line_numbers, *columns.labels, strict=True)):
            words = [str(cell).strip().lower() for cell in cells]
            if set(words) <= {"-1", "-1.0"}:  # Toxic Comments: a test row that is not scored
                continue
            if bad := [name for name, word in zip(self.labels, words, strict=True) if word not in HAS_LABEL]:
                value = words[self.labels.index(bad[0])][:40]
                fault = f"{bad[0]} is {value!r}: write 1 if the row has the label, else 0"
                faults.append((line_number, records.error(line_number, fault)))
            rows.append([name for name, word in zip(self.labels, words, strict=True) if HAS_LABEL.get(word)])
            kept.append(row)
        if left_out := len(columns.ids) - len(kept):
            rows_left = "1 row" if left_out == 1 else f"{left_out:,} rows"
            records.notes.append(WarningText(f"{records.source}: {rows_left} with -1 for all labels skipped"))
        return columns.take(kept)._replace(labels=[rows], faults=tuple(faults))


@dataclass(frozen=True, kw_only=True)
class CustomRegression(_FromColumns, RegressionTask):
    """One score per row, within ``data.score_range`` if it is set."""

    name: str = "regression"
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    metrics: tuple[str, ...] = ("pearson", "spearman")
    main_metric: str = "pearson"
    lowest: float = -math.inf
    highest: float = math.inf
    data_keys = (*KEYS, *LONG_TEXT_KEYS, "metrics", "score_range")
    allowed_metrics = ("pearson", "spearman")

    def from_config(self, data: TaskDataConfig) -> Self:
        lowest, highest = data.score_range or (-math.inf, math.inf)
        return dataclasses.replace(super().from_config(data), lowest=lowest, highest=highest)


HAS_LABEL = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""Allowed values in the column of a label, in lower case."""

BALANCED = "balanced"


def class_weights(value: str | Sequence[str], labels: Sequence[str], balanced: np.ndarray) -> tuple[float, ...]:
    """Returns the weight of each label.

    Args:
      value: ``data.class_weights``: balanced, or entries LABEL=WEIGHT; other labels have weight 1.

    Raises:
      UserError: an entry has another form, or an unknown label.
    """
    if value in (BALANCED, [BALANCED]):
        return tuple(balanced.tolist())
    weights = dict.fromkeys(labels, 1.0)
    for entry in [value] if isinstance(value, str) else value:
        label, _, number = (part.strip() for part in entry.rpartition("="))
        if label not in weights:
            fault = f"data.class_weights has {entry!r}, but the labels are {quoted(labels)}"
            raise UserError(f"{fault}: use {BALANCED}, or LABEL=WEIGHT")
        weights[label] = _to_weight(entry, number)
    return tuple(weights.values())


def _to_weight(entry: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"data.class_weights has {entry!r}: set the weight to a number above 0")
    return weight


MIN_WORDS = 12
"""Shorter texts, without the names of packages, are skipped."""

MAX_WORDS = 32
"""Number of words of a text, so that it fits into short rows."""

ALIASES = frozenset({"np", "pd", "plt", "jnp", "mpl", "pa", "hf", "hugging"})
"""Usual abbreviations of imported packages."""

MAX_ROWS = 200
"""Maximum number of rows per package and split, so that no package dominates."""

_CODE = re.compile(r"\w[._]\w")


@dataclass(frozen=True, kw_only=True)
class Packages(CustomClassification):
    """Predicts the package of the start of a docstring, from which the names of packages are removed.

    ``data.dir`` is ``docstrings:PACKAGE,...`` with two or more installed packages (`bert.data.corpus.docstrings`). Dev
    has the docstrings of modules that ``docstrings::train`` leaves out, so that pretraining has not seen them.
    """

    name: str = "packages"
    data_keys: ClassVar[tuple[str, ...]] = (*LONG_TEXT_KEYS, "labels", "metrics")

    def from_config(self, data: TaskDataConfig) -> Packages:
        source = data.dir or ""
        names, split = parse_source(source) if source.startswith(DOCSTRINGS_PREFIX) else ((), None)
        if len(names) < 2 or split is not None:
            raise UserError(
                f"data.dir is {source!r}, but the task packages reads rows from installed packages: set data.dir to "
                "docstrings:PACKAGE,PACKAGE,..."
            )
        return super().from_config(dataclasses.replace(data, labels=sorted(names)))

    def splits(self, folder: Path) -> list[str]:
        return list(SPLITS)

    def records(self, folder: Path, split: str) -> Records:
        rows = enumerate(_rows(Path(folder).as_posix(), split), start=1)
        return Records(f"{folder}, split {split}", rows, ("text", "label"), "row")


def _rows(source: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Yields texts and labels, at most MAX_ROWS per package, evenly spread over its modules."""
    packages, _ = parse_source(source)
    prose = read_prose(packages)
    names = Names.from_packages(packages, [module.name for module, _ in prose])
    texts: dict[str, list[str]] = {package: [] for package in sorted(packages)}
    for module, docstrings in prose:
        if module.split == split:
            cleaned = (names.remove_from(" ".join(docstring)) for docstring in docstrings)
            starts = (text.split()[:MAX_WORDS] for text in cleaned)
            texts[module.package] += [" ".join(words) for words in starts if len(words) >= MIN_WORDS]
    for package, every in texts.items():
        count = min(len(every), MAX_ROWS)
        yield from ({"text": every[len(every) * row // count], "label": package} for row in range(count))


class Names(NamedTuple):
    """Lower-case words that identify a package.

    Attributes:
        packages: words of the names of packages and distributions, removed everywhere.
        modules: words of the names of modules, removed only from code (a.b, a_b, `a`): many are plain English.
    """

    packages: frozenset[str]
    modules: frozenset[str]

    @classmethod
    def from_packages(cls, packages: frozenset[str], modules: list[str]) -> Names:
        """Returns the names of packages and of their modules."""
        distributions = importlib.metadata.packages_distributions()
        names = [*packages, *ALIASES, *(name for package in packages for name in distributions.get(package, ()))]
        return cls(*(frozenset(word for name in group for word in _words(name)) for group in (names, modules)))

    def remove_from(self, text: str) -> str:
        """Returns the text without words that contain a name: for numpy also NumPy's and numpy.array."""
        return " ".join(word for word in text.split() if not self._are_in(word))

    def _are_in(self, word: str) -> bool:
        parts = set(_words(word))
        is_code = "`" in word or _CODE.search(word) is not None
        return bool(parts & self.packages or (is_code and parts & self.modules))


def _words(text: str) -> list[str]:
    """Returns the sequences of letters in lower case."""
    return re.findall(r"[^\W\d_]+", text.lower())


TASKS = (CustomClassification(), CustomMultilabel(), CustomRegression(), Packages())
