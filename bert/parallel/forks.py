"""Detection of a child that was forked after JAX had started its threads, in which every computation would hang."""

from __future__ import annotations

import os
import sys

from bert.errors import UserError

_forked_after_start = False


def require_no_fork() -> None:
    """Raises UserError in a forked child of a process in which JAX had started."""
    if _forked_after_start:
        raise UserError(
            "this process was forked after JAX had started, and JAX hangs in such a child: start it with "
            'multiprocessing.get_context("spawn"), or load and use the model in the child alone'
        )


def _note_fork() -> None:
    global _forked_after_start
    # JAX has no public function that tells whether it has started without starting it.
    started = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)
    _forked_after_start = _forked_after_start or bool(started)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
