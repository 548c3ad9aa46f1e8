"""Attention as a module, activations and the layer, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.encoder import Encoder
from bert.model.linear import ACTIVATIONS
from bert.model.mask import Mask
from bert.model.multi_head import Attention

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip


@pytest.mark.medium
def test_self_attention_is_cross_attention_over_itself_and_heads_are_apart() -> None:
    attention = Attention(CONFIG)
    x = jax.random.normal(jax.random.key(2), (2, 5, 32))
    params = jax.jit(attention.init)(jax.random.key(0), x, x, Mask())
    apply = jax.jit(attention.apply)
    out, weights = apply(params, x, x, Mask())
    assert out.shape == (2, 5, 32)
    assert weights.shape == (2, 4, 5, 5)
    memory = jax.random.normal(jax.random.key(3), (2, 7, 32))
    cross, weights = apply(params, x, memory, Mask())
    assert weights.shape == (2, 4, 5, 7)
    # The layer by hand, head by head.
    p = {name: (np.asarray(v["kernel"]), np.asarray(v["bias"])) for name, v in params["params"].items()}
    q, k, v = (np.asarray(a) @ p[n][0] + p[n][1] for n, a in (("query", x), ("key", memory), ("value", memory)))
    heads = []
    for h in range(4):
        part = slice(8 * h, 8 * h + 8)
        scores = np.exp(q[..., part] @ k[..., part].swapaxes(1, 2) / np.sqrt(8))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[..., part])
    by_hand = np.concatenate(heads, axis=-1) @ p["output"][0] + p["output"][1]
    np.testing.assert_allclose(cross, by_hand, atol=1e-5)


@pytest.mark.medium
def test_causal_attention_does_not_see_the_future() -> None:
    attention = Attention(CONFIG)
    x = jax.random.normal(jax.random.key(2), (2, 6, 32))
    params = jax.jit(attention.init)(jax.random.key(0), x, x, Mask())
    changed = x.at[:, 4:].set(9.0)
    apply = jax.jit(attention.apply)
    before, after = (apply(params, y, y, Mask(causal=True))[0] for y in (x, changed))
    np.testing.assert_allclose(before[:, :4], after[:, :4], atol=1e-6)
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 0.1


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "silu", "elu", "tanh"])
def test_activations_have_their_names(act: str) -> None:
    from scipy.special import erf

    x = np.linspace(-4, 4, 41)
    by_hand = {
        "gelu": x * 0.5 * (1 + erf(x / np.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "relu": np.maximum(x, 0),
        "silu": x / (1 + np.exp(-x)),
        "elu": np.where(x > 0, x, np.exp(x) - 1),
        "tanh": np.tanh(x),
    }
    np.testing.assert_allclose(ACTIVATIONS[act](jnp.asarray(x, jnp.float32)), by_hand[act], atol=1e-6)


@pytest.mark.medium
def test_pre_ln_by_hand() -> None:
    """One layer: x + attention(LN(x)), then x + feed-forward(LN(x)), then LN."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, pre_layer_norm=True)
    x = jax.random.normal(jax.random.key(2), (2, 5, 32))
    encoder = Encoder(config)
    params = jax.jit(encoder.init)(jax.random.key(0), x, Mask())["params"]
    layer = params["layer_0"]

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True))

    @jax.jit
    def by_hand(x):
        attended, _ = Attention(config).apply({"params": layer["attention"]}, norm(x), norm(x), Mask())
        y = x + attended
        inner = jax.nn.gelu(norm(y) @ layer["intermediate"]["kernel"], approximate=False)  # biases start at 0
        return norm(y + inner @ layer["output"]["kernel"])

    states = jax.jit(encoder.apply)({"params": params}, x, Mask()).last_hidden_state
    np.testing.assert_allclose(states, by_hand(x), atol=1e-5)
