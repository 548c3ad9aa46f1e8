"""Where compiled programs are kept from one run to the next. Imports no JAX."""

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
"""Environment variable: another folder, or ``off``."""

MAX_SIZE_GIB = 2
"""Size of the folder; what was used longest ago goes first."""

UNBOUNDED = "-1"
"""As JAX has it; it then writes no times of use, and no program lacks its own."""

LOCK_SECONDS = 1
"""What a start waits for another process that reads or writes a program."""

MIN_COMPILE_SECONDS = 0.1
"""What compiles faster than this is not worth a file."""


def use_compilation_cache() -> Path | None:
    """Has JAX keep what it compiles in the user's cache folder, or where $BERT_COMPILATION_CACHE says.

    Settings of JAX's own, where the environment has them, stay. A default folder that cannot be written is done
    without.

    Returns:
        The folder; None if compiled programs are not kept, or where JAX's own settings decide.

    Raises:
        UserError: the folder that $BERT_COMPILATION_CACHE names cannot be written.
    """
    named = os.environ.get(ENV_VAR)
    if named == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ or _given_to_jax():
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
    # A program compiled for one kind of processor may end another one: they may share a home.
    folder = root / _processor()
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_compilation_cache_max_size": MAX_SIZE_GIB * 2**30,
        "jax_persistent_cache_min_compile_time_secs": MIN_COMPILE_SECONDS,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)  # for the processes that this one starts, too
            if "jax" in sys.modules:  # it reads the environment when it is imported
                sys.modules["jax"].config.update(name, value)
    if os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] != UNBOUNDED:
        _remove_incomplete(folder)
    return folder


def _given_to_jax() -> bool:
    """Whether this process has set JAX's folder through ``jax.config``."""
    return "jax" in sys.modules and sys.modules["jax"].config.jax_compilation_cache_dir is not None


def _remove_incomplete(folder: Path) -> None:
    """Removes programs that a kill has left half written.

    JAX writes a program and then the time of its last use. It takes a program that is there for a whole one, and before
    0.11 keeps no further one while a time is missing. Its lock tells a kill from a process that is writing right now.
    """
    with contextlib.suppress(OSError, NotImplementedError):  # a lock that is held, or file systems without any
        if not _incomplete(folder):
            return
        from filelock import FileLock  # not quick to import, and seldom needed

        with FileLock(folder / ".lockfile", timeout=LOCK_SECONDS):
            for program in _incomplete(folder):
                program.unlink(missing_ok=True)


def _incomplete(folder: Path) -> list[Path]:
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    programs = (name.removesuffix("-cache") for name in names if name.endswith("-cache"))
    return [folder / f"{key}-cache" for key in programs if f"{key}-atime" not in names]


def _is_writable(folder: Path) -> bool:
    """Whether the folder can be made or written into, as its nearest ancestor that is there tells."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        return False


def _processor() -> str:
    """A short name of the processor's kind: architecture and a digest of the instructions it has."""
    instructions = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), instructions)
    except OSError:  # not Linux
        pass
    return f"{platform.machine()}-{hashlib.sha256(instructions.encode()).hexdigest()[:8]}"
