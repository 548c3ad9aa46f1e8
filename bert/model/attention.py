"""Scaled dot-product attention, reference and fused. Shapes as in `bert.model.encoder`."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.mask import Mask


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
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
        bias: added to the scores; broadcasts to [B, N, T, S].
        dropout: source of dropout on the weights; None for none.
        dropout_rate: its rate.

    Returns:
        The values mixed, [B, T, N, H], and the weights before dropout, [B, N, T, S] float32.
    """
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTNH,BSNH->BNTS", query * jnp.asarray(scale, query.dtype), key).astype(jnp.float32)
    weights = _softmax(scores, mask, bias)
    dropped = weights.astype(value.dtype)
    if dropout is not None:
        dropped = dropout(dropped, dropout_rate, "attention_probs")
    return jnp.einsum("BNTS,BSNH->BTNH", dropped, value), weights


def cached_attention(
    query: Float[Array, "B T N H"],
    keys: Float[Array, "R H S"],
    values: Float[Array, "R S H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """`dot_product_attention` over keys and values that are kept between calls, without dropout.

    Args:
        query: [B, T, N, H].
        keys: [R, H, S], as `bert.model.cache.KeysValues` has them, R = B * N.
        values: [R, S, H].
        mask, bias: as of `dot_product_attention`.
    """
    rows, length, heads, size = query.shape
    by_head = jnp.swapaxes(query * jnp.asarray(size**-0.5, query.dtype), 1, 2).reshape(-1, length, size)
    scores = jnp.einsum("RTH,RHS->RTS", by_head, keys).astype(jnp.float32).reshape(rows, heads, length, -1)
    weights = _softmax(scores, mask, bias)
    mixed = jnp.einsum("RTS,RSH->RTH", weights.astype(values.dtype).reshape(rows * heads, length, -1), values)
    return jnp.swapaxes(mixed.reshape(rows, heads, length, size), 1, 2), weights


def _softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "#B #N #T #S"] | None,
    bias: Float[Array, "#B #N #T #S"] | None,
) -> Float[Array, "B N T S"]:
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def fused_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Mask,
    implementation: str,
) -> Float[Array, "B T N H"]:
    """`dot_product_attention` without its weights and without dropout, as one kernel where there is one.

    Args:
        query: [B, T, N, H].
        key: [B, S, N, H].
        value: [B, S, N, H].
        mask: which keys a query attends to. The result of a query that may look nowhere is finite, and its values
            depend on the implementation.
        implementation: "cudnn", on GPUs and in bfloat16; "splash", on TPUs and for self-attention alone; or their twin
            "xla", which also takes the masks that the kernels cannot do.

    Returns:
        [B, T, N, H].
    """
    if implementation == "splash":
        from bert.model.splash import splash_attention, takes_mask  # imports Pallas, which nothing else needs

        if takes_mask(mask, query.shape[1], key.shape[1]):
            return splash_attention(query, key, value, mask)
        implementation = "xla"
    arguments = mask.kernel_arguments(query.shape[1], key.shape[1])
    is_odd = query.shape[1] % 2 or key.shape[1] % 2
    if implementation == "cudnn" and is_odd and (mask.bias is not None or "mask" in arguments):
        implementation = "xla"  # cuDNN's backward pass takes these only for an even number of positions
    bias = None if mask.bias is None else mask.bias.astype(query.dtype)  # cuDNN's kernel takes one type
    return jax.nn.dot_product_attention(query, key, value, bias, implementation=cast(Any, implementation), **arguments)
