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
    """A training state as it is saved. The parameters of the checkpoint are the mean.

    Attributes:
        params: the mean; before the first evaluation, the trained parameters.
        trained: the state from which training continues.
        window: parameters at the last k evaluations, oldest first, followed by zeros if there were fewer.
        steps: [k] int32, steps of these evaluations, followed by zeros.
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
        """Adds the parameters at an evaluation. Returns False if the window already has this step."""
        if self.window and step <= self.window[-1][0]:
            return False
        self.replace([*self.window, (step, params)][-self.size :])
        return True

    def replace(self, window: list[tuple[int, Params]]) -> None:
        """Replaces the window."""
        self.window = window
        if window:
            self.mean = jax.tree.map(_mean, *(params for _, params in window))

    def add_to_state(self, state: TrainState) -> AveragedState:
        """Returns the state to save, which includes the window and its mean."""
        missing = self.size - len(self.window)
        window = tuple(params for _, params in self.window)
        steps = np.array([*(step for step, _ in self.window), *[0] * missing], np.int32)
        if missing:
            window += (jax.tree.map(np.zeros_like, state.params),) * missing
        return AveragedState(state.params if self.mean is None else self.mean, state, window, steps)

    def restore(self, checkpoints: Checkpoints, like: TrainState) -> tuple[int, TrainState] | None:
        """Restores the newest good state in the structure of ``like``, and the average at its step."""
        whole = AveragedState(like.params, like, (like.params,) * self.size, np.zeros(self.size, np.int32))
        restored = checkpoints.restore(whole)
        if restored is None:
            return None
        step, state = restored
        self.replace([(int(at), params) for at, params in zip(state.steps, state.window, strict=True) if at])
        return step, state.trained


def _mean(*arrays: np.ndarray) -> np.ndarray:
    return np.mean(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype)
