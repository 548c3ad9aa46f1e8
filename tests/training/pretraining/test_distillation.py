"""Distillation: losses and gradients by hand, devices, resuming, and configuration errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import bert
from bert.commands.pretrain import main
from bert.config import DistillationConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.model.dropout import Dropout
from bert.model.encoder import Bert
from bert.model.names import ENCODER_DECODER
from bert.model.pretraining import BertForMaskedLM
from bert.parallel.backends import PmapParallelism
from bert.tokenizer.vocabulary import load_tokenizer
from bert.training.losses import softened_divergence
from bert.training.pretraining import distillation
from bert.training.pretraining.distillation import (
    Teacher,
    check_student,
    cosine_distance,
    load_teacher,
    mean_of_examples,
    run_with_states,
    squared_distance,
)
from bert.training.pretraining.objectives import build_with_teacher
from bert.training.step import compute_gradients
from tests.conftest import REPLACED, SMALL_RUN
from tests.helpers import lines_of, state_of
from tests.tiny_teacher import WIDE, config_of, teacher_of
from tests.tiny_training import CONFIG, assert_same_gradients, batch_of

NEW = ("teacher_token_loss", "teacher_hidden_loss", "teacher_sentence_loss")


def gradients(config: PretrainConfig, teacher: Teacher, params=None, devices=1, micro_batches=1, drop=False):
    """Parameters, gradients and sums of one batch."""
    parallel = PmapParallelism(jax.devices()[:devices])
    model, _, compile_loss = build_with_teacher(config, teacher, parallel)
    if params is None:
        params = jax.device_get(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])

    def dropout(rows: jax.Array) -> Dropout | None:
        return Dropout.for_step(3, 5, rows) if drop else None

    step = compile_loss(lambda loss: lambda params, batch: compute_gradients(params, batch, loss, dropout), ())
    grads, sums = step(parallel.put_state(params), parallel.shard_batch(batch_of(0), micro_batches))
    return params, parallel.to_host(grads), parallel.to_host(sums)


@pytest.mark.medium
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it() -> None:
    teacher = teacher_of(CONFIG)
    for loss in ("cosine", "mse"):
        _, _, sums = gradients(config_of(hidden_loss=loss), teacher, teacher.params)
        assert set(sums) == {"mlm_loss", "mlm_accuracy", *NEW}
        for name in NEW:
            assert abs(sums[name][0] / sums[name][1]) < 1e-6, name
        assert sums["mlm_loss"][0] > 1


@pytest.mark.medium
def test_distances_and_their_gradients_by_hand() -> None:
    random = np.random.default_rng(0)
    student, teacher = random.normal(size=(2, 3, 2, 7)).astype(np.float32)

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    s, t = softmax(student / 2.5), softmax(teacher / 2.5)
    divergence = 6.25 * (t * np.log(t / s)).sum(-1)
    np.testing.assert_allclose(softened_divergence(student, teacher, 2.5), divergence, rtol=1e-4)
    gradient = jax.grad(lambda x: softened_divergence(x, teacher, 2.5).sum())(student)
    np.testing.assert_allclose(gradient, 2.5 * (s - t), rtol=1e-4, atol=1e-6)
    a, b = np.linalg.norm(student, axis=-1, keepdims=True), np.linalg.norm(teacher, axis=-1, keepdims=True)
    cosine = (student * teacher).sum(-1, keepdims=True) / (a * b)
    np.testing.assert_allclose(cosine_distance(student, teacher), 1 - cosine[..., 0], rtol=1e-5)
    gradient = jax.grad(lambda x: cosine_distance(x, teacher).sum())(student)
    np.testing.assert_allclose(gradient, cosine * student / a**2 - teacher / (a * b), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(squared_distance(student, teacher), ((student - teacher) ** 2).mean(-1), rtol=1e-5)
    zeros = jnp.zeros_like(student)
    assert np.isfinite(jax.grad(lambda x: cosine_distance(x, teacher).sum())(zeros)).all()


def by_hand(params, teacher: Teacher, batch, asked: DistillationConfig):
    """The whole loss, written down again: two passes of the student, states from all of them."""
    inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])

    def states(model: dict, config: ModelConfig):
        encoder = Bert(config, add_pooling_layer=False)
        return encoder.apply({"params": model["bert"]}, *inputs, intermediates=True).hidden_states

    def log_probabilities(model: dict, config: ModelConfig, temperature: float):
        logits = BertForMaskedLM(config).apply({"params": model}, *inputs, batch["masked_lm_positions"])
        return jax.nn.log_softmax(logits / temperature)

    def cosine(a, b):
        return jnp.sum(a * b, -1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))

    weights, mask = batch["masked_lm_weights"], batch["attention_mask"]
    plain = log_probabilities(params, CONFIG, 1.0)
    mlm = -jnp.sum(jnp.take_along_axis(plain, batch["masked_lm_ids"][..., None], -1)[..., 0] * weights) / weights.sum()
    student_log_probs = log_probabilities(params, CONFIG, asked.temperature)
    teacher_log_probs = log_probabilities(teacher.params, teacher.config, asked.temperature)
    tokens = (
        jnp.sum(jnp.sum(jnp.exp(teacher_log_probs) * (teacher_log_probs - student_log_probs), -1) * weights)
        / weights.sum()
        * asked.temperature**2
    )
    student, target = states(params, CONFIG), states(teacher.params, teacher.config)
    kernels = params["distillation"]
    pairs = [
        (student[0] @ kernels["layer_0"]["kernel"], target[1]),
        (student[1] @ kernels["layer_1"]["kernel"], target[3]),
    ]
    hidden = sum(jnp.sum(jnp.mean((a - b) ** 2, -1) * mask) / mask.sum() for a, b in pairs) / 2
    some = mask.sum(1) > 0
    means = [(x * mask[..., None]).sum(1)[some] / mask.sum(1)[some][:, None] for x in pairs[-1]]
    sentence = jnp.mean(1 - cosine(*means))
    terms = (mlm, tokens, hidden, sentence)
    factors = (1.0, asked.token_weight, asked.hidden_weight, asked.sentence_weight)
    return sum(factor * term for factor, term in zip(factors, terms, strict=True)), terms


@pytest.mark.medium
def test_losses_and_gradients_are_those_written_down_by_hand() -> None:
    config = config_of(
        temperature=3.0, token_weight=0.5, hidden_weight=2.0, hidden_loss="mse", sentence_weight=0.25,
        student_layers=[0, 1], teacher_layers=[1, 3],
    )  # fmt: skip
    teacher = teacher_of(WIDE)
    params, grads, sums = gradients(config, teacher)
    assert {name: kernel["kernel"].shape for name, kernel in params["distillation"].items()} == {
        "layer_0": (16, 24), "layer_1": (16, 24),
    }  # fmt: skip
    batch = batch_of(0)
    loss = lambda params: by_hand(params, teacher, batch, config.distillation)  # noqa: E731
    (_, terms), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    for name, term in zip(("mlm_loss", *NEW), terms, strict=True):
        np.testing.assert_allclose(sums[name][0] / sums[name][1], term, rtol=1e-5, err_msg=name)

    def close(path, actual, reference) -> None:
        norm = max(np.linalg.norm(reference), 1.0 if "key" in jax.tree_util.keystr(path) else 0.0)
        assert np.linalg.norm(actual - reference) <= 1e-5 * norm, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(close, grads, expected)


@pytest.mark.medium
@pytest.mark.parametrize(("devices", "micro_batches"), [(8, 1), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int) -> None:
    config, teacher = config_of(), teacher_of(WIDE)
    params, expected, expected_sums = gradients(config, teacher, drop=True)
    _, grads, sums = gradients(config, teacher, params, devices, micro_batches, drop=True)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)


@pytest.mark.medium
def test_a_teacher_changes_neither_the_students_start_nor_its_own_loss() -> None:
    zeros = jnp.zeros((1, 8), jnp.int32)
    parallel = PmapParallelism(jax.devices()[:1])
    plain = build_with_teacher(config_of(), None, parallel)[0].init(jax.random.key(0), zeros)["params"]
    params, _, sums = gradients(config_of(), teacher_of(WIDE, head=False))
    assert set(sums) == {"mlm_loss", "mlm_accuracy", "teacher_hidden_loss", "teacher_sentence_loss"}
    assert set(params) == {*plain, "distillation"}
    jax.tree.map(np.testing.assert_array_equal, {name: params[name] for name in plain}, jax.device_get(plain))
    other = gradients(config_of(hidden_weight=0.0, sentence_weight=7.0), teacher_of(WIDE, head=False), params)[2]
    assert set(other) == {"mlm_loss", "mlm_accuracy", "teacher_sentence_loss"}
    np.testing.assert_array_equal(other["mlm_loss"], sums["mlm_loss"])
    np.testing.assert_array_equal(other["teacher_sentence_loss"], sums["teacher_sentence_loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "training",
    [{"remat": "full"}, {"scan_layers": True}, {"pad_vocab_to_multiple_of": 64}],
    ids=str,
)
def test_how_layers_are_run_does_not_matter(training: dict) -> None:
    params, expected, _ = gradients(config_of(), teacher_of(WIDE))
    _, grads, _ = gradients(config_of(TrainingConfig(**training)), teacher_of(WIDE), params)
    assert_same_gradients(grads, expected)


@pytest.mark.medium
def test_means_of_packed_examples() -> None:
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    hidden = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    packed = {"example_ids": ids, "attention_mask": (ids > 0).astype(int), "cls_positions": np.zeros((2, 3), int)}
    means = mean_of_examples(hidden, packed)
    assert means.shape == (2, 3, 4)
    np.testing.assert_allclose(means[0, :2], [hidden[0, :2].mean(0), hidden[0, 2:5].mean(0)], rtol=1e-5)
    assert not means[0, 2].any()
    alone = mean_of_examples(hidden, {"attention_mask": packed["attention_mask"]})
    np.testing.assert_allclose(alone[:, 0], [hidden[0, :5].mean(0), hidden[1].mean(0)], rtol=1e-5)


@pytest.mark.medium
def test_the_states_of_a_pass_are_those_of_all_layers() -> None:
    for config in (WIDE, dataclasses.replace(WIDE, pre_layer_norm=True)):
        params = jax.jit(BertForMaskedLM(config).init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))["params"]
        batch = batch_of(0)
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])

        @jax.jit
        def both(params, config=config, batch=batch, inputs=inputs):
            _, states = run_with_states(BertForMaskedLM(config), params, batch, range(4), config, None)
            encoder = Bert(config, add_pooling_layer=False)
            return states, encoder.apply({"params": params["bert"]}, *inputs, intermediates=True).hidden_states

        states, expected = both(params)
        for layer, state in enumerate(expected):
            np.testing.assert_allclose(states[layer], state, rtol=1e-5, atol=1e-6)


def train(corpus: Path, run: Path, teacher: Path | str, *more: str) -> int:
    return main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, f"--teacher={teacher}", *more])


NARROW = ("--model.hidden_size=8", "--data.input_format=full_sentences")


@pytest.fixture(scope="module")
def distilled(corpus: Path, pretrained: Path, made_once) -> Path:
    """A run of six steps with the run `pretrained` as its teacher, whose states are wider."""
    return made_once("distilled", lambda folder: train(corpus, folder, pretrained, *NARROW))


@pytest.mark.medium
def test_a_run_tells_its_teacher_and_keeps_none_of_its_weights(
    distilled: Path, pretrained: Path, tmp_path: Path
) -> None:
    assert (distilled / "vocab.txt").read_bytes() == (pretrained / "vocab.txt").read_bytes()
    config = yaml.safe_load((distilled / "config.yaml").read_text())
    results = json.loads((distilled / "results.json").read_text())
    checksum = config["distillation"]["checksum"]
    assert len(checksum) == 64
    assert results["teacher"] == {"source": str(pretrained), "checksum": checksum}
    assert results["eval"]["perplexity"] == pytest.approx(np.exp(results["eval"]["mlm_loss"]))
    assert set(results["eval"]) >= set(NEW)
    params = state_of(distilled)["params"]
    assert set(params) == {"bert", "predictions", "distillation"}
    assert params["distillation"]["layer_1"]["kernel"].shape == (8, 16)
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(params["bert"])} <= {8, 32}
    model = bert.load(distilled)
    assert set(model.params) == {"bert", "predictions"}
    model.save(tmp_path / "hf")
    again = bert.load(tmp_path / "hf")
    np.testing.assert_allclose(again.embed(["ba ri"]), model.embed(["ba ri"]), rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_a_distilled_run_resumes_bit_for_bit(distilled: Path, corpus: Path, pretrained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(distilled, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    assert train(corpus, run, pretrained, *NARROW) == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(distilled))
    assert lines_of(run) == lines_of(distilled)


@pytest.mark.slow
def test_config_yaml_repeats_a_distilled_run(distilled: Path, tmp_path: Path) -> None:
    assert main([f"--config={distilled / 'config.yaml'}", f"--output_dir={tmp_path / 'run'}"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state_of(tmp_path / "run"), state_of(distilled))


@pytest.mark.medium
def test_another_teacher_is_refused(distilled: Path, corpus: Path, pretrained: Path, tmp_path: Path, fails) -> None:
    run, teacher = Path(shutil.copytree(distilled, tmp_path / "run")), tmp_path / "teacher"
    arguments = [f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *NARROW]
    assert "its distillation.teacher is" in fails(main, *arguments)
    shutil.copytree(pretrained, teacher)
    config = (run / "config.yaml").read_text().replace(str(pretrained), str(teacher))
    (run / "config.yaml").write_text(config)
    assert main([*arguments, f"--teacher={teacher}"]) == 0
    shutil.rmtree(teacher / "checkpoints" / "6")
    assert "is not the model" in fails(main, *arguments, f"--teacher={teacher}")


@pytest.mark.slow
def test_a_published_teacher_without_a_head(corpus: Path, pretrained: Path, tmp_path: Path, capsys) -> None:
    model = bert.load(pretrained)
    encoder = dataclasses.replace(model, params={"bert": model.params["bert"]}, architecture="Bert")
    encoder.save(tmp_path / "hf")
    assert train(corpus, tmp_path / "run", tmp_path / "hf", "--training.steps=2") == 0
    assert "1 layers of 16, without an MLM head" in capsys.readouterr().out
    params = state_of(tmp_path / "run")["params"]
    assert set(params) == {"bert", "predictions", "seq_relationship"}
    names = set(lines_of(tmp_path / "run")[-1])
    assert {"nsp_loss", "teacher_hidden_loss", "teacher_sentence_loss"} <= names
    assert "teacher_token_loss" not in names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tokenizer.path=vocabulary"], "vocabulary has another vocabulary than the teacher"),
        (["--data.sequence_length=40", "--model.max_position_embeddings=40"], "reads at most 32 tokens"),
        (["--distillation.student_layers=1"], "distillation.teacher_layers is null"),
        (["--distillation.student_layers=[1,1]", "--distillation.teacher_layers=[0,1]"], "list each layer once"),
        (["--distillation.student_layers=[]", "--distillation.teacher_layers=[]"], "list each layer once"),
        (["--distillation.student_layers=2", "--distillation.teacher_layers=1"], "student_layers has layer 2"),
        (["--distillation.student_layers=1", "--distillation.teacher_layers=2"], "teacher_layers has layer 2"),
        (["--distillation.student_layers=0", "--distillation.teacher_layers=0"], "the pair of last layers 1 and 1"),
        (["--distillation.temperature=0"], "distillation.temperature is 0.0: it must be above 0"),
        (["--distillation.hidden_loss=l1"], "use one of cosine, mse"),
        ([f"--distillation.{name}_weight=0" for name in ("token", "hidden", "sentence")], "are 0: set one of them"),
        (["--teacher=missing"], "missing does not exist"),
        (REPLACED, "training.objective is rtd: set the objective to mlm, or remove the teacher"),
        (["--teacher=null", "--init=none"], "init is none: remove it, pretraining starts from random weights"),
        (["--teacher=null", "--distillation.temperature=3"], "temperature is 3.0, but there is no teacher: remove it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(corpus, pretrained, tmp_path, fails, monkeypatch, options, expected) -> None:
    monkeypatch.chdir(tmp_path)
    Path("vocabulary").mkdir()
    pieces = (pretrained / "vocab.txt").read_text().splitlines()
    Path("vocabulary/vocab.txt").write_text("\n".join([*pieces[:-1], "another"]) + "\n")
    arguments = [f"--data.train={corpus}", "--output_dir=run", *SMALL_RUN, f"--teacher={pretrained}"]
    assert expected in fails(main, *arguments, *options)


@pytest.mark.medium
def test_a_head_is_needed_for_token_distributions_alone() -> None:
    config = config_of(hidden_weight=0.0, sentence_weight=0.0)
    with pytest.raises(bert.UserError, match="has no MLM head"):
        check_student(config, teacher_of(WIDE, head=False))
    check_student(config, teacher_of(WIDE))
    scanned = config_of(TrainingConfig(scan_layers=True), sentence_weight=0.0, student_layers=[1], teacher_layers=[2])
    with pytest.raises(bert.UserError, match="scan_layers gives the last"):
        check_student(scanned, teacher_of(WIDE))


@pytest.mark.medium
def test_a_teacher_is_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bert.UserError, match="teacher reads text from"):
        check_student(config_of(), teacher_of(dataclasses.replace(WIDE, causal=True)))
    monkeypatch.setattr(distillation, "load_for_training", lambda *_: SimpleNamespace(architecture=ENCODER_DECODER))
    with pytest.raises(bert.UserError, match="the teacher translator is an encoder-decoder"):
        load_teacher(DistillationConfig(teacher="translator"), print)


@pytest.mark.medium
def test_the_checksum_is_of_the_weights(pretrained: Path, tmp_path: Path) -> None:
    said: list[str] = []
    teacher = load_teacher(DistillationConfig(teacher=str(pretrained)), said.append)
    assert teacher is not None
    assert said[-1].startswith(
        f"teacher {pretrained}: 1 layers of 16, with an MLM head, checksum {teacher.checksum[:16]}"
    )
    bert.load(pretrained).save(tmp_path / "hf")
    again = load_teacher(DistillationConfig(teacher=str(tmp_path / "hf"), checksum=teacher.checksum), said.append)
    assert again is not None
    again.check_vocabulary(load_tokenizer(pretrained), "run")
    assert load_teacher(DistillationConfig(), said.append) is None
