"""Segment recurrence (Dai et al. 2019, section 3.2): the layers also attend to the rows before.

Each layer keeps its inputs at the last M positions, and projects them to keys and values of the next rows. No gradient
passes through them. Projected keys and values, as in the cache of generation (`bert.model.attention.LayerCache`), would
belong to the parameters of an earlier step.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.errors import require
from bert.model.array_types import Array, Dtype
from bert.model.mask import Mask

COLLECTION, NAME = "memory", "segment"
"""Collection and name of the variable of `bert.model.encoder.Encoder` that holds the memory."""


class SegmentMemory(struct.PyTreeNode):
    """Inputs of the layers at the M positions before the rows.

    Attributes:
        states: [B, layers, M, D] float32, in the order of the text.
        length: [B], number of positions that are used, which are the last ones.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    states: Array
    length: Array

    @classmethod
    def empty(cls, config: ModelConfig, rows: int) -> SegmentMemory:
        """Returns the memory before the first rows."""
        size = require(config.memory_length, "model.memory_length")
        states = jnp.zeros((rows, config.num_hidden_layers, size, config.hidden_size))
        return cls(states, jnp.zeros(rows, jnp.int32))

    @property
    def size(self) -> int:
        """M."""
        return self.states.shape[2]

    def of_layer(self, number: int | Int[Array, ""], dtype: Dtype) -> Float[Array, "B M D"]:
        """Returns the inputs of a layer, counted from 0, without a gradient."""
        return jax.lax.stop_gradient(self.states[:, number]).astype(dtype)

    def extend(self, mask: Mask, length: int) -> Mask:
        """Returns the mask of ``length`` queries over the memory and their own keys."""
        if mask.examples is not None or mask.start is not None:
            raise ValueError("packed rows and cached keys have no memory")
        rows, size = len(self.length), self.size
        used = jnp.arange(size) >= size - self.length[:, None]
        own = jnp.ones((rows, length), bool) if mask.keys is None else mask.keys.astype(bool)
        before = ((0, 0), (size, 0))
        pairs, segments, positions = mask.pairs, mask.segments, mask.positions
        if positions is not None:
            earlier = jnp.broadcast_to(jnp.arange(-size, 0), (len(positions), size))
            positions = jnp.concatenate([earlier, positions], axis=1)
        return mask.replace(
            keys=jnp.concatenate([used, own], axis=1),
            pairs=None if pairs is None else jnp.pad(pairs, ((0, 0), (0, 0), *before), constant_values=True),
            segments=None if segments is None else jnp.pad(segments, before),
            positions=positions,
            start=size,
            right_padded=False,
        )

    def after(self, inputs: Sequence[Float[Array, "B T D"]], num_queries: int = 0) -> SegmentMemory:
        """Returns the memory after full rows, given the inputs of each layer, which end with the queries."""
        new = jnp.stack(inputs, axis=1).astype(self.states.dtype)
        new = new[:, :, : new.shape[2] - num_queries]
        states = jnp.concatenate([self.states, new], axis=2)[:, :, -self.size :]
        return SegmentMemory(states, jnp.minimum(self.length + new.shape[2], self.size))


def memory_variables(memory: SegmentMemory) -> dict[str, Any]:
    """Returns the collections by which a language model reads a memory; it is applied with ``mutable=["memory"]``."""
    return {COLLECTION: {"bert": {"encoder": {NAME: memory}}}}


def kept_memory(variables: Any) -> SegmentMemory:
    """Returns the memory after a call, from the collections of a model applied with ``mutable=["memory"]``."""
    return cast(SegmentMemory, variables[COLLECTION]["bert"]["encoder"][NAME])
