"""Reads tables in TSV and CSV files: detects how cells are separated and quoted, and splits lines into cells.

The first row of a CSV file determines its delimiter (comma, tab or semicolon); a quoted cell may hold delimiters,
doubled quotes and line ends. TSV has no quoting, as in GLUE (a ``"`` is a character, a line is a row), unless all its
quotes look as if written by a CSV writer.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.corpus.files import DECOMPRESSORS, numbered_lines
from bert.errors import UserError

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}
"""Delimiters of ``.csv`` files, in order of preference."""

CELL_LIMIT = 2**31 - 1
"""Maximum characters of a cell: the largest limit that the csv module accepts on every platform."""

_CELL = re.compile(r'"([^"]*(?:""[^"]*)*)"|[^"\t]*')

Table = Iterator[tuple[int, list[str]]]
"""(line number, cells) of the rows of a table."""

FaultyTable = Iterator[tuple[int, list[str] | str]]
"""Like `Table`, with a message in place of the cells of a row that cannot be read."""

TABLES = (".tsv", ".txt", ".csv")
"""Suffixes of tables."""

NOT_LINES = (".json", ".conll", ".arrow", ".xlsx", ".xls", ".ods", ".zip")
"""Suffixes of files that do not have one text or row per line."""

CONVERSIONS = {
    ".xlsx": "save the sheet as CSV",
    ".xls": "save the sheet as CSV",
    ".ods": "save the sheet as CSV",
    ".arrow": "save the whole data set with save_to_disk and set data.dir to its folder",
    ".json": "write one JSON object on each line of a .jsonl file, for example with jq -c '.[]'",
    ".zip": "unpack it",
}
"""Suffix of a file that cannot be read -> how to convert it."""


class Dialect(NamedTuple):
    """The delimiter and quoting of a table."""

    delimiter: str
    quoted: bool
    """If true, a quoted cell may hold delimiters, doubled quotes and line ends; otherwise ``"`` is a character."""


def detect_dialect(lines: Iterable[str], is_csv: bool, header: Sequence[str] | None = None) -> Dialect:
    """Returns the dialect of a file. A table with tabs is quoted only if `is_quoted`, also in a ``.csv`` file.

    Args:
      is_csv: whether the file is called ``.csv``; otherwise the delimiter is a tab.
      header: names of the columns of a file whose first row does not have them.
    """
    lines, ahead = itertools.tee(lines)
    first = list(itertools.islice((line for line in ahead if line.strip("\r\n")), 2)) or [""]
    del ahead  # or all lines would be kept for it
    delimiter = _delimiter(first, 0 if header is None else len(header)) if is_csv else "\t"
    return Dialect(delimiter, delimiter != "\t" or is_quoted(lines))


def csv_reader(lines: Iterable[str], delimiter: str = ",", strict: bool = True) -> Any:
    """Returns a `csv.reader` without a limit on the length of a cell; if ``strict``, it rejects misplaced quotes."""
    csv.field_size_limit(CELL_LIMIT)  # the limit is a global setting of the module
    return csv.reader(lines, delimiter=delimiter, strict=strict)


def is_quoted(lines: Iterable[str]) -> bool:
    """Returns whether a table with tabs was quoted by a CSV writer (pandas, Excel).

    In such a file a ``"`` occurs only in cells that are completely enclosed in quotes, with inner quotes doubled.
    Either a cell is enclosed because it contains a tab, a line end or a quote (for Excel also a comma), or all texts
    are enclosed, including the header. One cell with any other quote, as in the files of GLUE, makes all quotes
    ordinary characters.
    """
    width, evidence, everything, odd = 0, False, False, False
    pending: list[str] = []
    for line in lines:
        if '"' not in line and not pending:
            width = width or line.count("\t") + 1
            continue
        pending.append(line)
        odd ^= line.count('"') % 2 == 1
        if odd:
            continue  # a quote is open: the row continues on the next line
        cells = _unquote(pending)
        if cells is None or width not in (0, len(cells)):
            return False
        everything = everything or (not width and None not in cells)
        width = len(cells)
        inner = [cell for cell in cells if cell]
        evidence = evidence or any(set(cell) & set('\t\r\n"') for cell in inner)
        if not everything and not all(set(cell) & set('\t\r\n",;') for cell in inner):
            return False
        if len(pending) > 1 and all(line.count("\t") + 1 == width for line in pending):
            return False  # each line is a row
        pending = []
    return not pending and (evidence or everything)


def _unquote(row: Sequence[str]) -> list[str | None] | None:
    """Returns the quoted text of each cell of a row, None for cells without quotes; None for a malformed row."""
    text, offset = "\n".join(row), 0
    cells: list[str | None] = []
    while True:
        match = _CELL.match(text, offset)
        if match is None or text[match.end() : match.end() + 1] not in ("", "\t"):
            return None
        cells.append(match[1])
        if match.end() == len(text):
            return cells
        offset = match.end() + 1


def _delimiter(first: Sequence[str], width: int) -> str:
    """Returns the delimiter that splits the first of two lines into ``width`` cells.

    If none does, it splits the first line into several cells, and if possible the second one into as many.
    """

    def cells(line: str, delimiter: str) -> int:
        return len(next(csv_reader([line.replace("\r", " ")], delimiter, strict=False), ()))

    counts = {delimiter: [cells(line, delimiter) for line in first] for delimiter in DELIMITERS}
    fitting = [delimiter for delimiter, (count, *_) in counts.items() if count == width]
    several = [delimiter for delimiter, (count, *_) in counts.items() if count > 1]
    best = sorted(several, key=lambda delimiter: (len(set(counts[delimiter])) > 1, -counts[delimiter][0]))
    return next(iter([*fitting, *best]), ",")


def conversion(path: Path) -> str:
    """Returns how to convert a file in an unsupported format, as the end of a message; "" if unknown."""
    fix = CONVERSIONS.get(file_suffix(path))
    return "" if fix is None else f"; {fix}"


def file_suffix(path: Path) -> str:
    """Returns a file's suffix in lower case, without the suffix of a compressed file: ``.csv`` for train.csv.gz.

    ``.ndjson`` is returned as ``.jsonl``.
    """
    name = path.name.lower()
    suffix = Path(name.removesuffix(next((packed for packed in DECOMPRESSORS if name.endswith(packed)), ""))).suffix
    return ".jsonl" if suffix == ".ndjson" else suffix


def table_rows(
    path: Path, header: Sequence[str] | None = None, literal_quotes: bool = False, keep_empty: bool = False
) -> tuple[Table, list[str]]:
    """Returns the rows of a ``.tsv``, ``.txt`` or ``.csv`` file, the header among them, and notes on its dialect.

    Args:
      header, literal_quotes: see `read_records`.
      keep_empty: return an empty line between others as a row of one empty cell; otherwise it is an error.

    Raises:
      UserError: the table is invalid (with file and line); also raised while the rows are read.
    """
    dialect, rows = open_table(path, header, literal_quotes)
    notes = []
    if dialect.delimiter != "," and file_suffix(path) == ".csv":
        notes = [f"{path}: read as columns between {DELIMITERS[dialect.delimiter]}"]
    if dialect.delimiter == "\t" and dialect.quoted:
        notes.append(f"{path}: read as quoted in the way of CSV: the quotes around cells are removed")
    return _sound_rows(path, rows, dialect.quoted, keep_empty), notes


def open_table(
    path: Path, header: Sequence[str] | None = None, literal_quotes: bool = False, errors: str = "strict"
) -> tuple[Dialect, FaultyTable]:
    """Returns the dialect of a table and its rows, in which an empty line is a row without cells.

    Args:
      header, literal_quotes: see `read_records`.
      errors: the error handler of `bytes.decode` for bytes that are not UTF-8. With any handler except strict, NUL
        characters are accepted as well.
    """
    dialect = Dialect("\t", quoted=False) if literal_quotes else table_dialect(path, header, errors)
    lines = numbered_lines(path, utf_16=True, errors=errors, keep_ends=dialect.quoted)  # cells may have line ends
    if errors == "strict":
        lines = _without_nul(path, lines)
    if dialect.quoted:
        return dialect, _quoted_rows(csv_reader((line for _, line in lines), dialect.delimiter))
    return dialect, ((line_number, line.split("\t") if line else []) for line_number, line in lines)


def table_dialect(path: Path, header: Sequence[str] | None = None, errors: str = "strict") -> Dialect:
    """Returns the delimiter of a ``.tsv``, ``.txt`` or ``.csv`` file, and whether it is quoted."""
    with contextlib.closing(numbered_lines(path, utf_16=True, errors=errors)) as lines:
        return detect_dialect((line for _, line in lines), file_suffix(path) == ".csv", header)


def _without_nul(path: Path, lines: Iterable[tuple[int, str]]) -> Generator[tuple[int, str], None, None]:
    for line_number, line in lines:
        if "\0" in line:
            fault = "a NUL character, the file is damaged or not UTF-8"
            raise UserError(f"{path}, line {line_number}: {fault}: copy it again")
        yield line_number, line


def _quoted_rows(reader: Any) -> FaultyTable:
    """Yields the rows of a `csv_reader` with the number of the line where each begins."""
    while True:
        line_number = reader.line_num + 1
        try:
            yield line_number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "new-line character" in str(error):
                fix = "end lines with a line feed, or put the cell in quotes"
                yield line_number, f"a carriage return within the line: {fix}"
            else:
                yield line_number, f"not CSV ({error}): fix its quotes"


def _sound_rows(path: Path, rows: FaultyTable, quoted: bool, keep_empty: bool) -> Table:
    """Yields the rows that are not empty. Raises UserError for a faulty row and, without quotes, for an empty line."""
    empty: list[int] = []  # numbers of empty lines, which may end a file
    for line_number, cells in rows:
        if isinstance(cells, str):
            raise UserError(f"{path}, line {line_number}: {cells}")
        if not cells:
            if not quoted:
                empty.append(line_number)
            continue
        if empty and (not keep_empty or empty[0] == 1):
            raise UserError(f"{path}, line {empty[0]}: the line is empty: remove it")
        yield from ((number, [""]) for number in empty)
        empty = []
        yield line_number, cells
