"""Tasks over sentences and pairs of sentences: one label or one score a row, in tab-separated files."""

from __future__ import annotations

import dataclasses
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import TaskDataConfig
from bert.data import features
from bert.data.features import Features
from bert.data.inputs import as_texts
from bert.data.windows import Text
from bert.errors import UserError, require
from bert.runs.confusion_matrix import draw_confusion_matrix
from bert.tasks.base import Outputs, Task
from bert.tasks.readers.columns import read_cells
from bert.tasks.readers.glue_datasets import glue_records, is_glue
from bert.tasks.readers.split_files import INSTEAD
from bert.tasks.readers.tsv import read_table, write_rows


@dataclass(frozen=True)
class Examples:
    """The rows of one split, R of them, as text."""

    texts_a: list[str]
    texts_b: list[str] | None
    """None for a task of single sentences."""
    labels: np.ndarray | None
    """[R] int32 numbers of labels, or float32 scores; None for a split without labels."""
    ids: list[str]
    """As the file numbers its rows where it has no labels, else counted from 0."""
    notes: tuple[str, ...] = ()
    """Sentences on rows that were left out."""

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


class ClassificationPredictions(NamedTuple):
    """Predicted labels [R], and the probability [R, L] of each label."""

    labels: np.ndarray
    probabilities: np.ndarray


class Label(NamedTuple):
    """An answer: the most likely label, and the probability of each."""

    label: str
    probabilities: dict[str, float]


class Score(NamedTuple):
    """An answer: a number on the task's scale."""

    score: float


@dataclass(frozen=True, kw_only=True)
class SentenceTask(Task):
    """What its files are called and hold, and how it is measured."""

    name: str
    folder_name: str
    """Folder in GLUE's own archive."""
    text_columns: tuple[str, ...]
    """Header names of the one or two texts."""
    label_column: str
    metrics: tuple[str, ...]
    """Names in `bert.metrics.METRICS`, GLUE's official ones."""
    main_metric: str
    files: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
    )
    """Names that the file of each split goes by."""
    submissions: Mapping[str, str] = field(default_factory=dict)
    """File that the leaderboard wants for each split without labels."""
    id_column: str = "index"
    """Column that numbers the rows: of a split without labels, and of one with them where its file has it."""
    written_id: str = "index"
    """What SPLIT.tsv calls the column of ids."""
    unnamed_columns: tuple[str, ...] = ()
    """Columns of the files with labels, where these have no header."""
    skips_short_rows: bool = False
    """Whether rows of too few columns in files with labels are a known flaw of the original: left out, and told."""
    may_be_empty: bool = False
    """Whether empty texts are one: they are read as they are."""
    hub_columns: tuple[str, ...] = ()
    """What data sets call the texts, where that is not ``text_columns``."""
    head: str = "classification"

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("text",) if len(self.text_columns) == 1 else ("text_a", "text_b")

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        """As in the task's files, and as in its data sets."""
        return (self.text_columns, self.hub_columns) if self.hub_columns else (self.text_columns,)

    @property
    def id_columns(self) -> tuple[str, ...]:
        """As in the task's files, and as in its data sets."""
        return (self.id_column, "idx")

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        """Those of the files with labels."""
        return self.unnamed_columns

    def text_of(self, name: str, value: Any) -> str:
        """A text of a row, which of some tasks may be empty."""
        return value if self.may_be_empty and isinstance(value, str) else super().text_of(name, value)

    @abstractmethod
    def _label(self, cell: str) -> float:
        """The number that a cell of the label column means. Raises ValueError with fault and fix."""

    @abstractmethod
    def _labels(self, numbers: list[float]) -> np.ndarray:
        """[R] labels as the loss takes them."""

    def splits(self, folder: Path) -> list[str]:
        folder = Path(folder)
        if is_glue(folder, self.name):
            there = [name for name in self.files if glue_records(folder, self.name, name) is not None]
        else:
            there = [name for name in self.files if self._find(folder, name)]
        return [name for name in self.files if name in ("train", "dev") or name in there]

    def read(self, folder: Path, split: str, max_rows: int | None = None) -> Examples:
        """Reads ``split`` from ``folder``, from its subfolder named as in GLUE's archive, or from a data set."""
        if is_glue(Path(folder), self.name):
            return self._read_dataset(Path(folder), split, max_rows)
        path = self._find(Path(folder), split)
        if path is None:
            raise self._not_found(Path(folder), split)
        labelled = split not in self.submissions
        skips_short_rows = self.skips_short_rows and labelled
        wanted = (*self.text_columns, self.label_column if labelled else self.id_column)
        # A line feed in a text breaks its row into short ones, and two of them make an empty line.
        table = read_table(path, self.folder_name, self.unnamed_columns if labelled else (), wanted, skips_short_rows)
        *text_places, label_place = table.places(path, wanted)
        id_place = table.names.index(self.id_column) if self.id_column in table.names else None

        columns: list[list[str]] = [[] for _ in text_places]
        labels: list[float] = []
        line_of_id: dict[str, int] = {}
        short: list[int] = []
        rows = 0
        for number, cells in table.rows:
            if max_rows is not None and rows >= max_rows:
                break
            if skips_short_rows and len(cells) < len(table.names):
                short.append(number)
                continue
            if len(cells) != len(table.names):
                raise UserError(
                    f"{path}, line {number}: {_count(len(cells), 'column')} where {table.described}: "
                    "fix or remove the line"
                )
            if id_place is not None and (before := line_of_id.setdefault(cells[id_place], number)) != number:
                fix = "remove one of the two, or" if labelled else "the leaderboard takes one answer for each,"
                raise UserError(
                    f"{path}, line {number}: {self.id_column} {cells[id_place]!r} stands on line {before} already: "
                    f"{fix} copy the file again"
                )
            if labelled:
                try:
                    labels.append(self._label(cells[label_place]))
                except ValueError as error:
                    wrong = f"{self.label_column} is {cells[label_place]!r}"
                    raise UserError(f"{path}, line {number}: {wrong}: {error}") from None
            for column, name, place in zip(columns, self.text_columns, text_places, strict=True):
                if not (cells[place].strip() or self.may_be_empty):
                    raise UserError(f"{path}, line {number}: {name} is empty: fix the line, or copy the file again")
                column.append(cells[place])
            rows += 1
        if not rows:
            raise UserError(f"{path} has a header but no rows: copy it again from the original {self.folder_name} data")
        lines = ", ".join(map(str, short[:10])) + (", ..." if len(short) > 10 else "")
        return Examples(
            texts_a=columns[0],
            texts_b=columns[1] if len(columns) > 1 else None,
            labels=self._labels(labels) if labelled else None,
            ids=[str(row) for row in range(rows)] if labelled else list(line_of_id),
            notes=(f"{path}: {_count(len(short), 'row')} of too few columns left out (line {lines})",) if short else (),
        )

    def features(self, tokenizer: Tokenizer, examples: Examples, data: TaskDataConfig) -> Features:
        return features.tokenize(tokenizer, examples.texts, data.max_length, examples.labels)

    def sample(self, examples: Examples) -> tuple[str, ...]:
        inputs = ((text,) if isinstance(text, str) else tuple(text) for text in examples.texts)
        return next((texts for texts in inputs if all(text.strip() for text in texts)), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        """Each input is a text, or for a task of pairs a tuple or list of two; texts may be empty."""
        count = len(self.text_columns)
        wanted = "a single text: pass a string" if count == 1 else "a pair of texts: pass a tuple of two strings"
        rows = [
            as_texts(given, number, f"{self.name} takes {wanted}", (count,)) for number, given in enumerate(inputs, 1)
        ]
        columns = [[row[column] for row in rows] for column in range(count)]
        return Examples(columns[0], columns[1] if count == 2 else None, None, [str(row) for row in range(len(rows))])

    def _read_dataset(self, folder: Path, split: str, max_rows: int | None) -> Examples:
        records = glue_records(folder, self.name, split)
        if records is None:
            raise UserError(
                f"{folder.as_posix()} has no split for {split}: set data.dir to {self.folder_name} as a whole"
            )
        labelled = split not in self.submissions
        cells = read_cells(
            records,
            dict.fromkeys(self.hub_columns or self.text_columns, "task"),
            {"label": "task"} if labelled else {},
            None if labelled else ("idx", "task"),
            max_rows,
            may_be_empty=self.may_be_empty,
        )
        labels = []
        for number, label in (
            zip(cells.numbers, require(cells.labels, "the labels")[0], strict=True) if labelled else ()
        ):
            try:
                labels.append(self._label(self._file_word(label)))
            except ValueError as error:
                raise records.error(number, f"label is {label!r}: {error}") from None
        return Examples(
            texts_a=cells.texts[0],
            texts_b=cells.texts[1] if len(cells.texts) > 1 else None,
            labels=self._labels(labels) if labelled else None,
            ids=cells.ids,
        )

    def _file_word(self, label: Any) -> str:
        """What the original files write for a label of a data set."""
        return str(label)

    def _write(
        self, folder: Path, split: str, examples: Examples, words: Sequence[str], more: Mapping[str, Sequence[str]]
    ) -> list[Path]:
        """SPLIT.tsv with ``more`` columns; before it GLUE's official file, of a split without labels."""
        both = [("index", examples.ids), ("prediction", words)]
        files = {f"{split}.tsv": [(self.written_id, examples.ids), both[1], *more.items()]}
        official = self.submissions.get(split)
        if not examples.labelled and official is not None and official not in files:
            files = {official: both, **(files if more else {})}
        return [_write_columns(folder / name, columns) for name, columns in files.items()]

    def _find(self, folder: Path, split: str) -> Path | None:
        places = (place / name for name in self.files[split] for place in (folder, folder / self.folder_name))
        return next((path for path in places if path.is_file()), None)

    def _not_found(self, folder: Path, split: str) -> UserError:
        wrong = f"{folder} has no {self.files[split][0]}" if folder.is_dir() else f"{folder} is not a folder"
        names = ", ".join(names[0] for names in self.files.values())
        instead = INSTEAD.get(split, "")
        return UserError(f"{wrong}: set data.dir to the folder with {names} of {self.folder_name}{instead}")


@dataclass(frozen=True, kw_only=True)
class ClassificationTask(SentenceTask):
    """One label a row."""

    labels: tuple[str, ...]
    """Label words of the files; a label's number is its place here."""
    label_names: tuple[str, ...]
    """The labels for people."""
    loss: str = "cross_entropy"
    baseline: str = "majority_class"

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.label_names

    def predict(self, outputs: Outputs, features: Features, examples: Examples) -> ClassificationPredictions:
        """[L] logits of each row -> the most likely label; a NaN counts as 0."""
        probabilities = metrics.softmax(np.nan_to_num(np.reshape(outputs, (len(outputs), self.num_labels))))
        return ClassificationPredictions(probabilities.argmax(-1), probabilities)

    def score(self, predictions: ClassificationPredictions, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(self.metrics, predictions.labels, examples.known_labels)

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Of always answering the split's most frequent label."""
        return metrics.majority_class(self.metrics, examples.known_labels)

    def is_degenerate(self, predictions: ClassificationPredictions, examples: Examples) -> bool:
        """One label for every row, or no metric better than the majority class's (after Mosbach et al. 2021)."""
        ours, theirs = self.score(predictions, examples), self.baseline_scores(examples)
        one_label = len(np.unique(predictions.labels)) == 1 < len(np.unique(examples.known_labels))
        # One better metric is enough: where most labels are 1, the majority's F1 is above that of many good models.
        return one_label or all(ours[name] <= theirs[name] < 1 for name in self.metrics)

    def write(self, folder: Path, split: str, predictions: ClassificationPredictions, examples: Examples) -> list[Path]:
        if not len(examples) == len(predictions.labels) == len(predictions.probabilities):
            raise ValueError(
                f"{len(examples)} rows, {len(predictions.labels)} predictions, "
                f"{len(predictions.probabilities)} probabilities"
            )
        words = [self.labels[number] for number in predictions.labels]
        chosen = np.take_along_axis(predictions.probabilities, predictions.labels[:, None], axis=1)[:, 0]
        right = {"label": [self.labels[number] for number in examples.known_labels]} if examples.labelled else {}
        more = {**right, "probability": [f"{share:.6f}" for share in chosen]}
        return self._write(folder, split, examples, words, more)

    def details(self, predictions: ClassificationPredictions, examples: Examples) -> dict[str, Any]:
        """Scores of each label and the confusion matrix."""
        return metrics.by_class(self.label_names, predictions.labels, examples.known_labels)

    def write_details(
        self, folder: Path, split: str, predictions: ClassificationPredictions, examples: Examples
    ) -> list[Path]:
        """Writes errors.tsv, the surest errors first, and confusion_matrix.png; of splits other than dev SPLIT_..."""
        start = "" if split == "dev" else f"{split}_"
        labels = examples.known_labels
        shares = np.take_along_axis(predictions.probabilities, predictions.labels[:, None], axis=1)[:, 0]
        wrong = np.flatnonzero(predictions.labels != labels)
        rows = [(*self.input_columns, "label", "prediction", "probability")]
        for row in wrong[np.argsort(-shares[wrong], kind="stable")]:
            texts = [examples.texts_a[row], *([] if examples.texts_b is None else [examples.texts_b[row]])]
            names = [self.label_names[number] for number in (labels[row], predictions.labels[row])]
            cells = (" ".join(re.split(r"[\t\r\n]+", cell)) for cell in (*texts, *names))
            rows.append((*cells, f"{shares[row]:.6f}"))
        errors = write_rows(folder / f"{start}errors.tsv", rows)
        matrix = np.array(self.details(predictions, examples)["confusion_matrix"])
        title = f"{self.name}, {split}: {len(wrong):,} errors in {len(labels):,} rows"
        picture = draw_confusion_matrix(folder / f"{start}confusion_matrix.png", matrix, self.label_names, title)
        return [errors] if picture is None else [errors, picture]

    def answers(self, predictions: ClassificationPredictions, examples: Any) -> list[Label]:
        return [
            Label(self.label_names[number], dict(zip(self.label_names, map(float, shares), strict=True)))
            for number, shares in zip(predictions.labels, predictions.probabilities, strict=True)
        ]

    def _file_word(self, label: Any) -> str:
        return self.labels[self.label_names.index(label)] if label in self.label_names else str(label)

    def _label(self, cell: str) -> float:
        if cell not in self.labels:
            raise ValueError(f"{self.name} has the labels {', '.join(self.labels)}")
        return self.labels.index(cell)

    def _labels(self, numbers: list[float]) -> np.ndarray:
        return np.array(numbers, np.int32)


@dataclass(frozen=True, kw_only=True)
class RegressionTask(SentenceTask):
    """One score a row, from ``lowest`` to ``highest``; predictions are R float32 scores, as the head gives them."""

    lowest: float
    highest: float
    loss: str = "mean_squared_error"
    baseline: str = "mean"

    @property
    def num_labels(self) -> int:
        return 1

    @property
    def problem_type(self) -> str:
        return "regression"

    def predict(self, outputs: Outputs, features: Features, examples: Examples) -> np.ndarray:
        """[1] of each row -> [R]; a NaN counts as 0."""
        return np.nan_to_num(np.reshape(outputs, len(outputs)))

    def score(self, predictions: np.ndarray, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(self.metrics, predictions, examples.known_labels)

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Correlation of a constant prediction, which is 0 by definition."""
        return metrics.compute_metrics(self.metrics, np.zeros(len(examples)), examples.known_labels)

    def is_degenerate(self, predictions: np.ndarray, examples: Examples) -> bool:
        """No correlation, or less than none."""
        return self.score(predictions, examples)[self.main_metric] <= 0

    def write(self, folder: Path, split: str, predictions: np.ndarray, examples: Examples) -> list[Path]:
        """Scores for the leaderboard are within the scale; those beside labels are as the head gives them."""
        if len(examples) != len(predictions):
            raise ValueError(f"{len(examples)} rows, {len(predictions)} predictions")
        shown = predictions if examples.labelled else self._within(predictions)
        right = {"score": list(map(_exact, examples.known_labels))} if examples.labelled else {}
        # Fewer digits make ties, and with them another Spearman.
        words = [f"{score:.6f}" if math.isfinite(self.highest) else _exact(score) for score in shown]
        return self._write(folder, split, examples, words, right)

    def answers(self, predictions: np.ndarray, examples: Any) -> list[Score]:
        return [Score(float(score)) for score in self._within(predictions)]

    def _within(self, scores: np.ndarray) -> np.ndarray:
        return np.clip(scores, self.lowest, self.highest)

    def _label(self, cell: str) -> float:
        scale = f"{self.name} has scores from {self.lowest:g} to {self.highest:g}"
        if math.isinf(self.highest):
            scale = f"{self.name} has finite numbers"
        try:
            score = float(cell)
        except ValueError:
            raise ValueError(f"no number, {scale}") from None
        if not (math.isfinite(score) and self.lowest <= score <= self.highest):
            raise ValueError(f"out of range, {scale}")
        return score

    def _labels(self, numbers: list[float]) -> np.ndarray:
        return np.array(numbers, np.float32)


def _write_columns(path: Path, columns: Sequence[tuple[str, Sequence[str]]]) -> Path:
    """A line of names, and one for each row."""
    return write_rows(path, [[name for name, _ in columns], *zip(*(cells for _, cells in columns), strict=True)])


def _exact(score: np.floating) -> str:
    """The fewest decimals that are read as the same number."""
    return np.format_float_positional(score, trim="-")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
