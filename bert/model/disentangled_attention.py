"""Disentangled attention (He et al. 2021): content and distance have vectors of their own, and scores are the products
of content with content, content with distance and distance with content.

Distances are those of DeBERTa-v2 and v3, in buckets, and the projections of content are those of distances as well.
Shapes as in `bert.model.encoder`; P buckets.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from bert.model.array_types import Array
from bert.model.dropout import Dropout

PARTS = 3
"""Products that a score is the sum of, so that it is divided by the root of 3 H (section 3.1)."""


def buckets_by_distance(num_buckets: int, max_positions: int) -> np.ndarray:
    """Buckets of the distances 0 to ``max_positions`` - 1 to one side, of ``num_buckets`` to both sides.

    Half of them hold a distance each, the others grow with the logarithm; the last is that of the longest distance.
    """
    of_side = num_buckets // 2
    exact = of_side // 2
    distances = np.arange(max_positions)
    # In float32 and in this order, as other implementations have it: some distances are at the edge of two buckets.
    logarithms = np.log(np.maximum(distances, exact).astype(np.float32) / np.float32(exact))
    longest = np.log(np.float32(max(max_positions - 1, exact + 1) / exact))
    growing = exact + np.ceil(logarithms / longest * np.float32(exact - 1)).astype(np.int32)
    return np.where(distances <= exact, distances, growing).astype(np.int32)


class Disentangled(struct.PyTreeNode):
    """The distances of queries and keys.

    Attributes:
        embeddings: [P, D], the vector of each bucket, which all layers share.
        buckets: [#B, T, S], the bucket of each query's distance to each key.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    embeddings: Array
    buckets: Array

    @classmethod
    def of_distances(
        cls, embeddings: Float[Array, "P D"], distances: Int[Array, "#B T S"], max_positions: int
    ) -> Disentangled:
        """Of distances [B, T, S], from each key to a query behind it; negative for a key behind the query."""
        middle = len(embeddings) // 2
        table = jnp.asarray(buckets_by_distance(len(embeddings), max_positions))
        near = jnp.minimum(jnp.abs(distances), max_positions - 1)
        return cls(embeddings, middle + jnp.sign(distances) * table[near])

    def dropped(self, dropout: Dropout | None, rate: float) -> Float[Array, "P D"]:
        """The vectors as a layer reads them: with dropout in training, the same for all rows."""
        if dropout is None:
            return self.embeddings
        one_row = dropout.replace(rows=jnp.zeros_like(dropout.rows[:1]))
        return one_row(self.embeddings[None], rate, "relative_attention")[0]

    def scores(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        distance_query: Float[Array, "P N H"],
        distance_key: Float[Array, "P N H"],
    ) -> Float[Array, "B N T S"]:
        """Content with distance plus distance with content, as float32.

        Args:
            query, key: of the content, [B, T, N, H] and [B, S, N, H].
            distance_query, distance_key: of the buckets, [P, N, H], by the same projections.
        """
        index = self.buckets[:, None]
        scale = jnp.asarray((PARTS * query.shape[-1]) ** -0.5, query.dtype)
        by_query = jnp.einsum("BTNH,PNH->BNTP", query * scale, distance_key)
        by_key = jnp.einsum("BSNH,PNH->BNSP", key * scale, distance_query)
        of_query = jnp.take_along_axis(by_query, index, axis=-1)
        of_key = jnp.take_along_axis(by_key, jnp.swapaxes(index, -1, -2), axis=-1)
        return of_query.astype(jnp.float32) + jnp.swapaxes(of_key, -1, -2).astype(jnp.float32)
