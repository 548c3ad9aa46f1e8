"""Ctrl-C outside of training, where nothing is saved: the program ends, with one word."""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED = "interrupted"
STATUS = 128 + signal.SIGINT
CALLBACK_SECONDS = 0.05
"""Time for a callback to return."""


class CtrlC:
    """Raises KeyboardInterrupt at Ctrl-C, where Python and extension modules would drop it too.

    While modules are imported, the process ends at once: what their initialization does with an exception is a
    traceback, a crash or nothing. Python drops what is raised inside a callback of its garbage collector, and JAX has
    such a callback: it is raised again after that.
    """

    def __enter__(self) -> CtrlC:
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, _interrupt)
        self._unraisable_hook = sys.unraisablehook
        sys.unraisablehook = _hook_before(self._unraisable_hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._unraisable_hook
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


@functools.cache
def _hook_before(previous: Callable[[sys.UnraisableHookArgs], Any]) -> Callable[[sys.UnraisableHookArgs], None]:
    """A hook that raises a dropped KeyboardInterrupt again, and passes the rest on. Cached and so never freed: another
    thread may be about to call it when it is replaced."""

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(CALLBACK_SECONDS, _thread.interrupt_main).start()
        else:
            previous(dropped)

    return hook


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(STATUS)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
