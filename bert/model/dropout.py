"""Dropout with random bits that depend only on (seed, step, layer, site, row of the global batch, index in the row).

The same row gets the same mask for any number of devices, hosts and micro-batches. The default generator is a counter
hash. It is elementwise, so XLA fuses it with the multiplication that follows. JAX's threefry is the reference.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from bert.errors import UserError
from bert.model.array_types import Array


class Dropout(struct.PyTreeNode):
    """Source of dropout for one training step. Modules called with ``None`` instead apply no dropout.

    Attributes:
        key: [2] uint32, the hash of (seed, step) and everything folded in so far.
        rows: [B] int32, index of each row in the global batch.
        generator: "hash" or "threefry".
    """

    key: jax.Array
    rows: jax.Array
    generator: str = struct.field(pytree_node=False, default="hash")

    @classmethod
    def for_step(
        cls, seed: jax.Array | int, step: jax.Array | int, rows: jax.Array, generator: str = "hash"
    ) -> Dropout:
        """Makes the source for one step of a run."""
        key = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.asarray(step, jnp.uint32)])
        return cls(_fold(key, 0x5EED), rows, generator)

    def fold_in(self, name: str | int | jax.Array) -> Dropout:
        """Returns the source for a part of the model, given the number of a layer or the name of a module."""
        number = zlib.crc32(name.encode()) if isinstance(name, str) else name
        return self.replace(key=_fold(self.key, number))

    def split_rows(self, parts: int) -> Dropout:
        """Returns the source for a batch whose rows are split into ``parts`` rows each, with independent masks."""
        return self.replace(rows=(self.rows[:, None] * parts + jnp.arange(parts)).reshape(-1))

    def __call__(self, x: jax.Array, rate: float, site: str) -> jax.Array:
        """Zeroes elements of ``x`` [B, ...] with probability ``rate`` and scales the others by 1 / (1 - rate)."""
        if rate == 0.0:
            return x
        keep = self.keep_mask(x.shape, rate, site)
        # In bfloat16 the factor 1 / 0.9 would be rounded to 1.109375, so kept values would be 0.16% too small.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scaled = (x.astype(wide) * jnp.asarray(1.0 / (1.0 - rate), wide)).astype(x.dtype)
        return jnp.where(keep, scaled, jnp.zeros((), x.dtype))

    def keep_mask(self, shape: tuple[int, ...], rate: float, site: str) -> jax.Array:
        """Returns booleans of ``shape`` [B, ...], true with probability 1 - rate (to 2**-32)."""
        key = _fold(self.key, zlib.crc32(site.encode()))
        bits = _threefry_bits if self.generator == "threefry" else _hash_bits
        return bits(key, self.rows, shape) >= jnp.uint32(round(rate * 2**32))


def _hash_bits(key: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns [B, ...] uint32: lowbias32 (Wellons 2018) of the index in the row, with two keys per row.

    The second key enters between the multiplications. With a single key, two rows with similar keys would share shifted
    parts of one sequence.
    """
    if math.prod(shape[1:]) > 2**32:
        raise UserError(
            f"dropout supports 2**32 values per row, but a row has {math.prod(shape[1:]):,}: use shorter rows, or set "
            "model.attention_probs_dropout_prob to 0"
        )
    row = rows.astype(jnp.uint32)
    spread = (-1,) + (1,) * (len(shape) - 1)
    first = _mix(row ^ key[0]).reshape(spread)
    second = _mix(_mix(row ^ key[1]) + jnp.uint32(0x9E3779B9)).reshape(spread)
    index = jnp.zeros((1,) * len(shape), jnp.uint32)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        counter = jax.lax.broadcasted_iota(jnp.uint32, (1, *shape[1:]), axis)
        index = index + counter * jnp.uint32(stride)
        stride *= shape[axis]
    x = index + first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _threefry_bits(key: jax.Array, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    base = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(base, row), shape[1:], jnp.uint32))(rows)


def _mix(x: jax.Array) -> jax.Array:
    """Applies lowbias32, a bijection on 32 bits in which each input bit flips each output bit with probability 1/2."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _fold(key: jax.Array, number: int | jax.Array) -> jax.Array:
    """Returns a new [2] key. Each half depends on both halves of the old key.

    The barrier keeps the computation of a key out of the loops that use it. Without it, LLVM's vectorizer visits every
    path through the chain of scalars: 600 times as many paths per fold, so compilation does not finish after five
    folds.
    """
    low = _mix(key[0] ^ jnp.asarray(number, jnp.uint32))
    high = _mix(key[1] + low + jnp.uint32(0x9E3779B9))
    return jax.lax.optimization_barrier(jnp.stack([_mix(low ^ high), high]))


def maybe_dropout(x: Float[Array, "*shape"], dropout: Dropout | None, rate: float, site: str) -> Float[Array, "*shape"]:
    """Applies dropout, unless ``dropout`` is None."""
    return x if dropout is None else dropout(x, rate, site)
