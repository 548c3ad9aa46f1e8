"""Rows in memory as a file of JSON lines, which the readers of labelled files take from there."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from bert.data.records import dataset_records
from bert.errors import UserError
from bert.runs.metrics_log import to_jsonable


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


def _rows(rows: Any, name: str) -> Iterable[Any]:
    if hasattr(rows, "features") and hasattr(rows, "flatten"):  # datasets.Dataset
        return (row for _, row in dataset_records(name, {name: rows}, name).rows)
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):  # pandas.DataFrame
        return rows.to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        wanted = "pass a path, a list of dictionaries, a pandas.DataFrame or a datasets.Dataset"
        raise UserError(f"{name} is {reprlib.repr(rows)}: {wanted}")
    return rows
