"""Masks compared with booleans computed in NumPy, and local layers in blocks."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert.config import ModelConfig
from bert.model.attention import dot_product_attention, fused_attention
from bert.model.dropout import Dropout
from bert.model.encoder import Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask, split_keys, split_queries
from bert.training.flops import ATTENTION, forward_flops

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


@pytest.mark.medium
@given(masks())
@settings(max_examples=50, deadline=None)
def test_blind_queries_attend_to_no_key(case) -> None:
    """Except for rows without a token, which are not read."""
    mask, _, queries, keys = case
    mask = mask.replace(pairs=None, examples=None)
    if (masked := mask.find_fully_masked(queries)) is not None:
        rows = np.asarray(mask.keys).any(axis=1)
        expected = ~np.asarray(mask.booleans(queries, keys)).any(axis=(1, 3))
        np.testing.assert_array_equal(np.asarray(masked)[rows], expected[rows])


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


T = 150  # blocks of 32: the last one is not full
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, attention_window=8,
    global_attention_every=2, max_position_embeddings=256, position_embedding_type="rotary", initializer_range=0.3,
)  # fmt: skip
ALL_LOCAL = dataclasses.replace(CONFIG, global_attention_every=None, num_hidden_layers=2)
X = jax.random.normal(jax.random.key(0), (2, T, 16))
BLOCK_KEYS = (jnp.arange(T) < jnp.array([[T], [70]])).astype(jnp.int32)
EXAMPLES = jnp.where(jnp.arange(T) < 60, 1, jnp.where(jnp.arange(T) < 120, 2, 0))[None].repeat(2, 0)


@pytest.mark.medium
def test_blocks_and_their_neighbours_by_hand() -> None:
    x = 1 + jnp.arange(5)[None]
    np.testing.assert_array_equal(split_queries(x, 2), [[1, 2], [3, 4], [5, 0]])
    both = [[0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 0], [3, 4, 5, 0, 0, 0]]
    np.testing.assert_array_equal(split_keys(x, 2, causal=False), both)
    np.testing.assert_array_equal(split_keys(x, 2, causal=True), [row[:4] for row in both])
    features = jnp.arange(2 * 5 * 3).reshape(2, 5, 3)
    assert split_keys(features, 2, causal=False).shape == (6, 6, 3)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("mask", "execution"),
    [
        (Mask(keys=BLOCK_KEYS, right_padded=True), LayerExecution()),
        (Mask(examples=EXAMPLES), LayerExecution("dots", scan=True)),
        (Mask(keys=BLOCK_KEYS, causal=True, right_padded=True), LayerExecution(attention="xla")),
        pytest.param(Mask(), LayerExecution(attention="xla", scan=True), marks=pytest.mark.slow),
        pytest.param(Mask(causal=True), LayerExecution("full", scan=True), marks=pytest.mark.slow),
        pytest.param(Mask(examples=EXAMPLES, causal=True), LayerExecution(), marks=pytest.mark.slow),
    ],
)
def test_blocks_are_the_masked_layers(mask: Mask, execution: LayerExecution) -> None:
    """Hidden states and gradients, with padding or packed rows, and global layers in between. Those that return their
    weights are masked."""
    buckets = None if mask.keys is None else 8
    config = dataclasses.replace(CONFIG, causal=mask.causal, relative_attention_buckets=buckets)
    params = jax.jit(Encoder(config).init)(jax.random.key(1), X[:, :9], Mask())
    real = jnp.ones((2, T), bool) if mask.keys is None else mask.keys.astype(bool)
    real = real if mask.examples is None else mask.examples > 0

    def run(execution: LayerExecution, **options):
        def total(params, x):
            hidden = Encoder(config, execution=execution).apply(params, x, mask, **options).last_hidden_state
            return jnp.sum(jnp.sin(hidden) * real[..., None]), hidden

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(params, X)

    ((_, expected), masked), ((_, hidden), grads) = run(LayerExecution(), intermediates=True), run(execution)
    np.testing.assert_allclose(hidden[real], expected[real], atol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(masked))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5 * largest), grads, masked)


@pytest.mark.medium
def test_no_array_grows_with_the_square_of_the_length() -> None:
    params = jax.eval_shape(Encoder(ALL_LOCAL).init, jax.random.key(1), X, Mask())
    x = jax.ShapeDtypeStruct((1, 1024, 16), jnp.float32)

    def largest(config: ModelConfig, mask: Mask) -> int:
        program = str(
            jax.make_jaxpr(jax.grad(lambda p, x: Encoder(config).apply(p, x, mask).last_hidden_state.sum()))(params, x)
        )
        shapes = re.findall(r":(?:f32|bool|i32)\[([\d,]+)\]", program)
        return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)

    assert largest(ALL_LOCAL, Mask()) == 1024 * 3 * 32 * ALL_LOCAL.num_attention_heads
    assert largest(dataclasses.replace(ALL_LOCAL, attention_window=None), Mask(window=8)) == 2 * 1024**2


@pytest.mark.medium
def test_dropout_in_blocks_is_the_same_in_a_loop_and_for_a_row_alone() -> None:
    params = jax.jit(Encoder(ALL_LOCAL).init)(jax.random.key(1), X[:, :9], Mask())

    def run(scan: bool, rows: list[int]):
        encoder, dropout = (
            Encoder(ALL_LOCAL, execution=LayerExecution(scan=scan)),
            Dropout.for_step(0, 1, jnp.array(rows)),
        )
        return jax.jit(encoder.apply)(params, X[jnp.array(rows)], Mask(), dropout).last_hidden_state

    both = run(False, [0, 1])
    np.testing.assert_allclose(run(True, [0, 1]), both, atol=1e-5)
    np.testing.assert_allclose(run(False, [1])[0], both[1], atol=1e-5)
    assert np.abs(both - Encoder(ALL_LOCAL).apply(params, X, Mask()).last_hidden_state).max() > 0.1


def test_short_rows_are_masked_and_operations_are_those_of_the_blocks() -> None:
    assert CONFIG.local_block(96) is None and CONFIG.local_block(97) == 32
    assert dataclasses.replace(CONFIG, attention_window=64).local_block(1000) == 64
    assert [CONFIG.keys_per_query(layer, 150) for layer in range(3)] == [150, 96, 150]
    assert dataclasses.replace(CONFIG, causal=True).keys_per_query(1, 150) == 64
    forward = forward_flops(CONFIG, 150, (), 0, {})
    assert forward[ATTENTION] == 3 * 8 * 16**2 + 4 * (150 + 96 + 150) * 16
