"""Left-to-right models fine-tuned as GPT was: they classify by the last token, next to the loss of the next tokens."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import traverse_util
from tokenizers import pre_tokenizers

import bert
from bert.commands.finetune import main as finetune
from bert.config import ModelConfig
from bert.interchange.shapes import expected_shapes
from bert.interchange.writers import hf
from bert.model import names
from bert.model.decoders import ClassifierWithLanguageModel
from bert.model.dropout import Dropout
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.tokenizer.byte_level import build_byte_level
from bert.training.finetuning.kinds import make_apply
from bert.training.losses import LOSSES
from bert.training.step import compute_gradients
from bert.training.token_losses import make_classifier_loss
from tests.helpers import lines_of, questions, run
from tests.tiny_training import CONFIG, T, V, assert_same_gradients, batch_of

GPT2 = ModelConfig(
    257, 16, 1, 2, 32, max_position_embeddings=40, hidden_act="gelu_tanh", layer_norm_eps=1e-5, causal=True,
    pre_layer_norm=True, embedding_norm=False, prediction_transform=False, prediction_bias=False, type_vocab_size=0,
    residual_init="scaled", initializer_range=0.1,
)  # fmt: skip


@pytest.mark.medium
def test_a_classifier_learns_next_to_a_language_model(continued: Path, sst2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    steps = ["--training.epochs=2", "--training.log_every=1", "--language_model_weight=0.5"]
    assert run(folder, sst2, f"--init={continued}", *steps) == 0
    train = [line for line in lines_of(folder) if line["split"] == "train"]
    assert all(1 < line["lm_loss"] < 8 for line in train)
    for line in train:
        assert line["loss"] == pytest.approx(line["classification_loss"] + 0.5 * line["lm_loss"], rel=1e-4)
    scores = [line for line in lines_of(folder) if line["split"] == "eval"]
    assert scores and not any("lm_loss" in line for line in scores)
    model = bert.load(folder)
    assert "pooler" not in model.params["bert"] and set(model.params["classifier"]) == {"kernel"}
    dev = (folder / "predictions" / "dev.tsv").read_text().splitlines()[1:]
    texts = [line.split("\t")[0] for line in (sst2 / "dev.tsv").read_text().splitlines()[1:]]
    numbers = {"negative": "0", "positive": "1"}
    assert [numbers[answer.label] for answer in model.predict(texts)] == [line.split("\t")[1] for line in dev]
    said: list[str] = []
    model.save(tmp_path / "graph", format="stablehlo", log=said.append, dynamic_length=True)
    assert said[0].startswith("verified")


@functools.cache
def gradients(devices: int, micro_batches: int, mesh: tuple[int, int, int] | None = None):
    """Gradients with dropout, for rows of uneven lengths of which some are empty."""
    model = ClassifierWithLanguageModel(dataclasses.replace(CONFIG, causal=True), 3)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, T), np.int32))["params"]
    objective = make_classifier_loss(LOSSES["sequence_classification"], make_apply(model, None), 0.5, V)
    parallel = PmapParallelism(jax.devices()[:devices]) if mesh is None else MeshParallel(mesh, jax.devices()[:devices])
    compiled = parallel.compile(
        lambda params, batch: compute_gradients(
            params, batch, objective, lambda rows: Dropout.for_step(3, 5, rows), parallel.axis
        )
    )
    names = ("input_ids", "token_type_ids", "attention_mask", "rows")
    batch = {name: array for name, array in batch_of(0).items() if name in names}
    batch |= {"labels": batch["rows"] % 3, "weights": batch["attention_mask"].any(axis=1).astype(np.float32)}
    placed = parallel.shard_batch(batch, micro_batches)
    return parallel.to_host(compiled(parallel.put_state(params), placed))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_batches", "mesh"), [(8, 1, None), (1, 4, None), (4, 1, (1, 2, 2))])
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int, mesh) -> None:
    expected, expected_sums = gradients(1, 1)
    grads, sums = gradients(devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)


def write_gpt2(folder: Path) -> None:
    """A folder as GPT-2's: bytes and one special token, which ends a text."""
    vocab = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    random = np.random.default_rng(0)
    flat = {
        path: random.normal(0, 0.1, shape).astype(np.float32)
        for path, shape in expected_shapes(GPT2, "BertForCausalLM", 0).items()
        if names.part_of(path) == names.ENCODER
    }
    bert.Pretrained(
        config=GPT2,
        params=traverse_util.unflatten_dict(flat, sep="/"),
        tokenizer=build_byte_level({**vocab, "<|endoftext|>": 256}, []),
        architecture="BertForCausalLM",
        source="made",
    ).save(folder)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_gpt2_reads_pairs_with_its_end_token_between(
    weight: float, mrpc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)
    write_gpt2(tmp_path / "gpt2")
    assert bert.load(tmp_path / "gpt2").tokenizer.encode("a", "b").ids == [97 - 33, 98 - 33], "as in GPT-2's own rows"
    arguments = ["--config=mrpc", f"--init={tmp_path / 'gpt2'}", f"--data.dir={mrpc}", "--training.epochs=1"]
    arguments += ["--data.max_length=40", "--data.buckets=40", "--training.batch_size=8"]
    folder = tmp_path / "run"
    assert finetune([*arguments, f"--output_dir={folder}", f"--language_model_weight={weight}"]) == 0
    model = bert.load(folder)
    assert model.tokenizer.encode("a", "b").ids == [97 - 33, 256, 98 - 33]
    assert set(model.params) == {"bert", "classifier"}
    model.save(tmp_path / "out")
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["architectures"], content["pad_token_id"]) == (["GPT2ForSequenceClassification"], 256)
    pairs = [("ba ri", "ko"), ("ko ba", "ri tu")]
    of_run, again = model.predict(pairs), bert.load(tmp_path / "out").predict(pairs)
    assert [answer.label for answer in of_run] == [answer.label for answer in again]
    for one, other in zip(of_run, again, strict=True):
        np.testing.assert_allclose(list(one.probabilities.values()), list(other.probabilities.values()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["conll2003", "squad"])
def test_gpt2_tags_words_and_answers_questions(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary has no padding token."""
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)
    write_gpt2(tmp_path / "gpt2")
    data, words = tmp_path / "data", "ba B-PER\nko O\n\nri O\n"
    data.mkdir()
    for split in ("train", "dev"):
        name, content = (
            (f"{split}.txt", words) if task == "conll2003" else (f"{split}-v1.1.json", json.dumps(questions(4, False)))
        )
        (data / name).write_text(content, encoding="utf-8")
    arguments = [f"--config={task}", f"--init={tmp_path / 'gpt2'}", f"--data.dir={data}", "--training.epochs=1"]
    arguments += ["--data.max_length=40", "--data.buckets=40", "--training.batch_size=8"]
    arguments += ["--data.max_query_length=8"] if task == "squad" else []
    assert finetune([*arguments, f"--output_dir={tmp_path / 'run'}"]) == 0
    model = bert.load(tmp_path / "run")
    model.save(tmp_path / "out")
    inputs = ["ba ko" if task == "conll2003" else ("ba?", "ri ko ba")]
    assert bert.load(tmp_path / "out").predict(inputs) == model.predict(inputs)


def test_other_models_and_tasks_are_refused(
    pretrained: Path, continued: Path, sst2: Path, tmp_path: Path, fails
) -> None:
    arguments = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}", "--language_model_weight=0.5"]
    message = fails(finetune, "--config=sst2", f"--init={pretrained}", *arguments, "--data.max_length=32")
    assert "language_model_weight is 0.5, but model.causal is false" in message
    message = fails(finetune, "--config=sst2", f"--init={continued}", *arguments, "--num_feature_layers=1")
    assert "language_model_weight is 0.5, but num_feature_layers is 1" in message
    ner = tmp_path / "ner"
    ner.mkdir()
    for name in ("train.txt", "dev.txt"):
        (ner / name).write_text("ba B-PER\nko O\n\nri O\n", encoding="utf-8")
    arguments = [f"--data.dir={ner}", f"--output_dir={tmp_path / 'run'}", "--language_model_weight=0.5"]
    message = fails(finetune, "--config=conll2003", f"--init={continued}", *arguments, "--data.max_length=32")
    assert "language_model_weight is 0.5, and conll2003" in message
    assert not (tmp_path / "run" / "config.yaml").exists()
