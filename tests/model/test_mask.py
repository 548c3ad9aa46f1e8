"""Masks compared with booleans computed in NumPy, for every attention implementation that runs on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.model.attention import dot_product_attention, fused_attention
from bert.model.mask import Mask

ROWS, HEADS, SIZE = 3, 2, 8
SHAPES = ((6, 6, None), (6, 6, 0), (1, 6, 4), (3, 6, 2), (3, 6, None), (5, 3, None))
"""Queries, keys, and the position of the first query."""


@st.composite
def masks(draw) -> tuple[Mask, np.ndarray, int, int]:
    """A mask, and the booleans [B, N, T, S] that its conditions say, pair by pair."""
    queries, keys, start = draw(st.sampled_from(SHAPES))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = random.integers(0, keys + 1, ROWS)
    right_padded = draw(st.booleans())
    real = np.arange(keys) < lengths[:, None] if right_padded else random.random((ROWS, keys)) < 0.6
    examples = np.sort(random.integers(0, 3, (ROWS, keys)), axis=1) if queries <= keys else None
    shape = draw(st.sampled_from([(1, 1), (ROWS, 1), (1, HEADS), (ROWS, HEADS)]))
    pairs = random.random((*shape, queries, keys)) < 0.7
    mask = Mask(
        keys=draw(st.sampled_from([None, jnp.asarray(real, jnp.int32)])),
        examples=None if examples is None else draw(st.sampled_from([None, jnp.asarray(examples)])),
        pairs=draw(st.sampled_from([None, jnp.asarray(pairs)])),
        start=None if start is None else draw(st.sampled_from([start, jnp.asarray(start)])),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, 0, 1, 3])),
        right_padded=right_padded,
    )
    expected = np.ones((ROWS, HEADS, queries, keys), bool)
    for row, head, t, s in np.ndindex(expected.shape):
        place = t + (start or 0)
        expected[row, head, t, s] = (
            (mask.keys is None or real[row, s])
            and (mask.examples is None or examples[row, place] == examples[row, s])
            and (mask.pairs is None or np.broadcast_to(pairs, expected.shape)[row, head, t, s])
            and not (mask.causal and s > place)
            and not (mask.window is not None and abs(s - place) > mask.window)
        )
    return mask, expected, queries, keys


def attention_by_hand(query, key, value, allowed, bias):
    """Attention in float64 where a query may look somewhere; zeros elsewhere."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.exp(np.einsum("BTNH,BSNH->BNTS", query, key) / np.sqrt(query.shape[-1]) + bias) * allowed
    return np.einsum("BNTS,BSNH->BTNH", scores / np.maximum(scores.sum(-1, keepdims=True), 1e-30), value)


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(masks(), st.sampled_from([jnp.float32, jnp.bfloat16]), st.integers(0, 2**32 - 1))
def test_every_implementation_follows_any_mask(drawn, dtype, seed) -> None:
    mask, allowed, queries, keys = drawn
    booleans = mask.booleans(queries, keys)
    np.testing.assert_array_equal(np.broadcast_to(True if booleans is None else booleans, allowed.shape), allowed)
    random = np.random.default_rng(seed)
    query = jnp.asarray(random.normal(size=(ROWS, queries, HEADS, SIZE)), dtype)
    key, value = (jnp.asarray(random.normal(size=(ROWS, keys, HEADS, SIZE)), dtype) for _ in range(2))
    bias = jnp.asarray(random.normal(size=(1, HEADS, queries, keys)), jnp.bfloat16).astype(jnp.float32)
    bias = bias * (seed % 2)
    mask = mask.replace(bias=bias if seed % 2 else None)
    expected = attention_by_hand(query, key, value, allowed, np.asarray(bias, np.float64))
    somewhere = allowed.any(-1).swapaxes(1, 2)
    # The weights are rounded to bfloat16's 8 bits before they mix the values, and so is the result.
    tolerance = 2e-6 if dtype == jnp.float32 else 4e-2
    for actual in (
        dot_product_attention(query, key, value, booleans, mask.bias)[0],
        dot_product_attention(query, key, value, mask.to_pairs(queries, keys).booleans(queries, keys), mask.bias)[0],
        fused_attention(query, key, value, mask, "xla"),
    ):
        actual = np.asarray(actual, np.float64)
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual[somewhere], expected[somewhere], atol=tolerance)


@pytest.mark.medium
def test_a_query_without_keys_attends_to_all_alike() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 4, 1, 8))
    mask = Mask(keys=jnp.zeros((1, 4), jnp.int32), causal=True)
    _, weights = dot_product_attention(x, x, x, mask.booleans(4, 4))
    np.testing.assert_array_equal(weights, 0.25)
    assert np.isfinite(fused_attention(x, x, x, mask.replace(right_padded=True), "xla")).all()


KEYS = jnp.asarray([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mask", "flags"),
    [
        (Mask(), (None, False, None)),
        (Mask(keys=KEYS, right_padded=True), ([3, 1, 1], False, None)),
        (Mask(keys=KEYS, right_padded=True, causal=True), ([3, 1, 1], True, None)),
        (Mask(causal=True, window=1), (None, True, (1, 0))),
    ],
)
def test_kernels_take_lengths_and_flags_for_masks_of_padding_and_order(mask: Mask, flags: tuple) -> None:
    """A row without a key counts as one of one key, so that it looks somewhere."""
    arguments = mask.kernel_arguments(3, 3)
    assert set(arguments) == {"key_value_seq_lengths", "is_causal", "local_window_size"}
    lengths, causal, window = arguments.values()
    assert (None if lengths is None else lengths.tolist(), causal, window) == flags


@pytest.mark.parametrize(
    "mask",
    [
        Mask(keys=KEYS),
        Mask(examples=KEYS),
        Mask(window=1),
        Mask(causal=True, start=0),
        Mask(causal=True, pairs=jnp.ones((1, 1, 3, 3), bool)),
    ],
)
def test_kernels_take_booleans_for_other_masks(mask: Mask) -> None:
    assert set(mask.kernel_arguments(3, 3)) == {"mask"}
    assert set(Mask(causal=True).kernel_arguments(1, 3)) == {"mask"}


def test_a_mask_is_a_value_of_compiled_functions() -> None:
    """Its arrays are arguments, its flags are part of the program, also behind `jax.checkpoint`."""
    run = jax.jit(jax.checkpoint(lambda mask: mask.booleans(1, 4)))
    np.testing.assert_array_equal(run(Mask(start=jnp.asarray(2), causal=True)), [[[[1, 1, 1, 0]]]])
    np.testing.assert_array_equal(run(Mask(start=jnp.asarray(1), causal=True)), [[[[1, 1, 0, 0]]]])
    np.testing.assert_array_equal(run(Mask(start=jnp.asarray(1), window=1)), [[[[1, 1, 1, 0]]]])
