"""Texts or pairs of texts with one label, several labels or a score: what these tasks share."""

from __future__ import annotations

import dataclasses
import itertools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data import encoding
from bert.data.inputs import WANTED, Text, as_texts
from bert.data.records import Records
from bert.data.rows import TokenRows
from bert.errors import UserError, WarningText, quoted, require
from bert.files import write_tsv
from bert.tasks.base import Task
from bert.tasks.columns import Columns

WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0+)?")

MISSING_WORDS = ("nan", "<na>", "nat")
"""Texts that pandas writes for a missing value, in lower case."""

FEWEST_SINGLE_LABELS = 10
SINGLE_LABELS_SHARE = 0.8
"""A training file is refused if more than this share of its rows, and at least FEWEST_SINGLE_LABELS of them, have a
label that no other row has."""


@dataclass(frozen=True)
class Examples:
    """The rows of one split, R of them, as text."""

    texts_a: list[str]
    texts_b: list[str] | None
    """None for a task of single sentences."""
    labels: np.ndarray | None
    """[R] int32 numbers of labels, [R, L] int8 of any number of labels a row, or [R] float32 scores; None for a split
    without labels."""
    ids: list[str]
    """As the file numbers its rows where it has no labels, else counted from 0."""
    notes: tuple[str, ...] = ()
    """Sentences on how the file was read."""
    label_words: tuple[str, ...] = ()
    """The labels that there are, as words of the files; () for scores."""

    def __len__(self) -> int:
        return len(self.texts_a)

    @property
    def labelled(self) -> bool:
        """Whether the labels are known."""
        return self.labels is not None

    @property
    def known_labels(self) -> np.ndarray:
        """``labels`` of a split that has them."""
        return require(self.labels, "the labels")

    @property
    def groups(self) -> Sequence[Text]:
        """The texts: rows with the same ones stay together."""
        return self.texts

    def take(self, rows: Sequence[int]) -> Self:
        """The rows of these numbers."""
        return dataclasses.replace(
            self,
            texts_a=[self.texts_a[row] for row in rows],
            texts_b=None if self.texts_b is None else [self.texts_b[row] for row in rows],
            labels=None if self.labels is None else self.labels[list(rows)],
            ids=[self.ids[row] for row in rows],
        )

    @property
    def texts(self) -> Sequence[Text]:
        """The texts, or the pairs of texts."""
        return self.texts_a if self.texts_b is None else list(zip(self.texts_a, self.texts_b, strict=True))

    def sentences(self) -> Iterator[str]:
        """All first texts, then all second ones."""
        yield from self.texts_a
        yield from self.texts_b or []


@dataclass(frozen=True, kw_only=True)
class SequenceClassificationTask(Task):
    """Texts or pairs of texts. A subclass gives the rows (``splits``, ``records``) and what the labels mean."""

    name: str
    text_columns: tuple[str, ...]
    """Names of the one or two columns of text."""
    label_column: str
    metrics: tuple[str, ...]
    """Names in `bert.metrics.METRICS`."""
    main_metric: str
    written_id: str = "index"
    """What SPLIT.tsv calls the column of ids."""
    kind: ClassVar[str] = "sequence_classification"

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
        """The rows of a split, with texts, label and id under the names of their columns."""

    @abstractmethod
    def _read_columns(self, records: Records, split: str) -> Columns:
        """One or two columns of text; one column of labels, or None."""

    @abstractmethod
    def _encode(self, records: Records, columns: Columns, is_train: bool) -> tuple[np.ndarray, tuple[str, ...]]:
        """[R] labels as the loss takes them, and the labels that there are. Raises UserError for an unknown one, and
        for ``columns.faults``."""

    def read(self, folder: Path, split: str) -> Examples:
        records = self.records(Path(folder), split)
        columns = self._read_columns(records, split)
        if columns.labels is None:
            records.require_sound(columns.faults)
        texts_b = columns.texts[1] if len(columns.texts) > 1 else None
        examples = Examples(columns.texts[0], texts_b, None, columns.ids, columns.notes)
        if columns.labels is None:
            return examples
        labels, label_words = self._encode(records, columns, split == "train")
        return dataclasses.replace(examples, labels=labels, label_words=label_words, notes=tuple(records.notes))

    def features(self, tokenizer: Tokenizer, examples: Examples, data: TaskDataConfig) -> TokenRows:
        return encoding.tokenize(tokenizer, examples.texts, data.max_length, examples.labels, data.pair_truncation)

    def sample(self, examples: Examples) -> tuple[str, ...]:
        inputs = ((text,) if isinstance(text, str) else tuple(text) for text in examples.texts)
        return next((texts for texts in inputs if all(text.strip() for text in texts)), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        """Each input is a text, or for a task of pairs a tuple or list of two; texts may be empty."""
        count = len(self.text_columns)
        wanted = f"{self.name} takes {WANTED[count]}"
        rows = [as_texts(given, index, wanted, (count,)) for index, given in enumerate(inputs, 1)]
        columns = [[row[column] for row in rows] for column in range(count)]
        return Examples(columns[0], columns[1] if count == 2 else None, None, [str(row) for row in range(len(rows))])

    def _write(
        self, folder: Path, split: str, examples: Examples, words: Sequence[str], more: Mapping[str, Sequence[str]]
    ) -> list[Path]:
        """SPLIT.tsv with ids, predictions and ``more`` columns."""
        columns = {self.written_id: examples.ids, "prediction": words, **more}
        return [write_tsv(folder / f"{split}.tsv", [list(columns), *zip(*columns.values(), strict=True)])]


@dataclass(frozen=True, kw_only=True)
class LabelTask(SequenceClassificationTask):
    """Labels from a fixed set: one a row, or any number of them."""

    labels: tuple[str, ...]
    """Label words of the files; a label's number is its place here."""
    label_names: tuple[str, ...]
    """The labels for people."""
    class_weights: tuple[float, ...] = ()
    unknown_label_fix: ClassVar[str] = "fix it, or list all labels as data.labels"
    lists_faults: ClassVar[bool] = True
    """Whether an error on a bad row names all bad rows."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.label_names

    @property
    def output_words(self) -> tuple[str, ...]:
        return self.labels

    def is_no_better(self, ours: Mapping[str, float], baseline: Mapping[str, float]) -> bool:
        """Whether no metric is better than the baseline's.

        One better metric is enough: if most labels are 1, the F1 of the majority class is above that of many good
        models.
        """
        return all(ours[name] <= baseline[name] < 1 for name in self.metrics)

    @abstractmethod
    def rows_by_label(self, examples: Examples) -> np.ndarray:
        """[L] rows that have each label."""

    def _number_labels(
        self,
        records: Records,
        line_numbers: Sequence[int],
        rows: Sequence[Sequence[str]],
        is_train: bool,
        faults: Sequence[tuple[int, UserError]] = (),
    ) -> tuple[list[list[int]], tuple[str, ...]]:
        """The numbers of each row's labels, and all labels.

        Labels that are not given are those that the data set declares, in its order, or those of a training split.
        A whole number is the same label with and without decimals: 1 and 1.0.

        Args:
          faults: errors of single rows so far.

        Raises:
          UserError: an unknown label, one of ``faults``, or nearly as many labels as rows.
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
            found = [class_of.get(word, class_of.get(whole_number(word), -1)) for word in words]
            if -1 in found:
                wrong = (
                    f"{self.label_column} is {quoted([words[found.index(-1)]])}, and the labels are {quoted(labels)}"
                )
                faults.append((line_number, records.error(line_number, f"{wrong}: {self.unknown_label_fix}")))
            numbers.append(found)
        records.require_sound(faults if self.lists_faults else faults[:1])
        return numbers, labels

    def _check_new_labels(self, records: Records, labels: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds notes on labels that may mean that a row has none. Raises UserError if nearly every row has a label
        that no other row has."""
        counts = Counter(word for words in rows for word in words)
        single = sum(count == 1 for count in counts.values())
        if single >= FEWEST_SINGLE_LABELS and single > SINGLE_LABELS_SHARE * len(rows):
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
            text = f"{records.source}: {rows_have} the label {word!r}, which is read as a label like any other"
            records.notes.append(WarningText(f"{text}: remove such rows if it means that they have none"))

    def _write_errors(
        self, folder: Path, split: str, examples: Examples, columns: Sequence[str], errors: Iterable[Sequence[Any]]
    ) -> Path:
        """errors.tsv, ``SPLIT_errors.tsv`` of splits other than dev: the texts of a row, and what is wrong with it.

        Args:
          columns: names of the columns after the texts.
          errors: (row, a cell for each of ``columns``).
        """
        rows = [(*self.input_columns, *columns)]
        for row, *cells in errors:
            texts = [examples.texts_a[row], *([] if examples.texts_b is None else [examples.texts_b[row]])]
            rows.append(tuple(" ".join(re.split(r"[\t\r\n]+", cell)) for cell in (*texts, *cells)))
        return write_tsv(folder / f"{file_prefix(split)}errors.tsv", rows)


def file_prefix(split: str) -> str:
    """Start of the names of files on a split; of dev they have none."""
    return "" if split == "dev" else f"{split}_"


def _declared(records: Records, column: str) -> tuple[str, ...]:
    """The labels that a data set declares for a column, if each has another name."""
    names = tuple(name.strip() for name in records.declared_labels.get(column, ()))
    return names if all(names) and len(set(names)) == len(names) else ()


def whole_number(word: str) -> str:
    """Returns 1 for 1.0, and any other word as it is."""
    return word.partition(".")[0] if WHOLE_NUMBER.fullmatch(word) else word


def _labels_of(rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The labels of rows in order; if all are whole numbers, without decimals."""
    distinct = set(itertools.chain.from_iterable(rows))
    if all(WHOLE_NUMBER.fullmatch(word) for word in distinct):
        distinct = {whole_number(word) for word in distinct}
    return _in_order(distinct)


def _in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Each word once; numbers in their order, words in the alphabet's."""
    distinct = set(words)
    try:
        return tuple(sorted(distinct, key=lambda word: (int(word), word)))
    except ValueError:
        return tuple(sorted(distinct))
