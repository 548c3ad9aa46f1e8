"""Rows in memory as a file of JSON lines, which the readers of labelled files take from there."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bert.data.records import class_label_names, dataset_records, declared_labels_file
from bert.errors import UserError
from bert.runs.metrics_log import to_jsonable


def table_files(rows: Any, name: str) -> dict[str, str]:
    """Returns the contents of the files that hold rows, by file name: ``NAME.jsonl``, and the labels they declare.

    Args:
      rows, name: as for `json_lines`.

    Raises:
      UserError: as `json_lines`.
    """
    files = {f"{name}.jsonl": json_lines(rows, name)}
    if declared := _declared_labels(rows):
        files[declared_labels_file(Path(f"{name}.jsonl")).name] = json.dumps(declared) + "\n"
    return files


def json_lines(rows: Any, name: str) -> str:
    """A JSON object on each line.

    Args:
      rows: dictionaries of columns, a data frame of pandas, or a `datasets.Dataset`, whose class labels become names.
      name: of the rows, for messages.

    Raises:
      UserError: something else, or no rows.
    """
    lines = []
    for number, row in enumerate(_rows(rows, name), 1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name}, row {number} is {reprlib.repr(row)}: pass a dictionary of columns for each row")
        lines.append(json.dumps(to_jsonable(dict(row))) + "\n")
    if not lines:
        raise UserError(f"{name} has no rows: pass at least one")
    return "".join(lines)


def _declared_labels(rows: Any) -> dict[str, list[str]]:
    """Returns the labels of each class label of a data set, and the categories in use of each column of a data frame
    that is categorical."""
    if _is_dataset(rows):
        declared = {column: list(class_label_names(feature)) for column, feature in rows.flatten().features.items()}
        return {column: names for column, names in declared.items() if names}
    if _is_data_frame(rows):
        categories = {
            column: getattr(getattr(rows[column], "dtype", None), "categories", None) for column in rows.columns
        }
        return {
            str(column): [str(to_jsonable(name)) for name in names if (rows[column] == name).any()]
            for column, names in categories.items()
            if names is not None
        }
    return {}


def _is_dataset(rows: Any) -> bool:
    return hasattr(rows, "features") and hasattr(rows, "flatten")


def _is_data_frame(rows: Any) -> bool:
    return hasattr(rows, "columns") and hasattr(rows, "to_dict")


def _rows(rows: Any, name: str) -> Iterable[Any]:
    if _is_dataset(rows):
        return (row for _, row in dataset_records(name, {name: rows}, name).rows)
    if _is_data_frame(rows):
        return rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        wanted = "pass a path, a list of dictionaries, a pandas.DataFrame or a datasets.Dataset"
        raise UserError(f"{name} is {reprlib.repr(rows)}: {wanted}")
    return rows
