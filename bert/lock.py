"""One process at a time in a folder: a run's, or one where examples or a vocabulary are built."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from bert.config import UserError

LOCK = ".lock"
"""File whose lock a run holds. It stays behind and means nothing then: the lock is the kernel's."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def sole_process(folder: Path) -> Iterator[None]:
    """Holds the folder for this process, to the end of the block or of the process, however it ends (kill -9 too).

    The lock is flock(2)'s: on a local disk the kernel drops it with the process. On NFS (Linux) it is a lock of the
    server, so it holds between hosts too, and that of a host without power goes once the server has noticed. Lustre
    has to be mounted with ``flock``, or its locks hold within one host only, as on FUSE mounts of object stores. Where
    a file system knows no locks at all, the run goes on without.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"output_dir {folder} cannot be written ({error.strerror}): name another one") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by {_holder(descriptor)}: wait until that has ended, or name another --output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is all that is lost
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {_now()}\n".encode())
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_builder(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process builds what comes to stand in ``folder``, and keeps others waiting meanwhile.

    The lock lies beside the folder, and is as that of `sole_process`; but two that write the same files at once would
    spoil them, so there has to be one.

    Raises:
        UserError: the file system knows no locks.
    """
    with open(folder.with_name(folder.name + LOCK), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise UserError(
                f"the file system of {folder} knows no locks, which keep two processes from building the same: name "
                "another folder with data.cache_dir"
            ) from None
        yield


def _now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M}"


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if text := os.pread(descriptor, 300, 0).decode().strip():
            return text
    return "another process"
