"""Requests to stop: Ctrl-C, SIGTERM, a closed terminal, and notices that the machine will be taken away."""

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
    """A signal asked the run to stop. The state has been saved; ``status`` is the exit status (130, 143 or 129)."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(step)
        self.step, self.signal_number = step, signal_number
        self.status = 128 + signal_number


class EvaluationInterrupted(Exception):
    """A signal came during an evaluation."""


@dataclass
class InterruptHandler:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag that the loop reads; a second SIGINT ends the process.

    SIGHUP means that the terminal or the ssh session was closed. It stays ignored if it is, as under ``nohup``.

    With several hosts, JAX's runtime handles SIGTERM: it shares the notice of one host with all, and they stop after
    the same step. Ctrl-C ends a host at once. Only the main thread can take signals: in another one, none are taken.
    """

    signal_number: int | None = None
    _previous: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> InterruptHandler:
        import jax  # not needed by `CtrlC`, which commands use before they import JAX

        self._shared = jax.distributed.is_initialized()
        takes_signals = not self._shared and threading.current_thread() is threading.main_thread()
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
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
        """Whether the loop is to stop after this step. To be asked once after every step, by every host."""
        if self._shared and self.signal_number is None:
            from orbax.checkpoint.utils import reached_preemption

            if reached_preemption(step):
                self.signal_number = signal.SIGTERM
        return self.signal_number is not None

    def raise_if_requested(self) -> None:
        """Raises `EvaluationInterrupted` once a signal has come: for work that is long and can be done again."""
        if self.signal_number is not None:
            raise EvaluationInterrupted

    def raise_if_signalled(self, step: int) -> None:
        """Raises `Interrupted` once a signal has come. To be called when the state of ``step`` is saved."""
        if self.signal_number is not None:
            raise Interrupted(step, self.signal_number)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.signal_number is not None and signum == signal.SIGINT:
            # Not by an exception: what it unwinds would wait for the save that the user does not want to wait for.
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which the progress bar has hidden
            os.write(2, f"{cursor}\nended at once; what had been saved before is still there\n".encode())
            os._exit(128 + signum)
        if signum == getattr(signal, "SIGHUP", None):
            _leave_closed_terminal()
        self.signal_number = signum


def _leave_closed_terminal() -> None:
    """Sends output to nowhere if its terminal was closed: a failing write would end the run before it is saved."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


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
