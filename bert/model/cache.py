"""Keys and values that decoding keeps between steps, and the states that cross-attention reads. Shapes as in
`bert.model.encoder`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.mask import Mask
from bert.parallel.sharding import constrain_activation


class KeysValues(struct.PyTreeNode):
    """Projected keys and values of an attention layer, [B, S, N, H] each."""

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    keys: Array
    values: Array

    def write(self, new: KeysValues, start: Int[Array, ""] | int | None) -> KeysValues:
        """Puts the keys and values of T positions [B, T, N, H] in place from ``start`` on, from 0 if None.

        ``start`` + T must not exceed S: as in `jax.lax.dynamic_update_slice`, later positions would move back.
        """

        def put(old: Array, x: Array) -> Array:
            return constrain_activation(
                jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), 0 if start is None else start, axis=1),
                None,
                "tensor",
            )

        return KeysValues(put(self.keys, new.keys), put(self.values, new.values))


class LayerCache(struct.PyTreeNode):
    """Keys and values that a layer keeps between decoding steps.

    The shapes of ``own`` never change, so that one compiled step serves all positions; with a memory a second one
    serves those after the first.

    Attributes:
        own: keys and values of self-attention, S being the most positions that are ever decoded.
        memory: keys and values of cross-attention; None before the first step, which computes them.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    own: KeysValues
    memory: KeysValues | None = None


class Memory(struct.PyTreeNode):
    """The input of cross-attention: hidden states [B, S, D], of an encoder for example, and the mask over them."""

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    hidden_states: Array
    mask: Mask = Mask()


def make_cache(config: ModelConfig, num_rows: int, num_positions: int, dtype: DTypeLike) -> tuple[LayerCache, ...]:
    """An empty cache of B rows and S positions for each layer, in the layers' ``dtype``."""
    heads = config.num_attention_heads
    zeros = jnp.zeros((num_rows, num_positions, heads, config.hidden_size // heads), dtype)
    return tuple(LayerCache(KeysValues(zeros, zeros)) for _ in range(config.num_hidden_layers))
