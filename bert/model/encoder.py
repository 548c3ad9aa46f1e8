"""The BERT encoder (Devlin et al. 2018) in Flax Linen: embeddings, a stack of layers, and the pooler.

The other modules of this package:

- `bert.model.layers`: one layer, rematerialization and scanning over layers.
- `bert.model.mask` and `bert.model.positions`: mask and position information for attention.
- `bert.model.attention`: the attention kernels.
- `bert.model.pretraining` and `bert.model.heads`: the heads.
- `bert.model.decoders`: decoders.

Shapes, in the whole package: B batch, T query positions, S key positions, D hidden size, N heads, H head size,
F feed-forward size, V vocabulary size, E embedding size (D unless ``embedding_size`` is set), K examples per packed
row.

Parameters are float32. ``dtype`` is the type of the computation. Softmax and LayerNorm statistics are always float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.attention import LayerCache, Memory
from bert.model.dropout import Dropout, maybe_dropout
from bert.model.halting import Halting, halting_probabilities
from bert.model.layers import Convolution, Layer, LayerExecution, LayerStates, remat, scan_layers
from bert.model.linear import ACTIVATIONS, Transform, hidden_dense, layer_norm, truncated_normal_init
from bert.model.mask import GlobalTokens, Mask, Packing, make_mask
from bert.model.names import GlobalTokenKind
from bert.model.packing import PLACES, TokenPlaces
from bert.model.positions import (
    AttentionContext,
    attention_contexts,
    position_initializer,
    sinusoidal_position_table,
    step_embeddings,
)
from bert.model.recurrence import COLLECTION, NAME, SegmentMemory
from bert.model.reductions import pooler_input, standardize, token_dropout_factors
from bert.parallel.sharding import all_gather_fsdp, constrain_activation

Halt = Callable[..., tuple[Any, Any]]
"""(hidden states before a layer, its output, halting state, number of the layer) -> hidden states, halting state."""


class EncoderOutput(struct.PyTreeNode):
    """Output of `Bert` and `Encoder`.

    Attributes:
        last_hidden_state: [B, T, D].
        pooled_output: [B, D], or [B, K, D] for packed rows; None without a pooler.
        hidden_states: the embeddings and the output of each layer, [B, T, D] each; () unless requested.
        attentions: self-attention weights of each layer before dropout, [B, N, T, S]; () unless requested.
        cache: the updated cache of each layer; () without a cache.
        cross_attentions: cross-attention weights of each layer of a decoder, [B, N, T, S]; () unless requested.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    last_hidden_state: Array
    pooled_output: Array | None = None
    hidden_states: tuple[Array, ...] = ()
    attentions: tuple[Array, ...] = ()
    cache: tuple[LayerCache, ...] = ()
    cross_attentions: tuple[Array, ...] = ()


class Embeddings(nn.Module):
    """Sum of word, position and segment embeddings, followed by LayerNorm and dropout.

    If the embedding size differs from the hidden size, a dense layer projects the sum (ALBERT, Lan et al. 2019, section
    3.1). Word embeddings may be scaled by the square root of E (Vaswani et al. 2017, section 3.4).
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        config = self.config

        def table(rows: int, name: str, init: Callable[[ModelConfig], nn.initializers.Initializer]) -> nn.Embed:
            return nn.Embed(rows, config.embedding_width, embedding_init=init(config), name=name)

        self.word = table(config.known_vocab_size, "word", truncated_normal_init)
        if config.has_position_table:
            positions = config.position_offset + config.max_position_embeddings
            self.position = table(positions, "position", position_initializer)
        if config.has_segment_table:
            self.segment = table(config.type_vocab_size, "segment", truncated_normal_init)
        if config.has_query_embedding:
            self.query = self.param("query", truncated_normal_init(config), (config.embedding_width,), jnp.float32)
        if config.embedding_norm:
            self.norm = layer_norm(config, self.dtype, "norm")
        if config.embedding_width != config.hidden_size:
            self.projection = hidden_dense(config, config.hidden_size, self.dtype, "projection")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
        num_queries: int = 0,
        attention_mask: PaddingMask | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the input of the first layer, [B, T, D]. Arguments and errors: see `Bert`."""
        x = self.look_up(input_ids, token_type_ids, position_ids, packing, dropout, num_queries, attention_mask)
        return self.project(x)

    def look_up(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
        num_queries: int = 0,
        attention_mask: PaddingMask | None = None,
    ) -> Float[Array, "B T E"]:
        """Returns the embeddings before their projection, [B, T, E]."""
        config = self.config
        if position_ids is None or packing is not None:
            position_ids = self._position_ids(input_ids.shape[1], packing)
        if token_type_ids is None or config.type_vocab_size == 1:  # RoBERTa has a single segment
            token_type_ids = jnp.zeros_like(input_ids)

        def rows(table: nn.Embed, ids: Int[Array, "B T"]) -> Float[Array, "B T E"]:
            return jnp.take(all_gather_fsdp(table.embedding, "tensor"), ids, axis=0)

        x = rows(self.word, input_ids)
        if num_queries:
            x = x.at[:, x.shape[1] - num_queries :].set(self.query)
        if config.scale_embeddings:
            x = x * math.sqrt(config.embedding_width)
        if config.token_dropout_id is not None:
            x = x * token_dropout_factors(input_ids == config.token_dropout_id, attention_mask, packing)
        if config.has_position_table:
            x = x + rows(self.position, position_ids)
        elif config.position_embedding_type == "sinusoidal":
            x = x + sinusoidal_position_table(config)[position_ids]
        if config.has_segment_table:
            x = x + rows(self.segment, token_type_ids)
        x = self.norm(x) if config.embedding_norm else x.astype(self.dtype)
        return maybe_dropout(x, dropout, config.hidden_dropout_prob, "embeddings")

    def project(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Projects embeddings to the hidden size, [B, T, E] -> [B, T, D]."""
        return constrain_activation(x if self.config.embedding_width == self.config.hidden_size else self.projection(x))

    def _position_ids(self, length: Any, packing: Packing | None) -> Int[Array, "#B T"]:
        """Returns rows of the position table: 0, 1, ... in each row or, for packed rows, in each example.

        ``length`` is symbolic while a model is exported.
        """
        if packing is not None:
            return self.config.position_offset + packing.position_ids
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"rows have {length} tokens, but max_position_embeddings is {self.config.max_position_embeddings}"
            )
        return self.config.position_offset + jnp.arange(length)[None, :]


class Encoder(nn.Module):
    """The stack of layers. With pre-LN, a LayerNorm follows the last layer, whose output is not normalized otherwise.

    With a causal mask this is the stack of a decoder. Layers may share parameters (`ModelConfig.layer_groups`). In that
    case the parameters are named ``layer_0`` to ``layer_{groups - 1}``.

    If the collection ``memory`` has a `SegmentMemory`, the layers also attend to it, and the memory after the rows
    replaces it.

    With ``ModelConfig.halting``, the result for each position is a weighted mean of the outputs of its layers. The
    final `Halting` is in the collection ``halting``.
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
        num_queries: int = 0,
    ) -> EncoderOutput:
        """[B, T, D] -> [B, T, D]; arguments: see `Bert` and `Layer`."""
        config = self.config
        # Fused kernels return no attention weights.
        kernel = "eager" if intermediates else self.execution.attention
        num_keys = x.shape[1] if cache is None else cache[0].own.num_positions
        segment: SegmentMemory | None = self.get_variable(COLLECTION, NAME)
        if segment is not None:
            mask, num_keys = segment.extend(mask, x.shape[1]), segment.size + num_keys
        only_rows = not intermediates and cache is None
        may_split = only_rows and segment is None and memory is None
        contexts = attention_contexts(config, self.dtype, mask, x.shape[0], x.shape[1], num_keys, kernel, may_split)
        if kernel == "eager" and memory is not None:  # the layers share the booleans
            memory = memory.replace(mask=memory.mask.to_pairs(x.shape[1], memory.hidden_states.shape[1]))

        scans = self.execution.scan and only_rows and not self.is_initializing()
        # A first layer that differs from the others stays outside the loop, with the layers that share its parameters.
        first_differs = not config.first_layer_norm or config.conv_kernel_size is not None
        num_unrolled = first_differs * config.layers_per_group if scans else config.num_hidden_layers
        layer_class = remat(Layer, self.execution.remat, in_loop=False)
        groups = [
            layer_class(config, self.dtype, kernel, group > 0 or config.first_layer_norm, name=f"layer_{group}")
            for group in range(config.num_distinct_layers)
        ]
        hidden_states, states, all_inputs = [x], list[LayerStates](), list[Array]()
        halt, halting = self._make_halt(), None if config.halting is None else Halting.start(x)
        for number in range(num_unrolled):
            layer, context = groups[config.group_of(number)], contexts[config.is_local(number)]
            layer_cache = None if cache is None else cache[number]
            inputs, source = self._layer_inputs(x, number, dropout)
            earlier = None if segment is None else segment.of_layer(number, inputs.dtype)
            output, layer_states = layer(inputs, context.mask, source, memory, layer_cache, context.positions, earlier)
            all_inputs.append(inputs)
            if number == 0 and config.conv_kernel_size is not None:
                convolution = remat(Convolution, self.execution.remat, in_loop=False)
                output = convolution(config, self.dtype, name="convolution")(output, x, mask, dropout)
            x, halting = halt(x, output, halting, number)
            hidden_states.append(x)
            states.append(layer_states)
        if num_unrolled < config.num_hidden_layers:
            run = partial(self._scan_layers, kernel, num_unrolled, contexts, dropout, memory, segment, halt)
            (x, halting), inputs_of_layers = run((x, halting))
            all_inputs += [] if inputs_of_layers is None else list(inputs_of_layers)
        if segment is not None and self.is_mutable_collection(COLLECTION):
            self.put_variable(COLLECTION, NAME, segment.after(all_inputs, num_queries))
        if halting is not None:
            x = hidden_states[-1] = halting.output.astype(x.dtype)
            if not self.is_initializing():
                self.sow("halting", "final", halting)
        if config.pre_layer_norm:
            x = hidden_states[-1] = layer_norm(config, self.dtype, "norm")(x)

        caches = tuple(layer.cache for layer in states if layer.cache is not None)
        if not intermediates:
            return EncoderOutput(x, cache=caches)
        return EncoderOutput(
            x,
            hidden_states=tuple(hidden_states),
            attentions=tuple(layer.weights for layer in states if layer.weights is not None),
            cache=caches,
            cross_attentions=tuple(layer.cross_weights for layer in states if layer.cross_weights is not None),
        )

    def _make_halt(self) -> Halt:
        """Returns the function that is applied after each layer."""
        if self.config.halting is None:
            return lambda old, new, halting, number: (new, None)
        width = self.config.hidden_size
        kernel = self.param("halting_kernel", truncated_normal_init(self.config), (width,), jnp.float32)
        bias = self.param("halting_bias", nn.initializers.ones, (), jnp.float32)  # Graves 2016, section 3

        def halt(
            old: Float[Array, "B T D"], new: Float[Array, "B T D"], halting: Halting, number: int | Int[Array, ""]
        ) -> tuple[Float[Array, "B T D"], Halting]:
            is_last = number == self.config.num_hidden_layers - 1
            return halting.after(old, new, halting_probabilities(new, kernel, bias), is_last)

        return halt

    def _layer_inputs(
        self, x: Float[Array, "B T D"], number: int | Int[Array, ""], dropout: Dropout | None
    ) -> tuple[Float[Array, "B T D"], Dropout | None]:
        """Returns the hidden states and the dropout source for a layer. Layers are numbered from 0."""
        source = None if dropout is None else dropout.fold_in(number)
        if self.config.step_embedding:
            x = x + step_embeddings(self.config)[number].astype(x.dtype)
        return x, source

    def _scan_layers(
        self,
        kernel: str,
        first: int,
        contexts: dict[bool, AttentionContext],
        dropout: Dropout | None,
        memory: Memory | None,
        segment: SegmentMemory | None,
        halt: Halt,
        carry: tuple[Float[Array, "B T D"], Halting | None],
    ) -> tuple[tuple[Float[Array, "B T D"], Halting | None], Float[Array, "layers B T D"] | None]:
        """Runs the layers from ``first`` on as a loop over stacked parameters. ``halt`` is applied after each.

        Returns:
            The carry after the last layer, and the inputs of the layers; None without ``segment``.
        """
        layer = remat(Layer, self.execution.remat, in_loop=True)(self.config, self.dtype, kernel, parent=None)

        def run(
            carry: Any, number: Int[Array, ""], is_local: Bool[Array, ""], params: dict[str, Any]
        ) -> tuple[tuple[Float[Array, "B T D"], Halting | None], Float[Array, "B T D"] | None]:
            old, halting = carry
            x, source = self._layer_inputs(old, number, dropout)
            earlier = None if segment is None else segment.of_layer(number, x.dtype)
            apply = partial(layer.apply, {"params": params})
            branches = [
                lambda x, context=contexts[kind]: apply(
                    x, context.mask, source, memory, None, context.positions, earlier
                )[0]
                for kind in sorted(contexts)
            ]
            new = branches[0](x) if len(branches) == 1 else jax.lax.cond(is_local, *reversed(branches), x)
            return halt(old, new, halting, number), None if segment is None else x

        return cast(Any, scan_layers(self.config, self.variables["params"], first, carry, run))


class Bert(nn.Module):
    """Embeddings, encoder and pooler.

    If the collection ``packing`` has `TokenPlaces`, the layers compute packed rows. Arguments and outputs stay padded.

    Attributes:
        config: model configuration; ``vocab_size`` must be set.
        dtype: type of the computation, float32 or bfloat16.
        add_pooling_layer: whether to add the pooler. Token-level heads do not need it.
        execution: how the layers run. It changes results only by rounding.
        global_tokens: tokens with global attention, if the model has it; None for none.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    add_pooling_layer: bool = True
    execution: LayerExecution = LayerExecution()
    global_tokens: GlobalTokenKind | None = None

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config, self.dtype)
        self.encoder = Encoder(self.config, self.dtype, self.execution)
        if self.add_pooling_layer and self.config.pooler_type != "norm":
            self.pooler = self._make_pooler()

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        *,
        global_attention_mask: PaddingMask | None = None,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
        intermediates: bool = False,
        mask: Mask | None = None,
        cache: tuple[LayerCache, ...] | None = None,
        num_queries: int = 0,
    ) -> EncoderOutput:
        """Encodes token ids.

        Args:
            input_ids: [B, T] integers.
            token_type_ids: [B, T] segments; all 0 if None.
            attention_mask: [B, T], 1 for a token and 0 for padding, which is at the end of each row; all 1 if None.
            position_ids: [B, T] rows of the position table. If None, the first T rows from ``position_offset`` on.
                Rotary positions ignore it and use the token order, or the positions of ``mask``.
            global_attention_mask: [B, T], 1 for a token with global attention, in place of ``global_tokens``.
            packing: the examples of packed rows. It replaces attention_mask and position_ids. There is one pooled
                output per example, [B, K, D].
            dropout: source of dropout; None in evaluation.
            intermediates: whether to return the hidden states and the attention weights of every layer.
            mask: attention mask of the layers. Replaces the mask made from attention_mask and packing.
            cache: keys and values of earlier positions, one entry per layer. Requires ``mask``
                (`bert.model.layers.Layer`).
            num_queries: number of tokens at the end of the rows whose word embedding is replaced by the vector of all
                queries (``ModelConfig.has_query_embedding``).

        Raises:
            ValueError: T is larger than ``max_position_embeddings``, packed rows would have global tokens, or the model
                has no global attention.
        """
        places: TokenPlaces | None = self.get_variable(*PLACES)
        padding = attention_mask if places is None else None
        if places is not None:
            packing, input_ids = places.packing, places.pack(input_ids)
            token_type_ids = None if token_type_ids is None else places.pack(token_type_ids)
            dropout = None if dropout is None else dropout.replace(rows=places.numbers.reshape(-1))
        x = self.embeddings(input_ids, token_type_ids, position_ids, packing, dropout, num_queries, padding)
        mask = make_mask(self.config, padding, packing) if mask is None else mask
        if token_type_ids is not None and self.config.has_relative_segments:
            mask = mask.replace(segments=token_type_ids)
        tokens = self._find_global_tokens(input_ids, padding, global_attention_mask)
        if tokens is not None and packing is not None:
            raise ValueError("packed rows have no global tokens: pad rows instead, or leave out global_tokens")
        mask = mask if tokens is None else mask.replace(global_tokens=tokens)
        output = self.encoder(x, mask, dropout, intermediates, cache=cache, num_queries=num_queries)
        if places is not None:
            states = map(places.unpack, (output.last_hidden_state, *output.hidden_states))
            output, packing = EncoderOutput(next(states), hidden_states=tuple(states)), None
        if not self.add_pooling_layer:
            return output
        return output.replace(pooled_output=self.pool_rows(output.last_hidden_state, attention_mask, packing))

    def _find_global_tokens(
        self,
        input_ids: Int[Array, "B T"],
        attention_mask: PaddingMask | None,
        global_attention_mask: PaddingMask | None,
    ) -> GlobalTokens | None:
        """Returns the tokens with global attention; None for none."""
        separator = self.config.global_attention_sep_id
        if global_attention_mask is not None:
            if separator is None:
                raise ValueError("the model has no global attention: leave out global_attention_mask")
            return GlobalTokens.from_mask(global_attention_mask, attention_mask)
        if self.global_tokens is None or separator is None:
            return None
        return GlobalTokens.find(self.global_tokens, input_ids, separator, attention_mask)

    def _make_pooler(self) -> nn.Module:
        if self.config.pooler_type == "transform":
            return Transform(self.config, self.dtype)
        return hidden_dense(self.config, self.config.hidden_size, self.dtype, "pooler")

    def pool_rows(
        self,
        hidden_states: Float[Array, "B T D"],
        attention_mask: PaddingMask | None,
        packing: Packing | None = None,
        drop: Callable[[Array], Array] = lambda x: x,
    ) -> Float[Array, "B D"] | Float[Array, "B K D"]:
        """Returns the pooled output of rows, [B, D], or of the examples of packed rows, [B, K, D].

        Args:
            drop: dropout before the pooler.
        """
        if self.config.pooler_input == "each":
            return pooler_input(self.config, self.pool(drop(hidden_states)), attention_mask, packing)
        return self.pool(drop(pooler_input(self.config, hidden_states, attention_mask, packing)))

    def pool(self, hidden_states: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """Applies the pooler, [..., D] -> [..., D]."""
        if self.config.pooler_type == "norm":
            return standardize(hidden_states, self.config.layer_norm_eps)
        if self.config.pooler_type == "transform":
            return self.pooler(hidden_states)
        return ACTIVATIONS[self.config.pooler_act](self.pooler(hidden_states))

    def embedding_table(self) -> Float[Array, "V E"]:
        """Returns the word embeddings, [V, E], which the MLM head also uses."""
        return self.embeddings.word.embedding
