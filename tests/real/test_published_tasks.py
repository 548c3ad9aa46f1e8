"""A few steps of SQuAD, WNUT-17 and CommonsenseQA as published, through the command, and questions to what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bert
from bert import metrics
from bert.commands.finetune import main
from bert.tasks import question_answering
from bert.tasks.token_classification import conll
from tests.conftest import SMALL_MODEL

pytestmark = pytest.mark.real

SIZES = [*SMALL_MODEL, "--model.max_position_embeddings=128", "--init=none", "--training.epochs=1",
         "--data.max_train_samples=64", "--data.max_length=128", "--data.buckets=128", "--training.batch_size=16",
         "--training.eval_batch_size=64"]  # fmt: skip


def run(shared: Path, data: str, recipe: str, folder: Path, *arguments: str) -> dict[str, Any]:
    vocabulary = f"--tokenizer.path={shared / 'data' / 'vocab' / 'bert-base-uncased'}"
    arguments = (f"--data.dir={shared / 'data' / data}", f"--output_dir={folder}", vocabulary, *arguments)
    assert main([f"--config={recipe}", *SIZES, *arguments]) == 0
    return json.loads((folder / "results.json").read_text())


def test_wnut_17(shared: Path, tmp_path: Path) -> None:
    results = run(shared, "ner/wnut17", "wnut17", tmp_path / "run")
    data = conll.read(shared / "data" / "ner" / "wnut17" / "test.conll")
    written = conll.read(tmp_path / "run" / "predictions" / "test.conll", reading="count")
    assert written.words == data.words
    assert results["test"]["f1"] == pytest.approx(metrics.entity_metrics(written.tags, data.tags)["f1"])
    assert len(bert.load(tmp_path / "run").data.labels) == 13, "the types of the whole file, not of 64 sentences"
    assert 0 <= results["commonest_tag"]["f1"] < 0.3  # of 64 sentences, 0; the whole file gives 0.096


def test_commonsenseqa(shared: Path, tmp_path: Path) -> None:
    results = run(shared, "multiple_choice/commonsenseqa", "commonsenseqa", tmp_path / "run")
    assert results["chance"]["accuracy"] == pytest.approx(0.2)
    assert 0.1 < results["dev"]["accuracy"] < 0.35
    rows = (tmp_path / "run" / "predictions" / "test.tsv").read_text().splitlines()
    assert len(rows) == 1 + 1140


def test_squad(shared: Path, tmp_path: Path) -> None:
    """The whole dev file takes minutes on a CPU: its first article."""
    data = tmp_path / "squad"
    data.mkdir()
    for split, file in (("train", "train-v1.1.head"), ("dev", "dev-v1.1")):
        content = json.loads((shared / "data" / "squad" / f"{file}.json").read_text(encoding="utf-8"))
        short = {"version": content["version"], "data": content["data"][:1]}
        (data / f"{split}-v1.1.json").write_text(json.dumps(short), encoding="utf-8")
    results = run(shared, str(data), "squad", tmp_path / "run")
    dataset = question_answering.read(data / "dev-v1.1.json")
    answers = json.loads((tmp_path / "run" / "predictions" / "predictions.json").read_text())
    assert list(answers) == [example.id for example in dataset.examples]
    assert all(answers[example.id] in example.context for example in dataset.examples)
    scores = metrics.squad_metrics(answers, question_answering.references(dataset.examples))
    assert {name: results["dev"][name] for name in scores} == scores
