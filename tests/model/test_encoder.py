import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bert.config import ModelConfig
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Encoder
from bert.model.heads import BertForSequenceClassification
from bert.model.layers import LayerExecution
from bert.model.linear import truncated_normal_init
from bert.model.mask import Mask
from bert.model.pretraining import BertForMaskedLM, BertForPreTraining
from bert.training.loop import count_parameters
from tests.helpers import OPTIONS, SINGLE

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip
MODEL = Bert(CONFIG)
IDS = jax.random.randint(jax.random.key(1), (3, 12), 0, 99)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(0), IDS)


apply = jax.jit(MODEL.apply, static_argnames="intermediates")

SIZES = {
    "tiny": (2, 128, 2, 4_433_468),
    "mini": (4, 256, 4, 11_267_900),
    "small": (4, 512, 8, 29_058_876),
    "medium": (8, 512, 8, 41_668_412),
    "base": (12, 768, 12, 110_106_428),
    "large": (24, 1024, 16, 336_226_108),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    layers, width, heads, parameters = SIZES[name]
    config = ModelConfig(30522, width, layers, heads, 4 * width)
    model = BertForPreTraining(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((2, 8), jnp.int32)))
    assert count_parameters(shapes) == parameters


@pytest.mark.medium
@pytest.mark.parametrize("pre_layer_norm", [False, True])
def test_the_encoder_without_positions_is_permutation_equivariant(pre_layer_norm: bool) -> None:
    encoder = Encoder(dataclasses.replace(CONFIG, pre_layer_norm=pre_layer_norm))
    x = jax.random.normal(jax.random.key(2), (2, 9, 32))
    params = jax.jit(encoder.init)(jax.random.key(0), x, Mask())
    order = np.random.default_rng(0).permutation(9)
    run = jax.jit(lambda params, x: encoder.apply(params, x, Mask()).last_hidden_state)
    straight, permuted = run(params, x), run(params, x[:, order])
    np.testing.assert_allclose(straight[:, order], permuted, atol=1e-5)


@pytest.mark.medium
def test_padding_changes_nothing() -> None:
    mask = jnp.ones((3, 12), jnp.int32)
    segments = jnp.tile(jnp.arange(12) // 6, (3, 1))
    alone = apply(initial_params(), IDS, segments, mask)
    padded = [jnp.pad(a, ((0, 0), (0, 8)), constant_values=fill) for a, fill in ((IDS, 7), (segments, 1), (mask, 0))]
    with_padding = apply(initial_params(), *padded)
    np.testing.assert_allclose(alone.last_hidden_state, with_padding.last_hidden_state[:, :12], atol=1e-5)
    np.testing.assert_allclose(alone.pooled_output, with_padding.pooled_output, atol=1e-5)


@pytest.mark.medium
def test_intermediates_on_request_only() -> None:
    assert apply(initial_params(), IDS).hidden_states == ()
    output = apply(initial_params(), IDS, intermediates=True)
    assert [h.shape for h in output.hidden_states] == [(3, 12, 32)] * 3
    assert [a.shape for a in output.attentions] == [(3, 4, 12, 12)] * 2
    np.testing.assert_array_equal(output.hidden_states[-1], output.last_hidden_state)
    np.testing.assert_allclose(output.attentions[0].sum(-1), 1, atol=1e-5)


@pytest.mark.medium
def test_bfloat16_computes_in_bfloat16_over_float32_parameters() -> None:
    model = BertForPreTraining(CONFIG, jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    output = jax.jit(model.apply)(params, IDS)
    assert output.prediction_logits.dtype == output.seq_relationship_logits.dtype == jnp.float32
    assert jax.jit(Bert(CONFIG, jnp.bfloat16).apply)(initial_params(), IDS).last_hidden_state.dtype == jnp.bfloat16
    exact = jax.jit(BertForPreTraining(CONFIG).apply)(params, IDS)
    # bfloat16 has 8 bits of mantissa; over two layers the logits (of size 1) keep about two digits.
    assert 0 < np.abs(exact.prediction_logits - output.prediction_logits).max() < 0.1


def test_initialisation_is_a_truncated_normal() -> None:
    config = dataclasses.replace(CONFIG, initializer_range=0.02)
    kernel = np.asarray(truncated_normal_init(config)(jax.random.key(0), (500, 500)))
    assert np.abs(kernel).max() <= 0.04
    assert abs(kernel.std() - 0.02 * 0.8796) < 1e-4  # 0.8796: deviation of a normal cut at two deviations


@pytest.mark.medium
def test_the_mlm_head_decodes_the_asked_places_with_the_tied_embedding() -> None:
    model = BertForPreTraining(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    run = jax.jit(model.apply)
    places = jnp.array([[1, 5, 0], [2, 3, 11], [7, 7, 7]])
    everywhere = run(params, IDS).prediction_logits
    some = run(params, IDS, None, None, places).prediction_logits
    np.testing.assert_allclose(some, np.take_along_axis(everywhere, places[:, :, None], axis=1), atol=1e-5)
    moved = jax.tree.map(lambda x: x, params)
    moved["params"]["predictions"]["bias"] = params["params"]["predictions"]["bias"].at[9].add(2.0)
    np.testing.assert_allclose(run(moved, IDS).prediction_logits[..., 9], everywhere[..., 9] + 2, atol=1e-5)


@pytest.mark.medium
def test_a_head_without_transform_decodes_hidden_states_and_embeddings_without_layer_norm_are_a_sum() -> None:
    model = BertForMaskedLM(dataclasses.replace(CONFIG, embedding_norm=False, prediction_transform=False))
    params = jax.jit(model.init)(jax.random.key(0), IDS)["params"]
    assert set(params["predictions"]) == {"bias"}
    embeddings = params["bert"]["embeddings"]
    assert set(embeddings) == {"word", "position", "segment"}
    words, positions, segments = (embeddings[table]["embedding"] for table in ("word", "position", "segment"))
    x = words[IDS] + positions[:12] + segments[0]
    states = jax.jit(Encoder(CONFIG).apply)({"params": params["bert"]["encoder"]}, x, Mask())
    logits = jax.jit(model.apply)({"params": params}, IDS)
    np.testing.assert_allclose(logits, states.last_hidden_state @ words.T, atol=1e-5)


@pytest.mark.medium
def test_dropout_acts_in_training_only_and_the_classifier_has_its_own_rate() -> None:
    model = BertForSequenceClassification(CONFIG, num_labels=3, classifier_dropout=0.5)
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    dropout = Dropout.for_step(0, 0, jnp.arange(3))
    run = jax.jit(model.apply)
    plain = run(params, IDS)
    assert plain.shape == (3, 3)
    assert np.abs(run(params, IDS, dropout=dropout) - plain).max() > 1e-3
    still = dataclasses.replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(still, num_labels=3, classifier_dropout=0.0)
    np.testing.assert_array_equal(jax.jit(model.apply)(params, IDS, dropout=dropout), plain)


def test_every_option_is_off_by_default() -> None:
    defaults = ModelConfig()
    for option, changes in OPTIONS.items():
        default = {"position_embedding_type"} if option == "global tokens" else set()
        assert {name for name, value in changes.items() if getattr(defaults, name) == value} == default


@pytest.mark.medium
@pytest.mark.parametrize("option", OPTIONS)
def test_the_options_parameters(option: str) -> None:
    """BERT-base with each option, counted by hand: D 768, V 30,522, 512 positions, 2 segments, E 8."""
    config = ModelConfig(30522, 768, 12, 12, 3072, **OPTIONS[option])
    model = BertForPreTraining(config)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((2, 8), jnp.int32)))
    width, tokens, positions, segments, narrow = 768, 30522, 512, 2, 8
    # Tables and their LayerNorm; the projection; the head's transform (kernel and bias) and LayerNorm.
    narrower = (width - narrow) * (tokens + positions + segments + 2)
    head = (width * width + width + 2 * width) - (width * narrow + narrow + 2 * narrow)
    difference = {
        "pre-LN": 2 * width,
        "fixed positions": -positions * width,
        "untied decoder": tokens * width,
        "narrow embeddings": -narrower + (narrow * width + width) - head,
        "embeddings without LayerNorm": -2 * width,
        "head without transform": -(width * width + width + 2 * width),
        "scaled residuals": 0,
        "no segments": -segments * width,
        "decoder without bias": -tokens,
        "rotary positions": -positions * width,
        "no positions": -positions * width,
        "gated feed-forward": 12 * (width * 3072 + 3072),
        # Of each layer, 4 in attention, 2 in feed-forward, 2 in LayerNorm; of embeddings and pooler 1, of the head 2.
        "no biases": -12 * (7 * width + 3072) - 4 * width,
        "RMSNorm": 0,
        "local attention": 0,
        "global tokens": 12 * 3 * (width * width + width),
        "pooler of the mean": 2 * width,
        "shared layers": -11 * (4 * width**2 + 2 * width * 3072 + 9 * width + 3072),
        "convolution": 3 * width**2 + 3 * width,  # the kernel, its bias and LayerNorm
        "capped logits": 0,
        "step embeddings": 0,
        "halting": width + 1,
        "sandwich": 2 * width + 12 * 2 * 2 * width,  # the final norm, and two more in each layer
        "relative positions": 8 * 12,
        "disentangled attention": (8 + 2 - positions) * width,
        # Of each layer, one matrix and its bias more, and no bias of the keys.
        "linear disentangled attention": 8 * width + 12 * width**2,
        # One matrix, three biases and two vectors of segments a layer; the vector of queries.
        "positions of Transformer-XL": -(positions + segments + 2) * width + 12 * (width**2 + 5 * width) + width,
        "shared keys": -positions * width - 12 * 2 * 11 * 64 * (width + 1),
        # Heads of 12 features instead of 64; two LayerNorms of a head.
        "wide heads": -positions * width + 12 * (-12 * 52 * (4 * width + 3) + 4 * 12),
        # The pooler and the head's transform have no bias either.
        "some biases": -12 * (width + 3072) - 2 * width,
    }
    # The final LayerNorm has a scale, the pooler's has one, the first layer has lost one.
    difference["modern"] = -(positions + segments) * width + 12 * width * 3072 + difference["no biases"] + width
    fixed_and_untied = -positions * narrow + tokens * narrow
    difference["all at once"] = 2 * width + fixed_and_untied - 2 * narrow + difference["narrow embeddings"]
    assert count_parameters(shapes) == 110_106_428 + difference[option]


@pytest.mark.medium
@pytest.mark.parametrize("option", [*(pytest.param(o, marks=pytest.mark.slow) for o in SINGLE), "all at once"])
def test_padding_and_dropout_are_as_without_the_option(option: str) -> None:
    model = Bert(dataclasses.replace(CONFIG, **OPTIONS[option]))
    mask = jnp.ones((3, 12), jnp.int32)
    padded = [jnp.pad(a, ((0, 0), (0, 8)), constant_values=fill) for a, fill in ((IDS, 7), (mask, 0))]
    dropout = Dropout.for_step(0, 0, jnp.arange(3))

    @jax.jit
    def run(key):
        params = model.init(key, IDS)
        alone = model.apply(params, IDS, None, mask, intermediates=True)
        longer = model.apply(params, padded[0], None, padded[1])
        return alone, longer, model.apply(params, IDS, None, mask, dropout=dropout)

    alone, longer, dropped = run(jax.random.key(0))
    np.testing.assert_allclose(alone.last_hidden_state, longer.last_hidden_state[:, :12], atol=1e-5)
    np.testing.assert_array_equal(alone.hidden_states[-1], alone.last_hidden_state)
    assert [h.shape for h in alone.hidden_states] == [(3, 12, 32)] * 3
    assert np.abs(dropped.last_hidden_state - alone.last_hidden_state).max() > 1e-2
    # The last normalization, wherever it stands, leaves each token at variance 1 and, except for RMSNorm, at mean 0.
    if model.config.norm_type == "layer":
        np.testing.assert_allclose(alone.last_hidden_state.mean(-1), 0, atol=1e-5)
    if model.config.halting is None:  # a mean of normalized states has a smaller variance
        np.testing.assert_allclose(jnp.square(alone.last_hidden_state).mean(-1), 1, atol=1e-4)


@pytest.mark.medium
def test_scaled_residuals_start_with_a_smaller_deviation() -> None:
    """By the root of 2 L = 4 sublayers, and nothing else changes (Radford et al. 2019, section 2.3)."""
    scaled = jax.jit(Bert(dataclasses.replace(CONFIG, residual_init="scaled")).init)(jax.random.key(0), IDS)
    plain, scaled = (flatten_dict(params["params"], sep="/") for params in (initial_params(), scaled))
    for path, kernel in plain.items():
        residual = "/layer_" in path and path.endswith("output/kernel")
        np.testing.assert_allclose(scaled[path], kernel / 2 if residual else kernel, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embedding_size": 0}, r"model.embedding_size is 0.*least 1"),
        (
            {"prediction_transform": False, "embedding_size": 8},
            r"model.prediction_transform is false, but model.embedding_size is 8",
        ),
        ({"residual_init": "small"}, r"model.residual_init is 'small'"),
        (
            {"position_embedding_type": "relative"},
            r"model.position_embedding_type is 'relative'",
        ),
        (
            {"position_embedding_type": "rotary", "hidden_size": 36},
            r"model.position_embedding_type is rotary.*head has 9 features",
        ),
        ({"global_attention_every": 3}, "model.global_attention_every is 3, but model.attention_window is null: set"),
        ({"local_rotary_base": 100.0}, "model.local_rotary_base is 100.0, but model.attention_window is null"),
        ({"attention_window": 4, "global_attention_every": 1}, r"global_attention_every is 1.*least 2"),
        ({"relative_attention_buckets": 6}, r"relative_attention_buckets is 6.*4"),
        (
            {"position_embedding_type": "disentangled"},
            r"model.relative_attention_buckets is null",
        ),
        (
            {"position_embedding_type": "disentangled", "relative_attention_buckets": 8, "attention_window": 4},
            "disentangled, but model.attention_window is 4: remove one",
        ),
        (
            {"position_embedding_type": "deberta_v1", "relative_attention_buckets": 7},
            "relative_attention_buckets is 7: set it to twice the maximum distance",
        ),
        (
            {"position_embedding_type": "deberta_v1", "relative_attention_buckets": 8, "attention_window": 4},
            "deberta_v1, but model.attention_window is 4: remove one",
        ),
        ({"position_table": True}, "model.position_table is true, but model.position_embedding_type is learned"),
        (
            {"disentangled_products": "content_to_position", "position_embedding_type": "rotary"},
            "disentangled_products is content_to_position, but model.position_embedding_type is rotary",
        ),
        (
            {"position_embedding_type": "transformer_xl", "attention_window": 4},
            "transformer_xl, but model.attention_window is 4: remove one",
        ),
        ({"layer_groups": 3}, r"layer_groups is 3.*model.num_hidden_layers .2."),
        ({"layer_groups": 2, "decoder_layers": 3}, r"divide model.decoder_layers .3."),
        (
            {"layer_groups": 1, "pre_layer_norm": True, "first_layer_norm": False},
            r"model.layer_groups is 1, but model.first_layer_norm is false",
        ),
        ({"first_layer_norm": False}, r"model.first_layer_norm is false, but model.pre_layer_norm is false"),
    ],
)
def test_options_that_cannot_be(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **changes).check()


@functools.cache
def value_and_gradients(execution: LayerExecution, option: str | None = None):
    """The hidden states with dropout, and the gradients of a sum over them."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, **OPTIONS.get(option, {}))
    model = Bert(config, execution=execution)
    params = jax.jit(Bert(model.config).init)(jax.random.key(0), IDS)
    mask = (jnp.arange(12) < jnp.array([12, 7, 9])[:, None]).astype(jnp.int32)

    def total(params):
        dropout = Dropout.for_step(0, 1, jnp.arange(3))
        hidden = model.apply(params, IDS, None, mask, dropout=dropout).last_hidden_state
        return jnp.sum(jnp.sin(hidden) * mask[:, :, None]), hidden

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    return step(params), str(step.trace(params).jaxpr)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("execution", "option"),
    [
        pytest.param(LayerExecution("full", scan=True), None, marks=pytest.mark.slow),
        pytest.param(LayerExecution("full"), None, marks=pytest.mark.slow),
        pytest.param(LayerExecution("dots"), None, marks=pytest.mark.slow),
        pytest.param(LayerExecution("dots", scan=True), "pre-LN", marks=pytest.mark.slow),
        pytest.param(LayerExecution("none", scan=True), None, marks=pytest.mark.slow),
        (LayerExecution("dots", scan=True), "modern"),
        pytest.param(LayerExecution("dots", scan=True), "shared layers", marks=pytest.mark.slow),
        pytest.param(LayerExecution("full"), "shared layers", marks=pytest.mark.slow),
        pytest.param(LayerExecution("none", scan=True), "modern", marks=pytest.mark.slow),
        pytest.param(LayerExecution("full"), "modern", marks=pytest.mark.slow),
        pytest.param(LayerExecution("none", scan=True), "local attention", marks=pytest.mark.slow),
    ],
)
def test_how_layers_are_run_changes_no_number(execution: LayerExecution, option: str | None) -> None:
    ((_, expected), expected_grads), plain = value_and_gradients(LayerExecution(), option)
    ((_, hidden), grads), program = value_and_gradients(execution, option)
    np.testing.assert_allclose(hidden, expected, atol=2e-6)
    jax.tree.map(
        lambda actual, reference: np.testing.assert_allclose(
            actual, reference, atol=2e-5 * float(jnp.abs(reference).max() + 1)
        ),
        grads,
        expected_grads,
    )
    # That it is run otherwise at all: a loop, and more regions that are computed again than GELU alone.
    if execution.scan:
        _, plain = value_and_gradients(LayerExecution(scan=True), option)
    assert (program.count("prevent_cse=") > plain.count("prevent_cse=")) == (execution.remat != "none")
    assert ("scan[" in program) == execution.scan


@pytest.mark.medium
def test_every_layer_keeps_its_own_parameters() -> None:
    """The parameter tree does not depend on how the layers are executed."""
    shapes = [
        jax.tree.map(jnp.shape, jax.eval_shape(Bert(CONFIG, execution=execution).init, jax.random.key(0), IDS))
        for execution in (LayerExecution(), LayerExecution("dots"), LayerExecution("full", scan=True))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert {"layer_0", "layer_1"} == set(shapes[0]["params"]["encoder"])


@pytest.mark.slow
def test_recomputation_saves_memory() -> None:
    """Bytes within a training step of 8 layers, as XLA plans them: none > dots > full."""

    def working(execution: LayerExecution) -> int:
        model = Bert(dataclasses.replace(CONFIG, num_hidden_layers=8), execution=execution)
        ids = jax.ShapeDtypeStruct((64, 24), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), IDS)

        def total(params, ids):
            dropout = Dropout.for_step(0, 1, jnp.arange(64))
            return jnp.sum(jnp.sin(model.apply(params, ids, dropout=dropout).last_hidden_state))

        compiled = jax.jit(jax.grad(total)).lower(params, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, full = (working(LayerExecution(remat, scan=True)) for remat in ("none", "dots", "full"))
    assert none > 1.2 * dots
    assert dots > 1.2 * full
