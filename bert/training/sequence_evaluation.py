"""Evaluation of a run whose task is sequence to sequence: the loss of the right targets, and targets of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import Decoding, FinetuneConfig
from bert.inference.generation import Decoded
from bert.inference.sampling import DecodingArrays
from bert.inference.sequence_generation import decode_targets, most_tokens
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.parallel.backends import Parallelism, psum_if_axis
from bert.runs.metrics_log import Metrics
from bert.tasks.base import Outputs
from bert.training.evaluation import BatchedEvaluator, Split, accumulate_sums, compute_means
from bert.training.losses import Apply, TaskLoss


class SequenceEvaluator(BatchedEvaluator):
    """The token ids that the decoder writes for every row of a split, in its order, and the losses of the targets."""

    def __init__(
        self,
        apply: Apply,
        loss: TaskLoss,
        parallel: Parallelism,
        config: FinetuneConfig,
        boundaries: tuple[int, int],
        decoding: Decoding,
    ) -> None:
        """
        Args:
            boundaries: ids of the tokens that start and end a target.
            decoding: settings.
        """
        super().__init__(parallel, config)
        self._names = loss.metrics
        model = BertForSequenceToSequence(config.model, jnp.dtype(config.training.dtype))
        start, end = boundaries
        most = most_tokens(decoding, config.model)

        def generate(params: Any, batch: dict[str, jax.Array]) -> Decoded:
            limits = (most * batch["weights"]).astype(jnp.int32)
            sources = (batch["input_ids"], batch["attention_mask"])
            settings = DecodingArrays.make(decoding, end)
            sizes = (start, most, decoding.beams)
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
        """With the number of each text, on which samples depend, and that of its sample."""
        batch = super()._batch(split, rows, length)
        numbers = np.zeros((len(batch["weights"]), 2), np.int32)
        numbers[: len(rows), 0] = rows
        return {**batch, "numbers": numbers}

    def __call__(
        self, params: Any, split: Split, between: Callable[[], None] = lambda: None
    ) -> tuple[Outputs, Metrics]:
        """Replicated parameters -> the ids of each row, end token included; and loss, nll, accuracy and perplexity
        where the rows have targets. ``between`` is called before each batch."""
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
