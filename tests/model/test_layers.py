"""Attention as a module, activations, the layer and the convolution, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.dropout import Dropout
from bert.model.encoder import Encoder
from bert.model.layers import Convolution, LayerExecution
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


CONVOLVED = dataclasses.replace(CONFIG, conv_kernel_size=5)
ROWS, OUTPUTS = jax.random.normal(jax.random.key(2), (2, 3, 9, 32))
REAL = jnp.arange(9)[None] < jnp.array([[9], [2], [7]])


def convolved(params: dict, text: np.ndarray) -> np.ndarray:
    """Sums the products of each token with its neighbours, up to two on each side; outside of the text are zeros."""
    result = np.tile(params["bias"], (len(text), 1))
    for token, neighbour in np.ndindex(len(text), len(text)):
        if abs(neighbour - token) <= 2:
            result[token] += text[neighbour] @ params["kernel"][neighbour - token + 2]
    return result


def normalized(params: dict, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * params["scale"] + params["bias"]


@pytest.mark.medium
@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_a_convolution_by_hand(pre_layer_norm: bool) -> None:
    """Padded rows, and packed ones whose texts read nothing of each other, with dropout before the activation."""
    module = Convolution(dataclasses.replace(CONVOLVED, pre_layer_norm=pre_layer_norm))
    drawn = jax.jit(module.init)(jax.random.key(0), OUTPUTS, ROWS, Mask())
    params = jax.tree.map(lambda leaf: np.asarray(leaf + 0.1 * jax.random.normal(jax.random.key(3), leaf.shape)), drawn)
    own, dropout, apply = params["params"], Dropout.for_step(0, 0, jnp.arange(3)), jax.jit(module.apply)
    inputs = normalized(own["norm"], np.asarray(ROWS)) if pre_layer_norm else np.asarray(ROWS)

    def expected(outputs: np.ndarray, products: np.ndarray) -> np.ndarray:
        total = outputs + np.asarray(jax.nn.gelu(products, approximate=False))
        return total if pre_layer_norm else normalized(own["norm"], total)

    for row, length in enumerate((9, 2, 7)):
        text, outputs = inputs[row, :length], np.asarray(OUTPUTS[row, :length])
        padded = apply(params, OUTPUTS, ROWS, Mask(keys=REAL, right_padded=True))[row, :length]
        np.testing.assert_allclose(padded, expected(outputs, convolved(own, text)), atol=1e-5)
    whole = np.stack([convolved(own, row) for row in inputs])
    dropped = np.asarray(dropout(jnp.asarray(whole), 0.1, "convolution"))
    assert (dropped == 0).any()
    actual = apply(params, OUTPUTS, ROWS, Mask(), dropout)
    np.testing.assert_allclose(actual, expected(np.asarray(OUTPUTS), dropped), atol=1e-5)
    packed = apply(params, OUTPUTS, ROWS, Mask(examples=jnp.array([[1] * 3 + [2] + [3] * 4 + [0]] * 3)))
    for first, end in ((0, 3), (3, 4), (4, 8)):
        texts = np.stack([convolved(own, row[first:end]) for row in inputs])
        np.testing.assert_allclose(packed[:, first:end], expected(OUTPUTS[:, first:end], texts), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_hidden_layers": 4, "layer_groups": 2}, marks=pytest.mark.slow),
        pytest.param({"layer_groups": 1, "halting": 0.01}, marks=pytest.mark.slow),
        pytest.param(
            {"pre_layer_norm": True, "first_layer_norm": False, "step_embedding": True}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_convolution_in_every_way_of_running_the_layers(options: dict) -> None:
    """A loop over the layers, recomputation and a kernel change no value and no gradient. Packed texts are as alone."""
    config = dataclasses.replace(CONVOLVED, **options)
    params = jax.jit(Encoder(config).init)(jax.random.key(0), ROWS, Mask())
    mask = Mask(keys=REAL, right_padded=True)

    def run(params: dict, execution: LayerExecution) -> tuple:
        states = Encoder(config, execution=execution).apply(params, ROWS, mask)
        return jnp.sum(jnp.sin(states.last_hidden_state) * REAL[..., None]), states.last_hidden_state

    value = jax.jit(jax.value_and_grad(run, has_aux=True), static_argnums=1)
    (_, expected), gradients = value(params, LayerExecution())
    assert np.abs(gradients["params"]["convolution"]["kernel"]).max() > 1e-3
    for execution in (LayerExecution("dots", scan=True), LayerExecution("full", attention="xla")):
        (_, actual), others = value(params, execution)
        np.testing.assert_allclose(actual[REAL], expected[REAL], atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), others, gradients)
    apply = jax.jit(Encoder(config).apply)
    row = jnp.concatenate([ROWS[1:2, :2], ROWS[2:, :7]], axis=1)
    packed = apply(params, row, Mask(examples=jnp.array([[1] * 2 + [2] * 7]))).last_hidden_state[0]
    np.testing.assert_allclose(packed, np.concatenate([expected[1, :2], expected[2, :7]]), atol=1e-5)


@pytest.mark.parametrize(
    "mask", [Mask(causal=True), Mask(start=0), Mask(positions=jnp.arange(9)[None]), Mask(pairs=jnp.ones((1, 1, 9, 9)))]
)
def test_a_convolution_needs_rows_in_order_that_are_read_on_both_sides(mask: Mask) -> None:
    with pytest.raises(ValueError, match="whole rows of tokens in order"):
        mask.neighbours(ROWS, 1)
