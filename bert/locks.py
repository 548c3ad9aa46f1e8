"""One process at a time in a folder: a run's, or one where examples or a vocabulary are built."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bert.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""File whose lock a run holds. It stays behind and means nothing then: the lock is the kernel's."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

_WINDOWS_BYTE = 1 << 30
"""Place of the byte that is locked on Windows: beyond the text, because nobody else can read a locked byte there."""

_WINDOWS_SECONDS = 0.2
"""Time between two attempts at a lock on Windows, where waiting for it ends after ten seconds."""


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Holds the folder for this process, to the end of the block or of the process, however it ends (kill -9 too).

    The lock is flock(2)'s, on Windows that of one byte (msvcrt). On a local disk the kernel drops it with the process.
    On NFS (Linux) it is a lock of the server, so it holds between hosts too, and that of a host without power goes once
    the server has noticed. Lustre has to be mounted with ``flock``, or its locks hold within one host only, as on FUSE
    mounts of object stores. Where a file system knows no locks at all, the run goes on without.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be written ({error.strerror}): name another one") from None
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by {_holder(descriptor)}: wait until that has ended, or name another --output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is all that is lost
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {_now()}\n".encode())
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def blocking_lock(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process builds what comes to stand in ``folder``, and keeps others waiting meanwhile.

    The lock lies beside the folder, and is as that of `exclusive_lock`; but two that write the same files at once would
    spoil them, so there has to be one.

    Raises:
        UserError: the file system knows no locks.
    """
    with open(folder.with_name(folder.name + LOCK), "w") as lock:
        try:
            _lock(lock.fileno())
        except BlockingIOError:
            waits()
            _lock(lock.fileno(), wait=True)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise UserError(
                f"the file system of {folder} knows no locks, which keep two processes from building the same: name "
                "another folder with data.cache_dir"
            ) from None
        yield


def _lock(descriptor: int, wait: bool = False) -> None:
    """Locks an open file for this process. Raises BlockingIOError if another one holds it, unless it is waited for.

    `filelock` would do neither of two things in all its versions: leave the name of the holder in the file, and take
    no lock that outlives a kill where the file system has none that does not.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    import msvcrt

    while True:
        os.lseek(descriptor, _WINDOWS_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
            return
        except PermissionError:
            if not wait:
                raise BlockingIOError from None
            time.sleep(_WINDOWS_SECONDS)


def _now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M}"


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        if text := os.read(descriptor, 300).decode().strip():
            return text
    return "another process"
