"""Seconds that the rest of a run takes, from a few calls that are timed before its first step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main
from bert.runs.report import StepCosts


@dataclass(frozen=True)
class Timed:
    """Seconds of a compiled function.

    Attributes:
        compilation: of the first call, beyond those of a later one.
        call: of a later call.
    """

    compilation: float
    call: float


LATER_SECONDS, MAX_LATER_CALLS = 0.5, 8
"""How long, and how often at most, a function is called without waiting."""

LONG_CALL_SECONDS = 5.0
"""What a call takes that is not made again only to be timed."""


def timed(call: Callable[[], Any]) -> Timed:
    """Calls a function until a later call has been timed, and waits for the results.

    Short calls are started without waiting for the one before, as in a training loop, where they take less. Of a long
    one, what it takes after its compilation is enough. All hosts call it, and as often as the main process says: a
    call may wait for the other hosts.
    """
    compilation, waited = _seconds(call, 1)
    if broadcast_from_main(lambda: waited > LONG_CALL_SECONDS):
        return Timed(compilation, waited)
    first, later = compilation + waited, sum(_seconds(call, 1))
    more = broadcast_from_main(lambda: min(int(LATER_SECONDS / max(later, 1e-6)), MAX_LATER_CALLS))
    if more > 1:
        later = sum(_seconds(call, more)) / more
    return Timed(max(first - later, 0.0), later)


def _seconds(call: Callable[[], Any], times: int) -> tuple[float, float]:
    """Seconds in which so many calls in a row are started, as a compilation has to be done then, and those until their
    results are there."""
    start = time.perf_counter()
    results = [call() for _ in range(times)]
    started = time.perf_counter()
    jax.block_until_ready(results[-1])
    return started - start, time.perf_counter() - started


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
    losses = _losses(train_step, parallel.put_state(state), parallel.shard_batch(batch, micro_batches))
    return timed(partial(next, losses))


def _losses(train_step: Callable[..., Any], state: Any, sharded: dict[str, jax.Array]) -> Iterator[jax.Array]:
    """The loss of step after step on one batch."""
    while True:
        state, metrics = train_step(state, sharded)
        yield metrics.loss


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
