"""Relative positions of Transformer-XL: by hand for each pair, and equal for every way to execute the layers."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import make_cache
from bert.model.encoder import Bert, Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask, Packing
from bert.model.positions import RelativeSinusoids
from bert.model.pretraining import BertForPermutedLM, PermutedTokens

pytestmark = pytest.mark.medium

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
    max_position_embeddings=16, position_embedding_type="transformer_xl", initializer_range=0.5,
)  # fmt: skip
X = jax.random.normal(jax.random.key(1), (3, 9, 12))
KEYS = jnp.arange(9)[None] < jnp.array([[9], [4], [7]])
SEGMENTS = (jnp.arange(9)[None] > jnp.array([[4], [2], [5]])).astype(jnp.int32)
MASK = Mask(keys=KEYS, segments=SEGMENTS)


@functools.cache
def initial_params() -> Any:
    return jax.jit(Encoder(CONFIG).init)(jax.random.key(0), X, Mask())


def weights_by_hand(row: int, real: int) -> np.ndarray:
    """The weights [N, T, S] of the first layer, by a loop over the pairs (Yang et al. 2019, A.2; Dai et al. 2019)."""
    attention = jax.tree.map(np.asarray, initial_params()["params"])["layer_0"]["attention"]
    query, key = (
        (np.asarray(X[row]) @ attention[name]["kernel"] + attention[name]["bias"]).reshape(-1, 3, 4)
        for name in ("query", "key")
    )
    content, position, segment = (
        attention[f"{name}_bias"].reshape(3, 4) for name in ("content", "position", "segment")
    )
    result = np.zeros((3, 9, 9))
    for head in range(3):
        scores = np.full((real, real), -np.inf)
        for i, j in np.ndindex(real, real):
            angles = (i - j) / 10_000 ** (np.arange(0, 12, 2) / 12)
            distance = np.concatenate([np.sin(angles), np.cos(angles)]) @ attention["position"]["kernel"]
            differs = int(SEGMENTS[row, i] != SEGMENTS[row, j])
            scores[i, j] = (query[i, head] + content[head]) @ key[j, head]
            scores[i, j] += (query[i, head] + position[head]) @ distance.reshape(3, 4)[head]
            scores[i, j] += (query[i, head] + segment[head]) @ attention["segment"].reshape(2, 3, 4)[differs, head]
        exponents = np.exp(scores / 2)
        result[head, :real, :real] = exponents / exponents.sum(-1, keepdims=True)
    return result


def test_pair_by_pair() -> None:
    states = jax.jit(partial(Encoder(CONFIG).apply, intermediates=True))(initial_params(), X, MASK)
    for row, real in enumerate((9, 4, 7)):
        expected = weights_by_hand(row, real)
        np.testing.assert_allclose(states.attentions[0][row, :, :real], expected[:, :real], atol=1e-5)


def test_every_way_of_running_the_layers() -> None:
    """Padding on either side, packed rows, explicit positions, the kernel, the loop and recomputation."""
    apply = jax.jit(Encoder(CONFIG).apply)
    expected = apply(initial_params(), X, MASK).last_hidden_state
    in_row = MASK.replace(positions=jnp.arange(9)[None])  # indexes the distances instead of shifting them
    np.testing.assert_allclose(apply(initial_params(), X, in_row).last_hidden_state, expected, atol=1e-5)
    left = [jnp.roll(array[1:2], 5, axis=1) for array in (X, KEYS, SEGMENTS)]
    rolled = apply(initial_params(), left[0], Mask(keys=left[1], segments=left[2])).last_hidden_state
    np.testing.assert_allclose(rolled[0, 5:], expected[1, :4], atol=1e-5)
    packed, segments = (jnp.concatenate([array[1:2, :4], array[2:, :7]], axis=1) for array in (X, SEGMENTS))
    examples = jnp.array([[1] * 4 + [2] * 7])
    actual = apply(initial_params(), packed, Mask(examples=examples, segments=segments)).last_hidden_state[0]
    np.testing.assert_allclose(actual, jnp.concatenate([expected[1, :4], expected[2, :7]]), atol=1e-5)

    def value_and_gradients(execution: LayerExecution):
        def loss(params):
            states = Encoder(CONFIG, execution=execution).apply(params, X, MASK)
            return jnp.sum(jnp.sin(states.last_hidden_state) * KEYS[..., None])

        return jax.jit(jax.value_and_grad(loss))(initial_params())

    plain = value_and_gradients(LayerExecution())
    assert np.abs(plain[1]["params"]["layer_0"]["attention"]["segment"]).min() > 0
    other = value_and_gradients(LayerExecution(attention="xla", scan=True, remat="full"))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4), plain, other)


def test_decoding_with_a_cache() -> None:
    @jax.jit
    def whole_and_parts(x: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = Encoder(CONFIG).apply(initial_params(), x, Mask(causal=True)).last_hidden_state
        cache, outputs = make_cache(CONFIG, 3, 12, jnp.float32), []
        for first, part in [(0, x[:, :6]), (start, x[:, 6:])]:
            states = Encoder(CONFIG).apply(initial_params(), part, Mask(start=first, causal=True), cache=cache)
            cache = states.cache
            outputs.append(states.last_hidden_state)
        return whole, jnp.concatenate(outputs, axis=1)

    np.testing.assert_allclose(*whole_and_parts(X, jnp.array(6)), atol=1e-5)


def test_the_shift_is_the_index_of_the_distance() -> None:
    columns = jnp.arange(3 * 9.0).reshape(1, 1, 3, 9)
    shifted = RelativeSinusoids.from_mask(Mask(start=4), 12, 3, 7)._by_key(columns)
    for t, s in np.ndindex(3, 7):
        assert shifted[0, 0, t, s] == 9 * t + 6 - (4 + t - s)  # distances from 6 down to -2


def test_queries_of_xlnet_read_no_mask_token() -> None:
    """There are two streams: P queries with one embedding attend to T tokens, and the ids of [MASK] have no effect."""
    model = BertForPermutedLM(CONFIG)
    ids = jax.random.randint(jax.random.key(2), (2, 9), 5, 23)
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    tokens = PermutedTokens(jnp.array([[3, 7, 1], [0, 5, 0]]), jnp.full((2, 3), 4), jnp.array([[1.0, 1, 1], [1, 1, 0]]))

    def loss(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, ids, None, None, tokens)) * tokens.weights[..., None])

    others = PermutedTokens(tokens.positions, jnp.full((2, 3), 9), tokens.weights)
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(*(run({"params": params}, ids, None, None, some) for some in (tokens, others)))
    assert np.abs(jax.jit(jax.grad(loss))(params)["bert"]["embeddings"]["query"]).max() > 1e-3
    ones = jnp.ones((2, 9), jnp.int32)
    packing = Packing(ones, jnp.broadcast_to(jnp.arange(9), (2, 9)), jnp.zeros((2, 1), jnp.int32))
    alone, packed = (run({"params": params}, ids, None, ones, tokens, packing=value) for value in (None, packing))
    np.testing.assert_allclose(alone, packed, atol=1e-5)


def test_the_pooler_reads_the_last_token() -> None:
    config = ModelConfig(**{**vars(CONFIG), "pooler_input": "last"})
    ids = jax.random.randint(jax.random.key(2), (3, 9), 5, 23)
    model = Bert(config)
    params = jax.jit(model.init)(jax.random.key(0), ids)
    run = jax.jit(model.apply)
    padded = run(params, ids, None, KEYS.astype(jnp.int32)).pooled_output
    packed = jnp.concatenate([ids[1:2, :4], ids[2:, :7]], axis=1)
    packing = Packing(jnp.array([[1] * 4 + [2] * 7]), jnp.array([[*range(4), *range(7)]]), jnp.array([[0, 4, 0]]))
    together = run(params, packed, None, None, packing=packing).pooled_output[0]
    np.testing.assert_allclose(together[:2], padded[1:], atol=1e-5)
    alone = run(params, ids[1:2, :4]).pooled_output
    np.testing.assert_allclose(alone[0], padded[1], atol=1e-5)
