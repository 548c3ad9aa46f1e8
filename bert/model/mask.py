"""Which keys a query attends to, and with which bias: one value for every implementation of attention.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int, Num, Shaped

from bert.model.array_types import Array

Length = Any
"""An int, or the symbol of a length where a function is exported for rows of any length."""


BiasOf = Callable[[Array], Array]
"""Distances [B, T, S] -> bias [B, N, T, S] of the scores."""


class Mask(struct.PyTreeNode):
    """Which keys a query attends to, every condition that is set having to hold, and the bias of its scores.

    Attributes:
        keys: [B, S], 1 for a token and 0 for padding.
        examples: [B, S], the example that a token of packed rows is of. A query attends to its own example, padding to
            padding.
        pairs: [#B, #N, #T, #S] booleans, any other condition.
        bias: [#B, #N, #T, #S], is added to the scores of those that a query attends to.
        positions: [#B, S], the position that each query and key stands at; None for their order.
        start: position of the first query among the keys, as in decoding with a cache; None for 0.
        causal: a query attends to its own position and those before it.
        window: a query attends to positions at most this far from its own (Beltagy et al. 2020, section 3.1).
        right_padded: padding of ``keys`` is at the end of each row only. Kernels then take lengths, not booleans.
        block: attention in blocks of so many positions (`split_queries`), whose pairs of queries and keys ``pairs``
            are; None for whole rows.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    keys: Array | None = None
    examples: Array | None = None
    pairs: Array | None = None
    bias: Array | None = None
    positions: Array | None = None
    start: Array | int | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    right_padded: bool = struct.field(pytree_node=False, default=False)
    block: int | None = struct.field(pytree_node=False, default=None)

    def booleans(self, num_queries: Length, num_keys: Length) -> Bool[Array, "#B #N #T #S"] | None:
        """Booleans that broadcast to [B, N, T, S], true where a query attends to a key; None for everywhere."""
        conditions = []
        if self.keys is not None:
            conditions.append(_real_keys(self.keys))
        if self.examples is not None:
            conditions.append(_same_example(self.examples, self.start, num_queries))
        if self.pairs is not None:
            conditions.append(self.pairs)
        distances = self.distances(num_queries, num_keys)[:, None]
        if self.causal:
            conditions.append(distances >= 0)
        if self.window is not None:
            conditions.append(jnp.abs(distances) <= self.window)
        return functools.reduce(operator.and_, conditions) if conditions else None

    def distances(self, num_queries: Length, num_keys: Length) -> Int[Array, "#B T S"]:
        """[B, T, S]: positions from each key to a query behind it; negative for a key behind the query."""
        keys = jnp.arange(num_keys)[None] if self.positions is None else self.positions
        return self.query_positions(num_queries)[:, :, None] - keys[:, None, :]

    def query_positions(self, num_queries: Length) -> Int[Array, "#B T"]:
        """[B, T]: the position of each query."""
        if self.positions is not None:
            return self.positions[:, :num_queries]
        return ((0 if self.start is None else self.start) + jnp.arange(num_queries))[None]

    def to_pairs(self, num_queries: Length, num_keys: Length) -> Mask:
        """Makes the same mask with its conditions as ``pairs`` alone, so that layers share the booleans."""
        return Mask(pairs=self.booleans(num_queries, num_keys), bias=self.bias, start=self.start)

    def to_blocks(self, rows: int, length: int, block: int, bias_of: BiasOf | None = None) -> Mask:
        """Makes the same mask of a window for rows in blocks, with a bias; ``pairs`` of such a mask are none."""
        real = jnp.ones((rows, length), bool) if self.keys is None else self.keys.astype(bool)
        visible = split_keys(real, block, self.causal)[:, None, :]
        if self.examples is not None:
            queries, keys = split_queries(self.examples, block), split_keys(self.examples, block, self.causal)
            visible = visible & (queries[:, :, None] == keys[:, None, :])
        distance = block + jnp.arange(block)[:, None] - jnp.arange(visible.shape[-1])
        visible = visible & (jnp.abs(distance) <= (length if self.window is None else self.window))
        if self.causal:
            visible = visible & (distance >= 0)
        bias = None if bias_of is None else bias_of(distance[None])
        return Mask(pairs=visible[:, None], bias=bias, block=block)

    def kernel_arguments(self, num_queries: Length, num_keys: Length) -> dict[str, Any]:
        """Arguments of `jax.nn.dot_product_attention`, the bias aside.

        Right-padded keys and causal masks are lengths and flags, by which cuDNN's kernel leaves work out; its windows
        are causal ones. Booleans are passed for every other mask.
        """
        square = self.start is None and num_queries == num_keys
        flags = square if self.causal else self.window is None
        lengths = self.keys is None or self.right_padded
        if not flags or not lengths or self.examples is not None or self.pairs is not None:
            return {"mask": self.booleans(num_queries, num_keys)}
        return {
            "key_value_seq_lengths": None if self.keys is None else _lengths(self.keys),
            "is_causal": self.causal,
            "local_window_size": None if self.window is None else (self.window, 0),
        }


def _real_keys(keys: Num[Array, "B S"] | Bool[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    return keys[:, None, None, :].astype(bool)


def _same_example(
    examples: Int[Array, "B S"], start: Int[Array, ""] | int | None, num_queries: Length
) -> Bool[Array, "B 1 T S"]:
    if start is None:
        queries = examples[:, :num_queries]
    else:
        queries = jax.lax.dynamic_slice_in_dim(examples, start, num_queries, axis=1)
    return (queries[:, :, None] == examples[:, None, :])[:, None]


def _lengths(keys: Num[Array, "B S"] | Bool[Array, "B S"]) -> Int[Array, "B"]:
    """[B, S] of 1 and then 0 -> [B]; at least 1, for rows that only fill a batch."""
    return jnp.maximum(jnp.sum(keys, axis=-1, dtype=jnp.int32), 1)


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
