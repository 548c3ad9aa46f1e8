"""Memory that is free goes back to the system: a long run is as large at its end as at its beginning."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Any

HEAPS_A_CORE = 2
"""glibc would keep 8 a core. Each grows to what its busiest moment took, and threads that come and go are given any."""

_M_ARENA_MAX = -8  # malloc.h


def keep_few_heaps() -> None:
    """Has glibc share few heaps among the threads of this process, unless the environment says how many.

    To be called before there are threads. With one heap for all of them, the steps of a small model took half as long
    again; with two a core, no longer.
    """
    named = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not named:
        _tell_glibc("mallopt", _M_ARENA_MAX, HEAPS_A_CORE * (os.cpu_count() or 1))


def give_back() -> None:
    """Returns free pages to the system, where glibc can: what one heap has free the others cannot use."""
    _tell_glibc("malloc_trim", 0)


def _tell_glibc(name: str, *arguments: Any) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has another allocator
            getattr(ctypes.CDLL(None), name)(*arguments)
