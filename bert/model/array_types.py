"""Types in the signatures of the core. Every function accepts arrays of JAX and of NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Num

if TYPE_CHECKING:
    Array = jax.Array  # what JAX makes of either
else:
    Array = jax.Array | np.ndarray


Dtype = Any


PaddingMask = Num[Array, "B T"] | Bool[Array, "B T"]
