"""Seconds that the rest of a run takes, from a few calls that are timed before its first step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert.parallel.backends import Parallelism
from bert.runs.progress import StepCosts


@dataclass(frozen=True)
class Timed:
    """Seconds of a compiled function.

    Attributes:
        compilation: of the first call, beyond those of a later one.
        call: of a later call.
    """

    compilation: float
    call: float

    @classmethod
    def from_calls(cls, seconds: Sequence[float]) -> Timed:
        """From the first call, which compiles what is not compiled yet, and later ones, of which the fastest counts."""
        call = min(seconds[1:])
        return cls(max(seconds[0] - call, 0.0), call)


CALLS = 3
"""How often a function is called to be timed."""


def timed(call: Callable[[], Any]) -> Timed:
    """Calls a function `CALLS` times, and waits for the result each time."""
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return Timed.from_calls(seconds)


def time_train_step(
    train_step: Callable[..., Any],
    state: Any,
    batch: dict[str, np.ndarray],
    parallel: Parallelism,
    micro_batches: int,
) -> Timed:
    """Compiles and times a step on a copy of the state, which is thrown away: steps donate their state.

    Args:
        state: on the host.
        batch: this host's rows.
    """
    state, sharded = parallel.put_state(state), parallel.shard_batch(batch, micro_batches)
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        state, metrics = train_step(state, sharded)
        metrics.loss.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return Timed.from_calls(seconds)


def line_through(points: dict[int, float]) -> Callable[[int], float]:
    """Length -> seconds: a line through one or two measured points; through one, in proportion to the length."""
    (first, low), (last, high) = min(points.items()), max(points.items())
    if first == last:
        return lambda length: low * length / first
    slope = max((high - low) / (last - first), 0.0)
    return lambda length: max(low + slope * (length - first), 0.1 * low)


def costs_of_training(
    lengths: Sequence[int], step: int, total_steps: int, measure: Callable[[int], Timed]
) -> StepCosts:
    """The steps from ``step`` on, and the compilations that they still need.

    Args:
        lengths: [steps of an epoch] padded length of each step's batch; other epochs have about as many of each.
        step: steps done before.
        measure: step -> what it takes. Called for the first step and for one of the length farthest from its length.
    """
    ahead = [lengths[index % len(lengths)] for index in range(step, min(total_steps, step + len(lengths)))]
    first = ahead[0]
    farthest = max(set(ahead), key=lambda length: abs(length - first))
    points, compilation = {first: measure(step).call}, 0.0
    if farthest != first:
        second = measure(step + ahead.index(farthest))
        points[farthest], compilation = second.call, second.compilation
    seconds = line_through(points)
    mean = sum(seconds(length) * count for length, count in Counter(ahead).items()) / len(ahead)
    once = [(step + ahead.index(length) + 1, compilation) for length in sorted(set(ahead) - set(points))]
    return StepCosts(((total_steps, mean),), tuple(once))


def seconds_of_scoring(lengths: Sequence[int], length: int, measured: Timed, compiled: set[int]) -> float:
    """Seconds that batches of these padded lengths take, and the compilation of lengths that are not in ``compiled``.

    Args:
        length, measured: a batch of this length takes so long, others in proportion.
        compiled: lengths whose compilation is done or counted already; those of ``lengths`` are added.
    """
    new = set(lengths) - compiled
    compiled |= new
    return len(new) * measured.compilation + sum(measured.call * other / length for other in lengths)
