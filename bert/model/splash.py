"""Attention by JAX's Pallas kernel for TPUs, "splash" attention: it leaves out the blocks that a window or a causal
mask forbids, and never writes its scores. Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Float, Int

from bert.model.array_types import Array
from bert.model.mask import Mask
from bert.parallel.sharding import shard_rows_and_heads

BLOCKS = (512, 384, 256, 128)
"""Positions of a block of the kernel: the first that divides the length, which is rounded up to a multiple of the
last."""


def takes_mask(mask: Mask, num_queries: int, num_keys: int) -> bool:
    """Whether the kernel can do a mask: self-attention over whole rows, by padding, examples, order or a window."""
    own = (mask.pairs, mask.bias, mask.positions, mask.start)
    return num_queries == num_keys and all(part is None for part in own)


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N H"],
    mask: Mask,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """`bert.model.attention.fused_attention` by the kernel, on each device for its own rows and heads.

    Args:
        query: [B, T, N, H].
        key: [B, T, N, H].
        value: [B, T, N, H].
        mask: one that `takes_mask` accepts. Padding attends to padding.
        interpret: run the kernel's program without a TPU, slowly, as tests do.

    Returns:
        [B, T, N, H].
    """
    length, size = query.shape[1], query.shape[-1]
    filled = -length % BLOCKS[-1]
    segments = _segments(mask)
    if segments is None and filled:
        segments = jnp.ones(query.shape[:2], jnp.int32)
    if segments is not None:
        segments = jnp.pad(segments, [(0, 0), (0, filled)])

    def by_head(x: Float[Array, "B T N H"]) -> Float[Array, "B N S H"]:
        return jnp.swapaxes(jnp.pad(x, [(0, 0), (0, filled), (0, 0), (0, 0)]), 1, 2)

    def attend(
        query: Float[Array, "B N S H"],
        key: Float[Array, "B N S H"],
        value: Float[Array, "B N S H"],
        segments: Int[Array, "B S"] | None,
    ) -> Float[Array, "B N S H"]:
        kernel = _make_kernel(query.shape[1], length + filled, mask, interpret)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        mixed: jax.Array = jax.vmap(kernel)(query, key, value, ids)
        return mixed

    query = query * jnp.asarray(size**-0.5, query.dtype)  # the kernel does not scale
    mixed = shard_rows_and_heads(attend, by_head(query), by_head(key), by_head(value), segments)
    return jnp.swapaxes(mixed, 1, 2)[:, :length]


def _segments(mask: Mask) -> Int[Array, "B T"] | None:
    """Numbers that are equal where a query attends to a key, as far as the content of the rows decides it."""
    if mask.keys is None or mask.examples is None:
        found = mask.examples if mask.keys is None else mask.keys
        return None if found is None else found.astype(jnp.int32)
    return mask.examples.astype(jnp.int32) * mask.keys.astype(jnp.int32)


def _make_kernel(heads: int, length: int, mask: Mask, interpret: bool) -> Callable[..., Any]:
    """The kernel of one row, [N, T, H] queries, keys and values, for the conditions that are the same in all rows."""
    shape, behind = (length, length), 0 if mask.causal else mask.window
    allowed: masks.Mask
    if mask.window is not None:
        allowed = masks.LocalMask(shape, (mask.window, behind), 0)
    else:
        allowed = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    block = next(size for size in BLOCKS if length % size == 0)
    # The kernel that fuses both parts of the backward pass would keep a query's gradient for each block of keys.
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([allowed] * heads),
        block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=False),
        interpret=interpret,
    )
