"""Evaluation of a fine-tuning run: outputs of a split, early stopping, scores of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from bert import metrics
from bert.config import FinetuneConfig
from bert.data.batching import bucket_length, evaluation_batches, local_slice
from bert.data.features import Rows
from bert.parallel.backends import Parallelism, psum_if_axis
from bert.parallel.multihost import broadcast_from_main
from bert.runs.metrics_log import Metrics, read_metrics, to_jsonable
from bert.runtime.interrupts import InterruptHandler
from bert.tasks.base import Examples, Outputs, Task
from bert.training.losses import Apply, TaskLoss, WeightedSums, total_loss
from bert.training.timing import Timed, timed


def compute_means(sums: dict[str, Any], factors: Mapping[str, float] = MappingProxyType({})) -> Metrics:
    """(sum, weight) pairs -> means, and ``loss``: the losses' sum, by the factors of the `Objective`. A weight of 0
    gives 0."""
    means = {name: float(total) / float(weight) if weight else 0.0 for name, (total, weight) in sums.items()}
    return {"loss": total_loss(means, factors), **means}


def accumulate_sums(batches: Iterable[WeightedSums], parallel: Parallelism) -> dict[str, np.ndarray]:
    """Sums of evaluation batches, added in float64."""
    totals: dict[str, np.ndarray] = {}
    for sums in batches:
        for name, pair in parallel.to_host(sums).items():
            totals[name] = totals.get(name, np.zeros(2)) + np.array(pair, dtype=np.float64)
    return totals


class Split(NamedTuple):
    """One split of a task, as read and as rows for the model."""

    examples: Examples
    features: Rows


def should_stop_early(scores: Sequence[float | None], patience: int, higher: bool = True) -> bool:
    """Whether the last ``patience`` scores, in order of time, are all no better than the best one before them."""
    before, last = scores[:-patience], scores[-patience:]
    return bool(before) and not any(all(metrics.is_better(score, other, higher) for other in before) for score in last)


class EarlyStopping:
    """Chooses the best evaluation by the main metric, and ends a run without a better one.

    Starts from the evaluations in metrics.jsonl, so that a resumed run decides as an uninterrupted one. The main
    process decides for all hosts.
    """

    def __init__(self, folder: Path, metric: str, higher_is_better: bool, patience: int | None) -> None:
        """
        Args:
            folder: of the run.
            patience: evaluations in a row without a better score that end the run; None never ends it.
        """
        self._metric, self._higher, self._patience = metric, higher_is_better, patience
        lines = broadcast_from_main(partial(read_eval_metrics, folder))
        self._scores: dict[int, float | None] = {line["step"]: line[metric] for line in lines}

    def update(self, step: int, scores: Metrics) -> bool:
        """Takes the scores of an evaluation; returns whether it is the best so far."""
        score = broadcast_from_main(lambda: to_jsonable(scores[self._metric]))
        earlier = [other for other_step, other in self._scores.items() if other_step < step]
        self._scores[step] = score
        return all(metrics.is_better(score, other, self._higher) for other in earlier)

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, the first one of equals; None without any."""
        best = None
        for step, score in sorted(self._scores.items()):
            if best is None or metrics.is_better(score, self._scores[best], self._higher):
                best = step
        return best

    def should_stop(self, step: int) -> bool:
        """Whether the evaluations up to ``step`` end the run there."""
        scores = [score for other_step, score in self._scores.items() if other_step <= step]
        return self._patience is not None and should_stop_early(scores, self._patience, self._higher)


def read_eval_metrics(folder: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run's metrics.jsonl, in order."""
    return [line for line in read_metrics(folder) if line["split"] == "eval"]


def scores_of_line(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("step", "split")}


class Evaluator(Protocol):
    """Outputs and losses of a split."""

    def batches(self, split: Split) -> list[tuple[np.ndarray, int]]:
        """Rows and padded length of each batch."""

    def time(self, params: Any, split: Split) -> tuple[int, Timed]:
        """Padded length of a batch in the middle of a split, and the time that its outputs take."""

    def __call__(
        self, params: Any, split: Split, between: Callable[[], None] = lambda: None
    ) -> tuple[Outputs, dict[str, float]]:
        """Replicated parameters -> the outputs of each row, and the losses where the rows have labels.

        ``between`` is called before each batch.
        """


class BatchedEvaluator:
    """The batches of a split on the devices."""

    def __init__(self, parallel: Parallelism, config: FinetuneConfig) -> None:
        self._parallel, self._config = parallel, config

    def batches(self, split: Split) -> list[tuple[np.ndarray, int]]:
        """Rows and padded length of each batch of a split."""
        data, lengths = self._config.data, split.features.lengths
        size = self._config.training.rows_per_evaluation
        return [
            (rows, bucket_length(int(lengths[rows].max()), data.buckets, data.max_length))
            for rows in evaluation_batches(lengths, size)
        ]

    def time(self, params: Any, split: Split) -> tuple[int, Timed]:
        """Padded length of a batch in the middle of a split, and the time that its outputs take."""
        batches = self.batches(split)
        rows, length = batches[len(batches) // 2]
        return length, timed(partial(self._outputs, params, self._shard_batch(split, rows, length)))

    def _outputs(self, params: Any, batch: dict[str, jax.Array]) -> Any:
        """What is timed: the outputs of a batch."""
        raise NotImplementedError

    def _shard_batch(self, split: Split, rows: np.ndarray, length: int) -> dict[str, jax.Array]:
        """A batch on the devices."""
        return self._parallel.shard_batch(local_slice(self._batch(split, rows, length), self._parallel.process))

    def _batch(self, split: Split, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        return split.features.batch(rows, length, self._config.training.rows_per_evaluation)


class TaskEvaluator(BatchedEvaluator):
    """Outputs of every row of a split, in its order, and the mean loss, over all devices."""

    def __init__(self, apply: Apply, loss: TaskLoss, parallel: Parallelism, config: FinetuneConfig) -> None:
        super().__init__(parallel, config)
        self._name = loss.metrics[0]
        self._compiled = parallel.compile(lambda params, batch: apply(params, batch, None))
        self._loss = parallel.compile(lambda outputs, batch: psum_if_axis(loss.sums(outputs, batch)[0], parallel.axis))

    def _outputs(self, params: Any, batch: dict[str, jax.Array]) -> Any:
        return self._compiled(params, batch)

    def __call__(
        self, params: Any, split: Split, between: Callable[[], None] = lambda: None
    ) -> tuple[Outputs, dict[str, float]]:
        """Replicated parameters -> one float32 array a row, and the ``loss`` where the rows have labels.

        Of a head that says something of each token, a row's array [T, L] ends with the row's own tokens. ``between``
        is called before each batch.
        """
        lengths = split.features.lengths
        outputs: list[np.ndarray] = [np.zeros(0)] * len(lengths)
        sums = []
        for rows, length in self.batches(split):
            between()
            batch = self._shard_batch(split, rows, length)
            out = self._outputs(params, batch)
            if split.features.labels is not None:
                sums.append({self._name: self._loss(out, batch)})
                if not self._parallel.steps_in_flight:
                    jax.block_until_ready(sums)
            for row, array in zip(rows, self._parallel.gather_rows(out), strict=False):
                outputs[row] = array[: lengths[row]] if array.ndim == 2 else array
        return outputs, {"loss": compute_means(accumulate_sums(sums, self._parallel))["loss"]} if sums else {}


class DevEvaluator:
    """Scores of dev: the state's parameters on the devices -> metrics.

    Attributes:
        last_outputs: of the last evaluation; None before the first one.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        task: Task,
        dev: Split,
        interrupts: InterruptHandler,
        merge: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        """
        Args:
            merge: the state's parameters -> the model's, both on the devices.
        """
        self._evaluator, self._task, self._dev, self._interrupts = evaluator, task, dev, interrupts
        self._merge = merge
        self.last_outputs: Outputs | None = None

    def __call__(self, params: Any) -> Metrics:
        outputs, losses = self._evaluator(self._merge(params), self._dev, self._interrupts.raise_if_requested)
        self.last_outputs = outputs
        task, features, examples = self._task, self._dev.features, self._dev.examples
        if task.tuned_at_each_evaluation:
            task = task.tune(outputs, features, examples)
        return {**losses, **task.score(task.predict(outputs, features, examples), examples)}
