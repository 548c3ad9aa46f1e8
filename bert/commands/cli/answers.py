"""Reads the inputs of `bert predict` and `bert generate`, and writes their answers."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from bert.data.corpus.files import numbered_lines
from bert.data.records import parse_record, read_records
from bert.data.tables import NOT_LINES, conversion, file_suffix, open_table
from bert.errors import UTF8_HINT, UserError
from bert.files import atomic_write
from bert.remote import exists, is_url, writable
from bert.runtime.process import is_stdout_closed

if TYPE_CHECKING:
    from bert.tasks.base import Task


LINES_AT_ONCE = 1024
READ_AT_ONCE = 1 << 20

NOT_UTF8 = f"not UTF-8: {UTF8_HINT}"
EMPTY_LINE = "an empty line: write a row or remove the line"

Numbered = Iterator[tuple[int, str]]
"""(number from 1, line without its end); invalid UTF-8 bytes are lone surrogates."""


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


def read_inputs(name: str, task: Task) -> Iterator[list[Input]]:
    """Reads the inputs of a file, or of standard input (``-``) as they arrive, in lists.

    Raises:
      UserError: the file is unsupported, damaged or empty, or a table lacks columns of the task.
    """
    if name == "-":
        return read_standard_input(task.parse_line)
    path = Path(name)
    suffix = file_suffix(path)
    if suffix in (".csv", ".tsv", ".conll") and (sentences := _sentences(path, task)) is not None:
        return iter(lambda: list(itertools.islice(sentences, LINES_AT_ONCE)), [])
    if suffix in NOT_LINES:
        raise UserError(
            f"{path} does not hold one input a line: write them to a text, .csv, .tsv or .jsonl file, or name a split "
            f"of the run's data{conversion(path)}"
        )
    inputs: Iterator[Input]
    if suffix == ".parquet":
        rows = read_records(path).rows
        inputs = (_row(number, json.dumps(fields, default=str), fields, task) for number, fields in rows)
    elif suffix in (".csv", ".tsv"):
        inputs = _without_blanks_at_end(_table_inputs(path, task))
    elif suffix == ".jsonl":
        inputs = _without_blanks_at_end(_json_input(*line, task) for line in _lines(path))
    else:
        inputs = (_text(*line, task.parse_line) for line in _lines(path))
    return _not_empty(iter(lambda: list(itertools.islice(inputs, LINES_AT_ONCE)), []), name)


def _sentences(path: Path, task: Task) -> Iterator[Input] | None:
    """Returns the inputs of a file with one row per word; None for other tasks and files."""
    sentences = task.read_inputs(path)
    return None if sentences is None else (Input(line, " ".join(words), words) for line, words in sentences)


def read_standard_input(parse: Callable[[str], Any]) -> Iterator[list[Input]]:
    """Reads one input per line of standard input, in lists as they arrive.

    Args:
      parse: converts a line to an input; raises ValueError with a message.

    Raises:
      UserError: there is no line.
    """
    chunks = _decode_lines(lines_as_they_come(cast(io.BufferedReader, sys.stdin.buffer)))
    return _not_empty(([_text(*line, parse) for line in chunk] for chunk in chunks), "standard input")


def lines_as_they_come(file: io.BufferedReader) -> Iterator[list[bytes]]:
    """Yields up to LINES_AT_ONCE available lines without waiting, so that clients can wait for each answer."""
    rest = b""
    while data := file.read1(READ_AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        for start in range(0, len(lines), LINES_AT_ONCE):
            yield lines[start : start + LINES_AT_ONCE]
    if rest:
        yield [rest]


def _decode_lines(chunks: Iterator[list[bytes]]) -> Iterator[list[tuple[int, str]]]:
    line_number = 0
    for chunk in chunks:
        chunk[0] = chunk[0].removeprefix(b"" if line_number else b"\xef\xbb\xbf")
        lines = [raw.decode(errors="surrogateescape").rstrip("\r\n") for raw in chunk]
        yield list(enumerate(lines, start=line_number + 1))
        line_number += len(chunk)


def _lines(path: Path) -> Numbered:
    return numbered_lines(path, utf_16=True, errors="surrogateescape")


def _not_empty(chunks: Iterator[list[Input]], name: str) -> Iterator[list[Input]]:
    first = next(chunks, None)
    if first is None:
        raise UserError(f"{name} holds no input: write one on each line")
    yield first
    yield from chunks


def _text(line_number: int, line: str, parse: Callable[[str], Any]) -> Input:
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


def _json_input(line_number: int, line: str, task: Task) -> Input:
    if not line.strip():
        return Input(line_number, line, error=EMPTY_LINE)
    if not _is_utf8(line):
        return Input(line_number, _shown(line), error=NOT_UTF8)
    try:
        fields = parse_record(line)
    except ValueError as error:
        return Input(line_number, line, error=str(error))
    return _row(line_number, line, fields, task)


def _row(line_number: int, text: str, fields: Mapping[str, Any], task: Task) -> Input:
    id = {name: fields[name] for name in task.id_columns if name in fields}
    try:
        return Input(line_number, text, task.input_of_row(fields), id)
    except ValueError as error:
        return Input(line_number, text, id=id, error=str(error))


def _table_inputs(path: Path, task: Task) -> Iterator[Input]:
    """Reads the inputs below the header, or all lines if the configuration names the columns."""
    column_names = task.unnamed_table_columns
    dialect, rows = open_table(path, column_names or None, errors="surrogateescape")
    line_number, first = next(rows, (1, []))
    if isinstance(first, str):
        raise UserError(f"{path}, line {line_number}: {first}")
    names = [name.strip() for name in first]
    if names and not _has_names(names, path, line_number, task):
        names, rows = list(column_names), itertools.chain([(line_number, first)], rows)
    return (_table_row(line_number, cells, names, dialect.delimiter, task) for line_number, cells in rows)


def _has_names(first: list[str], path: Path, line_number: int, task: Task) -> bool:
    """Returns True if the first line names the columns, False if the configuration does and the width fits."""
    try:
        text_columns = task.columns_among(first)
    except ValueError as error:
        if len(task.unnamed_table_columns) != len(first):
            raise UserError(f"{path}, line {line_number}: {error}") from None
        return False
    repeated = next((name for name in text_columns if first.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{path}, line {line_number}: two columns have the name {repeated!r}: give each its own name")
    return True


def _table_row(line_number: int, cells: list[str] | str, names: list[str], delimiter: str, task: Task) -> Input:
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


def write_answers(
    source: str,
    chunks: Iterator[list[Input]],
    answer: Callable[[list[Input]], list[Any]],
    lines_of: Callable[[Input, Any], Iterable[dict[str, Any]]],
    output: str | None,
) -> None:
    """Writes the answers of each input, or one line with its error.

    Args:
        source: file of the inputs, or - for standard input, for messages.
        chunks: lists of inputs that are answered together.
        answer: returns the answers of some inputs; raises UserError if one is invalid.
        lines_of: returns the JSON objects of an answer.
        output: file, written atomically; None for standard output.

    Raises:
        UserError: an input was invalid; raised at the end.
    """
    count, failed, first = 0, 0, ""
    with open_output(output) as written:
        for inputs in chunks:
            for item, result in zip(inputs, _answers_or_errors(inputs, answer), strict=True):
                count += 1
                if isinstance(result, str):
                    failed, first = failed + 1, first or f"line {item.line}: {result}"
                    lines: Iterable[dict[str, Any]] = [item._replace(error=result).failed()]
                else:
                    lines = lines_of(item, result)
                for line in lines:
                    written.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            written.flush()
    if failed:
        name = "standard input" if source == "-" else source
        raise UserError(f"{name}: {failed} of {count} inputs have no answer, the first on {first}")


def _answers_or_errors(inputs: list[Input], answer: Callable[[list[Input]], list[Any]]) -> list[Any]:
    """Returns the answer or error message of each input. If an input is invalid, each is answered separately."""
    answers: list[Any] = [item.error for item in inputs]
    indices = [i for i, item in enumerate(inputs) if item.error is None]
    try:
        results = answer([inputs[i] for i in indices])
    except UserError:
        results = [_answer_or_error(inputs[i], answer) for i in indices]
    for i, one in zip(indices, results, strict=True):
        answers[i] = one
    return answers


def _answer_or_error(item: Input, answer: Callable[[list[Input]], list[Any]]) -> Any:
    try:
        return answer([item])[0]
    except UserError as error:
        return str(error)


def check_output(name: str | None) -> None:
    """Raises UserError if the file exists or its folder does not, before anything is computed."""
    if name is None:
        return
    if exists(name):
        raise UserError(f"{name} exists already: name another --output or remove it")
    if not is_url(name) and not (folder := Path(name).parent).is_dir():
        raise UserError(f"{folder} is not a folder: make it, or name another --output")


@contextlib.contextmanager
def open_output(name: str | None) -> Iterator[IO[bytes]]:
    """Opens standard output, or a file that is written atomically."""
    if name is None:
        if is_stdout_closed():
            raise UserError("standard output is closed: open it, or name a file with --output")
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with writable(name) as path, atomic_write(path) as partial, partial.open("wb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror}): name another --output") from None
