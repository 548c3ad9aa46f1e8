"""Parts of an encoder layer: linear layers, LayerNorm, attention. Shapes as in `bert.model.encoder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.attention import dot_product_attention, fused_attention
from bert.model.dropout import Dropout
from bert.model.initializers import truncated_normal_init
from bert.model.linear import gelu, linear
from bert.model.mask import Mask
from bert.parallel.sharding import constrain_activation

Dtype = Any

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

LINEAR_OUTPUT = "linear"
"""Name of what a linear layer gives, for the policies of `jax.checkpoint`."""


class Dense(nn.Module):
    """A linear layer; parameters as Flax's own have them."""

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch features"]:
        """[..., I] -> [..., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return checkpoint_name(linear(x, kernel, bias, jnp.dtype(self.dtype)), LINEAR_OUTPUT)


def dense(config: ModelConfig, features: int, dtype: Dtype, name: str) -> Dense:
    """A dense layer initialised as BERT's."""
    return Dense(features, truncated_normal_init(config), dtype, name=name)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, statistics in float32."""

    epsilon: float
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        centred = x - mean
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)


def layer_norm(config: ModelConfig, dtype: Dtype, name: str) -> LayerNorm:
    """A LayerNorm with the model's one epsilon."""
    return LayerNorm(config.layer_norm_eps, dtype, name=name)


class Attention(nn.Module):
    """Multi-head attention: self-attention where both inputs are the same, else cross-attention.

    Attributes:
        kernel: as `LayerExecution.attention`.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "written"

    @nn.compact
    def __call__(
        self,
        queries: Float[Array, "B T D"],
        keys_values: Float[Array, "B S D"],
        mask: Mask | None,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """[B, T, D] queries over [B, S, D] keys and values -> [B, T, D], and the weights [B, N, T, S].

        Fused kernels return None for the weights.
        """
        config, mask = self.config, mask or Mask()
        heads = config.num_attention_heads

        def project(x: Float[Array, "B S D"], name: str) -> Float[Array, "B S N H"]:
            x = dense(config, config.hidden_size, self.dtype, name)(x)
            return constrain_activation(x.reshape(*x.shape[:-1], heads, config.hidden_size // heads), None, "tensor")

        query, key, value = project(queries, "query"), project(keys_values, "key"), project(keys_values, "value")
        if self.kernel == "written":
            rate = config.attention_probs_dropout_prob
            pairs = mask.booleans(query.shape[1], key.shape[1])
            mixed, weights = dot_product_attention(query, key, value, pairs, dropout=dropout, dropout_rate=rate)
        else:
            mixed, weights = fused_attention(query, key, value, mask, self.kernel), None
        mixed = mixed.reshape(*queries.shape[:-1], config.hidden_size)
        return dense(config, config.hidden_size, self.dtype, "output")(mixed), weights


class Layer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual and LayerNorm: after it (post-LN, the paper's), or
    before it, inside the residual (pre-LN; Xiong et al. 2020)."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "written"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], mask: Mask | None, dropout: Dropout | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T T"] | None]:
        """[B, T, D] -> [B, T, D], and the attention weights [B, N, T, S], both as `Attention` has them."""
        config = self.config
        attention_norm = layer_norm(config, self.dtype, "attention_norm")
        output_norm = layer_norm(config, self.dtype, "output_norm")
        read = attention_norm(x) if config.pre_layer_norm else x
        attended, weights = Attention(config, self.dtype, self.kernel, name="attention")(read, read, mask, dropout)
        x = x + maybe_dropout(attended, dropout, config.hidden_dropout_prob, "attention_output")
        if not config.pre_layer_norm:
            x = attention_norm(x)
        read = output_norm(x) if config.pre_layer_norm else x
        inner = constrain_activation(
            dense(config, config.intermediate_size, self.dtype, "intermediate")(read), None, "tensor"
        )
        inner = ACTIVATIONS[config.hidden_act](inner)
        outer = dense(config, config.hidden_size, self.dtype, "output")(inner)
        x = x + maybe_dropout(outer, dropout, config.hidden_dropout_prob, "output")
        return constrain_activation(x if config.pre_layer_norm else output_norm(x)), weights


def maybe_dropout(x: Float[Array, "*shape"], dropout: Dropout | None, rate: float, site: str) -> Float[Array, "*shape"]:
    """Drops in training only: ``dropout`` is None in evaluation."""
    return x if dropout is None else dropout(x, rate, site)
