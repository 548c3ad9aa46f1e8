"""Attention by hand, fused kernels, the Pallas kernel for TPUs (interpreted on the CPU), and decoding with a cache."""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.analysis.memory import lower_step, tpu_devices
from bert.config import ModelConfig
from bert.model import attention
from bert.model.attention import (
    LayerCache,
    Memory,
    dot_product_attention,
    fused_attention,
    make_cache,
    splash_attention,
)
from bert.model.encoder import Encoder
from bert.model.layers import Layer, LayerExecution
from bert.model.mask import Mask
from bert.parallel.backends import MeshParallel
from tests.helpers import recipe

MASK = Mask(keys=jnp.asarray([[1] * 8, [1] * 5 + [0] * 3, [1] + [0] * 7]), right_padded=True)


@pytest.mark.medium
def test_scaled_dot_product_attention_by_hand() -> None:
    # One head of size 4, so scores are halved. Query 0 sees scores 2 ln 3 / 2 = ln 3 and 0: weights 3/4 and 1/4.
    ln3 = np.log(3)
    query = jnp.array([[[2 * ln3, 0, 0, 0]], [[0, 0, 0, 0]]]).reshape(1, 2, 1, 4)
    key = jnp.array([[1.0, 0, 0, 0], [0, 1, 0, 0]]).reshape(1, 2, 1, 4)
    value = jnp.array([[4.0, 0, 8, 0], [0, 4, 0, 8]]).reshape(1, 2, 1, 4)
    mixed, weights = dot_product_attention(query, key, value)
    np.testing.assert_allclose(weights[0, 0], [[0.75, 0.25], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(mixed[0, :, 0], [[3, 1, 6, 2], [2, 2, 4, 4]], atol=1e-5)
    # Causal: the first query sees itself only.
    mixed, weights = dot_product_attention(query, key, value, Mask(causal=True).booleans(2, 2))
    np.testing.assert_allclose(weights[0, 0], [[1, 0], [0.5, 0.5]], atol=1e-6)
    np.testing.assert_allclose(mixed[0, :, 0], [[4, 0, 8, 0], [2, 2, 4, 4]], atol=1e-5)


@pytest.mark.medium
def test_cross_attention_by_hand() -> None:
    # Three queries over two keys; zero queries mix evenly, the mask leaves one key.
    query = jnp.zeros((1, 3, 1, 2))
    key = value = jnp.array([[1.0, 3.0], [5.0, 7.0]]).reshape(1, 2, 1, 2)
    mask = jnp.array([[1, 1], [1, 0], [0, 1]], bool)[None, None]
    mixed, _ = dot_product_attention(query, key, value, mask)
    np.testing.assert_allclose(mixed[0, :, 0], [[3, 5], [1, 3], [5, 7]], atol=1e-6)


@pytest.mark.medium
def test_a_query_that_may_look_nowhere_gives_no_nan() -> None:
    x = jnp.ones((1, 2, 1, 4))
    mixed, _ = dot_product_attention(x, x, x, jnp.zeros((1, 1, 2, 2), bool))
    assert np.isfinite(mixed).all()


PACKED = Mask(examples=jnp.array([[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 2, 2, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]))


def compared(implementation, dtype, mask=MASK):
    """Values at real queries, and gradients of a sum over these, of the kernel and of attention written out."""
    random = np.random.default_rng(0)
    query, key, value, target = (jnp.asarray(random.normal(size=(3, 8, 2, 16)), dtype) for _ in range(4))
    real = (mask.examples > 0 if mask.keys is None else mask.keys)[:, :, None, None].astype(dtype)

    def fused(*inputs):
        return fused_attention(*inputs, mask, implementation)

    def written(*inputs):
        return dot_product_attention(*inputs, mask.booleans(8, 8))[0]

    def of(attend):
        loss = lambda *inputs: jnp.sum((attend(*inputs) * real * target).astype(jnp.float32))  # noqa: E731
        return (attend(query, key, value) * real, *jax.grad(loss, (0, 1, 2))(query, key, value))

    return zip(*(jax.jit(lambda attend=attend: of(attend))() for attend in (fused, written)), strict=True)


@pytest.mark.medium
@pytest.mark.parametrize("mask", [MASK, PACKED], ids=["padded", "packed"])
def test_the_twin_of_the_kernel_is_attention_written_out(mask):
    for actual, expected in compared("xla", jnp.float32, mask):
        np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.medium
def test_in_bfloat16_the_twin_and_attention_written_out_differ_by_their_roundings():
    """Each rounds numbers to 8 significant bits at different points, with a relative error of at most 2**-8 each time.

    Over a whole array, errors add up at random, so the tolerance is one such rounding on either side.
    """
    for actual, expected in compared("xla", jnp.bfloat16):
        assert actual.dtype == expected.dtype == jnp.bfloat16
        actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(actual - expected) <= 2 * 2**-8 * np.linalg.norm(expected)


def test_cudnns_kernel_is_asked_for_no_odd_rows_with_pairs_or_a_bias(monkeypatch):
    """Its backward pass does not support them."""
    asked = []

    def asks(query, *others, implementation, **rest):
        asked.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", asks)
    pairs, bias = jnp.ones((1, 1, 7, 7), bool), jnp.zeros((1, 1, 7, 7))
    for mask, length in ((Mask(), 7), (Mask(pairs=pairs), 7), (Mask(bias=bias), 7), (Mask(bias=bias), 8)):
        fused_attention(*[jnp.ones((1, length, 2, 8))] * 3, mask, "cudnn")
    assert asked == ["cudnn", "xla", "xla", "cudnn"]


def assert_kernel_is_attention_written_out(implementation):
    for mask in (MASK, PACKED):
        for actual, expected in compared(implementation, jnp.bfloat16, mask):
            np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), atol=3e-2)


@pytest.mark.medium
def test_cudnns_kernel_is_attention_written_out():
    """Needs an NVIDIA GPU and JAX for it. Runs in a separate process because all other tests use CPU devices."""
    plugins = [name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin") if importlib.util.find_spec(name)]
    if not plugins or not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("cuDNN's kernel needs an NVIDIA GPU and jax[cuda12] or jax[cuda13]")
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", "from tests.model import test_attention as t; "
         "t.assert_kernel_is_attention_written_out('cudnn')"],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


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
def decoder(pre_layer_norm: bool, kernel: str = "eager") -> tuple:
    encoder = Encoder(
        dataclasses.replace(CONFIG, pre_layer_norm=pre_layer_norm), execution=LayerExecution(attention=kernel)
    )
    params = jax.jit(encoder.init)(jax.random.key(0), X, Mask(), memory=MEMORY)
    return encoder, params, jax.jit(encoder.apply)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("pre_layer_norm", "kernel"),
    [
        (False, "eager"),
        (True, "xla"),
        pytest.param(True, "eager", marks=pytest.mark.slow),
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


@pytest.mark.medium
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


T = 150  # filled up to 256
PADDING = (jnp.arange(T) < jnp.array([[T], [70]])).astype(jnp.int32)
EXAMPLES = jnp.where(jnp.arange(T) < 60, 1, jnp.where(jnp.arange(T) < 120, 2, 0))[None].repeat(2, 0)
MASKS = {
    "whole": Mask(),
    "padded, windows": Mask(keys=PADDING, right_padded=True, window=8),
    "packed, causal": Mask(examples=EXAMPLES, causal=True),
    "packed and padded, causal windows": Mask(keys=PADDING, examples=EXAMPLES, window=8, causal=True),
}


def heads(length: int = T, count: int = 4) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(2, length, 2, 12)), jnp.float32) for _ in range(count)]


def of(attend, mask: Mask, inputs: list[jax.Array], target: jax.Array):
    """Values at real queries, and gradients of a sum over these."""
    real = jnp.ones(target.shape[:2]) if mask.keys is None else mask.keys
    real = (real if mask.examples is None else real * (mask.examples > 0))[..., None, None]
    loss = lambda *inputs: jnp.sum(attend(*inputs) * real * target)  # noqa: E731
    return jax.jit(lambda *inputs: (attend(*inputs) * real, *jax.grad(loss, (0, 1, 2))(*inputs)))(*inputs)


@pytest.mark.medium
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_is_attention_written_out(name: str) -> None:
    mask, (*inputs, target) = MASKS[name], heads()
    written = lambda *inputs: dot_product_attention(*inputs, mask.booleans(T, T))[0]  # noqa: E731
    result = of(partial(splash_attention, mask=mask, interpret=True), mask, inputs, target)
    for one, other in zip(result, of(written, mask, inputs, target), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.medium
def test_other_masks_are_left_to_xla() -> None:
    query, key, value = heads(8, 3)
    biased = Mask(bias=jnp.ones((1, 2, 8, 8)))
    pairs = Mask(pairs=jnp.tril(jnp.ones((1, 1, 8, 8), bool)))
    for mask, queries in ((biased, query), (pairs, query), (Mask(), query[:, :3])):
        actual = fused_attention(queries, key, value, mask, "splash")
        expected, _ = dot_product_attention(queries, key, value, mask.booleans(queries.shape[1], 8), mask.bias)
        np.testing.assert_allclose(actual, expected, atol=2e-6)


WINDOWS = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, attention_window=8,
    global_attention_every=2, max_position_embeddings=256, position_embedding_type="rotary", initializer_range=0.3,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (2, 1, 2)])
def test_local_and_global_layers_of_packed_rows_are_those_written_out(mesh, monkeypatch) -> None:
    """Hidden states and gradients; on a mesh, each device has its own rows and heads."""
    monkeypatch.setattr(attention, "splash_attention", partial(splash_attention, interpret=True))
    x, mask = jax.random.normal(jax.random.key(0), (2, T, 16)), Mask(examples=EXAMPLES)
    params = jax.jit(Encoder(WINDOWS).init)(jax.random.key(1), x[:, :9], Mask())
    real = (EXAMPLES > 0)[..., None]

    def run(execution: LayerExecution):
        def total(params, x):
            hidden = Encoder(WINDOWS, execution=execution).apply(params, x, mask).last_hidden_state
            return jnp.sum(jnp.sin(hidden) * real), hidden * real

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(params, x)

    expected = run(LayerExecution())
    if mesh is None:
        actual = run(LayerExecution("full", scan=True, attention="splash"))
    else:
        with jax.set_mesh(MeshParallel(mesh, jax.devices()[:4]).mesh):
            actual = run(LayerExecution(attention="splash"))
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5 * largest), actual, expected)


NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu"
)


@pytest.mark.slow
@NEEDS_LIBTPU
@pytest.mark.parametrize("window", [64, None])
def test_it_compiles_for_tpus_and_its_memory_grows_with_the_length(window: int | None) -> None:
    """Three kernels, of the forward pass and of the backward pass' two parts."""
    device = jax.sharding.SingleDeviceSharding(tpu_devices("v5e:2x2")[0])

    def gradients(*inputs: jax.Array, keys: jax.Array):
        mask = Mask(keys=keys, window=window)
        return jax.grad(lambda *inputs: splash_attention(*inputs, mask).astype(jnp.float32).sum(), (0, 1, 2))(*inputs)

    def memory(length: int) -> int:
        x = jax.ShapeDtypeStruct((2, length, 12, 64), jnp.bfloat16, sharding=device)
        keys = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=device)
        compiled = jax.jit(gradients).lower(x, x, x, keys=keys).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
        return compiled.memory_analysis().temp_size_in_bytes

    bytes_by_length = {length: memory(length) for length in (1000, 4096, 8192, 16384)}
    print(window, {length: f"{size / 2**20:.1f} MiB" for length, size in bytes_by_length.items()})
    # Arrays of [B, T, N, 128], fewer where there is other memory. The scores alone are 4 T bytes for each query.
    assert all(size < 2.5 * 1024 * 2 * 12 * length for length, size in bytes_by_length.items())


@pytest.mark.slow
@NEEDS_LIBTPU
def test_a_train_step_of_packed_rows_compiles_for_a_mesh_of_tpus() -> None:
    devices = tpu_devices("v5e:2x2")
    config = recipe(
        dataclasses.replace(WINDOWS, max_position_embeddings=512), 512, batch_size=4, mesh="1x2x2", scan_layers=True,
        attention_implementation="splash", dtype="bfloat16",
    )  # fmt: skip
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=True))
    compiled = lower_step(config, MeshParallel(config.training.mesh_shape, devices)).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 6  # of local and of global layers


@pytest.mark.medium
def test_cross_attention_is_left_to_xla(monkeypatch) -> None:
    """The kernel would use the source's padding for the target, which may be longer."""
    monkeypatch.setattr(attention, "splash_attention", partial(splash_attention, interpret=True))
    config = dataclasses.replace(WINDOWS, attention_window=None, global_attention_every=None, causal=True)
    target, source = jax.random.normal(jax.random.key(0), (2, 2, 128, 16))
    memory = Memory(source, Mask(keys=jnp.arange(128)[None] < jnp.array([[40], [100]])))
    layers = [Layer(config, kernel=kernel) for kernel in ("eager", "splash")]
    params = layers[0].init(jax.random.key(1), target[:, :9], Mask(causal=True), memory=memory)
    written, fused = (layer.apply(params, target, Mask(causal=True), memory=memory)[0] for layer in layers)
    np.testing.assert_allclose(written, fused, atol=1e-5)
