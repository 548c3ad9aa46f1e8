"""The encoder with each set of pretraining heads: masked and permuted language modelling, and next sentence.

Shapes as in `bert.model.encoder`; P predicted tokens, and S = T + 2 P tokens of a permuted row.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.dropout import Dropout
from bert.model.encoder import Bert
from bert.model.layers import LayerExecution
from bert.model.linear import (
    ACTIVATIONS,
    dense,
    hidden_dense,
    layer_norm,
    soft_cap,
    tied_logits,
    truncated_normal_init,
)
from bert.model.mask import Mask, Packing
from bert.model.reductions import at_positions
from bert.parallel.sharding import constrain_activation


class MaskedLMHead(nn.Module):
    """Transform with LayerNorm, and a decoder with a bias whose matrix is the word embeddings.

    The transform and the bias are optional. The decoder may also have a separate matrix.

    Attributes:
        pad_vocab_to_multiple_of: multiple to which the logits are padded with the lowest float, because
            products of even width are faster on GPUs. The parameters are not padded.
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
        """[B, P, D] hidden states, [V, E] embeddings -> [B, P, padded V] float32 logits."""
        return self.decode(self.decoder_input(hidden_states), word_embedding)

    def decoder_input(self, hidden_states: Float[Array, "B P D"]) -> Float[Array, "B P E"]:
        """Returns the inputs of the decoder matrix, [B, P, D] -> [B, P, E]."""
        if not self.config.prediction_transform:
            return hidden_states
        return self.norm(ACTIVATIONS[self.config.hidden_act](self.transform(hidden_states)))

    def lexical_weights(
        self, hidden_states: Float[Array, "B T D"], word_embedding: Float[Array, "V E"], attention_mask: PaddingMask
    ) -> Float[Array, "B V"]:
        """Computes the maximum over the tokens of log(1 + relu(logit)), [B, T, D] -> [B, V] (Formal et al. 2021).

        The logits [B, T, V] are computed again for the gradients, so that no more than one array of them is in memory.
        """

        @jax.checkpoint
        def pooled(x: Array, decoder: Array, bias: Array) -> Array:
            logits = tied_logits(x, decoder, bias, jnp.dtype(self.dtype))
            # All functions are increasing, so that they are applied to the maximum.
            largest = jnp.max(jnp.where(attention_mask[:, :, None] > 0, logits, 0.0), axis=1, initial=0.0)
            return jnp.log1p(soft_cap(largest, self.config.prediction_softcap))

        bias = self.bias if self.config.prediction_bias else jnp.zeros(len(word_embedding))
        decoder = word_embedding if self.config.tie_word_embeddings else self.decoder
        return pooled(self.decoder_input(hidden_states), decoder, bias)

    def decode(self, x: Float[Array, "B P E"], word_embedding: Float[Array, "V E"]) -> Float[Array, "B P padded_V"]:
        """Computes float32 logits from `decoder_input`, [B, P, E] -> [B, P, padded V]."""
        logits = tied_logits(x, *self.decoder_weights(word_embedding), jnp.dtype(self.dtype))
        return constrain_activation(soft_cap(logits, self.config.prediction_softcap), None, "tensor")

    def decoder_weights(
        self, word_embedding: Float[Array, "V E"]
    ) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """Returns the decoder's matrix [padded V, E] and bias [padded V]."""
        bias = self.bias if self.config.prediction_bias else jnp.zeros(len(word_embedding))
        decoder = word_embedding if self.config.tie_word_embeddings else self.decoder
        if extra := -len(bias) % self.pad_vocab_to_multiple_of:
            decoder = jnp.pad(decoder, ((0, extra), (0, 0)))
            bias = jnp.pad(bias, (0, extra), constant_values=jnp.finfo(jnp.float32).min)
        return decoder, bias


class PretrainingOutput(struct.PyTreeNode):
    """Logits of the two pretraining heads.

    Attributes:
        prediction_logits: [B, P, V].
        seq_relationship_logits: [B, 2], or [B, K, 2] for packed rows.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    prediction_logits: Array
    seq_relationship_logits: Array


class PretrainingModel(nn.Module):
    """Base class of encoders with pretraining heads."""

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()


class BertForPreTraining(PretrainingModel):
    """Encoder with the MLM head, and the head for next sentence (Devlin et al. 2018, section 3.1) or sentence order."""

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
        """Computes logits at ``masked_lm_positions`` [B, P]; at every position if None (P is T)."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, packing=packing, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return PretrainingOutput(
            self.predictions(hidden, self.bert.embedding_table()),
            self.seq_relationship(require(encoded.pooled_output, "the pooled output")).astype(jnp.float32),
        )


class LanguageModel(PretrainingModel):
    """Base class of language models: an encoder without pooler, and the MLM head."""

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)


class BertForMaskedLM(LanguageModel):
    """Encoder without pooler, and the MLM head, for pretraining without NSP (Liu et al. 2019, section 4.2)."""

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
        """Computes float32 logits [B, P, V] at ``masked_lm_positions`` [B, P]; at every position if None (P is T)."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, packing=packing, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return self.predictions(hidden, self.bert.embedding_table())


class BertForNextSentencePrediction(PretrainingModel):
    """Encoder with the NSP head."""

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
        """[B, T] -> [B, 2] float32 logits: index 0 for a consecutive second segment, 1 for a random one."""
        pooled = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout).pooled_output
        return self.seq_relationship(require(pooled, "the pooled output")).astype(jnp.float32)


def _at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"] | None) -> Float[Array, "B P D"]:
    """Selects positions; returns all of them if None."""
    return hidden_states if positions is None else at_positions(hidden_states, positions)


class PermutedTokens(struct.PyTreeNode):
    """The predicted tokens of a batch in prediction order, [B, P] each.

    Made by `bert.data.pretraining.masking.PermutedMasking`.

    Attributes:
        positions: positions in the rows.
        query_ids: [MASK] for each prediction, the input of the layers at its position.
        weights: 1 for a prediction, 0 for an unused entry.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    positions: Array
    query_ids: Array
    weights: Array


class BertForPermutedLM(LanguageModel):
    """Predicts tokens in a random order, each given the earlier ones, with the parameters of `BertForMaskedLM`.

    Predicted tokens become inputs of later predictions (Yang et al. 2019), and every prediction attends to one token at
    each position of the row (Song et al. 2020). The layers read S = T + 2 P tokens:

    - the row;
    - a [MASK] at each predicted position, for tokens that must not attend to the original yet;
    - a query at each predicted position, whose output is decoded.

    The two streams of the papers thus become one pass with one mask.

    With relative positions of Transformer-XL, the model is XLNet: the layers read no [MASK], all queries have one
    learned embedding, and S = T + P.
    """

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
        """Computes float32 logits [B, P, V] of the predicted tokens, each given the earlier ones.

        During initialization ``permuted`` is None, and one token of each row is predicted.
        """
        if permuted is None:
            first = jnp.zeros_like(input_ids[:, :1])
            permuted = PermutedTokens(first, first, first.astype(jnp.float32))
        rows, length = input_ids.shape
        with_masks = not self.config.has_query_embedding
        mask = permutation_mask(permuted, rows, length, attention_mask, packing, with_masks)
        num_queries = permuted.positions.shape[1]
        in_row = jnp.broadcast_to(jnp.arange(length), (rows, length))
        positions = in_row if packing is None else packing.position_ids

        def gather(x: Int[Array, "B T"]) -> Int[Array, "B S"]:
            return jnp.take_along_axis(x, jnp.asarray(mask.positions), axis=1)

        encoded = self.bert(
            jnp.concatenate([input_ids, *[permuted.query_ids] * (1 + with_masks)], axis=1),
            None if token_type_ids is None else gather(token_type_ids),
            position_ids=self.config.position_offset + gather(positions),
            mask=mask,
            dropout=dropout,
            num_queries=0 if with_masks else num_queries,
        )
        return self.predictions(encoded.last_hidden_state[:, -num_queries:], self.bert.embedding_table())


def permutation_mask(
    permuted: PermutedTokens,
    rows: int,
    length: int,
    attention_mask: PaddingMask | None = None,
    packing: Packing | None = None,
    with_masks: bool = True,
) -> Mask:
    """Returns the mask over S tokens: the row, a [MASK] for each predicted token, and the queries.

    A predicted token attends to itself and to the tokens predicted before it. Its query attends only to the tokens
    predicted before it. Other predicted tokens are replaced by their [MASK]. Nothing attends to a query.

    ``rows`` is B and ``length`` is T. Without ``with_masks``, no [MASK] is added.
    """
    rank = jnp.arange(1, permuted.positions.shape[1] + 1)  # predicted tokens count from 1; 0 is never predicted
    ranks = jnp.broadcast_to(rank, permuted.positions.shape)
    used = permuted.weights > 0
    positions = jnp.where(used, permuted.positions, length)  # an index beyond the row is dropped
    ranks_in_row = jnp.zeros((rows, length), jnp.int32)
    ranks_in_row = ranks_in_row.at[jnp.arange(rows)[:, None], positions].set(ranks, mode="drop")
    ranks_of_masks = [jnp.zeros_like(ranks)] * with_masks
    last_visible = jnp.concatenate([ranks_in_row, *ranks_of_masks, ranks - 1], axis=1)[:, :, None]
    content = ranks_in_row[:, None, :] <= last_visible
    if attention_mask is not None:
        content &= attention_mask[:, None, :] > 0
    masks = (rank > last_visible) & used[:, None, :]
    pairs = jnp.concatenate([content, *[masks] * with_masks, jnp.zeros_like(masks)], axis=2)[:, None]
    in_row = jnp.broadcast_to(jnp.arange(length), (rows, length))
    positions = jnp.concatenate([in_row, *[permuted.positions] * (1 + with_masks)], axis=1)
    examples = None if packing is None else jnp.take_along_axis(packing.example_ids, positions, axis=1)
    return Mask(pairs=pairs, examples=examples, positions=positions)
