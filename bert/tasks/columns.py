"""Reads the columns of custom tasks from files, data sets and rows in memory."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import reprlib
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from bert.config import TaskDataConfig
from bert.data.corpus.files import DECOMPRESSORS
from bert.data.records import (
    BAD_ROWS_FIX,
    RECORDS,
    SUFFIXES,
    Records,
    class_label_names,
    dataset_records,
    declared_labels_file,
    is_dataset_dict,
    open_splits,
    read_records,
)
from bert.data.tables import conversion, file_suffix
from bert.errors import LOGGER, UserError, without_surrogates
from bert.remote import fetch
from bert.runs.metrics_log import to_jsonable
from bert.tasks.base import Task

KEYS = ("train", "dev", "test", "column_names", "columns")
"""The keys of ``data`` that name files and columns."""

SPLITS = {"train": ("train",), "dev": ("validation", "dev"), "test": ("test",)}
"""Possible names of each split in data sets."""

FILE_STEMS = {"train": ("train",), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
"""Possible file names of each split; the first one that exists is read."""


def split_names(folder: Path, data: TaskDataConfig, suffixes: Sequence[str] = SUFFIXES) -> list[str]:
    """Returns train, and dev and test if they are configured or exist."""
    source = folder.as_posix()
    named = [split for split in ("dev", "test") if getattr(data, split) is not None]
    if is_dataset_dict(source):
        present = dataset_splits(folder)
    else:
        present = [split for split in ("dev", "test") if _split_candidates(folder, split, suffixes)]
    return ["train", *(split for split in ("dev", "test") if split in (*named, *present))]


def split_path(folder: Path, split: str, data: TaskDataConfig, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """Returns the configured file of a split, or the file with its name. Raises UserError if it is missing."""
    named = getattr(data, split)
    if named is not None:
        path = folder / fetch(named)
        if not path.is_file():
            raise UserError(f"{path} does not exist or is not a file: set data.{split} to the file of {split}")
        if file_suffix(path) not in suffixes and conversion(path):
            raise UserError(f"{path} has an unsupported format: name a file of {', '.join(suffixes)}{conversion(path)}")
        return path
    paths = _split_candidates(folder, split, suffixes)
    if len(paths) != 1:
        if not folder.is_dir():
            fix = f"set data.dir to the folder that has the file of {split}"
            if not folder.exists():
                raise UserError(f"{folder} does not exist: {fix}")
            raise UserError(f"{folder} is a file and no folder: {fix}, and data.{split} to the file")
        names = ", ".join(f"{split}{suffix}" for suffix in suffixes)
        wrong = f"both {paths[0].name} and {paths[1].name}" if paths else f"no {names}"
        similar = "" if paths else _similar_file(folder, split, suffixes)
        raise UserError(f"{folder} has {wrong}: set data.{split} to the file of {split}{similar}")
    return paths[0]


def require_split_of_files(split: str, folder: Any) -> None:
    """Raises UserError for a name that no file of a folder has."""
    if split not in SPLITS:
        raise UserError(f"split is {split!r}, but {folder} is a folder of files: use {', '.join(SPLITS)}")


def split_records(folder: Path, split: str, data: TaskDataConfig) -> Records:
    """Returns the rows of a split. Raises UserError if its file or the split is missing or invalid."""
    if not is_dataset_dict(folder.as_posix()):
        return read_records(split_path(folder, split, data), data.column_names)
    return dataset_split(folder, split, getattr(data, split))


def dataset_splits(folder: Path) -> list[str]:
    """Returns the splits of a data set on the hub or in a folder, train and dev first; [] for other folders."""
    source = folder.as_posix()
    if not is_dataset_dict(source):
        return []
    there = open_splits(source)
    return [split for split, names in SPLITS.items() if split == "train" or any(name in there for name in names)]


def dataset_split(folder: Path, split: str, name: str | None = None) -> Records:
    """Returns the rows of a split of a data set; ``name`` is its name there, if it is not a usual one."""
    source = folder.as_posix()
    there = open_splits(source)
    usual = next((name for name in SPLITS[split] if name in there), SPLITS[split][0])
    return dataset_records(source, there, name or usual)


def record_files(*stems: str) -> tuple[str, ...]:
    """Returns names of files with a record in each row, for tasks whose benchmarks use other files."""
    return tuple(f"{stem}{suffix}" for stem in stems for suffix in RECORDS)


def _similar_file(folder: Path, split: str, suffixes: Sequence[str]) -> str:
    """Returns the end of a message about a missing file: a file with other capitals, or of an unsupported format."""
    for path in sorted(folder.iterdir()):
        if path.name.partition(".")[0].lower() in FILE_STEMS[split] and path.is_file():
            if file_suffix(path) in suffixes:
                return f", for example {path.name}"
            return f"; {path.name} has an unsupported format{conversion(path)}"
    return ""


def _split_candidates(folder: Path, split: str, suffixes: Sequence[str]) -> list[Path]:
    for stem in FILE_STEMS[split]:
        paths = (folder / f"{stem}{suffix}{packed}" for suffix in suffixes for packed in ("", *DECOMPRESSORS))
        if files := [path for path in paths if path.is_file()]:
            return files
    return []


class Columns(NamedTuple):
    """The columns of the R rows of a split."""

    line_numbers: list[int]
    """Line, or row of a data set."""
    texts: list[list[str]]
    """[text columns][R]."""
    labels: list[list[Any]] | None
    """[label columns][R] as read; None for a split without labels."""
    ids: list[str]
    """The ids of the rows, or row numbers from 0."""
    notes: tuple[str, ...] = ()
    """Sentences about how the file was read."""
    faults: tuple[tuple[int, UserError], ...] = ()
    """(line, error) of each row with an invalid text or id, unless `read_columns` raises them."""

    def take(self, rows: Sequence[int]) -> Columns:
        """Returns the rows with these numbers, without labels."""
        return self._replace(
            line_numbers=[self.line_numbers[row] for row in rows],
            texts=[[texts[row] for row in rows] for texts in self.texts],
            labels=None,
            ids=[self.ids[row] for row in rows],
        )


def read_columns(
    records: Records,
    texts: Mapping[str, str],
    labels: Mapping[str, str],
    id: tuple[str, str] | None = None,
    needed: bool = True,
    may_be_empty: bool = False,
    unlabelled: Collection[Any] = (None, ""),
    leave_out: bool = False,
    optional: Collection[str] = (),
    raise_faults: bool = True,
) -> Columns:
    """Reads columns of all rows. Errors of single rows are collected, so that one error names all of them.

    Args:
      texts, labels: the configuration key of each column.
      id: (column, key).
      needed: whether labels are required; otherwise a split without any labels is unlabelled.
      unlabelled: values of missing labels.
      leave_out: whether rows without a label are skipped, and counted in a note, if they come from a data set or a
        column of class labels. In files, such rows are errors.
      optional: label columns that may be empty.
      raise_faults: whether errors of rows are raised, or returned as `Columns.faults`.

    Raises:
      UserError: a column is missing, a text is invalid, or an id is repeated.
    """
    columns = Columns([], [[] for _ in texts], [[] for _ in labels], [])
    line_of_id: dict[str, int] = {}
    faults: list[tuple[int, UserError]] = []
    skipped: list[int] = []
    may_lack = [name for name in labels if leave_out and (records.is_data_set or name in records.declared_labels)]
    filled = dict.fromkeys(texts, may_be_empty)
    if "" in unlabelled:
        filled |= {name: False for name in labels if name not in optional}
    rows, labelled = records.rows, bool(labels)
    if not needed:
        read = list(rows)
        cells = (fields[name] for _, fields in read for name in labels if name in fields)
        rows, labelled = iter(read), any(cell not in unlabelled for cell in cells)
    required = {**texts, **(labels if labelled else {}), **dict([id] if id else [])}
    is_checked = False
    for index, (line_number, fields) in enumerate(rows):
        bad = labelled and any(is_missing(fields.get(name, "")) for name in may_lack)
        if bad or (records.skips_bad_rows and _is_bad(records, fields, filled, required)):
            skipped.append(line_number)
            continue
        try:
            if not is_checked or records.names is None:
                header = 1 if records.names and records.unit == "line" else line_number
                records.require(header, fields, required)
                is_checked = True
            texts_of_row = [_text(records, line_number, name, fields[name], may_be_empty) for name in texts]
            row_id = _row_id(records, line_number, fields, id, line_of_id) if id else str(index)
        except UserError as error:
            if not is_checked and not set(required) <= set(fields):
                raise
            faults.append((line_number, error))
            texts_of_row, row_id = [""] * len(texts), ""
        for column, cell in zip(columns.texts, texts_of_row, strict=True):
            column.append(cell)
        for values, name in zip(columns.labels or (), labels if labelled else (), strict=False):
            values.append(fields.get(name))
        columns.ids.append(row_id)
        columns.line_numbers.append(line_number)
    records.skip(skipped)
    if not columns.line_numbers:
        names = f" with {', '.join(map(repr, filled))}" if skipped else ""
        raise UserError(f"{records.source} has no rows{names}: it needs a {records.unit} for each example")
    if raise_faults:
        records.require_sound(faults)
    labels_read = columns.labels if labelled else None
    return columns._replace(labels=labels_read, notes=tuple(records.notes), faults=tuple(faults))


def _is_bad(records: Records, fields: Mapping[str, Any], filled: Mapping[str, bool], required: Collection[str]) -> bool:
    """Returns whether a row lacks a text or a label; ``filled`` are their columns, and whether they may be empty."""
    if records.names is not None and not set(required) <= set(fields):
        return False  # a table without the column, which is an error
    return any(
        is_blank(fields.get(name)) and not (may and fields.get(name) == "")
        for name, may in filled.items()
        if name in required
    )


def is_missing(value: Any) -> bool:
    """Returns whether a cell is null, or NaN, its value in data frames."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Returns whether a cell is missing, or a text without any character except white space."""
    return is_missing(value) or (isinstance(value, str) and not value.strip())


def _row_id(
    records: Records, line_number: int, fields: Mapping[str, Any], id: tuple[str, str], line_of_id: dict[str, int]
) -> str:
    if is_missing(fields[id[0]]):
        raise records.error(line_number, f"{id[0]} is missing (null): write it or remove the {records.unit}")
    row_id = label_text(records, line_number, id[0], fields[id[0]])
    if (before := line_of_id.setdefault(row_id, line_number)) != line_number:
        fix = f"leave {id[1]} out" if id[1].startswith("data.") else "copy the file again"
        raise records.error(
            line_number, f"{id[0]} {row_id!r} is on {records.unit} {before} already: give each row its own id, or {fix}"
        )
    return row_id


def _text(records: Records, line_number: int, name: str, value: Any, may_be_empty: bool) -> str:
    if is_missing(value):
        raise records.error(line_number, _missing_message(records, name))
    if not isinstance(value, str):
        raise records.error(line_number, f"{name} is {json.dumps(value, default=str)[:40]}: it must be a text")
    if not (value.strip() or may_be_empty):
        raise records.error(line_number, f"{name} is empty: write it or remove the {records.unit}, {BAD_ROWS_FIX}")
    return without_surrogates(value)


def label_text(records: Records, line_number: int, name: str, value: Any) -> str:
    """Returns a label or an id: a text on one line, or a whole number, which may be a float."""
    if is_missing(value):
        raise records.error(line_number, _missing_message(records, name))
    if isinstance(value, float) and value.is_integer():  # in data frames, columns with missing numbers have floats
        value = int(value)
    word = json.dumps(value) if isinstance(value, int) else value  # true and false among them
    if not isinstance(word, str) or not word.strip() or set(word) & set("\t\r\n"):
        shown = repr(value)[:40]
        raise records.error(
            line_number, f"{name} is {shown}: it must be a text without tabs and line ends, or a whole number"
        )
    return without_surrogates(word)


def _missing_message(records: Records, name: str) -> str:
    return f"{name} is missing (null): write it or remove the {records.unit}, {BAD_ROWS_FIX}"


def table_files(rows: Any, name: str) -> dict[str, str]:
    """Returns the contents of files for rows in memory, by file name: ``NAME.jsonl`` and the declared labels.

    Raises:
      UserError: the rows are invalid (see `json_lines`).
    """
    rows = _read_whole(rows)
    files = {f"{name}.jsonl": json_lines(rows, name)}
    if declared := _declared_labels(rows):
        files[declared_labels_file(Path(f"{name}.jsonl")).name] = json.dumps(declared) + "\n"
    return files


def json_lines(rows: Any, name: str) -> str:
    """Returns rows in memory as JSON lines.

    Args:
      rows: dictionaries by column, a pandas data frame, or a data set of `datasets`, whose class labels become names.
      name: name of the rows in messages.

    Raises:
      UserError: the rows have another type, or there are no rows.
    """
    lines = []
    for number, row in enumerate(_rows(_read_whole(rows), name), 1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{name}, row {number} is {reprlib.repr(row)}: pass a dictionary of columns for each row, for "
                "classification {'text': ..., 'label': ...}"
            )
        lines.append(json.dumps(to_jsonable(dict(row))) + "\n")
    if not lines:
        raise UserError(f"{name} has no rows: pass at least one")
    return "".join(lines)


def _category(value: Any) -> str:
    """Returns a category as `label_text` writes it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


def _declared_labels(rows: Any) -> dict[str, list[str]]:
    """Returns the labels of each class label column of a data set, or the used categories of a data frame's columns."""
    if _is_dataset(rows):
        declared = {column: list(class_label_names(feature)) for column, feature in rows.flatten().features.items()}
        return {column: names for column, names in declared.items() if names}
    if _is_data_frame(rows):
        categories = {
            column: getattr(getattr(rows[column], "dtype", None), "categories", None) for column in rows.columns
        }
        return {
            str(column): [_category(to_jsonable(name)) for name in names if (rows[column] == name).any()]
            for column, names in categories.items()
            if names is not None
        }
    return {}


def _read_whole(rows: Any) -> Any:
    """Returns a streaming data set with known features as one in memory, and other rows unchanged."""
    if _is_dataset(rows) or not isinstance(getattr(rows, "features", None), Mapping):  # a column may have the name
        return rows
    import datasets

    return datasets.Dataset.from_list(list(rows), features=rows.features)


def _is_dataset(rows: Any) -> bool:
    return hasattr(rows, "features") and hasattr(rows, "flatten")


def _is_data_frame(rows: Any) -> bool:
    return hasattr(rows, "columns") and hasattr(rows, "to_dict")


def _rows(rows: Any, name: str) -> Iterable[Any]:
    if _is_dataset(rows):
        return (row for _, row in dataset_records(name, {name: rows}, name).rows)
    if _is_data_frame(rows):
        if not rows.columns.is_unique:
            twice = rows.columns[rows.columns.duplicated()][0]
            raise UserError(f"{name} has several columns with the name {twice!r}: give each its own name")
        return rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(rows, Mapping) and isinstance(rows.get("data"), list):  # SQuAD's layout
        return cast(list[Any], rows["data"])
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        fix = "pass a path, a list of dictionaries, a pandas.DataFrame or a datasets.Dataset"
        raise UserError(f"{name} is {reprlib.repr(rows)}: {fix}")
    return rows


@dataclass(frozen=True, kw_only=True)
class ColumnFilesTask(Task):
    """A task whose splits are files of columns. Subclasses that override `splits` and `records` read any layout."""

    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    skips_bad_rows: bool = False

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | {"score"}

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data)

    def records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split by column."""
        return split_records(Path(folder), split, self.data)

    def checked_records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split, with the treatment of rows without a text or a label."""
        return dataclasses.replace(self.records(Path(folder), split), skips_bad_rows=self.skips_bad_rows)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return () if self.data.columns.id is None else (self.data.columns.id,)

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        return tuple(self.data.column_names or ())

    def labelled_examples(self, data: Any, split: str = "dev") -> Any:
        if "dev" not in self.data_keys:
            raise UserError(f"{self.name} reads its own rows, whose scores are in results.json: use a run on files")
        columns = dataclasses.replace(self.data.columns, id=None)  # scores need no ids
        own = dataclasses.replace(self.data, train=None, dev=None, test=None, columns=columns)
        if isinstance(data, str | os.PathLike) and is_dataset_dict(os.fspath(data)):
            named = next((name for name in SPLITS.get(split, ()) if name in open_splits(os.fspath(data))), split)
            examples = dataclasses.replace(self, data=dataclasses.replace(own, dev=named)).read(Path(data), "dev")
        elif isinstance(data, str | os.PathLike) and Path(data).is_dir():
            require_split_of_files(split, data)
            examples = dataclasses.replace(self, data=own).read(Path(data), split)
        else:
            return self._examples_of_file(data, dataclasses.replace(own, source=None, target=None))
        for note in examples.notes:
            LOGGER.warning(note)
        return examples

    def _examples_of_file(self, data: Any, data_config: TaskDataConfig) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "data.jsonl"
            if isinstance(data, str | os.PathLike):
                file = Path(os.path.abspath(data))
                if not file.is_file():
                    raise UserError(
                        f"{data} is not a file: name a labelled file, a folder, hub:ORG/NAME or a split of the run"
                    )
            else:
                for name, content in table_files(data, "data").items():
                    (Path(folder) / name).write_text(content, encoding="utf-8")
            own = dataclasses.replace(data_config, dev=str(file))
            try:
                examples = dataclasses.replace(self, data=own).read(Path(folder), "dev")
            except UserError as error:
                in_memory = str(Path(folder) / "data.jsonl")
                message = str(error).replace(f"{in_memory}, line ", "data, row ").replace(in_memory, "data")
                raise UserError(message.replace(" lines have such", " rows have such")) from None
            for note in examples.notes:
                in_memory = str(Path(folder) / "data.jsonl")
                LOGGER.warning(
                    note.replace(in_memory, "data").replace("(line ", "(row ") if in_memory in note else note
                )
            return examples
