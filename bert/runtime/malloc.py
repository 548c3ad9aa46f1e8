"""glibc malloc tuning: huge pages, fewer arenas, and returning free memory to the OS."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

ARENAS_PER_CORE = 2
"""glibc would keep 8 a core. Each grows to what its busiest moment took, and threads that come and go are given any."""

_M_ARENA_MAX = -8  # malloc.h

_HUGE = "glibc.malloc.hugetlb"
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def reexec_with_huge_pages() -> None:
    """Has the allocator take memory in pages of 2 MB where the kernel gives them on demand: starts the process again.

    A step on a CPU takes its working memory from the system and gives it back; in pages of 4 kB that is a fifth of the
    step's processor time. glibc (from 2.35 on) reads the setting when a process starts and at no other time, so this
    is for the first line of a program: the same process runs the same command again, with the setting. Where the
    environment has it, or it would change nothing, nothing happens.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or _HUGE in tunables or not _huge_pages_on_demand():
        return
    environment = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{_HUGE}=1"]))}
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # then in small pages
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _huge_pages_on_demand() -> bool:
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        known = library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
        return known and "[madvise]" in _KERNEL.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False


def limit_malloc_arenas() -> None:
    """Has glibc share few heaps among the threads of this process, unless the environment says how many.

    To be called before there are threads. With one heap for all of them, the steps of a small model took half as long
    again; with two a core, no longer.
    """
    named = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not named:
        _call_libc("mallopt", _M_ARENA_MAX, ARENAS_PER_CORE * (os.cpu_count() or 1))


def release_free_memory() -> None:
    """Calls `malloc_trim(0)`, because free memory in one arena cannot be reused by another."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: Any) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has another allocator
            getattr(ctypes.CDLL(None), name)(*arguments)
