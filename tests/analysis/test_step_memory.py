"""What a step takes of a device, from the compiler: here of the CPU, and of TPUs where libtpu is installed."""

import dataclasses
import importlib.util

import jax
import pytest

from bert.analysis.step_memory import StepMemory, batch_shapes, compiled_step_memory, state_shapes, tpu_devices
from bert.config import ModelConfig, PretrainConfig
from bert.errors import UserError, require
from bert.parallel.backends import MeshParallel
from tests.helpers import recipe

V5E = 16 * 2**30
"""Bytes of high-bandwidth memory of a TPU v5e chip."""


SMALL = ModelConfig(64, 16, 2, 4, 32, max_position_embeddings=16)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["pretrained", "detected", "continued"])
def test_a_batch_has_the_arrays_that_the_loader_gives(name: str, request) -> None:
    from bert.config.yaml_io import load_config
    from bert.data.pretraining.builder import build_examples
    from bert.data.pretraining.loader import PretrainingLoader, make_predictions
    from bert.data.pretraining.shards import open_rows
    from bert.tokenizer.vocabulary import load_tokenizer

    run = request.getfixturevalue(name)
    config = load_config(PretrainConfig, run / "config.yaml")
    tokenizer = load_tokenizer(run)
    rows = open_rows(build_examples(config.data, tokenizer).train)
    batch = PretrainingLoader(rows, make_predictions(config.data, tokenizer), config.training.batch_size, 0).batch(0)
    found = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert {name: (shape.shape[1:], shape.dtype) for name, shape in batch_shapes(config).items()} == found


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
    found = jax.devices()[:8] if devices == "local" else tpu_devices(devices)
    model = dataclasses.replace(SMALL, tie_word_embeddings=False)  # tied ones are added once for each use
    for micro_batches in (1, 3):
        config = recipe(
            model, 16, batch_size=3 * len(found), gradient_accumulation_steps=micro_batches, scan_layers=True
        )
        memory = compiled_step_memory(config, MeshParallel((len(found), 1, 1), found))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state_shapes(config).params))
        gradients = 4 * micro_batches * parameters
        assert gradients <= require(memory.all_reduced, "bytes") <= gradients + 1000  # losses and their weights


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_there_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"cannot compile for the TPU slice v5e:2x4 \(.*with libtpu installed"):
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
