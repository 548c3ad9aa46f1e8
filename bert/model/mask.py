"""Attention masks: which keys a query attends to, in one representation for all attention implementations.

Shapes as in `bert.model.encoder`; C blocks per row with ``block`` positions each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int, Num, Shaped

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, PaddingMask
from bert.model.names import GlobalTokenKind, num_global_tokens

Length = Any
"""An int, or a symbolic dimension while a function is exported for any length."""

BiasFromDistances = Callable[[Array], Array]
"""Maps distances [B, T, S] to a bias [B, N, T, S] for the scores."""


class Packing(struct.PyTreeNode):
    """Locations of the examples in packed rows, made by `bert.data.pretraining.packing.packing_arrays`.

    K is the maximum number of examples per row.

    Attributes:
        example_ids: [B, T], the number of each token's example, from 1 to K; 0 for padding.
        position_ids: [B, T], the position of each token in its example, from 0.
        cls_positions: [B, K], the index of each example's first token.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    example_ids: Array
    position_ids: Array
    cls_positions: Array


class GlobalTokens(struct.PyTreeNode):
    """Tokens of local layers to which all queries attend, and which attend to all keys (Beltagy et al. 2020, 3.1).

    G is the number of tokens per row that `select` reserves memory for.

    Attributes:
        flags: [B, T], true for a global token; false for padding.
        keys: [B, T], 1 for a token and 0 for padding, to which no token attends; None without padding.
        positions: [B, G], the positions of the global tokens of each row, in order, then of other tokens. None before
            `select`.
        kind: which tokens are global.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    flags: Array
    kind: GlobalTokenKind = struct.field(pytree_node=False)
    keys: Array | None = None
    positions: Array | None = None

    @classmethod
    def find(
        cls, kind: GlobalTokenKind, input_ids: Int[Array, "B T"], separator: int, attention_mask: PaddingMask | None
    ) -> GlobalTokens:
        """Finds the global tokens of padded rows. Without a separator, all tokens of a row are before it."""
        has_ended = jnp.cumsum(input_ids == separator, axis=1) > 0
        if kind == "first":
            flags = jnp.zeros_like(has_ended).at[:, 0].set(True)
        elif kind == "before_separator":
            flags = ~has_ended
        else:
            flags = jnp.concatenate([jnp.zeros_like(has_ended[:, :2]), has_ended], axis=1)[:, : has_ended.shape[1]]
        return cls._of_flags(flags, kind, attention_mask)

    @classmethod
    def from_mask(cls, global_attention_mask: PaddingMask, attention_mask: PaddingMask | None) -> GlobalTokens:
        """Returns the global tokens that a mask selects among the tokens of padded rows."""
        return cls._of_flags(global_attention_mask.astype(bool), "given", attention_mask)

    @classmethod
    def _of_flags(
        cls, flags: Bool[Array, "B T"], kind: GlobalTokenKind, attention_mask: PaddingMask | None
    ) -> GlobalTokens:
        flags = flags if attention_mask is None else flags & attention_mask.astype(bool)
        return cls(flags, kind, attention_mask)

    def select(self, limit: Length) -> GlobalTokens:
        """Returns the same tokens with ``positions``, at most ``limit`` per row."""
        count = num_global_tokens(self.kind, limit)
        return self.replace(positions=jnp.argsort(~self.flags, axis=1, stable=True)[:, :count])

    @property
    def num_selected(self) -> int:
        """G."""
        return require(self.positions, "the positions").shape[1]

    @property
    def num_per_row(self) -> Int[Array, "B"]:
        """Number of global tokens of each row."""
        return jnp.sum(self.flags, axis=1, dtype=jnp.int32)

    def take(self, x: Shaped[Array, "B T *features"]) -> Shaped[Array, "B G *features"]:
        """Selects the tokens at ``positions``."""
        return jnp.take_along_axis(x, _expand(require(self.positions, "the positions"), x.ndim), axis=1)

    def put(
        self, selected: Shaped[Array, "B G *features"], x: Shaped[Array, "B T *features"]
    ) -> Shaped[Array, "B T *features"]:
        """Replaces the global tokens of ``x`` by ``selected``, which is in the order of `take`."""
        index = jnp.clip(jnp.cumsum(self.flags, axis=1) - 1, 0, selected.shape[1] - 1)
        moved = jnp.take_along_axis(selected, _expand(index, x.ndim), axis=1)
        return jnp.where(_expand(self.flags, x.ndim), moved, x)


def _expand(x: Array, ndim: int) -> Array:
    """Appends axes of size 1."""
    return x.reshape(*x.shape, *(1 for _ in range(ndim - x.ndim)))


class Mask(struct.PyTreeNode):
    """Attention mask and bias. A query attends to a key if all conditions that are set hold.

    Attributes:
        keys: [B, S], 1 for a token and 0 for padding.
        examples: [B, S], the example of each token in packed rows. A query attends only to its own example, and padding
            attends to padding.
        pairs: [#B, #N, #T, #S] booleans for any other condition.
        bias: [#B, #N, #T, #S], added to the scores.
        segments: [B, S], segments of queries and keys for relative segments; None without these.
        positions: [#B, S], positions of queries and keys; None if they are in order.
        start: index of the first query among the keys, for decoding with a cache; None for 0.
        global_tokens: tokens to which all queries attend in spite of ``window``; None for none. Their own attention is
            computed separately (`bert.model.multi_head.Attention`).
        fully_masked: [B, T], true for queries that attend to no key, whose result is zero; None if there are none.
        causal: whether a query attends only to its own position and earlier ones.
        window: maximum distance between query and key (Beltagy et al. 2020, section 3.1); None for no limit.
        right_padded: whether padding in ``keys`` is only at the end of rows. Kernels then use lengths, not booleans.
        block: positions per block if rows are split into blocks (`split_queries`), None otherwise. With blocks, only
            ``pairs`` and ``bias`` apply, and the keys of the global tokens follow the keys of a block.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    keys: Array | None = None
    examples: Array | None = None
    segments: Array | None = None
    pairs: Array | None = None
    bias: Array | None = None
    positions: Array | None = None
    start: Array | int | None = None
    global_tokens: GlobalTokens | None = None
    fully_masked: Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    right_padded: bool = struct.field(pytree_node=False, default=False)
    block: int | None = struct.field(pytree_node=False, default=None)

    def booleans(self, num_queries: Length, num_keys: Length) -> Bool[Array, "#B #N #T #S"] | None:
        """Returns booleans that broadcast to [B, N, T, S], true where a query attends to a key; None if always."""
        conditions = []
        if self.keys is not None:
            conditions.append(self.keys[:, None, None, :].astype(bool))
        if self.examples is not None:
            conditions.append(_same_group(self.examples, self.start, num_queries)[:, None])
        if self.pairs is not None:
            conditions.append(self.pairs)
        distances = self.distances(num_queries, num_keys)[:, None]
        if self.causal:
            conditions.append(distances >= 0)
        if self.window is not None:
            near = jnp.abs(distances) <= self.window
            conditions.append(near if self.global_tokens is None else near | self.global_tokens.flags[:, None, None, :])
        return functools.reduce(operator.and_, conditions) if conditions else None

    def find_fully_masked(self, num_queries: Length) -> Bool[Array, "B T"] | None:
        """Returns which queries have only padding in their window, as in padding far from the text; None if unknown.

        PyTorch's attention returns zeros for them, which is the default of transformers. They matter only if hidden
        states of padding are read, as in queries that late interaction extends by mask tokens.
        """
        unknown = (self.start, self.positions, self.global_tokens)
        if self.window is None or self.keys is None or not self.right_padded or any(x is not None for x in unknown):
            return None
        return self.query_positions(num_queries) >= _lengths(self.keys)[:, None] + self.window

    def other_segment(self, num_queries: Length) -> Bool[Array, "B T S"] | None:
        """Returns whether a query and a key are in different segments; None without segments."""
        return None if self.segments is None else ~_same_group(self.segments, self.start, num_queries)

    def distances(self, num_queries: Length, num_keys: Length) -> Int[Array, "#B T S"]:
        """Returns query position minus key position, [B, T, S]."""
        keys = jnp.arange(num_keys)[None] if self.positions is None else self.positions
        return self.query_positions(num_queries)[:, :, None] - keys[:, None, :]

    def query_positions(self, num_queries: Length) -> Int[Array, "#B T"]:
        """Returns the position of each query, [B, T]."""
        if self.positions is not None:
            return _take_queries(self.positions, self.start, num_queries)
        return ((0 if self.start is None else self.start) + jnp.arange(num_queries))[None]

    def neighbours(self, x: Float[Array, "B T D"], offset: int) -> Float[Array, "B T D"]:
        """Returns the features of the token ``offset`` positions after each token; zeros outside of its text.

        Raises:
            ValueError: the mask is not for whole rows of tokens in order that are read in both directions.
        """
        if self.causal or self.pairs is not None or self.positions is not None or self.start is not None:
            raise ValueError("neighbours on both sides need whole rows of tokens in order")

        def shift(array: Shaped[Array, "B T *features"]) -> Shaped[Array, "B T *features"]:
            edges = ((0, 0, 0), (-offset, offset, 0), *((0, 0, 0) for _ in array.shape[2:]))
            return jax.lax.pad(array, jnp.zeros((), array.dtype), edges)

        if self.keys is not None:
            x = jnp.where(self.keys[:, :, None] > 0, x, 0)
        shifted = shift(x)
        if self.examples is None:
            return shifted
        return jnp.where((shift(self.examples) == self.examples)[:, :, None], shifted, 0)

    def to_pairs(self, num_queries: Length, num_keys: Length) -> Mask:
        """Returns the same mask with all conditions merged into ``pairs``, which layers can share."""
        pairs = self.booleans(num_queries, num_keys)
        return Mask(pairs=pairs, bias=self.bias, start=self.start, global_tokens=self.global_tokens)

    def to_blocks(
        self, rows: int, length: int, block: int, bias_from_distances: BiasFromDistances | None = None
    ) -> Mask:
        """Returns the same mask for rows split into blocks. Requires a window and no ``pairs``."""
        real = jnp.ones((rows, length), bool) if self.keys is None else self.keys.astype(bool)
        tokens = self.global_tokens
        visible = split_keys(real if tokens is None else real & ~tokens.flags, block, self.causal)[:, None, :]
        if self.examples is not None:
            queries, keys = split_queries(self.examples, block), split_keys(self.examples, block, self.causal)
            visible = visible & (queries[:, :, None] == keys[:, None, :])
        distance = block + jnp.arange(block)[:, None] - jnp.arange(visible.shape[-1])
        visible = visible & (jnp.abs(distance) <= (length if self.window is None else self.window))
        if self.causal:
            visible = visible & (distance >= 0)
        if tokens is not None:
            known = jnp.arange(tokens.num_selected) < tokens.num_per_row[:, None]
            known = jnp.repeat(known, len(visible) // rows, axis=0)[:, None, :]
            visible = jnp.concatenate([visible, jnp.broadcast_to(known, (*visible.shape[:2], known.shape[2]))], axis=-1)
        bias = None if bias_from_distances is None else bias_from_distances(distance[None])
        return Mask(pairs=visible[:, None], bias=bias, block=block, global_tokens=tokens)

    def kernel_arguments(self, num_queries: Length, num_keys: Length) -> dict[str, Any]:
        """Returns the arguments of `jax.nn.dot_product_attention`, except the bias.

        Right-padded keys and causal masks become lengths and flags, so that cuDNN's kernel can skip work. It supports
        windows only with causal masks. All other masks become booleans.
        """
        square = self.start is None and num_queries == num_keys
        has_flags = square if self.causal else self.window is None
        has_lengths = self.keys is None or self.right_padded
        if not has_flags or not has_lengths or self.examples is not None or self.pairs is not None:
            return {"mask": self.booleans(num_queries, num_keys)}
        return {
            "key_value_seq_lengths": None if self.keys is None else _lengths(self.keys),
            "is_causal": self.causal,
            "local_window_size": None if self.window is None else (self.window, 0),
        }


def make_mask(config: ModelConfig, attention_mask: PaddingMask | None, packing: Packing | None) -> Mask:
    """Returns the encoder's mask for padded or packed rows."""
    if packing is not None:
        return Mask(examples=packing.example_ids, causal=config.causal)
    return Mask(keys=attention_mask, causal=config.causal, right_padded=True)


def _same_group(
    numbers: Int[Array, "B S"], start: Int[Array, ""] | int | None, num_queries: Length
) -> Bool[Array, "B T S"]:
    """Returns whether a query and a key have the same number."""
    return _take_queries(numbers, start, num_queries)[:, :, None] == numbers[:, None, :]


def _take_queries(
    numbers: Int[Array, "B S"], start: Int[Array, ""] | int | None, num_queries: Length
) -> Int[Array, "B T"]:
    """Selects the numbers of the queries from the numbers of the keys."""
    if start is None:
        return numbers[:, :num_queries]
    return jax.lax.dynamic_slice_in_dim(numbers, start, num_queries, axis=1)


def _lengths(keys: Num[Array, "B S"] | Bool[Array, "B S"]) -> Int[Array, "B"]:
    """Returns the lengths [B] of right-padded rows; at least 1, because filler rows are empty."""
    return jnp.maximum(jnp.sum(keys, axis=-1, dtype=jnp.int32), 1)


def split_queries(x: Shaped[Array, "B T *features"], block: int) -> Shaped[Array, "blocks K *features"]:
    """Splits rows into blocks, [B, T, ...] -> [B * C, block, ...], padding the last block with zeros.

    With local attention, a block attends only to itself and its neighbours (Beltagy et al. 2020, section 3.1). Blocks
    become separate rows, which every attention implementation supports.
    """
    _, length, *features = x.shape
    padded = jnp.pad(x, [(0, 0), (0, -length % block), *((0, 0) for _ in features)])
    return padded.reshape(-1, block, *features)


def split_keys(x: Shaped[Array, "B T *features"], block: int, causal: bool) -> Shaped[Array, "blocks keys *features"]:
    """Returns each block together with its neighbours, [B, T, ...] -> [B * C, 3 block, ...].

    With a causal mask the next block is omitted: [B * C, 2 block, ...]. Blocks outside of the row are zeros.
    """
    rows, length, *features = x.shape
    ends = (block, -length % block + (0 if causal else block))
    padded = jnp.pad(x, [(0, 0), ends, *((0, 0) for _ in features)])
    blocks = padded.reshape(rows, -1, block, *features)
    neighbours = 2 if causal else 3
    count = blocks.shape[1] - neighbours + 1
    parts = [blocks[:, first : first + count] for first in range(neighbours)]
    return jnp.concatenate(parts, axis=2).reshape(rows * count, neighbours * block, *features)
