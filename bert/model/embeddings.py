"""Input embeddings: words, positions and segments. Shapes as in `bert.model.encoder`."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.initializers import position_initializer, sinusoidal_position_table, truncated_normal_init
from bert.model.layers import Dtype, hidden_dense, layer_norm, maybe_dropout
from bert.parallel.sharding import all_gather_fsdp, constrain_activation


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, LayerNorm, and dropout; then, where E is not D, a dense layer
    (ALBERT, Lan et al. 2019, section 3.1). The config can leave positions, segments and LayerNorm
    out, and multiply the words by the root of E (Vaswani et al. 2017, section 3.4)."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        config = self.config

        def table(rows: int, name: str, init: Callable[[ModelConfig], nn.initializers.Initializer]) -> nn.Embed:
            return nn.Embed(rows, config.embedding_width, embedding_init=init(config), name=name)

        self.word = table(config.known_vocab_size, "word", truncated_normal_init)
        if config.position_embedding_type == "learned":
            positions = config.position_offset + config.max_position_embeddings
            self.position = table(positions, "position", position_initializer)
        if config.type_vocab_size:
            self.segment = table(config.type_vocab_size, "segment", truncated_normal_init)
        if config.embedding_norm:
            self.norm = layer_norm(config, self.dtype, "norm")
        if config.embedding_width != config.hidden_size:
            self.projection = hidden_dense(config, config.hidden_size, self.dtype, "projection")

    def look_up(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        dropout: Dropout | None,
    ) -> Float[Array, "B T E"]:
        """The sum [B, T, E] before the dense layer. A model of one segment, as RoBERTa, reads pairs as that one."""
        config = self.config
        if config.type_vocab_size == 1:
            token_type_ids = jnp.zeros_like(token_type_ids)

        def rows(table: nn.Embed, ids: Int[Array, "B T"]) -> Float[Array, "B T E"]:
            return jnp.take(all_gather_fsdp(table.embedding, "tensor"), ids, axis=0)

        word = rows(self.word, input_ids)
        x = word * math.sqrt(config.embedding_width) if config.scale_embeddings else word
        if config.position_embedding_type == "learned":
            x = x + rows(self.position, position_ids)
        elif config.position_embedding_type == "sinusoidal":
            x = x + sinusoidal_position_table(config)[position_ids]
        if config.type_vocab_size:
            x = x + rows(self.segment, token_type_ids)
        x = self.norm(x) if config.embedding_norm else x.astype(self.dtype)
        return maybe_dropout(x, dropout, config.hidden_dropout_prob, "embeddings")

    def project(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """[B, T, E] -> [B, T, D]."""
        return constrain_activation(x if self.config.embedding_width == self.config.hidden_size else self.projection(x))
