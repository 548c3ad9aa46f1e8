"""Means of losses and metrics over batches and of parameters over evaluations, and early stopping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import struct

from bert import metrics
from bert.model.parameters import Params
from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main
from bert.runs.checkpoint import Checkpoints
from bert.runs.metrics_log import Metrics, read_metrics, to_jsonable
from bert.training.losses import WeightedSums, total_loss
from bert.training.step import TrainState


def compute_means(sums: dict[str, Any], factors: Mapping[str, float] = MappingProxyType({})) -> Metrics:
    """Returns the means of (sum, weight) pairs, and ``loss``: the sum of the losses, each multiplied by its factor.

    A mean with weight 0 is 0.
    """
    means = {name: float(total) / float(weight) if weight else 0.0 for name, (total, weight) in sums.items()}
    return {"loss": total_loss(means, factors), **means}


def accumulate_sums(batches: Iterable[WeightedSums], parallel: Parallelism) -> dict[str, np.ndarray]:
    """Adds the sums of evaluation batches in float64."""
    totals: dict[str, np.ndarray] = {}
    for sums in batches:
        for name, pair in parallel.to_host(sums).items():
            totals[name] = totals.get(name, np.zeros(2)) + np.array(pair, dtype=np.float64)
    return totals


def should_stop_early(scores: Sequence[float | None], patience: int, higher: bool = True) -> bool:
    """Returns whether none of the last ``patience`` scores is better than the best score before them."""
    before, last = scores[:-patience], scores[-patience:]
    return bool(before) and not any(all(metrics.is_better(score, other, higher) for other in before) for score in last)


class EarlyStopping:
    """Selects the best evaluation by the main metric, and ends a run that no longer improves.

    Starts from the evaluations in metrics.jsonl, so that a resumed run behaves like an uninterrupted one. The main
    process decides for all hosts.
    """

    def __init__(self, folder: Path, metric: str, higher_is_better: bool, patience: int | None) -> None:
        """Initializes early stopping.

        Args:
            patience: number of consecutive evaluations without a better score that end the run; None never ends it.
        """
        self._metric, self._higher, self._patience = metric, higher_is_better, patience
        lines = broadcast_from_main(partial(read_eval_metrics, folder))
        self._scores: dict[int, float | None] = {line["step"]: line[metric] for line in lines}

    def update(self, step: int, scores: Metrics) -> bool:
        """Adds the scores of an evaluation. Returns whether it is the best so far."""
        score = broadcast_from_main(lambda: to_jsonable(scores[self._metric]))
        earlier = [other for other_step, other in self._scores.items() if other_step < step]
        self._scores[step] = score
        return all(metrics.is_better(score, other, self._higher) for other in earlier)

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, the first one if scores are equal; None without evaluations."""
        best = None
        for step, score in sorted(self._scores.items()):
            if best is None or metrics.is_better(score, self._scores[best], self._higher):
                best = step
        return best

    def should_stop(self, step: int) -> bool:
        """Returns whether the evaluations up to ``step`` end the run."""
        scores = [score for other_step, score in self._scores.items() if other_step <= step]
        return self._patience is not None and should_stop_early(scores, self._patience, self._higher)


def read_eval_metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the evaluation lines of a run's metrics.jsonl, in order."""
    return [line for line in read_metrics(folder) if line["split"] == "eval"]


def scores_of_line(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("step", "split")}


class AveragedState(struct.PyTreeNode):
    """A training state as it is saved. The parameters of the checkpoint are the mean.

    Attributes:
        params: the mean; before the first evaluation, the trained parameters.
        trained: the state from which training continues.
        window: parameters at the last k scheduled evaluations, oldest first, followed by zeros if there were fewer.
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
        window: (step, parameters) at the last scheduled evaluations, oldest first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mean: Params | None = None
        self.window: list[tuple[int, Params]] = []

    def add(self, step: int, params: Params, in_window: bool = True) -> bool:
        """Adds the parameters at an evaluation. Returns False if the window already has this step.

        Args:
            in_window: whether later means include these parameters. A longer run would not evaluate the last step of
                this one, unless it is a multiple of ``eval_every``.
        """
        if self.window and step <= self.window[-1][0]:
            return False
        window = [*self.window, (step, params)][-self.size :]
        self.mean = _mean_of(window)
        if in_window:
            self.window = window
        return True

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
        self.window = [(int(at), params) for at, params in zip(state.steps, state.window, strict=True) if at]
        self.mean = _mean_of(self.window) if self.window else None
        return step, state.trained


def _mean_of(window: Sequence[tuple[int, Params]]) -> Params:
    return jax.tree.map(_mean, *(params for _, params in window))


def _mean(*arrays: np.ndarray) -> np.ndarray:
    return np.mean(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype)
