"""Tables in TSV and CSV files: how their cells are separated and quoted, and their rows.

The delimiter of a CSV file (comma, tab or semicolon) is that of its first row; a quoted cell may hold delimiters,
doubled quotes and line ends. TSV has no quoting, as in GLUE (a ``"`` is a character, a line is a row), unless all its
quotes are those of a CSV writer.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert.data.corpus.files import DECOMPRESSORS, numbered_lines
from bert.errors import UserError

if TYPE_CHECKING:
    pass

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}
"""Between the cells of a ``.csv`` file; the first that fits is taken."""

CELL_LIMIT = 2**31 - 1
"""Longest cell in characters: the largest number that the csv module takes on every platform."""

_CELL = re.compile(r'"([^"]*(?:""[^"]*)*)"|[^"\t]*')

Table = Iterator[tuple[int, list[str]]]
"""(line number, cells) of the rows of a table."""

FaultyTable = Iterator[tuple[int, list[str] | str]]
"""Like `Table`, with a message in place of the cells of a row that cannot be read."""

TABLES = (".tsv", ".txt", ".csv")
"""Ends of the names of tables."""

NOT_LINES = (".json", ".conll", ".parquet", ".arrow", ".xlsx", ".zip")
"""Ends of names of files that do not have one text, or one row, a line."""

CONVERSIONS = {
    ".xlsx": "save the sheet as CSV",
    ".xls": "save the sheet as CSV",
    ".ods": "save the sheet as CSV",
    ".parquet": "convert it, for example with pandas.read_parquet(FILE).to_csv('train.csv', index=False)",
    ".arrow": "save the whole data set with save_to_disk and set data.dir to its folder",
    ".json": "write one JSON object on each line of a .jsonl file, for example with jq -c '.[]'",
    ".zip": "unpack it",
}
"""End of the name of a file that is not read -> how to get one that is."""


class Dialect(NamedTuple):
    """How a table is written."""

    delimiter: str
    quoted: bool
    """Whether a quoted cell may hold delimiters, doubled quotes and line ends; otherwise a ``"`` is a character."""


def detect_dialect(lines: Iterable[str], is_csv: bool, header: Sequence[str] | None = None) -> Dialect:
    """The dialect of a file.

    A ``.csv`` file has the delimiter of its first row. A table with tabs is quoted only if `is_quoted`, whatever the
    file is called.

    Args:
      lines: the lines of the file, without their ends.
      is_csv: whether the file is called ``.csv``; otherwise the delimiter is a tab.
      header: the names of the columns of a file whose first row does not have them.
    """
    lines = iter(lines)
    first = next(lines, "")
    delimiter = _delimiter(first, 0 if header is None else len(header)) if is_csv else "\t"
    return Dialect(delimiter, delimiter != "\t" or is_quoted(itertools.chain([first], lines)))


def csv_reader(lines: Iterable[str], delimiter: str = ",", strict: bool = True) -> Any:
    """A `csv.reader` that has no limit on the length of a cell and, if ``strict``, accepts no unsound quotes."""
    csv.field_size_limit(CELL_LIMIT)  # a setting of the module: there is none of the reader
    return csv.reader(lines, delimiter=delimiter, strict=strict)


def is_quoted(lines: Iterable[str]) -> bool:
    """Whether a table with tabs is quoted in the way of a CSV writer (pandas, Excel).

    In such a file a ``"`` occurs only in cells that are enclosed in quotes as a whole, with each quote inside doubled,
    and a cell is enclosed because it needs it (a tab, a line end or a quote inside; for Excel also a comma), or all
    texts are, the header among them. One cell with any other quote, as in the files of GLUE, makes all quotes
    characters.
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
            return False  # each line is a row by itself
        pending = []
    return not pending and (evidence or everything)


def _unquote(row: Sequence[str]) -> list[str | None] | None:
    """What is in the quotes of each cell of a row, None for a cell without quotes; None for an unsound row."""
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


def _delimiter(first: str, width: int) -> str:
    """The delimiter that divides a first row into ``width`` cells, or else (also where ``width`` is 0) into several."""
    rows = {delimiter: csv_reader([first.replace("\r", " ")], delimiter, strict=False) for delimiter in DELIMITERS}
    counts = {delimiter: len(next(row, ())) for delimiter, row in rows.items()}
    fitting = [delimiter for delimiter, count in counts.items() if count == width]
    return next(iter([*fitting, *(delimiter for delimiter, count in counts.items() if count > 1)]), ",")


def conversion(path: Path) -> str:
    """Returns how to convert a file by the end of its name, as the end of a message; nothing if that is not known."""
    fix = CONVERSIONS.get(file_suffix(path))
    return "" if fix is None else f"; {fix}"


def file_suffix(path: Path) -> str:
    """The end of a file's name in lower case, without that of a packed file: ``.csv`` of train.csv.gz; ``.ndjson`` is
    ``.jsonl``."""
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
      UserError: with the file and line; also while the rows are read.
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
      errors: the error handler of `bytes.decode` for bytes that are not UTF-8. With any other than strict, NUL
        characters are accepted as well.
    """
    dialect = Dialect("\t", quoted=False) if literal_quotes else table_dialect(path, header, errors)
    lines = numbered_lines(path, utf_16=True, errors=errors)
    if errors == "strict":
        lines = _without_nul(path, lines)
    if dialect.quoted:
        return dialect, _quoted_rows(csv_reader((f"{line}\n" for _, line in lines), dialect.delimiter))
    return dialect, ((line_number, line.split("\t") if line else []) for line_number, line in lines)


def table_dialect(path: Path, header: Sequence[str] | None = None, errors: str = "strict") -> Dialect:
    """Returns the delimiter of a ``.tsv``, ``.txt`` or ``.csv`` file, and whether it is quoted."""
    with contextlib.closing(numbered_lines(path, utf_16=True, errors=errors)) as lines:
        return detect_dialect((line for _, line in lines), file_suffix(path) == ".csv", header)


def _without_nul(path: Path, lines: Iterable[tuple[int, str]]) -> Generator[tuple[int, str], None, None]:
    for line_number, line in lines:
        if "\0" in line:
            raise UserError(
                f"{path}, line {line_number}: a NUL character, the file is damaged or not UTF-8: copy it again"
            )
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
