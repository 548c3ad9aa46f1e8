"""Several hosts, one run: what the first one decides holds for all, and it alone writes.

All hosts run the same program and see the same run folder. With one host, everything here is as if it were not there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert.errors import UserError

Value = TypeVar("Value")


def is_multihost() -> bool:
    """Whether more than one host takes part."""
    return jax.process_count() > 1


def is_main_process() -> bool:
    """Whether this is the host that writes and speaks."""
    return jax.process_index() == 0


def broadcast_from_main(make: Callable[[], Any]) -> Any:
    """Calls ``make`` on the main process alone, and returns its value, one that JSON has, on all.

    Raises:
        UserError: on all hosts if the main process raised it.
    """
    return call_on_main(make, lambda value: value)[1]


def call_on_main(make: Callable[[], Value], summarize: Callable[[Value], Any]) -> tuple[Value | None, Any]:
    """Calls ``make`` on the main process alone.

    Returns:
        The value there and None on the other hosts; and on all what ``summarize`` gives for it, a value that JSON has.

    Raises:
        UserError: on all hosts if the main process raised it.
    """
    if not is_multihost():
        value = make()
        return value, summarize(value)
    made, message = None, {}
    if is_main_process():
        try:
            made = make()
            message = {"value": summarize(made)}
        except UserError as error:
            message = {"error": str(error)}
    sync_hosts("from_first")
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    if not is_main_process():
        text = np.zeros(length, np.uint8)
    message = json.loads(multihost_utils.broadcast_one_to_all(text).astype(np.uint8).tobytes())
    if "error" in message:
        raise UserError(message["error"])
    return made, message["value"]


def gather_rows(array: np.ndarray) -> np.ndarray:
    """The rows of an array [R, ...] of every host, those of the first one first; all hosts have to call it."""
    if not is_multihost():
        return array
    # As bytes: JAX would make int64 int32.
    rows = multihost_utils.process_allgather(np.ascontiguousarray(array).view(np.uint8), tiled=True)
    return np.ascontiguousarray(rows, np.uint8).view(array.dtype)


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Around work that leaves files behind: the others begin it when the first host has done it, and find them."""
    if not is_main_process():
        sync_hosts("first_goes_first")
    try:
        yield
    finally:
        if is_main_process():
            sync_hosts("first_goes_first")


def main_process_only(say: Callable[[str], None]) -> Callable[[str], None]:
    """``say`` on the first host, silence on the others."""
    return say if is_main_process() else lambda text: None


_PATIENCE = 7 * 24 * 3600 * 1000
"""Milliseconds that hosts wait for the first, which may have a vocabulary to train; its death ends them at once."""


def sync_hosts(name: str) -> None:
    """Returns when all hosts are here; at once where there is one."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        barrier = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        barrier(key=f"bert_{name}", timeout_ms=_PATIENCE)
