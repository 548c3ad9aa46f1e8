"""Linear layers and the tied decoder, with backward passes written out for CPUs; GELU.

On a CPU, XLA adds up the columns of a matrix as wide as a vocabulary as slowly as it multiplies by it, and multiplies
bfloat16 by the processor's own instructions only if the result is float32 and no operand is transposed. The backward
passes written here avoid both and give the same sums (in bfloat16 fewer rounded ones). They are `jax.custom_vjp`
functions, which have no forward mode (`jax.jvp`, `jax.hessian`). Other backends differentiate the same functions by
JAX's rules; with ``BERT_NO_CUSTOM_VJP=1`` a CPU does, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

P = ParamSpec("P")
R = TypeVar("R")


def uses_custom_vjp() -> bool:
    """Whether functions traced from now on have the backward passes written for CPUs.

    True if JAX's default backend is a CPU and the environment variable BERT_NO_CUSTOM_VJP is not 1.
    """
    return jax.default_backend() == "cpu" and os.environ.get("BERT_NO_CUSTOM_VJP") != "1"


def cpu_vjp(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Gives a function a backward pass that is used only if `uses_custom_vjp`.

    Args:
        forward, backward, nondiff_argnums: as `jax.custom_vjp` takes them; arguments are positional.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        custom = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        custom.defvjp(forward, backward)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (custom if uses_custom_vjp() else function)(*args, **kwargs)

        return call

    return decorate


def _linear_forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(x, kernel, bias, dtype), (x, kernel)


def _linear_backward(
    dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, kernel = residuals
    grad_x = _matmul(grad, kernel.astype(dtype), 1).astype(x.dtype)
    return grad_x, *_weight_grads(x.astype(dtype), grad)


@cpu_vjp(_linear_forward, _linear_backward, nondiff_argnums=(3,))
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x W + b in ``dtype``.

    Args:
        x: [..., I].
        kernel: [I, O] float32.
        bias: [O] float32.
        dtype: of the computation and the result.

    Returns:
        [..., O].
    """
    return _matmul(x.astype(dtype), kernel.astype(dtype), 0) + bias.astype(dtype)


def _decoder_forward(
    x: jax.Array, table: jax.Array, bias: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return tied_logits(x, table, bias, dtype), (x, table)


def _decoder_backward(
    dtype: jnp.dtype, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, table = residuals
    grad_x = _matmul(grad.astype(dtype), table.astype(dtype), 0).astype(x.dtype)
    return grad_x, *_decoder_grads(x.astype(dtype), grad)


@cpu_vjp(_decoder_forward, _decoder_backward, nondiff_argnums=(3,))
def tied_logits(x: jax.Array, table: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x E^T + b: the float32 logits of every token.

    Args:
        x: [..., E].
        table: [V, E] float32.
        bias: [V] float32.
        dtype: of the product's operands.

    Returns:
        [..., V] float32.
    """
    return _matmul(x.astype(dtype), table.astype(dtype), 1).astype(jnp.float32) + bias


def _matmul(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """[..., K] times a matrix along one of its axes, in their type. In bfloat16 on a CPU, sums are float32 until they
    are done."""
    contracted = ((x.ndim - 1,), (axis,))

    def plain(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, matrix, (contracted, ((), ())))

    def native(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return _float32_sums(x, matrix, contracted).astype(x.dtype)

    if x.dtype == jnp.float32:
        return plain(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=native, default=plain)


def _weight_grads(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., I] inputs, [..., O] gradients -> the gradients of kernel [I, O] and bias [O], float32."""

    def plain(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _batched_outer_sum(x, grad).astype(jnp.float32), _sum_of_rows(grad).astype(jnp.float32)

    def on_cpu(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, grad = _as_matrix(x), _as_matrix(grad)
        return plain(x, grad) if x.dtype == jnp.float32 else _weight_and_bias_grads(x, grad)

    return jax.lax.platform_dependent(x, grad, cpu=on_cpu, default=plain)


def _decoder_grads(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., E] inputs, [..., V] float32 gradients -> the gradients of table [V, E] and bias [V], float32."""

    def plain(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _batched_outer_sum(grad.astype(x.dtype), x).astype(jnp.float32), _sum_of_rows(grad)

    def on_cpu(x: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, grad = _as_matrix(x), _as_matrix(grad)
        bias = _float32_sums(jnp.ones((1, len(grad))), grad, ((1,), (0,)))[0]
        if x.dtype == jnp.float32:
            return plain(x, grad)[0], bias
        return _weight_and_bias_grads(x, grad.astype(x.dtype))[0].T, bias

    return jax.lax.platform_dependent(x, grad, cpu=on_cpu, default=plain)


def _as_matrix(x: jax.Array) -> jax.Array:
    """[..., N] -> [rows, N]. Sums over rows are quicker so on a CPU, which else turns an operand over by a copy.

    Compiled for TPUs, it costs memory: a step of ``tiny`` at 20 predictions a row works in 0.91 GB with it, in 0.48
    without.
    """
    return x.reshape(-1, x.shape[-1])


def _batched_outer_sum(left: jax.Array, right: jax.Array) -> jax.Array:
    """[..., M], [..., N] -> [M, N]: the sum over all rows of their outer products."""
    rows = tuple(range(left.ndim - 1))
    return jax.lax.dot_general(left, right, ((rows, rows), ((), ())))


def _sum_of_rows(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1)))


def _weight_and_bias_grads(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, M], [R, N] -> the sum over rows of outer products [M, N] and that of the second operand's rows [N], as one
    product: a row of ones follows the first operand.

    The row keeps XLA from taking the transposition back, which makes bfloat16 slow. The barrier keeps what made the
    operand out of the loop that turns it over.
    """
    rows = jax.lax.optimization_barrier(rows)
    ones = jnp.ones((1, len(rows)), rows.dtype)
    sums = _float32_sums(jnp.concatenate([rows.T, ones]), grads, ((1,), (0,)))
    return sums[:-1], sums[-1]


def _float32_sums(left: jax.Array, right: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    """x times the standard normal distribution function of x (Hendrycks and Gimpel 2016), by erf in float32."""
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * jnp.pi) ** -0.5
    slope = _normal_cdf(wide) + wide * density
    return _gelu(x), (tangent.astype(jnp.float32) * slope).astype(x.dtype)


gelu = jax.checkpoint(_gelu)
"""`_gelu` with x alone kept for the backward pass."""


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5)
