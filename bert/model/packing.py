"""Packs the tokens of padded rows into shared rows for the encoder, whose layers then compute almost no padding.

Heads and losses see padded rows, in the same order. Shapes as in `bert.model.encoder`; G groups of rows that are packed
separately, such as the shares of the devices, with R packed rows of S tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, Shaped

from bert.model.array_types import Array
from bert.model.mask import Packing

PLACES = "packing", "places"
"""Collection and name of the variable of `bert.model.encoder.Bert` that holds the `TokenPlaces`."""

ARRAYS = ("token_sources", "token_places", "pack_numbers")
"""Names of the arrays of `TokenPlaces` in a batch."""


class TokenPlaces(struct.PyTreeNode):
    """Places of the tokens of padded rows in packed rows. The row of a text and its packed row are in the same group.

    Attributes:
        sources: [G, R, S], index of each packed token among the tokens of its group's padded rows; -1 for an empty
            place.
        places: [B, T], the inverse: index of each token among the tokens of its group's packed rows; -1 for padding.
        numbers: [G, R], number of each packed row in the global batch, for dropout.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    sources: Array
    places: Array
    numbers: Array

    def pack(self, x: Int[Array, "B T"]) -> Int[Array, "rows S"]:
        """Returns token ids or segments in packed rows, 0 in empty places."""
        packed = _take(x.reshape(len(self.sources), -1, 1), *self._both_ways)
        return packed.reshape(-1, self.sources.shape[-1])

    def unpack(self, x: Float[Array, "rows S D"]) -> Float[Array, "B T D"]:
        """Returns the features of packed tokens in padded rows, 0 in padding."""
        sources, places = self._both_ways
        return _take(x.reshape(len(sources), -1, x.shape[-1]), places, sources).reshape(*self.places.shape, -1)

    @property
    def packing(self) -> Packing:
        """The examples of the packed rows. Their numbers may be any that differ within a row."""
        length, is_token = self.places.shape[1], self.sources >= 0
        ids = jnp.where(is_token, self.sources // length + 1, 0)
        positions = jnp.where(is_token, self.sources % length, 0)
        ids, positions = (x.reshape(-1, x.shape[-1]) for x in (ids, positions))
        return Packing(ids, positions, jnp.zeros_like(ids[:, :1]))

    @property
    def _both_ways(self) -> tuple[Int[Array, "G packed"], Int[Array, "G padded"]]:
        groups = len(self.sources)
        return self.sources.reshape(groups, -1), self.places.reshape(groups, -1)


def packing_variables(batch: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the collections by which a model with the encoder ``bert`` packs a batch; {} for a batch without them."""
    if ARRAYS[0] not in batch:
        return {}
    collection, name = PLACES
    return {collection: {"bert": {name: TokenPlaces(*(batch[array] for array in ARRAYS))}}}


@jax.custom_vjp
def _take(x: Shaped[Array, "G M D"], index: Int[Array, "G N"], inverse: Int[Array, "G M"]) -> Shaped[Array, "G N D"]:
    """Selects x[g, index[g, n]], or 0 for index -1. The gradient selects too, which is faster than adding up."""
    taken = jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], axis=1)
    return jnp.where(index[..., None] >= 0, taken, 0)


def _take_forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return _take(x, index, inverse), (index, inverse)


def _take_backward(indices: tuple[Array, Array], slope: Array) -> tuple[Array, None, None]:
    index, inverse = indices
    return _take(slope, inverse, index), None, None


_take.defvjp(_take_forward, _take_backward)
