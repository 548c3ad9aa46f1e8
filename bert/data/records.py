"""Labelled data as rows with named fields, one at a time: TSV, CSV and JSONL files, plain or packed, and data sets.

TSV has no quoting, as in GLUE: a ``"`` is a character, a line is a row. CSV has the csv module's: a quoted cell may
hold commas, doubled quotes and line ends. In both the first line names the columns, unless the names are given.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert.config import HUB, UserError
from bert.data.formats import OPENERS, numbered_lines

if TYPE_CHECKING:
    from datasets import DatasetDict

Rows = Iterator[tuple[int, Mapping[str, Any]]]
"""(number of the line or row, its fields)."""


@dataclass(frozen=True)
class Records:
    """The rows of one file, or of one split of a data set. They are read as they are asked for, once."""

    place: str
    """Where they are from, for sentences."""
    rows: Rows
    names: tuple[str, ...] | None = None
    """The fields that every row has; None where each row names its own."""
    unit: str = "line"
    """What the rows' numbers count, from 1."""

    def error(self, number: int, what: str) -> UserError:
        """The error for a row."""
        return UserError(f"{self.place}, {self.unit} {number}: {what}")

    def require(self, number: int, fields: Sequence[str], wanted: Mapping[str, str]) -> None:
        """Raises UserError where a row (or, number 1, the header) lacks a field.

        Args:
          fields: the names that are there.
          wanted: name that has to be there -> configuration key that says so.
        """
        for name, key in wanted.items():
            if name not in fields:
                there = ", ".join(map(repr, fields))
                raise self.error(number, f"no {name!r} among {there[:200]}: set {key} to the right one")


def read_records(path: Path, header: Sequence[str] | None = None) -> Records:
    """The rows of a ``.tsv`` (or ``.txt``), ``.csv`` or ``.jsonl`` file, packed or not.

    Args:
      header: the columns of a file whose first line does not name them.

    Raises:
      UserError: a name of another kind, an empty file; while reading: the line, what is wrong with it, and the mend.
    """
    kind = kind_of(path)
    if kind not in KINDS:
        raise UserError(f"{path} is of a kind that is not read: name a file of {', '.join(KINDS)}, plain or packed")
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: name one of {', '.join(KINDS)}, plain or packed")
    if kind == ".jsonl":
        return Records(str(path), _json_rows(path))
    cells = TABLES[kind](path)
    names = tuple(header or next(cells, (1, ()))[1])
    if not names:
        raise UserError(f"{path} is empty: it needs a line for each row, below one that names the columns")
    if len(set(names)) < len(names):
        raise UserError(f"{path}, line 1: the columns are {', '.join(map(repr, names))[:200]}: give each its own name")
    return Records(str(path), _table_rows(path, cells, names, "the header" if header is None else "data.header"), names)


def kind_of(path: Path) -> str:
    """The end of a file's name in lower case, without that of a packed file: ``.csv`` of train.csv.gz."""
    name = path.name.lower()
    return Path(name.removesuffix(next((packed for packed in OPENERS if name.endswith(packed)), ""))).suffix


def is_dataset(place: str) -> bool:
    """Whether this is ``hub:NAME`` or a folder in which ``datasets`` saved several splits."""
    return place.startswith(HUB) or (Path(place) / "dataset_dict.json").is_file()


def open_splits(place: str, config: str | None = None) -> DatasetDict:
    """The splits of ``hub:NAME[:CONFIG]``, or of a folder that ``datasets`` saved.

    Args:
      config: of a data set on the hub that is named without one.

    Raises:
      UserError: it cannot be loaded.
    """
    import datasets

    name, _, own = place.removeprefix(HUB).partition(":")
    try:
        if place.startswith(HUB):
            return datasets.load_dataset(name, own or config)
        return datasets.load_from_disk(place)
    except Exception as error:  # of the network, of the hub, of Arrow, of the files behind them
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        mend = "name hub:ORG/NAME or hub:ORG/NAME:CONFIG" if place.startswith(HUB) else "save it again"
        raise UserError(f"{place} cannot be loaded ({reason}): {mend}") from None


def dataset_records(place: str, splits: DatasetDict, split: str) -> Records:
    """The rows of one split; where a field is a number with a name (a class label), they have the name, or None."""
    if split not in splits:
        raise UserError(f"{place} has no split {split!r} but {', '.join(splits)}: name one of these")
    table = splits[split].flatten()  # answers.text rather than answers: {text: ...}
    named = {name: convert for name, feature in table.features.items() if (convert := _names_of(feature))}
    rows = (
        (number, {name: named[name](value) if name in named else value for name, value in row.items()})
        for number, row in enumerate(table, start=1)
    )
    return Records(f"{place}, split {split}", rows, tuple(table.column_names), "row")


def _names_of(feature: Any) -> Callable[[Any], Any] | None:
    """Number -> name of a class label, list -> list of a list of them; None for any other feature."""
    if hasattr(feature, "int2str"):
        return lambda value: None if value is None or value < 0 else feature.int2str(value)
    inner = _names_of(feature.feature) if hasattr(feature, "feature") else None
    return None if inner is None else lambda values: [inner(value) for value in values]


def _table_rows(path: Path, cells: Iterator[tuple[int, list[str]]], names: tuple[str, ...], source: str) -> Rows:
    for number, row in cells:
        if len(row) != len(names):
            columns = "1 column" if len(row) == 1 else f"{len(row)} columns"
            raise UserError(
                f"{path}, line {number}: {columns} where {source} has {len(names)}: mend or remove the line"
            )
        yield number, dict(zip(names, row, strict=True))


def _tsv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    empty = None
    for number, line in numbered_lines(path):
        if "\0" in line:
            raise UserError(f"{path}, line {number}: a NUL character, the file is damaged or not UTF-8: copy it again")
        if not line:
            empty = empty or number
        elif empty:
            raise UserError(f"{path}, line {empty}: the line is empty: remove it")
        else:
            yield number, line.split("\t")


def _csv_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    return csv_rows(csv.reader((f"{line}\n" for _, line in numbered_lines(path)), strict=True), path)


def csv_rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line where it begins, cells) of each row of a `csv.reader` that is not empty.

    Raises:
      UserError: the file and line that is not CSV.
    """
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}, line {number}: not CSV ({error}): mend its quotes") from None
        if cells:
            yield number, cells


def _json_rows(path: Path) -> Rows:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise UserError(f"{path}, line {number}: not JSON ({reason}): mend or remove the line") from None
        if not isinstance(fields, dict):
            raise UserError(f"{path}, line {number}: no object of named fields: write {{...}} on each line")
        yield number, fields


TABLES: dict[str, Callable[[Path], Iterator[tuple[int, list[str]]]]] = {
    ".tsv": _tsv_cells,
    ".txt": _tsv_cells,
    ".csv": _csv_cells,
}
"""By the end of a file's name: (number of the line, cells) of its rows."""

KINDS = (*TABLES, ".jsonl")
