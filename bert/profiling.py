"""A trace of a few steps, for TensorBoard's profiler and for Perfetto."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"

LEFT_OUT = 5
"""Steps before the trace: two that time the step before the run begins, and some in which caches fill."""

STEPS = 5
"""Steps in the trace, with what the host does between them."""


class ProfiledStep:
    """A train step that writes a trace of some of its calls; what it gives is the step's own.

    Args:
        step: (state, batch) -> (state, outcome), compiled.
        folder: the run's; the trace goes to ``profile/`` in it.
        say: told where the trace lies and how to open it.
    """

    def __init__(self, step: Callable[..., Any], folder: Path, say: Callable[[str], None]) -> None:
        self._step, self._folder, self._say = step, folder / FOLDER, say
        self._calls = 0

    def __call__(self, state: Any, batch: Any) -> Any:
        self._calls += 1
        if self._calls == LEFT_OUT + 1:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
        if not LEFT_OUT < self._calls <= LEFT_OUT + STEPS:
            return self._step(state, batch)
        with jax.profiler.StepTraceAnnotation("train", step_num=self._calls - LEFT_OUT):
            result = self._step(state, batch)
        if self._calls == LEFT_OUT + STEPS:
            self._finish(result)
        return result

    def _finish(self, result: Any) -> None:
        jax.block_until_ready(result)
        jax.profiler.stop_trace()
        [*_, trace] = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._say(
            f"the trace of {STEPS} steps is in {self._folder}: open it by tensorboard --logdir {self._folder} "
            f"(with xprof installed), or {trace} on https://ui.perfetto.dev"
        )


def profiled(step: Callable[..., Any], asked: bool, folder: Path, say: Callable[[str], None]) -> Callable[..., Any]:
    """The step, with a trace of it if one is asked for."""
    return ProfiledStep(step, folder, say) if asked else step
