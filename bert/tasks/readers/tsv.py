"""Tab-separated files as GLUE has them: no quoting (a ``"`` is a character), UTF-8, columns found by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bert.errors import UserError, convert


class Table(NamedTuple):
    """A file's column names, and its rows: (line number, cells)."""

    names: list[str]
    rows: Iterator[tuple[int, list[str]]]
    described: str
    """Where the number of columns comes from, for sentences."""

    def places(self, path: Path, wanted: Sequence[str]) -> list[int]:
        """Where the ``wanted`` columns stand. Raises UserError where one is missing."""
        if missing := [name for name in wanted if name not in self.names]:
            raise UserError(
                f"{path}, line 1: no column {missing[0]!r} among {', '.join(map(repr, self.names))[:200]}: "
                f"the first line must name {', '.join(map(repr, wanted))}, with a tab between two names"
            )
        return [self.names.index(name) for name in wanted]


def read_table(
    path: Path, source: str, columns: Sequence[str] = (), needed: Sequence[str] = (), keep_empty: bool = False
) -> Table:
    """Opens a file.

    Args:
      path: the file.
      source: what it is a copy of, for sentences.
      columns: of a file whose first line is no header; without any, the first line names the columns.
      needed: if the first line holds all these words, it is a header in spite of ``columns``.
      keep_empty: whether an empty line between others is a row, of one empty cell, and not an error.

    Raises:
      UserError: the file is empty, or a line is not text.
    """
    lines = ((number, line.split("\t")) for number, line in read_lines(path, keep_empty))
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path} is empty: copy it again from the original {source} data")
    if columns and not set(needed) <= set(first[1]):
        return Table(list(columns), itertools.chain([first], lines), f"there should be {len(columns)}")
    return Table(first[1], lines, f"the header has {len(first[1])}")


def decoded(raw: bytes, path: Path, number: int) -> str:
    """A line of UTF-8, the first one without a byte order mark. Raises UserError with the place of what is none."""
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8: {convert(raw)}") from None


def read_lines(path: Path, keep_empty: bool = False) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, without its end, byte order mark and empty lines at the end.

    Other empty lines are an error, or with ``keep_empty``, but for the first of the file, lines like any other.
    Only ``\\n`` ends a line: sentences hold U+2028, U+0085 and their like. A ``\\r`` right before it belongs
    to it; elsewhere it is white space like any other. A NUL means that the file is no text or was damaged.
    """
    empty = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = decoded(raw, path, number)
            if "\0" in line:
                raise UserError(
                    f"{path}, line {number}: a NUL character, the file is damaged or not UTF-8: copy it again"
                )
            line = line.removesuffix("\n").removesuffix("\r")
            if not line:
                empty += 1
                continue
            first_empty = number - empty
            if empty and (not keep_empty or first_empty == 1):
                raise UserError(f"{path}, line {first_empty}: the line is empty: remove it")
            yield from ((before, "") for before in range(first_empty, number))
            empty = 0
            yield number, line


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Writes cells with tabs between them, a line a row; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path
