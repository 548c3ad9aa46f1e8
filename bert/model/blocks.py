"""Rows in blocks, for attention under a window: each block attends to itself and its neighbours (Beltagy et al. 2020,
section 3.1). Shapes as in `bert.model.encoder`; C blocks a row, of K positions each.

The blocks of all rows are rows of their own, so that any implementation of attention takes them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Shaped

from bert.model.array_types import Array


def split_queries(x: Shaped[Array, "B T *features"], block: int) -> Shaped[Array, "blocks K *features"]:
    """[B, T, ...] -> [B * C, K, ...]; the last block is filled up with zeros."""
    _, length, *features = x.shape
    padded = jnp.pad(x, [(0, 0), (0, -length % block), *((0, 0) for _ in features)])
    return padded.reshape(-1, block, *features)


def split_keys(x: Shaped[Array, "B T *features"], block: int, causal: bool) -> Shaped[Array, "blocks keys *features"]:
    """[B, T, ...] -> [B * C, 3 K, ...]: of each block the one before it, itself and the one behind it; causal
    [B * C, 2 K, ...], without the one behind. There are zeros where a row has no such block."""
    rows, length, *features = x.shape
    ends = (block, -length % block + (0 if causal else block))
    padded = jnp.pad(x, [(0, 0), ends, *((0, 0) for _ in features)])
    blocks = padded.reshape(rows, -1, block, *features)
    neighbours = 2 if causal else 3
    count = blocks.shape[1] - neighbours + 1
    parts = [blocks[:, first : first + count] for first in range(neighbours)]
    return jnp.concatenate(parts, axis=2).reshape(rows * count, neighbours * block, *features)
