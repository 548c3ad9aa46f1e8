"""A trace of a few steps, for TensorBoard's profiler and for Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"

WARMUP_STEPS = 5
"""Steps before the trace, in which caches fill."""

TRACED_STEPS = 5
"""Steps in the trace, with what the host does between them."""


def make_profiler(
    enabled: bool, folder: Path, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[StepProfiler | None]:
    """A `StepProfiler` for the run in a folder; a context without one unless enabled."""
    return StepProfiler(folder, say) if enabled else contextlib.nullcontext()


class StepProfiler:
    """Writes one trace of some early steps of a process into ``profile/`` of a run's folder.

    Close it, or use it in a ``with``: a run that ends within the trace writes what it has.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder / FOLDER, say
        self._num_steps = 0
        self._trace = contextlib.ExitStack()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self, state: Any) -> None:
        """Starts the trace, or ends it once ``state``, of the step before, is computed."""
        if self._num_steps == WARMUP_STEPS:
            jax.block_until_ready(state)
            self._trace.callback(self._print_path)  # after the trace is written
            self._trace.enter_context(jax.profiler.trace(str(self._folder), create_perfetto_trace=True))
        if self._num_steps == WARMUP_STEPS + TRACED_STEPS:
            jax.block_until_ready(state)
            self._trace.close()
        self._num_steps += 1

    def close(self) -> None:
        """Writes a trace that is still open."""
        if 0 < self._num_steps <= WARMUP_STEPS:
            self._say(f"no step was traced: the trace starts after {WARMUP_STEPS} steps")
        self._trace.close()

    def _print_path(self) -> None:
        [*_, trace] = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"the trace is in {self._folder}: open it with tensorboard --logdir {self._folder} "
            f"(xprof must be installed), or open {trace} on https://ui.perfetto.dev"
        )
