"""Sharding over a mesh: one table for parameters and optimizer state, and one rule for rows.

A mesh has three axes. ``data`` and ``fsdp`` shard the rows of a batch. ``fsdp`` also shards parameters and optimizer
state (Rajbhandari et al. 2020, ZeRO stage 3). ``tensor`` shards heads and feed-forward features, so attention and the
feed-forward block need one all-reduce each (Shoeybi et al. 2019, section 3).
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
"""Axes that shard the rows of a batch."""

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    # end of the path                                      axes of its dimensions
    (r"(cross_)?attention/(\w*(query|key|value)|position)/kernel", PartitionSpec("fsdp", "tensor")),  # [D, N * H]
    (r"(cross_)?attention/(\w*(query|key|value)/|(content|position|segment)_)bias", PartitionSpec("tensor")),  # [N * H]
    (r"attention/segment", PartitionSpec(None, "tensor")),  # [2, N * H]
    (r"(cross_)?attention/output/kernel", PartitionSpec("tensor", "fsdp")),  # [N * H, D]
    (r"(intermediate|gate)/kernel", PartitionSpec("fsdp", "tensor")),  # [D, F]
    (r"(intermediate|gate)/bias", PartitionSpec("tensor")),  # [F]
    (r"layer_\d+/output/kernel", PartitionSpec("tensor", "fsdp")),  # [F, D]
    (r"convolution/kernel", PartitionSpec(None, "fsdp", None)),  # [., D, D]
    (r"word/embedding", PartitionSpec("tensor", "fsdp")),  # [V, D]
    (r"predictions/decoder", PartitionSpec("tensor", "fsdp")),  # [V, D]
    (r"predictions/bias", PartitionSpec("tensor")),  # [V]
    (r"(position|segment)/embedding", PartitionSpec(None, "fsdp")),  # [., D]
    (r"kernel", PartitionSpec("fsdp", None)),  # pooler and heads: [D, .]
    (r"memory", PartitionSpec(BATCH_AXES)),  # of segment recurrence: [B, .., D]
)
"""Partition rules. The first match applies. Arrays without a rule (biases, LayerNorm, counters) are replicated.

A dimension that is not divisible by an axis is not sharded along it. BERT's 30,522 tokens are sharded over 2 or 3
devices, but not over 4. ``model.vocab_size: 30720`` is divisible by powers of two up to 2,048.
"""


def partition_spec(path: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the partition spec of an array.

    Args:
        path: names from the root of the state, joined by slashes. Paths of moments end in the path of their parameter.
        sizes: number of devices along each axis of the mesh.
    """
    for pattern, spec in RULES:
        if re.search(rf"(^|/){pattern}$", path):
            return _divisible_spec(spec, shape, sizes)
    return PartitionSpec()


def constrain_state(tree: Any) -> Any:
    """Constrains the arrays of a state to their partition specs. Without a mesh (pmap), returns them unchanged."""
    mesh = _mesh()
    if mesh is None:
        return tree

    def keep(path: Sequence[Any], leaf: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(leaf, partition_spec(path_str(path), leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(keep, tree)


def constrain_activation(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains an activation [B, ...] to be sharded over the batch axes, and its other dimensions over ``axes``.

    Otherwise the compiler might gather activations instead of weights. Without a mesh, returns ``x``.
    """
    mesh = _mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _divisible_spec(PartitionSpec(BATCH_AXES, *axes), x.shape, mesh.shape))


def all_gather_fsdp(table: jax.Array, *axes: str | None) -> jax.Array:
    """All-gathers a parameter over ``fsdp`` where it is used. Its dimensions stay sharded along ``axes``.

    Only needed for lookup tables. For matrix products, the compiler inserts the all-gather.
    """
    mesh = _mesh()
    if mesh is None:
        return table
    return jax.lax.with_sharding_constraint(table, _divisible_spec(PartitionSpec(*axes), table.shape, mesh.shape))


def shard_rows_and_heads(attend: Callable[..., jax.Array], *arrays: jax.Array | None) -> jax.Array:
    """Runs a kernel that the compiler cannot shard. Each device computes its rows and heads.

    Args:
        attend: maps the arrays to an array [B, N, ...].
        arrays: [B, N, ...] with heads, or [B, T] without.
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
    """Returns the number of shards of a batch, which is the size of the batch axes; 1 without a mesh (pmap)."""
    mesh = _mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def path_str(path: Sequence[Any]) -> str:
    """Formats a `jax.tree_util` path as names joined by slashes."""
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
