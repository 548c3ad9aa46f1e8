"""Attention by hand, and as one kernel against attention written out."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.model.attention import dot_product_attention, fused_attention
from bert.model.mask import Mask

MASK = Mask(keys=jnp.asarray([[1] * 8, [1] * 5 + [0] * 3, [1] + [0] * 7]), right_padded=True)


@pytest.mark.medium
def test_scaled_dot_product_attention_by_hand() -> None:
    # One head of size 4, so scores are halved. Query 0 sees scores 2 ln 3 / 2 = ln 3 and 0: weights 3/4 and 1/4.
    ln3 = np.log(3)
    query = jnp.array([[[2 * ln3, 0, 0, 0]], [[0, 0, 0, 0]]]).reshape(1, 2, 1, 4)
    key = jnp.array([[1.0, 0, 0, 0], [0, 1, 0, 0]]).reshape(1, 2, 1, 4)
    value = jnp.array([[4.0, 0, 8, 0], [0, 4, 0, 8]]).reshape(1, 2, 1, 4)
    mixed, weights = dot_product_attention(query, key, value)
    np.testing.assert_allclose(weights[0, 0], [[0.75, 0.25], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(mixed[0, :, 0], [[3, 1, 6, 2], [2, 2, 4, 4]], atol=1e-5)
    # Causal: the first query sees itself only.
    mixed, weights = dot_product_attention(query, key, value, Mask(causal=True).booleans(2, 2))
    np.testing.assert_allclose(weights[0, 0], [[1, 0], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(mixed[0, :, 0], [[4, 0, 8, 0], [2, 2, 4, 4]], atol=1e-5)


def test_cross_attention_by_hand() -> None:
    # Three queries over two keys; zero queries mix evenly, the mask leaves one key.
    query = jnp.zeros((1, 3, 1, 2))
    key = value = jnp.array([[1.0, 3.0], [5.0, 7.0]]).reshape(1, 2, 1, 2)
    mask = jnp.array([[1, 1], [1, 0], [0, 1]], bool)[None, None]
    mixed, _ = dot_product_attention(query, key, value, mask)
    np.testing.assert_allclose(mixed[0, :, 0], [[3, 5], [1, 3], [5, 7]], atol=1e-6)


def test_a_query_that_may_look_nowhere_gives_no_nan() -> None:
    x = jnp.ones((1, 2, 1, 4))
    mixed, _ = dot_product_attention(x, x, x, jnp.zeros((1, 1, 2, 2), bool))
    assert np.isfinite(mixed).all()


def compared(implementation, dtype):
    """Values at real queries, and gradients of a sum over these, of the kernel and of attention written out."""
    random = np.random.default_rng(0)
    query, key, value, target = (jnp.asarray(random.normal(size=(3, 8, 2, 16)), dtype) for _ in range(4))
    real = MASK.keys[:, :, None, None].astype(dtype)

    def fused(*inputs):
        return fused_attention(*inputs, MASK, implementation)

    def written(*inputs):
        return dot_product_attention(*inputs, MASK.booleans(8, 8))[0]

    def of(attend):
        loss = lambda *inputs: jnp.sum((attend(*inputs) * real * target).astype(jnp.float32))  # noqa: E731
        return (attend(query, key, value) * real, *jax.grad(loss, (0, 1, 2))(query, key, value))

    return zip(*(jax.jit(lambda attend=attend: of(attend))() for attend in (fused, written)), strict=True)


def test_the_twin_of_the_kernel_is_attention_written_out():
    for actual, expected in compared("xla", jnp.float32):
        np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_in_bfloat16_the_twin_and_attention_written_out_differ_by_their_roundings():
    """Each rounds numbers to 8 significant bits at different points, with a relative error of at most 2**-8 each time.

    Over a whole array, errors add up at random, so the tolerance is one such rounding on either side.
    """
    for actual, expected in compared("xla", jnp.bfloat16):
        assert actual.dtype == expected.dtype == jnp.bfloat16
        actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(actual - expected) <= 2 * 2**-8 * np.linalg.norm(expected)


def test_cudnns_kernel_is_asked_for_no_odd_rows_with_pairs_or_a_bias(monkeypatch):
    """Its backward pass does not support them."""
    asked = []

    def asks(query, *others, implementation, **rest):
        asked.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", asks)
    pairs, bias = jnp.ones((1, 1, 7, 7), bool), jnp.zeros((1, 1, 7, 7))
    for mask, length in ((Mask(), 7), (Mask(pairs=pairs), 7), (Mask(bias=bias), 7), (Mask(bias=bias), 8)):
        fused_attention(*[jnp.ones((1, length, 2, 8))] * 3, mask, "cudnn")
    assert asked == ["cudnn", "xla", "xla", "cudnn"]


def assert_kernel_is_attention_written_out(implementation):
    for actual, expected in compared(implementation, jnp.bfloat16):
        np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), atol=3e-2)


def test_cudnns_kernel_is_attention_written_out():
    """Needs an NVIDIA GPU and JAX for it. Runs in a separate process because all other tests use CPU devices."""
    plugins = [name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin") if importlib.util.find_spec(name)]
    if not plugins or not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("cuDNN's kernel needs an NVIDIA GPU and jax[cuda12] or jax[cuda13]")
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", "from tests.model import test_attention as t; "
         "t.assert_kernel_is_attention_written_out('cudnn')"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
