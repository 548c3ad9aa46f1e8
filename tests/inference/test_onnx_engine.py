"""Models that ONNX Runtime runs (`bert.load(..., engine="onnxruntime")`), compared with JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.errors import UserError
from bert.inference import onnx_engine
from bert.inference.load import architecture_of
from bert.model.encoder import Bert
from bert.model.heads import HEADS, BertForSequenceClassification
from bert.model.pooling import Pooling
from bert.tasks import find_task
from bert.tasks.registry import published_task
from tests.tiny_models import CONFIG, TASKS, model_of

onnx = pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")

WORDS = ["ba", "ko ri", "tu lo", "mi", "sa ne", "du", "ri ba", "lo"]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "bert-jax" / "graphs"


@pytest.fixture
def encoder(tmp_path: Path) -> Callable[..., bert.Pretrained]:
    """Makes a sentence encoder with random weights."""

    def make(**pooling) -> bert.Pretrained:
        model = model_of(tmp_path, Bert(CONFIG), None)
        return dataclasses.replace(model, params={"bert": model.params}, pooling=Pooling(**pooling))

    return make


def with_engine(model: bert.Pretrained, dtype: str = "float32") -> bert.Pretrained:
    return dataclasses.replace(model, engine="onnxruntime", dtype=dtype)


@pytest.mark.medium
@pytest.mark.parametrize(
    "pooling", [{}, {"mode": "cls", "normalize": True}, {"query_prompt": "ba ", "include_prompt": False}]
)
def test_both_engines_compute_the_same_vectors(encoder, pooling: dict) -> None:
    model = encoder(**pooling)
    other = with_engine(model)
    for prompt in (None, "query"):
        np.testing.assert_allclose(other.embed(WORDS, prompt=prompt), model.embed(WORDS, prompt=prompt), atol=1e-5)
    np.testing.assert_allclose(
        other.embed(["ba ko " * 60], long_texts="windows"),
        model.embed(["ba ko " * 60], long_texts="windows"),
        atol=1e-5,
    )
    actual, expected = other.encode(WORDS), model.encode(WORDS)
    np.testing.assert_array_equal(actual.attention_mask, expected.attention_mask)
    for name in ("last_hidden_state", "pooled_output", "embeddings"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=1e-5)
    assert other.embed([]).shape == (0, CONFIG.hidden_size)


@pytest.mark.medium
def test_only_graphs_of_the_engine_have_operators_of_onnx_runtime(encoder, caches: Path, tmp_path: Path) -> None:
    def domains(file: Path) -> set[str]:
        return {node.domain for node in onnx.load(file).graph.node}

    model = encoder()
    with_engine(model).embed(WORDS)
    assert [domains(folder / "model.onnx") for folder in caches.iterdir()] == [{"", "com.microsoft"}]
    model.save(tmp_path / "out", "onnx")
    assert domains(tmp_path / "out" / "model.onnx") == {""}


@pytest.mark.medium
def test_a_classifier_has_a_graph_of_its_head_and_one_of_its_encoder(tmp_path: Path, caches: Path) -> None:
    model = model_of(tmp_path, BertForSequenceClassification(CONFIG, 2), TASKS["classification"], labels=("no", "yes"))
    other = with_engine(model)
    for actual, expected in zip(other.predict(WORDS), model.predict(WORDS), strict=True):
        assert actual.label == expected.label
    assert len(list(caches.iterdir())) == 1
    np.testing.assert_allclose(other.embed(WORDS), model.embed(WORDS), atol=1e-5)
    assert len(list(caches.iterdir())) == 2


INPUTS = {
    "classification": ["ba ko", "mi"],
    "pairs": [("ba", "ko ri"), ("tu", "")],
    "regression": [("ba", "ko ri"), ("tu", "lo")],
    "choices": [("ba", ["ko", "ri"]), ("who", ["tu lo", "mi", "sa"])],
    "squad2": [("ba ko", "a b c d e f g h i j k l m n o p q r"), ("who", "ba")],
    "tagging": ["ba ko", "mi"],
    "reranker": [("ba", "ko ri"), ("tu", "lo")],
}


def numbers_of(answer: Any) -> list[float]:
    """The numbers in an answer, from left to right."""
    parts = answer.values() if isinstance(answer, dict) else answer
    if isinstance(parts, int | float):
        return [parts]
    return [] if isinstance(parts, str) or parts is None else [n for part in parts for n in numbers_of(part)]


@pytest.mark.medium
@pytest.mark.parametrize("name", INPUTS)
def test_both_engines_give_the_same_answers(name: str, tmp_path: Path) -> None:
    task = find_task("reranker") if name == "reranker" else TASKS[name]
    labels = task.output_names if name in ("classification", "pairs", "regression", "tagging") else ()
    labels = ("LABEL_0",) if name == "reranker" else labels
    model = model_of(tmp_path, HEADS[task.kind](CONFIG, task.num_labels), task, labels=labels)
    model = dataclasses.replace(model, architecture=architecture_of(task))
    other = with_engine(model)
    expected = model.predict(INPUTS[name])
    assert numbers_of(other.predict(INPUTS[name])) == pytest.approx(numbers_of(expected), abs=1e-4)
    if name == "reranker":
        assert numbers_of(other.rank("ba", WORDS)) == pytest.approx(numbers_of(model.rank("ba", WORDS)), abs=1e-4)
    if name == "classification":
        rows = [{"text": text, "label": label} for text, label in zip(WORDS, ["no", "yes"] * 4, strict=True)]
        assert other.evaluate(rows).metrics == pytest.approx(model.evaluate(rows).metrics, abs=1e-4)


@pytest.mark.medium
def test_both_engines_search_and_choose_labels_alike(encoder, tmp_path: Path) -> None:
    model = encoder(normalize=True)
    index = with_engine(model).embed(WORDS)  # an index of one engine serves queries of the other
    actual, expected = with_engine(model).search(["ba"], index, top_k=3), model.search(["ba"], WORDS, top_k=3)
    np.testing.assert_array_equal(actual.indices, expected.indices)
    np.testing.assert_allclose(actual.scores, expected.scores, atol=1e-4)
    names = ("contradiction", "neutral", "entailment")
    task = published_task("sequence_classification", "published", names, None, texts_per_input=2)
    entailment = model_of(tmp_path, BertForSequenceClassification(CONFIG, 3), task, labels=names)
    answers = [each.zero_shot(WORDS, ["ko", "mi"], "x {}") for each in (with_engine(entailment), entailment)]
    assert numbers_of(answers[0]) == pytest.approx(numbers_of(answers[1]), abs=1e-4)


@pytest.mark.medium
def test_a_graph_is_written_once(encoder, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_engine(encoder())
    first = model.embed(WORDS)
    monkeypatch.setattr("bert.interchange.writers.onnx.write_graph", None)
    np.testing.assert_array_equal(with_engine(encoder()).embed(WORDS), first)
    with pytest.raises(TypeError):  # another pooling is another graph
        with_engine(encoder(normalize=True)).embed(WORDS)


@pytest.mark.medium
def test_old_graphs_are_removed(encoder, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(encoder()).embed(WORDS)
    [old] = caches.iterdir()
    monkeypatch.setattr(onnx_engine, "MAX_SIZE", 10)
    with_engine(encoder(normalize=True)).embed(WORDS)
    [new] = caches.iterdir()
    assert new != old


@pytest.mark.medium
def test_eight_bits(encoder, caches: Path) -> None:
    model = encoder(normalize=True)
    vectors = with_engine(model, "int8").embed(WORDS)
    cosines = (vectors * model.embed(WORDS)).sum(axis=1)
    assert cosines.min() > 0.99 and not np.array_equal(vectors, model.embed(WORDS))
    assert [file.name for folder in caches.iterdir() for file in folder.iterdir()] == ["model.onnx"]


def test_engines_and_types_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine is 'tensorrt': use jax or onnxruntime"):
        bert.load(tmp_path, engine="tensorrt")
    with pytest.raises(UserError, match="dtype is 'int8': use float32 or bfloat16 with the engine jax"):
        bert.load(tmp_path, dtype="int8")
