"""Memory that is free goes back to the system: a long run is about as large at its end as at its beginning."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def give_back() -> None:
    """Returns free pages to the system, where glibc can.

    It keeps a heap for every few threads, and what one of them frees the others cannot use. (One heap for all threads
    keeps a run as small, and made its steps half as long again.)
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has another allocator
            ctypes.CDLL(None).malloc_trim(0)
