"""Seconds that the rest of a run takes, from a few calls that are timed before its first step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

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


def timed(call: Callable[[], Any]) -> Timed:
    """Calls twice, and waits for the result each time. The first call compiles what is not compiled yet."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return Timed(max(seconds[0] - seconds[1], 0.0), seconds[1])


def line_through(points: dict[int, float]) -> Callable[[int], float]:
    """Length -> seconds: a line through one or two measured points; through one, in proportion to the length."""
    (first, low), (last, high) = min(points.items()), max(points.items())
    if first == last:
        return lambda length: low * length / first
    slope = max((high - low) / (last - first), 0.0)
    return lambda length: max(low + slope * (length - first), 0.1 * low)


def pace_of_training(
    lengths: Sequence[int], step: int, total_steps: int, first: Timed, measure: Callable[[int], Timed]
) -> StepCosts:
    """The steps from ``step`` on, and the compilations that they still need.

    Args:
        lengths: [steps of an epoch] padded length of each step's batch; other epochs have about as many of each.
        step: steps done before.
        first: what the step after these takes.
        measure: step -> what it takes. Called for one step of the length that is farthest from the first one's.
    """
    ahead = [lengths[number % len(lengths)] for number in range(step, min(total_steps, step + len(lengths)))]
    own = ahead[0]
    other = max(set(ahead), key=lambda length: abs(length - own))
    points, compilation = {own: first.call}, 0.0
    if other != own:
        another = measure(step + ahead.index(other))
        points[other], compilation = another.call, another.compilation
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
