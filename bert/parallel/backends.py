"""Parallelism backends: `jax.pmap`, or `jax.jit` over a mesh. Only this module creates device axes."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bert.config import ModelConfig, TrainingConfig
from bert.config.training import ROW_SHARES, check_mesh_sizes, check_shares
from bert.errors import UserError
from bert.parallel.devices import local_devices
from bert.parallel.multihost import sync_hosts
from bert.parallel.sharding import AXES, BATCH_AXES, constrain_state, partition_spec, path_str

AXIS = "devices"


class Parallelism(Protocol):
    """Device placement and compilation for training and evaluation.

    Attributes:
        axis: name of the device axis for sums in a body; None if the compiler inserts the sums.
        process: (index, count) of this host's share of each batch's rows.
        row_shares: number of shares into which the devices divide the rows of a batch.
        steps_in_flight: maximum number of dispatched steps that have not been awaited.
    """

    axis: str | None
    process: tuple[int, int]
    row_shares: int
    steps_in_flight: int

    def describe(self) -> str:
        """Returns the number and kind of the devices, for the log."""
        ...

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        """Raises UserError if a global batch cannot be divided evenly."""
        ...

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """Compiles the body for all devices."""
        ...

    def put_state(self, tree: Any) -> Any:
        """Copies a state or parameters from the host to the devices, replicated or sharded. The copies may be donated.

        Accepts results of `to_host` and `take_state`.
        """
        ...

    def to_host(self, tree: Any) -> Any:
        """Copies a result of `put_state` or of a compiled body to whole NumPy arrays, which stay valid after donation.

        All hosts must call it.
        """
        ...

    def take_state(self, tree: Any) -> Any:
        """Like `to_host`, but arrays sharded across hosts stay sharded, as `jax.Array` in host memory."""
        ...

    def host_sharding(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        """Returns the sharding across hosts of an array from `take_state`; None if each host has the whole array."""
        ...

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """Copies this host's rows [B, ...] to its devices. ``micro_batches`` is None for evaluation."""
        ...

    def gather_rows(self, array: jax.Array) -> np.ndarray:
        """Gathers the output of a compiled body for the rows of all hosts, [B, ...]."""
        ...


def make_local_parallelism(devices: Sequence[jax.Device] | None = None) -> Parallelism:
    """Returns data parallelism over devices of this host; None for all local devices.

    `jax.pmap` is in maintenance mode. To replace it, return ``MeshParallel((len(devices), 1, 1), devices)`` here. A
    test checks that both give equal results.
    """
    devices = list(local_devices() if devices is None else devices)
    return PmapParallelism(devices)


def make_parallelism(training: TrainingConfig, model: ModelConfig | None = None) -> Parallelism:
    """Returns the configured mesh, or data parallelism over all devices if there is none.

    Several hosts always use a mesh, because pmap would wrap every leaf of the state again at each step
    (`benchmarks/dispatch.py`).

    Raises:
        UserError: the mesh does not match the devices or the model.
    """
    if training.mesh is None and jax.process_count() == 1:
        return make_local_parallelism()
    # All devices across hosts, or the local devices of a single host.
    devices = jax.devices() if jax.process_count() > 1 else local_devices()
    mesh = MeshParallel(training.mesh_shape or (len(devices), 1, 1), devices)
    if model is not None:
        check_mesh_sizes(mesh.shape, model)
    return mesh


def psum_if_axis(tree: Any, axis: str | None) -> Any:
    """Sums over the device axis. With a mesh (None), the compiler has already inserted the sum."""
    return tree if axis is None else jax.lax.psum(tree, axis)


def gather_rows_if_axis(tree: Any, axis: str | None) -> Any:
    """Gathers the rows [b, ...] of all devices to [B, ...]. With a mesh (None), arrays are already global."""
    return tree if axis is None else jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True), tree)


def _evict_pmapped(body: Callable[..., Any]) -> None:
    """Removes a body from JAX's cache. The public `jax.clear_caches` would also remove functions of the user."""
    cache = getattr(sys.modules.get("jax._src.pmap"), "_cached_shard_map", None)
    evict = getattr(cache, "evict_function", None)
    if evict is not None:
        evict(body)


class PmapParallelism:
    """`jax.pmap`: each local device has a copy of the state and a share of each batch.

    Args:
        devices: devices to use; None for all local devices.

    Raises:
        UserError: there are several hosts, which would all train separately.
    """

    axis: str | None = AXIS
    process = (0, 1)
    steps_in_flight = 2

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        if jax.process_count() > 1:
            raise UserError(f"{jax.process_count()} hosts take part, but pmap uses one: set training.mesh")
        self.devices = list(local_devices() if devices is None else devices)
        self.row_shares = len(self.devices)
        self._sharding = NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(AXIS))

    def describe(self) -> str:
        return f"{len(self.devices)} x {self.devices[0].device_kind}"

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        check_shares(name, batch_size, self.row_shares, "devices", micro_batches)

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """Compiles the body for every device; `jax.lax.psum(x, AXIS)` sums over devices.

        The compiled program is freed together with the returned function.
        """
        compiled = jax.pmap(body, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate))
        # JAX's cache never frees pmapped functions, because its values refer to their keys. On a CPU, a process with
        # the programs of several hundred runs would exceed the system's limit of memory maps and crash.
        weakref.finalize(compiled, _evict_pmapped, body).atexit = False
        return compiled

    def put_state(self, tree: Any) -> Any:
        """Copies every array to every device."""

        def copy(leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            return jax.device_put(np.broadcast_to(leaf, (len(self.devices), *leaf.shape)), self._sharding)

        return jax.tree.map(copy, tree)

    def to_host(self, tree: Any) -> Any:
        """Copies replicated arrays from the first device to NumPy arrays, which stay valid after donation."""
        shards = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree)
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True)[0], jax.device_get(shards))

    def take_state(self, tree: Any) -> Any:
        return self.to_host(tree)

    def host_sharding(self, path: str, shape: Sequence[int]) -> None:
        """Returns None: the only host has the whole array."""

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """Returns [k, b, ...] per device with k micro-batches, or [b, ...] if None."""

        def put(array: np.ndarray) -> jax.Array:
            shape = (len(self.devices),) if micro_batches is None else (len(self.devices), micro_batches)
            return jax.device_put(array.reshape(*shape, -1, *array.shape[1:]), self._sharding)

        return {name: put(array) for name, array in batch.items()}

    def gather_rows(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array).reshape(-1, *array.shape[2:])


class MeshParallel:
    """`jax.jit` over a mesh. Rows, parameters and features are sharded by `bert.parallel.sharding.RULES`.

    A body computes with global arrays and needs no axis, because the compiler distributes the work and inserts the
    sums. Neighbours along the last mesh axis are neighbours in ``devices``, so tensor parallelism stays within a host
    if possible.

    Args:
        shape: number of devices along data, fsdp and tensor.
        devices: devices to use, grouped by host; None for all devices.

    Raises:
        UserError: the number of devices differs, or the hosts would have unequal shares of the rows.
    """

    axis: str | None = None

    def __init__(self, shape: tuple[int, int, int], devices: Sequence[jax.Device] | None = None) -> None:
        devices = jax.devices() if devices is None else list(devices)
        name = "x".join(map(str, shape))
        check_mesh(shape, len(devices))
        self.shape = shape
        self.mesh = Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self.process, self.row_shares = _host_shard(self.mesh, name), shape[0] * shape[1]
        # With gloo, which connects CPUs of several hosts, two concurrent steps may deadlock.
        self._gloo = jax.process_count() > 1 and devices[0].platform == "cpu"
        self.steps_in_flight = 0 if self._gloo else 2

    def describe(self) -> str:
        devices = self.mesh.devices.flat
        hosts = len({device.process_index for device in devices})
        return (
            f"{self.mesh.size} x {devices[0].device_kind}"
            + (f" on {hosts} hosts" if hosts > 1 else "")
            + ", mesh "
            + " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
        )

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        check_shares(name, batch_size, self.row_shares, ROW_SHARES, micro_batches)

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """Compiles `body` over global arrays. Outputs are sharded by the rules in `sharding.py`, or replicated."""
        compiled = self._jit(body, donate)
        if self._gloo:
            compiled = _compile_on_all_hosts(compiled)

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled(*arguments)

        return run

    def lower(self, body: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Lowered:
        """Lowers the body for the devices, given shapes (`jax.ShapeDtypeStruct`).

        The first argument is a state. The optional second argument is a batch [k, b, ...].
        """
        state, *batches = arguments
        placed = [
            jax.tree_util.tree_map_with_path(
                lambda path, leaf: self._abstract(leaf, self._sharding_for(path, leaf)), state
            )
        ]
        rows = NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))
        placed += [jax.tree.map(lambda leaf: self._abstract(leaf, rows), batch) for batch in batches]
        with jax.set_mesh(self.mesh):
            return self._jit(body, donate).lower(*placed)

    def put_state(self, tree: Any) -> Any:
        """Copies each array to the devices, sharded by the partition rules."""

        def put(path: Sequence[Any], leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # this host's shards
                return jax.device_put(leaf, self._sharding_for(path, leaf))
            leaf = np.asarray(leaf)
            return jax.make_array_from_callback(leaf.shape, self._sharding_for(path, leaf), lambda part: leaf[part])

        return jax.tree_util.tree_map_with_path(put, tree)

    def to_host(self, tree: Any) -> Any:
        def whole(leaf: jax.Array) -> np.ndarray:
            if leaf.is_fully_replicated:
                leaf = leaf.addressable_data(0)
            elif not leaf.is_fully_addressable:
                leaf = multihost_utils.process_allgather(leaf, tiled=True)
            return np.array(leaf, copy=True)

        return jax.tree.map(whole, tree)  # leaf by leaf: all whole arrays may not fit on a device

    def take_state(self, tree: Any) -> Any:
        def take(path: Sequence[Any], leaf: jax.Array) -> Any:
            sharding = self.host_sharding(path_str(path), leaf.shape)
            if sharding is not None:
                return jax.device_put(leaf, sharding)
            whole = np.empty(leaf.shape, leaf.dtype)
            for shard in {str(shard.index): shard for shard in leaf.addressable_shards}.values():
                whole[shard.index] = shard.data
            return whole

        return jax.tree_util.tree_map_with_path(take, tree)

    def host_sharding(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        sharding = NamedSharding(self.mesh, partition_spec(path, shape, self.mesh.shape))
        parts = set(map(str, sharding.addressable_devices_indices_map(tuple(shape)).values()))
        part_size = math.prod(sharding.shard_shape(tuple(shape)))
        return None if len(parts) * part_size == math.prod(shape) else sharding.with_memory_kind("pinned_host")

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """Returns [k, B / k, ...] with k micro-batches, or [B, ...] if None. B counts the rows of all hosts."""
        spec = PartitionSpec(BATCH_AXES) if micro_batches is None else PartitionSpec(None, BATCH_AXES)
        sharding = NamedSharding(self.mesh, spec)

        def put(array: np.ndarray) -> jax.Array:
            if micro_batches is not None:
                array = array.reshape(micro_batches, -1, *array.shape[1:])
            return jax.make_array_from_process_local_data(sharding, array)

        return {name: put(array) for name, array in batch.items()}

    def gather_rows(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array.addressable_data(0))

    def _jit(self, body: Callable[..., Any], donate: Sequence[int]) -> Any:
        return jax.jit(lambda *arguments: constrain_state(body(*arguments)), donate_argnums=tuple(donate))

    def _sharding_for(self, path: Sequence[Any], leaf: Any) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(path_str(path), leaf.shape, self.mesh.shape))

    @staticmethod
    def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _compile_on_all_hosts(jitted: Any) -> Callable[..., Any]:
    """Delays the first run of a function until all hosts have compiled it, because gloo times out after 30 seconds."""
    programs: dict[Any, Callable[..., Any]] = {}

    def run(*arguments: Any) -> Any:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
        if shapes not in programs:
            programs[shapes] = jitted.lower(*arguments).compile()
            sync_hosts("compiled")
        return programs[shapes](*arguments)

    return run


def check_mesh(shape: tuple[int, int, int], count: int) -> None:
    """Raises UserError if the size of a mesh differs from the number of devices."""
    if math.prod(shape) != count:
        raise UserError(
            f"training.mesh ({'x'.join(map(str, shape))}) needs {math.prod(shape)} devices, but there are {count}: "
            f"choose three numbers whose product is {count}"
        )


def _host_shard(mesh: Mesh, name: str) -> tuple[int, int]:
    """Returns (index, count) of this host's contiguous share of a batch's rows."""
    by_rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
    holders = [{device.process_index for device in devices} for devices in by_rows]
    mine = [number for number, hosts in enumerate(holders) if jax.process_index() in hosts]
    if not mine:  # compiled for devices that are not present
        return 0, 1
    width = len(mine)
    aligned = mine == list(range(mine[0], mine[0] + width)) and mine[0] % width == 0 and len(holders) % width == 0
    if not aligned:
        raise UserError(
            f"training.mesh ({name}) splits the rows of a batch unevenly over hosts: use a last axis that divides "
            "the devices of a host, or a multiple of them"
        )
    return mine[0] // width, len(holders) // width
