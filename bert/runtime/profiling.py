"""A trace of a few steps, for TensorBoard's profiler and for Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"

WARMUP_STEPS = 5
"""Steps before the trace: two that time the step before the run begins, and some in which caches fill."""

TRACED_STEPS = 5
"""Steps in the trace, with what the host does between them. Fewer where a batch of another length, which has to be
compiled, or the end of the run comes before."""

Step = Callable[..., Any]


class ProfiledStep:
    """A train step that writes a trace of some of its calls; what it gives is the step's own.

    Args:
        step: (state, batch) -> (state, outcome), compiled.
        folder: the run's; the trace goes to ``profile/`` in it.
        say: told where the trace lies and how to open it.
        all_steps: the steps of all phases, which may be none but this one. JAX writes one trace at a time, and a
            phase may be over before its trace is whole.
    """

    def __init__(
        self, step: Step, folder: Path, say: Callable[[str], None], all_steps: Sequence[ProfiledStep] = ()
    ) -> None:
        self._step, self._folder, self._say, self._all = step, folder / FOLDER, say, all_steps
        self._calls = self._traced = 0
        self._tracing = self.done = False
        self._compiled: set[tuple[Any, ...]] = set()
        self._result: Any = None

    def __call__(self, state: Any, batch: Any) -> Any:
        for other in self._all:
            if other is not self:
                other.end()
        self._calls += 1
        shapes = tuple(array.shape for array in jax.tree.leaves(batch))
        if shapes not in self._compiled:
            self._compiled.add(shapes)
            self.end()
            return self._step(state, batch)
        if self._calls > WARMUP_STEPS and not (self._tracing or self.done):
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._tracing = True
        if not self._tracing:
            return self._step(state, batch)
        self._traced += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=self._traced):
            result = self._result = self._step(state, batch)
        if self._traced == TRACED_STEPS:
            self.end()
        return result

    def end(self) -> None:
        """Writes the trace, if one has begun."""
        if not self._tracing:
            return
        jax.block_until_ready(self._result)
        jax.profiler.stop_trace()
        self._tracing, self.done, self._result = False, True, None
        [*_, trace] = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        steps = f"{self._traced} step{'s' * (self._traced != 1)}"
        self._say(
            f"the trace of {steps} is in {self._folder}: open it by tensorboard --logdir {self._folder} "
            f"(with xprof installed), or {trace} on https://ui.perfetto.dev"
        )


@contextlib.contextmanager
def profiler(asked: bool, folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[Step], Step]]:
    """What makes a train step write a trace, if one is asked for; at the end of the block it is written in any case."""
    made: list[ProfiledStep] = []

    def profiled(step: Step) -> Step:
        if not asked:
            return step
        made.append(ProfiledStep(step, folder, say, made))
        return made[-1]

    try:
        yield profiled
    finally:
        for step in made:
            step.end()
    if made and not any(step.done for step in made):
        say(f"no step was traced: the trace begins after {WARMUP_STEPS - 2} steps of a run")
