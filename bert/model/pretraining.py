"""The encoder with each set of pretraining heads: masked and permuted language modelling, next sentence.

Shapes as in `bert.model.encoder`; P predicted tokens, S = T + 2 P tokens of a permuted row.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Packing
from bert.model.execution import LayerExecution
from bert.model.layers import ACTIVATIONS, dense, hidden_dense, layer_norm, truncated_normal_init
from bert.model.linear import tied_logits
from bert.model.mask import Mask
from bert.model.pooling import at_positions
from bert.parallel.sharding import constrain_activation


class MaskedLMHead(nn.Module):
    """Transform and LayerNorm, and a decoder with its own bias, tied to the word embeddings; the config can leave
    transform and bias out, and untie the decoder.

    Attributes:
        pad_vocab_to_multiple_of: pads the logits, with the lowest float, since products of an even width are
            faster on GPUs. The parameters are not padded.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    pad_vocab_to_multiple_of: int = 1

    def setup(self) -> None:
        config = self.config
        if config.prediction_transform:
            self.transform = hidden_dense(config, config.embedding_width, self.dtype, "transform")
            self.norm = layer_norm(config, self.dtype, "norm")
        shape = (config.known_vocab_size, config.embedding_width)
        if config.prediction_bias:
            self.bias = self.param("bias", nn.initializers.zeros, shape[:1], jnp.float32)
        if not config.tie_word_embeddings:
            self.decoder = self.param("decoder", truncated_normal_init(config), shape, jnp.float32)

    def __call__(
        self, hidden_states: Float[Array, "B P D"], word_embedding: Float[Array, "V E"]
    ) -> Float[Array, "B P padded_V"]:
        """[B, P, D] hidden states, [V, E] embedding -> [B, P, V] float32 logits, V as padded."""
        return self.decode(self.decoder_input(hidden_states), word_embedding)

    def decoder_input(self, hidden_states: Float[Array, "B P D"]) -> Float[Array, "B P E"]:
        """[B, P, D] hidden states -> [B, P, E], which the decoder multiplies by its matrix."""
        if not self.config.prediction_transform:
            return hidden_states
        return self.norm(ACTIVATIONS[self.config.hidden_act](self.transform(hidden_states)))

    def decode(self, x: Float[Array, "B P E"], word_embedding: Float[Array, "V E"]) -> Float[Array, "B P padded_V"]:
        """[B, P, E] of `decoder_input` -> [B, P, V] float32 logits."""
        logits = tied_logits(x, *self.decoder_weights(word_embedding), jnp.dtype(self.dtype))
        return constrain_activation(logits, None, "tensor")

    def decoder_weights(
        self, word_embedding: Float[Array, "V E"]
    ) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """[V, E] embedding -> the decoder's matrix and bias, V as padded."""
        bias = self.bias if self.config.prediction_bias else jnp.zeros(len(word_embedding))
        decoder = word_embedding if self.config.tie_word_embeddings else self.decoder
        if extra := -len(bias) % self.pad_vocab_to_multiple_of:
            decoder = jnp.pad(decoder, ((0, extra), (0, 0)))
            bias = jnp.pad(bias, (0, extra), constant_values=jnp.finfo(jnp.float32).min)
        return decoder, bias


class PretrainingOutput(struct.PyTreeNode):
    """Logits of the two pretraining heads: ``prediction_logits`` [B, P, V], ``seq_relationship_logits`` [B, 2], or
    [B, K, 2] where rows are packed."""

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    prediction_logits: Array
    seq_relationship_logits: Array


class BertForPreTraining(nn.Module):
    """Encoder with the MLM head and that of NSP (Devlin et al. 2018, section 3.1) or sentence order."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, execution=self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)
        self.seq_relationship = dense(self.config, 2, self.dtype, "seq_relationship")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        masked_lm_positions: Int[Array, "B P"] | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> PretrainingOutput:
        """Decodes the ``masked_lm_positions`` [B, P] only; every position if None (then P is T)."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, packing=packing, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return PretrainingOutput(
            self.predictions(hidden, self.bert.embedding_table()),
            self.seq_relationship(require(encoded.pooled_output, "the pooled output")).astype(jnp.float32),
        )


class BertForMaskedLM(nn.Module):
    """Encoder without pooler, and the MLM head: for objectives without a label too (Liu et al. 2019, section 4.2)."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        masked_lm_positions: Int[Array, "B P"] | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B P V"]:
        """[B, T] -> [B, P, V] float32 logits at ``masked_lm_positions`` [B, P]; at every position if None (P is T)."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, packing=packing, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return self.predictions(hidden, self.bert.embedding_table())


class BertForNextSentencePrediction(nn.Module):
    """Encoder with the NSP head."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, execution=self.execution)
        self.seq_relationship = dense(self.config, 2, self.dtype, "seq_relationship")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B 2"]:
        """[B, T] -> [B, 2] float32 logits: segment B follows A, or is random."""
        pooled = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout).pooled_output
        return self.seq_relationship(require(pooled, "the pooled output")).astype(jnp.float32)


def _at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"] | None) -> Float[Array, "B P D"]:
    """[B, T, D] at [B, P] -> [B, P, D]; all of them where positions is None."""
    if positions is None:
        return hidden_states
    return at_positions(hidden_states, positions)


class PermutedTokens(struct.PyTreeNode):
    """The predicted tokens of a batch in the order of their prediction, [B, P] each
    (`bert.data.pretraining.masking.PermutedMasking`).

    Attributes:
        positions: their places in the rows.
        query_ids: [MASK] for each, which the layers read in its place.
        weights: 1 for a prediction, 0 for an unused place.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    positions: Array
    query_ids: Array
    weights: Array


class BertForPermutedLM(nn.Module):
    """`BertForMaskedLM`, with its parameters, that predicts the tokens of a row one after the other.

    The layers read S tokens: the T of the row as they are; [MASK] at the position of each predicted one, for those that
    must not see it yet; and a query there, whose output is decoded. Two streams of attention with the same parameters
    are so one pass under one mask. Every token attends to as many tokens as the row has, at all of its positions.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        permuted: PermutedTokens | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B P padded_V"]:
        """[B, T] -> [B, P, V] float32 logits of the predicted tokens, each given those before it in their order.

        ``permuted`` is None for a model that is only initialized: a token of each row is then predicted.
        """
        if permuted is None:
            first = jnp.zeros_like(input_ids[:, :1])
            permuted = PermutedTokens(first, first, first.astype(jnp.float32))
        rows, length = input_ids.shape
        mask = permutation_mask(permuted, rows, length, attention_mask, packing)
        places = jnp.broadcast_to(jnp.arange(length), (rows, length))
        positions = places if packing is None else packing.position_ids

        def at_places(x: Int[Array, "B T"]) -> Int[Array, "B S"]:
            return jnp.take_along_axis(x, jnp.asarray(mask.positions), axis=1)

        encoded = self.bert(
            jnp.concatenate([input_ids, permuted.query_ids, permuted.query_ids], axis=1),
            None if token_type_ids is None else at_places(token_type_ids),
            position_ids=self.config.position_offset + at_places(positions),
            mask=mask,
            dropout=dropout,
        )
        num_queries = permuted.positions.shape[1]
        return self.predictions(encoded.last_hidden_state[:, -num_queries:], self.bert.embedding_table())


def permutation_mask(
    permuted: PermutedTokens,
    rows: int,
    length: int,
    attention_mask: PaddingMask | None = None,
    packing: Packing | None = None,
) -> Mask:
    """The mask of S tokens: those of the row, [MASK] for each predicted one, and the queries.

    The token predicted as number r may be seen by those predicted after it and by itself; by its query, only those
    before it. Whoever does not see it sees [MASK] in its place, and nobody sees a query.

    Args:
        permuted: the predicted tokens.
        rows: B.
        length: T.
        attention_mask: [B, T], 1 for a token and 0 for padding; all 1 if None.
        packing: where the examples of packed rows lie.
    """
    number = jnp.arange(1, permuted.positions.shape[1] + 1)
    numbers = jnp.broadcast_to(number, permuted.positions.shape)
    used = permuted.weights > 0
    places = jnp.where(used, permuted.positions, length)  # beyond the row, where nothing is written
    ranks = jnp.zeros((rows, length), jnp.int32)
    ranks = ranks.at[jnp.arange(rows)[:, None], places].set(numbers, mode="drop")
    seen = jnp.concatenate([ranks, jnp.zeros_like(numbers), numbers - 1], axis=1)[:, :, None]
    content = ranks[:, None, :] <= seen
    if attention_mask is not None:
        content &= attention_mask[:, None, :] > 0
    masks = (number > seen) & used[:, None, :]
    pairs = jnp.concatenate([content, masks, jnp.zeros_like(masks)], axis=2)[:, None]
    in_row = jnp.broadcast_to(jnp.arange(length), (rows, length))
    positions = jnp.concatenate([in_row, permuted.positions, permuted.positions], axis=1)
    examples = None if packing is None else jnp.take_along_axis(packing.example_ids, positions, axis=1)
    return Mask(pairs=pairs, examples=examples, positions=positions)
