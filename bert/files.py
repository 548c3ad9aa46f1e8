"""Where files go, and writing them so that they are never half there."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bert.config import UserError

if TYPE_CHECKING:
    import numpy as np


def user_caches() -> Path | None:
    """Where the user's caches lie; None for a user who has no home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert-jax"
    except RuntimeError:
        return None


def write_durably(path: Path, content: bytes | str) -> None:
    """Writes a file so that a crash or a loss of power leaves the old one or the new one, never a part."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def write_array(path: Path, array: np.ndarray) -> None:
    """`write_durably` for an array, as ``.npy``."""
    import numpy as np  # not needed by those who write text

    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_durably(path, content.getvalue())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside this one that takes its place at the end, or vanishes after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its place at the end, or vanishes after an error.

    Raises:
        UserError: ``out`` is there already and not an empty folder, or its parent cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already and is not an empty folder: name another one")
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        os.replace(draft, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}): name another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Makes renames inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
