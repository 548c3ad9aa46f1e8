"""Generator, discriminator, and the sampling between them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.electra import (
    BertForReplacedTokenDetection,
    Electra,
    MaskedTokens,
    extract_generator,
    make_generator_config,
    sample_tokens,
)
from bert.model.pretraining import BertForMaskedLM

V, T, P, B = 300, 12, 3, 4
CONFIG = ModelConfig(V, 16, 2, 2, 32, max_position_embeddings=T, initializer_range=0.2, embedding_size=8)
MODEL = Electra(CONFIG, make_generator_config(CONFIG, 4))
IDS = jnp.asarray(np.random.default_rng(0).integers(5, V, (B, T)), jnp.int32)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(0), IDS)["params"]


apply, sample = jax.jit(MODEL.apply), jax.jit(sample_tokens)


def masked(weights: np.ndarray | None = None) -> MaskedTokens:
    random = np.random.default_rng(1)
    positions = jnp.asarray(
        np.sort(random.permuted(np.tile(np.arange(1, T), (B, 1)), axis=1)[:, :P], axis=1), jnp.int32
    )
    weights = jnp.ones((B, P)) if weights is None else jnp.asarray(weights)
    uniforms = jnp.asarray(random.random((B, P)), jnp.float32)
    return MaskedTokens(positions, jnp.take_along_axis(IDS, positions, axis=1), weights, uniforms)


def test_samples_are_the_inverse_of_the_cumulative_softmax() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 40, V)).astype(np.float32) * 3
    uniforms = random.random((5, 40)).astype(np.float32)
    sampled = np.asarray(sample(logits, uniforms))
    exact = np.exp(logits.astype(np.float64))
    cumulative = np.cumsum(exact / exact.sum(-1, keepdims=True), axis=-1)
    above = np.take_along_axis(cumulative, sampled[..., None], -1)[..., 0]
    below = np.where(sampled > 0, np.take_along_axis(cumulative, np.maximum(sampled - 1, 0)[..., None], -1)[..., 0], 0)
    assert (below - 1e-6 <= uniforms).all()
    assert (uniforms <= above + 1e-6).all()


def test_samples_have_the_probabilities_of_the_softmax() -> None:
    logits = np.full(204, -np.inf, np.float32)
    logits[[200, 201, 203]] = np.log([0.5, 0.0625, 0.4375])
    uniforms = (np.arange(1600, dtype=np.float32) / 1600).reshape(1, -1)
    sampled = np.asarray(sample(np.broadcast_to(logits, (1, 1600, len(logits))), uniforms))
    assert dict(zip(*(a.tolist() for a in np.unique(sampled, return_counts=True)), strict=True)) == {
        200: 800,
        201: 100,
        203: 700,
    }


@pytest.mark.parametrize("width", [1, 127, 128, 129, 500])
def test_the_largest_random_number_is_a_token_of_the_vocabulary(width: int) -> None:
    logits = np.full((1, 2, width), np.finfo(np.float32).min, np.float32)  # as the MLM head pads a vocabulary
    logits[..., : width // 2 + 1] = np.random.default_rng(0).normal(size=width // 2 + 1)
    sampled = sample(logits, np.array([[0, 1 - 2**-24]], np.float32))
    assert sampled.tolist() == [[0, width // 2]]


@pytest.mark.medium
def test_the_discriminator_reads_the_samples_and_the_labels_say_where_they_differ() -> None:
    places = masked(np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], np.float32))
    output = apply({"params": initial_params()}, IDS, None, None, places)
    sampled = np.asarray(sample(output.prediction_logits, places.uniforms))
    filled, replaced = np.array(IDS), np.zeros((B, T))
    for row, place in zip(*np.nonzero(places.weights), strict=True):
        position = places.positions[row, place]
        filled[row, position] = sampled[row, place]
        replaced[row, position] = sampled[row, place] != places.ids[row, place]
    assert replaced.sum() > 2
    np.testing.assert_array_equal(output.replaced, replaced)
    discriminator = BertForReplacedTokenDetection(CONFIG)
    expected = jax.jit(discriminator.apply)(
        {"params": {k: v for k, v in initial_params().items() if k != "generator"}}, filled
    )
    np.testing.assert_allclose(output.detection_logits, expected, atol=1e-6)


@pytest.mark.medium
def test_a_perfect_generator_leaves_nothing_to_find() -> None:
    """The output bias leaves one possible token, which is the token in every row."""
    bias = initial_params()["generator"]["predictions"]["bias"].at[7].set(1e4)
    generator = {
        **initial_params()["generator"],
        "predictions": {**initial_params()["generator"]["predictions"], "bias": bias},
    }
    places = masked().replace(ids=jnp.full((B, P), 7, jnp.int32))
    ids = jnp.full((B, T), 7, jnp.int32)
    output = apply({"params": {**initial_params(), "generator": generator}}, ids, None, None, places)
    assert not np.asarray(output.replaced).any()


@pytest.mark.medium
def test_the_generator_alone_is_a_masked_language_model_over_the_same_embeddings() -> None:
    config, params = extract_generator(CONFIG, initial_params())
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == (4, 16, 1)
    places = masked()
    alone = jax.jit(BertForMaskedLM(config).apply)({"params": params}, IDS, None, None, places.positions)
    together = apply({"params": initial_params()}, IDS, None, None, places).prediction_logits
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (256, 4), (200, 2), (8, 1), (341, 1)])
def test_the_generators_heads_divide_its_width(width: int, heads: int) -> None:
    generator = make_generator_config(CONFIG, width)
    generator.check()
    assert (generator.num_attention_heads, generator.embedding_width) == (heads, 8)


@pytest.mark.medium
def test_without_narrow_embeddings_the_generator_has_the_discriminators_width_projected() -> None:
    config = ModelConfig(V, 16, 1, 2, 32, max_position_embeddings=T)
    model = Electra(config, make_generator_config(config, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), IDS)["params"]
    assert params["generator"]["projection"]["kernel"].shape == (16, 4)
    assert "projection" not in params["bert"]["embeddings"]
    assert params["generator"]["predictions"]["transform"]["kernel"].shape == (4, 16)
