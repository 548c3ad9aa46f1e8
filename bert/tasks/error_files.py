"""errors.tsv, the list of a split's wrong predictions, which each kind of task fills with its own columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bert.files import write_tsv


def file_prefix(split: str) -> str:
    """Returns the prefix of file names for a split; dev and the data of an evaluation ("") have none."""
    return "" if split in ("dev", "") else f"{split}_"


def write_errors(folder: Path, split: str, columns: Sequence[str], errors: Iterable[Sequence[Any]]) -> Path:
    """Writes errors.tsv (SPLIT_errors.tsv for splits other than dev); see `write_rows`."""
    return write_rows(folder / f"{file_prefix(split)}errors.tsv", columns, errors)


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Writes a table with six decimals, and with tabs and line ends as spaces."""
    return write_tsv(path, [list(columns), *([_cell(value) for value in row] for row in rows)])


def _cell(value: Any) -> str:
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    return " ".join(re.split(r"[\t\r\n]+", text))
