"""Settings of the process: glibc's allocator (huge pages, fewer arenas, trimming) and the standard streams."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from pathlib import Path
from typing import Any

ARENAS_PER_CORE = 2
"""Limit instead of glibc's 8 per core. Arenas never shrink, and new threads may use any of them."""

_M_ARENA_MAX = -8  # malloc.h

_HUGE = "glibc.malloc.hugetlb"
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_DEVICES = Path("/dev")
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "accel[0-9]*", "vfio/[0-9]*")
"""Device files of NVIDIA GPUs, NVIDIA GPUs under WSL, and TPUs with either kind of driver."""
_TPU_VARIABLES = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")


def reexec_with_huge_pages() -> None:
    """Re-executes this program with 2 MB pages in glibc's allocator, if it runs on a CPU and the kernel supports it.

    Each training step on a CPU allocates and frees its working memory, which takes a fifth of the CPU time with 4 kB
    pages. glibc (2.35 and later) reads the setting only at process start, so call this first in a program. `os.execve`
    keeps the process and its arguments. Does nothing with ``BERT_NO_REEXEC=1``, if ``GLIBC_TUNABLES`` has the setting,
    with an accelerator, or if the kernel does not provide huge pages on demand.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if os.environ.get("BERT_NO_REEXEC", "0") != "0" or _HUGE in tunables:
        return
    if sys.platform != "linux" or is_accelerator_visible() or not _huge_pages_on_demand():
        return
    environment = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{_HUGE}=1"]))}
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # continue with small pages
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def is_accelerator_visible() -> bool:
    """Whether JAX may find a GPU or TPU, judging by environment variables and device files. Does not use JAX."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms.split(",")[0] != "cpu"  # the first one is the default backend
    if any(name in os.environ for name in _TPU_VARIABLES):
        return True
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return any(
        next(_DEVICES.glob(pattern), None) is not None
        for pattern in _DEVICE_FILES
        if not (hidden and pattern.startswith("nvidia"))
    )


def _huge_pages_on_demand() -> bool:
    try:
        library, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        known = library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
        return known and "[madvise]" in _KERNEL.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False


def limit_malloc_arenas() -> None:
    """Limits the number of glibc's arenas in this process, unless the environment sets it.

    Call this before threads start. With a single arena, the steps of a small model took 50% longer; with two per core,
    they took no longer.
    """
    named = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not named:
        _call_libc("mallopt", _M_ARENA_MAX, ARENAS_PER_CORE * (os.cpu_count() or 1))


def release_free_memory() -> None:
    """Returns free memory to the system with `malloc_trim(0)`, because arenas cannot use each other's free memory."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: Any) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # musl has no such function
            getattr(ctypes.CDLL(None), name)(*arguments)


def prepare_streams() -> None:
    """Opens the null device for each standard stream that the shell has closed (`<&-`, `>&-`, `2>&-`).

    Otherwise the stream would be None, messages for a closed stderr would go to stdout, and the next opened file would
    become the stream. File names that are not valid UTF-8 are printed with backslash escapes.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def is_stdout_closed() -> bool:
    """Whether the shell has closed standard output."""
    return getattr(sys.stdout, "name", "") == os.devnull  # opened by `prepare_streams`
