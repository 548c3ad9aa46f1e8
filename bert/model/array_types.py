"""Array types for the signatures of the model. Every function accepts JAX and NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Num

if TYPE_CHECKING:
    Array = jax.Array  # JAX converts NumPy arrays
else:
    Array = jax.Array | np.ndarray


Dtype = Any


PaddingMask = Num[Array, "B T"] | Bool[Array, "B T"]
