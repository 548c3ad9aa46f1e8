"""Detects spikes of the gradient norm, which precede spikes of the loss, and optionally skips their updates.

A step is a spike if the norm of its gradient is more than k standard deviations above the mean of the last 128 norms,
as in OLMo 2 (arXiv 2501.00656; `SkipStepOptimizer` of OLMo-core, k = 6). The norms of spikes enter the history as well,
so that training continues at a new level of norms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

WINDOW = 128
"""Number of norms in the history."""

MIN_NORMS = WINDOW // 2
"""Number of norms before which no step is a spike."""


class SpikeState(NamedTuple):
    """State of `detect_spikes`, part of the optimizer's.

    Attributes:
        norms: [WINDOW] last norms; the norm of update n is at n % WINDOW.
        num_norms: number of norms so far.
        spikes: [3] int32: whether the last update was a spike, the number of spikes, and of skipped ones.
        inner: state of the optimizer.
    """

    norms: jax.Array
    num_norms: jax.Array
    spikes: jax.Array
    inner: optax.OptState


def detect_spikes(
    optimizer: optax.GradientTransformation, deviations: float, skip: bool
) -> optax.GradientTransformation:
    """Returns the optimizer with a count of spikes; if ``skip``, a spike changes neither parameters nor moments."""

    def init(params: Any) -> SpikeState:
        zero = jnp.zeros([], jnp.int32)
        return SpikeState(jnp.zeros(WINDOW), zero, jnp.zeros(3, jnp.int32), optimizer.init(params))

    def update(grads: Any, state: SpikeState, params: Any = None) -> tuple[Any, SpikeState]:
        norm = optax.global_norm(grads)
        filled = jnp.minimum(state.num_norms, WINDOW)
        mean = state.norms.sum() / jnp.maximum(filled, 1)
        squares = jnp.where(jnp.arange(WINDOW) < filled, jnp.square(state.norms - mean), 0)
        limit = mean + deviations * jnp.sqrt(squares.sum() / jnp.maximum(filled - 1, 1))
        is_spike = (state.num_norms >= MIN_NORMS) & (norm > limit)
        updates, inner = optimizer.update(grads, state.inner, params)
        if skip:
            updates = jax.tree.map(lambda update: jnp.where(is_spike, 0, update), updates)
            inner = jax.tree.map(lambda new, old: jnp.where(is_spike, old, new), inner, state.inner)
        spike = is_spike.astype(jnp.int32)
        spikes = jnp.stack([spike, state.spikes[1] + spike, state.spikes[2] + spike * skip])
        norms = state.norms.at[state.num_norms % WINDOW].set(norm)
        return updates, SpikeState(norms, state.num_norms + 1, spikes, inner)

    return optax.GradientTransformation(init, update)


def spike_counts(opt_state: optax.OptState) -> jax.Array | None:
    """Returns ``SpikeState.spikes`` of an optimizer's state, None without spike detection."""
    return opt_state.spikes if isinstance(opt_state, SpikeState) else None
