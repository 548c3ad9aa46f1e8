"""Rotary positions (Su et al. 2021, section 3.4): queries and keys are turned by angles that grow with their position.

The product of a turned query and a turned key depends on the distance between the two alone. Packed rows and padding on
either side therefore need no positions of their own. Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from bert.model.array_types import Array


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
