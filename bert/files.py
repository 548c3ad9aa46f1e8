"""Atomic file writes and the user cache directory."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def user_cache_dir() -> Path | None:
    """Where the user's caches lie; None for a user who has no home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-jax"
    except RuntimeError:
        return None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file so that a crash or a loss of power leaves the old one or the new one, never a part."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def write_array(path: Path, array: np.ndarray) -> None:
    """`write_atomic` for an array, as ``.npy``."""
    import numpy as np  # not needed by those who write text

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_atomic(path, content.getvalue())


def write_tsv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Writes cells with tabs between them, a line for each row; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path next to this one that takes its place at the end, or vanishes after an error."""
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether the name is one that `atomic_write` or `atomic_directory` gives; a killed process leaves such files."""
    return re.fullmatch(r"\..*\.\d+\.bert-partial", path.name) is not None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.bert-partial")


@contextlib.contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A temporary folder whose content is moved to ``out`` at the end; it is removed after an error.

    An empty folder that exists stays the same folder: it may be the working directory, or a mount point. What a killed
    process left in it is removed.

    Raises:
        UserError: ``out`` exists and is not an empty folder, or cannot be written, or is no local path.
    """
    local_path(out)
    if out.exists() and (
        not out.is_dir() or not all(is_temporary(entry) and entry.is_dir() for entry in out.iterdir())
    ):
        raise UserError(f"{out} exists already and is not an empty folder: name another one")
    exists = out.exists()
    draft = _temporary(out / "export") if exists else _temporary(out)
    try:
        draft.mkdir(parents=True)
        yield draft
        if exists:
            for leftover in set(out.iterdir()) - {draft}:
                shutil.rmtree(leftover)
            for entry in sorted(draft.iterdir()):
                entry.rename(out / entry.name)
        else:
            os.replace(draft, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): name another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` survive a power cut, except on Windows, which opens no folders."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_path(path: str | Path, name: str = "") -> str:
    """The path, with the home folder for ``~``.

    Raises:
        UserError: it has a scheme, such as gs://, and would become a local folder, or it holds a null character.
    """
    described = f"{name} is {path}, which" if name else str(path)
    if "\0" in str(path):
        raise UserError(f"{described!r} holds a null character: remove it")
    # One slash: Path has dropped the other one. Two letters at least: C:/ is a drive.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise UserError(f"{described} is not a local path, and no other can be used there: pass a local path")
    return os.path.expanduser(path)
