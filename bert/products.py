"""The products of dense layers and of the decoder, with their backward pass written out.

On a CPU, XLA adds up the columns of a matrix as wide as a vocabulary as slowly as it multiplies by it, and multiplies
bfloat16 by the processor's own instructions only where the result is float32 and no operand has to be turned over. What
is written here for it gives the same sums (in bfloat16 less rounded ones); other platforms get what JAX would derive.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

_ROWS_BY_COLUMNS = ((1,), (0,))  # [M, K] [K, N]
_ROWS_BY_ROWS = ((1,), (1,))  # [M, K] [N, K]
_COLUMNS_BY_COLUMNS = ((0,), (0,))  # [K, M] [K, N]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
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
    rows = x.astype(dtype).reshape(-1, x.shape[-1])
    return (_product(rows, kernel.astype(dtype), _ROWS_BY_COLUMNS) + bias.astype(dtype)).reshape(*x.shape[:-1], -1)


def _linear_forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(x, kernel, bias, dtype), (x, kernel)


def _linear_backward(
    dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, kernel = kept
    rows, grads = x.astype(dtype).reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    of_x = _product(grads, kernel.astype(dtype), _ROWS_BY_ROWS).reshape(x.shape).astype(x.dtype)
    return of_x, *_of_weights(rows, grads)


linear.defvjp(_linear_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def decode(x: jax.Array, table: jax.Array, bias: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x E^T + b: the float32 logits of every piece.

    Args:
        x: [..., E].
        table: [V, E] float32.
        bias: [V] float32.
        dtype: of the product's operands.

    Returns:
        [..., V] float32.
    """
    rows = x.astype(dtype).reshape(-1, x.shape[-1])
    product = _product(rows, table.astype(dtype), _ROWS_BY_ROWS)
    return (product.astype(jnp.float32) + bias).reshape(*x.shape[:-1], -1)


def _decode_forward(
    x: jax.Array, table: jax.Array, bias: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return decode(x, table, bias, dtype), (x, table)


def _decode_backward(
    dtype: jnp.dtype, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, table = kept
    rows, grads = x.astype(dtype).reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    of_x = _product(grads.astype(dtype), table.astype(dtype), _ROWS_BY_COLUMNS).reshape(x.shape).astype(x.dtype)
    of_table, of_bias = _of_decoder(rows, grads)
    return of_x, of_table, of_bias


decode.defvjp(_decode_forward, _decode_backward)


def _product(left: jax.Array, right: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """A matrix product in the operands' type. In bfloat16 on a CPU, its sums are float32 until they are done."""

    def plain(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(left, right, (contracted, ((), ())))

    def native(left: jax.Array, right: jax.Array) -> jax.Array:
        return _float32_sums(left, right, contracted).astype(left.dtype)

    if left.dtype == jnp.float32:
        return plain(left, right)
    return jax.lax.platform_dependent(left, right, cpu=native, default=plain)


def _of_weights(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, I] inputs, [R, O] gradients -> the gradients of kernel [I, O] and bias [O], float32."""

    def plain(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel = jax.lax.dot_general(rows, grads, (_COLUMNS_BY_COLUMNS, ((), ())))
        return kernel.astype(jnp.float32), jnp.sum(grads, axis=0).astype(jnp.float32)

    if rows.dtype == jnp.float32:
        return plain(rows, grads)
    return jax.lax.platform_dependent(rows, grads, cpu=_with_ones, default=plain)


def _of_decoder(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, E] inputs, [R, V] float32 gradients -> the gradients of table [V, E] and bias [V], float32."""

    def plain(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = jax.lax.dot_general(grads.astype(rows.dtype), rows, (_COLUMNS_BY_COLUMNS, ((), ())))
        return table.astype(jnp.float32), jnp.sum(grads, axis=0)

    def on_cpu(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
        bias = _float32_sums(jnp.ones((1, len(rows))), grads, _ROWS_BY_COLUMNS)[0]
        if rows.dtype == jnp.float32:
            return plain(rows, grads)[0], bias
        return _with_ones(rows, grads.astype(rows.dtype))[0].T, bias

    return jax.lax.platform_dependent(rows, grads, cpu=on_cpu, default=plain)


def _with_ones(rows: jax.Array, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """rows^T grads and the column sums of grads as one product: a row of ones below the first operand.

    The row keeps XLA from taking the transposition back, which makes bfloat16 slow. The barrier keeps what made the
    operand out of the loop that turns it over.
    """
    rows = jax.lax.optimization_barrier(rows)
    ones = jnp.ones((1, len(rows)), rows.dtype)
    sums = _float32_sums(jnp.concatenate([rows.T, ones]), grads, _ROWS_BY_COLUMNS)
    return sums[:-1], sums[-1]


def _float32_sums(left: jax.Array, right: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's share below x (Hendrycks and Gimpel 2016), by erf in float32.

    The backward pass keeps ``x`` alone; derived by JAX, it would keep two more arrays of this size.
    """
    wide = x.astype(jnp.float32)
    return (wide * _share_below(wide)).astype(x.dtype)


def _gelu_backward(x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (2 * jnp.pi) ** -0.5
    return ((grad.astype(jnp.float32) * (_share_below(wide) + wide * density)).astype(x.dtype),)


def _share_below(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)
