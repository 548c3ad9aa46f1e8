"""Biases of attention scores by the distance of two tokens (Raffel et al. 2020, section 2.1; Song et al. 2020).

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from bert.model.array_types import Array

FARTHEST = 128
"""The distance from which on all share a bucket."""


def buckets_by_distance(num_buckets: int) -> np.ndarray:
    """Buckets of the distances 0 to `FARTHEST` to one side, of ``num_buckets`` to both sides.

    Half of them hold a distance each, the others grow with the logarithm.
    """
    of_side = num_buckets // 2
    exact = of_side // 2
    distances = np.arange(FARTHEST + 1)
    # In float32 and in this order, as other implementations have it: some distances are at the edge of two buckets.
    logarithms = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    growing = exact + (logarithms / np.float32(math.log(FARTHEST / exact)) * (of_side - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(growing, of_side - 1)).astype(np.int32)


def relative_attention_bias(
    table: Float[Array, "buckets N"], distances: Int[Array, "#B T S"]
) -> Float[Array, "#B N T S"]:
    """The biases [B, N, T, S] of scores.

    Args:
        table: the bias of each bucket and head; the second half of the buckets is that of keys behind the query.
        distances: [B, T, S], of a query's position to that of a key before it; negative for one behind it.
    """
    num_buckets = table.shape[0]
    near = jnp.minimum(jnp.abs(distances), FARTHEST)
    buckets = jnp.asarray(buckets_by_distance(num_buckets))[near] + jnp.where(distances < 0, num_buckets // 2, 0)
    return jnp.transpose(table[buckets], (0, 3, 1, 2))
