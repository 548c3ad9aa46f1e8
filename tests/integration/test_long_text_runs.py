"""Runs whose texts are longer than a row: training, evaluation, prediction and exports read them through windows."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.commands.export import main as export
from bert.commands.predictions import predict_command
from bert.config import FinetuneConfig, ModelConfig, TaskDataConfig
from bert.data.batching import LengthGroups
from bert.data.long_texts import LongTexts, encode_texts
from bert.data.windows import WindowedRows
from bert.errors import UserError
from bert.interchange.writers import hf
from bert.model.dropout import Dropout
from bert.model.heads import BertForEmbedding, BertForSequenceClassification
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.tasks.registry import published_task
from bert.tasks.sequence_classification import CustomClassification
from bert.training.finetuning.kinds import build_model_and_loss
from bert.training.finetuning.ranking_losses import embed
from bert.training.length_groups import SequenceOutputs
from bert.training.losses import Loss
from bert.training.step import compute_gradients
from tests.helpers import lines_of, results_of
from tests.letters import letter_tokenizer
from tests.tiny_models import CONFIG as TINY
from tests.tiny_models import model_of
from tests.tiny_training import assert_same_gradients

pytestmark = pytest.mark.medium

FILLERS = ["tu", "ne", "lo", "mi", "sa"]
ROW, STRIDE = 16, 8
SMALL = {
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
              "max_position_embeddings": 16, "initializer_range": 0.2, "hidden_dropout_prob": 0.1},
    "tokenizer": {"vocab_size": 64, "min_frequency": 1},
    "data": {"max_length": ROW, "buckets": [8, ROW], "long_texts": "windows", "doc_stride": STRIDE,
             "max_train_windows": 4},
    "training": {"batch_size": 8, "epochs": None, "steps": 60, "eval_every": 30, "log_every": 10},
    "optimizer.learning_rate": 2e-2,
}  # fmt: skip


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of 5 to 45 words; "ba" or "ko", the only sign of the label, is among the last ones."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        label = ("ba", "ko")[rng.integers(2)]
        words = [*rng.choice(FILLERS, rng.integers(2, 42)), label, label, rng.choice(FILLERS)]
        made.append({"text": " ".join(words), "label": label})
    return made


@pytest.fixture(scope="module")
def finished(made_once) -> Path:
    def train(folder: Path) -> None:
        bert.finetune(
            "classification", init="none", train=rows(80, 0), dev=rows(24, 1), output_dir=folder, overrides=SMALL
        )

    return made_once("long_texts", train)


def test_a_run_learns_what_only_later_windows_show(finished: Path, capfdbinary) -> None:
    losses = [line["classification_loss"] for line in lines_of(finished) if line["split"] == "train"]
    assert losses[-1] < 0.5 * losses[0]
    results = results_of(finished)
    assert results["dev"]["accuracy"] > 0.9
    capfdbinary.readouterr()
    assert predict_command([str(finished), "dev"]) == 0
    written = (finished / "predictions" / "dev.tsv").read_bytes()
    assert capfdbinary.readouterr().out == written
    model = bert.load(finished)
    answers = model.predict([row["text"] for row in rows(24, 1)])
    cells = [line.split("\t") for line in written.decode().splitlines()[1:]]
    assert [answer.label for answer in answers] == [cell[1] for cell in cells]
    shares = [max(answer.probabilities.values()) for answer in answers]
    assert shares == pytest.approx([float(cell[3]) for cell in cells], abs=2e-6)
    assert model.score(rows(24, 1))["accuracy"] == results["dev"]["accuracy"]


@pytest.mark.parametrize("data", ["dev", "rows"])
def test_evaluate_reads_all_windows(finished: Path, data: str) -> None:
    evaluation = bert.load(finished).evaluate("dev" if data == "dev" else rows(24, 1))
    assert evaluation.rows == 24
    assert evaluation.metrics["accuracy"] == pytest.approx(results_of(finished)["dev"]["accuracy"])


def test_logits_are_the_mean_of_the_logits_of_windows(finished: Path) -> None:
    model = bert.load(finished)
    texts = [row["text"] for row in rows(6, 2)]
    features = model.task.features(model.tokenizer, model.task.examples_from_inputs(texts), model.data)
    assert isinstance(features, WindowedRows)
    logits = model.outputs(features)
    for text, of_text in zip(texts, logits, strict=True):
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
        starts = [*range(0, max(len(ids) - 14, 0), STRIDE), max(len(ids) - 14, 0)]
        windows = [jnp.array([[2, *ids[start : start + 14], 3]]) for start in starts]
        expected = np.mean([model.apply(window)[0] for window in windows], axis=0)
        assert np.allclose(of_text, expected, atol=1e-5)


def test_a_text_of_ten_thousand_words_is_read_in_batches(finished: Path, monkeypatch) -> None:
    model = bert.load(finished)
    sizes = []
    compiled = model._forward.head
    monkeypatch.setitem(
        vars(model._forward), "head", lambda *inputs: sizes.append(inputs[1].shape) or compiled(*inputs)
    )
    [answer] = model.predict([f"{'tu ne ' * 5000}ba"], batch_size=32)
    assert set(answer.probabilities) == {"ba", "ko"}
    assert len(sizes) == -(-1250 // 32)
    assert set(sizes) == {(32, ROW)}


def test_modes_agree_on_texts_that_fit(finished: Path) -> None:
    model = bert.load(finished)
    texts = ["tu ba ne", "ko", "sa sa ba lo"]
    answers = [model.predict(texts, long_texts=mode) for mode in ("cut", "head_tail", "windows", None)]
    assert answers[1:] == answers[:-1]
    vectors = [model.embed(texts, long_texts=mode) for mode in ("cut", "head_tail", "windows", None)]
    assert all(np.array_equal(vectors[0], other) for other in vectors)
    long = f"{'tu ' * 40}ba"
    assert model.predict(long) == model.predict(long, long_texts="windows") != model.predict(long, long_texts="cut")


def test_an_export_declares_its_windows_and_answers_alike(finished: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    run = bert.load(finished)
    for format in ("hf", "onnx"):
        assert export([str(finished), str(tmp_path / format), "--format", format]) == 0
        assert "windows of 14 tokens that start 8 tokens apart" in (tmp_path / format / "README.md").read_text()
    published = bert.load(tmp_path / "hf")
    assert (published.data.max_length, published.data.doc_stride, published.data.long_texts) == (ROW, STRIDE, "windows")
    expected = probabilities(run)
    assert np.allclose(probabilities(published), expected, atol=1e-5)
    assert np.allclose(
        probabilities(dataclasses.replace(run, graph=tmp_path / "onnx" / "model.onnx")), expected, atol=1e-5
    )
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for wrong in ("windows", {"mode": "windows"}, {**config["long_texts"], "doc_stride": 0}):
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "long_texts": wrong}))
        with pytest.raises(UserError, match="long_texts is"):
            bert.load(tmp_path / "hf")


def probabilities(model: bert.Pretrained) -> list[list[float]]:
    return [list(answer.probabilities.values()) for answer in model.predict([row["text"] for row in rows(8, 3)])]


def test_embeddings_of_long_texts_are_means_of_windows(made_once, tmp_path: Path, monkeypatch) -> None:
    texts = [row["text"] for row in rows(60, 4)]
    pairs = [{"query": text, "positive": " ".join(reversed(text.split()))} for text in texts]
    overrides = {**SMALL, "training": {**SMALL["training"], "steps": 10, "eval_every": 5, "log_every": 5}}

    def train(folder: Path) -> None:
        bert.finetune(
            "embedding", init="none", train=pairs[:40], dev=pairs[40:], output_dir=folder, overrides=overrides
        )

    run = made_once("long_embeddings", train)
    losses = [line["in_batch_loss"] for line in lines_of(run) if line["split"] == "train"]
    assert losses[-1] < losses[0]
    model = bert.load(run)
    queries, documents = (model.embed([pair[name] for pair in pairs[40:]]) for name in ("query", "positive"))
    cells = [line.split("\t") for line in (run / "predictions" / "dev.tsv").read_text().splitlines()[1:]]
    cosines = np.einsum("bd,bd->b", queries, documents)
    assert cosines == pytest.approx([float(cell[1]) for cell in cells], abs=2e-6)
    assert np.allclose(np.linalg.norm(queries, axis=1), 1, atol=1e-6)
    windows = [
        model.embed(text)
        for text in ("tu ne lo mi sa tu ne lo mi sa tu ne lo mi", "mi sa tu ne lo mi sa tu ne lo mi sa ba ko")
    ]
    mean = np.mean(windows, axis=0)
    whole = model.embed("tu ne lo mi sa tu ne lo mi sa tu ne lo mi sa ba ko")
    assert np.allclose(whole, mean / np.linalg.norm(mean), atol=1e-5)
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)
    assert export([str(run), str(tmp_path / "out")]) == 0
    assert np.allclose(bert.load(tmp_path / "out").embed(pairs[0]["query"]), model.embed(pairs[0]["query"]), atol=1e-6)


def test_zero_shot_reads_long_texts_through_windows(tmp_path: Path) -> None:

    names = ("contradiction", "entailment")
    task = published_task("sequence_classification", "nli", names, None, texts_per_input=2)
    model = model_of(tmp_path, BertForSequenceClassification(TINY, 2), task, labels=names)
    text, labels = "a b c d e f g h i j k l m n", ["x", "y"]
    logits = []
    for label in labels:
        rows = encode_texts(model.tokenizer, [(text, label)], LongTexts(16, "windows", 4)).windows
        parts = zip(np.split(rows.ids, rows.offsets[1:-1]), rows.segment_a_lengths, strict=True)
        outputs = [model.apply(ids[None], (np.arange(len(ids)) >= first)[None].astype(int)) for ids, first in parts]
        assert len(outputs) > 1
        logits.append(np.mean(outputs, axis=0)[0])
    entailed = np.exp(np.array(logits)[:, 1])
    answer = model.zero_shot(text, labels, "{}", long_texts="windows")
    assert [answer.probabilities[label] for label in labels] == pytest.approx(entailed / entailed.sum(), abs=1e-5)


T = 8
CONFIG = ModelConfig(61, 16, 1, 2, 32, max_position_embeddings=T, initializer_range=0.3)
CLASSIFIER = BertForSequenceClassification(CONFIG, 3)


def loss_of(mode: str) -> Loss:
    """Returns the loss of a run with ``data.long_texts``."""
    config = FinetuneConfig(task="classification", model=CONFIG, data=TaskDataConfig(long_texts=mode))
    task = CustomClassification(labels=("a", "b", "c"), label_names=("a", "b", "c"))
    return build_model_and_loss(task, config, None, None)[2]


@functools.cache
def initial_params() -> Any:
    return jax.jit(CLASSIFIER.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]


def windowed_batch(mode: str = "windows") -> tuple[WindowedRows, dict[str, np.ndarray]]:
    """Sixteen rows of 1 to 4 windows; the last two rows only fill the batch."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = letter_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])
    texts = [" ".join(letters[number : number + 3 + number]) for number in range(14)]
    labels = (np.arange(14) % 3).astype(np.int32)
    rows = encode_texts(tokenizer, texts, LongTexts(T, mode, 3), labels)
    assert isinstance(rows, WindowedRows)
    assert rows.counts.max() == 4
    return rows, {**rows.batch(np.arange(14), T, 16), "rows": np.arange(16, dtype=np.int32)}


def gradients(batch: dict[str, np.ndarray], devices: int, micro_batches: int, mesh=None) -> tuple[Any, Any]:
    used = jax.devices()[:devices]
    parallel = PmapParallelism(used) if mesh is None else MeshParallel(mesh, used)
    compiled = parallel.compile(
        lambda params, batch: compute_gradients(
            params, batch, loss_of("windows"), lambda rows: Dropout.for_step(3, 5, rows), parallel.axis
        )
    )
    return parallel.to_host(compiled(parallel.put_state(initial_params()), parallel.shard_batch(batch, micro_batches)))


@pytest.mark.parametrize(("devices", "micro_batches", "mesh"), [(8, 1, None), (1, 4, None), (4, 2, (2, 2, 1))])
def test_a_step_does_not_depend_on_devices_and_micro_batches(devices, micro_batches, mesh) -> None:
    _, batch = windowed_batch()
    expected, expected_sums = gradients(batch, 1, 1)
    grads, sums = gradients(batch, devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    assert jax.tree.leaves(sums) == pytest.approx(jax.tree.leaves(expected_sums), rel=1e-6)


@pytest.mark.parametrize(("mode", "pool"), [("windows", jnp.mean), ("windows_max", jnp.max)])
def test_a_step_equals_one_text_and_one_window_at_a_time(mode: str, pool: Callable[..., jax.Array]) -> None:
    """The reference knows no batches, no padding and no masks."""
    rows, batch = windowed_batch(mode)
    logits_of = jax.jit(CLASSIFIER.apply)

    def loss(params: Any) -> jax.Array:
        total = jnp.zeros(())
        for text, label in enumerate(rows.labels):
            windows = range(rows.offsets[text], rows.offsets[text + 1])
            ids = [rows.windows.ids[rows.windows.offsets[n] : rows.windows.offsets[n + 1]] for n in windows]
            logits = pool(jnp.stack([logits_of({"params": params}, window[None])[0] for window in ids]), axis=0)
            total -= jax.nn.log_softmax(logits)[label]
        return total / len(rows)

    def batched(params: Any) -> jax.Array:
        losses, _ = loss_of(mode).forward(params, batch, None)
        total, weight = losses["classification_loss"]
        return total / weight

    expected, expected_grads = jax.value_and_grad(loss)(initial_params())
    value, grads = jax.jit(jax.value_and_grad(batched))(initial_params())
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(jax.device_get(grads), jax.device_get(expected_grads))


def test_queries_and_documents_equal_single_windows() -> None:
    rng = np.random.default_rng(0)
    model = BertForEmbedding(CONFIG, normalize=True)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
    ids = rng.integers(5, 61, (2, 4, 3, T))
    windows = np.array([[3, 1, 2, 2], [1, 1, 3, 1]])
    mask = (np.arange(3) < windows[..., None]).astype(np.int32)
    ones = np.ones_like(ids)
    batch = {
        "input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": ones, "window_mask": mask,
        "document_numbers": np.zeros((2, 3), np.int32), "weights": np.ones(2, np.float32), "rows": np.arange(2),
    }  # fmt: skip
    groups = LengthGroups([], T, 1, False, (0,) * 4).divide_sequences(batch)

    def of_rows(params: Any) -> Any:
        numbers = jnp.concatenate([groups[name] for name in sorted(groups) if name.startswith("sequences")])
        return SequenceOutputs(embed(model, params, groups, None), numbers).of_rows(groups, None, normalize=True)

    vectors = np.reshape(jax.jit(of_rows)(params), (2, 4, -1))
    vector_of = jax.jit(model.apply)
    for row, text in np.ndindex(2, 4):
        single = np.array([vector_of(params, ids[row, text, w][None])[0] for w in range(windows[row, text])])
        scaled = single / np.linalg.norm(single, axis=1, keepdims=True) if len(single) > 1 else single
        assert np.allclose(vectors[row, text], scaled.mean(axis=0), atol=1e-5)
