"""Scaled dot-product attention, reference and fused, and the masks it takes. Shapes as in `bert.model.encoder`."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.model.array_types import Array
from bert.model.dropout import Dropout


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    dropout: Dropout | None = None,
    dropout_rate: float = 0.0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """softmax(Q K^T / sqrt(H)) V (Vaswani et al. 2017, section 3.2.1).

    Args:
        query: [B, T, N, H].
        key: [B, S, N, H].
        value: [B, S, N, H].
        mask: booleans that broadcast to [B, N, T, S]; true where a query may look at a key. A query that may look
            nowhere attends equally to all positions instead of giving NaN.
        dropout: source of dropout on the weights; None for none.
        dropout_rate: its rate.

    Returns:
        The values mixed, [B, T, N, H], and the weights before dropout, [B, N, T, S] float32.
    """
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTNH,BSNH->BNTS", query * jnp.asarray(scale, query.dtype), key).astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    dropped = weights.astype(value.dtype)
    if dropout is not None:
        dropped = dropout(dropped, dropout_rate, "attention_probs")
    return jnp.einsum("BNTS,BSNH->BTNH", dropped, value), weights


def padding_mask(attention_mask: Num[Array, "B S"] | Bool[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """[B, S] of 0 and 1 -> [B, 1, 1, S] booleans for `dot_product_attention`."""
    return attention_mask[:, None, None, :].astype(bool)


def same_example_mask(example_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """[B, T] -> [B, 1, T, T] booleans: a token attends to those of its example, padding to padding."""
    return (example_ids[:, :, None] == example_ids[:, None, :])[:, None]


def causal_mask(length: int) -> Bool[Array, "1 1 {length} {length}"]:
    """[1, 1, T, T] booleans: position t looks at positions up to t."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def fused_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    lengths: Int[Array, "B"] | None,
    implementation: str,
) -> Float[Array, "B T N H"]:
    """`dot_product_attention` without its weights and without dropout, as one kernel where there is one.

    Args:
        query: [B, T, N, H].
        key: [B, S, N, H].
        value: [B, S, N, H].
        lengths: [B], how many keys a row has, the others being padding behind them; None for S.
        implementation: "cudnn", on GPUs and in bfloat16, or its twin "xla".

    Returns:
        [B, T, N, H].
    """
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, implementation=cast(Any, implementation)
    )


def key_lengths(attention_mask: Num[Array, "B S"] | Bool[Array, "B S"]) -> Int[Array, "B"]:
    """[B, S] of 1 and then 0 -> [B] lengths for `fused_attention`; at least 1, for rows that only fill a batch."""
    return jnp.maximum(jnp.sum(attention_mask, axis=-1, dtype=jnp.int32), 1)
