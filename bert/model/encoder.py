"""The BERT encoder as published (Devlin et al. 2018; google-research/bert modeling.py), in Flax Linen.

Shapes: B batch, T query position, S key position, D hidden, N heads, H head size, F feed-forward, V vocabulary; E width
of the embeddings, which is D unless the config parts the two.
Parameters are float32; ``dtype`` is that of the computation. Softmax and LayerNorm's statistics are always float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.cache import LayerCache, Memory
from bert.model.dropout import Dropout
from bert.model.embeddings import Embeddings
from bert.model.execution import LayerExecution
from bert.model.layers import ACTIVATIONS, LINEAR_OUTPUT, Dtype, Layer, LayerStates, dense, layer_norm
from bert.model.mask import Mask

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


class Encoder(nn.Module):
    """The stack of layers; with pre-LN another LayerNorm after the last one, whose output would else have none.

    With a causal mask it is the stack of a decoder.
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
        kernel = "written" if intermediates else self.execution.attention  # a kernel has no weights to look at
        if kernel == "written":
            length = x.shape[1]
            mask = mask.to_pairs(length, length if cache is None else cache[0].own.num_positions)
            if memory is not None:
                memory = memory.replace(mask=memory.mask.to_pairs(length, memory.hidden_states.shape[1]))
        looped = self.execution.scan and not intermediates and cache is None and not self.is_initializing()
        kind = Layer
        if self.execution.remat != "none":
            # Inside a loop the compiler cannot undo the recomputation by merging it with the forward pass.
            kind = nn.remat(Layer, prevent_cse=not looped, policy=REMAT_POLICIES[self.execution.remat])
        if looped:
            x = self._scan_layers(kind(self.config, self.dtype, kernel, parent=None), x, mask, dropout, memory)
            return EncoderStates(self._final_norm(x))
        hidden_states, layers = [x], list[LayerStates]()
        for number in range(self.config.num_hidden_layers):
            source = None if dropout is None else dropout.fold_in(number)
            layer = kind(self.config, self.dtype, kernel, name=f"layer_{number}")
            x, states = layer(x, mask, source, memory, None if cache is None else cache[number])
            layers.append(states)
            if number == self.config.num_hidden_layers - 1:
                x = self._final_norm(x)
            hidden_states.append(x)
        caches = tuple(states.cache for states in layers if states.cache is not None)
        if not intermediates:
            return EncoderStates(x, cache=caches)
        attentions = tuple(states.weights for states in layers if states.weights is not None)
        cross_attentions = tuple(states.cross_weights for states in layers if states.cross_weights is not None)
        return EncoderStates(x, tuple(hidden_states), attentions, cross_attentions, caches)

    def _final_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(self.config, self.dtype, "norm")(x) if self.config.pre_layer_norm else x

    def _scan_layers(
        self,
        layer: nn.Module,
        x: Float[Array, "B T D"],
        mask: Mask,
        dropout: Dropout | None,
        memory: Memory | None,
    ) -> Float[Array, "B T D"]:
        """All layers as one `jax.lax.scan` over their stacked parameters."""
        params, numbers = self.variables["params"], range(self.config.num_hidden_layers)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"layer_{number}"] for number in numbers))

        def one(x: Float[Array, "B T D"], of_layer: tuple[Int[Array, ""], Any]) -> tuple[Float[Array, "B T D"], None]:
            number, params = of_layer
            source = None if dropout is None else dropout.fold_in(number)
            return layer.apply({"params": params}, x, mask, source, memory)[0], None

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
        mask: Mask | None = None,
        cache: tuple[LayerCache, ...] | None = None,
    ) -> EncoderOutput:
        """Encodes token ids.

        Args:
            input_ids: [B, T] integers.
            token_type_ids: [B, T] segments; all 0 if None.
            attention_mask: [B, T], 1 for a token and 0 for padding, which is at the end of each row; all 1 if None.
            position_ids: [B, T] rows of the position table; the first T from ``position_offset`` on if None.
            packing: where the examples of packed rows lie, in place of attention_mask and position_ids; the pooled
                output is then that of each example, [B, K, D].
            dropout: source of dropout; None for none (evaluation).
            intermediates: return every layer's hidden states and attention weights as well.
            mask: the mask of the layers, in place of that of attention_mask and packing.
            cache: keys and values of earlier positions, for each layer; needs a ``mask`` (`bert.model.layers.Layer`).

        Raises:
            ValueError: T is over the position table.
        """
        x = self.embeddings.project(self.embed(input_ids, token_type_ids, position_ids, packing, dropout))
        mask = self.make_mask(attention_mask, packing) if mask is None else mask
        states = self.encoder(x, mask, dropout, intermediates, cache=cache)
        x = states.last_hidden_state
        first = x[:, 0] if packing is None else at_positions(x, packing.cls_positions)
        pooled = self.pool(first) if self.add_pooling_layer else None
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

    def pool(self, first: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """[..., D] the first tokens' hidden states -> [..., D] pooled output."""
        return ACTIVATIONS[self.config.pooler_act](self.pooler(first))

    def embedding_table(self) -> Float[Array, "V E"]:
        """[V, E], which the MLM head is tied to."""
        return self.embeddings.word.embedding


def at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    """[B, T, D] at [B, P] -> [B, P, D]."""
    return jnp.take_along_axis(hidden_states, positions[:, :, None], axis=1)
