"""Reads labelled data as records with named fields: TSV, CSV, JSONL and Parquet files, and data sets.

The first line of a table names the columns, unless the configuration names them (`bert.data.tables`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bert.config import HUB_PREFIX
from bert.data.corpus.files import numbered_lines
from bert.data.tables import NOT_LINES, TABLES, Table, conversion, file_suffix, table_rows
from bert.errors import UserError, WarningText, quoted
from bert.files import parse_json, read_json, require_content

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Value = TypeVar("Value")

NumberedRecords = Iterator[tuple[int, Mapping[str, Any]]]
"""(number of the line or row, fields)."""

RECORDS = (".jsonl", ".parquet")
"""Suffixes of files whose rows may have lists in their fields."""

SUFFIXES = (*TABLES, *RECORDS)


class SkippedRows(WarningText):
    """A warning about rows that are skipped because they have no text or no label."""

    rows: int
    """Number of rows left out."""

    def __new__(cls, text: str, rows: int = 0) -> SkippedRows:
        note = super().__new__(cls, text)
        note.rows = rows
        return note


BAD_ROWS_FIX = "or skip such rows: data.bad_rows skip"
"""Last part of messages about rows without a text or a label."""


@dataclass(frozen=True)
class Records:
    """The records of one file, or of one split of a data set. They are read lazily, and only once."""

    source: str
    """File or data set, for messages."""
    rows: NumberedRecords
    names: tuple[str, ...] | None = None
    """The fields that all records have; None if each record names its fields, as in JSONL."""
    unit: str = "line"
    """The unit that is counted from 1, for messages."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user on how the file is read; complete when all records have been read."""
    declared_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field of class labels -> names in the order of their numbers, if the data set declares them."""
    is_data_set: bool = False
    """Whether the rows are a split of a data set, in which rows without a label are skipped."""
    skips_bad_rows: bool = False
    """Whether rows without a text or a label are skipped (``data.bad_rows``)."""

    def error(self, line_number: int, what: str) -> UserError:
        """Returns the error for a record, with its location."""
        return UserError(f"{self.source}, {self.unit} {line_number}: {what}")

    def skip(self, line_numbers: Sequence[int]) -> None:
        """Adds a note about rows that are left out because they have no label, or no text."""
        if line_numbers:
            rows = "1 row" if len(line_numbers) == 1 else f"{len(line_numbers):,} rows"
            lacking = "a text or a label" if self.skips_bad_rows else "a label"
            numbered = f"{self.unit} {listed_numbers(line_numbers)}"
            self.notes.append(
                SkippedRows(f"{self.source}: {rows} without {lacking} left out ({numbered})", len(line_numbers))
            )

    def require(self, line_number: int, fields: Collection[str], required: Mapping[str, str]) -> None:
        """Raises UserError if a record, or the header, lacks a field, and names all that are missing.

        Args:
          required: name of a required field -> configuration key that requires it.
        """
        missing = {name: key for name, key in required.items() if name not in fields}
        if not missing:
            return
        names, keys = (" and ".join(dict.fromkeys(words)) for words in (map(repr, missing), missing.values()))
        it, one = ("it", "one") if len(missing) == 1 else ("them", "ones")
        fix = f"set {keys} to the right {one}"
        if self.names is None and line_number > 1:
            fix = f"add {it} there, or {fix}"
        if self.unit == "line" and "task" in missing.values():
            fix += f", or name {', '.join(map(repr, required))} in the first line, with a tab between two names"
        are_columns = any(key.startswith("data.columns.") for key in missing.values())
        if self.unit == "line" and are_columns and self.names is not None:
            fix += ", or, if the first line is no header, name all columns in order as data.column_names"
        raise self.error(line_number, f"no {names} among {quoted(fields)}: {fix}")

    def read_each(
        self, rows: Iterable[tuple[Any, ...]], read: Callable[..., Value], faults: Sequence[tuple[int, UserError]] = ()
    ) -> list[Value]:
        """Returns ``read(self, *row)`` of each row, a tuple that starts with the row's number.

        Args:
          faults: errors of single rows so far.

        Raises:
          UserError: the first error that ``read`` raises, with the numbers of all rows with errors.
        """
        values: list[Value] = []
        faults = list(faults)
        for row in rows:
            try:
                values.append(read(self, *row))
            except UserError as error:
                faults.append((row[0], error))
        self.require_sound(faults)
        return values

    def require_sound(self, faults: Sequence[tuple[int, UserError]]) -> None:
        """Raises UserError if there are faults: the message of the first one, and the numbers of all faulty rows."""
        if not faults:
            return
        numbers = sorted({line_number for line_number, _ in faults})
        _, first = min(faults, key=lambda fault: fault[0])
        if len(numbers) == 1:
            raise first
        raise UserError(f"{first}; {len(numbers):,} {self.unit}s have such errors: {listed_numbers(numbers)}")


def listed_numbers(numbers: Sequence[int | str]) -> str:
    """Returns up to ten numbers of lines or rows, or ids, for a message, and ... if there are more."""
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


def read_records(
    path: Path,
    header: Sequence[str] | None = None,
    header_if: Collection[str] = (),
    literal_quotes: bool = False,
    skip_short_rows: bool = False,
) -> Records:
    """Returns the records of a ``.tsv`` (or ``.txt``), ``.csv``, ``.jsonl`` or ``.parquet`` file, plain or compressed.

    Args:
      header: the columns of a file whose first line does not name them.
      header_if: words that identify a first line as a header even if ``header`` is set.
      literal_quotes: read the file as separated by tabs, without quoting.
      skip_short_rows: leave out rows with too few columns and empty lines, and count them in a note.

    Raises:
      UserError: the suffix is not supported, or the file is empty; while reading, a line is invalid.
    """
    suffix = file_suffix(path)
    if suffix not in SUFFIXES:
        kinds = f"name a file of {', '.join(SUFFIXES)}, plain or packed"
        raise UserError(f"{path} has an unsupported format: {kinds}{conversion(path)}")
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: name one of {', '.join(SUFFIXES)}, plain or packed")
    if suffix == ".parquet":
        return _parquet_records(path)
    if suffix == ".jsonl":
        return Records(str(path), _json_rows(path), declared_labels=_declared_labels(path))
    rows, notes = table_rows(path, header, literal_quotes, skip_short_rows)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{path} is empty: it needs a line for each row, below one that names the columns")
    stripped = tuple(name.strip() for name in first[1])
    if header and stripped != tuple(header) and not (header_if and set(header_if) <= set(first[1])):
        names, rows = tuple(header), itertools.chain([first], rows)
        source = "the original" if header_if else "data.column_names"
    else:
        names, source = stripped, "the header"
    if len(set(names)) < len(names):
        raise UserError(f"{path}, line 1: the columns are {quoted(names)}: give each its own name")
    return Records(str(path), _named_rows(path, rows, names, source, skip_short_rows, notes), names, notes=notes)


def read_texts(path: Path, name: str) -> list[str]:
    """Returns the texts of a file: its lines, or the column ``text`` of a table, a ``.jsonl`` or a ``.parquet`` file.

    Args:
      name: name of a text in messages.

    Raises:
      UserError: the file does not exist or has no text, or a text is empty.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file: name a file with one {name} a line")
    if file_suffix(path) in NOT_LINES:
        raise UserError(f"{path} does not hold one {name} a line: write them to a text, .csv, .tsv or .jsonl file")
    if file_suffix(path) in (".csv", ".tsv", *RECORDS):
        records = read_records(path)
        numbered = []
        for line_number, fields in records.rows:
            if "text" not in fields:
                raise records.error(line_number, f"no 'text' among {quoted(fields)}: name the column of each {name} so")
            numbered.append((line_number, fields["text"]))
    else:
        numbered = list(numbered_lines(path, utf_16=True))
    if not numbered:
        raise UserError(f"{path} holds no {name}: write one on each line")
    for line_number, text in numbered:
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}, line {line_number}: the {name} is empty or not a text: write it or remove it")
    return [text for _, text in numbered]


def is_dataset_dict(source: str) -> bool:
    """Returns whether this is ``hub:NAME`` or a folder in which ``datasets`` saved several splits."""
    return source.startswith(HUB_PREFIX) or (Path(source) / "dataset_dict.json").is_file()


def open_splits(source: str, config: str | None = None) -> DatasetDict:
    """Returns the splits of ``hub:NAME[:CONFIG]``, or of a folder that ``datasets`` saved.

    Args:
      config: default of ``:CONFIG``.

    Raises:
      UserError: the data set cannot be loaded.
    """
    import datasets

    name, _, named_config = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        if source.startswith(HUB_PREFIX):
            return datasets.load_dataset(name, named_config or config)
        return datasets.load_from_disk(source)
    except Exception as error:  # errors of the network, the hub, Arrow, and the files
        for file in [] if source.startswith(HUB_PREFIX) else sorted(Path(source).rglob("*")):
            require_content(file)
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        fix = "name hub:ORG/NAME or hub:ORG/NAME:CONFIG" if source.startswith(HUB_PREFIX) else "save it again"
        raise UserError(f"{source} cannot be loaded ({reason}): {fix}") from None


def dataset_records(source: str, splits: DatasetDict, split: str) -> Records:
    """Returns the records of one split. Class labels are replaced by their names, missing ones by None."""
    if split not in splits:
        raise UserError(f"{source} has no split {split!r} but {', '.join(splits)}: name one of these")
    return _table_records(f"{source}, split {split}", splits[split], is_data_set=True)


def _parquet_records(path: Path) -> Records:
    """Returns the rows of a Parquet file, with the class labels that `datasets` or pandas stored in it."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"{path} is not a Parquet file that can be read ({reason}): copy it again") from None
    return _table_records(str(path), datasets.Dataset(table))


def _table_records(source: str, table: Dataset, is_data_set: bool = False) -> Records:
    # Plain values, whatever format the data set was saved with; answers.text rather than answers: {text: ...}.
    table = table.with_format(None).flatten()
    named = {name: convert for name, feature in table.features.items() if (convert := _label_namer(feature))}
    rows = (
        (row_number, {name: named[name](value) if name in named else value for name, value in row.items()})
        for row_number, row in enumerate(table, start=1)
    )
    declared = {name: names for name, feature in table.features.items() if (names := class_label_names(feature))}
    return Records(source, rows, tuple(table.column_names), "row", declared_labels=declared, is_data_set=is_data_set)


def class_label_names(feature: Any) -> tuple[str, ...]:
    """Returns the names of a class label, or of a list of them, in the order of their numbers; else ()."""
    if hasattr(feature, "int2str"):
        return tuple(feature.names or ())
    return class_label_names(feature.feature) if hasattr(feature, "feature") else ()


def declared_labels_file(path: Path) -> Path:
    """Returns the file with the declared labels of rows in memory, see `bert.tasks.columns.table_files`."""
    return path.with_name(f"{path.name}.declared_labels.json")


def _declared_labels(path: Path) -> dict[str, tuple[str, ...]]:
    file = declared_labels_file(path)
    if not file.is_file():
        return {}
    declared = read_json(file)
    columns = declared.values() if isinstance(declared, dict) else [None]
    if not all(isinstance(labels, list) and all(isinstance(label, str) for label in labels) for labels in columns):
        raise UserError(f"{file} holds no lists of labels: put back a copy, or start a new run")
    return {name: tuple(labels) for name, labels in declared.items()}


def _label_namer(feature: Any) -> Callable[[Any], Any] | None:
    """Returns a function from a class label (or a list of them) to its name; None for any other feature."""
    if hasattr(feature, "int2str"):
        return lambda value: None if value is None or value < 0 else feature.int2str(value)
    inner = _label_namer(feature.feature) if hasattr(feature, "feature") else None
    return None if inner is None else lambda values: None if values is None else [inner(value) for value in values]


def _named_rows(
    path: Path, rows: Table, names: tuple[str, ...], source: str, skip_short_rows: bool, notes: list[str]
) -> NumberedRecords:
    short: list[int] = []
    for line_number, cells in rows:
        if skip_short_rows and len(cells) < len(names):
            short.append(line_number)
        elif len(cells) != len(names):
            columns = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
            raise UserError(
                f"{path}, line {line_number}: {columns} where {source} has {len(names)}: fix or remove the line"
            )
        else:
            yield line_number, dict(zip(names, cells, strict=True))
    if short:
        counted = "1 row" if len(short) == 1 else f"{len(short)} rows"
        text = f"{path}: {counted} of too few columns left out (line {listed_numbers(short)})"
        notes.append(WarningText(text))


def _json_rows(path: Path) -> NumberedRecords:
    for line_number, line in numbered_lines(path, utf_16=True):
        if not line.strip():
            continue
        try:
            yield line_number, parse_record(line)
        except ValueError as error:
            raise UserError(f"{path}, line {line_number}: {error}") from None


def parse_record(line: str) -> dict[str, Any]:
    """Returns the object in a line of a ``.jsonl`` file. Raises ValueError, with a fix, for other lines."""
    no_object = "not an object with named fields: write {...} on each line"
    if line.lstrip().startswith("["):
        raise ValueError(f"{no_object}; jq -c '.[]' makes such lines of a JSON array")
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({getattr(error, 'msg', str(error))}): fix or remove the line") from None
    if not isinstance(fields, dict):
        raise ValueError(no_object)
    return fields
