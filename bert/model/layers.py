"""Parts of an encoder layer: linear layers, LayerNorm, attention. Shapes as in `bert.model.encoder`."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.attention import (
    KeysValues,
    LayerCache,
    Memory,
    cached_attention,
    dot_product_attention,
    fused_attention,
)
from bert.model.dropout import Dropout
from bert.model.linear import gelu, linear
from bert.model.mask import Mask, split_keys, split_queries
from bert.model.positions import PARTS, Disentangled, Positions, Rotation, sinusoids
from bert.parallel.sharding import constrain_activation


def truncated_normal_init(config: ModelConfig, scale: float = 1.0) -> nn.initializers.Initializer:
    """Truncated normal cut at two standard deviations, as TensorFlow's: the deviation is that before the cut.

    Args:
        config: its ``initializer_range`` is the deviation.
        scale: a factor of the deviation.
    """
    stddev = scale * config.initializer_range

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


def residual_initializer(config: ModelConfig) -> nn.initializers.Initializer:
    """`truncated_normal_init` of kernels whose output is added to the residual.

    Scaled, the sum over L layers of two has the same variance for any L (Radford et al. 2019, section 2.3).
    """
    scaled = config.residual_init == "scaled"
    return truncated_normal_init(config, (2 * config.num_hidden_layers) ** -0.5 if scaled else 1.0)


def position_initializer(config: ModelConfig) -> nn.initializers.Initializer:
    """Random numbers as `truncated_normal_init`, or sinusoids (Vaswani et al. 2017, 3.5) scaled to the same deviation.

    With sinusoids "the token before" is one and the same rotation at every position, so that all positions teach a
    head together; random rows are learned one by one.
    """
    if config.position_embedding_init == "normal":
        return truncated_normal_init(config)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
        return sinusoids(shape, config.initializer_range).astype(dtype)

    return init


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
}


LINEAR_OUTPUT = "linear"
"""Name of what a linear layer gives, for the policies of `jax.checkpoint`."""


class Dense(nn.Module):
    """A linear layer; parameters as Flax's own have them."""

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Dtype = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch features"]:
        """[..., I] -> [..., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = jnp.zeros(self.features)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return checkpoint_name(linear(x, kernel, bias, jnp.dtype(self.dtype)), LINEAR_OUTPUT)


def dense(config: ModelConfig, features: int, dtype: Dtype, name: str, use_bias: bool = True) -> Dense:
    """A dense layer initialised as BERT's."""
    return Dense(features, truncated_normal_init(config), dtype, use_bias, name=name)


def hidden_dense(config: ModelConfig, features: int, dtype: Dtype, name: str) -> Dense:
    """A dense layer whose output is a hidden one, so that the config can leave its bias out."""
    return dense(config, features, dtype, name, config.use_bias)


def residual_dense(config: ModelConfig, dtype: Dtype, name: str) -> Dense:
    """A dense layer to D features that are added to the residual."""
    return Dense(config.hidden_size, residual_initializer(config), dtype, config.use_bias, name=name)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, statistics in float32.

    Attributes:
        subtract_mean: false for RMSNorm (Zhang and Sennrich 2019).
        use_bias: whether a bias is added.
    """

    epsilon: float
    dtype: Dtype = jnp.float32
    subtract_mean: bool = True
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True) if self.subtract_mean else x
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon) * scale
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return y.astype(self.dtype)


def layer_norm(config: ModelConfig, dtype: Dtype, name: str) -> LayerNorm:
    """The model's normalization, with its one epsilon."""
    return LayerNorm(config.layer_norm_eps, dtype, config.norm_type == "layer", config.norm_bias, name=name)


class Transform(nn.Module):
    """A dense layer, the model's activation and LayerNorm: the pooler of ModernBERT."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """[..., D] -> [..., D]."""
        x = hidden_dense(self.config, self.config.hidden_size, self.dtype, "dense")(x)
        return layer_norm(self.config, self.dtype, "norm")(ACTIVATIONS[self.config.hidden_act](x))


class Attention(nn.Module):
    """Multi-head attention: self-attention where both inputs are the same, else cross-attention.

    Attributes:
        kernel: as `LayerExecution.attention`.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "written"

    def setup(self) -> None:
        width = self.config.hidden_size
        self.query = hidden_dense(self.config, width, self.dtype, "query")
        self.key = hidden_dense(self.config, width, self.dtype, "key")
        self.value = hidden_dense(self.config, width, self.dtype, "value")
        self.output = residual_dense(self.config, self.dtype, "output")

    def __call__(
        self,
        queries: Float[Array, "B T D"],
        keys_values: Float[Array, "B S D"] | KeysValues,
        mask: Mask,
        dropout: Dropout | None = None,
        positions: Positions | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """[B, T, D] queries over [B, S, D] keys and values -> [B, T, D], and the weights [B, N, T, S].

        Keys and values are hidden states or, without dropout and for any kernel, what `keys_values` has made of them.
        That may have fewer rows, with the mask, each for several rows of queries side by side: the hypotheses of a text
        read one source. Fused kernels return None for the weights. ``positions`` are those of self-attention.
        """
        query = _rotate(self._split_heads(self.query(queries)), positions)
        if isinstance(keys_values, KeysValues):
            rows, length, heads, size = query.shape
            query = query.reshape(len(keys_values.values) // heads, -1, heads, size)
            if isinstance(positions, Disentangled):
                query, mask = self._disentangle(query, keys_values.split_heads(len(query)), mask, positions, dropout)
            pairs = mask.booleans(query.shape[1], keys_values.num_positions)
            mixed, weights = cached_attention(query, keys_values.keys, keys_values.values, pairs, mask.bias)
            weights = jnp.swapaxes(weights, 1, 2).reshape(rows, length, heads, -1)
            return self.output(mixed.reshape(queries.shape)), jnp.swapaxes(weights, 1, 2)
        key, value = self._project(keys_values, positions)
        if isinstance(positions, Disentangled):
            query, mask = self._disentangle(query, key, mask, positions, dropout)
        if mask.block is not None:
            return self._attend_in_blocks(query, key, value, mask, dropout), None
        if self.kernel != "written":
            mixed = fused_attention(query, key, value, mask, self.kernel)
            return self.output(mixed.reshape(queries.shape)), None
        pairs, rate = mask.booleans(query.shape[1], key.shape[1]), self.config.attention_probs_dropout_prob
        mixed, weights = dot_product_attention(query, key, value, pairs, mask.bias, dropout=dropout, dropout_rate=rate)
        return self.output(mixed.reshape(queries.shape)), weights

    def _disentangle(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        mask: Mask,
        positions: Disentangled,
        dropout: Dropout | None,
    ) -> tuple[Float[Array, "B T N H"], Mask]:
        """The query scaled for a sum of products, and the mask with the other products as its bias."""
        vectors = positions.dropped(dropout, self.config.hidden_dropout_prob)[None]
        distance_query, distance_key = (self._split_heads(project(vectors))[0] for project in (self.query, self.key))
        bias = positions.scores(query, key, distance_query, distance_key)
        return query * jnp.asarray(PARTS**-0.5, query.dtype), mask.replace(bias=bias)

    def _attend_in_blocks(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T N H"],
        value: Float[Array, "B T N H"],
        mask: Mask,
        dropout: Dropout | None,
    ) -> Float[Array, "B T D"]:
        """Self-attention under a window at a cost linear in T: each block of queries is a row of its own."""
        block, (rows, length, *_) = require(mask.block, "the size of a block"), query.shape
        query = split_queries(query, block)
        key, value = (split_keys(x, block, self.config.causal) for x in (key, value))
        if self.kernel != "written":
            mixed = fused_attention(query, key, value, mask, self.kernel)
        else:
            count = query.shape[0] // rows
            if dropout is not None:  # each block is a row, and draws as one
                dropout = dropout.replace(rows=(dropout.rows[:, None] * count + jnp.arange(count)).reshape(-1))
            rate = self.config.attention_probs_dropout_prob
            mixed, _ = dot_product_attention(
                query, key, value, mask.pairs, mask.bias, dropout=dropout, dropout_rate=rate
            )
        return self.output(mixed.reshape(rows, -1, self.config.hidden_size)[:, :length])

    def keys_values(self, x: Float[Array, "B S D"], positions: Positions | None = None) -> KeysValues:
        """[B, S, D] hidden states -> the keys and values of all heads, to be computed once and used again."""
        return KeysValues.from_heads(*self._project(x, positions))

    def _project(
        self, x: Float[Array, "B S D"], positions: Positions | None
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N H"]]:
        """[B, S, D] hidden states -> keys and values, [B, S, N, H] each."""
        return _rotate(self._split_heads(self.key(x)), positions), self._split_heads(self.value(x))

    def _split_heads(self, x: Float[Array, "B S D"]) -> Float[Array, "B S N H"]:
        heads = self.config.num_attention_heads
        return constrain_activation(x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), None, "tensor")


def _rotate(x: Float[Array, "B T N H"], positions: Positions | None) -> Float[Array, "B T N H"]:
    return positions(x) if isinstance(positions, Rotation) else x


class LayerStates(struct.PyTreeNode):
    """Attention weights and cache that `Layer` returns next to its output.

    Attributes:
        weights: of self-attention before dropout, [B, N, T, S]; None from a fused kernel.
        cross_weights: of cross-attention, [B, N, T, S of the memory]; None without a memory or from a fused kernel.
        cache: with this step's keys and values in it; None without a cache.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    weights: Array | None
    cross_weights: Array | None = None
    cache: LayerCache | None = None


class Layer(nn.Module):
    """Self-attention, cross-attention if there is a memory, and feed-forward.

    Each has dropout, a residual and LayerNorm: after it (post-LN, the paper's), or before it, inside the residual
    (pre-LN; Xiong et al. 2020).

    Attributes:
        kernel: as `LayerExecution.attention`.
        reads_normed: whether the config leaves out the LayerNorm before attention, as ``first_layer_norm`` can.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "written"
    reads_normed: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        dropout: Dropout | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
        positions: Positions | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerStates]:
        """[B, T, D] -> [B, T, D].

        Args:
            x: the hidden states of T positions.
            mask: over the keys of self-attention, which are those of the cache if there is one.
            dropout: source of dropout; None for none.
            memory: the states that cross-attention reads; None for a layer without cross-attention.
            cache: keys and values of earlier positions. Those of ``x`` are put in at the mask's ``start``, and the mask
                has to leave out the positions behind them, as a causal one does.
            positions: rotary or disentangled ones, of self-attention; None for none.
        """
        config = self.config
        norm = layer_norm(config, self.dtype, "attention_norm")
        attention = Attention(config, self.dtype, self.kernel, name="attention")
        read = x if self.reads_normed else _before(config, norm, x)
        own = None if cache is None else cache.own.write(attention.keys_values(read, positions), mask.start)
        attended, weights = attention(read, read if own is None else own, mask, dropout, positions)
        x = _after(config, norm, x, maybe_dropout(attended, dropout, config.hidden_dropout_prob, "attention_output"))
        cross_weights = remembered = None
        if memory is not None:
            norm = layer_norm(config, self.dtype, "cross_norm")
            kernel = "xla" if self.kernel == "splash" else self.kernel  # which takes the keys' padding for the queries'
            attention = Attention(config, self.dtype, kernel, name="cross_attention")
            source = None if dropout is None else dropout.fold_in("cross_attention")
            if cache is not None:
                remembered = cache.memory or attention.keys_values(memory.hidden_states)
            attended, cross_weights = attention(
                _before(config, norm, x), remembered or memory.hidden_states, memory.mask, source
            )
            x = _after(config, norm, x, maybe_dropout(attended, source, config.hidden_dropout_prob, "attention_output"))
        x = self._feed_forward(x, dropout)
        return x, LayerStates(weights, cross_weights, None if own is None else LayerCache(own, remembered))

    def _feed_forward(self, x: Float[Array, "B T D"], dropout: Dropout | None) -> Float[Array, "B T D"]:
        config = self.config
        norm = layer_norm(config, self.dtype, "output_norm")
        read = _before(config, norm, x)
        inner = hidden_dense(config, config.intermediate_size, self.dtype, "intermediate")(read)
        inner = ACTIVATIONS[config.hidden_act](constrain_activation(inner, None, "tensor"))
        if config.gated_feed_forward:
            gate = hidden_dense(config, config.intermediate_size, self.dtype, "gate")(read)
            inner = inner * constrain_activation(gate, None, "tensor")
        outer = residual_dense(config, self.dtype, "output")(inner)
        outer = maybe_dropout(outer, dropout, config.hidden_dropout_prob, "output")
        return constrain_activation(_after(config, norm, x, outer))


def _before(config: ModelConfig, norm: LayerNorm, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The input of a sublayer."""
    return norm(x) if config.pre_layer_norm else x


def _after(
    config: ModelConfig, norm: LayerNorm, x: Float[Array, "B T D"], y: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """The residual connection around a sublayer whose output is ``y``."""
    return x + y if config.pre_layer_norm else norm(x + y)


def maybe_dropout(x: Float[Array, "*shape"], dropout: Dropout | None, rate: float, site: str) -> Float[Array, "*shape"]:
    """Drops in training only: ``dropout`` is None in evaluation."""
    return x if dropout is None else dropout(x, rate, site)
