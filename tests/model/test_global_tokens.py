"""Global tokens of local attention against attention written out in NumPy, for short rows, blocks and kernels."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Encoder
from bert.model.heads import HEADS
from bert.model.layers import LayerExecution
from bert.model.mask import GlobalTokens, Mask, Packing
from bert.model.multi_head import Attention
from bert.model.positions import attention_contexts
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism
from tests.tiny_training import assert_same_gradients

KINDS = ("first", "before_separator", "after_separator")
T, WINDOW, SEP = 150, 8, 3  # blocks of 32: the last one is not full
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
    attention_window=WINDOW, global_attention_sep_id=SEP, max_position_embeddings=2048, initializer_range=0.3,
)  # fmt: skip


def example(kind: str, count: int, length: int = T) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of two pairs with ``count`` global tokens, of which the second one is padded."""
    ids = np.random.default_rng(0).integers(5, 50, (2, length))
    lengths = length, 3 * length // 4
    for row, end in zip(ids, lengths, strict=True):
        first = end - count - 2 if kind == "after_separator" else count
        row[[first, first + 1, end - 1]] = SEP
    return ids, (np.arange(length) < np.array(lengths)[:, None]).astype(np.int32)


FEW, MANY = 5, 50
"""Fewer and more tokens than a block of 32 has."""


def initial_params(config: ModelConfig):
    return jax.jit(Bert(config, add_pooling_layer=False).init)(jax.random.key(1), jnp.zeros((1, 9), jnp.int32))


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_given_mask_has_the_tokens_of_a_kind(kind: str, count: int) -> None:
    ids, mask = example(kind, count)
    params, flags = initial_params(CONFIG), GlobalTokens.find(kind, jnp.asarray(ids), SEP, jnp.asarray(mask)).flags
    given = Bert(CONFIG, add_pooling_layer=False).apply(
        params, ids, None, mask, global_attention_mask=flags | (mask == 0)
    )
    expected = Bert(CONFIG, add_pooling_layer=False, global_tokens=kind).apply(params, ids, None, mask)
    real = mask.astype(bool)
    states = given.last_hidden_state[real], expected.last_hidden_state[real]
    np.testing.assert_allclose(*states, rtol=0, atol=1e-5)  # sums in another order


@pytest.mark.medium
def test_a_model_without_global_attention_rejects_a_mask() -> None:
    config, ids = dataclasses.replace(CONFIG, global_attention_sep_id=None), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="has no global attention"):
        Bert(config).init(jax.random.key(0), ids, global_attention_mask=ids)


@pytest.mark.medium
def test_global_tokens_of_each_kind_by_hand() -> None:
    ids = jnp.array([[0, 7, SEP, SEP, 8, 9, SEP, 1], [0, SEP, SEP, 8, SEP, 1, 1, 1]])
    mask = jnp.array([[1] * 7 + [0], [1] * 5 + [0] * 3])
    expected = {
        "first": [[0], [0]],
        "before_separator": [[0, 1], [0]],
        "after_separator": [[4, 5, 6], [3, 4]],
    }
    for kind, positions in expected.items():
        tokens = GlobalTokens.find(kind, ids, SEP, mask)
        assert [np.flatnonzero(row).tolist() for row in tokens.flags] == positions
        selected = tokens.select(4)
        assert selected.num_selected == (2 if kind == "first" else 4)
        for row, found in enumerate(positions):
            assert selected.positions[row, : len(found)].tolist() == found
    assert not GlobalTokens.find("first", ids, SEP, jnp.zeros_like(mask)).flags.any(), "rows that fill a batch"
    assert GlobalTokens.find("after_separator", ids, SEP, None).flags[:, -1].all(), "without a mask, all are tokens"


@pytest.mark.medium
def test_put_is_the_inverse_of_take() -> None:
    flags = jnp.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]], bool)
    tokens, x = GlobalTokens(flags, "before_separator").select(3), jnp.arange(20).reshape(2, 5, 2)
    np.testing.assert_array_equal(tokens.take(x)[:, :1], [[[0, 1]], [[18, 19]]])
    np.testing.assert_array_equal(tokens.put(tokens.take(x), x), x)
    np.testing.assert_array_equal(tokens.put(-tokens.take(x), x), jnp.where(flags[..., None], -x, x))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def written_out(params: dict, x: np.ndarray, flags: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Attention of one row, query by query: a token reads its window and the global tokens, a global one everything."""
    size = CONFIG.head_size

    def project(name: str) -> np.ndarray:
        kernel, bias = (np.asarray(params[name][part], np.float64) for part in ("kernel", "bias"))
        return (x @ kernel + bias).reshape(len(x), -1, size)

    projected = {name: project(name) for name in params if name != "output"}
    mixed = np.zeros((len(x), CONFIG.num_attention_heads, size))
    for query in np.flatnonzero(real):
        near = np.abs(np.arange(len(x)) - query) <= WINDOW
        keys = np.flatnonzero(real & (near | flags | flags[query]))
        start = "global_" if flags[query] else ""
        for head in range(CONFIG.num_attention_heads):
            of_query, of_keys, values = (projected[f"{start}{name}"][:, head] for name in ("query", "key", "value"))
            mixed[query, head] = softmax(of_keys[keys] @ of_query[query] / size**0.5) @ values[keys]
    output = params["output"]
    return mixed.reshape(len(x), -1) @ np.asarray(output["kernel"]) + np.asarray(output["bias"])


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["eager", "xla"])
@pytest.mark.parametrize("length", [90, T])
@pytest.mark.parametrize(
    ("kind", "count"), [("first", 1), *((kind, count) for kind in KINDS[1:] for count in (FEW, MANY))]
)
def test_attention_is_the_written_out_attention(kind: str, count: int, length: int, kernel: str) -> None:
    """In blocks, with fewer and more global tokens than a block has, and in rows that are too short for blocks."""
    ids, keys = map(jnp.asarray, example(kind, count, length))
    x = jax.random.normal(jax.random.key(0), (*ids.shape, 16))
    tokens = GlobalTokens.find(kind, ids, SEP, keys)
    assert tokens.num_per_row.tolist() == [count, count]
    mask = Mask(keys=keys, right_padded=True, global_tokens=tokens)
    module = Attention(CONFIG, kernel=kernel)
    params = jax.tree.map(lambda leaf: leaf + 0.1, module.init(jax.random.key(1), x[:, :3], x[:, :3], Mask()))

    @jax.jit
    def run(params):
        context = attention_contexts(CONFIG, jnp.float32, mask, *ids.shape, ids.shape[1], kernel, True)[True]
        assert (context.mask.block is not None) == (length == T)
        return module.apply(params, x, x, context.mask)

    mixed, weights = run(params)
    real, flags = np.asarray(keys, bool), np.asarray(tokens.flags)
    assert (weights is None) == (length == T or kernel == "xla")
    for row in range(len(ids)):
        expected = written_out(params["params"], np.asarray(x[row], np.float64), flags[row], real[row])
        np.testing.assert_allclose(mixed[row][real[row]], expected[real[row]], atol=2e-5)
        if weights is not None:
            np.testing.assert_allclose(weights[row].sum(-1)[:, real[row]], 1, atol=1e-5)
            assert (weights[row][:, flags[row]][..., real[row]] > 0).all(), "a global token reads all tokens"


def run_encoder(config: ModelConfig, params, kind: str, count: int, execution: LayerExecution, **options):
    """Hidden states and the gradients of a sum over them, by parameter."""
    ids, keys = example(kind, count)
    model = Bert(config, add_pooling_layer=False, execution=execution, global_tokens=kind)

    def total(params):
        hidden = model.apply(params, ids, None, keys, **options).last_hidden_state
        return jnp.sum(jnp.sin(hidden) * keys[..., None]), hidden

    (_, hidden), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return hidden[keys > 0], grads


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "count", "execution"),
    [
        ("first", 1, LayerExecution("dots", scan=True)),
        ("before_separator", FEW, LayerExecution("full", scan=True)),
        ("before_separator", MANY, LayerExecution()),
        pytest.param("after_separator", MANY, LayerExecution("dots", scan=True), marks=pytest.mark.slow),
        pytest.param("after_separator", FEW, LayerExecution(attention="xla"), marks=pytest.mark.slow),
        pytest.param("first", 1, LayerExecution(attention="splash"), marks=pytest.mark.slow),
    ],
)
def test_blocks_are_the_masked_layers(kind: str, count: int, execution: LayerExecution) -> None:
    """Hidden states and gradients, with padding. Layers that return their weights are masked, without blocks."""
    config = dataclasses.replace(CONFIG, attention_softcap=2.0, query_pre_attn_scalar=5.0, num_key_value_heads=1)
    params = initial_params(config)
    expected, masked = run_encoder(config, params, kind, count, LayerExecution(), intermediates=True)
    hidden, grads = run_encoder(config, params, kind, count, execution)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(masked))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5 * largest), grads, masked)
    global_value = grads["params"]["encoder"]["layer_0"]["attention"]["global_value"]["kernel"]
    assert jnp.abs(global_value).max() > 1e-3 * largest


@pytest.mark.medium
def test_without_global_tokens_the_model_is_local_and_keeps_the_projections() -> None:
    model, params, ids = Bert(CONFIG, add_pooling_layer=False), initial_params(CONFIG), example("first", 1)[0]
    local = Bert(dataclasses.replace(CONFIG, global_attention_sep_id=None), add_pooling_layer=False)
    names = {"global_query", "global_key", "global_value"}
    assert names < params["params"]["encoder"]["layer_1"]["attention"].keys()
    hidden = model.apply(params, ids).last_hidden_state
    np.testing.assert_array_equal(hidden, local.apply(params, ids).last_hidden_state)
    others = model.clone(global_tokens="first").apply(params, ids).last_hidden_state
    assert jnp.abs(others - hidden)[:, -WINDOW:].max() > 0.1, "the last tokens read the first one"


@pytest.mark.medium
def test_padding_does_not_change_a_row() -> None:
    for kind in KINDS:
        ids = example(kind, FEW, 40)[0][:1]
        padded = np.pad(ids, [(0, 0), (0, T - 40)], constant_values=1)
        keys = (np.arange(T) < 40).astype(np.int32)[None]
        model, params = Bert(CONFIG, add_pooling_layer=False, global_tokens=kind), initial_params(CONFIG)
        alone, longer = model.apply(params, ids), model.apply(params, padded, None, keys)
        np.testing.assert_allclose(longer.last_hidden_state[:, :40], alone.last_hidden_state, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_no_array_grows_with_the_square_of_the_length(kind: str) -> None:
    length, model = 1024, Bert(CONFIG, add_pooling_layer=False, global_tokens=kind)
    gradient = jax.grad(lambda params, ids: model.apply(params, ids).last_hidden_state.sum())
    program = str(jax.make_jaxpr(gradient)(initial_params(CONFIG), jnp.zeros((1, length), jnp.int32)))
    shapes = re.findall(r":(?:f32|bool|i32)\[([\d,]+)\]", program)
    largest = max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)
    keys_per_query = 3 * 32 + (2 if kind == "first" else 32)
    assert largest == max(length * keys_per_query * CONFIG.num_attention_heads, 2048 * 16)


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "count"), [("first", 1), ("before_separator", MANY)])
def test_dropout_is_the_same_in_a_loop_and_for_a_row_alone(kind: str, count: int) -> None:
    ids, params = jnp.asarray(example(kind, count)[0]), initial_params(CONFIG)

    def run(scan: bool, numbers: list[int]):
        execution, numbers = LayerExecution(scan=scan), jnp.array(numbers)
        model = Bert(CONFIG, add_pooling_layer=False, execution=execution, global_tokens=kind)
        dropout = Dropout.for_step(0, 1, numbers)
        return jax.jit(model.apply)(params, ids[numbers], dropout=dropout).last_hidden_state

    both = run(False, [0, 1])
    np.testing.assert_allclose(run(True, [0, 1]), both, atol=1e-5)
    np.testing.assert_allclose(run(False, [1])[0], both[1], atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_mesh_gives_the_gradients_of_one_device(count: int) -> None:
    model, (ids, keys) = HEADS["question_answering"](CONFIG, 2), example("before_separator", count)
    batch = {"input_ids": np.tile(ids, (2, 1)), "attention_mask": np.tile(keys, (2, 1))}
    params = jax.jit(model.init)(jax.random.key(1), ids[:, :9])["params"]

    def gradients(params, batch):
        ids, keys = batch["input_ids"][0], batch["attention_mask"][0]

        def total(params):
            return jnp.mean(jnp.sin(model.apply({"params": params}, ids, None, keys)) * keys[..., None])

        return jax.grad(total)(params)

    def run(parallel: Parallelism):
        sharded = parallel.shard_batch(batch, 1)
        return parallel.to_host(parallel.compile(gradients)(parallel.put_state(params), sharded))

    expected = run(PmapParallelism(jax.devices()[:1]))
    assert_same_gradients(run(MeshParallel((2, 2, 2), jax.devices()[:8])), expected)


@pytest.mark.medium
def test_packed_rows_with_global_tokens_are_rejected() -> None:
    model, ids = Bert(CONFIG), example("first", 1, 9)[0]
    packing = Packing(jnp.ones_like(ids), jnp.arange(9)[None].repeat(2, 0), jnp.zeros((2, 1), jnp.int32))
    params = jax.jit(model.init)(jax.random.key(1), ids)
    assert model.apply(params, ids, packing=packing).pooled_output.shape == (2, 1, 16)
    with pytest.raises(ValueError, match="packed rows have no global tokens: pad rows instead"):
        model.clone(global_tokens="first").apply(params, ids, packing=packing)


def test_each_head_has_the_global_tokens_of_its_class() -> None:
    assert {kind: head.global_tokens for kind, head in HEADS.items()} == {
        "sequence_classification": "first",
        "token_classification": None,
        "question_answering": "before_separator",
        "multiple_choice": "after_separator",
        "reranker": "first",  # a published reranker is a sequence classifier
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_window": None}, "global_attention_sep_id is 3, but model.attention_window is null: set a window"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is alibi: set the positions to learned"),
        ({"global_attention_every": 2}, "but model.global_attention_every is 2: remove one of the two"),
        ({"relative_attention_buckets": 8}, "but model.relative_attention_buckets is 8: remove one of the two"),
        ({"query_key_norm": True}, "but model.query_key_norm is true: remove one of the two"),
        ({"causal": True}, "but model.causal is true: remove one of the two"),
        ({"share_decoder": "all"}, "but model.share_decoder is all: share the embeddings only"),
        ({"global_attention_sep_id": 50}, "but model.vocab_size is 50: set it to the id of a token"),
    ],
)
def test_options_that_cannot_be(changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **changes).check()


def test_a_decoder_has_no_global_tokens() -> None:
    assert CONFIG.decoder.global_attention_sep_id is None
    shapes = jax.eval_shape(Encoder(CONFIG.decoder).init, jax.random.key(0), jnp.zeros((1, 4, 16)), Mask(causal=True))
    assert "global_key" not in shapes["params"]["layer_0"]["attention"]
