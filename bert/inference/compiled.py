"""The forward functions of a model, compiled by JAX."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bert.config import ModelConfig
from bert.data.batching import bucket_length
from bert.data.rows import Rows, TokenRows
from bert.errors import require
from bert.inference.forward import (
    BUCKETS,
    BatchedForward,
    Batches,
    Encoded,
    PackedRows,
    check_finite,
    check_inputs,
    pack_if_shorter,
    packed_batches,
)
from bert.model.encoder import Bert
from bert.model.heads import HEADS
from bert.model.mask import Packing
from bert.model.pooling import Pooling
from bert.model.pretraining import BertForMaskedLM
from bert.tasks.base import Task

CPU_TOKENS = 1024
"""Maximum number of tokens in a padded batch on a CPU, whose caches do not hold the attention weights of more."""


def put_params(params: dict[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Puts parameters on the device, with the kernels of linear layers rounded to the type of the computation.

    The results are the same, because these layers round their kernels. Rounding them once needs less memory and time.
    """

    def rounded(path: tuple[Any, ...], x: Any) -> Any:
        return jnp.asarray(x, dtype) if path[-1].key == "kernel" else x

    return jax.device_put(jax.tree_util.tree_map_with_path(rounded, params))


class CompiledForward(BatchedForward):
    """The compiled encoder, masked-LM head and task head of a model.

    The next batch is dispatched before the outputs of one are returned. Many short texts share rows, in which each text
    attends only to itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        task: Task | None,
        num_feature_layers: int | None,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        super().__init__(config, params, task)
        self._num_feature_layers, self._dtype = num_feature_layers, dtype
        self._has_pooler = "pooler" in params["bert"]

    def with_params(self, params: dict[str, Any]) -> Self:
        """Returns the functions for other parameters of the same shapes, which share the compiled encoder."""
        _ = self.encoder, self._packed_encoder  # created here to be part of the copy
        other = copy.copy(self)
        other._params = params
        return other

    @property
    def has_pooler(self) -> bool:
        return self._has_pooler

    def _embed_rows(
        self, features: TokenRows, pooling: Pooling, batch_size: int, skipped: np.ndarray | None
    ) -> Batches:
        packed = None
        if features.can_be_packed and not pooling.is_lexical:
            packed = pack_if_shorter(features, self._config, batch_size, BUCKETS)
        if packed is None:
            yield from super()._embed_rows(features, pooling, batch_size, skipped)
            return
        for texts, hidden in self._encode_packed(packed, features):
            left_out = None if skipped is None else skipped[texts]
            vectors = pooling.of_sequences(hidden, features.lengths[texts], left_out)
            if not pooling.has_token_vectors:
                check_finite(features.input_numbers[texts], vectors)
            yield texts, vectors

    def _encode_packed(self, packed: PackedRows, features: TokenRows) -> Batches:
        """Yields the hidden states of each batch, with the texts concatenated to [tokens, D]."""

        def dispatched() -> Iterator[tuple[Any, Any]]:
            for texts, batch in packed_batches(packed, features):
                check_inputs(batch["input_ids"], self._config.known_vocab_size)
                yield (texts, batch["example_ids"] > 0), self._packed_encoder(self._params, batch)

        for (texts, is_token), hidden in self._fetched(dispatched()):
            yield texts, hidden[is_token]

    def predict_masks(self, features: Rows) -> Any:
        """Returns the masked-LM logits of a single row, [1, T, V]."""
        [(_, logits)] = self._run(self._masked_lm, features, 1)
        return logits

    def _padded_size(self, lengths: np.ndarray, batch_size: int) -> tuple[int, int]:
        """Returns few different sizes, because each is compiled."""
        length = bucket_length(int(lengths.max()), BUCKETS, self._config.max_position_embeddings)
        if jax.default_backend() == "cpu":
            batch_size = min(batch_size, max(1, CPU_TOKENS // length))
        return length, batch_size

    def _fetched(self, batches: Batches) -> Batches:
        """Yields (key, outputs as NumPy arrays) while the next outputs are computed."""
        previous: tuple[Any, Any] | None = None
        for dispatched in batches:
            if previous is not None:
                yield previous[0], jax.device_get(previous[1])
            previous = dispatched
        if previous is not None:
            yield previous[0], jax.device_get(previous[1])

    @cached_property
    def encoder(self) -> Callable[..., Any]:
        model = Bert(self._config, self._dtype, add_pooling_layer=self.has_pooler)

        def encode(params: dict[str, Any], *inputs: jax.Array) -> Encoded:
            output: Any = model.apply({"params": params["bert"]}, *inputs)
            return Encoded(output.last_hidden_state, output.pooled_output)

        return _compiled(encode)

    def lexical_encoder(self, pooling: Pooling) -> Callable[..., Any]:
        return partial(self._lexical_encoder, pooling)

    @cached_property
    def _lexical_encoder(self) -> Callable[..., Any]:
        model = BertForMaskedLM(self._config, self._dtype)

        def encode(pooling: Pooling, params: dict[str, Any], *inputs: jax.Array) -> jax.Array:
            return pooling(model.apply({"params": params}, *inputs), inputs[-1])

        return jax.jit(encode, static_argnums=0)

    @cached_property
    def _packed_encoder(self) -> Callable[..., Any]:
        model = Bert(self._config, self._dtype, add_pooling_layer=False)

        def encode(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
            ids = batch["input_ids"]
            packing = Packing(batch["example_ids"], batch["position_ids"], jnp.zeros_like(ids[:, :1]))
            output: Any = model.apply({"params": params["bert"]}, ids, batch["token_type_ids"], packing=packing)
            return output.last_hidden_state

        return _compiled(encode)

    @cached_property
    def _masked_lm(self) -> Callable[..., Any]:
        model = BertForMaskedLM(self._config, self._dtype)
        return _compiled(lambda params, *inputs: model.apply({"params": params}, *inputs))

    @cached_property
    def head(self) -> Callable[..., Any]:
        task = require(self._task, "the task")
        model = HEADS[task.kind](
            self._config, task.num_labels, dtype=self._dtype, num_feature_layers=self._num_feature_layers
        )
        return _compiled(lambda params, *inputs: model.apply({"params": params}, *inputs))


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function and casts its outputs to float32."""
    return jax.jit(lambda *inputs: jax.tree.map(lambda x: x.astype(jnp.float32), forward(*inputs)))
