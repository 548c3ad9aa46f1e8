"""Low-rank adapters (LoRA; Hu et al. 2021, section 4.1) as a function of parameters: no module knows of them.

A kernel W [D, F] with an adapter is W + scale * A B, with A [D, r] and B [r, F]. In a tree of parameters, ``lora_a``
and ``lora_b`` are where the model has the ``kernel``.
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
    """The weights that a run's adapters adapt, which it does not train.

    Attributes:
        params: on the host, nested as the model's.
        scale: of the adapters' products, alpha / rank.
    """

    params: Params
    scale: float

    def merge(self, trained: Params) -> Params:
        """The model's parameters on the host, from all that is trained, adapters included.

        Sums are in float64 and rounded once, so that every machine gets the same bits.
        """

        def add(kernel: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            total = kernel.astype(np.float64) + self.scale * (a.astype(np.float64) @ b.astype(np.float64))
            return total.astype(kernel.dtype)

        return _merge(self.params, trained, add)

    def merge_traced(self, params: Params, trained: Params) -> Params:
        """The same in a compiled function, where ``params`` are the frozen weights on the devices."""

        def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            # All digits of float32, also where matrix products have fewer by default.
            return kernel + self.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

        return _merge(params, trained, add)


NOTHING_FROZEN = FrozenWeights({}, 1.0)
"""Of a run that trains all parameters: what is trained is the model's."""


def _merge(frozen: Params, trained: Params, add: Callable[[Any, Any, Any], Any]) -> Params:
    merged, given = traverse_util.flatten_dict(frozen), traverse_util.flatten_dict(trained)
    for path, value in given.items():
        if path[-1] == LORA_A:
            kernel = (*path[:-1], "kernel")
            merged[kernel] = add(merged[kernel], value, given[(*path[:-1], LORA_B)])
        elif path[-1] != LORA_B:
            merged[path] = value
    return traverse_util.unflatten_dict(merged)
