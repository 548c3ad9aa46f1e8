"""Copying: its distribution against See et al.'s formula, decoding with a cache, and gradients in both precisions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert import BertForSequenceToSequence
from bert.config import Decoding, ModelConfig
from bert.data.rows import IGNORE_INDEX
from bert.inference.generators import decode_targets
from bert.inference.sampling import DecodingArrays
from bert.model.attention import Memory, make_cache
from bert.model.copying import CopyAttention, Copying
from bert.model.layers import LayerExecution
from bert.model.mask import Mask
from bert.training.token_losses import decoded_loss, sequence_loss, token_sums

V, START, END = 23, 1, 2
CONFIG = ModelConfig(
    vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2, share_decoder="embeddings", copy_attention=True,
)  # fmt: skip
SOURCE = jnp.array([[3, 5, 3, 7, 5, 3, 9], [4, 4, 8, 9, 0, 0, 0], [6, 7, 8, 9, 10, 0, 0]])
ATTENTION = (SOURCE > 0).astype(jnp.int32)
TARGET = jax.random.randint(jax.random.key(2), (3, 6), 0, V).at[:, 0].set(START)


@functools.cache
def model_and_params() -> tuple[BertForSequenceToSequence, Any]:
    model = BertForSequenceToSequence(CONFIG)
    return model, jax.jit(model.init)(jax.random.key(0), SOURCE, TARGET)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.medium
def test_the_distribution_is_that_of_the_pointer_generator() -> None:
    model, variables = model_and_params()
    copies = variables["params"]["copy_attention"]

    def parts(model: BertForSequenceToSequence) -> tuple[jax.Array, ...]:
        memory = model.encode(SOURCE, ATTENTION)
        states = model._decode(TARGET, None, Mask(causal=True), memory).last_hidden_state
        return memory.hidden_states, states, model.predictions(states, model.embedding_table())

    source, states, logits = map(np.asarray, model.apply(variables, method=parts))
    expected = np.zeros((3, 6, V))
    vocabulary = softmax(logits.astype(np.float64))
    for row in range(3):
        count = int(ATTENTION[row].sum())
        for place in range(6):
            query = states[row, place] @ copies["query"]["kernel"] + copies["query"]["bias"]
            attention = softmax(source[row, :count] @ query / np.sqrt(32))
            both = np.concatenate([states[row, place], attention @ source[row, :count]])
            p_gen = 1 / (1 + np.exp(-(both @ copies["gate"]["kernel"] + copies["gate"]["bias"])[0]))
            expected[row, place] = p_gen * vocabulary[row, place]
            for token, weight in zip(np.asarray(SOURCE[row, :count]), attention, strict=True):
                expected[row, place, token] += (1 - p_gen) * weight
    found = np.exp(jax.jit(model.apply)(variables, SOURCE, TARGET, ATTENTION))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_scores_give_finite_losses_and_gradients(dtype: Any) -> None:
    """The gate is shut in one direction, the attention is on one token, or the vocabulary has one token."""
    labels, ids = jnp.array([[3, 4, 9, 5]]), jnp.array([[3, 3, 4]])
    hidden, table = jnp.eye(4)[None].astype(dtype) * 1e4, jnp.eye(V, 4) * 1e3

    def loss(gate: jax.Array, scores: jax.Array) -> jax.Array:
        attention = jax.nn.log_softmax(scores)[None, None] * jnp.ones((1, 4, 1))
        copying = Copying(jax.nn.log_sigmoid(gate), jax.nn.log_sigmoid(-gate)[..., None] + attention, ids)
        return decoded_loss(hidden, table, jnp.zeros(V), labels, jnp.ones((1, 4)), copying=copying).loss[0]

    for gate in (-300.0, 0.0, 300.0):
        for scores in ([0, 0, 0], [500, 0, 0], [0, 0, 500]):
            value, grads = jax.value_and_grad(loss, argnums=(0, 1))(
                jnp.full((1, 4), gate), jnp.array(scores, jnp.float32)
            )
            assert np.isfinite(value) and all(np.isfinite(grad).all() for grad in grads), (gate, scores)


def random_copies(length: int) -> Copying:
    """Copies of the three sources at each position, with the weights of padding at 0."""
    gate, scores = (jax.random.normal(jax.random.key(n), (3, length, n)) for n in (1, 7))
    attention = jax.nn.log_softmax(jnp.where(ATTENTION[:, None] > 0, 3 * scores, -1e30))
    return Copying(jax.nn.log_sigmoid(gate[..., 0]), jax.nn.log_sigmoid(-gate) + attention, SOURCE)


@pytest.mark.medium
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_by_stretches_have_the_values_and_gradients_of_the_whole(smoothing: float) -> None:
    hidden, table = jax.random.normal(jax.random.key(3), (3, 6, 8)), jax.random.normal(jax.random.key(4), (V, 8))
    labels = jnp.concatenate([TARGET[:, 1:], SOURCE[:, :1]], axis=1)
    weights = jnp.array([[1.0] * 6, [1.0] * 4 + [0.0] * 2, [1.0] * 5 + [0.0]])
    bias, copies = jnp.zeros(V), random_copies(6)
    batch = {"labels": jnp.where(weights > 0, labels, IGNORE_INDEX)}

    def whole(hidden: Any, generate: Any, copy: Any) -> Any:
        logits = Copying(generate, copy, SOURCE).mix(hidden @ table.T)
        sums = token_sums(logits, labels, weights, smoothing, V)
        return sums.loss[0], tuple(sums)

    def by_stretches(hidden: Any, generate: Any, copy: Any, stretch: int | None) -> Any:
        copying = Copying(generate, copy, SOURCE)
        if stretch is None:
            sums = sequence_loss(smoothing, V).sums((hidden, table, bias, copying), batch)
        else:
            options = {"label_smoothing": smoothing, "vocab_size": V, "copying": copying, "stretch": stretch}
            sums = decoded_loss(hidden, table, bias, labels, weights, **options)
        return sums[0][0], tuple(sums)

    inputs = (hidden, copies.generate, copies.copy)
    expected = jax.jit(jax.grad(whole, argnums=(0, 1, 2), has_aux=True))(*inputs)
    for stretch in (None, 4):
        run = functools.partial(by_stretches, stretch=stretch)
        found = jax.jit(jax.grad(run, argnums=(0, 1, 2), has_aux=True))(*inputs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.medium
def test_the_slope_is_that_of_finite_differences() -> None:
    states, source, logits = (jax.random.normal(jax.random.key(n), (3, 6 + (n == 7), n)) for n in (8, 7, V))
    memory = Memory(source[..., :1] * jnp.linspace(-1, 1, 8), Mask(keys=ATTENTION), SOURCE)
    module = CopyAttention(dataclasses.replace(CONFIG, hidden_size=8))
    point = (module.init(jax.random.key(0), states, memory), states, logits)
    way = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), point)

    @jax.jit
    def loss(step: float) -> jax.Array:
        variables, states, logits = jax.tree.map(lambda leaf, direction: leaf + step * direction, point, way)
        mixed: Any = module.apply(variables, states, memory)
        return token_sums(mixed.mix(logits), TARGET, jnp.ones((3, 6))).loss[0]

    difference = (float(loss(1e-2)) - float(loss(-1e-2))) / 2e-2
    assert float(jax.jit(jax.grad(loss))(0.0)) == pytest.approx(difference, rel=1e-3)


@pytest.mark.slow
def test_decoding_with_a_cache_gives_the_distribution_of_teacher_forcing() -> None:
    model, variables = model_and_params()
    expected = model.apply(variables, SOURCE, TARGET, ATTENTION)
    memory = model.apply(variables, SOURCE, ATTENTION, method="encode")
    cache = make_cache(CONFIG.decoder, 3, 6, jnp.float32)
    for start, end in ((0, 3), (3, 4), (4, 6)):
        mask, places = Mask(start=start, causal=True), jnp.arange(start, end)[None]
        logits, cache = model.apply(variables, TARGET[:, start:end], places, mask, cache, memory, method="step")
        np.testing.assert_allclose(logits, expected[:, start:end], atol=2e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("beams", "temperature"),
    [pytest.param(1, 0.0, marks=pytest.mark.slow), (4, 0.0), pytest.param(1, 1.0, marks=pytest.mark.slow)],
)
def test_texts_have_the_scores_of_teacher_forcing(beams: int, temperature: float) -> None:
    model, variables = model_and_params()
    arrays = DecodingArrays.make(Decoding(max_tokens=5, beams=beams, temperature=temperature), END)
    run = functools.partial(decode_targets, model, start=START, max_tokens=5, beams=beams)
    numbers = jnp.zeros((3, 2), jnp.int32)
    decoded = jax.jit(lambda params: run(params, (SOURCE, ATTENTION), jnp.full(3, 5), numbers, arrays))(
        variables["params"]
    )
    target = np.concatenate([np.full((3, 1), START), decoded.tokens[:, 0, :-1]], axis=1)
    log_probabilities = model.apply(variables, SOURCE, target, ATTENTION)
    for row in range(3):
        length = int(decoded.lengths[row, 0])
        total = sum(float(log_probabilities[row, t, decoded.tokens[row, 0, t]]) for t in range(length))
        norm = length if beams > 1 else 1
        assert float(decoded.scores[row, 0]) == pytest.approx(total / norm, abs=1e-4)


@pytest.mark.medium
def test_copies_depend_on_neither_the_kernel_nor_scanned_layers_nor_padding_of_the_vocabulary() -> None:
    model, variables = model_and_params()
    expected = model.apply(variables, SOURCE, TARGET, ATTENTION)
    for execution in (LayerExecution(attention="xla", scan=True), LayerExecution(pad_vocab_to_multiple_of=32)):
        found = dataclasses.replace(model, execution=execution).apply(variables, SOURCE, TARGET, ATTENTION)
        np.testing.assert_allclose(found[..., :V], expected, atol=1e-5)
        assert (np.exp(found[..., V:]) == 0).all()


def share_of_copied_names(copy_attention: bool, steps: int) -> float:
    """Trains to answer with the name after a mark, and returns the share of right names that training never had."""
    config = dataclasses.replace(CONFIG, vocab_size=60, initializer_range=0.1, copy_attention=copy_attention)
    model = BertForSequenceToSequence(config)
    stream = np.random.default_rng(0)

    def rows(names: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        sources = stream.choice(names, (count, 6))
        places = stream.integers(0, 5, count)
        sources[np.arange(count), places] = 3
        return sources, sources[np.arange(count), places + 1]

    known, unknown = np.arange(4, 45), np.arange(45, 60)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 6), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    optimizer = optax.adam(3e-3)
    starts = jnp.full((64, 1), START)

    def loss(variables: Any, sources: jax.Array, labels: jax.Array) -> jax.Array:
        return token_sums(model.apply(variables, sources, starts), labels[:, None], jnp.ones((64, 1))).loss[0] / 64

    @jax.jit
    def step(variables: Any, state: Any, sources: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(variables, sources, labels), state)
        return optax.apply_updates(variables, updates), state

    state = optimizer.init(variables)
    for _ in range(steps):
        variables, state = step(variables, state, *rows(known, 64))
    sources, labels = rows(unknown, 64)
    return float(np.mean(np.argmax(model.apply(variables, sources, starts)[:, 0], axis=-1) == labels))


@pytest.mark.slow
def test_names_that_training_never_had_are_copied() -> None:
    assert share_of_copied_names(copy_attention=True, steps=300) > 0.9
    assert share_of_copied_names(copy_attention=False, steps=300) < 0.2
