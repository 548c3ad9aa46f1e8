"""Grouped heads, head sizes, normalized queries, soft caps, ALiBi, biases and scaled rotations, in every execution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.errors import UserError
from bert.model.attention import make_cache
from bert.model.encoder import Bert, Encoder
from bert.model.layers import LayerExecution
from bert.model.mask import Mask, Packing
from bert.model.positions import Rotation, alibi_slopes
from bert.model.reductions import pool, token_dropout_factors

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=512, initializer_range=0.2, num_key_value_heads=2,
)  # fmt: skip
CAPPED = dataclasses.replace(
    CONFIG, position_embedding_type="alibi", attention_softcap=1.5, query_key_norm=True, query_key_value_bias=False
)
ROTATED = dataclasses.replace(
    CONFIG, position_embedding_type="rotary", rotary_fraction=0.5, attention_head_size=12, rotary_scaling="yarn",
    rotary_scaling_factor=4.0, rotary_base=100.0, query_key_norm=True, norm_type="rms", norm_bias=False,
    attention_window=40, global_attention_every=2, local_rotary_base=50.0,
)  # fmt: skip
SANDWICH = dataclasses.replace(
    CONFIG, position_embedding_type="rotary", norm_type="rms_plus_one", norm_bias=False, pre_layer_norm=True,
    sublayer_output_norm=True, query_key_norm=True, query_pre_attn_scalar=5.0, attention_window=2,
    global_attention_every=2, first_global_layer=1, local_rotary_base=50.0,
)  # fmt: skip
X = jax.random.normal(jax.random.key(2), (3, 9, 32))
IDS = jax.random.randint(jax.random.key(1), (1, 12), 0, 99)


@functools.cache
def encoder(config: ModelConfig, kernel: str = "eager", scan: bool = False) -> tuple:
    execution = LayerExecution(attention=kernel, scan=scan, remat="full" if scan else "none")
    params = jax.jit(Encoder(config).init)(jax.random.key(0), X, Mask())
    return params, jax.jit(Encoder(config, execution=execution).apply, static_argnames="intermediates")


@pytest.mark.medium
@pytest.mark.parametrize("config", [CAPPED, ROTATED, SANDWICH], ids=["capped", "rotated", "sandwich"])
def test_kernel_scan_and_cache_equal_the_written_attention(config: ModelConfig) -> None:
    params, run = encoder(config)
    keys = jnp.arange(9)[None] < jnp.array([[9], [4], [7]])
    mask, kept = Mask(keys=keys, causal=True), np.asarray(keys)
    states = run(params, X, mask, intermediates=True)
    expected = states.last_hidden_state
    assert [weights.shape for weights in states.attentions] == [(3, 4, 9, 9)] * 2
    actual = encoder(config, "xla", scan=True)[1](params, X, mask).last_hidden_state
    np.testing.assert_allclose(actual[kept], expected[kept], atol=1e-5)
    cache, outputs = make_cache(config, 3, 16, jnp.float32), []
    assert cache[0].own.keys.shape == (3 * 2, config.head_size, 16)
    padded = jnp.pad(keys, ((0, 0), (0, 7)), constant_values=True)
    for start, x in [(0, X[:, :6]), (6, X[:, 6:])]:
        states = run(params, x, Mask(keys=padded, start=jnp.asarray(start), causal=True), cache=cache)
        cache = states.cache
        outputs.append(states.last_hidden_state)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1)[kept], expected[kept], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("config", [CAPPED, pytest.param(ROTATED, marks=pytest.mark.slow)], ids=["capped", "rotated"])
def test_packed_rows_equal_their_examples(config: ModelConfig) -> None:
    model = Bert(config, add_pooling_layer=False)
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    packing = Packing(
        example_ids=jnp.array([[1] * 5 + [2] * 4 + [0] * 3]),
        position_ids=jnp.array([[*range(5), *range(4), 0, 0, 0]]),
        cls_positions=jnp.array([[0, 5]]),
    )
    packed = jax.jit(model.apply)(params, IDS, packing=packing).last_hidden_state
    for start, length in ((0, 5), (5, 4)):
        alone = jax.jit(model.apply)(params, IDS[:, start : start + length]).last_hidden_state
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "config",
    [pytest.param(dataclasses.replace(CAPPED, attention_window=8), marks=pytest.mark.slow), ROTATED],
    ids=["alibi", "rotary"],
)
def test_blocks_of_local_attention_equal_whole_rows(config: ModelConfig) -> None:
    rows = jax.random.normal(jax.random.key(3), (1, 200, 32))
    assert config.local_block(200)
    params, run = encoder(config)
    whole = run(params, rows, Mask(), intermediates=True).last_hidden_state
    np.testing.assert_allclose(run(params, rows, Mask()).last_hidden_state, whole, atol=2e-5)


@pytest.mark.medium
def test_grouped_heads_equal_heads_with_copied_keys() -> None:
    grouped, plain = CAPPED, dataclasses.replace(CAPPED, num_key_value_heads=None)
    params = encoder(grouped)[0]

    def copied(path, leaf):
        if not {"key", "value"} & {part.key for part in path}:
            return leaf
        return jnp.repeat(leaf.reshape(*leaf.shape[:-1], 2, 8), 2, axis=-2).reshape(*leaf.shape[:-1], 32)

    expected = encoder(plain)[1](jax.tree_util.tree_map_with_path(copied, params), X, Mask()).last_hidden_state
    np.testing.assert_allclose(encoder(grouped)[1](params, X, Mask()).last_hidden_state, expected, atol=1e-5)


@pytest.mark.medium
def test_capped_and_penalized_scores_by_hand() -> None:
    params, run = encoder(CAPPED)
    attention = params["params"]["layer_0"]["attention"]
    assert "bias" not in attention["query"] and "bias" in attention["output"]

    def heads(name: str) -> np.ndarray:
        x = np.asarray(X @ attention[name]["kernel"]).reshape(3, 9, -1, 8)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return np.repeat(x, 4 // x.shape[2], axis=2)

    scores = np.einsum("btnh,bsnh->bnts", heads("query"), heads("key")) / 8**0.5
    distances = np.abs(np.arange(9)[:, None] - np.arange(9))
    scores = 1.5 * np.tanh(scores / 1.5) - np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * distances
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(run(params, X, Mask(), intermediates=True).attentions[0], expected, atol=1e-5)


def test_slopes_of_twelve_heads() -> None:
    """The eight of 8 heads, and every other one of 16."""
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(alibi_slopes(12), 2.0 ** -np.array(exponents), rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_scaled_rotations(kind: str) -> None:
    """The slowest rotation is slower by the factor; the fastest one only if all are (linear)."""
    config = dataclasses.replace(
        CONFIG, hidden_size=256, rotary_scaling=kind, rotary_scaling_factor=4.0, rotary_original_length=256
    )
    positions = jnp.arange(8)[None]
    plain = Rotation.from_positions(positions, 64, 1e4)
    scaled = Rotation.from_config(config, False, positions)
    norm = 1 + 0.1 * np.log(4) if kind == "yarn" else 1.0
    np.testing.assert_allclose(jnp.hypot(scaled.cos, scaled.sin), norm, rtol=1e-5)
    angles, before = (np.asarray(jnp.arctan2(x.sin, x.cos)) for x in (scaled, plain))
    np.testing.assert_allclose(angles[0, :, -1], before[0, :, -1] / 4, rtol=1e-4)
    np.testing.assert_allclose(angles[0, 1, 0], 0.25 if kind == "linear" else 1.0, rtol=1e-5)


@pytest.mark.medium
def test_token_dropout_by_hand() -> None:
    """Mask tokens are zeros, and the rest of a row is scaled up by the share of mask tokens, in packed rows too."""
    is_mask = jnp.array([[False, True, False, True, False, False]])
    real = jnp.array([[1, 1, 1, 1, 1, 0]])
    expected = np.array([1, 0, 1, 0, 1, 1]) * 0.88 / (1 - 2 / 5)
    np.testing.assert_allclose(token_dropout_factors(is_mask, real)[0, :, 0], expected, rtol=1e-6)
    packing = Packing(jnp.array([[1, 1, 1, 2, 2, 0]]), jnp.array([[0, 1, 2, 0, 1, 0]]), jnp.array([[0]]))
    expected = 0.88 * np.array([1 / (1 - 1 / 3), 0, 1 / (1 - 1 / 3), 0, 1 / (1 - 1 / 2)])
    np.testing.assert_allclose(token_dropout_factors(is_mask, real, packing)[0, :5, 0], expected, rtol=1e-6)
    assert np.isfinite(token_dropout_factors(jnp.ones((1, 3), bool), jnp.zeros((1, 3)))).all()


@pytest.mark.medium
def test_the_norms_and_scores_of_a_gemma_layer_by_hand() -> None:
    config = dataclasses.replace(SANDWICH, num_hidden_layers=1, global_attention_every=None, first_global_layer=0)
    config = dataclasses.replace(config, query_key_norm=False, position_embedding_type="none", num_key_value_heads=None)
    params, run = encoder(config)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    layer = jax.tree.map(np.asarray, params["params"]["layer_0"])

    def norm(x: np.ndarray, parameters: dict) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12) * (1 + parameters["scale"])

    def linear(x: np.ndarray, parameters: dict) -> np.ndarray:
        return x @ parameters["kernel"] + parameters["bias"]

    x, near = np.asarray(X), np.abs(np.arange(9)[:, None] - np.arange(9)) <= 2
    read = norm(x, layer["attention_norm"])
    query, key, value = (
        linear(read, layer["attention"][name]).reshape(3, 9, 4, 8) for name in ("query", "key", "value")
    )
    scores = np.where(near, np.einsum("btnh,bsnh->bnts", query, key) / 5**0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), value).reshape(3, 9, 32)
    x = x + norm(linear(mixed, layer["attention"]["output"]), layer["attention_output_norm"])
    inner = np.asarray(jax.nn.gelu(linear(norm(x, layer["output_norm"]), layer["intermediate"]), approximate=False))
    x = x + norm(linear(inner, layer["output"]), layer["feed_forward_norm"])
    expected = norm(x, params["params"]["norm"])
    np.testing.assert_allclose(run(params, X, Mask()).last_hidden_state, expected, atol=2e-5)


def test_the_first_global_layer() -> None:
    config = dataclasses.replace(CONFIG, attention_window=2, global_attention_every=3, first_global_layer=2)
    assert [config.is_local(layer) for layer in range(7)] == [True, True, False, True, True, False, True]


@pytest.mark.medium
def test_the_last_token_is_pooled() -> None:
    mask = jnp.arange(9)[None] < jnp.array([[9], [4], [1]])
    np.testing.assert_array_equal(pool(X, mask, "lasttoken"), X[jnp.arange(3), jnp.array([8, 3, 0])])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) .*num_key_value_heads \(3\)"),
        ({"hidden_size": 30}, "attention_head_size"),
        ({"position_embedding_type": "rotary", "rotary_fraction": 0.4}, r"8 features.*rotary_fraction selects 3"),
        ({"position_embedding_type": "rotary", "rotary_fraction": 0.25, "rotary_scaling": "ntk"}, "ntk.*linear"),
        ({"position_embedding_type": "alibi", "relative_attention_buckets": 8}, "alibi.*relative_attention_buckets"),
        (
            {"position_embedding_type": "disentangled", "relative_attention_buckets": 8},
            "disentangled.*num_key_value_heads",
        ),
        ({"attention_softcap": 0.0}, "attention_softcap is 0"),
        ({"prediction_softcap": 0.0}, "prediction_softcap is 0"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0: it must be at least 1"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4: set it to an odd number of at most 1023"),
        ({"conv_kernel_size": 1025}, "conv_kernel_size is 1025: set it to an odd number of at most 1023"),
        ({"conv_kernel_size": 3, "causal": True}, "conv_kernel_size is 3, but model.causal is true"),
        ({"conv_kernel_size": 3, "share_decoder": "all"}, "conv_kernel_size is 3, but model.share_decoder is all"),
        (
            {
                **{"conv_kernel_size": 3, "position_embedding_type": "transformer_xl", "memory_length": 8},
                "num_key_value_heads": None,
            },
            "conv_kernel_size is 3, but model.memory_length is 8",
        ),
        ({"sublayer_output_norm": True}, "sublayer_output_norm.*pre_layer_norm"),
        ({"token_dropout_id": 99}, "token_dropout_id.*vocab_size"),
        ({"token_dropout_id": 9, "causal": True}, "token_dropout_id.*causal"),
        ({"attention_window": 2, "first_global_layer": 1}, "first_global_layer.*global_attention_every"),
    ],
)
def test_options_that_cannot_be(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **changes).check()
