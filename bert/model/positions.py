"""Positions that attention reads: rotary, relative and disentangled ones; and sinusoids. Shapes as in
`bert.model.encoder`; P buckets."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.dropout import Dropout


class Rotation(struct.PyTreeNode):
    """The angles of T positions. Feature i of a head is turned together with feature i + H / 2.

    Attributes:
        cos, sin: [#B, T, H / 2] float32, of position times base^(-2 i / H).
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    cos: Array
    sin: Array

    @classmethod
    def of_positions(cls, positions: Int[Array, "#B T"], head_size: int, base: float) -> Rotation:
        """Of positions [B, T]."""
        # NumPy's, so that every device has the same.
        frequencies = 1 / np.float32(base) ** (np.arange(0, head_size, 2, dtype=np.float32) / head_size)
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return cls(jnp.cos(angles), jnp.sin(angles))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Turns queries or keys; in float32, as the angles are."""
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


FARTHEST = 128
"""The distance from which on all share a bucket."""


def relative_buckets(num_buckets: int) -> np.ndarray:
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
    buckets = jnp.asarray(relative_buckets(num_buckets))[near] + jnp.where(distances < 0, num_buckets // 2, 0)
    return jnp.transpose(table[buckets], (0, 3, 1, 2))


PARTS = 3
"""Products that a score is the sum of, so that it is divided by the root of 3 H (section 3.1)."""


def disentangled_buckets(num_buckets: int, max_positions: int) -> np.ndarray:
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
        table = jnp.asarray(disentangled_buckets(len(embeddings), max_positions))
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


Positions = Rotation | Disentangled
"""Positions that self-attention itself reads."""


def sinusoids(shape: tuple[int, ...], deviation: float) -> jax.Array:
    """[positions, features] float32: sines and cosines by turns, of wavelengths from 2 pi to 10,000 * 2 pi."""
    positions, features = shape
    frequencies = 10_000.0 ** (-2 * (jnp.arange(features) // 2) / features)
    angles = jnp.arange(positions)[:, None] * frequencies
    waves = jnp.where(jnp.arange(features) % 2 == 0, jnp.sin(angles), jnp.cos(angles))
    return jnp.sqrt(2.0) * deviation * waves


def step_embeddings(config: ModelConfig) -> jax.Array:
    """[layers, D]: sinusoids of amplitude 1 for each layer's number (Dehghani et al. 2018, section 2.1)."""
    return sinusoids((config.num_hidden_layers, config.hidden_size), 2**-0.5)


def sinusoidal_position_table(config: ModelConfig) -> jax.Array:
    """[rows of a position table, E]: sinusoids of norm 1; with ``scale_embeddings`` of amplitude 1.

    As Vaswani et al. 2017 have them next to words of deviation 1, both divided by the root of E unless the words are
    multiplied by it; a function of sizes alone, so that how weights start does not change what a model computes.
    """
    rows = config.position_offset + config.max_position_embeddings
    deviation = 2**-0.5 if config.scale_embeddings else config.embedding_width**-0.5
    return sinusoids((rows, config.embedding_width), deviation)
