"""Multi-head attention: projections, positions inside attention, and the choice of the kernel.

Shapes as in `bert.model.encoder`; M heads of keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.attention import KeysValues, cached_attention, dot_product_attention, fused_attention
from bert.model.dropout import Dropout
from bert.model.linear import dense, hidden_dense, layer_norm, residual_dense, truncated_normal_init
from bert.model.mask import Mask, split_keys, split_queries
from bert.model.positions import Disentangled, Positions, RelativeSinusoids, Rotation
from bert.parallel.sharding import constrain_activation

Projections = tuple[Array, Array, Array]
"""Queries [B, T, N, H], and keys and values [B, T, M, H]."""


class Attention(nn.Module):
    """Multi-head attention: self-attention if queries and keys have the same input, cross-attention otherwise.

    Attributes:
        kernel: see `LayerExecution.attention`.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "eager"

    def setup(self) -> None:
        config = self.config
        width, shared_width = config.num_attention_heads * config.head_size, config.key_value_heads * config.head_size
        self.query = hidden_dense(config, width, self.dtype, "query", "query_key_value_bias")
        is_linear = config.position_embedding_type == "deberta_v1"
        key_bias = config.has_bias("query_key_value_bias") and not is_linear
        self.key = dense(config, shared_width, self.dtype, "key", key_bias)
        self.value = hidden_dense(config, shared_width, self.dtype, "value", "query_key_value_bias")
        self.output = residual_dense(config, self.dtype, "output", "attention_output_bias")
        if config.query_key_norm:
            self.query_norm = layer_norm(config, self.dtype, "query_norm")
            self.key_norm = layer_norm(config, self.dtype, "key_norm")
        if config.global_attention_sep_id is not None:
            self.global_query = hidden_dense(config, width, self.dtype, "global_query", "query_key_value_bias")
            self.global_key = hidden_dense(config, shared_width, self.dtype, "global_key", "query_key_value_bias")
            self.global_value = hidden_dense(config, shared_width, self.dtype, "global_value", "query_key_value_bias")
        if is_linear:
            self.distance_query = hidden_dense(config, width, self.dtype, "distance_query", "query_key_value_bias")
            self.distance_key = dense(config, width, self.dtype, "distance_key", use_bias=False)
        if config.position_embedding_type == "transformer_xl":
            init = truncated_normal_init(config)
            self.position = dense(config, width, self.dtype, "position", use_bias=False)
            self.content_bias = self.param("content_bias", init, (width,), jnp.float32)
            self.position_bias = self.param("position_bias", init, (width,), jnp.float32)
            if config.type_vocab_size:
                self.segment_bias = self.param("segment_bias", init, (width,), jnp.float32)
                self.segment = self.param("segment", init, (2, width), jnp.float32)

    def __call__(
        self,
        queries: Float[Array, "B T D"],
        keys_values: Float[Array, "B S D"] | KeysValues,
        mask: Mask,
        dropout: Dropout | None = None,
        positions: Positions | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """Attends from queries to keys and values.

        Args:
            keys_values: hidden states [B, S, D], or projections from `keys_values`. With projections there is no
                dropout and ``kernel`` is ignored. They may have fewer rows than the queries: each then serves several
                consecutive rows, such as all hypotheses of one source.
            mask: attention mask, with as many rows as the keys.

        Returns:
            The output, and the weights; None with a fused kernel.
        """
        query = self._split_heads(self.query(queries))
        query = self.query_norm(query) if self.config.query_key_norm else query
        query = _rotate(self._scale(query), positions)
        if self.config.global_attention_sep_id is not None and self.is_initializing():
            for projection in (self.global_query, self.global_key, self.global_value):
                projection(queries[:, :1])  # rows may have no global tokens
        weights: Array | None
        if isinstance(keys_values, KeysValues):
            mixed, weights = self._attend_to_projected(query, keys_values, mask, dropout, positions)
        else:
            key, value = self._project(keys_values, positions)
            query, mask = self._add_positions(query, key, mask, positions, dropout)
            if mask.global_tokens is None:
                mixed, weights = self._attend(query, key, value, mask, dropout)
            else:
                mixed, weights = self._attend_with_global_tokens(queries, query, key, value, mask, dropout)
        if mask.fully_masked is not None:
            mixed = jnp.where(mask.fully_masked[:, :, None, None], 0, mixed)
        return self.output(mixed.reshape(*queries.shape[:-1], query.shape[2] * query.shape[3])), weights

    def keys_values(self, x: Float[Array, "B S D"], positions: Positions | None = None) -> KeysValues:
        """Projects hidden states [B, S, D] to keys and values for repeated use."""
        return KeysValues.from_heads(*self._project(x, positions))

    def _attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S M H"],
        value: Float[Array, "B S M H"],
        mask: Mask,
        dropout: Dropout | None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """Returns the weighted sums of values, and the weights; None with a fused kernel or blocks."""
        if mask.block is not None:
            return self._attend_in_blocks(query, key, value, mask, dropout), None
        softcap = self.config.attention_softcap
        if self.kernel != "eager":
            return fused_attention(query, key, value, mask, self.kernel, softcap), None
        pairs, rate = mask.booleans(query.shape[1], key.shape[1]), self.config.attention_probs_dropout_prob
        return dot_product_attention(
            query, key, value, pairs, mask.bias, dropout=dropout, dropout_rate=rate, softcap=softcap
        )

    def _attend_with_global_tokens(
        self,
        x: Float[Array, "B T D"],
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T M H"],
        value: Float[Array, "B T M H"],
        mask: Mask,
        dropout: Dropout | None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """Computes local attention, and the attention of the global tokens with their projections.

        In blocks, memory is reserved for one block of global tokens per row. If a row of the batch has more, all rows
        are computed one block of queries after another, which also takes memory linear in T, but more time.
        """
        tokens = require(mask.global_tokens, "the global tokens")
        global_key, global_value = self._split_heads(self.global_key(x)), self._split_heads(self.global_value(x))
        may_overflow = mask.block is not None and tokens.kind != "first"
        source = x if may_overflow else tokens.take(x)
        global_query = self._scale(self._split_heads(self.global_query(source)))

        def attend() -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
            mixed, weights = self._attend(query, key, value, mask, dropout)
            selected = tokens.take(global_query) if may_overflow else global_query
            visible = Mask(keys=tokens.keys).to_pairs(selected.shape[1], x.shape[1])
            apart = None if dropout is None else dropout.fold_in("global")
            mixed_global, weights_global = self._attend(selected, global_key, global_value, visible, apart)
            if weights is not None and weights_global is not None:
                by_query = (jnp.swapaxes(array, 1, 2) for array in (weights_global, weights))
                weights = jnp.swapaxes(tokens.put(*by_query), 1, 2)
            return tokens.put(mixed_global, mixed), weights

        if not may_overflow:
            return attend()
        fits = jnp.all(tokens.num_per_row <= tokens.num_selected)
        local, of_global = (query, key, value), (global_query, global_key, global_value)
        in_turn = partial(self._attend_in_turn, mask, dropout, local, of_global)
        return jax.lax.cond(fits, lambda: attend()[0], in_turn), None

    def _attend_in_turn(
        self, mask: Mask, dropout: Dropout | None, local: Projections, of_global: Projections
    ) -> Float[Array, "B T N H"]:
        """Computes the attention of one block of queries after another, for any number of global tokens."""
        tokens, block = require(mask.global_tokens, "the global tokens"), require(mask.block, "the size of a block")
        (query, key, value), (global_query, global_key, global_value) = local, of_global
        rows, length, heads, size = query.shape
        visible = Mask(keys=tokens.keys)
        near = visible.replace(window=self.config.attention_window, global_tokens=tokens)
        options: Any = {"softcap": self.config.attention_softcap}
        if self.kernel == "eager":
            options["dropout_rate"] = self.config.attention_probs_dropout_prob

        @jax.checkpoint
        def attend(part: tuple[Array, Array, Array, Array]) -> Float[Array, "B block N H"]:
            start, query, global_query, flags = part
            source = None if dropout is None else dropout.fold_in(start)
            apart = None if source is None else source.fold_in("global")
            pairs = near.replace(start=start).booleans(block, length)
            mixed, _ = dot_product_attention(query, key, value, pairs, dropout=source, **options)
            pairs = visible.booleans(block, length)
            mixed_global, _ = dot_product_attention(
                global_query, global_key, global_value, pairs, dropout=apart, **options
            )
            return jnp.where(flags[:, :, None, None], mixed_global, mixed)

        def parts(x: Array) -> Array:
            return jnp.moveaxis(split_queries(x, block).reshape(rows, -1, block, *x.shape[2:]), 1, 0)

        starts = block * jnp.arange(-(-length // block))
        mixed = jax.lax.map(attend, (starts, *map(parts, (query, global_query, tokens.flags))))
        return jnp.moveaxis(mixed, 0, 1).reshape(rows, -1, heads, size)[:, :length]

    def _scale(self, query: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Scales queries for ``query_pre_attn_scalar``: kernels divide by the square root of H."""
        if (scalar := self.config.query_pre_attn_scalar) is None:
            return query
        return query * jnp.asarray((self.config.head_size / scalar) ** 0.5, query.dtype)

    def _attend_to_projected(
        self,
        query: Float[Array, "B T N H"],
        keys_values: KeysValues,
        mask: Mask,
        dropout: Dropout | None,
        positions: Positions | None,
    ) -> tuple[Float[Array, "rows queries N H"], Float[Array, "B N T S"]]:
        """Attends to keys and values that may have fewer rows. Consecutive rows of queries are merged."""
        rows, length, heads, size = query.shape
        query = query.reshape(len(keys_values.values) // self.config.key_value_heads, -1, heads, size)
        query, mask = self._add_positions(query, keys_values.split_heads(len(query)), mask, positions, dropout)
        pairs = mask.booleans(query.shape[1], keys_values.num_positions)
        softcap = self.config.attention_softcap
        mixed, weights = cached_attention(query, keys_values.keys, keys_values.values, pairs, mask.bias, softcap)
        weights = jnp.swapaxes(weights, 1, 2).reshape(rows, length, heads, -1)
        return mixed, jnp.swapaxes(weights, 1, 2)

    def _attend_in_blocks(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T M H"],
        value: Float[Array, "B T M H"],
        mask: Mask,
        dropout: Dropout | None,
    ) -> Float[Array, "B T N H"]:
        """Computes local attention at a cost linear in T: each block of queries becomes a separate row."""
        block, (rows, length, *_) = require(mask.block, "the size of a block"), query.shape
        query = split_queries(query, block)
        key, value = (self._keys_of_blocks(x, mask) for x in (key, value))
        if dropout is not None:
            dropout = dropout.split_rows(query.shape[0] // rows)
        mixed, _ = self._attend(query, key, value, mask.replace(block=None), dropout)
        return mixed.reshape(rows, -1, *mixed.shape[2:])[:, :length]

    def _keys_of_blocks(self, x: Float[Array, "B T M H"], mask: Mask) -> Float[Array, "blocks keys M H"]:
        """Returns the keys or values of each block: its own, its neighbours', and the global tokens'."""
        blocks = split_keys(x, require(mask.block, "the size of a block"), self.config.causal)
        if mask.global_tokens is None:
            return blocks
        extra = jnp.repeat(mask.global_tokens.take(x), len(blocks) // len(x), axis=0)
        return jnp.concatenate([blocks, extra], axis=1)

    def _add_positions(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S M H"],
        mask: Mask,
        positions: Positions | None,
        dropout: Dropout | None,
    ) -> tuple[Float[Array, "B T N H"], Mask]:
        """Returns the query, and the mask with the scores of disentangled or relative positions in its bias."""
        if isinstance(positions, Disentangled):
            return self._disentangle(query, key, mask, positions, dropout)
        if not isinstance(positions, RelativeSinusoids):
            return query, mask

        def by_head(x: Array) -> Array:
            return self._split_heads(jnp.asarray(x, self.dtype)[None])[0]

        segments: tuple[Array | None, Array | None] = (None, None)
        if self.config.type_vocab_size:
            segments = by_head(self.segment_bias[None])[0], by_head(self.segment)
        content_bias, position_bias = (by_head(bias[None])[0] for bias in (self.content_bias, self.position_bias))
        distances = by_head(self.position(positions.sinusoids.astype(self.dtype)))
        bias = positions.scores(query, distances, position_bias, *segments)
        return query + content_bias, mask.replace(bias=bias if mask.bias is None else mask.bias + bias)

    def _disentangle(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        mask: Mask,
        positions: Disentangled,
        dropout: Dropout | None,
    ) -> tuple[Float[Array, "B T N H"], Mask]:
        """Returns the scaled query, and the mask with the scores of the distances added as its bias."""
        config = self.config
        vectors = positions.dropped(dropout, config.hidden_dropout_prob)[None]
        is_linear = config.position_embedding_type == "deberta_v1"
        project_query, project_key = (self.distance_query, self.distance_key) if is_linear else (self.query, self.key)
        distance_query = distance_key = None
        if config.disentangled_products != "content_to_position":
            distance_query = self._split_heads(project_query(vectors))[0]
        if config.disentangled_products != "position_to_content":
            distance_key = self._split_heads(project_key(vectors))[0]
        bias = positions.scores(query, key, distance_query, distance_key, config.num_products)
        return query * jnp.asarray(config.num_products**-0.5, query.dtype), mask.replace(bias=bias)

    def _project(
        self, x: Float[Array, "B S D"], positions: Positions | None
    ) -> tuple[Float[Array, "B S M H"], Float[Array, "B S M H"]]:
        """Projects hidden states [B, S, D] to keys and values, [B, S, M, H] each."""
        key = self._split_heads(self.key(x))
        key = self.key_norm(key) if self.config.query_key_norm else key
        return _rotate(key, positions), self._split_heads(self.value(x))

    def _split_heads(self, x: Float[Array, "B S features"]) -> Float[Array, "B S heads H"]:
        size = self.config.head_size
        return constrain_activation(x.reshape(*x.shape[:-1], x.shape[-1] // size, size), None, "tensor")


def _rotate(x: Float[Array, "B T N H"], positions: Positions | None) -> Float[Array, "B T N H"]:
    return positions(x) if isinstance(positions, Rotation) else x
