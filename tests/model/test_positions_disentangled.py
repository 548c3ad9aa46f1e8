"""Disentangled attention: computed by hand for each pair, and equal for every way to execute the layers."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import make_cache
from bert.model.dropout import Dropout
from bert.model.encoder import Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask
from bert.model.positions import Disentangled, buckets_by_distance

pytestmark = pytest.mark.medium

CONFIG = ModelConfig(
    hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, max_position_embeddings=16,
    position_embedding_type="disentangled", relative_attention_buckets=8, initializer_range=0.5,
)  # fmt: skip
LINEAR = dataclasses.replace(CONFIG, position_embedding_type="deberta_v1", relative_attention_buckets=6)
CONFIGS = {
    "buckets": CONFIG,
    "linear": LINEAR,
    "query and position": dataclasses.replace(LINEAR, disentangled_products="content_to_position"),
    "key and position": dataclasses.replace(CONFIG, disentangled_products="position_to_content"),
}
X = jax.random.normal(jax.random.key(1), (3, 9, 12))
KEYS = jnp.arange(9)[None] < jnp.array([[9], [4], [7]])


@functools.cache
def initial_params(config: ModelConfig = CONFIG) -> Any:
    """Initial parameters with noise added, because biases and LayerNorm start as zeros and ones."""
    leaves, tree = jax.tree.flatten(jax.jit(Encoder(config).init)(jax.random.key(0), X, Mask()))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return tree.unflatten(
        [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def distance_vectors(config: ModelConfig, params: dict) -> np.ndarray:
    """The vectors of the distances, which only models with buckets normalize."""
    table = params["relative_attention_embeddings"]["embedding"]
    if config.position_embedding_type == "deberta_v1":
        return np.asarray(table)
    norm = params["relative_attention_norm"]
    centred = table - table.mean(-1, keepdims=True)
    vectors = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
    return vectors * norm["scale"] + norm["bias"]


def weights_by_hand(config: ModelConfig, row: np.ndarray, real: int) -> np.ndarray:
    """The weights [N, T, S] of the first layer, by a loop over the pairs of the tokens that are not padding."""
    params = jax.tree.map(np.asarray, initial_params(config)["params"])
    is_linear = config.position_embedding_type == "deberta_v1"
    vectors, attention = distance_vectors(config, params), params["layer_0"]["attention"]

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ attention[name]["kernel"] + attention[name].get("bias", 0)).reshape(-1, 3, 4)

    query, key = project(row, "query"), project(row, "key")
    has_query_product, has_key_product = (
        config.disentangled_products in ("both", name) for name in ("content_to_position", "position_to_content")
    )
    owner = "distance_" if is_linear else ""
    result = np.zeros((3, 9, 9))
    for head in range(3):
        scores = np.full((real, real), -np.inf)
        for i, j in np.ndindex(real, real):
            bucket = 4 + np.sign(i - j) * [0, 1, 2, 3, 3, 3, 3, 3, 3][abs(i - j)]
            bucket = min(max(i - j, -3), 2) + 3 if is_linear else bucket
            scores[i, j] = query[i, head] @ key[j, head]
            if has_query_product:
                scores[i, j] += query[i, head] @ project(vectors, f"{owner}key")[bucket, head]
            if has_key_product:
                scores[i, j] += key[j, head] @ project(vectors, f"{owner}query")[bucket, head]
        exponents = np.exp(scores / np.sqrt((1 + has_query_product + has_key_product) * 4))
        result[head, :real, :real] = exponents / exponents.sum(-1, keepdims=True)
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_pair_by_pair(name: str) -> None:
    config = CONFIGS[name]
    params = initial_params(config)
    assert ("bias" in params["params"]["layer_0"]["attention"]["key"]) == ("buckets" in name or "key" in name)
    states = jax.jit(partial(Encoder(config).apply, intermediates=True))(params, X, Mask(keys=KEYS))
    for row, real in enumerate((9, 4, 7)):
        expected = weights_by_hand(config, np.asarray(X[row]), real)
        np.testing.assert_allclose(states.attentions[0][row, :, :real], expected[:, :real], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["buckets", "linear"])
def test_every_way_of_running_the_layers(name: str) -> None:
    """Padding that is cut off, packed rows, the kernel, the loop, recomputation and a cache change nothing."""
    config = CONFIGS[name]
    params, apply = initial_params(config), jax.jit(Encoder(config).apply)
    expected = apply(params, X, Mask(keys=KEYS)).last_hidden_state
    np.testing.assert_allclose(apply(params, X[1:2, :4], Mask()).last_hidden_state, expected[1:2, :4], atol=1e-5)
    packed = jnp.concatenate([X[1:2, :4], X[2:, :7], X[:1, :2]], axis=1)
    examples = jnp.array([[1] * 4 + [2] * 7 + [0] * 2])
    actual = apply(params, packed, Mask(examples=examples)).last_hidden_state[0]
    np.testing.assert_allclose(actual[:11], jnp.concatenate([expected[1, :4], expected[2, :7]]), atol=1e-5)

    def value_and_gradients(execution: LayerExecution):
        def loss(params):
            states = Encoder(config, execution=execution).apply(params, X, Mask(keys=KEYS))
            return jnp.sum(jnp.sin(states.last_hidden_state) * KEYS[..., None])

        return jax.jit(jax.value_and_grad(loss))(params)

    plain = value_and_gradients(LayerExecution())
    table = plain[1]["params"]["relative_attention_embeddings"]["embedding"]
    assert np.isfinite(table).all() and np.abs(table[1:]).min() > 0
    assert table[0].any() == (name == "linear")  # no distance is in the first bucket
    other = value_and_gradients(LayerExecution(attention="xla", scan=True, remat="full"))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4), plain, other)


@pytest.mark.parametrize("name", ["buckets", "linear"])
def test_decoding_with_a_cache(name: str) -> None:
    config, params = CONFIGS[name], initial_params(CONFIGS[name])

    @jax.jit
    def whole_and_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = Encoder(config).apply(params, x, Mask(causal=True)).last_hidden_state
        cache, outputs = make_cache(config, 3, 12, jnp.float32), []
        for start, part in [(0, x[:, :6]), (6, x[:, 6:])]:
            states = Encoder(config).apply(params, part, Mask(start=start, causal=True), cache=cache)
            cache = states.cache
            outputs.append(states.last_hidden_state)
        return whole, jnp.concatenate(outputs, axis=1)

    np.testing.assert_allclose(*whole_and_parts(X), atol=1e-5)


def test_buckets_by_hand() -> None:
    """Sixteen buckets for both sides: distances 0 to 4 separately, then by logarithm up to the longest distance, 31."""
    buckets = buckets_by_distance(16, 31, round_up=True)
    edges = 4 * (31 / 4) ** (np.arange(1, 4) / 3)  # the last distances of the buckets that grow
    assert buckets.tolist() == [*range(5), *(5 + int(np.sum(d > edges + 1e-4)) for d in range(5, 32))]
    positions = Disentangled.from_distances(jnp.zeros((16, 12)), jnp.array([[[-40, -3, 0, 4, 31]]]), 32)
    assert positions.buckets.tolist() == [[[1, 5, 8, 12, 15]]]


def test_dropout_of_vectors_is_that_of_no_row() -> None:
    positions = Disentangled(jnp.ones((8, 12)), jnp.zeros((1, 1, 1), int))
    rows = (np.arange(5), np.arange(7, 9))
    dropped = jax.jit(lambda: [positions.dropped(Dropout.for_step(0, 1, jnp.array(x)), 0.4) for x in rows])()
    np.testing.assert_array_equal(*dropped)
    np.testing.assert_allclose(np.unique(dropped[0]), [0, 1 / 0.6], rtol=1e-6)
    assert positions.dropped(None, 0.4) is positions.embeddings
