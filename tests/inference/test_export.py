"""int8 graphs: the scores that are compared, the options that are accepted or rejected, and error messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.export import main
from bert.config import FinetuneConfig, TaskDataConfig
from bert.config.yaml_io import dump
from bert.inference.export import Int8Check
from bert.interchange import ExportError
from bert.model.encoder import Bert
from bert.model.heads import HEADS, BertForMultipleChoice
from bert.model.pretraining import BertForPreTraining
from bert.tasks.base import Task
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.reranker import RerankerTask
from bert.tasks.sequence_classification import CustomClassification
from tests.tiny_models import BINARY, CONFIG, TASKS, model_of

onnx = pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")

from bert.interchange.writers.onnx import GRAPH, build, write_int8  # noqa: E402
from tests.messages import has_all  # noqa: E402

WORDS = ["ba", "ko ri", "tu lo", "mi", "sa ne", "du", "ri ba", "lo"]
LABELLED = [{"text": text, "label": "yes" if place % 3 else "no"} for place, text in enumerate(WORDS)]
GROUPS = [{"query": text, "positive": f"{text} x", "negatives": [f"{text} y", "z"]} for text in WORDS]


def made(folder: Path, kind: str) -> bert.Pretrained:
    """A model of random weights: of a task, or "embeddings" and "pretraining" without one."""
    if kind == "pretraining":
        return model_of(folder, BertForPreTraining(CONFIG), None)
    if kind in ("embeddings", "embedding"):
        model = model_of(folder, Bert(CONFIG), EmbeddingTask() if kind == "embedding" else None)
        return dataclasses.replace(model, params={"bert": model.params})
    if kind == "reranker":
        model = model_of(folder, BertForMultipleChoice(CONFIG), RerankerTask(), labels=("LABEL_0",))
        return dataclasses.replace(model, architecture="BertForSequenceClassification")
    task: Task = TASKS[kind]
    labels = task.output_names if kind in ("classification", "pairs", "published", "tagging") else ()
    return model_of(folder, HEADS[task.kind](CONFIG, task.num_labels), task, labels=labels)


@pytest.fixture
def models(tmp_path: Path) -> Callable[[str], bert.Pretrained]:
    """The function `made` in a folder of the test."""
    return partial(made, tmp_path)


def with_graph(model: bert.Pretrained, folder: Path) -> bert.Pretrained:
    onnx.save_model(build(model), folder / GRAPH)
    return dataclasses.replace(model, graph=folder / GRAPH)


INPUTS: dict[str, list[Any]] = {
    "classification": WORDS,
    "tagging": WORDS,
    "squad": [("ba", "ko ri tu lo mi sa ne du ri ba lo"), ("ko", "ba ri")],
    "choices": [("ba ko", "ri", "tu", "lo"), ("ko", "mi sa", "du")],
    "reranker": [("ba", text) for text in WORDS],
    "embedding": WORDS,
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", INPUTS)
def test_a_graph_gives_what_the_model_gives(kind: str, models, tmp_path: Path) -> None:
    model = models(kind)
    task = model.require_task()
    features = task.features(model.tokenizer, task.examples_from_inputs(INPUTS[kind]), model.data)
    actual, expected = model.outputs(features), with_graph(model, tmp_path).outputs(features)
    assert len(actual) == len(expected) == len(features)
    for row, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(other, row, atol=1e-5)


@pytest.mark.parametrize("kind", ["classification", "reranker", "embedding"])
def test_both_scores_are_those_of_the_labelled_rows(kind: str, models, tmp_path: Path) -> None:
    model = models(kind)
    task = model.require_task()
    check = Int8Check.from_model(model, LABELLED if kind == "classification" else GROUPS, 0.9)
    (tmp_path / "int8").mkdir()
    whole = with_graph(model, tmp_path)
    write_int8(tmp_path / GRAPH, tmp_path / "int8" / GRAPH)
    small = dataclasses.replace(model, graph=tmp_path / "int8" / GRAPH)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in check(whole, small).splitlines()]
    assert [line[0] for line in table] == ["", "---", task.main_metric, "megabytes", "rows per second"]
    assert table[0] == ["", "float", "int8"]
    for place, one in ((1, whole), (2, small)):
        predictions = task.predict(one.outputs(check.features), check.features, check.examples)
        assert table[2][place] == f"{task.score(predictions, check.examples)[task.main_metric]:.4f}"
        assert float(table[4][place]) > 0


@pytest.mark.medium
def test_an_int8_folder_replaces_the_float_graph(models, tmp_path: Path, monkeypatch, capsys, fails) -> None:
    model = models("embeddings")
    monkeypatch.setattr("bert.inference.load.load", lambda source, log, **adapter: model)
    (tmp_path / "texts.txt").write_text("\n".join(WORDS) + "\n")
    arguments = ["made", str(tmp_path / "out"), "--format=onnx", "--quantize=int8", f"--dev={tmp_path / 'texts.txt'}"]
    refused = fails(main, *arguments, "--tolerance=0")
    assert has_all(refused, "int8", "1 to 0.9")
    assert "of 0 allows" in refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vocab.txt"]
    assert main([*arguments, "--tolerance=0.01"]) == 0
    printed = capsys.readouterr().out
    assert "verified: the outputs are within" in printed and "| cosine with the float model | 1.0000 |" in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {GRAPH, "README.md", "config.json", "signature.json", "tokenizer.json"} <= names
    assert not {"float", "prepared.onnx"} & names
    assert "| megabytes |" in (tmp_path / "out" / "README.md").read_text()
    graph = onnx.load(tmp_path / "out" / GRAPH).graph
    assert {array.data_type for array in graph.initializer if array.name.endswith("kernel_quantized")} == {
        onnx.TensorProto.INT8
    }
    small = dataclasses.replace(model, graph=tmp_path / "out" / GRAPH)
    cosines = [float(row @ other) / float(np.linalg.norm(row) * np.linalg.norm(other))
               for row, other in zip(model.embed(WORDS), small.embed(WORDS), strict=True)]  # fmt: skip
    assert 0.99 < np.mean(cosines) < 1


@pytest.mark.medium
def test_weights_over_the_limit_are_in_files_of_their_own(models, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("bert.interchange.writers.onnx.LARGEST", 0)
    models("embeddings").save(tmp_path / "out", "onnx", quantize="int8", dev=WORDS, tolerance=0.2)
    assert json.loads((tmp_path / "out" / "signature.json").read_text())["architecture"] == "Bert"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert GRAPH in names and not {"float", "prepared.onnx"} & names


def test_a_run_is_scored_on_its_own_dev_rows_or_on_those_of_a_folder(tmp_path: Path) -> None:
    data = TaskDataConfig(dir=str(tmp_path / "data"), max_length=16)
    (tmp_path / "data").mkdir()
    (tmp_path / "moved").mkdir()
    for name, rows in (("train", LABELLED), ("dev", LABELLED[:3])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"{name}.jsonl").write_text(text)
        (tmp_path / "moved" / f"{name}.jsonl").write_text(text * 2)
    (tmp_path / "config.yaml").write_text(dump(FinetuneConfig(task="classification", init="none", data=data)))
    task = CustomClassification(**BINARY, data=data)
    model = model_of(tmp_path, HEADS[task.kind](CONFIG, task.num_labels), task)
    run = dataclasses.replace(model, source=str(tmp_path), step=3)
    assert len(Int8Check.from_model(run, None, 0.01).examples) == 3
    assert len(Int8Check.from_model(run, tmp_path / "moved", 0.01).examples) == 6
    assert len(Int8Check.from_model(run, tmp_path / "moved" / "train.jsonl", 0.01).examples) == 16


def test_lower_is_better_where_the_task_says_so_and_nan_is_refused() -> None:
    class Lower(CustomClassification):
        @property
        def higher_main_is_better(self) -> bool:
            return False

    check = Int8Check("made", Lower(**BINARY), None, None, 0.1)
    check._require_kept("loss", 1.0, 1.05)
    check._require_kept("loss", 1.0, 0.2)
    for worse in (1.2, float("nan")):
        with pytest.raises(ExportError, match=r"changes the loss from 1 to"):
            check._require_kept("loss", 1.0, worse)


@pytest.mark.parametrize(
    ("kind", "inputs", "told"),
    [
        ("embeddings", {"quantize": "int4"}, "quantize is 'int4': pass int8"),
        ("embeddings", {"quantize": "int8", "format": "hf"}, "quantize is for onnx"),
        ("embeddings", {"dev": ["a"]}, "dev has an effect"),
        ("embeddings", {"quantize": "int8"}, "made has no dev rows"),
        ("embeddings", {"quantize": "int8", "dev": []}, "dev has no texts"),
        ("embeddings", {"quantize": "int8", "dev": ["a", " "]}, "text 2 is empty"),
        ("embeddings", {"quantize": "int8", "dev": "no.txt"}, r"no.txt does not exist"),
        ("embeddings", {"quantize": "int8", "dev": ["a"], "tolerance": 1}, "tolerance is 1"),
        ("pretraining", {"quantize": "int8", "dev": ["a"]}, r"no embeddings .*\(BertForPreTraining\)"),
        ("published", {"quantize": "int8", "dev": LABELLED}, "made is not a run and has no score"),
        ("classification", {"quantize": "int8"}, "made is not a run and has no dev rows"),
        ("pairs", {"quantize": "int8", "dev": LABELLED}, "mrpc reads its own files"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(kind: str, inputs: dict, told: str, models, tmp_path: Path) -> None:
    with pytest.raises(bert.UserError, match=told):
        models(kind).save(tmp_path / "out", **{"format": "onnx", **inputs})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--dev=texts.txt"], "--dev and --tolerance are for --quantize"),
        (["--tolerance=0.1"], "--dev and --tolerance are for --quantize"),
        (["--quantize=int8"], "--quantize is for onnx"),
        (["--format=onnx", "--quantize=int8", "--dev=no.txt"], r"no.txt does not exist"),
        (["--format=onnx", "--quantize=int4"], "argument --quantize: invalid choice: 'int4'"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(options: list[str], told: str, fails, tmp_path: Path) -> None:
    assert told in fails(main, "run", str(tmp_path / "out"), *options)
