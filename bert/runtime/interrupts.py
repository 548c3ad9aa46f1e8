"""Requests to stop: Ctrl-C, SIGTERM, a closed terminal, and preemption notices."""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """Raised after a signal, once the state is saved. ``status`` is the exit status (130, 143 or 129)."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(step)
        self.step, self.signal_number = step, signal_number
        self.status = 128 + signal_number


class EvaluationInterrupted(Exception):
    """Raised if a signal arrives during an evaluation."""


@dataclass
class InterruptHandler:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag for the training loop. A second SIGINT ends the process.

    SIGHUP means that the terminal or ssh session was closed. It stays ignored under ``nohup``.

    With several hosts, JAX's runtime handles SIGTERM: it forwards one host's notice to all, and they stop after the
    same step. Ctrl-C ends a host at once. Signals are handled only in the main thread.
    """

    signal_number: int | None = None
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> InterruptHandler:
        import jax  # `CtrlC` does not need it, and commands use that before they import JAX

        self._shared = jax.distributed.is_initialized()
        takes_signals = not self._shared and threading.current_thread() is threading.main_thread()
        hangup = getattr(signal, "SIGHUP", None)  # missing on Windows
        signals = [signal.SIGINT, signal.SIGTERM]
        if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
            signals.append(hangup)
        for signum in signals if takes_signals else ():
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def should_stop(self, step: int) -> bool:
        """Whether the loop must stop after this step. Every host calls it exactly once after every step."""
        if self._shared and self.signal_number is None:
            from orbax.checkpoint.utils import reached_preemption

            if reached_preemption(step):
                self.signal_number = signal.SIGTERM
        return self.signal_number is not None

    def raise_if_requested(self) -> None:
        """Raises `EvaluationInterrupted` after a signal, to stop work that can be repeated."""
        if self.signal_number is not None:
            raise EvaluationInterrupted

    def raise_if_signalled(self, step: int) -> None:
        """Raises `Interrupted` after a signal. Call this when the state of ``step`` is saved."""
        if self.signal_number is not None:
            raise Interrupted(step, self.signal_number)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.signal_number is not None and signum == signal.SIGINT:
            # Not an exception, which would wait for the save while it unwinds.
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the progress bar hides it
            os.write(2, f"{cursor}\nended at once; what had been saved before is still there\n".encode())
            os._exit(128 + signum)
        if signum == getattr(signal, "SIGHUP", None):
            _leave_closed_terminal()
        self.signal_number = signum


def _leave_closed_terminal() -> None:
    """Redirects output to the null device if its terminal was closed, because a failing write would end the run."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


INTERRUPTED = "interrupted"
STATUS = 128 + signal.SIGINT
CALLBACK_SECONDS = 0.05
"""Maximum duration of a callback, in seconds."""


class CtrlC:
    """Raises KeyboardInterrupt on Ctrl-C, even where Python or extension modules would drop it.

    During imports, the process ends at once, because an exception in a module's initialization could cause a traceback
    or a crash, or be ignored. Python also drops exceptions in callbacks of its garbage collector, such as JAX's. In
    that case the exception is raised again after the callback.
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
    """Returns a hook that re-raises a dropped KeyboardInterrupt and passes on other errors.

    It is cached and never freed, because another thread may be calling it while it is replaced.
    """

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
