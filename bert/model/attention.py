"""Scaled dot-product attention: written out, as one fused kernel, and over keys and values that are kept.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.mask import Mask
from bert.parallel.sharding import shard_rows_and_heads


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    *,
    dropout: Dropout | None = None,
    dropout_rate: float = 0.0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """softmax(Q K^T / sqrt(H)) V (Vaswani et al. 2017, section 3.2.1).

    Args:
        query: [B, T, N, H].
        key: [B, S, N, H].
        value: [B, S, N, H].
        mask: booleans that broadcast to [B, N, T, S]; true where a query may look at a key. A query that may look
            nowhere attends equally to all positions instead of giving NaN.
        bias: added to the scores; broadcasts to [B, N, T, S].
        dropout: source of dropout on the weights; None for none.
        dropout_rate: its rate.

    Returns:
        The values mixed, [B, T, N, H], and the weights before dropout, [B, N, T, S] float32.
    """
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BTNH,BSNH->BNTS", query * jnp.asarray(scale, query.dtype), key).astype(jnp.float32)
    weights = _softmax(scores, mask, bias)
    dropped = weights.astype(value.dtype)
    if dropout is not None:
        dropped = dropout(dropped, dropout_rate, "attention_probs")
    return jnp.einsum("BNTS,BSNH->BTNH", dropped, value), weights


def cached_attention(
    query: Float[Array, "B T N H"],
    keys: Float[Array, "R H S"],
    values: Float[Array, "R S H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """`dot_product_attention` over keys and values that are kept between calls, without dropout.

    Args:
        query: [B, T, N, H].
        keys: [R, H, S], as `KeysValues` has them, R = B * N.
        values: [R, S, H].
        mask, bias: as of `dot_product_attention`.
    """
    rows, length, heads, size = query.shape
    by_head = jnp.swapaxes(query * jnp.asarray(size**-0.5, query.dtype), 1, 2).reshape(-1, length, size)
    scores = jnp.einsum("RTH,RHS->RTS", by_head, keys).astype(jnp.float32).reshape(rows, heads, length, -1)
    weights = _softmax(scores, mask, bias)
    mixed = jnp.einsum("RTS,RSH->RTH", weights.astype(values.dtype).reshape(rows * heads, length, -1), values)
    return jnp.swapaxes(mixed.reshape(rows, heads, length, size), 1, 2), weights


def _softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "#B #N #T #S"] | None,
    bias: Float[Array, "#B #N #T #S"] | None,
) -> Float[Array, "B N T S"]:
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def fused_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    mask: Mask,
    implementation: str,
) -> Float[Array, "B T N H"]:
    """`dot_product_attention` without its weights and without dropout, as one kernel where there is one.

    Args:
        query: [B, T, N, H].
        key: [B, S, N, H].
        value: [B, S, N, H].
        mask: which keys a query attends to. The result of a query that may look nowhere is finite, and its values
            depend on the implementation.
        implementation: "cudnn", on GPUs and in bfloat16; "splash", on TPUs and for self-attention alone; or their twin
            "xla", which also takes the masks that the kernels cannot do.

    Returns:
        [B, T, N, H].
    """
    if implementation == "splash":
        if splash_takes_mask(mask, query.shape[1], key.shape[1]):
            return splash_attention(query, key, value, mask)
        implementation = "xla"
    arguments = mask.kernel_arguments(query.shape[1], key.shape[1])
    is_odd = query.shape[1] % 2 or key.shape[1] % 2
    if implementation == "cudnn" and is_odd and (mask.bias is not None or "mask" in arguments):
        implementation = "xla"  # cuDNN's backward pass takes these only for an even number of positions
    bias = None if mask.bias is None else mask.bias.astype(query.dtype)  # cuDNN's kernel takes one type
    return jax.nn.dot_product_attention(query, key, value, bias, implementation=cast(Any, implementation), **arguments)


SPLASH_BLOCKS = (512, 384, 256, 128)
"""Positions of a block of the kernel: the first that divides the length, which is rounded up to a multiple of the
last."""


def splash_takes_mask(mask: Mask, num_queries: int, num_keys: int) -> bool:
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
        mask: one that `splash_takes_mask` accepts. Padding attends to padding.
        interpret: run the kernel's program without a TPU, slowly, as tests do.

    Returns:
        [B, T, N, H].
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    length, size = query.shape[1], query.shape[-1]
    filled = -length % SPLASH_BLOCKS[-1]
    segments = _splash_segments(mask)
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
        kernel = _make_splash_kernel(query.shape[1], length + filled, mask, interpret)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        mixed: jax.Array = jax.vmap(kernel)(query, key, value, ids)
        return mixed

    query = query * jnp.asarray(size**-0.5, query.dtype)  # the kernel does not scale
    mixed = shard_rows_and_heads(attend, by_head(query), by_head(key), by_head(value), segments)
    return jnp.swapaxes(mixed, 1, 2)[:, :length]


def _splash_segments(mask: Mask) -> Int[Array, "B T"] | None:
    """Numbers that are equal where a query attends to a key, as far as the content of the rows decides it."""
    if mask.keys is None or mask.examples is None:
        found = mask.examples if mask.keys is None else mask.keys
        return None if found is None else found.astype(jnp.int32)
    return mask.examples.astype(jnp.int32) * mask.keys.astype(jnp.int32)


def _make_splash_kernel(heads: int, length: int, mask: Mask, interpret: bool) -> Callable[..., Any]:
    """The kernel of one row, [N, T, H] queries, keys and values, for the conditions that are the same in all rows."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape, behind = (length, length), 0 if mask.causal else mask.window
    allowed: masks.Mask
    if mask.window is not None:
        allowed = masks.LocalMask(shape, (mask.window, behind), 0)
    else:
        allowed = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    # The kernel that fuses both parts of the backward pass would keep a query's gradient for each block of keys.
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([allowed] * heads),
        block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=False),
        interpret=interpret,
    )


class KeysValues(struct.PyTreeNode):
    """Projected keys and values of an attention layer over S positions.

    R = B * N, the heads of row 0, then those of row 1, and so on. Each head's keys and values are a matrix that a query
    is multiplied by as it is: in any other order a CPU would move them at every step.

    Attributes:
        keys: [R, H, S].
        values: [R, S, H].
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    keys: Array
    values: Array

    @property
    def num_positions(self) -> int:
        """S."""
        return self.values.shape[1]

    @classmethod
    def from_heads(cls, keys: Float[Array, "B S N H"], values: Float[Array, "B S N H"]) -> KeysValues:
        """Of projected keys and values [B, S, N, H]."""
        rows, length, heads, size = keys.shape
        return cls(
            jnp.transpose(keys, (0, 2, 3, 1)).reshape(rows * heads, size, length),
            jnp.transpose(values, (0, 2, 1, 3)).reshape(rows * heads, length, size),
        )

    def split_heads(self, num_rows: int) -> Float[Array, "B S N H"]:
        """The keys as projected, [B, S, N, H], B = ``num_rows``."""
        return jnp.transpose(self.keys.reshape(num_rows, -1, *self.keys.shape[1:]), (0, 3, 1, 2))

    def write(self, new: KeysValues, start: Int[Array, ""] | int | None) -> KeysValues:
        """Puts the keys and values of T positions in place from ``start`` on, from 0 if None.

        ``start`` + T must not exceed S: as in `jax.lax.dynamic_update_slice`, later positions would move back.
        """
        place = 0 if start is None else start
        put = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(
            put(self.keys, new.keys.astype(self.keys.dtype), place, axis=2),
            put(self.values, new.values.astype(self.values.dtype), place, axis=1),
        )

    def take_rows(self, rows: Int[Array, "rows"], num_rows: int) -> KeysValues:
        """The keys and values of some of the B = ``num_rows`` rows, each as often as it is named."""

        def take(x: Array) -> Array:
            return x.reshape(num_rows, -1, *x.shape[1:])[rows].reshape(-1, *x.shape[1:])

        return KeysValues(take(self.keys), take(self.values))


class LayerCache(struct.PyTreeNode):
    """Keys and values that a layer keeps between decoding steps.

    The shapes of ``own`` never change, so that one compiled step serves all positions; with a memory a second one
    serves those after the first.

    Attributes:
        own: keys and values of self-attention, S being the most positions that are ever decoded.
        memory: keys and values of cross-attention; None before the first step, which computes them.
    """

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    own: KeysValues
    memory: KeysValues | None = None


class Memory(struct.PyTreeNode):
    """The input of cross-attention: hidden states [B, S, D], of an encoder for example, and the mask over them."""

    __no_type_check__ = True  # in jax.tree.map a field may be anything

    hidden_states: Array
    mask: Mask = Mask()


def make_cache(config: ModelConfig, num_rows: int, num_positions: int, dtype: DTypeLike) -> tuple[LayerCache, ...]:
    """An empty cache of B rows and S positions for each layer, in the layers' ``dtype``."""
    heads = config.num_attention_heads
    zeros = jnp.zeros((num_rows, num_positions, heads, config.hidden_size // heads), dtype)
    return tuple(LayerCache(KeysValues.from_heads(zeros, zeros)) for _ in range(config.num_hidden_layers))
