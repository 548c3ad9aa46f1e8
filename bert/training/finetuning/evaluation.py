"""Evaluation of a task on its splits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import Decoding, FinetuneConfig
from bert.data.batching import bucket_length, evaluation_batches, host_rows
from bert.data.rows import QueryDocumentRows, Rows, TokenRows, token_arrays
from bert.data.windows import WindowedRows, outputs_of_texts
from bert.inference.decoding import Decoded
from bert.inference.generators import decode_targets, max_target_tokens
from bert.inference.sampling import DecodingArrays
from bert.model.decoders import BertForSequenceToSequence
from bert.parallel.backends import Parallelism, psum_if_axis
from bert.runs.metrics_log import Metrics
from bert.runtime.interrupts import InterruptHandler
from bert.tasks.base import Outputs, Task
from bert.tasks.splits import Examples
from bert.training.losses import Apply, TaskLoss
from bert.training.means import accumulate_sums, compute_means


class Split(NamedTuple):
    """A split of a task, as read from its file and as rows for the model."""

    examples: Examples
    features: Rows


class Evaluator(Protocol):
    """Computes the outputs and losses of a split."""

    def __call__(
        self, params: Any, split: Split, between: Callable[[], None] = lambda: None
    ) -> tuple[Outputs, dict[str, float]]:
        """Maps replicated parameters to the outputs of each row, and to the losses if the rows have labels.

        ``between`` is called before each batch.
        """


class BatchedEvaluator:
    """Puts the batches of a split onto the devices."""

    def __init__(self, parallel: Parallelism, config: FinetuneConfig) -> None:
        self._parallel, self._config = parallel, config

    def batches(self, split: Split) -> list[tuple[np.ndarray, int]]:
        """Returns the rows and the padded length of each batch of a split."""
        data, lengths = self._config.data, split.features.lengths
        size = self._config.training.rows_per_evaluation
        return [
            (rows, bucket_length(int(lengths[rows].max()), data.buckets, data.max_length))
            for rows in evaluation_batches(lengths, size)
        ]

    def _outputs(self, params: Any, batch: dict[str, jax.Array]) -> Any:
        """Returns the outputs of a batch, on the devices."""
        raise NotImplementedError

    def _shard_batch(self, split: Split, rows: np.ndarray, length: int) -> dict[str, jax.Array]:
        """Returns a batch on the devices."""
        return self._parallel.shard_batch(host_rows(self._batch(split, rows, length), self._parallel.process))

    def _batch(self, split: Split, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        return split.features.batch(rows, length, self._config.training.rows_per_evaluation)


class TaskEvaluator(BatchedEvaluator):
    """Computes the outputs of every row of a split, in order, and the mean loss over all devices."""

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
        """Maps replicated parameters to one float32 array per row, and to ``loss`` if the rows have labels.

        For heads with an output per token, the array [T, L] of a row is cut to the row's own tokens. Here, queries,
        documents and windows are rows of their own; texts with windows have the pooled outputs of all of their windows.
        ``between`` is called before each batch.
        """
        if isinstance(split.features, WindowedRows | QueryDocumentRows):

            def compute(rows: TokenRows) -> Outputs:
                unlabelled = dataclasses.replace(rows, labels=None)
                return self._of_rows(params, Split(split.examples, unlabelled), between)[0]

            outputs = outputs_of_texts(split.features, compute, bool(self._config.embedding.normalize))
            return outputs, self._losses_of(outputs, split)
        return self._of_rows(params, split, between)

    def _losses_of(self, outputs: Outputs, split: Split) -> dict[str, float]:
        """Returns the mean loss of outputs [L], or [texts, T, E] with a vector per token; {} without labels."""
        if split.features.labels is None:
            return {}
        sums = []
        for rows, length in self.batches(split):
            batch = self._batch(split, rows, length)
            shape = outputs[0].shape
            if len(shape) == 3:  # vectors of tokens
                shape = (1 + batch["document_numbers"].shape[1], length, shape[-1])
            out = np.zeros((len(batch["weights"]), *shape), np.float32)
            for place, row in enumerate(rows):
                out[place][tuple(slice(size) for size in outputs[row].shape)] = outputs[row]
            known = {name: array for name, array in batch.items() if name not in token_arrays(batch)}
            sharded = self._parallel.shard_batch(host_rows({**known, "outputs": out}, self._parallel.process))
            sums.append({self._name: self._loss(sharded.pop("outputs"), sharded)})
        return {"loss": compute_means(accumulate_sums(sums, self._parallel))["loss"]}

    def _of_rows(self, params: Any, split: Split, between: Callable[[], None]) -> tuple[Outputs, dict[str, float]]:
        """Returns the outputs and the loss of rows of one text each, without windows."""
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
    """Computes the metrics of dev for the state's parameters on the devices.

    Attributes:
        last_outputs: outputs of the last evaluation; None before the first one.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        task: Task,
        dev: Split,
        interrupts: InterruptHandler,
        merge: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        """Initializes the evaluator.

        Args:
            merge: maps the state's parameters to the model's, both on the devices.
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


class SequenceEvaluator(BatchedEvaluator):
    """Generates the token ids for every row of a split, in order, and computes the losses of the targets."""

    def __init__(
        self,
        apply: Apply,
        loss: TaskLoss,
        parallel: Parallelism,
        config: FinetuneConfig,
        boundaries: tuple[int, int],
        decoding: Decoding,
    ) -> None:
        """Initializes the evaluator.

        Args:
            boundaries: ids of the tokens that start and end a target.
        """
        super().__init__(parallel, config)
        self._names = loss.metrics
        model = BertForSequenceToSequence(config.model, jnp.dtype(config.training.dtype))
        start, end = boundaries
        max_tokens = max_target_tokens(decoding, config.model)

        def generate(params: Any, batch: dict[str, jax.Array]) -> Decoded:
            limits = (max_tokens * batch["weights"]).astype(jnp.int32)
            sources = (batch["input_ids"], batch["attention_mask"])
            settings = DecodingArrays.make(decoding, end)
            sizes = (start, max_tokens, decoding.beams)
            return decode_targets(model, params, sources, limits, batch["numbers"], settings, *sizes)

        def best(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            decoded = generate(params, batch)
            return decoded.tokens[:, 0], decoded.lengths[:, 0]

        def losses(params: Any, batch: dict[str, jax.Array]) -> Any:
            return psum_if_axis(loss.sums(apply(params, batch, None), batch), parallel.axis)

        self._compiled, self._losses = parallel.compile(best), parallel.compile(losses)

    def _outputs(self, params: Any, batch: dict[str, jax.Array]) -> Any:
        return self._compiled(params, batch)

    def _batch(self, split: Split, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Adds the text index and the sample index, which seed the sampler."""
        batch = super()._batch(split, rows, length)
        numbers = np.zeros((len(batch["weights"]), 2), np.int32)
        numbers[: len(rows), 0] = rows
        return {**batch, "numbers": numbers}

    def __call__(
        self, params: Any, split: Split, between: Callable[[], None] = lambda: None
    ) -> tuple[Outputs, Metrics]:
        """Maps replicated parameters to the generated ids of each row, end token included.

        If the rows have targets, it also returns loss, nll, accuracy and perplexity. ``between`` is called before each
        batch.
        """
        outputs: list[np.ndarray] = [np.zeros(0, np.int32)] * len(split.features)
        sums = []
        for rows, length in self.batches(split):
            between()
            batch = self._shard_batch(split, rows, length)
            if split.features.labels is not None:
                sums.append(dict(zip(self._names, self._losses(params, batch), strict=True)))
                if not self._parallel.steps_in_flight:
                    jax.block_until_ready(sums)
            tokens, lengths = map(self._parallel.gather_rows, self._outputs(params, batch))
            for row, ids, count in zip(rows, tokens, lengths, strict=False):
                outputs[row] = ids[:count]
        if not sums:
            return outputs, {}
        means = compute_means(accumulate_sums(sums, self._parallel))
        means = {name: means[name] for name in ("loss", "nll", "accuracy")}
        return outputs, {**means, "perplexity": math.exp(min(means["nll"], 700))}
