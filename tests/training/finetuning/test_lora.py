"""Low-rank adapters: what is trained, saved and merged."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import bert
from bert.analysis.inspection import summarize
from bert.commands.export import main as export
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.config import LoraConfig, ModelConfig
from bert.errors import UserError
from bert.model.decoders import BertForSequenceToSequence
from bert.model.heads import HEADS
from bert.model.layers import LayerExecution
from bert.model.linear import LORA_A, LORA_B, FrozenWeights
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.runs.folder import FROZEN_WEIGHTS
from bert.training.finetuning.initialization import EncoderDecoderInit, is_frozen, trained_params
from bert.training.initialization import Initializable
from bert.training.step import TrainState, compile_bucketed_train_step
from tests.helpers import OPTIONS, run, state_of
from tests.messages import has_all
from tests.tiny_training import CONFIG, OBJECTIVE, OPTIMIZER, assert_same_gradients, batch_of, initial_params

LORA = ("--lora.rank=2", "--lora.alpha=4", "--optimizer.learning_rate=1e-2", "--training.epochs=2")


@pytest.fixture(scope="module")
def adapted(pretrained: Path, sst2: Path, made_once) -> Path:
    """The folder of a finished run with adapters of query and value."""

    def train(folder: Path) -> None:
        assert run(folder, sst2, f"--init={pretrained}", *LORA) == 0

    return made_once("adapted", train)


def split(params: dict, **lora: object) -> tuple[dict, dict]:
    """Frozen weights and all that is trained."""
    flat = flatten_dict(params)
    frozen = unflatten_dict({path: leaf for path, leaf in flat.items() if is_frozen(path)})
    return frozen, jax.tree.map(np.asarray, trained_params(params, LoraConfig(**lora), 3))


def test_new_adapters_change_no_bit(pretrained: Path) -> None:
    params = bert.load(pretrained).params
    frozen, trained = split(params, rank=4, projections=["query", "key", "value", "output"])
    weights = FrozenWeights(frozen, 2.0)
    for merged in (weights.merge(trained), jax.jit(weights.merge_traced)(frozen, trained)):
        jax.tree.map(np.testing.assert_array_equal, merged, params)
    adapters = {path for path in flatten_dict(trained) if path[-1] in (LORA_A, LORA_B)}
    assert len(adapters) == 2 * 4
    assert {path[-2] for path in adapters} == {"query", "key", "value", "output"}


def test_the_paper_s_sum_of_weights_and_product(pretrained: Path) -> None:
    frozen, trained = split(bert.load(pretrained).params, rank=4)
    trained = jax.tree.map(lambda leaf: leaf + 0.5, trained)
    weights = FrozenWeights(frozen, 2.0)
    on_host, traced = weights.merge(trained), jax.jit(weights.merge_traced)(frozen, trained)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), on_host, traced)
    query, key = (("bert", "encoder", "layer_0", "attention", name) for name in ("query", "key"))
    before, after, adapters = flatten_dict(frozen), flatten_dict(on_host), flatten_dict(trained)
    product = adapters[(*query, LORA_A)] @ adapters[(*query, LORA_B)]
    np.testing.assert_allclose(after[(*query, "kernel")] - before[(*query, "kernel")], 2 * product, atol=1e-5)
    np.testing.assert_array_equal(after[(*key, "kernel")], before[(*key, "kernel")])


def test_adapters_depend_on_seed_and_place(pretrained: Path) -> None:
    params = bert.load(pretrained).params
    first, other = (trained_params(params, LoraConfig(rank=2), seed) for seed in (0, 1))
    more = trained_params(params, LoraConfig(rank=2, projections=["key", "query"]), 0)
    a, b, c = (tree["bert"]["encoder"]["layer_0"]["attention"] for tree in (first, other, more))
    assert not np.array_equal(a["query"][LORA_A], b["query"][LORA_A])
    assert not np.array_equal(a["query"][LORA_A], a["value"][LORA_A])
    np.testing.assert_array_equal(a["query"][LORA_A], c["query"][LORA_A])


@pytest.mark.medium
def test_only_adapters_pooler_and_head_are_trained_and_saved(adapted: Path, pretrained: Path) -> None:
    state = state_of(adapted)
    trained = set(flatten_dict(state["params"], sep="/"))
    layer = "bert/encoder/layer_0/attention"
    adapters = {f"{layer}/{name}/{part}" for name in ("query", "value") for part in (LORA_A, LORA_B)}
    heads = {f"{head}/{part}" for head in ("bert/pooler", "classifier") for part in ("kernel", "bias")}
    assert trained == adapters | heads
    for moment in ("mu", "nu"):
        names = {path for path in flatten_dict(state["opt_state"], sep="/") if f"/{moment}/" in path}
        assert {name.split(f"/{moment}/")[1] for name in names} == trained
    before, after = (flatten_dict(bert.load(place).params["bert"], sep="/") for place in (pretrained, adapted))
    changed = {path for path in after if not np.array_equal(before[path], after[path])}
    assert changed == {
        *(f"encoder/layer_0/attention/{name}/kernel" for name in ("query", "value")),
        "pooler/kernel",
        "pooler/bias",
    }


@pytest.mark.medium
def test_sizes_are_printed_and_kept(adapted: Path) -> None:
    results, model = json.loads((adapted / "results.json").read_text()), bert.load(adapted)
    assert results["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    width = model.config.hidden_size
    # Two matrices of two projections, the pooler, and a classifier of two labels.
    assert results["trained_parameters"] == 2 * 2 * 2 * width + width * (width + 1) + 2 * (width + 1)
    facts = summarize(adapted)
    assert facts["initial_weights"].endswith("with adapters of rank 2 on query, value (LoRA)")
    forward, training = (facts["flops_per_token"][name] for name in ("forward", "training"))
    assert 2 * forward < training < 2.1 * forward


@pytest.mark.medium
def test_a_split_and_an_export_answer_as_the_run(adapted: Path, tmp_path: Path) -> None:
    assert predict([str(adapted), "dev", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/dev.tsv").read_bytes() == (adapted / "predictions/dev.tsv").read_bytes()
    model = bert.load(adapted)
    model.save(tmp_path / "hf")
    texts = ["ba ri", "ko ri tu tu"]
    for actual, expected in zip(model.predict(texts), bert.load(tmp_path / "hf").predict(texts), strict=True):
        assert actual == expected


@pytest.mark.medium
def test_an_adapter_in_peft_s_format_answers_as_the_run(
    adapted: Path, pretrained: Path, tmp_path: Path, capsys
) -> None:
    """Exported next to its base model, loaded from its folder, with a path, and with a model in memory."""
    with pytest.raises(UserError) as caught:
        export([str(adapted), str(tmp_path / "adapter"), "--format", "peft"])
    assert has_all(str(caught.value), str(pretrained), "bert export", "base")
    base = bert.load(pretrained)
    base.save(tmp_path / "base")
    options = ["--format", "peft", "--base", str(tmp_path / "base")]
    assert export([str(adapted), str(tmp_path / "adapter"), *options]) == 0
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["task_type"]) == (2, 4.0, "SEQ_CLS")
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    texts, run_model = ["ba ri", "ko ri tu tu"], bert.load(adapted)
    expected = run_model.predict(texts)
    in_memory = bert.load(tmp_path / "base")
    loaded = [bert.load(tmp_path / "adapter"), bert.load(tmp_path / "base", adapter=tmp_path / "adapter")]
    half = bert.load(tmp_path / "base", dtype="bfloat16")
    loaded += [bert.load(base, adapter=tmp_path / "adapter") for base in (half, in_memory)]
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded[-2]._device_params)} == {np.dtype("float32")}
    for model in loaded:
        assert model.labels == run_model.labels
        for answer, right in zip(model.predict(texts), expected, strict=True):
            assert answer.label == right.label
            np.testing.assert_allclose(
                list(answer.probabilities.values()), list(right.probabilities.values()), atol=1e-5
            )
    task = dataclasses.replace(run_model.require_task(), calibration=0.1)  # type: ignore[type-var]
    sharper = dataclasses.replace(run_model, task=task)
    sharper.save(tmp_path / "sharper", format="peft", base=str(tmp_path / "base"))
    answers = zip(bert.load(tmp_path / "sharper").predict(texts), sharper.predict(texts), strict=True)
    for (_, shares), (_, right_shares) in answers:
        np.testing.assert_allclose(list(shares.values()), list(right_shares.values()), atol=1e-4)
    own, others = flatten_dict(loaded[-1].params), flatten_dict(in_memory.params)
    changed = {path for path, array in own.items() if array is not others.get(path)}
    assert {path[-2] for path in changed if path[0] == "bert"} == {"query", "value", "pooler"}
    capsys.readouterr()
    (tmp_path / "texts.txt").write_text("ba ri\n")
    options = ["--adapter", str(tmp_path / "adapter")]
    assert predict([str(tmp_path / "base"), str(tmp_path / "texts.txt"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["label"] == expected[0].label


@pytest.mark.medium
def test_what_is_no_adapter_and_no_base_is_named(adapted: Path, pretrained: Path, tmp_path: Path) -> None:
    bert.load(pretrained).save(tmp_path / "base")
    for source, adapter, words in (
        (pretrained, tmp_path / "base", (str(pretrained), "bert export")),
        (tmp_path / "base", tmp_path / "base", (str(tmp_path / "base"), "adapter_config.json")),
        (tmp_path / "base", tmp_path / "none", (str(tmp_path / "none"), "adapter_config.json")),
    ):
        with pytest.raises(UserError) as caught:
            bert.load(source, adapter=adapter)
        assert has_all(str(caught.value), *words)
    with pytest.raises(UserError, match=r"lora\.rank"):
        bert.load(pretrained).save(tmp_path / "adapter", format="peft")
    with pytest.raises(UserError, match="base is for peft"):
        bert.load(adapted).save(tmp_path / "adapter", base="x")
    with pytest.raises(UserError, match="adapter"):
        bert.load(bert.load(pretrained))


@pytest.mark.medium
def test_a_run_resumes_and_moves_but_not_without_its_weights(adapted: Path, sst2, pretrained, tmp_path, capsys, fails):
    moved = tmp_path / "moved"
    shutil.copytree(adapted, moved)
    assert run(moved, sst2, f"--init={pretrained}", *LORA) == 0
    assert "resumes at step 10" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, bert.load(moved).params, bert.load(adapted).params)
    modes = {(adapted / name).stat().st_mode for name in (FROZEN_WEIGHTS, "config.yaml")}
    assert len(modes) == 1, "who may read a run may read all of it"
    again = [f"--config={moved / 'config.yaml'}", f"--output_dir={tmp_path / 'again'}"]
    config = (moved / "config.yaml").read_text()
    checksum = next(line for line in config.splitlines() if "checksum" in line).split()[-1]
    (moved / "config.yaml").write_text(config.replace(checksum, "0" * 64))
    message = "does not hold the weights that the run's adapters belong to"
    assert message in fails(predict, str(moved), "dev")
    assert message in fails(main, f"--config={moved / 'config.yaml'}")
    assert has_all(fails(main, *again), "is not the model", "with (lora.checksum)")
    (moved / FROZEN_WEIGHTS).write_bytes(b"x" * 99)
    assert f"{moved / FROZEN_WEIGHTS} cannot be read" in fails(predict, str(moved), "dev")
    (moved / FROZEN_WEIGHTS).unlink()
    assert "frozen.safetensors is missing" in fails(predict, str(moved), "dev")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init=none"], "lora.rank is 2, but init is none"),
        (["--decoder_init=none"], "lora.rank is 2, but decoder_init is none"),
        (["--num_frozen_layers=1"], "lora.rank is 2, but num_frozen_layers is 1"),
        (["--num_feature_layers=1"], "lora.rank is 2, but num_feature_layers is 1"),
        (["--lora.rank=0"], "lora.rank is 0: it must be at least 1"),
        (["--lora.rank=17"], "lora.rank is 17, but model.hidden_size is 16"),
        (["--lora.alpha=0"], "lora.alpha is 0.0: it must be above 0"),
        (["--lora.rank=null", "--lora.alpha=4"], "lora.alpha is 4.0, but lora.rank is null"),
        (["--lora.projections", "query", "query"], "lora.projections is ['query', 'query']"),
        (["--lora.projections=q"], "lora.projections has 'q': use some of query, key, value, output"),
    ],
)
def test_what_cannot_be_adapted_is_refused(arguments, message, pretrained, sst2, tmp_path, fails) -> None:
    options = ["--config=sst2", f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}", "--lora.rank=2"]
    assert message in fails(main, *options, f"--init={pretrained}", "--data.max_length=32", *arguments)


def sequence_model(share: str) -> BertForSequenceToSequence:
    config: ModelConfig = dataclasses.replace(CONFIG, share_decoder=share)
    return BertForSequenceToSequence(config, jnp.dtype("float32"), LayerExecution())


@pytest.mark.medium
def test_every_head_and_every_decoder_has_its_adapters() -> None:
    def shapes_of(model: Initializable) -> dict:
        ids = jnp.zeros((1, 2, 8) if isinstance(model, HEADS["multiple_choice"]) else (1, 8), jnp.int32)
        return jax.eval_shape(model.init, jax.random.key(0), ids)["params"]

    models = [
        HEADS[name](CONFIG, 1 if name in ("multiple_choice", "reranker") else 2, None, jnp.float32) for name in HEADS
    ]
    models += [
        HEADS["sequence_classification"](dataclasses.replace(CONFIG, **options), 2) for options in OPTIONS.values()
    ]
    sides = [EncoderDecoderInit(sequence_model(share)) for share in ("none", "embeddings", "all")]
    for model in (*models, *sides):
        shapes = shapes_of(model)
        frozen = unflatten_dict({path: leaf for path, leaf in flatten_dict(shapes).items() if is_frozen(path)})
        trained = jax.eval_shape(lambda params: trained_params(params, LoraConfig(rank=2), 0), shapes)
        merged = jax.eval_shape(FrozenWeights(frozen, 1.0).merge_traced, frozen, trained)
        assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, shapes)
        names = set(flatten_dict(trained))
        stacks = [stack for stack in ("bert", "decoder") if "encoder" in shapes.get(stack, {})]
        assert sum(path[-1] == LORA_A for path in names) == 2 * len(stacks)
        assert {path[0] for path in names} == set(shapes)
        others = [path for path in names if path[0] in stacks and path[-1] not in (LORA_A, LORA_B)]
        assert all(path[1] == "pooler" or "cross_attention" in path or "cross_norm" in path for path in others)


@functools.cache
def first_moments(devices: int, mesh: tuple[int, int, int] | None) -> dict:
    """A tenth of the gradients of a batch, and the loss."""
    parallel = PmapParallelism(jax.devices()[:devices]) if mesh is None else MeshParallel(mesh, jax.devices())
    frozen, trained = split(initial_params(), rank=2)
    trained = jax.tree.map(lambda leaf: leaf + np.float32(0.1), trained)
    step = compile_bucketed_train_step(OBJECTIVE, OPTIMIZER, 3, "hash", parallel, FrozenWeights(frozen, 2.0))
    state = parallel.put_state(TrainState.create(trained, OPTIMIZER, OBJECTIVE.metrics))
    after, metrics = step(state, parallel.shard_batch(batch_of(0), 1))
    assert jax.tree.structure(after.params) == jax.tree.structure(trained)
    [moments] = [part.mu for part in parallel.to_host(after.opt_state) if hasattr(part, "mu")]
    return {"moments": moments, "loss": parallel.to_host(metrics.loss)}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "mesh"), [(8, None), (8, (2, 2, 2))])
def test_devices_do_not_matter(devices: int, mesh: tuple[int, int, int] | None) -> None:
    expected, actual = first_moments(1, None), first_moments(devices, mesh)
    assert_same_gradients(actual["moments"], expected["moments"])
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.scan_layers=true", "--training.remat=full", "--training.dtype=bfloat16"],
        ["--training.gradient_accumulation_steps=2", "--training.average_checkpoints=2"],
        ["--optimizer.name=lamb", "--optimizer.layerwise_lr_decay=0.9", "--num_seeds=2"],
    ],
)
def test_adapters_go_with_other_settings(arguments, adapted, sst2, tmp_path, capsys) -> None:
    """Includes starting from a run with adapters, which are merged before new ones are trained."""
    folder = tmp_path / "run"
    assert run(folder, sst2, f"--init={adapted}", *LORA, *arguments) == 0
    if "--num_seeds=2" in arguments:
        folder /= "seed-1"
    assert predict([str(folder), "dev", "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/dev.tsv").read_bytes() == (folder / "predictions/dev.tsv").read_bytes()
    before, after = (flatten_dict(bert.load(place).params["bert"]["encoder"]) for place in (adapted, folder))
    changed = {path[-2:] for path in after if not np.array_equal(before[path], after[path])}
    assert changed == {("query", "kernel"), ("value", "kernel")}


@pytest.mark.slow
def test_a_left_to_right_model_has_adapters_too(continued, sst2, tmp_path) -> None:
    assert run(tmp_path / "run", sst2, f"--init={continued}", *LORA, "--language_model_weight=0.5") == 0
    before, after = (flatten_dict(bert.load(place).params["bert"]) for place in (continued, tmp_path / "run"))
    changed = {path[-2:] for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {("query", "kernel"), ("value", "kernel")}
