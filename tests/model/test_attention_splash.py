"""The Pallas kernel for TPUs against attention written out: interpreted on the CPU, and compiled where libtpu is
installed."""

import dataclasses
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.analysis.memory import lower_step, tpu_devices
from bert.config import ModelConfig
from bert.model import attention
from bert.model.attention import Memory, dot_product_attention, fused_attention, splash_attention
from bert.model.encoder import Encoder
from bert.model.layers import Layer, LayerExecution
from bert.model.mask import Mask
from bert.parallel.backends import MeshParallel
from tests.helpers import recipe

T = 150  # filled up to 256
KEYS = (jnp.arange(T) < jnp.array([[T], [70]])).astype(jnp.int32)
EXAMPLES = jnp.where(jnp.arange(T) < 60, 1, jnp.where(jnp.arange(T) < 120, 2, 0))[None].repeat(2, 0)
MASKS = {
    "whole": Mask(),
    "padded, windows": Mask(keys=KEYS, right_padded=True, window=8),
    "packed, causal": Mask(examples=EXAMPLES, causal=True),
    "packed and padded, causal windows": Mask(keys=KEYS, examples=EXAMPLES, window=8, causal=True),
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


CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, attention_window=8,
    global_attention_every=2, max_position_embeddings=256, position_embedding_type="rotary", initializer_range=0.3,
)  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [None, pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_local_and_global_layers_of_packed_rows_are_those_written_out(mesh, monkeypatch) -> None:
    """Hidden states and gradients; on a mesh, each device has its own rows and heads."""
    monkeypatch.setattr(attention, "splash_attention", partial(splash_attention, interpret=True))
    x, mask = jax.random.normal(jax.random.key(0), (2, T, 16)), Mask(examples=EXAMPLES)
    params = jax.jit(Encoder(CONFIG).init)(jax.random.key(1), x[:, :9], Mask())
    real = (EXAMPLES > 0)[..., None]

    def run(execution: LayerExecution):
        def total(params, x):
            hidden = Encoder(CONFIG, execution=execution).apply(params, x, mask).last_hidden_state
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
        dataclasses.replace(CONFIG, max_position_embeddings=512), 512, batch_size=4, mesh="1x2x2", scan_layers=True,
        attention_implementation="splash", dtype="bfloat16",
    )  # fmt: skip
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=True))
    compiled = lower_step(config, MeshParallel(config.training.mesh_shape, devices)).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 6  # of local and of global layers


@pytest.mark.medium
def test_cross_attention_is_left_to_xla(monkeypatch) -> None:
    """The kernel would use the source's padding for the target, which may be longer."""
    monkeypatch.setattr(attention, "splash_attention", partial(splash_attention, interpret=True))
    config = dataclasses.replace(CONFIG, attention_window=None, global_attention_every=None, causal=True)
    target, source = jax.random.normal(jax.random.key(0), (2, 2, 128, 16))
    memory = Memory(source, Mask(keys=jnp.arange(128)[None] < jnp.array([[40], [100]])))
    layers = [Layer(config, kernel=kernel) for kernel in ("written", "splash")]
    params = layers[0].init(jax.random.key(1), target[:, :9], Mask(causal=True), memory=memory)
    written, fused = (layer.apply(params, target, Mask(causal=True), memory=memory)[0] for layer in layers)
    np.testing.assert_allclose(written, fused, atol=1e-5)
