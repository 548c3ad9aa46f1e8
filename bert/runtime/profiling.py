"""Profiler traces of a few steps, for TensorBoard and Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"

WARMUP_STEPS = 5
"""Number of steps before the trace, while caches fill."""

TRACED_STEPS = 5
"""Number of traced steps, including the host's work between them."""


def make_profiler(
    enabled: bool, folder: Path, log: Callable[[str], None]
) -> contextlib.AbstractContextManager[StepProfiler | None]:
    """Returns a context manager that yields a `StepProfiler` for a run's folder, or None if profiling is disabled."""
    return StepProfiler(folder, log) if enabled else contextlib.nullcontext()


class StepProfiler:
    """Writes a trace of a few early steps to ``profile/`` in a run's folder.

    Use it as a context manager or close it, so that a run that ends during the trace still writes the trace.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self._folder, self._log = folder / FOLDER, log
        self._num_steps = 0
        self._trace = contextlib.ExitStack()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self, state: Any) -> None:
        """Starts or ends the trace. Waits for ``state``, the result of the previous step."""
        if self._num_steps == WARMUP_STEPS:
            jax.block_until_ready(state)
            self._trace.callback(self._print_path)  # after the trace is written
            self._trace.enter_context(jax.profiler.trace(str(self._folder), create_perfetto_trace=True))
        if self._num_steps == WARMUP_STEPS + TRACED_STEPS:
            jax.block_until_ready(state)
            self._trace.close()
        self._num_steps += 1

    def close(self) -> None:
        """Writes the trace, even if it is incomplete."""
        if 0 < self._num_steps <= WARMUP_STEPS:
            self._log(f"no step was traced: the trace starts after {WARMUP_STEPS} steps")
        self._trace.close()

    def _print_path(self) -> None:
        [*_, trace] = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._log(
            f"the trace is in {self._folder}: open it with tensorboard --logdir {self._folder} "
            f"(xprof must be installed), or open {trace} on https://ui.perfetto.dev"
        )
