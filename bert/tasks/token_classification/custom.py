"""Token classification on JSONL and Parquet files, data sets, or columns that the configuration names.

CSV, TSV and CoNLL files have a row for each word, and an empty row after each sentence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bert.config import TaskDataConfig
from bert.data.records import RECORDS, Records, is_dataset_dict
from bert.data.tables import file_suffix
from bert.errors import UserError, quoted
from bert.tasks.columns import (
    KEYS,
    ColumnFilesTask,
    split_names,
    split_path,
    split_records,
)
from bert.tasks.token_classification import conll
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.sentence_records import SentenceColumns, in_conll_columns
from bert.tasks.token_classification.task import TAG_KEYS, TokenClassificationTask
from bert.tasks.token_classification.word_features import CLITICS, plain_apostrophes

SUFFIXES = (".jsonl", ".csv", ".tsv", ".conll", ".txt", ".parquet")

NAMES_OF_WORDS = ("word", "words", "token", "tokens", "form")
"""Usual names of a column of words, by which a header is recognized."""


@dataclass(frozen=True, kw_only=True)
class CustomTokenClassification(TokenClassificationTask, ColumnFilesTask):
    """A tag for each word. The tags themselves determine whether they mark entities."""

    name: str = "tagging"
    data_keys = (*KEYS, *TAG_KEYS)
    unnamed_table_columns = ()
    """New inputs are texts and not columns of words."""

    def from_config(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(super().from_config(data), data=data)

    @property
    def words_column(self) -> str:
        return self.data.columns.words or "words"

    @property
    def text_clitics(self) -> tuple[str, ...]:
        clitics = self.data.clitics  # with data.labels, the task's are () if the configuration names none
        return CLITICS if clitics is None else tuple(map(plain_apostrophes, clitics))

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data, SUFFIXES)

    def records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split that is not in columns."""
        return split_records(folder, split, self.data)

    def read(self, folder: Path, split: str) -> Sentences:
        folder = Path(folder)
        if self._in_columns(folder, split):
            sentences = self._read_columns(folder, split)
        else:
            columns = self.data.columns
            names = SentenceColumns(text=columns.text_a)
            if columns.words is not None:
                names = names._replace(words=(columns.words,))
            if columns.tags is not None:
                names = names._replace(tags=(columns.tags,), entities=(columns.tags,))
            return self.read_records(self.records(folder, split), split, names)
        labels = conll.label_names(sentences) if sentences.labelled else ()
        return dataclasses.replace(sentences, labels=labels)

    def _in_columns(self, folder: Path, split: str) -> bool:
        if is_dataset_dict(folder.as_posix()):
            return False
        return file_suffix(split_path(folder, split, self.data, SUFFIXES)) not in RECORDS

    def _read_columns(self, folder: Path, split: str) -> Sentences:
        path = split_path(folder, split, self.data, SUFFIXES)
        self.require_errors(path)
        delimiter, file_rows = conll.column_rows(path, self.data.column_names)
        rows = list(file_rows)
        names = self._names(folder, split, path, rows)
        if names is None:
            word, tag, width = 0, -1, len(conll.first_row(rows)[1])
            labelled = split != "test" or width == len(self._train_row(folder))
            if labelled:
                _refuse_header(path, rows)
        else:
            word, tag, width = self._column_index("words", 0, names), -1, len(names)
            labelled = split != "test" or self._has_tags(folder, names)
            if labelled:
                tag = self._column_index("tags", width - 1, names)
                labelled = split != "test" or conll.first_row(rows)[1][tag : tag + 1] != [""]
        sentences = conll.read_rows(path, rows, delimiter, labelled, self.reading, word, tag, width, self.known_types)
        if delimiter != ",":
            sentences = dataclasses.replace(sentences, comments=conll.comment_lines(path))
        return in_conll_columns(sentences) if delimiter == "," else sentences

    def _names(self, folder: Path, split: str, path: Path, rows: list[conll.Row]) -> list[str] | None:
        """Returns the names of the columns, and removes their row from ``rows``; None without a header.

        Raises:
          UserError: a configured column is missing.
        """
        line_number, cells = conll.first_row(rows)
        if not cells:
            return None
        if self.data.column_names is not None:
            names = self._given_names(split, f"{path}, line {line_number}", len(cells))
            if cells == names:
                rows.remove((line_number, cells))
            return names
        configured = {key: name for key in ("words", "tags") if (name := getattr(self.data.columns, key)) is not None}
        expected = configured or {"words": "words", "tags": "tags"}
        trained = None if split != "test" or "words" in configured else self._train_word(folder)
        if split == "test" and (configured or trained or file_suffix(path) == ".csv"):  # it may lack the tags
            expected = {"words": configured.get("words") or trained or "words"}
        for key, name in expected.items():
            if name not in cells:
                if not (configured or trained or file_suffix(path) == ".csv"):
                    return None
                raise UserError(
                    f"{path}, line {line_number}: no {name!r} among {quoted(cells)}: set data.columns.{key} to the "
                    "right one, or name them all in their order as data.column_names"
                )
        if len(set(cells)) < len(cells):
            raise UserError(f"{path}, line {line_number}: the columns are {quoted(cells)}: use unique names")
        rows.remove((line_number, cells))
        return cells

    def _given_names(self, split: str, location: str, width: int) -> list[str]:
        """Returns ``data.column_names``, without the tags for a test file with one column less."""
        names = list(self.data.column_names or ())
        if width != len(names) and not (split == "test" and width == len(names) - 1):
            raise UserError(f"{location}: {width} columns, but data.column_names has {len(names)} names: name each one")
        if width < len(names):
            del names[self._column_index("tags", width, names)]
        return names

    def _column_index(self, key: str, default: int, names: list[str]) -> int:
        name = getattr(self.data.columns, key)
        if name is None:
            return names.index(key) if key in names else default
        if name not in names:
            raise UserError(f"data.columns.{key} is {name!r}, which is not in data.column_names: {', '.join(names)}")
        return names.index(name)

    def _has_tags(self, folder: Path, names: list[str]) -> bool:
        if self.data.columns.tags is not None:
            return self.data.columns.tags in names
        return "tags" in names or len(names) == len(self._train_row(folder))

    def _train_row(self, folder: Path) -> list[str]:
        """Returns the first row of the training file; [] if it is not in columns."""
        if not self._in_columns(folder, "train"):
            return []
        path = split_path(folder, "train", self.data, SUFFIXES)
        return conll.first_row(conll.column_rows(path, self.data.column_names)[1])[1]

    def _train_word(self, folder: Path) -> str | None:
        """Returns the name of the column of words in the training file; None without a header."""
        row = self._train_row(folder)
        path = split_path(folder, "train", self.data, SUFFIXES)
        names = self._names(folder, "train", path, [(1, row)])
        return None if names is None else names[self._column_index("words", 0, names)]


def _refuse_header(path: Path, rows: list[conll.Row]) -> None:
    """Raises UserError if the first row looks like a header, and its tag occurs only once."""
    line_number, cells = conll.first_row(rows)
    if cells and cells[0].lower() in NAMES_OF_WORDS and sum(row[-1:] == cells[-1:] for _, row in rows) == 1:
        raise UserError(
            f"{path}, line {line_number}: {cells[0]!r} and {cells[-1]!r} look like names of columns: set "
            "data.columns.words and data.columns.tags to them or, if they are data, set data.column_names"
        )


TASKS = (CustomTokenClassification(),)
