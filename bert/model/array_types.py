"""The types in the core's signatures. An array is JAX's, or NumPy's, which every function takes as well."""

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
