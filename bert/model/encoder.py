"""The BERT encoder as published (Devlin et al. 2018; google-research/bert modeling.py), in Flax Linen.

Shapes: B batch, T query position, S key position, D hidden, N heads, H head size, F feed-forward, V vocabulary; E width
of the embeddings, which is D unless the config parts the two.
Parameters are float32; ``dtype`` is that of the computation. Softmax and LayerNorm's statistics are always float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.attention import LayerCache, Memory
from bert.model.dropout import Dropout
from bert.model.execution import LayerExecution
from bert.model.layers import (
    ACTIVATIONS,
    LINEAR_OUTPUT,
    Layer,
    LayerStates,
    Transform,
    hidden_dense,
    layer_norm,
    maybe_dropout,
    position_initializer,
    truncated_normal_init,
)
from bert.model.mask import BiasOf, Length, Mask
from bert.model.pooling import at_positions, mean_over
from bert.model.positions import (
    Disentangled,
    Positions,
    Rotation,
    relative_attention_bias,
    sinusoidal_position_table,
    step_embeddings,
)
from bert.parallel.sharding import all_gather_fsdp, constrain_activation

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
        pooled_output: [B, D], the pooler's of the first token or of the mean, [B, K, D] of each of the examples of
            packed rows; None without a pooling layer.
        hidden_states: the embeddings' output and each layer's, [B, T, D] each; () unless asked for.
        attentions: each layer's attention weights before dropout, [B, N, T, S]; () unless asked for.
        cache: with the keys and values of this call; () without a cache.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    last_hidden_state: Array
    pooled_output: Array | None
    hidden_states: tuple[Array, ...] = ()
    attentions: tuple[Array, ...] = ()
    cache: tuple[LayerCache, ...] = ()


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


class EncoderStates(NamedTuple):
    """The output of `Encoder`.

    Attributes:
        last_hidden_state: [B, T, D].
        hidden_states: every layer's input and the output, [B, T, D] each; () unless asked for.
        attentions: every layer's weights of self-attention, [B, N, T, S]; () unless asked for.
        cross_attentions: those of cross-attention; () unless asked for.
        cache: with the keys and values of this call; () without a cache.
    """

    last_hidden_state: Array
    hidden_states: tuple[Array, ...] = ()
    attentions: tuple[Array, ...] = ()
    cross_attentions: tuple[Array, ...] = ()
    cache: tuple[LayerCache, ...] = ()


class Scope(NamedTuple):
    """What self-attention of a layer reads: the mask, and rotary or disentangled positions or None."""

    mask: Mask
    positions: Positions | None


class Encoder(nn.Module):
    """The stack of layers; with pre-LN another LayerNorm after the last one, whose output would else have none.

    With a causal mask it is the stack of a decoder. Layers may share their parameters (`ModelConfig.layer_groups`),
    which are then those of ``layer_0`` to the number of groups.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        dropout: Dropout | None = None,
        intermediates: bool = False,
        memory: Memory | None = None,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> EncoderStates:
        """[B, T, D] -> [B, T, D]; arguments as of `Layer`, a cache for each layer."""
        config = self.config
        kernel = "written" if intermediates else self.execution.attention  # a kernel has no weights to look at
        length = x.shape[1]
        looped = self.execution.scan and not intermediates and cache is None and not self.is_initializing()
        # A layer outside of the loop has a LayerNorm less than the others.
        unrolled = config.num_hidden_layers if not looped else int(not config.first_layer_norm)
        num_keys = length if cache is None else cache[0].own.num_positions
        # The kernel for TPUs leaves out by itself what lies beyond a window.
        in_blocks = not intermediates and cache is None and memory is None and kernel != "splash"
        scopes = self._scopes(mask, x.shape[0], length, num_keys, kernel == "written", in_blocks)
        if kernel == "written" and memory is not None:
            memory = memory.replace(mask=memory.mask.to_pairs(length, memory.hidden_states.shape[1]))
        hidden_states, layers = [x], list[LayerStates]()
        modules = [
            self._layer_class(in_loop=False)(
                config, self.dtype, kernel, group == 0 and not config.first_layer_norm, name=f"layer_{group}"
            )
            for group in range(0 if unrolled == 0 else 1 + config.group_of(unrolled - 1))
        ]
        for number in range(unrolled):
            source = None if dropout is None else dropout.fold_in(number)
            scope = scopes[config.is_local(number)]
            layer_cache = None if cache is None else cache[number]
            x, states = modules[config.group_of(number)](
                self._add_step(x, number), scope.mask, source, memory, layer_cache, scope.positions
            )
            layers.append(states)
            if number == config.num_hidden_layers - 1:
                x = self._final_norm(x)
            hidden_states.append(x)
        if unrolled < config.num_hidden_layers:
            layer = self._layer_class(in_loop=True)(config, self.dtype, kernel, parent=None)
            x = self._final_norm(self._scan_layers(layer, unrolled, x, scopes, dropout, memory))
        caches = tuple(states.cache for states in layers if states.cache is not None)
        if not intermediates:
            return EncoderStates(x, cache=caches)
        attentions = tuple(states.weights for states in layers if states.weights is not None)
        cross_attentions = tuple(states.cross_weights for states in layers if states.cross_weights is not None)
        return EncoderStates(x, tuple(hidden_states), attentions, cross_attentions, caches)

    def _layer_class(self, in_loop: bool) -> type[Layer]:
        if self.execution.remat == "none":
            return Layer
        # Inside a loop the compiler cannot undo the recomputation by merging it with the forward pass.
        return nn.remat(Layer, prevent_cse=not in_loop, policy=REMAT_POLICIES[self.execution.remat])

    def _final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(self.config, self.dtype, "norm")(x) if self.config.pre_layer_norm else x

    def _add_step(self, x: Float[Array, "B T D"], number: int | Int[Array, ""]) -> Float[Array, "B T D"]:
        """The input of a layer, by its number."""
        if not self.config.step_embedding:
            return x
        return x + step_embeddings(self.config)[number].astype(x.dtype)

    def _relative_bias(self) -> BiasOf | None:
        """The bias of relative positions, which all layers share; None for a model without one."""
        config = self.config
        if config.relative_attention_buckets is None or config.position_embedding_type == "disentangled":
            return None
        buckets, heads = config.relative_attention_buckets, config.num_attention_heads
        init = truncated_normal_init(config)
        table = nn.Embed(buckets, heads, embedding_init=init, name="relative_attention_bias")
        return partial(relative_attention_bias, table.embedding)

    def _disentangled(self, distances: Int[Array, "#B T S"]) -> Disentangled:
        """The positions of disentangled attention, whose vectors all layers share."""
        config, init = self.config, truncated_normal_init(self.config)
        buckets = require(config.relative_attention_buckets, "model.relative_attention_buckets")
        table = nn.Embed(buckets, config.hidden_size, embedding_init=init, name="relative_attention_embeddings")
        vectors = layer_norm(config, self.dtype, "relative_attention_norm")(table.embedding)
        return Disentangled.of_distances(vectors, distances, config.max_position_embeddings)

    def _scopes(
        self, mask: Mask, rows: Length, num_queries: Length, num_keys: Length, written: bool, in_blocks: bool
    ) -> dict[bool, Scope]:
        """The scopes of the layers that attend to the whole row (False) and of the local ones (True), as far as there
        are such layers."""
        config = self.config
        kinds = {config.is_local(number) for number in range(config.num_hidden_layers)}
        # Other masks are those of whole rows, and a length may be a symbol.
        known = in_blocks and mask.pairs is None and mask.start is None and isinstance(num_queries, int)
        block = config.local_block(num_queries) if known else None
        bias_of = self._relative_bias()

        def scope(local: bool) -> Scope:
            base = config.rotary_base
            if local and config.local_rotary_base is not None:
                base = config.local_rotary_base
            positions: Positions | None = None
            if config.position_embedding_type == "rotary":
                positions = Rotation.of_positions(mask.query_positions(num_queries), config.head_size, base)
            elif config.position_embedding_type == "disentangled":
                positions = self._disentangled(mask.distances(num_queries, num_keys))
            narrowed = mask.replace(window=config.attention_window) if local else mask
            if local and block is not None:
                return Scope(narrowed.to_blocks(rows, num_queries, block, bias_of), positions)
            if bias_of is not None:
                narrowed = narrowed.replace(bias=bias_of(narrowed.distances(num_queries, num_keys)))
            return Scope(narrowed.to_pairs(num_queries, num_keys) if written else narrowed, positions)

        return {local: scope(local) for local in sorted(kinds)}

    def _scan_layers(
        self,
        layer: nn.Module,
        first: int,
        x: Float[Array, "B T D"],
        scopes: dict[bool, Scope],
        dropout: Dropout | None,
        memory: Memory | None,
    ) -> Float[Array, "B T D"]:
        """The layers from ``first`` on as one `jax.lax.scan` over their stacked parameters, and inside over the uses of
        those that layers share."""
        config, params = self.config, self.variables["params"]
        groups = range(config.group_of(first), config.num_distinct_layers)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"layer_{group}"] for group in groups))
        numbers = jnp.arange(first, config.num_hidden_layers)
        local = jnp.array([config.is_local(number) for number in range(first, config.num_hidden_layers)])

        def one(
            x: Float[Array, "B T D"], of_layer: tuple[Int[Array, ""], Bool[Array, ""], Any]
        ) -> tuple[Float[Array, "B T D"], None]:
            number, is_local, params = of_layer
            source = None if dropout is None else dropout.fold_in(number)
            x = self._add_step(x, number)
            branches = [
                lambda x, scope=scopes[local]: layer.apply(
                    {"params": params}, x, scope.mask, source, memory, None, scope.positions
                )[0]
                for local in sorted(scopes)
            ]
            return (branches[0](x) if len(branches) == 1 else jax.lax.cond(is_local, *reversed(branches), x)), None

        def group(
            x: Float[Array, "B T D"], of_group: tuple[Int[Array, "K"], Bool[Array, "K"], Any]
        ) -> tuple[Float[Array, "B T D"], None]:
            numbers, local, params = of_group
            return jax.lax.scan(lambda x, of_layer: one(x, (*of_layer, params)), x, (numbers, local))

        if config.layers_per_group == 1:
            return jax.lax.scan(one, x, (numbers, local, stacked))[0]
        return jax.lax.scan(group, x, (numbers.reshape(len(groups), -1), local.reshape(len(groups), -1), stacked))[0]


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
            self.pooler = self._make_pooler()

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
        mask: Mask | None = None,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> EncoderOutput:
        """Encodes token ids.

        Args:
            input_ids: [B, T] integers.
            token_type_ids: [B, T] segments; all 0 if None.
            attention_mask: [B, T], 1 for a token and 0 for padding, which is at the end of each row; all 1 if None.
            position_ids: [B, T] rows of the position table; the first T from ``position_offset`` on if None. Rotary
                positions are places in the row, or those of ``mask``.
            packing: where the examples of packed rows lie, in place of attention_mask and position_ids; the pooled
                output is then that of each example, [B, K, D].
            dropout: source of dropout; None for none (evaluation).
            intermediates: return every layer's hidden states and attention weights as well.
            mask: the mask of the layers, in place of that of attention_mask and packing.
            cache: keys and values of earlier positions, for each layer; needs a ``mask`` (`bert.model.layers.Layer`).

        Raises:
            ValueError: T is over ``max_position_embeddings``.
        """
        x = self.embeddings.project(self.embed(input_ids, token_type_ids, position_ids, packing, dropout))
        mask = self.make_mask(attention_mask, packing) if mask is None else mask
        states = self.encoder(x, mask, dropout, intermediates, cache=cache)
        x = states.last_hidden_state
        pooled = self.pool(self.pooler_input(x, attention_mask, packing)) if self.add_pooling_layer else None
        return EncoderOutput(x, pooled, states.hidden_states, states.attentions, states.cache)

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
    ) -> Mask:
        """The attention mask of the layers; arguments as of `__call__`."""
        if packing is not None:
            return Mask(examples=packing.example_ids, causal=self.config.causal)
        return Mask(keys=attention_mask, causal=self.config.causal, right_padded=True)

    def _make_pooler(self) -> nn.Module:
        if self.config.pooler_type == "transform":
            return Transform(self.config, self.dtype)
        return hidden_dense(self.config, self.config.hidden_size, self.dtype, "pooler")

    def pooler_input(
        self,
        hidden_states: Float[Array, "B T D"],
        attention_mask: Num[Array, "B T"] | Bool[Array, "B T"] | None,
        packing: Packing | None = None,
    ) -> Float[Array, "B D"] | Float[Array, "B K D"]:
        """[B, T, D] -> what the pooler reads of each row, [B, D], or of each example of packed rows, [B, K, D]."""
        if self.config.pooler_input == "first":
            return hidden_states[:, 0] if packing is None else at_positions(hidden_states, packing.cls_positions)
        if packing is not None:
            numbers = 1 + jnp.arange(packing.cls_positions.shape[1])
            return mean_over(hidden_states, packing.example_ids[:, None, :] == numbers[:, None])
        mask = jnp.ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        return mean_over(hidden_states, mask[:, None, :])[:, 0]

    def pool(self, hidden_states: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """[..., D] -> [..., D] pooled output."""
        if self.config.pooler_type == "transform":
            return self.pooler(hidden_states)
        return ACTIVATIONS[self.config.pooler_act](self.pooler(hidden_states))

    def embedding_table(self) -> Float[Array, "V E"]:
        """[V, E], which the MLM head is tied to."""
        return self.embeddings.word.embedding
