"""Coordination of several hosts in one run. The main process (the first host) decides and writes.

All hosts run the same program. With a single host, these functions add nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from bert.errors import Log, UserError

Value = TypeVar("Value")


def is_multihost() -> bool:
    """Whether there is more than one host."""
    return jax.process_count() > 1


def is_main_process() -> bool:
    """Whether this is the host that writes files and logs."""
    return jax.process_index() == 0


def broadcast_from_main(make: Callable[[], Any]) -> Any:
    """Calls ``make`` on the main process only, and returns its value on all hosts. The value must be valid JSON.

    Raises:
        UserError: raised on all hosts if the main process raised it.
    """
    return call_on_main(make, lambda value: value)[1]


def call_on_main(make: Callable[[], Value], summarize: Callable[[Value], Any]) -> tuple[Value | None, Any]:
    """Calls ``make`` on the main process only.

    Returns:
        The value on the main process and None on the others, and ``summarize(value)`` on all hosts, which must be valid
        JSON.

    Raises:
        UserError: raised on all hosts if the main process raised it.
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
    """Concatenates the arrays [R, ...] of all hosts, in the order of the hosts. All hosts must call it."""
    if not is_multihost():
        return array
    # Gathered as bytes, because JAX would convert int64 to int32.
    rows = multihost_utils.process_allgather(np.ascontiguousarray(array).view(np.uint8), tiled=True)
    return np.ascontiguousarray(rows, np.uint8).view(array.dtype)


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block on the main process first. The other hosts start when it has finished, and can read its files."""
    if not is_main_process():
        sync_hosts("first_goes_first")
    try:
        yield
    finally:
        if is_main_process():
            sync_hosts("first_goes_first")


def main_process_only(log: Log) -> Log:
    """Returns ``log`` on the main process, and a function that does nothing on other hosts."""
    return log if is_main_process() else lambda text: None


_PATIENCE = 7 * 24 * 3600 * 1000
"""Timeout in milliseconds for the main process, which may train a vocabulary. If it dies, hosts stop at once."""


def sync_hosts(name: str) -> None:
    """Waits until all hosts have called it."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost

        barrier = multihost.get_barrier_sync_fn(processes=set(range(jax.process_count())))
        barrier(key=f"bert_{name}", timeout_ms=_PATIENCE)
