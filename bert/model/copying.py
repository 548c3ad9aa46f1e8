"""Copying of source tokens into a target: the pointer-generator (See et al. 2017, section 2.2).

Shapes as in `bert.model.decoders`. Source and target have one vocabulary, so the copied tokens need no further entries.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.attention import Memory
from bert.model.linear import hidden_dense


class Copying(struct.PyTreeNode):
    """The decision to copy, and the distribution over the source, at each position of a target.

    Attributes:
        generate: [B, T] float32, log-probability p_gen of a token of the vocabulary instead of a copy.
        copy: [B, T, S] float32, log-probability of a copy of each source token; ``exp(generate)`` and the sum of
            ``exp(copy)`` are 1 together.
        source_ids: [B, S].
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    generate: Array
    copy: Array
    source_ids: Array

    def mix(self, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """Returns the log-probabilities of p_gen softmax(logits) + copies (See et al. 2017, equation 9), in float32.

        A sum of probabilities a + b is log a + softplus(log b - log a), which neither overflows nor underflows. The
        array over the vocabulary changes only at the tokens of the source.
        """
        rows, length, size = self.copy.shape
        generated = self.generate[..., None] + jax.nn.log_softmax(logits, axis=-1)
        row, step, position = jnp.arange(rows)[:, None, None], jnp.arange(length)[:, None], jnp.arange(size)
        ids = jnp.broadcast_to(self.source_ids[:, None], (rows, length, size))
        # All copies of a token are summed at its first position in the source.
        first_of_token = jnp.full((rows, logits.shape[-1]), size).at[row[:, 0], self.source_ids].min(position)  # [B, V]
        first = first_of_token[row[:, 0], self.source_ids][:, None]  # [B, 1, S]
        copied = jnp.zeros_like(self.copy).at[row, step, first].add(jnp.exp(self.copy))
        log_copied = jnp.log(jnp.maximum(copied, jnp.finfo(jnp.float32).tiny))
        growth = jax.nn.softplus(log_copied - jnp.take_along_axis(generated, ids, axis=-1))
        return generated.at[row, step, ids].add(jnp.where(first == position, growth, 0))


class CopyAttention(nn.Module):
    """Attention of the target to the source with a single head, whose weights are the probabilities of the copies.

    Cross-attention has other weights, because fused kernels and scanned layers do not return them. A single head needs
    no projection of the keys, because the projection of the queries includes it, and no cache besides the memory.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, states: Float[Array, "B T D"], memory: Memory) -> Copying:
        """Computes p_gen from the decoder's states and their context, and the distribution over the source.

        Args:
            states: the decoder's last hidden states.
            memory: the source with its token ids. It may have fewer rows than the states: each then serves several
                consecutive rows, such as all hypotheses of one source.
        """
        rows, length, width = states.shape
        ids, source = require(memory.token_ids, "the token ids of the source"), memory.hidden_states
        query = hidden_dense(self.config, width, self.dtype, "query")(states).reshape(source.shape[0], -1, width)
        scores = jnp.einsum("BTD,BSD->BTS", query * jnp.asarray(width**-0.5, query.dtype), source).astype(jnp.float32)
        visible = memory.mask.booleans(query.shape[1], source.shape[1])
        if visible is not None:
            scores = jnp.where(visible[:, 0], scores, jnp.finfo(jnp.float32).min)
        attention = jax.nn.log_softmax(scores, axis=-1)
        context = jnp.einsum("BTS,BSD->BTD", jnp.exp(attention).astype(source.dtype), source)
        both = jnp.concatenate([states, context.reshape(states.shape).astype(states.dtype)], axis=-1)
        gate = hidden_dense(self.config, 1, self.dtype, "gate")(both)[..., 0].astype(jnp.float32)
        copy = jax.nn.log_sigmoid(-gate)[..., None] + attention.reshape(rows, length, -1)
        ids = ids if rows == ids.shape[0] else jnp.repeat(ids, rows // ids.shape[0], axis=0)
        return Copying(jax.nn.log_sigmoid(gate), copy, ids)
