"""Dropout whose bits are a function of (seed, step, layer, site, row of the global batch, place in the row).

The same row gets the same mask on any number of devices, hosts and micro-batches. The default generator is a counter
hash, elementwise like the multiplication it feeds, so XLA fuses it; JAX's threefry is there as the reference.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from flax import struct

from bert.errors import UserError


class Dropout(struct.PyTreeNode):
    """The source of dropout of one training step; modules that get ``None`` instead do not drop.

    Attributes:
        key: [2] uint32, from (seed, step) and the layers folded in so far.
        rows: [B] int32, number of each row within the global batch.
        generator: "hash" or "threefry".
    """

    key: jax.Array
    rows: jax.Array
    generator: str = struct.field(pytree_node=False, default="hash")

    @classmethod
    def for_step(
        cls, seed: jax.Array | int, step: jax.Array | int, rows: jax.Array, generator: str = "hash"
    ) -> Dropout:
        """The source for one step of a run."""
        key = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.asarray(step, jnp.uint32)])
        return cls(_fold(key, 0x5EED), rows, generator)

    def fold_in(self, name: str | int | jax.Array) -> Dropout:
        """The source of a part of the model: a layer's number, or a module's name."""
        number = zlib.crc32(name.encode()) if isinstance(name, str) else name
        return self.replace(key=_fold(self.key, number))

    def __call__(self, x: jax.Array, rate: float, site: str) -> jax.Array:
        """Zeroes elements of ``x`` [B, ...] with probability ``rate``, scales the rest by 1 / (1 - rate)."""
        if rate == 0.0:
            return x
        keep = self.keep_mask(x.shape, rate, site)
        # In bfloat16 the factor would be 1.109375 for 1 / 0.9, and everything that is kept 0.16% too small.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scaled = (x.astype(wide) * jnp.asarray(1.0 / (1.0 - rate), wide)).astype(x.dtype)
        return jnp.where(keep, scaled, jnp.zeros((), x.dtype))

    def keep_mask(self, shape: tuple[int, ...], rate: float, site: str) -> jax.Array:
        """Booleans of ``shape`` [B, ...], true with probability 1 - rate (to 2**-32)."""
        key = _fold(self.key, zlib.crc32(site.encode()))
        bits = _threefry_bits if self.generator == "threefry" else _hash_bits
        return bits(key, self.rows, shape) >= jnp.uint32(round(rate * 2**32))


def _hash_bits(key: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, ...] uint32: lowbias32 (Wellons 2018) of the place in the row, under two keys a row.

    The second key enters between the multiplications: with one key alone, two rows whose keys are close would share
    shifted stretches of one sequence.
    """
    if math.prod(shape[1:]) > 2**32:
        raise UserError(
            f"dropout has places for 2**32 values a row, not for {math.prod(shape[1:]):,}: use shorter rows, or set "
            "model.attention_probs_dropout_prob to 0"
        )
    row = rows.astype(jnp.uint32)
    spread = (-1,) + (1,) * (len(shape) - 1)
    first = _mix(row ^ key[0]).reshape(spread)
    second = _mix(_mix(row ^ key[1]) + jnp.uint32(0x9E3779B9)).reshape(spread)
    place = jnp.zeros((1,) * len(shape), jnp.uint32)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        ruler = jax.lax.broadcasted_iota(jnp.uint32, (1, *shape[1:]), axis)
        place = place + ruler * jnp.uint32(stride)
        stride *= shape[axis]
    x = place + first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _threefry_bits(key: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    base = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(base, row), shape[1:], jnp.uint32))(rows)


def _mix(x: jax.Array) -> jax.Array:
    """lowbias32: a bijection of 32 bits in which each input bit flips each output bit about half of the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _fold(key: jax.Array, number: int | jax.Array) -> jax.Array:
    """A new [2] key. The halves are mixed with each other, so that neither alone decides.

    The barrier keeps a key out of the loops that use it: LLVM's vectorizer follows every path of such a chain of
    scalars, 600 times as many with each fold, and would not end after five.
    """
    low = _mix(key[0] ^ jnp.asarray(number, jnp.uint32))
    high = _mix(key[1] + low + jnp.uint32(0x9E3779B9))
    return jax.lax.optimization_barrier(jnp.stack([_mix(low ^ high), high]))
