"""Adaptive computation time: each position halts after a different number of layers (Graves 2016).

Shapes as in `bert.model.encoder`; a step is a layer.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float

from bert.model.array_types import Array

EPSILON = 0.01
"""A position halts when the sum of its halting probabilities reaches 1 - EPSILON (Graves 2016, section 2)."""


class Halting(struct.PyTreeNode):
    """State of the positions after a step.

    The output is the mean of a position's states, weighted by its halting probabilities. The last step has the
    remainder as weight, so that the weights sum to 1. The state of a position that has halted is copied from step to
    step (Dehghani et al. 2018, section 2.2).

    Attributes:
        output: [B, T, D] float32, weighted sum of the states.
        running: [B, T], whether a position has not halted.
        remainder: [B, T] float32, 1 minus the sum of the halting probabilities.
        steps: [B, T] float32, number of steps.
        ponder: [B, T] float32, the ponder cost: the number of steps plus the remainder in the last one.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    output: Array
    running: Array
    remainder: Array
    steps: Array
    ponder: Array

    @classmethod
    def start(cls, x: Float[Array, "B T D"]) -> Halting:
        """Returns the state before the first step; ``x`` is its input."""
        zeros = jnp.zeros(x.shape[:2])
        return cls(jnp.zeros(x.shape), jnp.ones(x.shape[:2], bool), zeros + 1, zeros, zeros)

    def after(
        self,
        old: Float[Array, "B T D"],
        new: Float[Array, "B T D"],
        probabilities: Float[Array, "B T"],
        is_last: Bool[Array, ""] | bool,
        epsilon: float = EPSILON,
    ) -> tuple[Float[Array, "B T D"], Halting]:
        """Returns the hidden states and the state after a step.

        Args:
            old: hidden states before the step.
            new: output of the layer.
            probabilities: halting probabilities of ``new``.
            is_last: whether all positions halt now.
            epsilon: largest remainder with which a position halts.
        """
        halts = self.running & ((self.remainder - probabilities <= epsilon) | is_last)
        weights = jnp.where(self.running, jnp.where(halts, self.remainder, probabilities), 0)
        goes_on = self.running & ~halts
        return jnp.where(self.running[..., None], new, old), Halting(
            self.output + weights[..., None] * new,
            goes_on,
            jnp.where(goes_on, self.remainder - probabilities, self.remainder),
            self.steps + self.running,
            self.ponder + self.running + jnp.where(halts, self.remainder, 0),
        )


def halting_probabilities(
    x: Float[Array, "B T D"], kernel: Float[Array, "D"], bias: Float[Array, ""]
) -> Float[Array, "B T"]:
    """Computes the halting probabilities of hidden states, in float32."""
    return jax.nn.sigmoid(jnp.einsum("BTD,D->BT", x.astype(jnp.float32), kernel) + bias)


def sown_halting(variables: Any) -> Halting:
    """Returns the final state from the collections of a model that was applied with ``mutable=["halting"]``."""
    [halting] = jax.tree.leaves(variables["halting"], is_leaf=lambda node: isinstance(node, Halting))
    return cast(Halting, halting)
