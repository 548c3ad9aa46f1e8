"""Rotary and relative positions, windows, gates, RMSNorm and poolers, by hand and next to each other."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.attention import make_cache
from bert.model.encoder import Bert, Encoder
from bert.model.heads import BertForTokenClassification
from bert.model.layers import Layer, LayerExecution
from bert.model.linear import ACTIVATIONS, LayerNorm, Transform
from bert.model.mask import Mask, Packing
from bert.model.positions import MAX_RELATIVE_DISTANCE, Rotation, buckets_by_distance, relative_attention_bias
from tests.helpers import OPTIONS

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip
MODERN = dataclasses.replace(CONFIG, **OPTIONS["modern"])
X = jax.random.normal(jax.random.key(2), (3, 9, 32))
IDS = jax.random.randint(jax.random.key(1), (3, 12), 0, 99)


@pytest.mark.medium
def test_a_rotation_by_hand() -> None:
    """Features i and i + H / 2 of position t are turned by t * base^(-2 i / H) radians."""
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype(np.float32)
    turned = Rotation.from_positions(jnp.arange(3)[None], 4, 100.0)(jnp.asarray(x))
    for t in range(3):
        for i, frequency in enumerate((1.0, 0.1)):
            pair = x[0, t, :, i] + 1j * x[0, t, :, i + 2]
            by_hand = pair * np.exp(1j * t * frequency)
            np.testing.assert_allclose(turned[0, t, :, i], by_hand.real, atol=1e-6)
            np.testing.assert_allclose(turned[0, t, :, i + 2], by_hand.imag, atol=1e-6)


@pytest.mark.medium
def test_rotated_scores_depend_on_distances_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(t: int, s: int) -> float:
        turned = (Rotation.from_positions(jnp.array([[place]]), 8, 1e4)(x) for x, place in ((query, t), (key, s)))
        return float(jnp.sum(jnp.multiply(*turned)))

    assert score(2, 5) == pytest.approx(score(902, 905), abs=1e-4)
    assert score(3, 3) == pytest.approx(float(jnp.sum(query * key)), abs=1e-5)
    assert abs(score(2, 5) - score(2, 6)) > 1e-2


@pytest.mark.medium
def test_without_positions_order_is_unseen_and_with_rotary_ones_it_is_not() -> None:
    def last(kind: str, ids: jax.Array) -> jax.Array:
        model = Bert(dataclasses.replace(CONFIG, position_embedding_type=kind), add_pooling_layer=False)
        params = jax.jit(model.init)(jax.random.key(0), IDS)
        assert "position" not in params["params"]["embeddings"]
        return jax.jit(model.apply)(params, ids).last_hidden_state[:, 0]

    swapped = IDS[:, jnp.array([0, 2, 1, *range(3, 12)])]
    np.testing.assert_allclose(last("none", IDS), last("none", swapped), atol=1e-5)
    assert np.abs(last("rotary", IDS) - last("rotary", swapped)).max() > 1e-2


@functools.cache
def encoder(kernel: str = "eager", scan: bool = False) -> tuple:
    module = Encoder(MODERN, execution=LayerExecution(attention=kernel, scan=scan))
    params = jax.jit(Encoder(MODERN).init)(jax.random.key(0), X, Mask())
    return params, jax.jit(module.apply, static_argnames="intermediates")


@pytest.mark.medium
def test_windows_alternate_and_include_both_ends() -> None:
    params, run = encoder()
    states = run(params, X, Mask(), intermediates=True)
    distance = np.abs(np.arange(9)[:, None] - np.arange(9))
    for number, weights in enumerate(states.attentions):
        seen = distance <= 2 if number % 2 else distance >= 0
        assert (np.asarray(weights)[:, :, seen] > 0).all()
        np.testing.assert_array_equal(np.asarray(weights)[:, :, ~seen], 0)
    assert [MODERN.is_local(number) for number in range(4)] == [False, True, False, True]
    all_local = dataclasses.replace(CONFIG, attention_window=2)
    assert [all_local.is_local(number) for number in range(2)] == [True, True]


@pytest.mark.medium
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True), Mask(keys=jnp.arange(9)[None] < jnp.array([[9], [4], [7]]))]
)
@pytest.mark.parametrize(
    ("kernel", "scan"), [pytest.param("xla", False, marks=pytest.mark.slow), ("xla", True), ("eager", True)]
)
def test_every_way_of_running_the_layers_gives_the_same(kernel: str, scan: bool, mask: Mask) -> None:
    params, run = encoder()
    expected = run(params, X, mask).last_hidden_state
    actual = encoder(kernel, scan)[1](params, X, mask).last_hidden_state
    kept = slice(None) if mask.keys is None else np.asarray(mask.keys)
    np.testing.assert_allclose(actual[kept], expected[kept], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["eager", "xla"])
def test_decoding_with_a_cache_is_the_whole_causal_pass(kernel: str) -> None:
    """Left-padded prompts of 4 positions, then a position a call: windows and rotations begin at ``start``."""
    params, run = encoder(kernel)
    keys = (jnp.arange(9) >= jnp.array([0, 3, 1])[:, None]).astype(jnp.int32)
    whole = run(params, X, Mask(keys=keys, causal=True)).last_hidden_state
    padded = jnp.pad(keys, ((0, 0), (0, 7)), constant_values=1)
    cache, outputs = make_cache(MODERN, 3, 16, jnp.float32), []
    for start, x in [(0, X[:, :4]), *((place, X[:, place : place + 1]) for place in range(4, 9))]:
        states = run(params, x, Mask(keys=padded, start=jnp.asarray(start), causal=True), cache=cache)
        cache = states.cache
        outputs.append(states.last_hidden_state)
    real = np.asarray(keys, bool)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1)[real], whole[real], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_packed_rows_are_their_examples_alone(scan: bool) -> None:
    """Hidden states and pooled means, with positions that count from the row's beginning."""
    model = Bert(MODERN, execution=LayerExecution(scan=scan))
    params = jax.jit(Bert(MODERN).init)(jax.random.key(0), IDS)
    lengths = (5, 4)
    packing = Packing(
        example_ids=jnp.array([[1] * 5 + [2] * 4 + [0] * 3]),
        position_ids=jnp.array([[*range(5), *range(4), 0, 0, 0]]),
        cls_positions=jnp.array([[0, 5]]),
    )
    packed = jax.jit(model.apply)(params, IDS[:1], packing=packing)
    for number, (start, length) in enumerate(zip((0, 5), lengths, strict=True)):
        alone = jax.jit(model.apply)(params, IDS[:1, start : start + length])
        part = packed.last_hidden_state[:, start : start + length]
        np.testing.assert_allclose(part, alone.last_hidden_state, atol=1e-5)
        np.testing.assert_allclose(packed.pooled_output[:, number], alone.pooled_output, atol=1e-5)


@pytest.mark.medium
def test_the_pooled_mean_leaves_padding_out() -> None:
    model = Bert(MODERN)
    params = jax.jit(model.init)(jax.random.key(0), IDS)["params"]
    mask = jnp.arange(12)[None] < jnp.array([12, 7, 1])[:, None]
    output = jax.jit(model.apply)({"params": params}, IDS, None, mask)
    means = np.stack(
        [np.asarray(row[:count]).mean(0) for row, count in zip(output.last_hidden_state, (12, 7, 1), strict=True)]
    )
    np.testing.assert_allclose(
        output.pooled_output, Transform(MODERN).apply({"params": params["pooler"]}, means), atol=1e-5
    )


@pytest.mark.medium
def test_heads_over_every_token_read_the_transform() -> None:
    """Dense layer, activation, LayerNorm, and then the classifier."""
    model = BertForTokenClassification(dataclasses.replace(CONFIG, pooler_type="transform"), 3)
    params = jax.jit(model.init)(jax.random.key(0), IDS)["params"]
    hidden = Bert(model.config).apply({"params": params["bert"]}, IDS).last_hidden_state
    x = ACTIVATIONS["gelu"](hidden @ params["bert"]["pooler"]["dense"]["kernel"])  # biases start at 0
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-12)
    np.testing.assert_allclose(model.apply({"params": params}, IDS), x @ params["classifier"]["kernel"], atol=1e-5)
    causal = dataclasses.replace(model.config, causal=True)
    shapes = jax.eval_shape(BertForTokenClassification(causal, 3).init, jax.random.key(0), IDS)
    assert "pooler" not in shapes["params"]["bert"], "a left-to-right model has none"


@pytest.mark.medium
@pytest.mark.parametrize(("subtract_mean", "use_bias"), [(False, False), (False, True), (True, False)])
def test_normalization_by_hand(subtract_mean: bool, use_bias: bool) -> None:
    norm = LayerNorm(1e-3, subtract_mean=subtract_mean, use_bias=use_bias)
    params = {"scale": jnp.linspace(0.5, 2, 32), **({"bias": jnp.linspace(-1, 1, 32)} if use_bias else {})}
    assert jax.tree.map(jnp.shape, norm.init(jax.random.key(0), X)["params"]) == jax.tree.map(jnp.shape, params)
    x = np.asarray(X, np.float64)
    x = x - x.mean(-1, keepdims=True) if subtract_mean else x
    by_hand = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * np.linspace(0.5, 2, 32)
    by_hand += np.linspace(-1, 1, 32) if use_bias else 0
    np.testing.assert_allclose(norm.apply({"params": params}, X), by_hand, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_a_gated_feed_forward_by_hand(act: str) -> None:
    """GeGLU and SwiGLU: (act(x W) * x V) U, with attention whose values are zero."""
    config = dataclasses.replace(CONFIG, gated_feed_forward=True, hidden_act=act, use_bias=False, pre_layer_norm=True)
    layer = Layer(config)
    params = layer.init(jax.random.key(0), X, Mask())["params"]
    assert all(set(params[name]) == {"kernel"} for name in ("intermediate", "gate", "output"))
    params["attention"]["value"]["kernel"] = jnp.zeros((32, 32))
    read = (X - X.mean(-1, keepdims=True)) / jnp.sqrt(X.var(-1, keepdims=True) + 1e-12)
    inner = ACTIVATIONS[act](read @ params["intermediate"]["kernel"]) * (read @ params["gate"]["kernel"])
    result, _ = layer.apply({"params": params}, X, Mask())
    np.testing.assert_allclose(result, X + inner @ params["output"]["kernel"], atol=1e-4)


@pytest.mark.medium
def test_bfloat16_rotates_in_float32() -> None:
    rotation = Rotation.from_positions(jnp.arange(9000)[None], 8, 1e4)
    x = jax.random.normal(jax.random.key(0), (1, 9000, 1, 8), jnp.bfloat16)
    assert rotation(x).dtype == jnp.bfloat16
    exact = rotation(x.astype(jnp.float32))
    np.testing.assert_allclose(rotation(x).astype(jnp.float32), exact, atol=0.03)


SHARED = dataclasses.replace(CONFIG, layer_groups=2, step_embedding=True, attention_window=2, global_attention_every=2)


@pytest.mark.medium
def test_layers_of_a_group_are_one_layer_applied_again() -> None:
    """By hand: two modules, each twice in a row, with sinusoids of the layer's number before each and their windows."""
    params = jax.jit(Encoder(SHARED).init)(jax.random.key(0), X, Mask())["params"]
    assert set(params) == {"layer_0", "layer_1"}
    waves = [np.sin(n / 1e4 ** (2 * (i // 2) / 32) + i % 2 * np.pi / 2) for n in range(4) for i in range(32)]
    x = X
    for number, group in enumerate((0, 0, 1, 1)):
        mask = Mask(window=2) if number % 2 else Mask()
        read = x + np.array(waves, np.float32).reshape(4, 32)[number]
        x, _ = Layer(SHARED).apply({"params": params[f"layer_{group}"]}, read, mask)
    run = jax.jit(Encoder(SHARED).apply, static_argnames="intermediates")
    states = run({"params": params}, X, Mask(), intermediates=True)
    np.testing.assert_allclose(states.last_hidden_state, x, atol=1e-5)
    assert [len(states.hidden_states), len(states.attentions)] == [5, 4]


@pytest.mark.medium
def test_decoding_through_shared_layers_has_a_cache_for_each_use() -> None:
    config = dataclasses.replace(SHARED, causal=True)
    params = jax.jit(Encoder(config).init)(jax.random.key(0), X, Mask())
    whole = Encoder(config).apply(params, X, Mask(causal=True)).last_hidden_state
    cache, outputs = make_cache(config, 3, 16, jnp.float32), []
    assert len(cache) == 4
    for start, x in [(0, X[:, :6]), (6, X[:, 6:])]:
        states = Encoder(config).apply(params, x, Mask(start=jnp.asarray(start), causal=True), cache=cache)
        cache = states.cache
        outputs.append(states.last_hidden_state)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-5)


RELATIVE = dataclasses.replace(
    CONFIG, num_hidden_layers=3, relative_attention_buckets=8, attention_window=4, global_attention_every=2
)


@pytest.mark.medium
def test_buckets_by_hand() -> None:
    """Eight buckets, four per side: distances 0 and 1 separately, larger ones by logarithm."""
    buckets = buckets_by_distance(8, MAX_RELATIVE_DISTANCE)
    edge = 2 * 64**0.5  # where the third bucket of a side ends
    assert buckets[[0, 1, 2, int(edge) - 1, int(edge) + 1, MAX_RELATIVE_DISTANCE]].tolist() == [0, 1, 2, 2, 3, 3]
    table = jnp.arange(8.0)[:, None] * jnp.array([1.0, 10.0])
    bias = relative_attention_bias(table, Mask().distances(2, 40))
    assert bias.shape == (1, 2, 2, 40)
    np.testing.assert_array_equal(bias[0, 0, 1, :4], [1, 0, 5, 6])  # keys behind the query have the other half
    np.testing.assert_array_equal(bias[0, 1, 0, [0, 1, 2, 39]], [0, 50, 60, 70])


@pytest.mark.medium
def test_relative_positions_in_every_way_of_running_the_layers() -> None:
    """One table for all layers: attention by hand, and the same from the kernel, the loop and the cache."""
    params = jax.jit(Encoder(RELATIVE).init)(jax.random.key(0), X, Mask())
    table = jax.random.normal(jax.random.key(3), (8, 4))
    assert params["params"]["relative_attention_bias"]["embedding"].shape == table.shape
    params["params"]["relative_attention_bias"]["embedding"] = table
    mask = Mask(keys=jnp.arange(9)[None] < jnp.array([[9], [4], [7]]), causal=True)
    states = jax.jit(partial(Encoder(RELATIVE).apply, intermediates=True))(params, X, mask)
    expected, kept = states.last_hidden_state, np.asarray(mask.keys)
    attention = params["params"]["layer_0"]["attention"]
    query, key = ((X @ attention[name]["kernel"]).reshape(3, 9, 4, 8) for name in ("query", "key"))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / 8**0.5
    for t, s in np.ndindex(9, 9):
        scores[:, :, t, s] += table[buckets_by_distance(8, MAX_RELATIVE_DISTANCE)[abs(t - s)] + 4 * (s > t)]
    allowed = kept[:, None, None] & (np.arange(9)[:, None] >= np.arange(9))
    by_hand = np.exp(scores) * allowed / (np.exp(scores) * allowed).sum(-1, keepdims=True)
    np.testing.assert_allclose(states.attentions[0], by_hand, atol=1e-5)
    for execution in (LayerExecution(attention="xla"), LayerExecution(scan=True, remat="full")):
        actual = jax.jit(Encoder(RELATIVE, execution=execution).apply)(params, X, mask).last_hidden_state
        np.testing.assert_allclose(actual[kept], expected[kept], atol=1e-5)
    cache, outputs = make_cache(RELATIVE, 3, 16, jnp.float32), []
    padded = jnp.pad(mask.keys, ((0, 0), (0, 7)), constant_values=True)
    for start, x in [(0, X[:, :6]), (6, X[:, 6:])]:
        states = Encoder(RELATIVE).apply(params, x, Mask(keys=padded, start=start, causal=True), cache=cache)
        cache = states.cache
        outputs.append(states.last_hidden_state)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1)[kept], expected[kept], atol=1e-5)
