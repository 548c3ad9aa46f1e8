"""Worker processes: how many there may be, and how one starts."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Self

from bert.errors import require

_SWAPPING = threading.Lock()
"""Held while another module takes the place of __main__."""


def available_cores() -> int:
    """Cores this process may use; macOS does not report it, and has all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool(ProcessPoolExecutor):
    """Worker processes: spawned, since a fork of a process with threads may hang.

    In a ``with`` statement, a SIGTERM ends the workers before this process: those that are starting would print a
    traceback after its end.

    Args:
        processes: their number.
        initializer: called in each with ``initargs``; it calls `start_worker`.
    """

    def __init__(self, processes: int, initializer: Callable[..., None], initargs: tuple[Any, ...] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(processes, mp_context=context, initializer=initializer, initargs=initargs)

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._handles_sigterm = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, _terminate)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool | None:
        try:
            return super().__exit__(kind, error, trace)
        finally:
            if self._handles_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the processes that are missing, and hands one of them the call."""
        # A spawned process first runs the file of __main__, here the user's script: without `if __name__ ==
        # "__main__"` it would train a second time. Workers need nothing of it.
        with _SWAPPING:
            script = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                sys.modules["__main__"] = script


def _terminate(*_: object) -> None:
    """Ends the workers, and then this process."""
    if _SWAPPING.locked():  # a worker is starting, which is not known yet: try again soon
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def start_worker() -> None:
    """Prepares a worker process; the ``initializer`` of a pool calls it."""
    # Ctrl-C reaches the whole group: the parent answers it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for its next task on a pipe it holds both ends of: it would never see its parent die."""
    multiprocessing.connection.wait([require(multiprocessing.parent_process(), "the parent").sentinel])
    os._exit(1)
