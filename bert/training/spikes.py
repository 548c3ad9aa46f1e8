"""Detects spikes of the loss and of the gradient norm, and optionally skips their updates.

A step is a spike if its loss or the norm of its gradient is more than k standard deviations above the mean of the last
128 steps, as in OLMo 2 (arXiv 2501.00656; `SkipStepOptimizer` of OLMo-core, k = 6). Spikes enter the history as well,
so that training continues at a new level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

WINDOW = 128
"""Number of steps in the history."""

MIN_STEPS = WINDOW // 2
"""Number of steps before which no step is a spike."""


class SpikeState(NamedTuple):
    """State of `detect_spikes`, part of the optimizer's.

    Attributes:
        history: [2, WINDOW] last losses and gradient norms; the values of update n are at n % WINDOW.
        num_steps: number of steps so far.
        spikes: [3] int32: whether the last update was a spike, the number of spikes, and of skipped ones.
        inner: state of the optimizer.
    """

    history: jax.Array
    num_steps: jax.Array
    spikes: jax.Array
    inner: optax.OptState


def detect_spikes(
    optimizer: optax.GradientTransformation, deviations: float, skip: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with a count of spikes; if ``skip``, a spike changes neither parameters nor moments.

    Its update needs the step's loss as ``loss``.
    """

    def init(params: Any) -> SpikeState:
        zero = jnp.zeros([], jnp.int32)
        return SpikeState(jnp.zeros((2, WINDOW)), zero, jnp.zeros(3, jnp.int32), optimizer.init(params))

    def update(
        grads: Any, state: SpikeState, params: Any = None, *, loss: jax.Array, **_: Any
    ) -> tuple[Any, SpikeState]:
        values = jnp.stack([loss, optax.global_norm(grads)])
        filled = jnp.minimum(state.num_steps, WINDOW)
        mean = state.history.sum(axis=1) / jnp.maximum(filled, 1)
        squares = jnp.where(jnp.arange(WINDOW) < filled, jnp.square(state.history - mean[:, None]), 0)
        limits = mean + deviations * jnp.sqrt(squares.sum(axis=1) / jnp.maximum(filled - 1, 1))
        is_spike = (state.num_steps >= MIN_STEPS) & (values > limits).any()
        updates, inner = optimizer.update(grads, state.inner, params)
        if skip:
            updates = jax.tree.map(lambda update: jnp.where(is_spike, 0, update), updates)
            inner = jax.tree.map(lambda new, old: jnp.where(is_spike, old, new), inner, state.inner)
        spike = is_spike.astype(jnp.int32)
        spikes = jnp.stack([spike, state.spikes[1] + spike, state.spikes[2] + spike * skip])
        history = state.history.at[:, state.num_steps % WINDOW].set(values)
        return updates, SpikeState(history, state.num_steps + 1, spikes, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def spike_counts(opt_state: optax.OptState) -> jax.Array | None:
    """Returns ``SpikeState.spikes`` of an optimizer's state, None without spike detection."""
    return opt_state.spikes if isinstance(opt_state, SpikeState) else None
