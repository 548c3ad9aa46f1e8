"""Replicas and meshes: every layout has the gradients of one device, and unsupported layouts are errors."""

import dataclasses
import functools
import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.config import ModelConfig, OptimizerConfig, TrainingConfig
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.pretraining import BertForPreTraining
from bert.parallel import backends
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism, _host_shard, make_parallelism
from bert.parallel.sharding import partition_spec, path_str
from bert.training.losses import make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, compute_gradients, make_eval_step, make_train_step
from tests.conftest import SMALL_RUN
from tests.helpers import OPTIONS, assert_same_but_for_rounding
from tests.tiny_training import T, assert_same_gradients, batch_of

CONFIG = ModelConfig(64, 16, 1, 8, 32, max_position_embeddings=T, initializer_range=0.1)
MODEL = BertForPreTraining(CONFIG)
MODERN = BertForPreTraining(dataclasses.replace(CONFIG, num_hidden_layers=2, **OPTIONS["modern"]))
GROUPED = BertForPreTraining(
    dataclasses.replace(
        CONFIG,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_head_size=4,
        query_key_norm=True,
        attention_softcap=2.0,
        position_embedding_type="alibi",
    )
)
SHARED = BertForPreTraining(dataclasses.replace(CONFIG, num_hidden_layers=2, **OPTIONS["shared layers"]))
RELATIVE = BertForPreTraining(dataclasses.replace(CONFIG, **OPTIONS["positions of Transformer-XL"]))
CONVOLVED = BertForPreTraining(dataclasses.replace(CONFIG, **OPTIONS["convolution"]))
OBJECTIVE = make_pretraining_loss(MODEL.apply)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)

LAYOUTS = [
    pytest.param("2x2x2", 1, MODEL),
    pytest.param("2x2x2", 2, MODEL, marks=pytest.mark.slow),
    pytest.param("8x1x1", 1, MODEL, marks=pytest.mark.slow),
    pytest.param("2x4x1", 1, MODEL, marks=pytest.mark.slow),
    pytest.param("1x1x8", 1, MODEL, marks=pytest.mark.slow),
    pytest.param("1x8x1", 2, MODEL, marks=pytest.mark.slow),
    pytest.param("2x2x2", 1, MODERN, marks=pytest.mark.slow),
    pytest.param("2x2x2", 1, SHARED, marks=pytest.mark.slow),
    pytest.param("2x2x2", 1, GROUPED, marks=pytest.mark.slow),
    pytest.param("2x2x2", 1, RELATIVE, marks=pytest.mark.slow),
    pytest.param("2x2x2", 1, CONVOLVED, marks=pytest.mark.slow),
]


def mesh_of(text: str) -> MeshParallel:
    shape = TrainingConfig(steps=1, mesh=text).mesh_shape
    return MeshParallel(shape, jax.devices()[: int(np.prod(shape))])


@functools.cache
def params(model: BertForPreTraining = MODEL):
    return jax.jit(lambda: model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"])()


def gradients(parallel: Parallelism, model: BertForPreTraining, micro_batches: int = 1):
    loss = make_pretraining_loss(model.apply)

    def body(params, batch):
        return compute_gradients(params, batch, loss, lambda rows: Dropout.for_step(3, 5, rows), parallel.axis)

    rows = parallel.shard_batch(batch_of(0), micro_batches)
    grads, sums = parallel.compile(body)(parallel.put_state(params(model)), rows)
    return parallel.to_host(grads), parallel.to_host(sums), grads


@functools.cache
def of_one_device(model: BertForPreTraining):
    return gradients(PmapParallelism(jax.devices()[:1]), model)


@pytest.mark.medium
@pytest.mark.parametrize(("layout", "micro_batches", "model"), LAYOUTS)
def test_a_mesh_gives_the_gradients_of_one_device(layout: str, micro_batches: int, model: BertForPreTraining) -> None:
    expected, expected_sums, _ = of_one_device(model)
    mesh = mesh_of(layout)
    grads, sums, placed = gradients(mesh, model, micro_batches)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-6)

    def in_its_place(path, leaf: jax.Array) -> None:
        spec = partition_spec(path_str(path), leaf.shape, mesh.mesh.shape)
        assert leaf.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh.mesh, spec), leaf.ndim), path_str(path)

    jax.tree_util.tree_map_with_path(in_its_place, placed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "stable_adamw"])
def test_training_on_a_mesh_follows_training_on_copies(name: str) -> None:
    """Steps with clipping, decay and evaluation; each device of the mesh holds its part of state and moments."""
    rows, optimizer = {}, make_optimizer(OptimizerConfig(name, learning_rate=1e-2, warmup_steps=0), 10)
    for kind, parallel in (("pmap", PmapParallelism(jax.devices()[:2])), ("mesh", mesh_of("2x2x2"))):
        state = parallel.put_state(TrainState.create(params(), optimizer, OBJECTIVE.metrics))
        step = parallel.compile(make_train_step(OBJECTIVE, optimizer, 3, axis=parallel.axis), donate=(0,))
        evaluate = parallel.compile(make_eval_step(OBJECTIVE, parallel.axis))
        losses = []
        for number in range(5):
            state, outcome = step(state, parallel.shard_batch(batch_of(number), 1))
            losses.append(float(parallel.to_host(outcome).loss))
        sums = parallel.to_host(evaluate(state.params, parallel.shard_batch(batch_of(9))))
        rows[kind] = (losses, sums["mlm_loss"], parallel.to_host(state))
        placed = state
    np.testing.assert_allclose(rows["mesh"][0], rows["pmap"][0], rtol=1e-5)
    np.testing.assert_allclose(rows["mesh"][1], rows["pmap"][1], rtol=1e-5)
    kernel = placed.params["bert"]["encoder"]["layer_0"]["intermediate"]["kernel"]
    moments = [leaf for leaf in jax.tree.leaves(placed.opt_state) if leaf.shape == kernel.shape]
    assert kernel.shape == (16, 32) and moments
    for array in (kernel, *moments):
        assert {shard.data.shape for shard in array.addressable_shards} == {(8, 16)}


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whole_runs_give_equal_results_if_a_mesh_is_the_default(
    devices: int,
    corpus: Path,
    sst2: Path,
    pretrained: Path,
    finetuned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replaces pmap where `make_local_parallelism` says."""
    monkeypatch.setattr(backends, "PmapParallelism", lambda devices: MeshParallel((len(devices), 1, 1), devices))
    monkeypatch.setenv("BERT_NUM_DEVICES", str(devices))
    runs = (tmp_path / "pretrained", pretrained), (tmp_path / "finetuned", finetuned)
    assert pretrain([f"--data.train={corpus}", f"--output_dir={runs[0][0]}", *SMALL_RUN]) == 0
    options = ["--config=sst2", "--data.max_length=32", "--data.buckets=32", "--training.batch_size=8"]
    assert finetune([f"--init={pretrained}", f"--data.dir={sst2}", f"--output_dir={runs[1][0]}", *options]) == 0
    for run, expected in runs:
        assert_same_but_for_rounding(run, expected)


@pytest.mark.medium
def test_what_comes_back_from_a_mesh_is_what_went_there() -> None:
    mesh = mesh_of("2x2x2")
    state = TrainState.create(params(), OPTIMIZER, OBJECTIVE.metrics)
    placed = mesh.put_state(state)
    jax.tree.map(np.testing.assert_array_equal, mesh.to_host(placed), jax.tree.map(np.asarray, state))
    batch = batch_of(0)
    for micro_batches, rows in ((None, batch["rows"]), (2, batch["rows"].reshape(2, -1))):
        np.testing.assert_array_equal(mesh.gather_rows(mesh.put_state(rows)), rows)
        np.testing.assert_array_equal(mesh.to_host(mesh.shard_batch(batch, micro_batches))["rows"], rows)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [PmapParallelism(jax.devices()[:2]), MeshParallel((2, 1, 1), jax.devices()[:2])])
def test_programs_are_freed_with_their_functions(parallel: Parallelism) -> None:
    """Many runs in one process, of a sweep or a notebook, would otherwise reach the system's limit of memory maps."""
    client = jax.devices()[0].client

    def run(number: int) -> int:
        double = parallel.compile(lambda state: state * 2 + number)
        np.testing.assert_array_equal(parallel.to_host(double(parallel.put_state(np.ones(3)))), [2.0 + number] * 3)
        del double
        gc.collect()
        return len(client.live_executables())

    before = run(0)
    assert run(1) == run(2) == before


def test_the_table_of_places() -> None:
    """Every matrix is sharded over both axes or, above the layers, over one; vectors of features with them."""
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    shapes = jax.eval_shape(lambda: MODEL.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"])
    specs = {
        path_str(path): partition_spec(f"opt_state/1/mu/{path_str(path)}", leaf.shape, sizes)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    layer = "bert/encoder/layer_0"
    expected = {
        f"{layer}/attention/query/kernel": P("fsdp", "tensor"),
        f"{layer}/attention/query/bias": P("tensor"),
        f"{layer}/attention/output/kernel": P("tensor", "fsdp"),
        f"{layer}/attention/output/bias": P(),
        f"{layer}/attention_norm/scale": P(),
        f"{layer}/intermediate/kernel": P("fsdp", "tensor"),
        f"{layer}/intermediate/bias": P("tensor"),
        f"{layer}/output/kernel": P("tensor", "fsdp"),
        "bert/embeddings/word/embedding": P("tensor", "fsdp"),
        "bert/embeddings/position/embedding": P(None, "fsdp"),
        "bert/pooler/kernel": P("fsdp", None),
        "predictions/transform/kernel": P("fsdp", None),
        "predictions/bias": P("tensor"),
        "seq_relationship/kernel": P("fsdp", None),
    }
    assert expected.items() <= specs.items()
    assert all("fsdp" in spec for path, spec in specs.items() if shapes_of(shapes)[path] == 2), specs
    # 30,522 = 2 x 3 x 5,087: what does not divide evenly stays whole along that axis.
    assert partition_spec("bert/embeddings/word/embedding", (30522, 768), {"data": 1, "fsdp": 2, "tensor": 4}) == P(
        None, "fsdp"
    )


def test_cross_attention_goes_where_attention_goes() -> None:
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert partition_spec("layer_0/attention/global_value/kernel", (16, 16), sizes) == P("fsdp", "tensor")
    assert partition_spec("layer_0/attention/global_key/bias", (16,), sizes) == P("tensor")
    for part, shape in (("query/kernel", (16, 16)), ("value/bias", (16,)), ("output/kernel", (16, 16))):
        own, cross = (
            partition_spec(f"decoder/layer_0/{attention}/{part}", shape, sizes)
            for attention in ("attention", "cross_attention")
        )
        assert own == cross != P()


def shapes_of(shapes) -> dict[str, int]:
    return {path_str(path): leaf.ndim for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}


def test_meshes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_NUM_DEVICES", "8")
    with pytest.raises(UserError, match=r"training.mesh \(2x2x1\) needs 4 devices.*product is 8"):
        make_parallelism(TrainingConfig(steps=1, mesh="2x2x1"))
    with pytest.raises(UserError, match=r"num_attention_heads \(2\).*4 devices"):
        make_parallelism(TrainingConfig(steps=1, mesh="1x2x4"), ModelConfig(64, 16, 1, 2, 32))
    with pytest.raises(UserError, match=r"hidden_size \(12\).*8 devices"):
        make_parallelism(TrainingConfig(steps=1, mesh="1x8x1"), ModelConfig(64, 12, 1, 2, 32))
    mesh = make_parallelism(TrainingConfig(steps=1, mesh="2x2x2"))
    mesh.check_batch("training.batch_size", 32, 2)  # tensor does not deal out rows
    with pytest.raises(UserError, match=r"batch_size \(20\).*4 shares.*: use 16 or 24"):
        mesh.check_batch("training.batch_size", 20, 2)
    for text in ("2x2", "2x2x0", "axbxc", "2x2x2x1", "-1x2x2"):
        with pytest.raises(UserError, match=r"training.mesh is .*such as 2x4x1"):
            TrainingConfig(steps=1, mesh=text).check()
    assert isinstance(make_parallelism(TrainingConfig(steps=1)), PmapParallelism)


class Chip:
    """A device of a host, as far as a mesh looks at it before anything runs."""

    platform, device_kind = "tpu", "chip"

    def __init__(self, number: int, host: int) -> None:
        self.id, self.process_index = number, host


@pytest.mark.parametrize(
    ("shape", "shares"),
    [
        ((4, 2, 1), [(0, 2), (1, 2)]),
        ((1, 4, 2), [(0, 2), (1, 2)]),
        ((2, 1, 4), [(0, 2), (1, 2)]),
        ((1, 1, 8), [(0, 1), (0, 1)]),  # all hosts hold all rows
    ],
)
def test_each_host_reads_its_own_rows(monkeypatch: pytest.MonkeyPatch, shape, shares) -> None:
    chips = np.array([Chip(number, number // 4) for number in range(8)]).reshape(shape)
    mesh = type("Grid", (), {"devices": chips, "shape": dict(zip(("data", "fsdp", "tensor"), shape, strict=True))})
    for host, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        assert _host_shard(mesh, "mesh") == share


def test_shares_that_would_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    chips = np.array([Chip(number, number % 2) for number in range(4)]).reshape(4, 1, 1)
    mesh = type("Grid", (), {"devices": chips, "shape": {"data": 4, "fsdp": 1, "tensor": 1}})
    with pytest.raises(UserError, match="splits the rows of a batch unevenly over hosts"):
        _host_shard(mesh, "4x1x1")
