"""Custom tagging: words and tags in JSONL, in a data set, or in columns that the configuration names.

Columns are those of CSV, TSV and CoNLL files: a row for each word, an empty row behind each sentence.
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
"""Usual names of a column of words if none is configured: a first row with them is a header."""


@dataclass(frozen=True, kw_only=True)
class CustomTokenClassification(TokenClassificationTask, ColumnFilesTask):
    """A tag for each word; whether the tags mark entities, they tell themselves."""

    name: str = "tagging"
    data_keys = (*KEYS, *TAG_KEYS)

    def from_config(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(super().from_config(data), data=data)

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        """Of new inputs, which are texts and no columns of words."""
        return ()

    @property
    def words_column(self) -> str:
        return self.data.columns.words or "words"

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data, SUFFIXES)

    def records(self, folder: Path, split: str) -> Records:
        """The rows of a split that is not in columns, under the names that the configuration gives them."""
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
        delimiter, found = conll.column_rows(path, self.data.column_names)
        rows = list(found)
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
        """The names of the columns, whose row is taken out of ``rows``; None: they have none.

        Raises:
          UserError: there are names, or have to be, and those of the configuration are not among them.
        """
        line_number, cells = conll.first_row(rows)
        if not cells:
            return None
        if self.data.column_names is not None:
            names = self._given_names(split, f"{path}, line {line_number}", len(cells))
            if cells == names:
                rows.remove((line_number, cells))
            return names
        given = {key: name for key in ("words", "tags") if (name := getattr(self.data.columns, key)) is not None}
        wanted = given or {"words": "words", "tags": "tags"}
        trained = None if split != "test" or "words" in given else self._train_word(folder)
        if split == "test" and (given or trained or file_suffix(path) == ".csv"):  # it may lack the tags
            wanted = {"words": given.get("words") or trained or "words"}
        for key, name in wanted.items():
            if name not in cells:
                if not (given or trained or file_suffix(path) == ".csv"):
                    return None
                raise UserError(
                    f"{path}, line {line_number}: no {name!r} among {quoted(cells)}: set data.columns.{key} to the "
                    "right one, or name them all in their order as data.column_names"
                )
        if len(set(cells)) < len(cells):
            raise UserError(f"{path}, line {line_number}: the columns are {quoted(cells)}: give each its own name")
        rows.remove((line_number, cells))
        return cells

    def _given_names(self, split: str, location: str, width: int) -> list[str]:
        """data.column_names, for a test file of one column less without that of the tag."""
        names = list(self.data.column_names or ())
        if width != len(names) and not (split == "test" and width == len(names) - 1):
            raise UserError(f"{location}: {width} columns, and data.column_names names {len(names)}: name each of them")
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
        """The first row of the training file; empty where that is not in columns."""
        if not self._in_columns(folder, "train"):
            return []
        path = split_path(folder, "train", self.data, SUFFIXES)
        return conll.first_row(conll.column_rows(path, self.data.column_names)[1])[1]

    def _train_word(self, folder: Path) -> str | None:
        """What the training file calls the column of words; None where its columns have no names."""
        row = self._train_row(folder)
        path = split_path(folder, "train", self.data, SUFFIXES)
        names = self._names(folder, "train", path, [(1, row)])
        return None if names is None else names[self._column_index("words", 0, names)]


def _in_conll_columns(sentences: Sentences) -> Sentences:
    """To be written with spaces between the columns, with tabs where cells are empty or have spaces."""
    rows = (cells for sentence in sentences.columns or () for cells in sentence)
    odd = any(" " in cell or not cell for cells in rows for cell in cells)
    return dataclasses.replace(sentences, delimiter="\t" if odd else " ")


def _refuse_header(path: Path, rows: list[conll.Row]) -> None:
    """Raises UserError where the first row looks like names of columns, and its tag is that of no other word."""
    line_number, cells = conll.first_row(rows)
    if cells and cells[0].lower() in NAMES_OF_WORDS and sum(row[-1:] == cells[-1:] for _, row in rows) == 1:
        raise UserError(
            f"{path}, line {line_number}: {cells[0]!r} and {cells[-1]!r} look like names of columns: set "
            "data.columns.words and data.columns.tags to them or, if they are none, name the columns as "
            "data.column_names"
        )


def read_sentences(
    records: Records,
    words: str,
    tags: str,
    needed: bool = True,
    reading: Reading = "error",
    types: Collection[str] | None = None,
) -> Sentences:
    """The sentences of rows that hold a list of words and a list of tags.

    Words may be any texts, white space among them, and numbers. Rows of data sets, and of tags that are class labels,
    that lack a tag are left out and counted in a note.

    Args:
      needed: whether there have to be tags; otherwise a split whose first row has none is one to predict.
      reading, types: as for `bert.tasks.token_classification.conll.read`.

    Raises:
      UserError: place of a row without such lists, or with lists that are not equally long; and as `ner.read`.
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
        wanted = {words: "data.columns.words", **({tags: "data.columns.tags"} if labelled else {})}
        try:
            records.require(line_number, list(fields), wanted)
            found = _words(records, line_number, words, fields[words])
            if labelled and may_lack and _lacks_tags(fields[tags]):
                left_out.append(line_number)
                continue
            found_tags = _tags(records, line_number, tags, fields[tags], len(found)) if labelled else []
        except UserError as error:
            faults.append((line_number, error))
            continue
        sentence_words.append(found)
        sentence_tags.append(found_tags)
        lines.append(line_number)
    records.require_sound(faults)
    if left_out:
        records.notes.append(left_out_note(records, left_out))
    if not any(sentence_words):
        raise UserError(f"{records.source} has no words: it needs a {records.unit} for each sentence")
    column_tags = sentence_tags if labelled else [[] for _ in sentence_words]
    columns = [_columns(sentence, given) for sentence, given in zip(sentence_words, column_tags, strict=True)]
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
    """The words of a row, which may be none. Raises UserError."""
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
        raise records.error(line_number, f"{count} words and {len(values)} {name}: give each word one")
    return [label_text(records, line_number, name, value).strip() for value in values]


def _lacks_tags(values: Any) -> bool:
    return values is None or (isinstance(values, list) and any(map(is_missing, values)))


_LINE_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
NO_BREAK_SPACE = "\u00a0"


def _columns(words: Sequence[str], tags: Sequence[str]) -> list[list[str]]:
    """A sentence as CoNLL has it: a row for each word. What cannot stand in a column becomes no-break spaces."""
    cells = [_LINE_BREAKS.sub(NO_BREAK_SPACE, word) for word in words]
    cells = [cell if cell.strip(" ") else NO_BREAK_SPACE * max(len(cell), 1) for cell in cells]
    return [list(row) for row in zip(cells, tags, strict=True)] if tags else [[cell] for cell in cells]


TASKS = (CustomTokenClassification(),)
