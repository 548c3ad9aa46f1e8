"""The encoder-decoder: what each side sees, decoding with a cache, and what encoder and decoder share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert import Bert, BertForSequenceToSequence
from bert.config import Decoding, ModelConfig
from bert.inference.decoding import Decoded, Prompts, beam_search, sample
from bert.inference.sampling import DecodingArrays
from bert.model.attention import make_cache
from bert.model.dropout import Dropout
from bert.model.layers import LayerExecution
from bert.model.mask import Mask

CONFIG = ModelConfig(
    vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip
SHALLOW = dataclasses.replace(CONFIG, decoder_vocab_size=29, decoder_layers=1)
"""A decoder with another vocabulary and depth than the encoder."""
SHARED = ("none", "embeddings", "all")
SOURCE = jax.random.randint(jax.random.key(1), (3, 9), 0, 41)
LENGTHS = jnp.array([9, 4, 6])
ATTENTION = (jnp.arange(9) < LENGTHS[:, None]).astype(jnp.int32)
TARGET = jax.random.randint(jax.random.key(2), (3, 7), 0, 29)
START, END = 1, 2


@functools.cache
def model_of(name: str) -> tuple:
    """A model that shares what the name says, or has another decoder, with its parameters."""
    config = SHALLOW if name == "other decoder" else dataclasses.replace(CONFIG, share_decoder=name)
    model = BertForSequenceToSequence(config)
    return model, jax.jit(model.init)(jax.random.key(0), SOURCE, TARGET)


@pytest.mark.medium
@pytest.mark.parametrize("share", SHARED)
def test_the_parts_share_what_they_are_told_to(share: str) -> None:
    params = model_of(share)[1]["params"]
    cross = {"cross_attention", "cross_norm"}
    bert, decoder = params["bert"], params.get("decoder", {})
    assert set(bert) == {"embeddings", "encoder"}
    assert (cross <= set(bert["encoder"]["layer_0"])) == (share == "all")
    assert set(decoder) == {"none": {"embeddings", "encoder"}, "embeddings": {"encoder"}, "all": set()}[share]
    assert decoder == {} or cross <= set(decoder["encoder"]["layer_0"])


@pytest.mark.medium
def test_the_encoder_is_bert() -> None:
    model, params = model_of("none")
    memory = model.apply(params, SOURCE, ATTENTION, method="encode")
    alone = Bert(CONFIG, add_pooling_layer=False).apply({"params": params["params"]["bert"]}, SOURCE, None, ATTENTION)
    np.testing.assert_array_equal(memory.hidden_states, alone.last_hidden_state)


@pytest.mark.medium
@pytest.mark.parametrize("name", [*SHARED, "other decoder"])
def test_the_target_sees_the_source_and_what_is_before_it(name: str) -> None:
    model, params = model_of(name)
    logits = jax.jit(lambda source, mask, target: model.apply(params, source, target, mask))
    plain = logits(SOURCE, ATTENTION, TARGET)
    later = logits(SOURCE, ATTENTION, TARGET.at[:, 4:].set(3))
    np.testing.assert_array_equal(plain[:, :4], later[:, :4])
    assert np.abs(plain[:, 4:] - later[:, 4:]).max() > 1e-3
    padded = logits(jnp.where(ATTENTION == 1, SOURCE, 5), ATTENTION, TARGET)
    np.testing.assert_array_equal(plain, padded)
    other = logits(SOURCE.at[:, 0].add(1), ATTENTION, TARGET)
    assert np.abs(plain - other).max(axis=(1, 2)).min() > 1e-3, "every text depends on its source"


@pytest.mark.medium
@pytest.mark.parametrize("name", [pytest.param("none", marks=pytest.mark.slow), *SHARED[1:], "other decoder"])
def test_decoding_with_a_cache_gives_the_logits_of_teacher_forcing(name: str) -> None:
    model, params = model_of(name)
    expected = model.apply(params, SOURCE, TARGET, ATTENTION)
    memory = model.apply(params, SOURCE, ATTENTION, method="encode")
    cache = make_cache(model.config.decoder, 3, 10, jnp.float32)
    for start, end in ((0, 3), (3, 4), (4, 7)):
        mask, places = Mask(start=start, causal=True), jnp.arange(start, end)[None]
        logits, cache = model.apply(params, TARGET[:, start:end], places, mask, cache, memory, method="step")
        np.testing.assert_allclose(logits, expected[:, start:end], atol=1e-5)
        memory = memory.replace(hidden_states=jnp.zeros_like(memory.hidden_states))  # is in the cache


@pytest.mark.medium
def test_the_alignment_is_over_the_words_of_the_source() -> None:
    model, params = model_of("none")
    weights = model.apply(params, SOURCE, TARGET, ATTENTION, method="cross_attentions")
    assert [of_layer.shape for of_layer in weights] == [(3, 4, 7, 9)] * 2
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, atol=1e-5)
    assert np.where(ATTENTION[:, None, None] == 0, weights, 0).max() == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    "execution",
    [
        pytest.param(LayerExecution(remat="full"), id="remat", marks=pytest.mark.slow),
        pytest.param(LayerExecution(scan=True), id="scan"),
    ],
)
def test_other_ways_to_run_the_layers_give_the_same(execution: LayerExecution) -> None:
    model, params = model_of("none")
    dropout = Dropout.for_step(0, 3, jnp.arange(3))

    def loss(model: BertForSequenceToSequence, params: dict) -> jax.Array:
        return (model.apply(params, SOURCE, TARGET, ATTENTION, dropout=dropout) ** 2).mean()

    plain, other = (
        jax.jit(jax.grad(functools.partial(loss, made)))(params)
        for made in (model, dataclasses.replace(model, execution=execution))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, other)


@functools.partial(jax.jit, static_argnames=("name", "beams"))
def decode(params: dict, name: str, beams: int) -> Decoded:
    """Continuations of up to 8 tokens by the loops of every language model."""
    model = model_of(name)[0]
    memory = model.apply(params, SOURCE, ATTENTION, method="encode")
    start = jnp.full((3, 1), START)
    cache = make_cache(model.config.decoder, 3, 9, jnp.float32)
    first = Mask(start=0, causal=True)
    _, cache = model.apply(params, start, jnp.zeros((1, 1), jnp.int32), first, cache, memory, method="step")

    def step(tokens, position_ids, mask, cache):
        return model.apply(params, tokens, position_ids, mask, cache, memory, method="step")

    prompts = Prompts(start, jnp.ones((3, 1), jnp.int32), jnp.full(3, 8), jnp.zeros((3, 2), jnp.int32))
    arrays = DecodingArrays.make(Decoding(max_tokens=8, beams=beams), END)
    if beams == 1:
        return sample(step, cache, prompts, arrays, 8)
    return beam_search(step, cache, prompts, arrays, 8, beams)


@pytest.mark.medium
@pytest.mark.parametrize("name", [pytest.param("all", marks=pytest.mark.slow), "other decoder"])
def test_greedy_decoding_and_beams_score_as_teacher_forcing_does(name: str) -> None:
    model, params = model_of(name)
    greedy, beams = (jax.device_get(decode(params, name, count)) for count in (1, 4))
    log_probabilities = jax.jit(lambda target: jax.nn.log_softmax(model.apply(params, SOURCE, target, ATTENTION)))

    def of_target(row: int, tokens: list[int]) -> np.ndarray:
        """[T, V] after each of the tokens before the last, padded on the right to one length."""
        target = np.full((3, 9), END, np.int32)
        target[row, : len(tokens) + 1] = [START, *tokens]
        return np.asarray(log_probabilities(target))[row, : len(tokens)]

    for row in range(3):
        tokens = greedy.tokens[row, 0, : greedy.lengths[row, 0]].tolist()
        expected = of_target(row, tokens)
        assert expected.argmax(-1).tolist() == tokens
        assert expected.max(-1).sum() == pytest.approx(greedy.scores[row, 0], abs=1e-4)
        actual = [beams.tokens[row, k, : beams.lengths[row, k]].tolist() for k in range(4)]
        scores = [of_target(row, text)[range(len(text)), text].mean() for text in actual]
        np.testing.assert_allclose(beams.scores[row], scores, atol=1e-4)
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(text) for text in actual}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("copy_attention", [False, True])
def test_memory_grows_in_proportion_to_a_source_of_10_000_tokens(copy_attention: bool) -> None:
    """WikiSum's sources (Liu et al. 2018) with local attention: no array of all pairs, in the gradients either."""
    copies = {"copy_attention": True, "share_decoder": "embeddings"} if copy_attention else {}
    config = dataclasses.replace(CONFIG, attention_window=64, max_position_embeddings=10_000, **copies)
    model = BertForSequenceToSequence(config)

    def temporary_bytes(function: Callable, *arguments: Any) -> int:
        return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    def of_gradients(length: int) -> int:
        source, target = jnp.zeros((1, length), jnp.int32), jnp.zeros((1, 16), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), source[:, :8], target)
        return temporary_bytes(jax.grad(lambda params: model.apply(params, source, target, source + 1).sum()), params)

    def of_a_beam_step(length: int) -> int:
        """One token for each of four beams, whose cache holds the keys and values of the source."""
        source, token = jnp.zeros((4, length), jnp.int32), jnp.zeros((4, 1), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), source[:, :8], token)
        memory = jax.eval_shape(lambda params: model.apply(params, source, source + 1, method="encode"), params)

        def step(params: Any, cache: Any, memory: Any) -> Any:
            place = jnp.zeros((1, 1), jnp.int32)
            return model.apply(params, token, place, Mask(start=0, causal=True), cache, memory, method="step")

        _, cache = jax.eval_shape(step, params, make_cache(config.decoder, 4, 16, jnp.float32), memory)
        return temporary_bytes(step, params, cache, memory)

    for measured in (of_gradients, of_a_beam_step):
        whole, half = measured(10_000), measured(5_000)
        assert whole < 2.1 * half
        assert whole < 4 * 10_000**2 * 4 / 5, "the scores of four heads or beams with all pairs, over 5"
