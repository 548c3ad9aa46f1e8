"""Where the hosts of a run wait for each other, without any device taking part."""

from __future__ import annotations

import jax

_PATIENCE = 7 * 24 * 3600 * 1000
"""Milliseconds that hosts wait for the first, which may have a vocabulary to train; its death ends them at once."""


def wait(name: str) -> None:
    """Returns when all hosts are here; at once where there is one."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        barrier = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        barrier(key=f"bert_{name}", timeout_ms=_PATIENCE)
