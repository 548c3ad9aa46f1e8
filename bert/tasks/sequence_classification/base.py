"""Base classes of tasks with one label, several labels or a score for each text or pair of texts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data.inputs import EXPECTED_TEXTS, Text, as_texts
from bert.data.long_texts import LONG_TEXT_KEYS, LongTexts, encode_texts
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.data.windows import WindowedRows
from bert.errors import UserError, WarningText, quoted, require
from bert.files import write_tsv
from bert.tasks.base import Outputs, Task
from bert.tasks.columns import Columns
from bert.tasks.error_files import write_errors
from bert.tasks.splits import ExampleColumns

WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0+)?")

MISSING_WORDS = ("nan", "<na>", "nat")
"""Texts that pandas writes for missing values, in lower case."""

MIN_SINGLE_LABELS = 10
MAX_SINGLE_LABELS_SHARE = 0.8
"""Share of rows with unique labels above which a training file is rejected; it also needs MIN_SINGLE_LABELS of them."""


@dataclass(frozen=True)
class Examples(ExampleColumns):
    """The R rows of one split as text."""

    texts_a: list[str]
    texts_b: list[str] | None
    """None for tasks with single texts."""
    labels: np.ndarray | None
    """[R] int32 label indices, [R, L] int8 with 1 for each label of a row, or [R] float32 scores; None: no labels."""
    ids: list[str]
    """The ids of the file, or row numbers from 0."""
    notes: tuple[str, ...] = ()
    """Sentences about how the file was read."""
    label_words: tuple[str, ...] = ()
    """All labels as the files write them; () for scores."""
    line_numbers: list[int] | None = None
    """Line numbers in the file, or row numbers from 1; None for new inputs."""
    columns: ClassVar[tuple[str, ...]] = ("texts_a", "texts_b", "labels", "ids", "line_numbers")

    @property
    def labelled(self) -> bool:
        """Whether the labels are known."""
        return self.labels is not None

    @property
    def known_labels(self) -> np.ndarray:
        """``labels`` of a labelled split."""
        return require(self.labels, "the labels")

    @property
    def groups(self) -> Sequence[Text]:
        """The texts: rows with equal texts are one group."""
        return self.texts

    @property
    def texts(self) -> Sequence[Text]:
        """The texts or pairs of texts."""
        return self.texts_a if self.texts_b is None else list(zip(self.texts_a, self.texts_b, strict=True))

    def sentences(self) -> Iterator[str]:
        """Yields all first texts, then all second texts."""
        yield from self.texts_a
        yield from self.texts_b or []


@dataclass(frozen=True, kw_only=True)
class SequenceClassificationTask(Task):
    """Base class for texts or pairs of texts; subclasses read the rows and interpret the labels."""

    name: str
    text_columns: tuple[str, ...]
    """Names of the one or two text columns."""
    label_column: str
    metrics: tuple[str, ...]
    """Names in `bert.metrics.METRICS`."""
    main_metric: str
    written_id: str = "index"
    """Name of the id column in SPLIT.tsv."""
    skips_bad_rows: bool = False
    writes_texts: ClassVar[bool] = False
    """Whether SPLIT.tsv has the texts; files of benchmarks have not."""
    kind: ClassVar[str] = "sequence_classification"
    data_keys: ClassVar[tuple[str, ...]] = LONG_TEXT_KEYS

    @property
    def reads_pairs(self) -> bool:
        """Whether an input may be a pair of texts."""
        return any(len(columns) == 2 for columns in self.table_columns)

    @property
    def bundle_fields(self) -> dict[str, Any]:
        return {"texts_per_input": len(self.text_columns)}

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("text",) if len(self.text_columns) == 1 else ("text_a", "text_b")

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return (self.text_columns,)

    @abstractmethod
    def records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split: texts, label and id by column."""

    @abstractmethod
    def _read_columns(self, records: Records, split: str) -> Columns:
        """Returns one or two text columns, and one label column or None."""

    @abstractmethod
    def _encode(self, records: Records, columns: Columns, is_train: bool) -> tuple[np.ndarray, tuple[str, ...]]:
        """Returns the labels in the form that the loss expects, and all labels.

        Raises:
          UserError: a label is unknown, or ``columns.faults`` is not empty.
        """

    def read(self, folder: Path, split: str) -> Examples:
        records = dataclasses.replace(self.records(Path(folder), split), skips_bad_rows=self.skips_bad_rows)
        columns = self._read_columns(records, split)
        if columns.labels is None:
            records.require_sound(columns.faults)
        texts_b = columns.texts[1] if len(columns.texts) > 1 else None
        examples = Examples(columns.texts[0], texts_b, None, columns.ids, columns.notes)
        if columns.labels is None:
            return examples
        labels, label_words = self._encode(records, columns, split == "train")
        examples = dataclasses.replace(examples, notes=tuple(records.notes), line_numbers=columns.line_numbers)
        return dataclasses.replace(examples, labels=labels, label_words=label_words)

    def features(self, tokenizer: Tokenizer, examples: Examples, data: TaskDataConfig) -> TokenRows | WindowedRows:
        return encode_texts(
            tokenizer, examples.texts, LongTexts.from_config(data), examples.labels, data.pair_truncation
        )

    def sample(self, examples: Examples) -> tuple[str, ...]:
        inputs = ((text,) if isinstance(text, str) else tuple(text) for text in examples.texts)
        return next((texts for texts in inputs if all(text.strip() for text in texts)), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        """Accepts a text per input, or for pairs a tuple or list of two texts; texts may be empty."""
        count = len(self.text_columns)
        expected = f"{self.name} takes {EXPECTED_TEXTS[count]}"
        rows = [as_texts(value, index, expected, (count,)) for index, value in enumerate(inputs, 1)]
        columns = [[row[column] for row in rows] for column in range(count)]
        return Examples(columns[0], columns[1] if count == 2 else None, None, [str(row) for row in range(len(rows))])

    def _write(
        self, folder: Path, split: str, examples: Examples, words: Sequence[str], more: Mapping[str, Sequence[str]]
    ) -> list[Path]:
        """Writes SPLIT.tsv with ids, predictions, the columns ``more`` and, for custom tasks, the texts."""
        columns = {self.written_id: examples.ids, "prediction": words, **more}
        if self.writes_texts:
            columns = {**_text_columns(examples), **columns}  # a text column called like another one is left out
            columns = {name: columns[name] for name in (self.written_id, "prediction", *more, *columns)}
        return [write_tsv(folder / f"{split}.tsv", [list(columns), *zip(*columns.values(), strict=True)])]

    def _write_errors(
        self, folder: Path, split: str, examples: Examples, columns: Sequence[str], errors: Iterable[Sequence[Any]]
    ) -> Path:
        """Writes the texts of wrongly predicted rows to errors.tsv (SPLIT_errors.tsv for splits other than dev).

        Args:
          columns: names of the columns after the texts.
          errors: (row, one cell for each column).
        """
        texts = _text_columns(examples)
        rows = ((*(column[row] for column in texts.values()), *cells) for row, *cells in errors)
        return write_errors(folder, split, (*texts, *columns), rows)


def _text_columns(examples: Examples) -> dict[str, Sequence[str]]:
    """Returns the texts by the names of their columns in written tables."""
    if examples.texts_b is None:
        return {"text": examples.texts_a}
    return {"text_a": examples.texts_a, "text_b": examples.texts_b}


@dataclass(frozen=True, kw_only=True)
class LabelTask(SequenceClassificationTask):
    """Base class for labels from a fixed set: one or several per row."""

    labels: tuple[str, ...]
    """The labels as the files write them; their order defines the label indices."""
    label_names: tuple[str, ...]
    """The labels in answers and reports."""
    class_weights: tuple[float, ...] = ()
    calibration: float | Literal["temperature"] | None = None
    """Divisor of the logits (``data.calibration``); temperature before it is fitted, or if it cannot be."""
    unknown_label_fix: ClassVar[str] = "fix it, or list all labels as data.labels"
    lists_faults: ClassVar[bool] = True
    """Whether an error about an invalid row lists all invalid rows."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.label_names

    @property
    def output_words(self) -> tuple[str, ...]:
        return self.labels

    @property
    def temperature(self) -> float:
        """Divisor of the logits."""
        return self.calibration if isinstance(self.calibration, int | float) else 1.0

    def _logits(self, outputs: Outputs) -> np.ndarray:
        """Returns [R, L]; NaN is 0."""
        return np.nan_to_num(np.reshape(outputs, (len(outputs), self.num_labels)))

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return dataclasses.replace(super().to_config(data), calibration=self.calibration)

    def remarks(self, predictions: Any, examples: Examples) -> list[str]:
        unfitted = ["no temperature was fitted (data.calibration), because all predictions for dev are right"]
        return super().remarks(predictions, examples) + (unfitted if self.calibration == "temperature" else [])

    def is_no_better(self, scores: Mapping[str, float], baseline: Mapping[str, float]) -> bool:
        """Returns whether no metric is better than the baseline.

        One better metric is enough: if most labels are 1, the majority class has a higher F1 than many good models.
        """
        return all(scores[name] <= baseline[name] < 1 for name in self.metrics)

    def _number_labels(
        self,
        records: Records,
        line_numbers: Sequence[int],
        rows: Sequence[Sequence[str]],
        is_train: bool,
        faults: Sequence[tuple[int, UserError]] = (),
    ) -> tuple[list[list[int]], tuple[str, ...]]:
        """Returns the label indices of each row, and all labels.

        Without ``labels``, they are the labels that the data set declares, or the labels of the training split. Whole
        numbers are the same label with and without decimals: 1 and 1.0.

        Args:
          faults: errors of single rows so far.

        Raises:
          UserError: a label is unknown, ``faults`` is not empty, or there are nearly as many labels as rows.
        """
        labels = self.labels or _declared(records, self.label_column)
        if not labels and is_train:
            records.require_sound(faults)
            labels = _labels_of(rows)
            self._check_new_labels(records, labels, rows)
        class_of = {word: label for words in (self.label_names, labels) for label, word in enumerate(words)}
        class_of = {**{whole_number(word): label for word, label in class_of.items()}, **class_of}
        numbers, faults = [], list(faults)
        for line_number, words in zip(line_numbers, rows, strict=True):
            row = [class_of.get(word, class_of.get(whole_number(word), -1)) for word in words]
            if -1 in row:
                unknown = quoted([words[row.index(-1)]])
                fault = f"{self.label_column} is {unknown}, but the labels are {quoted(labels)}"
                faults.append((line_number, records.error(line_number, f"{fault}: {self.unknown_label_fix}")))
            numbers.append(row)
        records.require_sound(faults if self.lists_faults else faults[:1])
        return numbers, labels

    def _check_new_labels(self, records: Records, labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds notes about labels that look like missing values. Raises UserError if nearly all labels are unique."""
        counts = Counter(word for words in rows for word in words)
        single = sum(count == 1 for count in counts.values())
        if single >= MIN_SINGLE_LABELS and single > MAX_SINGLE_LABELS_SHARE * len(rows):
            raise UserError(
                f"{records.source}: {len(labels):,} labels in {len(rows):,} rows, such as {quoted(labels[:1])}: are "
                "the columns swapped, or is this a regression (task regression)? If they are labels, list all of them "
                "as data.labels"
            )
        named = {word: count for word, count in counts.items() if word.lower() in MISSING_WORDS}
        if "-1" in counts and "0" in counts:
            named["-1"] = counts["-1"]
        for word, count in sorted(named.items()):
            rows_have = "1 row has" if count == 1 else f"{count:,} rows have"
            text = f"{records.source}: {rows_have} the label {word!r}, which is treated like any other label"
            records.notes.append(WarningText(f"{text}: remove these rows if it stands for a missing label"))


def _declared(records: Records, column: str) -> tuple[str, ...]:
    """Returns the labels that a data set declares for a column, if their names are unique and not empty."""
    names = tuple(name.strip() for name in records.declared_labels.get(column, ()))
    return names if all(names) and len(set(names)) == len(names) else ()


def whole_number(word: str) -> str:
    """Returns 1 for 1.0, and other words unchanged."""
    return word.partition(".")[0] if WHOLE_NUMBER.fullmatch(word) else word


def _labels_of(rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Returns the sorted labels of all rows; without decimals if all are whole numbers."""
    distinct = set(itertools.chain.from_iterable(rows))
    if all(WHOLE_NUMBER.fullmatch(word) for word in distinct):
        distinct = {whole_number(word) for word in distinct}
    return _in_order(distinct)


def _in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Returns the unique words, sorted as integers if possible, otherwise alphabetically."""
    distinct = set(words)
    try:
        return tuple(sorted(distinct, key=lambda word: (int(word), word)))
    except ValueError:
        return tuple(sorted(distinct))
