"""One process at a time in a folder: a run's, or one where examples or a vocabulary are built."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from filelock import lock_descriptor

from bert.errors import UserError

LOCK = ".lock"
"""File whose lock a run holds. It stays behind and means nothing then: the lock is the kernel's."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without locks."""


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds the folder for this process, to the end of the block or of the process, however it ends (kill -9 too).

    The lock is flock(2)'s. On a local disk the kernel drops it with the process. On NFS (Linux) it is a lock of the
    server, so it holds between hosts too, and that of a host without power goes once the server has noticed. Lustre has
    to be mounted with ``flock``, or its locks hold within one host only, as on FUSE mounts of object stores. If the
    file system has no locks at all, the run continues without one.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    try:
        file = open(folder / LOCK, "ab+", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be written ({error.strerror}): pass another one") from None
    with file:
        if _try_lock(file) is False:
            raise UserError(
                f"{folder} is in use by {_holder(file)}: wait until that has ended, or pass another --output_dir"
            )
        with contextlib.suppress(OSError):  # a full disk: only the description of the holder is lost
            file.truncate(0)
            since = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode())
        yield


@contextlib.contextmanager
def blocking_lock(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process builds ``folder``, and keeps others waiting meanwhile.

    The lock file is next to the folder, and the lock is as that of `exclusive_lock`; but two processes that write the
    same files at once would spoil them, so a file system without locks is an error.

    Raises:
        UserError: the file system has no locks.
    """
    with open(folder.with_name(folder.name + LOCK), "wb") as file:
        held = _try_lock(file)
        if held is None:
            raise UserError(
                f"the file system of {folder} has no locks, which keep two processes from building the same: pass "
                "another folder with data.cache_dir"
            )
        if not held:
            on_wait()
            lock_descriptor(file.fileno())
        yield


def _try_lock(file: IO[bytes]) -> bool | None:
    """Locks an open file: True; False if another process holds the lock, None if the file system has no locks."""
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


def _holder(file: IO[bytes]) -> str:
    """The description that the process with the lock has written."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        file.seek(0)
        if text := file.read(300).decode().strip():
            return text
    return "another process"
