"""What is in the core's signatures for an array: JAX's, or NumPy's, which every function takes as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    Array = jax.Array  # what JAX makes of either
else:
    Array = jax.Array | np.ndarray
