"""The mean of the parameters at a run's last evaluations (Vaswani et al. 2017, section 6.1)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import struct

from bert.runs.checkpoint import Checkpoints
from bert.training.step import TrainState

Params = Any


class AveragedState(struct.PyTreeNode):
    """A state as it is saved: whoever reads the parameters of a checkpoint reads the mean.

    Attributes:
        params: the mean; before the first evaluation, the parameters that are trained.
        trained: the state that training continues from.
        window: parameters at the last k evaluations, oldest first, then zeros if there were fewer.
        steps: [k] int32, their steps, then zeros.
    """

    params: Params
    trained: TrainState
    window: tuple[Params, ...]
    steps: np.ndarray


class ParameterAverage:
    """The mean of the parameters at the last ``size`` evaluations, on the host.

    Attributes:
        mean: summed in float64; None before the first evaluation.
        window: (step, parameters) at these evaluations, oldest first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mean: Params | None = None
        self.window: list[tuple[int, Params]] = []

    def add(self, step: int, params: Params) -> bool:
        """Takes the parameters at an evaluation; returns whether that of the step was missing."""
        if self.window and step <= self.window[-1][0]:
            return False
        self.replace([*self.window, (step, params)][-self.size :])
        return True

    def replace(self, window: list[tuple[int, Params]]) -> None:
        """Takes another window."""
        self.window = window
        if window:
            self.mean = jax.tree.map(_mean, *(params for _, params in window))


def _mean(*arrays: np.ndarray) -> np.ndarray:
    return np.mean(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype)


def with_average(checkpoints: Checkpoints, size: int) -> tuple[Checkpoints, ParameterAverage | None]:
    """The checkpoints of a run that averages over ``size`` evaluations, and the average; of 1, the given ones alone."""
    if size == 1:
        return checkpoints, None
    average = ParameterAverage(size)
    return AveragedCheckpoints(checkpoints, average), average


class AveragedCheckpoints:
    """The checkpoints of a run with a `ParameterAverage`, which is saved and restored with each state."""

    def __init__(self, checkpoints: Checkpoints, average: ParameterAverage) -> None:
        self._checkpoints, self._average = checkpoints, average

    def save(self, step: int, state: TrainState) -> None:
        """Begins to save a state with the window and its mean."""
        average = self._average
        missing = average.size - len(average.window)
        window = tuple(params for _, params in average.window)
        steps = np.array([*(step for step, _ in average.window), *[0] * missing], np.int32)
        if missing:
            window += (jax.tree.map(np.zeros_like, state.params),) * missing
        params = state.params if average.mean is None else average.mean
        self._checkpoints.save(step, AveragedState(params, state, window, steps))

    def set_best(self, step: int) -> None:
        """Keeps the mean at ``step`` besides the newest checkpoints."""
        self._checkpoints.set_best(step)

    def restore(self, like: Any = None) -> tuple[int, TrainState] | None:
        """The newest good state in the structure of ``like``, a `TrainState`; the average becomes that of its step."""
        size = self._average.size
        whole = AveragedState(like.params, like, (like.params,) * size, np.zeros(size, np.int32))
        restored = self._checkpoints.restore(whole)
        if restored is None:
            return None
        step, state = restored
        self._average.replace([(int(at), params) for at, params in zip(state.steps, state.window, strict=True) if at])
        return step, state.trained
