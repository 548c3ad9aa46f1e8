"""Data parallelism over the local devices through `jax.pmap`. All leading device axes stay inside this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert.config import UserError

AXIS = "devices"


class DataParallel:
    """One copy of the state on each device, and a share of each batch.

    Args:
        devices: the devices to use; all local ones if None.

    Raises:
        UserError: several hosts take part.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        if jax.process_count() > 1:
            raise UserError(f"{jax.process_count()} hosts take part, but training runs on the devices of one so far")
        self.devices = list(jax.local_devices() if devices is None else devices)
        self._sharding = NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(AXIS))

    def describe(self) -> str:
        """How many devices of which kind, for the log."""
        return f"{len(self.devices)} x {self.devices[0].device_kind}"

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        """Raises UserError where a global batch cannot be dealt out evenly."""
        parts = len(self.devices) * micro_batches
        if batch_size % parts:
            lower, upper = batch_size // parts * parts, -(-batch_size // parts) * parts
            nearest = f"{lower} or {upper}" if lower else str(upper)
            raise UserError(
                f"{name} ({batch_size}) is not divisible by {len(self.devices)} devices x "
                f"{micro_batches} micro-batches: take {nearest}"
            )

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """The body, run on every device at once; inside it `jax.lax.psum(x, AXIS)` adds over devices."""
        return jax.pmap(body, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate))

    def replicate(self, tree: Any) -> Any:
        """A copy of every array on every device."""

        def copy(leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            return jax.device_put(np.broadcast_to(leaf, (len(self.devices), *leaf.shape)), self._sharding)

        return jax.tree.map(copy, tree)

    def fetch(self, tree: Any) -> Any:
        """The first device's copy of replicated arrays, as NumPy arrays of their own (safe under donation)."""
        shards = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree)
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True)[0], jax.device_get(shards))

    def place(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """This host's rows [B, ...] onto its devices: [k, b, ...] each with k micro-batches, [b, ...] with None."""

        def put(array: np.ndarray) -> jax.Array:
            shape = (len(self.devices),) if micro_batches is None else (len(self.devices), micro_batches)
            return jax.device_put(array.reshape(*shape, -1, *array.shape[1:]), self._sharding)

        return {name: put(array) for name, array in batch.items()}

    def gather(self, array: jax.Array) -> np.ndarray:
        """Per-device results [b, ...] back to this host's rows [B, ...]."""
        return np.asarray(array).reshape(-1, *array.shape[2:])
