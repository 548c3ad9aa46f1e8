"""Linear layers, normalization, activations and low-rank adapters, with initializers and backward passes for CPUs.

XLA has two weak points on a CPU. It sums the columns of a matrix of vocabulary width as slowly as it multiplies by the
matrix. It uses the processor's bfloat16 instructions only if the result is float32 and no operand is transposed. The
custom backward passes avoid both and compute the same sums, with fewer roundings in bfloat16. They are
`jax.custom_vjp` functions, which do not support forward mode (`jax.jvp`, `jax.hessian`). Other backends use JAX's own
rules; ``BERT_NO_CUSTOM_VJP=1`` selects these on a CPU, too.

Adapters (LoRA; Hu et al. 2021, section 4.1) are functions of parameters, independent of modules. A kernel W [D, F]
with an adapter becomes W + scale * A B, with A [D, r] and B [r, F]. In a tree of trained parameters, ``lora_a`` and
``lora_b`` replace ``kernel``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from bert.config import ModelConfig
from bert.model.array_types import Array, Dtype
from bert.model.parameters import Params

P = ParamSpec("P")
R = TypeVar("R")

LINEAR_OUTPUT = "linear"
"""Checkpoint name of the outputs of linear layers, for the policies of `jax.checkpoint`."""


def truncated_normal_init(config: ModelConfig, scale: float = 1.0) -> nn.initializers.Initializer:
    """Returns a truncated normal initializer, cut at two standard deviations as in TensorFlow.

    The standard deviation before truncation is ``scale`` times ``initializer_range``.
    """
    stddev = scale * config.initializer_range

    def init(key: Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


class Dense(nn.Module):
    """A linear layer with the parameters of `flax.linen.Dense`."""

    features: int
    kernel_init: nn.initializers.Initializer
    dtype: Dtype = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch features"]:
        """[..., I] -> [..., features]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = jnp.zeros(self.features)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return checkpoint_name(linear(x, kernel, bias, jnp.dtype(self.dtype)), LINEAR_OUTPUT)


def dense(config: ModelConfig, features: int, dtype: Dtype, name: str, use_bias: bool = True) -> Dense:
    """Returns a linear layer with BERT's initialization, for the outputs of a head."""
    return Dense(features, truncated_normal_init(config), dtype, use_bias, name=name)


def hidden_dense(config: ModelConfig, features: int, dtype: Dtype, name: str, bias: str = "use_bias") -> Dense:
    """Returns a linear layer inside the model, with a bias if the key ``bias`` or its default ``use_bias`` is true."""
    return dense(config, features, dtype, name, config.has_bias(bias))


def residual_dense(config: ModelConfig, dtype: Dtype, name: str, bias: str) -> Dense:
    """Returns a linear layer whose D outputs are added to the residual stream. Bias: see `hidden_dense`.

    With scaled initialization, the variance of the sum over two sublayers per layer does not depend on the number of
    layers (Radford et al. 2019, section 2.3).
    """
    scale = (2 * config.num_hidden_layers) ** -0.5 if config.residual_init == "scaled" else 1.0
    return Dense(config.hidden_size, truncated_normal_init(config, scale), dtype, config.has_bias(bias), name=name)


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, with statistics in float32.

    Attributes:
        subtract_mean: false for RMSNorm (Zhang and Sennrich 2019).
        offset: added to the parameter ``scale``, which is 1 - offset initially.
    """

    epsilon: float
    dtype: Dtype = jnp.float32
    subtract_mean: bool = True
    use_bias: bool = True
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), (x.shape[-1],), jnp.float32)
        if self.offset:
            scale = self.offset + scale
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True) if self.subtract_mean else x
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.epsilon) * scale
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return y.astype(self.dtype)


def layer_norm(config: ModelConfig, dtype: Dtype, name: str) -> LayerNorm:
    """Returns the normalization layer that the configuration selects."""
    kind = config.norm_type
    offset = 1.0 if kind == "rms_plus_one" else 0.0
    return LayerNorm(config.layer_norm_eps, dtype, kind == "layer", config.norm_bias, offset, name=name)


class Transform(nn.Module):
    """A linear layer, the model's activation and LayerNorm, as in the pooler of ModernBERT."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*places D"]) -> Float[Array, "*places D"]:
        """[..., D] -> [..., D]."""
        x = hidden_dense(self.config, self.config.hidden_size, self.dtype, "dense")(x)
        return layer_norm(self.config, self.dtype, "norm")(ACTIVATIONS[self.config.hidden_act](x))


def uses_custom_vjp() -> bool:
    """Whether functions traced from now on use the custom backward passes for CPUs.

    True if JAX's default backend is a CPU and the environment variable BERT_NO_CUSTOM_VJP is not 1.
    """
    return jax.default_backend() == "cpu" and os.environ.get("BERT_NO_CUSTOM_VJP") != "1"


def cpu_vjp(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function with a backward pass that is used only if `uses_custom_vjp` is true.

    Args:
        forward, backward, nondiff_argnums: see `jax.custom_vjp`. All arguments are positional.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        custom = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        custom.defvjp(forward, backward)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (custom if uses_custom_vjp() else function)(*args, **kwargs)

        return call

    return decorate


def _linear_forward(x: Array, kernel: Array, bias: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return linear(x, kernel, bias, dtype), (x, kernel)


def _linear_backward(dtype: jnp.dtype, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array, Array]:
    x, kernel = residuals
    grad_x = _matmul(grad, kernel.astype(dtype), 1).astype(x.dtype)
    return grad_x, *_weight_grads(x.astype(dtype), grad)


@cpu_vjp(_linear_forward, _linear_backward, nondiff_argnums=(3,))
def linear(x: Array, kernel: Array, bias: Array, dtype: jnp.dtype) -> Array:
    """Computes x W + b in ``dtype``.

    Returns:
        [..., O].
    """
    return _matmul(x.astype(dtype), kernel.astype(dtype), 0) + bias.astype(dtype)


def _decoder_forward(x: Array, table: Array, bias: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return tied_logits(x, table, bias, dtype), (x, table)


def _decoder_backward(dtype: jnp.dtype, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array, Array]:
    x, table = residuals
    grad_x = _matmul(grad.astype(dtype), table.astype(dtype), 0).astype(x.dtype)
    return grad_x, *_decoder_grads(x.astype(dtype), grad)


@cpu_vjp(_decoder_forward, _decoder_backward, nondiff_argnums=(3,))
def tied_logits(x: Array, table: Array, bias: Array, dtype: jnp.dtype) -> Array:
    """Computes x E^T + b, the logits of every token, in float32.

    Args:
        dtype: type of the operands of the product.

    Returns:
        [..., V] float32.
    """
    return _matmul(x.astype(dtype), table.astype(dtype), 1).astype(jnp.float32) + bias


def soft_cap(logits: Float[Array, "*shape"], limit: float | None) -> Float[Array, "*shape"]:
    """Limits logits to the range of -limit to limit by tanh (Gemma 2; Riviere et al. 2024, section 2).

    Returns them unchanged if ``limit`` is None. Padding of the vocabulary, whose logits are the lowest float, is also
    unchanged.
    """
    if limit is None:
        return logits
    return jnp.where(logits > jnp.finfo(logits.dtype).min, limit * jnp.tanh(logits / limit), logits)


def _matmul(x: Array, matrix: Array, axis: int) -> Array:
    """Multiplies [..., K] by a matrix along one of its axes. On a CPU, bfloat16 products accumulate in float32."""
    contracted = ((x.ndim - 1,), (axis,))

    def plain(x: Array, matrix: Array) -> Array:
        return jax.lax.dot_general(x, matrix, (contracted, ((), ())))

    def native(x: Array, matrix: Array) -> Array:
        return _float32_sums(x, matrix, contracted).astype(x.dtype)

    if x.dtype == jnp.float32:
        return plain(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=native, default=plain)


def _weight_grads(x: Array, grad: Array) -> tuple[Array, Array]:
    """Returns float32 gradients of kernel [I, O] and bias [O], given inputs [..., I] and output gradients [..., O]."""

    def plain(x: Array, grad: Array) -> tuple[Array, Array]:
        return _batched_outer_sum(x, grad).astype(jnp.float32), _sum_of_rows(grad).astype(jnp.float32)

    def on_cpu(x: Array, grad: Array) -> tuple[Array, Array]:
        x, grad = _as_matrix(x), _as_matrix(grad)
        return plain(x, grad) if x.dtype == jnp.float32 else _weight_and_bias_grads(x, grad)

    return jax.lax.platform_dependent(x, grad, cpu=on_cpu, default=plain)


def _decoder_grads(x: Array, grad: Array) -> tuple[Array, Array]:
    """Returns float32 gradients of table [V, E] and bias [V], given inputs [..., E] and output gradients [..., V]."""

    def plain(x: Array, grad: Array) -> tuple[Array, Array]:
        return _batched_outer_sum(grad.astype(x.dtype), x).astype(jnp.float32), _sum_of_rows(grad)

    def on_cpu(x: Array, grad: Array) -> tuple[Array, Array]:
        x, grad = _as_matrix(x), _as_matrix(grad)
        bias = _float32_sums(jnp.ones((1, len(grad))), grad, ((1,), (0,)))[0]
        if x.dtype == jnp.float32:
            return plain(x, grad)[0], bias
        return _weight_and_bias_grads(x, grad.astype(x.dtype))[0].T, bias

    return jax.lax.platform_dependent(x, grad, cpu=on_cpu, default=plain)


def _as_matrix(x: Array) -> Array:
    """Reshapes [..., N] to [rows, N], so that a CPU does not copy an operand to transpose it.

    On TPUs this costs memory: a step of ``tiny`` with 20 predictions per row needs 0.91 GB with it, 0.48 GB without.
    """
    return x.reshape(-1, x.shape[-1])


def _batched_outer_sum(left: Array, right: Array) -> Array:
    """Sums the outer products of all rows, [..., M], [..., N] -> [M, N]."""
    rows = tuple(range(left.ndim - 1))
    return jax.lax.dot_general(left, right, ((rows, rows), ((), ())))


def _sum_of_rows(x: Array) -> Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


def _weight_and_bias_grads(rows: Array, grads: Array) -> tuple[Array, Array]:
    """Returns the summed outer products [M, N] of the rows [R, M] and grads [R, N], and the summed grads [N].

    Both are one product, with a row of ones appended to the first operand. That row keeps XLA from undoing the
    transposition, which would make bfloat16 slow. The barrier keeps the computation of the operand out of the loop that
    transposes it.
    """
    rows = jax.lax.optimization_barrier(rows)
    ones = jnp.ones((1, len(rows)), rows.dtype)
    sums = _float32_sums(jnp.concatenate([rows.T, ones]), grads, ((1,), (0,)))
    return sums[:-1], sums[-1]


def _float32_sums(left: Array, right: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_jvp
def _gelu(x: Array) -> Array:
    """Computes GELU in its erf form (Hendrycks and Gimpel 2016), in float32."""
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * jnp.pi) ** -0.5
    slope = _normal_cdf(wide) + wide * density
    return _gelu(x), (tangent.astype(jnp.float32) * slope).astype(x.dtype)


gelu = jax.checkpoint(_gelu)
"""GELU that stores only its input for the backward pass."""


def _normal_cdf(x: Array) -> Array:
    return 0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
}
"""Activation functions by their names in the configuration."""


LORA_A, LORA_B = "lora_a", "lora_b"


@dataclass(frozen=True)
class FrozenWeights:
    """The weights that a run does not train, and that its adapters modify.

    Attributes:
        params: the parameters that are not trained, on the host.
        scale: factor of the adapters' products, alpha / rank.
    """

    params: Params
    scale: float

    def merge(self, trained: Params) -> Params:
        """Returns the model's parameters on the host, with trained parameters and adapters merged in.

        Sums are computed in float64 and rounded once, so that the result is bitwise equal on every machine.
        """

        def add(kernel: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            total = kernel.astype(np.float64) + self.scale * (a.astype(np.float64) @ b.astype(np.float64))
            return total.astype(kernel.dtype)

        return _merge(self.params, trained, add)

    def merge_traced(self, params: Params, trained: Params) -> Params:
        """Like `merge`, but traceable; ``params`` are the frozen weights on the devices."""

        def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            # Full float32, even if matrix products have a lower precision by default.
            return kernel + self.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

        return _merge(params, trained, add)


NOTHING_FROZEN = FrozenWeights({}, 1.0)
"""No frozen weights: all parameters are trained."""


def _merge(frozen: Params, trained: Params, add: Callable[[Any, Any, Any], Any]) -> Params:
    merged, updates = traverse_util.flatten_dict(frozen), traverse_util.flatten_dict(trained)
    for path, value in updates.items():
        if path[-1] == LORA_A:
            kernel = (*path[:-1], "kernel")
            merged[kernel] = add(merged[kernel], value, updates[(*path[:-1], LORA_B)])
        elif path[-1] != LORA_B:
            merged[path] = value
    return traverse_util.unflatten_dict(merged)
