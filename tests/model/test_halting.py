"""Adaptive halting: the formulas of Graves 2016 in a loop over positions, and every way to execute the layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import make_cache
from bert.model.decoders import BertForCausalLM
from bert.model.encoder import Encoder
from bert.model.halting import Halting, sown_halting
from bert.model.layers import Layer, LayerExecution
from bert.model.mask import Mask
from bert.model.positions import step_embeddings
from bert.model.pretraining import BertForMaskedLM
from bert.training.losses import make_pretraining_loss, with_ponder_loss
from bert.training.token_losses import make_next_token_loss

pytestmark = pytest.mark.medium

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=12, num_hidden_layers=5, num_attention_heads=3, intermediate_size=20, layer_groups=1,
    step_embedding=True, halting=0.25, initializer_range=0.5, max_position_embeddings=16,
)  # fmt: skip
X = jax.random.normal(jax.random.key(1), (3, 9, 12))
KEYS = jnp.arange(9)[None] < jnp.array([[9], [4], [7]])


@functools.cache
def initial_params() -> Any:
    params = jax.jit(Encoder(CONFIG).init)(jax.random.key(0), X, Mask())["params"]
    return {**params, "halting_kernel": 4 * params["halting_kernel"], "halting_bias": jnp.float32(-1)}


def run(config: ModelConfig, params: Any, x: jax.Array, mask: Mask, **settings: Any) -> tuple[jax.Array, Any]:
    output, variables = Encoder(config, **settings).apply({"params": params}, x, mask, mutable=["halting"])
    return output.last_hidden_state, sown_halting(variables)


def test_by_hand() -> None:
    """The states of all positions are made by the layer; everything else is a loop over the positions."""
    params = initial_params()
    output, halting = jax.jit(lambda: run(CONFIG, params, X, Mask(keys=KEYS)))()
    layer = jax.jit(lambda x: Layer(CONFIG).apply({"params": params["layer_0"]}, x, Mask(keys=KEYS))[0])
    kernel, bias = np.asarray(params["halting_kernel"]), float(params["halting_bias"])
    state = np.array(X)
    expected, spent = np.zeros_like(state), np.zeros((3, 9))
    steps, ponder, running = np.zeros((3, 9)), np.zeros((3, 9)), np.ones((3, 9), bool)
    for number in range(5):
        new = np.array(layer(state + np.asarray(step_embeddings(CONFIG))[number]))
        for place in np.ndindex(3, 9):
            if not running[place]:
                continue  # the state is copied
            state[place] = new[place]
            steps[place] += 1
            probability = 1 / (1 + np.exp(-(new[place] @ kernel + bias)))
            if spent[place] + probability >= 0.99 or number == 4:
                rest = 1 - spent[place]
                expected[place] += rest * new[place]
                ponder[place], running[place] = steps[place] + rest, False
            else:
                expected[place] += probability * new[place]
                spent[place] += probability
    assert len(set(steps[KEYS].tolist())) >= 2, "positions need different numbers of steps"
    np.testing.assert_array_equal(halting.steps, steps)
    np.testing.assert_allclose(halting.ponder, ponder, atol=1e-5)
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize(("epsilon", "runs_on"), [(None, [True, True]), (0.5, [False, True])])
def test_a_position_halts_with_a_remainder_of_at_most_epsilon(epsilon: float | None, runs_on: list[bool]) -> None:
    old, new, probabilities = jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1)), jnp.array([[0.6, 0.4]])
    settings = {} if epsilon is None else {"epsilon": epsilon}
    _, state = Halting.start(old).after(old, new, probabilities, is_last=False, **settings)
    assert state.running.tolist() == [runs_on]
    np.testing.assert_allclose(state.output[..., 0], [[0.6 if runs_on[0] else 1.0, 0.4]], rtol=1e-6)


@pytest.mark.slow
def test_every_way_of_running_the_layers() -> None:
    """Padding, packed rows, the kernel, the loop and recomputation change neither results nor gradients."""
    params = initial_params()
    expected, halting = jax.jit(lambda: run(CONFIG, params, X, Mask(keys=KEYS)))()
    packed = jnp.concatenate([X[1:2, :4], X[2:, :7]], axis=1)
    examples = jnp.array([[1] * 4 + [2] * 7])
    together, packed_halting = jax.jit(lambda: run(CONFIG, params, packed, Mask(examples=examples)))()
    np.testing.assert_allclose(together[0], jnp.concatenate([expected[1, :4], expected[2, :7]]), atol=1e-5)
    np.testing.assert_array_equal(
        packed_halting.steps[0], jnp.concatenate([halting.steps[1, :4], halting.steps[2, :7]])
    )

    def value_and_gradients(execution: LayerExecution):
        def loss(params):
            output, halting = run(CONFIG, params, X, Mask(keys=KEYS), execution=execution)
            return jnp.sum((jnp.sin(output).sum(-1) + halting.ponder) * KEYS)

        return jax.jit(jax.value_and_grad(loss))(params)

    plain = value_and_gradients(LayerExecution())
    assert np.abs(plain[1]["halting_kernel"]).min() > 0
    other = value_and_gradients(LayerExecution(attention="xla", scan=True, remat="full"))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3), plain, other)


def test_decoding_with_a_cache() -> None:
    config, params = dataclasses.replace(CONFIG, causal=True), initial_params()

    @jax.jit
    def whole_and_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole, _ = run(config, params, x, Mask(causal=True))
        cache, outputs = make_cache(config, 3, 12, jnp.float32), []
        for start, part in [(0, x[:, :6]), (6, x[:, 6:])]:
            states = Encoder(config).apply({"params": params}, part, Mask(start=start, causal=True), cache=cache)
            cache = states.cache
            outputs.append(states.last_hidden_state)
        return whole, jnp.concatenate(outputs, axis=1)

    np.testing.assert_allclose(*whole_and_parts(X), atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_cost_is_a_mean_over_the_tokens(causal: bool) -> None:
    ids, places = jnp.arange(18).reshape(2, 9) % 23, jnp.array([[1, 2], [3, 0]])
    mask = jnp.ones((2, 9), jnp.int32).at[1, 5:].set(0)
    batch = {
        **{"input_ids": ids, "token_type_ids": jnp.zeros_like(ids), "attention_mask": mask},
        **{"masked_lm_positions": places, "masked_lm_ids": places, "masked_lm_weights": jnp.ones((2, 2))},
        **{"next_token_ids": ids, "next_token_weights": mask.astype(jnp.float32)},
    }
    model = (BertForCausalLM if causal else BertForMaskedLM)(dataclasses.replace(CONFIG, causal=causal))
    make_loss = make_next_token_loss if causal else lambda model: make_pretraining_loss(model.apply, None)
    loss = with_ponder_loss(make_loss, model, 0.25)
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    losses, counts = jax.jit(lambda: loss.forward(params, batch, None))()
    _, variables = model.apply({"params": params}, ids, batch["token_type_ids"], mask, mutable=["halting"])
    halting = sown_halting(variables)
    for (total, weight), values in ((losses["ponder_loss"], halting.ponder), (counts["ponder_steps"], halting.steps)):
        assert float(weight) == 14
        np.testing.assert_allclose(total, float(jnp.sum(values * mask)), rtol=1e-5)
    plain = make_loss(model).forward(params, batch, None)[0]
    name = "lm_loss" if causal else "mlm_loss"
    np.testing.assert_allclose(losses[name], plain[name], rtol=1e-6)
    assert float(loss.weights(batch)["ponder_loss"]) == 14 and loss.factors["ponder_loss"] == 0.25
    assert set(loss.metrics) == {*losses, *counts}
