"""Token classification on words and tags in JSONL files, data sets, or columns that the configuration names.

CSV, TSV and CoNLL files have a row for each word, and an empty row after each sentence.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bert.config import TaskDataConfig
from bert.data.records import Records, is_dataset_dict
from bert.data.tables import file_suffix
from bert.errors import UserError, quoted, without_surrogates
from bert.tasks.columns import (
    KEYS,
    ColumnFilesTask,
    is_missing,
    label_text,
    left_out_note,
    split_names,
    split_path,
    split_records,
)
from bert.tasks.token_classification import conll
from bert.tasks.token_classification.conll import Reading, Sentences
from bert.tasks.token_classification.task import TAG_KEYS, TokenClassificationTask

SUFFIXES = (".jsonl", ".csv", ".tsv", ".conll", ".txt")

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

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data, SUFFIXES)

    def records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split that is not in columns."""
        return split_records(folder, split, self.data)

    def read(self, folder: Path, split: str) -> Sentences:
        folder, declared = Path(folder), tuple[str, ...]()
        if self._in_columns(folder, split):
            sentences = self._read_columns(folder, split)
        else:
            columns, records = self.data.columns, self.records(folder, split)
            names = (columns.words or "words", columns.tags or "tags")
            declared = records.declared_labels.get(names[1], ())
            sentences = read_sentences(records, *names, split != "test", self.reading, self.known_types)
        labels = conll.label_names(sentences, declared) if sentences.labelled else ()
        return dataclasses.replace(sentences, labels=labels)

    def _in_columns(self, folder: Path, split: str) -> bool:
        if is_dataset_dict(folder.as_posix()):
            return False
        return file_suffix(split_path(folder, split, self.data, SUFFIXES)) != ".jsonl"

    def _read_columns(self, folder: Path, split: str) -> Sentences:
        path = split_path(folder, split, self.data, SUFFIXES)
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
        return _in_conll_columns(sentences) if delimiter == "," else sentences

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


def _in_conll_columns(sentences: Sentences) -> Sentences:
    """Returns sentences whose columns are written with spaces, or with tabs if cells are empty or have spaces."""
    rows = (cells for sentence in sentences.columns or () for cells in sentence)
    odd = any(" " in cell or not cell for cells in rows for cell in cells)
    return dataclasses.replace(sentences, delimiter="\t" if odd else " ")


def _refuse_header(path: Path, rows: list[conll.Row]) -> None:
    """Raises UserError if the first row looks like a header, and its tag occurs only once."""
    line_number, cells = conll.first_row(rows)
    if cells and cells[0].lower() in NAMES_OF_WORDS and sum(row[-1:] == cells[-1:] for _, row in rows) == 1:
        raise UserError(
            f"{path}, line {line_number}: {cells[0]!r} and {cells[-1]!r} look like names of columns: set "
            "data.columns.words and data.columns.tags to them or, if they are data, set data.column_names"
        )


def read_sentences(
    records: Records,
    words: str,
    tags: str,
    needed: bool = True,
    reading: Reading = "error",
    types: Collection[str] | None = None,
) -> Sentences:
    """Returns the sentences of rows with a list of words and a list of tags.

    Words may be numbers and any texts, including white space. Rows without tags are skipped and counted in a note if
    they come from a data set or if the tags are class labels.

    Args:
      needed: whether tags are required; otherwise a split whose first row has no tags is a split to predict.
      reading, types: see `bert.tasks.token_classification.conll.read`.

    Raises:
      UserError: a row lacks a list, its lists have different lengths, or a tag is invalid.
    """
    sentence_words: list[list[str]] = []
    sentence_tags: list[list[str]] = []
    lines: list[int] = []
    labelled = True
    may_lack = records.unit == "row" or tags in records.declared_labels
    faults: list[tuple[int, UserError]] = []
    left_out: list[int] = []
    for index, (line_number, fields) in enumerate(records.rows):
        if not (needed or index):
            labelled = fields.get(tags) is not None
        required = {words: "data.columns.words", **({tags: "data.columns.tags"} if labelled else {})}
        try:
            records.require(line_number, list(fields), required)
            row_words = _words(records, line_number, words, fields[words])
            if labelled and may_lack and _lacks_tags(fields[tags]):
                left_out.append(line_number)
                continue
            row_tags = _tags(records, line_number, tags, fields[tags], len(row_words)) if labelled else []
        except UserError as error:
            faults.append((line_number, error))
            continue
        sentence_words.append(row_words)
        sentence_tags.append(row_tags)
        lines.append(line_number)
    records.require_sound(faults)
    if left_out:
        records.notes.append(left_out_note(records, left_out))
    if not any(sentence_words):
        raise UserError(f"{records.source} has no words: it needs a {records.unit} for each sentence")
    column_tags = sentence_tags if labelled else [[] for _ in sentence_words]
    columns = [_columns(*sentence) for sentence in zip(sentence_words, column_tags, strict=True)]
    path = Path(records.source)
    untagged = Sentences(
        sentence_words,
        None,
        conll.PLAIN,
        columns,
        lines,
        path=path,
        unit=records.unit,
        lines_a_word=0,
        remarks=tuple(records.notes),
    )
    untagged = _in_conll_columns(untagged)
    return conll.attach_tags(untagged, sentence_tags, reading, types) if labelled else untagged


def _words(records: Records, line_number: int, name: str, values: Any) -> list[str]:
    """Returns the words of a row. Raises UserError."""
    if not isinstance(values, list):
        raise records.error(line_number, f"{name} is {str(values)[:40]!r}: it must be a list of words")
    wrong = next((value for value in values if not isinstance(value, str | int | float)), "")
    if wrong != "":
        raise records.error(line_number, f"{name} has {repr(wrong)[:40]}: each word must be a text or a number")
    return [without_surrogates(value if isinstance(value, str) else json.dumps(value)) for value in values]


def _tags(records: Records, line_number: int, name: str, values: Any, count: int) -> list[str]:
    """Returns the tags of a row, one for each word. Raises UserError."""
    if not isinstance(values, list):
        raise records.error(line_number, f"{name} is {str(values)[:40]!r}: it must be a list of tags")
    if len(values) != count:
        raise records.error(line_number, f"{count} words, but {len(values)} {name}: write one for each word")
    return [label_text(records, line_number, name, value).strip() for value in values]


def _lacks_tags(values: Any) -> bool:
    return values is None or (isinstance(values, list) and any(map(is_missing, values)))


_LINE_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
NO_BREAK_SPACE = "\u00a0"


def _columns(words: Sequence[str], tags: Sequence[str]) -> list[list[str]]:
    """Returns a sentence as CoNLL columns. Characters that are invalid in columns become no-break spaces."""
    cells = [_LINE_BREAKS.sub(NO_BREAK_SPACE, word) for word in words]
    cells = [cell if cell.strip(" ") else NO_BREAK_SPACE * max(len(cell), 1) for cell in cells]
    return [list(row) for row in zip(cells, tags, strict=True)] if tags else [[cell] for cell in cells]


TASKS = (CustomTokenClassification(),)
