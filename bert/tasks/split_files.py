"""Where the files of a split lie in a task's folder: by the names that the original and its common copies have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bert.errors import UserError

Names = Mapping[str, Sequence[str]]
"""Names, or patterns of names with a *, that the file of each split goes by; the first that is there counts."""

INSTEAD = {"dev": ", or data.dev_fraction to hold out training rows"}
"""What to set if the file of a split does not exist."""


def splits_in(folder: Path, names: Names) -> list[str]:
    """``train`` and ``dev``, and what more there is."""
    return [split for split in names if split in ("train", "dev") or find(folder, names[split])]


def find(folder: Path, names: Sequence[str]) -> Path | None:
    """The file in ``folder``; None: there is none.

    Raises:
      UserError: a pattern fits several files.
    """
    for name in names:
        paths = sorted(folder.glob(name)) if "*" in name else [folder / name]
        paths = [path for path in paths if path.is_file()]
        if len(paths) > 1:
            several = ", ".join(path.name for path in paths)
            raise UserError(f"{folder} has {several}: call the one that is meant {name.replace('*', '')}")
        if paths:
            return paths[0]
    return None


def find_split_file(folder: Path, names: Names, split: str, described: str) -> Path:
    """The file of a split in ``folder``, which has to be there. ``described`` is what it holds, for the sentence."""
    folder = Path(folder)
    path = find(folder, names[split]) if folder.is_dir() else None
    if path is None:
        wrong = f"{folder} has no {names[split][0]}" if folder.is_dir() else f"{folder} is not a folder"
        usual = ", ".join(options[0] for options in names.values())
        raise UserError(f"{wrong}: set data.dir to the folder with {usual} of {described}{INSTEAD.get(split, '')}")
    return path
