"""The BERT encoder as published (Devlin et al. 2018; google-research/bert modeling.py), in Flax Linen.

Shapes: B batch, T query position, S key position, D hidden, N heads, H head size, F feed-forward, V vocabulary; E width
of the embeddings, which is D unless the config parts the two.
Parameters are float32; ``dtype`` is that of the computation. Softmax and LayerNorm's statistics are always float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.attention import dot_product_attention, fused_attention, key_lengths, padding_mask, same_example_mask
from bert.model.dropout import Dropout
from bert.model.execution import LayerExecution
from bert.model.initializers import position_initializer, sinusoidal_position_table, truncated_normal_init
from bert.model.linear import gelu, linear
from bert.parallel.sharding import all_gather_fsdp, constrain_activation

Dtype = Any

AttentionMask = Bool[Array, "#B #N #T #S"] | Int[Array, "B"] | None
"""Attention mask: a boolean mask for the reference implementation, or key lengths [B] for the fused kernels."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}

LINEAR_OUTPUT = "linear"
"""Name of what a linear layer gives, for the policies of `jax.checkpoint`."""

# What the backward pass finds stored of a layer; the rest it computes again. The scores of attention are products with
# a batch dimension: they grow with T squared, and are among the rest.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class EncoderOutput(struct.PyTreeNode):
    """What `Bert` returns.

    Attributes:
        last_hidden_state: [B, T, D].
        pooled_output: [B, D], ``pooler_act`` of a dense layer over the first token, [B, K, D] over those of the
            examples of packed rows; None without a pooling layer.
        hidden_states: the embeddings' output and each layer's, [B, T, D] each; () unless asked for.
        attentions: each layer's attention weights before dropout, [B, N, T, S]; () unless asked for.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    last_hidden_state: Array
    pooled_output: Array | None
    hidden_states: tuple[Array, ...] = ()
    attentions: tuple[Array, ...] = ()


class Packing(struct.PyTreeNode):
    """Where the examples of packed rows lie (`bert.data.pretraining.packing.packing_arrays`); K examples a row at most.

    Attributes:
        example_ids: [B, T], the example that a token is of, 1 ... K; 0 for padding.
        position_ids: [B, T], from 0 on in each example.
        cls_positions: [B, K], where each example begins.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    example_ids: Array
    position_ids: Array
    cls_positions: Array


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
        mask: AttentionMask,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """[B, T, D] queries over [B, S, D] keys and values -> [B, T, D], and the weights [B, N, T, S].

        Fused kernels take the lengths [B] of `key_lengths` for ``mask``, and return None for the weights.
        """
        config = self.config
        heads = config.num_attention_heads

        def project(x: Float[Array, "B S D"], name: str) -> Float[Array, "B S N H"]:
            x = dense(config, config.hidden_size, self.dtype, name)(x)
            return constrain_activation(x.reshape(*x.shape[:-1], heads, config.hidden_size // heads), None, "tensor")

        query, key, value = project(queries, "query"), project(keys_values, "key"), project(keys_values, "value")
        if self.kernel == "written":
            rate = config.attention_probs_dropout_prob
            mixed, weights = dot_product_attention(query, key, value, mask, dropout=dropout, dropout_rate=rate)
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
        self, x: Float[Array, "B T D"], mask: AttentionMask, dropout: Dropout | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T T"] | None]:
        """[B, T, D] -> [B, T, D], and the attention weights [B, N, T, S], both as `Attention` has them."""
        config = self.config
        attention_norm = layer_norm(config, self.dtype, "attention_norm")
        output_norm = layer_norm(config, self.dtype, "output_norm")
        read = attention_norm(x) if config.pre_layer_norm else x
        attended, weights = Attention(config, self.dtype, self.kernel, name="attention")(read, read, mask, dropout)
        x = x + _maybe_dropout(attended, dropout, config.hidden_dropout_prob, "attention_output")
        if not config.pre_layer_norm:
            x = attention_norm(x)
        read = output_norm(x) if config.pre_layer_norm else x
        inner = constrain_activation(
            dense(config, config.intermediate_size, self.dtype, "intermediate")(read), None, "tensor"
        )
        inner = ACTIVATIONS[config.hidden_act](inner)
        outer = dense(config, config.hidden_size, self.dtype, "output")(inner)
        x = x + _maybe_dropout(outer, dropout, config.hidden_dropout_prob, "output")
        return constrain_activation(x if config.pre_layer_norm else output_norm(x)), weights


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, LayerNorm and dropout; then, where E is not D, a dense layer
    (ALBERT, Lan et al. 2019, section 3.1)."""

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
        self.segment = table(config.type_vocab_size, "segment", truncated_normal_init)
        self.norm = layer_norm(config, self.dtype, "norm")
        if config.embedding_width != config.hidden_size:
            self.projection = dense(config, config.hidden_size, self.dtype, "projection")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        dropout: Dropout | None,
    ) -> Float[Array, "B T D"]:
        """Three [B, T] integer arrays -> [B, T, D]."""
        return self.project(self.look_up(input_ids, token_type_ids, position_ids, dropout))

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

        if config.position_embedding_type == "learned":
            position = rows(self.position, position_ids)
        else:
            position = sinusoidal_position_table(config)[position_ids]
        x = rows(self.word, input_ids) + position + rows(self.segment, token_type_ids)
        return _maybe_dropout(self.norm(x), dropout, config.hidden_dropout_prob, "embeddings")

    def project(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """[B, T, E] -> [B, T, D]."""
        return constrain_activation(x if self.config.embedding_width == self.config.hidden_size else self.projection(x))


class Encoder(nn.Module):
    """The stack of layers; with pre-LN another LayerNorm after the last one, whose output would else have none."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: AttentionMask,
        dropout: Dropout | None = None,
        intermediates: bool = False,
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B T D"], ...], tuple[Float[Array, "B N T T"], ...]]:
        """[B, T, D] -> [B, T, D], every layer's input and the output, every layer's attention weights."""
        kernel = "written" if intermediates else self.execution.attention
        looped = self.execution.scan and not intermediates and not self.is_initializing()
        kind = Layer
        if self.execution.remat != "none":
            # Inside a loop the compiler cannot undo the recomputation by merging it with the forward pass.
            kind = nn.remat(Layer, prevent_cse=not looped, policy=REMAT_POLICIES[self.execution.remat])
        if looped:
            x = self._scan_layers(kind(self.config, self.dtype, kernel, parent=None), x, mask, dropout)
            return self._final_norm(x), (), ()
        hidden_states, attentions = [x], list[Array]()
        for number in range(self.config.num_hidden_layers):
            source = None if dropout is None else dropout.fold_in(number)
            x, weights = kind(self.config, self.dtype, kernel, name=f"layer_{number}")(x, mask, source)
            if weights is not None:
                attentions.append(weights)
            if number == self.config.num_hidden_layers - 1:
                x = self._final_norm(x)
            hidden_states.append(x)
        return (x, tuple(hidden_states), tuple(attentions)) if intermediates else (x, (), ())

    def _final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(self.config, self.dtype, "norm")(x) if self.config.pre_layer_norm else x

    def _scan_layers(
        self,
        layer: nn.Module,
        x: Float[Array, "B T D"],
        mask: AttentionMask,
        dropout: Dropout | None,
    ) -> Float[Array, "B T D"]:
        """All layers as one `jax.lax.scan` over their stacked parameters."""
        params, numbers = self.variables["params"], range(self.config.num_hidden_layers)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"layer_{number}"] for number in numbers))

        def one(x: Float[Array, "B T D"], of_layer: tuple[Int[Array, ""], Any]) -> tuple[Float[Array, "B T D"], None]:
            number, params = of_layer
            source = None if dropout is None else dropout.fold_in(number)
            return layer.apply({"params": params}, x, mask, source)[0], None

        return jax.lax.scan(one, x, (jnp.arange(len(numbers)), stacked))[0]


class Bert(nn.Module):
    """Embeddings, encoder and pooler.

    Attributes:
        config: sizes; ``vocab_size`` must be set.
        dtype: of the computation, float32 or bfloat16.
        add_pooling_layer: whether there is a pooler; heads over every token need none.
        execution: how the layers are run; the same numbers in any case.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    add_pooling_layer: bool = True
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config, self.dtype)
        self.encoder = Encoder(self.config, self.dtype, self.execution)
        if self.add_pooling_layer:
            self.pooler = dense(self.config, self.config.hidden_size, self.dtype, "pooler")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: Num[Array, "B T"] | Bool[Array, "B T"] | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
        intermediates: bool = False,
    ) -> EncoderOutput:
        """Encodes token ids.

        Args:
            input_ids: [B, T] integers.
            token_type_ids: [B, T] segments; all 0 if None.
            attention_mask: [B, T], 1 for a token and 0 for padding; all 1 if None.
            position_ids: [B, T] rows of the position table; the first T from ``position_offset`` on if None.
            packing: where the examples of packed rows lie, in place of attention_mask and position_ids; the pooled
                output is then that of each example, [B, K, D].
            dropout: source of dropout; None for none (evaluation).
            intermediates: return every layer's hidden states and attention weights as well.

        Raises:
            ValueError: T is over the position table.
        """
        x = self.embeddings.project(self.embed(input_ids, token_type_ids, position_ids, packing, dropout))
        mask = self.make_mask(attention_mask, packing, intermediates)
        x, hidden_states, attentions = self.encoder(x, mask, dropout, intermediates)
        first = x[:, 0] if packing is None else at_positions(x, packing.cls_positions)
        pooled = self.pool(first) if self.add_pooling_layer else None
        return EncoderOutput(x, pooled, hidden_states, attentions)

    def embed(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None,
        position_ids: Int[Array, "#B T"] | None,
        packing: Packing | None,
        dropout: Dropout | None,
    ) -> Float[Array, "B T E"]:
        """The embeddings [B, T, E] before their projection; arguments and errors as of `__call__`."""
        length = input_ids.shape[1]
        if packing is not None:
            position_ids = self.config.position_offset + packing.position_ids
        if position_ids is None:
            if length > self.config.max_position_embeddings:
                raise ValueError(
                    f"{length} tokens do not fit a position table of {self.config.max_position_embeddings}"
                )
            position_ids = self.config.position_offset + jnp.arange(length)[None, :]
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        return self.embeddings.look_up(input_ids, token_type_ids, position_ids, dropout)

    def make_mask(
        self,
        attention_mask: Num[Array, "B T"] | Bool[Array, "B T"] | None,
        packing: Packing | None,
        intermediates: bool = False,
    ) -> AttentionMask:
        """The attention mask as the layers take it; arguments as of `__call__`."""
        if packing is not None:
            return same_example_mask(packing.example_ids)
        if attention_mask is None:
            return None
        # Of one kernel there are no weights to look at.
        written = self.execution.attention == "written" or intermediates
        return padding_mask(attention_mask) if written else key_lengths(attention_mask)

    def pool(self, first: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """[..., D] the first tokens' hidden states -> [..., D] pooled output."""
        return ACTIVATIONS[self.config.pooler_act](self.pooler(first))

    def embedding_table(self) -> Float[Array, "V E"]:
        """[V, E], which the MLM head is tied to."""
        return self.embeddings.word.embedding


def at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    """[B, T, D] at [B, P] -> [B, P, D]."""
    return jnp.take_along_axis(hidden_states, positions[:, :, None], axis=1)


def _maybe_dropout(
    x: Float[Array, "*shape"], dropout: Dropout | None, rate: float, site: str
) -> Float[Array, "*shape"]:
    return x if dropout is None else dropout(x, rate, site)
