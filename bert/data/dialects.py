"""How the cells of a table are separated and quoted, decided from the file itself."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons"}
"""Between the cells of a ``.csv`` file; the first that fits is taken."""

CELL_LIMIT = 2**31 - 1
"""Longest cell in characters: the largest number that the csv module takes on every platform."""

_CELL = re.compile(r'"([^"]*(?:""[^"]*)*)"|[^"\t]*')


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
