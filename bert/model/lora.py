"""Low-rank adapters (LoRA; Hu et al. 2021, section 4.1) as functions of parameters, independent of modules.

A kernel W [D, F] with an adapter becomes W + scale * A B, with A [D, r] and B [r, F]. In a tree of trained parameters,
``lora_a`` and ``lora_b`` replace ``kernel``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

Params = dict[str, Any]

LORA_A, LORA_B = "lora_a", "lora_b"


@dataclass(frozen=True)
class FrozenWeights:
    """The weights that a run does not train, and that its adapters modify.

    Attributes:
        params: all parameters of the model, on the host.
        scale: factor of the adapters' products, alpha / rank.
    """

    params: Params
    scale: float

    def merge(self, trained: Params) -> Params:
        """Returns the model's parameters on the host, with trained parameters and adapters merged in.

        Sums are computed in float64 and rounded once, so that the result is bitwise equal on every machine.
        """

        def add(kernel: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            total = kernel.astype(np.float64) + self.scale * (a.astype(np.float64) @ b.astype(np.float64))
            return total.astype(kernel.dtype)

        return _merge(self.params, trained, add)

    def merge_traced(self, params: Params, trained: Params) -> Params:
        """Like `merge`, but traceable; ``params`` are the frozen weights on the devices."""

        def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            # Full float32, even if matrix products have a lower precision by default.
            return kernel + self.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

        return _merge(params, trained, add)


NOTHING_FROZEN = FrozenWeights({}, 1.0)
"""No frozen weights: all parameters are trained."""


def _merge(frozen: Params, trained: Params, add: Callable[[Any, Any, Any], Any]) -> Params:
    merged, updates = traverse_util.flatten_dict(frozen), traverse_util.flatten_dict(trained)
    for path, value in updates.items():
        if path[-1] == LORA_A:
            kernel = (*path[:-1], "kernel")
            merged[kernel] = add(merged[kernel], value, updates[(*path[:-1], LORA_B)])
        elif path[-1] != LORA_B:
            merged[path] = value
    return traverse_util.unflatten_dict(merged)
