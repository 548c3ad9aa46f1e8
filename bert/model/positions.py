"""Position information in attention: rotary, disentangled and relative; and sinusoids for position tables.

`attention_contexts` combines it with the mask into the input of each layer's self-attention. Shapes as in
`bert.model.encoder`; P distance buckets.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.dropout import Dropout
from bert.model.linear import layer_norm, truncated_normal_init
from bert.model.mask import BiasFromDistances, Length, Mask


class Rotation(struct.PyTreeNode):
    """Rotary positions (Su et al. 2021, section 3.4): queries and keys are rotated by angles proportional to position.

    The product of a rotated query and a rotated key depends only on their distance. Packed and left-padded rows
    therefore need no separate positions. Feature i of a head is rotated together with feature i + H / 2.

    Attributes:
        cos, sin: [#B, T, R / 2] float32, cosine and sine of position * base^(-2 i / R). The first R of the H features
            are rotated.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    cos: Array
    sin: Array

    @classmethod
    def from_positions(cls, positions: Int[Array, "#B T"], head_size: int, base: float) -> Rotation:
        """Makes the rotation for positions [B, T]."""
        return cls._from_angles(positions[..., None].astype(jnp.float32) * rotary_frequencies(head_size, base))

    @classmethod
    def from_config(cls, config: ModelConfig, local: bool, positions: Int[Array, "#B T"]) -> Rotation:
        """Makes the rotation of global or local layers for positions [B, T]."""
        own_base = config.local_rotary_base if local else None
        kind = config.rotary_scaling if own_base is None else "none"
        base, size, factor = own_base or config.rotary_base, config.rotated_size, config.rotary_scaling_factor
        if kind == "none":
            return cls.from_positions(positions, size, base)
        if kind == "ntk":
            return cls.from_positions(positions, size, base * factor ** (size / (size - 2)))
        frequencies = rotary_frequencies(size, base)
        scaled = frequencies / np.float32(factor)
        if kind == "linear":
            return cls._from_angles(positions[..., None].astype(jnp.float32) * scaled)
        length = config.rotary_original_length or config.max_position_embeddings / factor
        share = _yarn_shares(size, base, float(length))
        angles = positions[..., None].astype(jnp.float32) * (scaled * (1 - share) + frequencies * share)
        return cls._from_angles(angles, 1 + 0.1 * math.log(factor))

    @classmethod
    def _from_angles(cls, angles: Float[Array, "#B T half"], scale: float = 1.0) -> Rotation:
        waves = jnp.cos(angles), jnp.sin(angles)
        return cls(*(waves if scale == 1 else (wave * scale for wave in waves)))

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotates queries or keys. Computed in float32."""
        size = 2 * self.cos.shape[-1]
        if size < x.shape[-1]:
            return jnp.concatenate([self(x[..., :size]), x[..., size:]], axis=-1)
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def rotary_frequencies(size: int, base: float) -> np.ndarray:
    """Returns base^(-2 i / size), [size / 2] float32; in NumPy, so that the frequencies are equal on all devices."""
    frequencies: np.ndarray = 1 / np.float32(base) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    return frequencies


YARN_TURNS = 32, 1
"""Turns over the original length: rotations of more are not scaled, rotations of fewer are (Peng et al. 2023, 3.2)."""


def _yarn_shares(size: int, base: float, length: float) -> np.ndarray:
    """Returns the share of the original frequency in each rotation, [size / 2] float32, from 1 down to 0."""
    first, last = (size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in YARN_TURNS)
    first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - first) / (last - first if last > first else 1e-3)
    shares: np.ndarray = 1 - np.clip(ramp, 0, 1)
    return shares


def alibi_bias(heads: int, distances: Int[Array, "#B T S"]) -> Float[Array, "#B N T S"]:
    """Computes the linear bias of attention with a slope per head (Press et al. 2022), for both directions."""
    return -jnp.asarray(alibi_slopes(heads))[:, None, None] * jnp.abs(distances)[:, None].astype(jnp.float32)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slopes, [N] float32: 2^(-8 i / N), if N is a power of 2.

    Otherwise, the slopes for the next lower power of 2, and every other slope for twice that power, as in the code of
    the authors (github.com/ofirpress/attention_with_linear_biases, fairseq/models/transformer.py).
    """
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return np.array([*slopes, *between][:heads], np.float32)


MAX_RELATIVE_DISTANCE = 128
"""Distances from this value on share one bucket of relative attention."""


def relative_attention_bias(table: Float[Array, "P N"], distances: Int[Array, "#B T S"]) -> Float[Array, "#B N T S"]:
    """Computes the attention bias for each distance (Raffel et al. 2020, section 2.1; Song et al. 2020).

    Args:
        table: a bias for each bucket and head. The second half of the buckets is for keys after the query.
        distances: query position minus key position.
    """
    num_buckets = table.shape[0]
    buckets = jnp.asarray(buckets_by_distance(num_buckets, MAX_RELATIVE_DISTANCE))
    near = jnp.minimum(jnp.abs(distances), MAX_RELATIVE_DISTANCE)
    return jnp.transpose(table[buckets[near] + jnp.where(distances < 0, num_buckets // 2, 0)], (0, 3, 1, 2))


class Disentangled(struct.PyTreeNode):
    """Disentangled attention (He et al. 2021): content and distance have separate embeddings.

    A score is the sum of the products content-content, content-distance and distance-content, divided by the square
    root of H times the number of products (section 3.1).

    Attributes:
        embeddings: [P, D], one vector per bucket, shared by all layers.
        buckets: [#B, T, S], the bucket of the distance from each query to each key.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    embeddings: Array
    buckets: Array

    @classmethod
    def from_distances(
        cls, embeddings: Float[Array, "P D"], distances: Int[Array, "#B T S"], max_positions: int
    ) -> Disentangled:
        """Makes the positions for distances [B, T, S], query position minus key position, as in DeBERTa-v2 and v3."""
        middle = len(embeddings) // 2
        table = jnp.asarray(buckets_by_distance(len(embeddings), max_positions - 1, round_up=True))
        near = jnp.minimum(jnp.abs(distances), max_positions - 1)
        return cls(embeddings, middle + jnp.sign(distances) * table[near])

    @classmethod
    def from_linear_distances(cls, embeddings: Float[Array, "P D"], distances: Int[Array, "#B T S"]) -> Disentangled:
        """Makes the positions for distances [B, T, S], clipped at P / 2, as in DeBERTa version 1."""
        count = len(embeddings)
        return cls(embeddings, jnp.clip(distances + count // 2, 0, count - 1))

    def dropped(self, dropout: Dropout | None, rate: float) -> Float[Array, "P D"]:
        """Returns the embeddings with dropout. All rows share one dropout mask."""
        if dropout is None:
            return self.embeddings
        one_row = dropout.replace(rows=jnp.zeros_like(dropout.rows[:1]))
        return one_row(self.embeddings[None], rate, "relative_attention")[0]

    def scores(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        distance_query: Float[Array, "P N H"] | None,
        distance_key: Float[Array, "P N H"] | None,
        num_products: int,
    ) -> Float[Array, "B N T S"]:
        """Computes the sum of content-distance and distance-content, in float32.

        Args:
            query, key: projected content, [B, T, N, H] and [B, S, N, H].
            distance_query, distance_key: projected embeddings, [P, N, H]. None: the scores lack their product.
            num_products: number of products in a score, content-content included.
        """
        index = self.buckets[:, None]
        scale = jnp.asarray((num_products * query.shape[-1]) ** -0.5, query.dtype)
        scores = jnp.zeros((), jnp.float32)
        if distance_key is not None:
            by_query = jnp.einsum("BTNH,PNH->BNTP", query * scale, distance_key)
            scores += jnp.take_along_axis(by_query, index, axis=-1).astype(jnp.float32)
        if distance_query is not None:
            by_key = jnp.einsum("BSNH,PNH->BNSP", key * scale, distance_query)
            distance_content = jnp.take_along_axis(by_key, jnp.swapaxes(index, -1, -2), axis=-1)
            scores += jnp.swapaxes(distance_content, -1, -2).astype(jnp.float32)
        return scores


def buckets_by_distance(num_buckets: int, max_distance: int, round_up: bool = False) -> np.ndarray:
    """Returns the bucket of each distance from 0 to ``max_distance`` in one direction.

    Half of the buckets hold one distance each. The size of the others grows logarithmically with the distance.

    Args:
        num_buckets: number of buckets of both directions.
        max_distance: the largest distance.
        round_up: false for T5 and MPNet; true for DeBERTa, whose last bucket holds only the largest distance.
    """
    per_side = num_buckets // 2
    exact = per_side // 2
    distances = np.arange(max_distance + 1)
    # Float32 and the order of operations match the reference implementations: some distances lie on a bucket boundary.
    logarithms = np.log(np.maximum(distances, exact).astype(np.float32) / np.float32(exact))
    if round_up:
        log_range = np.log(np.float32(max(max_distance, exact + 1) / exact))
        growing = exact + np.ceil(logarithms / log_range * np.float32(exact - 1)).astype(np.int32)
    else:
        log_range = np.float32(math.log(max_distance / exact))
        growing = exact + (logarithms / log_range * (per_side - exact)).astype(np.int32)
        growing = np.minimum(growing, per_side - 1)
    return np.where(distances < exact, distances, growing).astype(np.int32)


class RelativeSinusoids(struct.PyTreeNode):
    """Relative positions of Transformer-XL (Dai et al. 2019, section 3.3), and relative segments of XLNet.

    In addition to the product of query and key, a score has a product of the query with the projected sinusoids of the
    distance, and one with a vector for equal or different segments (Yang et al. 2019, section 2.5). The query has a
    bias in each product.

    Attributes:
        sinusoids: [P, D] float32, in descending order of the distances.
        index: [#B, T, S], the row of ``sinusoids`` for each query and key. None if queries and keys are in order and P
            is T + S - 1: the row is then T - 1 - t + s.
        other_segment: [B, T, S], true for a query and a key in different segments; None without segments.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    sinusoids: Array
    index: Array | None = None
    other_segment: Array | None = None

    @classmethod
    def from_mask(cls, mask: Mask, width: int, num_queries: Length, num_keys: Length) -> RelativeSinusoids:
        """Makes the positions for the queries and keys of a mask; ``width`` is D."""
        in_order = mask.positions is None and (mask.start is None or isinstance(mask.start, int))
        count, largest = 2 * num_keys - 1, num_keys - 1
        if in_order:
            count, largest = num_queries + num_keys - 1, (mask.start or 0) + num_queries - 1
        frequencies = jnp.asarray(rotary_frequencies(width, 10_000.0))
        angles = (largest - jnp.arange(count)).astype(jnp.float32)[:, None] * frequencies
        return cls(
            jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1),
            None if in_order else largest - mask.distances(num_queries, num_keys),
            mask.other_segment(num_queries),
        )

    def scores(
        self,
        query: Float[Array, "B T N H"],
        distances: Float[Array, "P N H"],
        position_bias: Float[Array, "N H"],
        segment_bias: Float[Array, "N H"] | None,
        segments: Float[Array, "2 N H"] | None,
    ) -> Float[Array, "B N T S"]:
        """Computes the scores of positions and segments, divided by the square root of H, in float32.

        Args:
            distances: projected sinusoids.
            position_bias, segment_bias: added to the query.
            segments: vectors of equal and different segments.
        """
        scale = query.shape[-1] ** -0.5
        scores = self._by_key(jnp.einsum("BTNH,PNH->BNTP", (query + position_bias) * scale, distances))
        scores = scores.astype(jnp.float32)
        if self.other_segment is None or segment_bias is None or segments is None:
            return scores
        equal, other = jnp.split(jnp.einsum("BTNH,CNH->BNTC", (query + segment_bias) * scale, segments), 2, axis=-1)
        return scores + jnp.where(self.other_segment[:, None], other, equal).astype(jnp.float32)

    def _by_key(self, x: Float[Array, "B N T P"]) -> Float[Array, "B N T S"]:
        """Selects the column of each key: the relative shift of Dai et al. 2019, appendix B, if keys are in order."""
        if self.index is not None:
            return jnp.take_along_axis(x, self.index[:, None], axis=-1)
        *rows, queries, count = x.shape
        flat = jnp.pad(x, [(0, 0)] * len(rows) + [(0, 0), (0, 1)]).reshape(*rows, queries * (count + 1))
        flat = flat[..., queries - 1 : queries - 1 + queries * count]
        return flat.reshape(*rows, queries, count)[..., : count - queries + 1]


Positions = Rotation | Disentangled | RelativeSinusoids
"""Position information for self-attention."""


class AttentionContext(NamedTuple):
    """Mask and position information for one layer's self-attention."""

    mask: Mask
    positions: Positions | None = None


def attention_contexts(
    config: ModelConfig,
    dtype: Dtype,
    mask: Mask,
    rows: Length,
    length: Length,
    num_keys: Length,
    kernel: str,
    may_split: bool,
) -> dict[bool, AttentionContext]:
    """Makes the contexts of global layers (key False) and local layers (key True), for the kinds that the model has.

    Called by `bert.model.encoder.Encoder`, which owns the parameters of relative and disentangled positions.

    Args:
        mask: the mask of all layers, without the window of local layers.
        rows, length, num_keys: B, T and S.
        kernel: see `LayerExecution.attention`.
        may_split: whether local layers may split rows into blocks.
    """
    bias_from_distances = _relative_bias(config)
    # Splash attention skips positions outside the window without blocks, but lacks global tokens. Masks with ``pairs``
    # or ``start`` need whole rows. A symbolic length cannot be split.
    skips = kernel == "splash" and mask.global_tokens is None
    may_split = may_split and not skips and mask.pairs is None and mask.start is None
    block = config.local_block(length) if may_split and isinstance(length, int) else None
    if mask.global_tokens is not None:
        mask = mask.replace(global_tokens=mask.global_tokens.select(block or length))

    def context(local: bool) -> AttentionContext:
        positions: Positions | None = None
        if config.position_embedding_type == "rotary":
            positions = Rotation.from_config(config, local, mask.query_positions(length))
        elif config.is_disentangled:
            positions = _disentangled(config, dtype, mask.distances(length, num_keys))
        elif config.position_embedding_type == "transformer_xl":
            positions = RelativeSinusoids.from_mask(mask, config.hidden_size, length, num_keys)
        layer_mask = mask.replace(window=config.attention_window) if local else mask
        fully_masked = layer_mask.find_fully_masked(length)
        if local and block is not None:
            layer_mask = layer_mask.to_blocks(rows, length, block, bias_from_distances)
            return AttentionContext(layer_mask.replace(fully_masked=fully_masked), positions)
        if bias_from_distances is not None:
            layer_mask = layer_mask.replace(bias=bias_from_distances(mask.distances(length, num_keys)))
        layer_mask = layer_mask.to_pairs(length, num_keys) if kernel == "eager" else layer_mask
        return AttentionContext(layer_mask.replace(fully_masked=fully_masked), positions)

    return {local: context(local) for local in sorted(set(map(config.is_local, range(config.num_hidden_layers))))}


def _relative_bias(config: ModelConfig) -> BiasFromDistances | None:
    """Returns the function that computes the bias by distance, which all layers share; None if there is none."""
    if config.position_embedding_type == "alibi":
        return partial(alibi_bias, config.num_attention_heads)
    if config.relative_attention_buckets is None or config.is_disentangled:
        return None
    buckets, heads, init = config.relative_attention_buckets, config.num_attention_heads, truncated_normal_init(config)
    table = nn.Embed(buckets, heads, embedding_init=init, name="relative_attention_bias")
    return partial(relative_attention_bias, table.embedding)


def _disentangled(config: ModelConfig, dtype: Dtype, distances: Int[Array, "#B T S"]) -> Disentangled:
    """Returns the input of disentangled attention. All layers share its embeddings."""
    buckets = require(config.relative_attention_buckets, "model.relative_attention_buckets")
    init = truncated_normal_init(config)
    table = nn.Embed(buckets, config.hidden_size, embedding_init=init, name="relative_attention_embeddings")
    if config.position_embedding_type == "deberta_v1":
        return Disentangled.from_linear_distances(table.embedding.astype(dtype), distances)
    vectors = layer_norm(config, dtype, "relative_attention_norm")(table.embedding)
    return Disentangled.from_distances(vectors, distances, config.max_position_embeddings)


def sinusoids(shape: tuple[int, ...], deviation: float) -> jax.Array:
    """Returns [positions, features] float32: alternating sines and cosines, with wavelengths 2 pi to 10,000 * 2 pi."""
    positions, features = shape
    frequencies = 10_000.0 ** (-2 * (jnp.arange(features) // 2) / features)
    angles = jnp.arange(positions)[:, None] * frequencies
    waves = jnp.where(jnp.arange(features) % 2 == 0, jnp.sin(angles), jnp.cos(angles))
    return jnp.sqrt(2.0) * deviation * waves


def sinusoidal_position_table(config: ModelConfig) -> jax.Array:
    """Returns the fixed position table [rows, E]: sinusoids of norm 1 (Vaswani et al. 2017, section 3.5).

    The paper adds sinusoids of amplitude 1 to word embeddings multiplied by the square root of E. Without
    ``scale_embeddings`` both are divided by that factor. The table depends only on sizes, not on the initialization.
    """
    rows = config.position_offset + config.max_position_embeddings
    deviation = 2**-0.5 if config.scale_embeddings else config.embedding_width**-0.5
    return sinusoids((rows, config.embedding_width), deviation)


def step_embeddings(config: ModelConfig) -> jax.Array:
    """Returns the embeddings of layer numbers: sinusoids of amplitude 1, [layers, D] (Dehghani et al. 2018, 2.1)."""
    return sinusoids((config.num_hidden_layers, config.hidden_size), 2**-0.5)


def position_initializer(config: ModelConfig) -> nn.initializers.Initializer:
    """Returns the initializer of learned positions: random, or sinusoids with the same standard deviation.

    With sinusoids, a shift by one token is the same rotation at every position, so a head learns it from all positions
    at once. Random rows must be learned one by one.
    """
    if config.position_embedding_init == "normal":
        return truncated_normal_init(config)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
        return sinusoids(shape, config.initializer_range).astype(dtype)

    return init
