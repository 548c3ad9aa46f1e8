"""Decoding with a cache, and cross-attention, against the whole sequence in one call."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import LayerCache, Memory, make_cache
from bert.model.encoder import Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip
X = jax.random.normal(jax.random.key(2), (3, 9, 32))
KEYS = (jnp.arange(9) >= jnp.array([0, 3, 1])[:, None]).astype(jnp.int32)  # left-padded prompts
MEMORY = Memory(
    jax.random.normal(jax.random.key(3), (3, 5, 32)),
    Mask(keys=jnp.arange(5) < jnp.array([5, 2, 4])[:, None], right_padded=True),
)


@functools.cache
def decoder(pre_layer_norm: bool, kernel: str = "written") -> tuple:
    encoder = Encoder(
        dataclasses.replace(CONFIG, pre_layer_norm=pre_layer_norm), execution=LayerExecution(attention=kernel)
    )
    params = jax.jit(encoder.init)(jax.random.key(0), X, Mask(), memory=MEMORY)
    return encoder, params, jax.jit(encoder.apply)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("pre_layer_norm", "kernel"),
    [
        (False, "written"),
        (True, "xla"),
        pytest.param(True, "written", marks=pytest.mark.slow),
        pytest.param(False, "xla", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("memory", "window"), [(None, None), (None, 3), (MEMORY, None)])
def test_decoding_token_by_token_is_the_whole_causal_forward_pass(pre_layer_norm, kernel, memory, window) -> None:
    """The prompt's 4 positions in one call, then a position a call, in one program for all positions."""
    _, params, run = decoder(pre_layer_norm, kernel)
    whole = run(params, X, Mask(keys=KEYS, causal=True, window=window), memory=memory).last_hidden_state
    padded = jnp.pad(KEYS, ((0, 0), (0, 7)), constant_values=1)  # room for more than is decoded
    cache = make_cache(CONFIG, 3, 16, jnp.float32)
    outputs = []
    for start, x in [(0, X[:, :4]), *((place, X[:, place : place + 1]) for place in range(4, 9))]:
        mask = Mask(keys=padded, start=jnp.asarray(start), causal=True, window=window)
        states = run(params, x, mask, memory=memory, cache=cache)
        cache = states.cache
        outputs.append(states.last_hidden_state)
    # The same float32 products, summed in the order of other shapes: a few roundings of numbers of size 1.
    real = KEYS.astype(bool)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1)[real], whole[real], atol=3e-6)


@pytest.mark.medium
def test_the_keys_and_values_of_a_memory_are_computed_once() -> None:
    _, params, run = decoder(False)
    mask = Mask(start=jnp.asarray(0), causal=True)
    first = run(params, X[:, :1], mask, memory=MEMORY, cache=make_cache(CONFIG, 3, 9, jnp.float32)).cache
    assert (first[0].memory.keys.shape, first[0].memory.values.shape) == ((12, 8, 5), (12, 5, 8))
    other = MEMORY.replace(hidden_states=jnp.full((3, 5, 32), jnp.nan))
    later = run(params, X[:, 1:2], mask.replace(start=jnp.asarray(1)), memory=other, cache=first)
    assert np.isfinite(later.last_hidden_state).all()
    again = run(params, X[:, :2], mask, memory=MEMORY, cache=make_cache(CONFIG, 3, 9, jnp.float32)).last_hidden_state
    np.testing.assert_allclose(later.last_hidden_state[:, 0], again[:, 1], atol=3e-6)


@pytest.mark.medium
def test_a_cache_keeps_its_shapes_in_a_compiled_loop() -> None:
    encoder, params, run = decoder(True)

    @jax.jit
    def decode(params, x):
        def step(cache: tuple[LayerCache, ...], place):
            now = jax.lax.dynamic_slice_in_dim(x, place, 1, axis=1)
            states = encoder.apply(params, now, Mask(start=place, causal=True), cache=cache)
            return states.cache, states.last_hidden_state[:, 0]

        return jax.lax.scan(step, make_cache(CONFIG, 3, 9, jnp.float32), jnp.arange(9))[1].swapaxes(0, 1)

    whole = run(params, X, Mask(causal=True)).last_hidden_state
    np.testing.assert_allclose(decode(params, X), whole, atol=3e-6)


@pytest.mark.medium
def test_no_position_has_a_gradient_from_a_later_one() -> None:
    encoder, params, _ = decoder(True)
    # One feature: the sum of all of them is the same after every LayerNorm.
    outputs = lambda x: encoder.apply(params, x, Mask(causal=True)).last_hidden_state[0, :, 0]  # noqa: E731
    influence = jnp.abs(jax.jit(jax.jacrev(outputs))(X[:1])[:, 0]).sum(-1)
    np.testing.assert_array_equal(jnp.triu(influence, 1), 0)
    assert (jnp.diag(influence) > 0.1).all()


def test_only_a_layer_with_a_memory_has_cross_attention() -> None:
    shapes = lambda memory: jax.eval_shape(  # noqa: E731
        lambda: Encoder(CONFIG).init(jax.random.key(0), X, Mask(), memory=memory)
    )["params"]["layer_1"]
    plain, cross = shapes(None), shapes(MEMORY)
    assert set(cross) - set(plain) == {"cross_attention", "cross_norm"}
    assert set(cross["cross_attention"]) == {"query", "key", "value", "output"}
    assert jax.tree.map(jnp.shape, {name: cross[name] for name in plain}) == jax.tree.map(jnp.shape, plain)


@pytest.mark.medium
@pytest.mark.parametrize("execution", [LayerExecution("full"), LayerExecution("dots", scan=True)])
def test_how_layers_are_run_changes_no_number_of_a_decoder(execution: LayerExecution) -> None:
    encoder, params, run = decoder(False)
    other = Encoder(encoder.config, execution=execution)
    mask = Mask(keys=KEYS, causal=True)
    expected = run(params, X, mask, memory=MEMORY).last_hidden_state
    np.testing.assert_allclose(
        jax.jit(other.apply)(params, X, mask, memory=MEMORY).last_hidden_state, expected, atol=3e-6
    )
