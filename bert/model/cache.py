"""Keys and values that decoding keeps between steps, and the states that cross-attention reads. Shapes as in
`bert.model.encoder`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.mask import Mask


class KeysValues(struct.PyTreeNode):
    """Projected keys and values of an attention layer over S positions.

    R = B * N, the heads of row 0, then those of row 1, and so on. Each head's keys and values are a matrix that a query
    is multiplied by as it is: in any other order a CPU would move them at every step.

    Attributes:
        keys: [R, H, S].
        values: [R, S, H].
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    keys: Array
    values: Array

    @property
    def num_positions(self) -> int:
        """S."""
        return self.values.shape[1]

    @classmethod
    def from_heads(cls, keys: Float[Array, "B S N H"], values: Float[Array, "B S N H"]) -> KeysValues:
        """Of projected keys and values [B, S, N, H]."""
        rows, length, heads, size = keys.shape
        return cls(
            jnp.transpose(keys, (0, 2, 3, 1)).reshape(rows * heads, size, length),
            jnp.transpose(values, (0, 2, 1, 3)).reshape(rows * heads, length, size),
        )

    def split_heads(self, num_rows: int) -> Float[Array, "B S N H"]:
        """The keys as projected, [B, S, N, H], B = ``num_rows``."""
        return jnp.transpose(self.keys.reshape(num_rows, -1, *self.keys.shape[1:]), (0, 3, 1, 2))

    def write(self, new: KeysValues, start: Int[Array, ""] | int | None) -> KeysValues:
        """Puts the keys and values of T positions in place from ``start`` on, from 0 if None.

        ``start`` + T must not exceed S: as in `jax.lax.dynamic_update_slice`, later positions would move back.
        """
        place = 0 if start is None else start
        put = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(
            put(self.keys, new.keys.astype(self.keys.dtype), place, axis=2),
            put(self.values, new.values.astype(self.values.dtype), place, axis=1),
        )

    def take_rows(self, rows: Int[Array, "rows"], num_rows: int) -> KeysValues:
        """The keys and values of some of the B = ``num_rows`` rows, each as often as it is named."""

        def take(x: Array) -> Array:
            return x.reshape(num_rows, -1, *x.shape[1:])[rows].reshape(-1, *x.shape[1:])

        return KeysValues(take(self.keys), take(self.values))


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
    return tuple(LayerCache(KeysValues.from_heads(zeros, zeros)) for _ in range(config.num_hidden_layers))
