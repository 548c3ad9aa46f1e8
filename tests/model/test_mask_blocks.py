"""Local layers in blocks: equal to the same layers masked, and no array of T x T elements."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.analysis.flops import ATTENTION, forward_flops
from bert.config import ModelConfig
from bert.model.dropout import Dropout
from bert.model.encoder import Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask, split_keys, split_queries

T = 150  # blocks of 32: the last one is not full
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, attention_window=8,
    global_attention_every=2, max_position_embeddings=256, position_embedding_type="rotary", initializer_range=0.3,
)  # fmt: skip
ALL_LOCAL = dataclasses.replace(CONFIG, global_attention_every=None, num_hidden_layers=2)
X = jax.random.normal(jax.random.key(0), (2, T, 16))
KEYS = (jnp.arange(T) < jnp.array([[T], [70]])).astype(jnp.int32)
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
        (Mask(keys=KEYS, right_padded=True), LayerExecution()),
        (Mask(examples=EXAMPLES), LayerExecution("dots", scan=True)),
        (Mask(keys=KEYS, causal=True, right_padded=True), LayerExecution(attention="xla")),
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
