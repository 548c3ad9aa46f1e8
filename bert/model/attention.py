"""Scaled dot-product attention: explicit, with fused kernels, and over cached keys and values.

Shapes as in `bert.model.encoder`; M heads of keys and values, each of which serves N / M heads of queries.
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
    key: Float[Array, "B S M H"],
    value: Float[Array, "B S M H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    *,
    dropout: Dropout | None = None,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Computes softmax(Q K^T / sqrt(H)) V (Vaswani et al. 2017, section 3.2.1).

    Args:
        mask: true where a query attends to a key. A fully masked query attends equally to all positions and does not
            give NaN.
        softcap: limit of the scores before ``bias`` is added; None for none.

    Returns:
        The weighted sums of values, [B, T, N, H], and the weights before dropout, [B, N, T, S] float32.
    """
    scale = query.shape[-1] ** -0.5
    key, value = (_for_all_heads(x, query.shape[2]) for x in (key, value))
    scores = jnp.einsum("BTNH,BSNH->BNTS", query * jnp.asarray(scale, query.dtype), key).astype(jnp.float32)
    weights = _softmax(scores, mask, bias, softcap)
    dropped = weights.astype(value.dtype)
    if dropout is not None:
        dropped = dropout(dropped, dropout_rate, "attention_probs")
    return jnp.einsum("BNTS,BSNH->BTNH", dropped, value), weights


def _for_all_heads(x: Float[Array, "B S M H"], heads: int) -> Float[Array, "B S N H"]:
    """Repeats each head of keys or values for the heads of queries that it serves."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def cached_attention(
    query: Float[Array, "B T N H"],
    keys: Float[Array, "R H S"],
    values: Float[Array, "R S H"],
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Computes `dot_product_attention` over cached `KeysValues`, without dropout.

    Consecutive heads of queries that share keys are merged into one matrix.
    """
    rows, length, heads, size = query.shape
    by_head = jnp.swapaxes(query * jnp.asarray(size**-0.5, query.dtype), 1, 2)
    by_head = by_head.reshape(len(keys), rows * heads // len(keys) * length, size)
    scores = jnp.einsum("RTH,RHS->RTS", by_head, keys).astype(jnp.float32).reshape(rows, heads, length, -1)
    weights = _softmax(scores, mask, bias, softcap)
    merged = weights.astype(values.dtype).reshape(*by_head.shape[:2], -1)
    mixed = jnp.einsum("RTS,RSH->RTH", merged, values)
    return jnp.swapaxes(mixed.reshape(rows, heads, length, size), 1, 2), weights


def _softmax(
    scores: Float[Array, "B N T S"],
    mask: Bool[Array, "#B #N #T #S"] | None,
    bias: Float[Array, "#B #N #T #S"] | None,
    softcap: float | None = None,
) -> Float[Array, "B N T S"]:
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores, axis=-1)


def fused_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S M H"],
    value: Float[Array, "B S M H"],
    mask: Mask,
    implementation: str,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Computes `dot_product_attention` with a fused kernel, which has no dropout and returns no weights.

    Args:
        mask: which keys a query attends to. The result for a fully masked query is finite but depends on the kernel.
        implementation: "cudnn" (GPUs, bfloat16), "splash" (TPUs, self-attention) or "xla". Masks that the first two do
            not support use "xla".
        softcap: see `dot_product_attention`. cuDNN does not support it, and XLA compiles the explicit computation.
    """
    if implementation == "splash":
        if splash_supports(mask, query.shape[1], key.shape[1]):
            return splash_attention(query, key, value, mask, softcap)
        implementation = "xla"
    if softcap is not None:
        pairs = mask.booleans(query.shape[1], key.shape[1])
        return dot_product_attention(query, key, value, pairs, mask.bias, softcap=softcap)[0]
    arguments = mask.kernel_arguments(query.shape[1], key.shape[1])
    is_odd = query.shape[1] % 2 or key.shape[1] % 2
    if implementation == "cudnn" and is_odd and (mask.bias is not None or "mask" in arguments):
        implementation = "xla"  # cuDNN's backward pass supports these only for even lengths
    bias = None if mask.bias is None else mask.bias.astype(query.dtype)  # cuDNN requires one dtype
    return jax.nn.dot_product_attention(query, key, value, bias, implementation=cast(Any, implementation), **arguments)


SPLASH_BLOCKS = (512, 384, 256, 128)
"""Candidate block sizes in positions. Lengths are padded to a multiple of the last; the first divisor is used."""


def splash_supports(mask: Mask, num_queries: int, num_keys: int) -> bool:
    """Whether splash attention supports a mask: self-attention with padding, packed, causal or local masks."""
    unsupported = (mask.pairs, mask.bias, mask.positions, mask.start, mask.global_tokens)
    return num_queries == num_keys and all(condition is None for condition in unsupported)


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T M H"],
    value: Float[Array, "B T M H"],
    mask: Mask,
    softcap: float | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes `fused_attention` with JAX's Pallas kernel for TPUs. Each device computes its rows and heads.

    The kernel skips blocks that a local or causal mask excludes, and does not store the scores.

    Args:
        mask: a mask that `splash_supports` accepts. Padding attends to padding.
        interpret: run the kernel without a TPU, slowly, for tests.
    """
    # Imported here because importing Pallas is slow.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    length, size = query.shape[1], query.shape[-1]
    key, value = (_for_all_heads(x, query.shape[2]) for x in (key, value))
    padding = -length % SPLASH_BLOCKS[-1]
    segments = _splash_segments(mask)
    if segments is None and padding:
        segments = jnp.ones(query.shape[:2], jnp.int32)
    if segments is not None:
        segments = jnp.pad(segments, [(0, 0), (0, padding)])

    def by_head(x: Float[Array, "B T N H"]) -> Float[Array, "B N S H"]:
        return jnp.swapaxes(jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)]), 1, 2)

    def attend(
        query: Float[Array, "B N S H"],
        key: Float[Array, "B N S H"],
        value: Float[Array, "B N S H"],
        segments: Int[Array, "B S"] | None,
    ) -> Float[Array, "B N S H"]:
        kernel = _make_splash_kernel(query.shape[1], length + padding, mask, softcap, interpret)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        mixed: jax.Array = jax.vmap(kernel)(query, key, value, ids)
        return mixed

    query = query * jnp.asarray(size**-0.5, query.dtype)  # the kernel does not scale
    mixed = shard_rows_and_heads(attend, by_head(query), by_head(key), by_head(value), segments)
    return jnp.swapaxes(mixed, 1, 2)[:, :length]


def _splash_segments(mask: Mask) -> Int[Array, "B T"] | None:
    """Returns segment ids: a query attends only to keys of the same segment. None if all keys are visible."""
    if mask.keys is None or mask.examples is None:
        segments = mask.examples if mask.keys is None else mask.keys
        return None if segments is None else segments.astype(jnp.int32)
    return mask.examples.astype(jnp.int32) * mask.keys.astype(jnp.int32)


def _make_splash_kernel(
    heads: int, length: int, mask: Mask, softcap: float | None, interpret: bool
) -> Callable[..., Any]:
    """Returns the kernel for one row of queries, keys and values [N, T, H], with the local or causal mask built in."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape, behind = (length, length), 0 if mask.causal else mask.window
    allowed: masks.Mask
    if mask.window is not None:
        allowed = masks.LocalMask(shape, (mask.window, behind), 0)
    else:
        allowed = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    # The fused backward kernel would store a gradient of the queries for every block of keys.
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    return kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([allowed] * heads),
        block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=False),
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )


class KeysValues(struct.PyTreeNode):
    """Projected keys and values of an attention layer over S positions.

    The first axis has R = B * M entries: the heads of row 0, then the heads of row 1, and so on. The matrices are
    stored in the orientation of the products with queries and weights, which saves a CPU one copy per step.

    Attributes:
        keys: [R, H, S].
        values: [R, S, H].
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    keys: Array
    values: Array

    @property
    def num_positions(self) -> int:
        """S, the number of positions."""
        return self.values.shape[1]

    @classmethod
    def from_heads(cls, keys: Float[Array, "B S M H"], values: Float[Array, "B S M H"]) -> KeysValues:
        """Makes the cache layout from projected keys and values [B, S, M, H]."""
        rows, length, heads, size = keys.shape
        return cls(
            jnp.transpose(keys, (0, 2, 3, 1)).reshape(rows * heads, size, length),
            jnp.transpose(values, (0, 2, 1, 3)).reshape(rows * heads, length, size),
        )

    def split_heads(self, num_rows: int) -> Float[Array, "B S M H"]:
        """Returns the keys in their projected layout, [B, S, M, H] with B = ``num_rows``."""
        return jnp.transpose(self.keys.reshape(num_rows, -1, *self.keys.shape[1:]), (0, 3, 1, 2))

    def write(self, new: KeysValues, start: Int[Array, ""] | int | None) -> KeysValues:
        """Returns a copy with T new positions written at ``start`` (None: 0).

        ``start`` + T must not exceed S, because `jax.lax.dynamic_update_slice` clamps the start index.
        """
        start = 0 if start is None else start
        update = jax.lax.dynamic_update_slice_in_dim
        return KeysValues(
            update(self.keys, new.keys.astype(self.keys.dtype), start, axis=2),
            update(self.values, new.values.astype(self.values.dtype), start, axis=1),
        )

    def take_rows(self, rows: Int[Array, "rows"], num_rows: int) -> KeysValues:
        """Selects rows, which may repeat, from B = ``num_rows`` rows."""

        def take(x: Array) -> Array:
            return x.reshape(num_rows, -1, *x.shape[1:])[rows].reshape(-1, *x.shape[1:])

        return KeysValues(take(self.keys), take(self.values))


class LayerCache(struct.PyTreeNode):
    """Keys and values that a layer keeps between decoding steps.

    The shapes of ``own`` never change, so one compiled step serves all positions. With a memory there are two compiled
    steps: the first one and all later ones.

    Attributes:
        own: keys and values of self-attention; S is the maximum number of positions.
        memory: keys and values of cross-attention; None before the first step, which computes them.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    own: KeysValues
    memory: KeysValues | None = None


class Memory(struct.PyTreeNode):
    """Input of cross-attention.

    Attributes:
        hidden_states: [B, S, D], usually of an encoder.
        mask: the mask over them.
        token_ids: [B, S], the tokens of the source; None without `bert.model.copying.CopyAttention`.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    hidden_states: Array
    mask: Mask = Mask()
    token_ids: Array | None = None


def make_cache(config: ModelConfig, num_rows: int, num_positions: int, dtype: DTypeLike) -> tuple[LayerCache, ...]:
    """Returns an empty cache for each layer, with B rows and S positions."""
    zeros = jnp.zeros((num_rows, num_positions, config.key_value_heads, config.head_size), dtype)
    return tuple(LayerCache(KeysValues.from_heads(zeros, zeros)) for _ in range(config.num_hidden_layers))
