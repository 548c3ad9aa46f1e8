"""Reads the files of inputs that a task answers: lines of text, tables and rows of words."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bert.data.corpus.files import numbered_lines
from bert.data.records import parse_record, read_records
from bert.data.tables import NOT_LINES, conversion, file_suffix, open_table
from bert.errors import UTF8_HINT, UserError

NOT_UTF8 = f"not UTF-8: {UTF8_HINT}"
EMPTY_LINE = "an empty line: write a row or remove the line"


class Input(NamedTuple):
    """One input, or the error of an invalid one."""

    line: int
    """Line number from 1; for a CSV row, the number of its first line."""
    text: str
    """The line, for messages."""
    value: Any = None
    """Input of `Pretrained.predict`."""
    id: Mapping[str, Any] = {}
    """Name and value of a table's id column."""
    error: str | None = None

    def failed(self) -> dict[str, Any]:
        """Returns the fields that replace an answer."""
        return {**self.id, "line": self.line, "text": self.text, "error": self.error}


class InputFormat(Protocol):
    """The inputs of a task: see `bert.tasks.base.Task`."""

    @property
    def id_columns(self) -> tuple[str, ...]: ...

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]: ...

    def read_inputs(self, path: Path) -> Iterator[tuple[int, Any]] | None: ...

    def parse_line(self, line: str) -> Any: ...

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]: ...

    def input_of_row(self, fields: Mapping[str, Any]) -> Any: ...


Numbered = Iterator[tuple[int, str]]
"""(number from 1, line without its end); invalid UTF-8 bytes are lone surrogates."""


def read_input_file(path: Path, task: InputFormat) -> Iterator[Input]:
    """Yields the inputs of a file.

    Raises:
      UserError: the file is unsupported or damaged, or a table lacks columns of the task.
    """
    suffix = file_suffix(path)
    if suffix in (".csv", ".tsv", ".conll") and (sentences := _sentences(path, task)) is not None:
        return sentences
    if suffix in NOT_LINES:
        raise UserError(
            f"{path} does not hold one input a line: write them to a text, .csv, .tsv or .jsonl file, or name a split "
            f"of the run's data{conversion(path)}"
        )
    if suffix == ".parquet":
        rows = read_records(path).rows
        return (_row(number, json.dumps(fields, default=str), fields, task) for number, fields in rows)
    if suffix in (".csv", ".tsv"):
        return _without_blanks_at_end(_table_inputs(path, task))
    if suffix == ".jsonl":
        return _without_blanks_at_end(_json_input(*line, task) for line in _lines(path))
    return (parse_text(*line, task.parse_line) for line in _lines(path))


def _sentences(path: Path, task: InputFormat) -> Iterator[Input] | None:
    """Returns the inputs of a file with one row per word; None for other tasks and files."""
    sentences = task.read_inputs(path)
    return None if sentences is None else (Input(line, " ".join(words), words) for line, words in sentences)


def _lines(path: Path) -> Numbered:
    return numbered_lines(path, utf_16=True, errors="surrogateescape")


def parse_text(line_number: int, line: str, parse: Callable[[str], Any]) -> Input:
    """Parses a line of text."""
    if not _is_utf8(line):
        return Input(line_number, _shown(line), error=NOT_UTF8)
    try:
        return Input(line_number, line, parse(line))
    except ValueError as error:
        return Input(line_number, line, error=str(error))


def _is_utf8(line: str) -> bool:
    return _shown(line) == line


def _shown(line: str) -> str:
    """Returns the line with U+FFFD for invalid UTF-8."""
    return line.encode(errors="surrogateescape").decode(errors="replace")


def _json_input(line_number: int, line: str, task: InputFormat) -> Input:
    if not line.strip():
        return Input(line_number, line, error=EMPTY_LINE)
    if not _is_utf8(line):
        return Input(line_number, _shown(line), error=NOT_UTF8)
    try:
        fields = parse_record(line)
    except ValueError as error:
        return Input(line_number, line, error=str(error))
    return _row(line_number, line, fields, task)


def _row(line_number: int, text: str, fields: Mapping[str, Any], task: InputFormat) -> Input:
    id = {name: fields[name] for name in task.id_columns if name in fields}
    try:
        return Input(line_number, text, task.input_of_row(fields), id)
    except ValueError as error:
        return Input(line_number, text, id=id, error=str(error))


def _table_inputs(path: Path, task: InputFormat) -> Iterator[Input]:
    """Reads the inputs below the header, or all lines if the configuration names the columns."""
    column_names = task.unnamed_table_columns
    dialect, rows = open_table(path, column_names or None, errors="surrogateescape")
    line_number, first = next((row for row in rows if row[1]), (1, []))
    if isinstance(first, str):
        raise UserError(f"{path}, line {line_number}: {first}")
    names = [name.strip() for name in first]
    if names and not _has_names(names, path, line_number, task):
        names, rows = list(column_names), itertools.chain([(line_number, first)], rows)
    return (_table_row(line_number, cells, names, dialect.delimiter, task) for line_number, cells in rows)


def _has_names(first: list[str], path: Path, line_number: int, task: InputFormat) -> bool:
    """Returns True if the first line names the columns, False if the configuration does and the width fits."""
    try:
        text_columns = task.columns_among(first)
    except ValueError as error:
        if len(task.unnamed_table_columns) != len(first):
            fix = "or write one input per line to a .txt file"
            raise UserError(f"{path}, line {line_number}: {error}, {fix}") from None
        return False
    repeated = next((name for name in text_columns if first.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{path}, line {line_number}: two columns have the name {repeated!r}: give each its own name")
    return True


def _table_row(line_number: int, cells: list[str] | str, names: list[str], delimiter: str, task: InputFormat) -> Input:
    if isinstance(cells, str):
        return Input(line_number, "", error=cells)
    if not cells:
        return Input(line_number, "", error=EMPTY_LINE)
    text = delimiter.join(cells)
    if not _is_utf8(text):
        return Input(line_number, _shown(text), error=NOT_UTF8)
    if len(cells) != len(names):
        columns = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        return Input(line_number, text, error=f"{columns}, but the header has {len(names)}: fix or remove the line")
    return _row(line_number, text, dict(zip(names, cells, strict=True)), task)


def _without_blanks_at_end(rows: Iterator[Input]) -> Iterator[Input]:
    """Drops the empty lines after the last row."""
    blanks: list[Input] = []
    for row in rows:
        if row.error == EMPTY_LINE:
            blanks.append(row)
            continue
        yield from blanks
        blanks.clear()
        yield row
