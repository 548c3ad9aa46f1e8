"""The devices of a run: copies under `jax.pmap`, or a mesh under `jax.jit`. Device axes stay inside this file."""

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
    """What a step and a loop need to know of devices.

    Attributes:
        axis: name of the axis that a body adds over; None where the compiler adds by itself.
        process: (index, count) of this host's share of the rows of every batch, of all shares.
        row_shares: in how many shares the devices divide the rows of a batch.
        steps_in_flight: how many steps may have been started and not waited for.
    """

    axis: str | None
    process: tuple[int, int]
    row_shares: int
    steps_in_flight: int

    def describe(self) -> str:
        """How many devices of which kind, for the log."""
        ...

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        """Raises UserError where a global batch cannot be sharded evenly."""
        ...

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """The body, over all devices."""
        ...

    def put_state(self, tree: Any) -> Any:
        """A state or parameters from the host to the devices, whole on each or each its part: copies, that may be
        donated. It takes the results of `to_host` and of `take_state`."""
        ...

    def to_host(self, tree: Any) -> Any:
        """The result of `put_state` or of a compiled body, as whole NumPy arrays of their own (safe under donation).

        All hosts call it together.
        """
        ...

    def take_state(self, tree: Any) -> Any:
        """As `to_host`, but of an array that no host has all of, each takes its parts: a `jax.Array` in its memory."""
        ...

    def host_sharding(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        """How the hosts have parts of an array of the state in their memory; None if each of them has all of it."""
        ...

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """This host's rows [B, ...] onto its devices; a train step takes micro-batches, an evaluation None."""
        ...

    def gather_rows(self, array: jax.Array) -> np.ndarray:
        """What a compiled body says of each row, [B, ...] of the rows of all hosts."""
        ...


def make_local_parallelism(devices: Sequence[jax.Device] | None = None) -> Parallelism:
    """Returns data parallelism over devices of this host; None means all local devices.

    JAX only maintains `jax.pmap`. To replace it, return ``MeshParallel((len(devices), 1, 1), devices)`` here: a test
    checks that runs give equal results.
    """
    devices = list(local_devices() if devices is None else devices)
    return PmapParallelism(devices)


def make_parallelism(training: TrainingConfig, model: ModelConfig | None = None) -> Parallelism:
    """Returns the mesh of the configuration, or data parallelism over all devices if it has none.

    Several hosts always use a mesh: with pmap, every leaf of the state would be wrapped again at each step
    (`benchmarks/dispatch.py`).

    Raises:
        UserError: the mesh does not fit devices or model.
    """
    if training.mesh is None and jax.process_count() == 1:
        return make_local_parallelism()
    # Use the run's devices: all devices across hosts, or the local devices of a single host.
    devices = jax.devices() if jax.process_count() > 1 else local_devices()
    mesh = MeshParallel(training.mesh_shape or (len(devices), 1, 1), devices)
    if model is not None:
        check_mesh_sizes(mesh.shape, model)
    return mesh


def psum_if_axis(tree: Any, axis: str | None) -> Any:
    """Sums over the devices of an axis; of a mesh (None) the compiler has added already."""
    return tree if axis is None else jax.lax.psum(tree, axis)


def gather_rows_if_axis(tree: Any, axis: str | None) -> Any:
    """The rows [b, ...] of all devices of an axis, [B, ...], on each; of a mesh (None) an array has them already."""
    return tree if axis is None else jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True), tree)


def _evict_pmapped(body: Callable[..., Any]) -> None:
    """Has JAX's cache forget a body. JAX's only public way, `jax.clear_caches`, takes the user's functions as well."""
    cache = getattr(sys.modules.get("jax._src.pmap"), "_cached_shard_map", None)
    evict = getattr(cache, "evict_function", None)
    if evict is not None:
        evict(body)


class PmapParallelism:
    """`jax.pmap`: one copy of the state on each local device, and a share of each batch.

    Args:
        devices: the devices to use; all local ones if None.

    Raises:
        UserError: several hosts take part, and each would train by itself.
    """

    axis: str | None = AXIS
    process = (0, 1)
    steps_in_flight = 2

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        if jax.process_count() > 1:
            raise UserError(f"{jax.process_count()} hosts take part, which takes a mesh: set training.mesh")
        self.devices = list(local_devices() if devices is None else devices)
        self.row_shares = len(self.devices)
        self._sharding = NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(AXIS))

    def describe(self) -> str:
        return f"{len(self.devices)} x {self.devices[0].device_kind}"

    def check_batch(self, name: str, batch_size: int, micro_batches: int = 1) -> None:
        check_shares(name, batch_size, self.row_shares, "devices", micro_batches)

    def compile(self, body: Callable[..., Any], donate: Sequence[int] = ()) -> Callable[..., Any]:
        """The body, run on every device at once; inside it `jax.lax.psum(x, AXIS)` adds over devices.

        What it was compiled to is freed together with the function that is returned.
        """
        compiled = jax.pmap(body, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate))
        # JAX's cache of pmapped functions holds each for good, for its values refer to their keys. On a CPU, a process
        # with the programs of some hundred runs reaches the system's limit of memory maps, and crashes.
        weakref.finalize(compiled, _evict_pmapped, body).atexit = False
        return compiled

    def put_state(self, tree: Any) -> Any:
        """A copy of every array on every device."""

        def copy(leaf: Any) -> jax.Array:
            leaf = np.asarray(leaf)
            return jax.device_put(np.broadcast_to(leaf, (len(self.devices), *leaf.shape)), self._sharding)

        return jax.tree.map(copy, tree)

    def to_host(self, tree: Any) -> Any:
        """The first device's copy of replicated arrays, as NumPy arrays of their own (safe under donation)."""
        shards = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, tree)
        return jax.tree.map(lambda leaf: np.array(leaf, copy=True)[0], jax.device_get(shards))

    def take_state(self, tree: Any) -> Any:
        return self.to_host(tree)

    def host_sharding(self, path: str, shape: Sequence[int]) -> None:
        """One host has all of each array."""

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        """[k, b, ...] on each device with k micro-batches, [b, ...] with None."""

        def put(array: np.ndarray) -> jax.Array:
            shape = (len(self.devices),) if micro_batches is None else (len(self.devices), micro_batches)
            return jax.device_put(array.reshape(*shape, -1, *array.shape[1:]), self._sharding)

        return {name: put(array) for name, array in batch.items()}

    def gather_rows(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array).reshape(-1, *array.shape[2:])


class MeshParallel:
    """`jax.jit` over a mesh: rows, parameters and features are placed by `bert.parallel.sharding.RULES`.

    A body sees whole arrays and needs no axis: the compiler splits the work and adds over devices. Neighbours along
    the last axis are neighbours in ``devices``, so tensor parallelism stays within a host while it can.

    Args:
        shape: devices along data, fsdp and tensor.
        devices: the devices to use, those of a host next to each other; all of them if None.

    Raises:
        UserError: there are more or fewer devices, or the hosts' shares of the rows would differ.
    """

    axis: str | None = None

    def __init__(self, shape: tuple[int, int, int], devices: Sequence[jax.Device] | None = None) -> None:
        devices = jax.devices() if devices is None else list(devices)
        name = "x".join(map(str, shape))
        check_mesh(shape, len(devices))
        self.shape = shape
        self.mesh = Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self.process, self.row_shares = _host_shard(self.mesh, name), shape[0] * shape[1]
        # gloo, which connects CPUs of several hosts, may let two steps wait for each other.
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
        """Compiles `body` over global arrays. State outputs are sharded by the rules in `sharding.py`; everything
        else is replicated."""
        compiled = self._jit(body, donate)
        if self._gloo:
            compiled = _compile_on_all_hosts(compiled)

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled(*arguments)

        return run

    def lower(self, body: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Lowered:
        """The body, ready to be compiled for the devices, from shapes (`jax.ShapeDtypeStruct`) alone.

        The first argument is a state, and the second, where there is one, a batch [k, b, ...].
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
        """Each array on the devices where the table puts it."""

        def put(path: Sequence[Any], leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:  # this host's parts
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

        return jax.tree.map(whole, tree)  # leaf by leaf: a device has room for one whole array, hardly for all

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
        """[k, B / k, ...] with k micro-batches, [B, ...] with None, B the rows of all hosts."""
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
    """The function, run by no host before it is compiled on all: gloo gives them 30 seconds to meet."""
    programs: dict[Any, Callable[..., Any]] = {}

    def run(*arguments: Any) -> Any:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
        if shapes not in programs:
            programs[shapes] = jitted.lower(*arguments).compile()
            sync_hosts("compiled")
        return programs[shapes](*arguments)

    return run


def check_mesh(shape: tuple[int, int, int], count: int) -> None:
    """Raises UserError where a mesh takes more or fewer devices than there are."""
    if math.prod(shape) != count:
        raise UserError(
            f"training.mesh ({'x'.join(map(str, shape))}) takes {math.prod(shape)} devices, and there are {count}: "
            f"choose three numbers whose product is {count}"
        )


def _host_shard(mesh: Mesh, name: str) -> tuple[int, int]:
    """(index, count): which contiguous share of a batch's rows the devices of this host take, of how many."""
    by_rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
    holders = [{device.process_index for device in devices} for devices in by_rows]
    mine = [number for number, hosts in enumerate(holders) if jax.process_index() in hosts]
    if not mine:  # devices that are only compiled for
        return 0, 1
    width = len(mine)
    aligned = mine == list(range(mine[0], mine[0] + width)) and mine[0] % width == 0 and len(holders) % width == 0
    if not aligned:
        raise UserError(
            f"training.mesh ({name}) splits the rows of a batch unevenly over hosts: let its last axis divide the "
            "devices of a host, or be a multiple of them"
        )
    return mine[0] // width, len(holders) // width
