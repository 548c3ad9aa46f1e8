"""What cannot be compiled for: counted as JAX stores it, and close to what compilers say."""

import dataclasses
import importlib.util

import jax
import pytest

from bert.analysis.memory_estimate import (
    ESTIMATE_ERROR_PERCENT,
    AbstractMeshParallel,
    estimate_step,
    layer_activation_bytes,
)
from bert.analysis.step_memory import compiled_step_memory, tpu_devices
from bert.config import ModelConfig, PretrainConfig
from bert.errors import UserError
from bert.parallel.backends import MeshParallel
from tests.helpers import recipe

T, D, N, F = 16, 64, 4, 256
MODEL = ModelConfig(64, D, 2, N, F, max_position_embeddings=T)
CONFIG = recipe(MODEL, T, batch_size=64, mesh="1x1x1")


def one(count: int = 1, shape: tuple[int, int, int] = (1, 1, 1)) -> AbstractMeshParallel:
    return AbstractMeshParallel(shape, "H100", count, 256)


def with_training(**training: object) -> PretrainConfig:
    return dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, **training))


@pytest.mark.parametrize(("dtype", "c"), [("bfloat16", 2), ("float32", 4)])
def test_a_layer_stores_what_the_letters_say(dtype, c) -> None:
    def stored(remat: str) -> int:
        return layer_activation_bytes(MODEL, dtype, remat, T, False, "hash")

    assert stored("full") == T * c * D
    assert stored("dots") == T * (6 * c * D + c * F)
    assert stored("none") == T * (6 * 4 * D + 8 * c * D + 2 * c * F + 2 * D + 16) + N * T * (T * (4 + c + 1) + 8)


def test_one_kernel_keeps_nothing_of_length_by_length() -> None:
    def stored(length: int, kernel: str) -> int:
        return layer_activation_bytes(MODEL, "bfloat16", "none", length, False, "hash", kernel)

    assert stored(2 * T, "cudnn") == 2 * stored(T, "cudnn")
    assert stored(2 * T, "xla") > 2 * stored(T, "xla")
    on_a_gpu = with_training(preset="fast", dtype="bfloat16")
    assert estimate_step(on_a_gpu, one()).working < estimate_step(with_training(dtype="bfloat16"), one()).working


def test_heads_and_features_are_dealt_out() -> None:
    def rows(tensor: int) -> int:
        return layer_activation_bytes(MODEL, "bfloat16", "none", T, False, "hash", tensor=tensor)

    dealt_out = T * (3 * 2 * D + 2 * 2 * F) + N * T * (T * 7 + 8)
    assert rows(1) - rows(2) == dealt_out // 2


def test_less_is_stored_where_more_is_computed_anew_or_fewer_rows_run_at_once() -> None:
    def working(mesh: AbstractMeshParallel | None = None, **training: object) -> int:
        return estimate_step(with_training(**training), mesh or one()).working

    assert working() > working(remat="dots") > working(remat="full")
    assert working() > working(dtype="bfloat16")
    assert working() > working(gradient_accumulation_steps=8)
    assert working() > working(one(8, (8, 1, 1)))
    deep = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, num_hidden_layers=12))
    assert estimate_step(deep, one(8, (8, 1, 1))).working > estimate_step(deep, one(8, (1, 8, 1))).working
    assert estimate_step(CONFIG, one(8, (1, 8, 1))).state < estimate_step(CONFIG, one(8, (8, 1, 1))).state


def test_a_mesh_that_cannot_be_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"training.mesh \(2x2x2\) takes 8 devices, and there are 4"):
        one(4, (2, 2, 2))
    with pytest.raises(UserError, match=r"hidden_size \(64\) is not divisible by the 3 devices"):
        estimate_step(CONFIG, one(3, (1, 3, 1)))
    with pytest.raises(UserError, match=r"training.batch_size \(64\) is not divisible by 3"):
        estimate_step(CONFIG, one(3, (3, 1, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_cpu_keeps_as_much_and_more(remat, dtype) -> None:
    config = with_training(remat=remat, scan_layers=True, dtype=dtype)
    found = compiled_step_memory(config, MeshParallel((1, 1, 1), jax.devices()[:1]))
    told = estimate_step(config, one())
    assert told.state == pytest.approx(found.state, rel=0.02)
    assert 0.9 < found.working / told.working < 1.7


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install libtpu")
@pytest.mark.parametrize(("length", "rows"), [(128, 64), (512, 64)])
def test_an_estimate_is_close_to_a_compilation_for_a_tpu(length, rows) -> None:
    tiny = ModelConfig(30522, 128, 2, 2, 512)
    config = recipe(tiny, length, batch_size=rows, mesh="1x1x1", scan_layers=True, dtype="bfloat16")
    found = compiled_step_memory(config, MeshParallel((1, 1, 1), tpu_devices("v5e:2x2")[:1]))
    assert estimate_step(config, one()).peak == pytest.approx(found.peak, rel=ESTIMATE_ERROR_PERCENT / 100)
