"""The memory of a training step: formula, compiled step, and the largest batch that fits."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from bert.analysis.memory import (
    StepMemory,
    activation_bytes,
    all_reduce_bytes,
    batch_shapes,
    compiled_step_memory,
    fit_rows,
    state_shapes,
    tpu_devices,
)
from bert.config import ModelConfig, PretrainConfig
from bert.errors import UserError, require
from bert.parallel.backends import MeshParallel
from tests.helpers import recipe

BASE = ModelConfig(30522, 768, 12, 12, 3072)


def test_formula_by_hand() -> None:
    s, h, a = 128, 768, 12
    assert activation_bytes(BASE, s) == 12 * s * h * (34 + 5 * a * s / h)
    assert activation_bytes(BASE, s, itemsize=4) == 2 * activation_bytes(BASE, s)
    assert activation_bytes(BASE, s, remat="full") == 12 * 2 * s * h + s * h * (34 + 5 * a * s / h)
    assert activation_bytes(BASE, s, stores_scores=False) == 12 * 34 * s * h
    assert activation_bytes(BASE, s, tensor=2) == 12 * s * h * (10 + 24 / 2 + 5 * a * s / (h * 2))
    grouped = dataclasses.replace(BASE, num_key_value_heads=3, attention_head_size=128)
    of_heads = 4 * 12 * 128 + 4 * 3 * 128
    assert activation_bytes(grouped, s, stores_scores=False, tensor=2) == 12 * s * (10 * h + (16 * h + of_heads) / 2)
    assert activation_bytes(grouped, s) == 12 * s * (26 * h + 8 * 12 * 128 + 5 * a * s)  # keys are repeated


LOOP = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %both = (bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f32[]{:T(128)}) all-reduce(%x, %y), to_apply=%add
}

%condition (state: (s32[], bf16[4,8])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(%index, %end), direction=LT
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %loop = (s32[], bf16[4,8]) while(%start), condition=%condition, body=%body
  ROOT %last = f32[3] all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
"""A loop as the TPU compiler writes it: its number of iterations is the constant in the condition."""


def test_rounds_of_a_loop_are_counted() -> None:
    assert all_reduce_bytes(LOOP) == 5 * (2 * 4 * 8 + 4) + 4 * 3
    assert all_reduce_bytes(LOOP.replace("s32[]{:T(128)} constant(5)", "s32[]{:T(128)} copy(%end.1)")) is None


def test_a_program_of_this_machine_is_read() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))

    def body(rows: jax.Array) -> jax.Array:
        def add(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.lax.psum(jnp.sin(rows * total.mean()) * scale, "rows").mean(0), None

        total, _ = jax.lax.scan(add, jax.lax.psum(rows, "rows").sum(0), jnp.arange(6.0))
        return total

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("rows"), out_specs=PartitionSpec()))
    text = program.lower(jax.ShapeDtypeStruct((8, 5), jnp.float32)).compile().as_text()
    assert all_reduce_bytes(text) == (1 + 6) * 2 * 5 * 4


V5E = 16 * 2**30
"""Bytes of high-bandwidth memory of a TPU v5e chip."""


SMALL = ModelConfig(64, 16, 2, 4, 32, max_position_embeddings=16)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["pretrained", "detected", "continued"])
def test_a_batch_has_the_arrays_that_the_loader_gives(name: str, request) -> None:
    from bert.config.yaml_io import load_config
    from bert.data.pretraining.build import build_examples
    from bert.data.pretraining.dataset import open_rows
    from bert.data.pretraining.loader import PretrainingLoader, make_predictions
    from bert.tokenizer.vocabulary import load_tokenizer

    run = request.getfixturevalue(name)
    config = load_config(PretrainConfig, run / "config.yaml")
    tokenizer = load_tokenizer(run)
    rows = open_rows(build_examples(config.data, tokenizer).train)
    predictions = make_predictions(config.data, tokenizer, config.training.objective)
    batch = PretrainingLoader(rows, predictions, config.training.batch_size, 0).batch(0)
    result = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert {name: (shape.shape[1:], shape.dtype) for name, shape in batch_shapes(config).items()} == result


@pytest.mark.slow
def test_fsdp_and_recomputation_take_less_of_each_device() -> None:
    def memory(mesh: str, devices: int, **training: object) -> StepMemory:
        config = recipe(SMALL, 16, batch_size=64, mesh=mesh, scan_layers=True, **training)
        return compiled_step_memory(config, MeshParallel(config.training.mesh_shape, jax.devices()[:devices]))

    whole, parts = memory("8x1x1", 8), memory("1x8x1", 8)
    assert parts.state < 0.35 * whole.state  # biases and LayerNorm stay whole, and in so small a model they are much
    assert memory("1x1x1", 1, gradient_accumulation_steps=8).working < 0.5 * memory("1x1x1", 1).working


NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", ["local", pytest.param("v5e:8x8", marks=NEEDS_LIBTPU), pytest.param("v5e:16x16", marks=NEEDS_LIBTPU)]
)
def test_each_gradient_is_added_over_the_devices_once_for_each_micro_batch(devices: str, monkeypatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    used_devices = jax.devices()[:8] if devices == "local" else tpu_devices(devices)
    model = dataclasses.replace(SMALL, tie_word_embeddings=False)  # tied ones are added once for each use
    for micro_batches in (1, 3):
        config = recipe(
            model, 16, batch_size=3 * len(used_devices), gradient_accumulation_steps=micro_batches, scan_layers=True
        )
        memory = compiled_step_memory(config, MeshParallel((len(used_devices), 1, 1), used_devices))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state_shapes(config).params))
        gradients = 4 * micro_batches * parameters
        assert gradients <= require(memory.all_reduced, "bytes") <= gradients + 1000  # losses and their weights


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_there_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"TPU slice v5e:2x4 \(.*with"):
        tpu_devices("v5e:2x4")


@pytest.mark.slow
@NEEDS_LIBTPU
@pytest.mark.parametrize(
    ("topology", "model", "mesh", "remat"),
    [
        ("v5e:2x4", ModelConfig(30522, 768, 12, 12, 3072), "8x1x1", "dots"),
        ("v5e:4x4", ModelConfig(30522, 1024, 24, 16, 4096), "1x16x1", "dots"),
        ("v5e:4x4", ModelConfig(30720, 2048, 24, 16, 8192), "1x8x2", "full"),
        ("v5e:8x8", ModelConfig(30522, 768, 12, 12, 3072), "64x1x1", "dots"),
        ("v5e:16x16", ModelConfig(30522, 768, 12, 12, 3072), "256x1x1", "dots"),
    ],
    ids=["base", "large-fsdp", "1.3-billion-fsdp-tensor", "base-64-chips", "base-256-chips"],
)
def test_the_train_step_compiles_for_tpus_and_fits(topology, model, mesh, remat, monkeypatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    devices = tpu_devices(topology)
    config = recipe(
        model, 512, batch_size=max(256, 2 * len(devices)), gradient_accumulation_steps=2, dtype="bfloat16",
        mesh=mesh, remat=remat, scan_layers=True,
    )  # fmt: skip
    memory = compiled_step_memory(config, MeshParallel(config.training.mesh_shape, devices))
    sizes = f"state {memory.state / 1e9:.2f} GB, working {memory.working / 1e9:.2f} GB"
    print(f"{topology} {mesh}: {sizes}, all-reduce {require(memory.all_reduced, 'its bytes') / 1e6:.1f} MB")
    assert memory.peak < V5E


CONFIG = recipe(ModelConfig(64, 16, 2, 4, 32, max_position_embeddings=16), 16, batch_size=64)
STATE, ROW = 10, 10


class OneDevice:
    """Stands in for a mesh of one device."""

    shape = (1, 1, 1)

    def check_batch(self, name: str, batch_size: int) -> None:
        pass


@pytest.fixture
def compilations(monkeypatch) -> list[int]:
    """Rows of each compilation. Replaces the compiler and rejects more than 32 rows."""
    rows_compiled = []

    def compile_step(config, mesh):
        rows = 64 // config.training.gradient_accumulation_steps
        rows_compiled.append(rows)
        return None if rows > 32 else StepMemory(STATE, ROW * rows)

    monkeypatch.setattr("bert.analysis.memory.compiled_memory", compile_step)
    monkeypatch.setattr("bert.analysis.memory.activation_bytes", lambda *_, **__: 15)
    return rows_compiled


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
def test_finds_most_rows_with_few_compilations(compilations, rows) -> None:
    fit = fit_rows(CONFIG, OneDevice(), STATE + ROW * rows, "none")
    assert (fit.rows, fit.micro_batches) == (rows, 64 // rows)
    assert fit.memory == StepMemory(STATE, ROW * rows)
    assert len(compilations) == len(set(compilations)) <= 3


@pytest.mark.parametrize("rows", [1, 4, 144, 4608])
def test_many_divisors_are_bisected(compilations, monkeypatch, rows) -> None:
    training = dataclasses.replace(CONFIG.training, batch_size=4608)
    compiled = []

    def compile_step(config, mesh):
        compiled.append(4608 // config.training.gradient_accumulation_steps)
        return StepMemory(STATE, ROW * compiled[-1])

    monkeypatch.setattr("bert.analysis.memory.compiled_memory", compile_step)
    config = dataclasses.replace(CONFIG, training=training)
    said: list[str] = []
    fit = fit_rows(config, OneDevice(), STATE + ROW * rows, "none", said.append)
    assert fit.rows == rows
    assert len(compiled) == len(set(compiled)) == len(said) <= 5
    monkeypatch.setattr("bert.analysis.memory.activation_bytes", lambda *_, **__: 1)  # far too optimistic
    compiled.clear()
    assert fit_rows(config, OneDevice(), STATE + ROW * rows, "none").rows == rows
    assert len(compiled) == len(set(compiled)) <= 10


def test_long_rows_recomputed_start_from_the_scores_of_one_layer(monkeypatch) -> None:
    heads, length, layers = 12, 8192, 22
    model = ModelConfig(64, 768, layers, heads, 3072, max_position_embeddings=length)
    config = recipe(model, 512, batch_size=72, remat="full", dtype="bfloat16")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
    row, compiled = 5 * heads * length**2, []  # the scores of a layer by the formula, more than all that it keeps

    def compile_step(config, mesh):
        compiled.append(72 // config.training.gradient_accumulation_steps)
        return StepMemory(STATE, row * compiled[-1])

    monkeypatch.setattr("bert.analysis.memory.compiled_memory", compile_step)
    assert fit_rows(config, OneDevice(), STATE + 3 * row, "full").rows == 3
    assert compiled[0] <= 3
    assert len(compiled) <= 3


def test_nothing_fits(compilations) -> None:
    fit = fit_rows(CONFIG, OneDevice(), STATE, "none")
    assert (fit.rows, fit.micro_batches, fit.memory) == (0, 64, StepMemory(STATE, ROW))
