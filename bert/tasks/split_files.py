"""Finds the files of splits in a task's folder by the names of the original and its common copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bert.errors import UserError

Names = Mapping[str, Sequence[str]]
"""File names, or patterns with a *, of each split; the first one that exists is used."""

INSTEAD = {"dev": ", or data.dev_fraction to hold out training rows"}
"""Alternatives in messages about a missing file."""


def splits_in(folder: Path, names: Names) -> list[str]:
    """Returns ``train``, ``dev`` and the other splits that exist."""
    return [split for split in names if split in ("train", "dev") or find(folder, names[split])]


def find(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the file in ``folder``, or None.

    Raises:
      UserError: a pattern matches several files.
    """
    for name in names:
        paths = sorted(folder.glob(name)) if "*" in name else [folder / name]
        paths = [path for path in paths if path.is_file()]
        if len(paths) > 1:
            several = ", ".join(path.name for path in paths)
            raise UserError(f"{folder} has {several}: rename the file to read to {name.replace('*', '')}")
        if paths:
            return paths[0]
    return None


def find_split_file(folder: Path, names: Names, split: str, described: str) -> Path:
    """Returns the file of a split in ``folder``. Raises UserError with the content, ``described``, if it is missing."""
    folder = Path(folder)
    path = find(folder, names[split]) if folder.is_dir() else None
    if path is None:
        wrong = f"{folder} has no {names[split][0]}" if folder.is_dir() else f"{folder} is not a folder"
        usual = ", ".join(options[0] for options in names.values())
        raise UserError(f"{wrong}: set data.dir to the folder with {usual} of {described}{INSTEAD.get(split, '')}")
    return path
