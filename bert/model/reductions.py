"""Reductions of hidden states inside a model: the input of the pooler, selected tokens, and means of tokens or windows.

Shapes as in `bert.model.encoder`. `bert.model.pooling` computes embeddings of texts outside of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array, PaddingMask
from bert.model.dropout import Dropout
from bert.model.mask import Packing


def pooler_input(
    config: ModelConfig,
    hidden_states: Float[Array, "B T D"],
    attention_mask: PaddingMask | None,
    packing: Packing | None = None,
) -> Float[Array, "B D"] | Float[Array, "B K D"]:
    """Returns the pooler's input, [B, D], or [B, K, D] for packed rows: the first or last token, or their mean."""
    if config.pooler_input == "first":
        return hidden_states[:, 0] if packing is None else at_positions(hidden_states, packing.cls_positions)
    if config.pooler_input == "last":
        if packing is None:
            return last_token(hidden_states, attention_mask)
        return at_positions(hidden_states, _last_positions(packing))
    if packing is not None:
        numbers = 1 + jnp.arange(packing.cls_positions.shape[1])
        return mean_over(hidden_states, packing.example_ids[:, None, :] == numbers[:, None])
    mask = jnp.ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
    return mean_over(hidden_states, mask[:, None, :])[:, 0]


def standardize(x: Float[Array, "*places D"], epsilon: float) -> Float[Array, "*places D"]:
    """Scales each vector to mean 0 and variance 1, as LayerNorm without parameters; statistics in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


def at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    """Selects the hidden states [B, T, D] at positions [B, P]."""
    return jnp.take_along_axis(hidden_states, positions[:, :, None], axis=1)


def last_token(hidden_states: Float[Array, "B T D"], attention_mask: PaddingMask | None) -> Float[Array, "B D"]:
    """Selects the last token of each right-padded row, [B, T, D] -> [B, D]."""
    if attention_mask is None:
        return hidden_states[:, -1]
    last = jnp.maximum(jnp.sum(attention_mask, axis=1, dtype=jnp.int32) - 1, 0)
    return at_positions(hidden_states, last[:, None])[:, 0]


def _last_positions(packing: Packing) -> Int[Array, "B K"]:
    """Returns the index of each example's last token; 0 for an unused place."""
    numbers = 1 + jnp.arange(packing.cls_positions.shape[1])
    columns = jnp.arange(packing.example_ids.shape[1])
    return jnp.max(jnp.where(packing.example_ids[:, None, :] == numbers[:, None], columns, 0), axis=-1)


def mean_over(
    hidden_states: Float[Array, "B T D"], tokens: Num[Array, "B K T"] | Bool[Array, "B K T"]
) -> Float[Array, "B K D"]:
    """Averages [B, T, D] over K sets of tokens [B, K, T] in float32, giving [B, K, D]; 0 for empty sets."""
    weights = tokens.astype(jnp.float32)
    sums = jnp.einsum("BKT,BTD->BKD", weights, hidden_states.astype(jnp.float32))
    return (sums / jnp.maximum(weights.sum(-1, keepdims=True), 1)).astype(hidden_states.dtype)


MASKED_IN_TRAINING = 0.15 * 0.8
"""Share of mask tokens when ESM-2 was trained."""


def token_dropout_factors(
    is_mask: Bool[Array, "B T"], attention_mask: PaddingMask | None, packing: Packing | None = None
) -> Float[Array, "B #T 1"]:
    """Returns factors of word embeddings with token dropout, [B, T, 1]: 0 for mask tokens.

    Other tokens of a row, or of an example of a packed row, have a factor that makes up for the share of mask tokens
    (Lin et al. 2023; EsmEmbeddings in transformers, modeling_esm.py).
    """
    if packing is not None:
        members = packing.example_ids[:, :, None] == packing.example_ids[:, None, :]
    else:
        members = (jnp.ones(is_mask.shape) if attention_mask is None else attention_mask)[:, None]
    shares = mean_over(is_mask[..., None].astype(jnp.float32), members)[..., 0]
    factors = (1 - MASKED_IN_TRAINING) / jnp.maximum(1 - shares, 1 / is_mask.shape[1])
    return jnp.where(is_mask, 0.0, factors)[..., None]


def normalized(vectors: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
    """Returns vectors scaled to length 1; zero vectors stay zero and have a zero gradient."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def pool(hidden_states: Float[Array, "B T D"], attention_mask: PaddingMask, mode: str) -> Float[Array, "B D"]:
    """Pools [B, T, D] to [B, D]: mean of the tokens, first token (cls), last one (lasttoken), or maximum (max)."""
    mask = attention_mask[:, :, None] > 0
    if mode == "cls":
        return hidden_states[:, 0]
    if mode == "lasttoken":
        return last_token(hidden_states, attention_mask)
    if mode == "max":
        return jnp.max(jnp.where(mask, hidden_states, jnp.finfo(hidden_states.dtype).min), axis=1)
    return jnp.sum(jnp.where(mask, hidden_states, 0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def pool_windows(
    apply: Callable[..., Any],
    inputs: tuple[Int[Array, "B W T"], ...],
    window_mask: Int[Array, "B W"],
    dropout: Dropout | None,
    maximum: bool = False,
) -> Float[Array, "B L"]:
    """Returns the mean or maximum of a model's outputs over the windows of each text.

    Args:
        apply: (inputs [N, T], ..., dropout=...) -> outputs [N, L].
        window_mask: 1 for the windows of a text, and 0 for windows that only fill the array.
        dropout: the source for rows [B]; each window has its own dropout.
        maximum: return the maximum of each feature instead of the mean.
    """
    source = None if dropout is None else dropout.split_rows(window_mask.shape[-1])
    flat = apply(*(array.reshape(-1, array.shape[-1]) for array in inputs), dropout=source)
    return pool_outputs(flat.reshape(*window_mask.shape, -1), window_mask, maximum)


def pool_outputs(
    outputs: Float[Array, "*texts W L"], window_mask: Int[Array, "*texts W"], maximum: bool, normalize: bool = False
) -> Float[Array, "*texts L"]:
    """Returns the mean or maximum of the outputs of each text's windows.

    Args:
        window_mask, maximum: see `pool_windows`.
        normalize: scale the outputs of texts with several windows to length 1 first.
    """
    weights = window_mask[..., None].astype(outputs.dtype)
    counts = jnp.sum(weights, axis=-2, keepdims=True)
    if normalize:
        squares = jnp.sum(jnp.square(outputs), axis=-1, keepdims=True)
        outputs = jnp.where(counts > 1, outputs * jax.lax.rsqrt(jnp.maximum(squares, 1e-24)), outputs)
    if maximum:
        largest = jnp.max(outputs, axis=-2, where=weights > 0, initial=-jnp.inf)
        return jnp.where(counts[..., 0, :] > 0, largest, 0)
    return jnp.sum(outputs * weights, axis=-2) / jnp.maximum(counts, 1)[..., 0, :]
