"""Evaluation on the held-out rows of a pretraining phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from bert import metrics
from bert.data.pretraining.loader import Batch
from bert.parallel.backends import Parallelism
from bert.runs.metrics_log import Metrics
from bert.runtime.interrupts import InterruptHandler
from bert.training.losses import WeightedSums
from bert.training.means import accumulate_sums, compute_means
from bert.training.pretraining.data import PhaseData
from bert.training.pretraining.objectives import OBJECTIVES
from bert.training.recurrence import MEMORY, memory_shape, split_memory
from bert.training.run_length import timed


class PretrainingEvaluator:
    """Computes the mean losses over the held-out rows of a phase: parameters on the devices -> metrics."""

    def __init__(
        self,
        eval_step: Callable[..., WeightedSums],
        loss_factors: Mapping[str, float],
        data: PhaseData,
        parallel: Parallelism,
        interrupts: InterruptHandler,
    ) -> None:
        self._eval_step, self._data, self._parallel, self._interrupts = eval_step, data, parallel, interrupts
        self._loss_factors = loss_factors
        self._perplexity_loss = OBJECTIVES[data.phase.config.training.objective].perplexity_loss

    def __call__(self, params: Any) -> Metrics:
        means = compute_means(accumulate_sums(self._sums(params), self._parallel), self._loss_factors)
        loss, tokens_per_byte = means[self._perplexity_loss], self._data.tokens_per_byte
        bits = {} if tokens_per_byte is None else {"bits_per_byte": metrics.bits_per_byte(loss, tokens_per_byte)}
        return {**means, "perplexity": metrics.perplexity(loss), **bits}

    def _sums(self, params: Any) -> Iterator[WeightedSums]:
        memory = None
        for batch in self._data.eval_batches(self._parallel.process):
            self._interrupts.raise_if_requested()
            if memory is None:
                sharded = self._shard_first(batch)
            else:
                sharded = {**self._parallel.shard_batch(batch), MEMORY: memory}
            sums, memory = split_memory(self._eval_step(params, sharded))
            yield sums

    def _shard_first(self, batch: Batch) -> dict[str, Any]:
        """Copies the first batch to the devices, with an empty memory if the model has one."""
        shape = memory_shape(self._data.phase.config.model, len(batch["rows"]))
        empty = {} if shape is None else {MEMORY: np.zeros(shape, np.float32)}
        return self._parallel.shard_batch({**batch, **empty})

    def seconds(self, params: Any) -> float:
        """Estimates the seconds of an evaluation by timing one batch."""
        batch = self._shard_first(next(self._data.eval_batches(self._parallel.process)))
        return timed(partial(self._eval_step, params, batch)).call * self._data.num_eval_batches
