"""Permuted language modelling: predicted tokens are read again by those predicted after them (Yang et al. 2019), and
every token knows how long the row is (Song et al. 2020).

Shapes as in `bert.model.encoder`; P predicted tokens, S = T + 2 P.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Packing
from bert.model.execution import LayerExecution
from bert.model.heads import MaskedLMHead, PaddingMask
from bert.model.layers import Dtype
from bert.model.mask import Mask


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
