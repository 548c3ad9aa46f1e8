"""Worker processes: how many there may be, and how one starts."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

from bert.errors import require


def available_cores() -> int:
    """Cores this process may use; macOS does not report it, and has all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_worker() -> None:
    """Prepares a worker process; pass it as the ``initializer`` of a pool."""
    # Ctrl-C reaches the whole group: the parent answers it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for its next task on a pipe it holds both ends of: it would never see its parent die."""
    multiprocessing.connection.wait([require(multiprocessing.parent_process(), "the parent").sentinel])
    os._exit(1)
