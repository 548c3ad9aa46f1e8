"""Attention as one kernel against attention written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.dot_product import dot_product_attention, fused_attention, key_lengths, padding_mask

MASK = jnp.asarray([[1] * 8, [1] * 5 + [0] * 3, [1] + [0] * 7])


def compared(implementation, dtype):
    """Values at real queries, and gradients of a sum over these, of the kernel and of attention written out."""
    random = np.random.default_rng(0)
    query, key, value, target = (jnp.asarray(random.normal(size=(3, 8, 2, 16)), dtype) for _ in range(4))
    real = MASK[:, :, None, None].astype(dtype)

    def fused(*given):
        return fused_attention(*given, key_lengths(MASK), implementation)

    def written(*given):
        return dot_product_attention(*given, padding_mask(MASK))[0]

    def of(attend):
        loss = lambda *given: jnp.sum((attend(*given) * real * target).astype(jnp.float32))  # noqa: E731
        return (attend(query, key, value) * real, *jax.grad(loss, (0, 1, 2))(query, key, value))

    return zip(*(jax.jit(lambda attend=attend: of(attend))() for attend in (fused, written)), strict=True)


def test_the_twin_of_the_kernel_is_attention_written_out():
    for found, expected in compared("xla", jnp.float32):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_in_bfloat16_the_twin_and_attention_written_out_differ_by_their_roundings():
    """Each rounds numbers to 8 significant bits, at places of its own, and so is off by 2**-8 of a number at most a
    time: by one such rounding on either side, over a whole array, where they add up by chance."""
    for found, expected in compared("xla", jnp.bfloat16):
        assert found.dtype == expected.dtype == jnp.bfloat16
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(found - expected) <= 2 * 2**-8 * np.linalg.norm(expected)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's kernel needs an NVIDIA GPU")
def test_cudnns_kernel_is_attention_written_out():
    for found, expected in compared("cudnn", jnp.bfloat16):
        np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=3e-2)


def test_a_row_that_only_fills_a_batch_looks_somewhere():
    assert key_lengths(jnp.asarray([[0, 0], [1, 0], [1, 1]])).tolist() == [1, 1, 2]
