"""Where each array of a mesh is placed: one table for parameters and optimizer state, one rule for rows.

A mesh has three axes. ``data`` and ``fsdp`` both deal out the rows of a batch; ``fsdp`` deals out parameters and
optimizer state as well (Rajbhandari et al. 2020, ZeRO stage 3); ``tensor`` deals out heads and feed-forward features,
so that a layer's two matrix products need one sum over devices each (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
"""The axes that deal out the rows of a batch."""

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # end of the path                                      where its dimensions go
    (r"(cross_)?attention/(query|key|value)/kernel", PartitionSpec("fsdp", "tensor")),  # [D, N * H]
    (r"(cross_)?attention/(query|key|value)/bias", PartitionSpec("tensor")),  # [N * H]
    (r"(cross_)?attention/output/kernel", PartitionSpec("tensor", "fsdp")),  # [N * H, D]
    (r"(intermediate|gate)/kernel", PartitionSpec("fsdp", "tensor")),  # [D, F]
    (r"(intermediate|gate)/bias", PartitionSpec("tensor")),  # [F]
    (r"layer_\d+/output/kernel", PartitionSpec("tensor", "fsdp")),  # [F, D]
    (r"word/embedding", PartitionSpec("tensor", "fsdp")),  # [V, D]
    (r"predictions/decoder", PartitionSpec("tensor", "fsdp")),  # [V, D]
    (r"predictions/bias", PartitionSpec("tensor")),  # [V]
    (r"(position|segment)/embedding", PartitionSpec(None, "fsdp")),  # [., D]
    (r"kernel", PartitionSpec("fsdp", None)),  # of pooler and heads: [D, .]
)
"""The first rule that matches holds; what matches none (biases, LayerNorm, counters) is copied to every device.

An axis that does not divide a dimension evenly leaves it whole: BERT's 30,522 tokens are sharded over 2 and 3
devices, not over 4; ``model.vocab_size: 30720`` goes with any power of two up to 2,048.
"""


def partition_spec(path: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Where an array goes.

    Args:
        path: names from the root of the state, joined by slashes; moments end in the path of their parameter.
        shape: of the whole array.
        sizes: devices along each axis of the mesh.
    """
    for pattern, spec in RULES:
        if re.search(rf"(^|/){pattern}$", path):
            return _divisible_spec(spec, shape, sizes)
    return PartitionSpec()


def constrain_state(tree: Any) -> Any:
    """Keeps the arrays of a computation where the table has them; nothing without a mesh, as under pmap."""
    mesh = _mesh()
    if mesh is None:
        return tree

    def keep(path: Sequence[Any], leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, partition_spec(path_str(path), leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(keep, tree)


def constrain_activation(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation [B, ...] to be sharded over the batch axes, and its remaining dimensions over `axes`.

    Left to itself, the compiler may gather activations where it should gather weights. Nothing without a mesh.
    """
    mesh = _mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _divisible_spec(PartitionSpec(BATCH_AXES, *axes), x.shape, mesh.shape))


def all_gather_fsdp(table: jax.Array, *axes: str | None) -> jax.Array:
    """All-gathers a parameter over `fsdp` at its point of use; its dimensions stay sharded along `axes`.

    For tables that are looked up: of a matrix product, the compiler sees by itself that it has to be so.
    """
    mesh = _mesh()
    if mesh is None:
        return table
    return jax.lax.with_sharding_constraint(table, _divisible_spec(PartitionSpec(*axes), table.shape, mesh.shape))


def shard_rows_and_heads(attend: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
    """Runs a kernel that the compiler cannot shard, on each device for its own part.

    Args:
        attend: takes the arrays and returns one [B, N, ...].
        arrays: [B, N, ...] with heads or [B, T] without; the device has a part of the rows, and of the heads.
    """
    mesh = _mesh()
    if mesh is None:
        return attend(*arrays)
    whole = PartitionSpec(BATCH_AXES, "tensor"), PartitionSpec(BATCH_AXES)
    specs = tuple(
        None if array is None else _divisible_spec(whole[array.ndim == 2], array.shape, mesh.shape) for array in arrays
    )
    return jax.shard_map(attend, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def num_row_shards() -> int:
    """Parts that the rows of a batch are in: devices along the batch axes of the mesh, 1 without one, as under pmap."""
    mesh = _mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def path_str(path: Sequence[Any]) -> str:
    """A path of `jax.tree_util` as names joined by slashes."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _divisible_spec(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    def divides(axes: str | tuple[str, ...] | None, length: int) -> bool:
        parts = 1
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            parts *= sizes[axis]
        return length % parts == 0

    return PartitionSpec(*(axes if divides(axes, length) else None for axes, length in zip(spec, shape, strict=False)))


def _mesh() -> jax.sharding.AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES else None
