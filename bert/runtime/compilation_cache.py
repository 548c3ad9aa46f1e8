"""The persistent cache of compiled programs, shared by all runs. Does not import JAX."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

from bert.errors import UserError
from bert.files import user_cache_dir

ENV_VAR = "BERT_COMPILATION_CACHE"
"""Environment variable that sets another folder, or ``off``."""

MAX_SIZE_GIB = 2
"""Maximum size of the folder. The least recently used programs are evicted."""

UNBOUNDED = "-1"
"""JAX's default, no limit. JAX then records no access times."""

LOCK_SECONDS = 1
"""Maximum time to wait at startup for another process that reads or writes a program."""

MIN_COMPILE_SECONDS = 0.1
"""Programs that compile faster are not cached."""


def use_compilation_cache() -> Path | None:
    """Makes JAX cache compiled programs in the user's cache folder, or in $BERT_COMPILATION_CACHE.

    JAX settings in the environment take precedence. The default folder is not used if it is not writable.

    Returns:
        The folder; None if compiled programs are not cached, or if JAX's own settings choose the folder.

    Raises:
        UserError: the folder in $BERT_COMPILATION_CACHE is not writable.
    """
    named, jax = os.environ.get(ENV_VAR), sys.modules.get("jax")
    is_set = "JAX_COMPILATION_CACHE_DIR" in os.environ
    if named == "off" or is_set or (jax is not None and jax.config.jax_compilation_cache_dir is not None):
        return None
    if named:
        root = Path(named)
    elif caches := user_cache_dir():
        root = caches / "compiled"
    else:
        return None
    if not _is_writable(root):
        if named:
            raise UserError(f"{ENV_VAR} is {named!r}, which cannot be written: name another folder, or off")
        return None
    # A program for one processor may crash on another, and both may share a home folder.
    folder = root / _processor()
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MAX_SIZE_GIB * 2**30,
        "jax_persistent_cache_min_compile_time_secs": MIN_COMPILE_SECONDS,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)  # inherited by child processes
            if jax is not None:  # JAX reads the environment only on import
                jax.config.update(name, value)
    if os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] != UNBOUNDED:
        _remove_incomplete(folder)
    return folder


def _remove_incomplete(folder: Path) -> None:
    """Removes programs that a killed process left incomplete.

    JAX writes a program first, and then its access time. It would load an incomplete program, and before version 0.11
    it stops caching while an access time is missing. JAX's lock distinguishes a killed process from one that still
    writes.
    """
    with contextlib.suppress(OSError, NotImplementedError):  # the lock is held, or the file system has no locks
        if not _incomplete(folder):
            return
        from filelock import FileLock  # slow to import and rarely needed

        with FileLock(folder / ".lockfile", timeout=LOCK_SECONDS):
            for program in _incomplete(folder):
                program.unlink(missing_ok=True)


def _incomplete(folder: Path) -> list[Path]:
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    programs = (name.removesuffix("-cache") for name in names if name.endswith("-cache"))
    return [folder / f"{key}-cache" for key in programs if f"{key}-atime" not in names]


def _is_writable(folder: Path) -> bool:
    """Whether the folder, or its nearest existing ancestor, is writable."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        return False


def _processor() -> str:
    """Returns a short name for the processor: its architecture, and a digest of its instruction sets."""
    instructions = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), instructions)
    except OSError:  # not on Linux
        pass
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
