"""Rerankers from files to ranked documents: trained, scored, exported, resumed, on eight devices, trained on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.data.rows import ChoiceRows
from tests.conftest import SMALL_MODEL
from tests.helpers import (
    REPOSITORY,
    assert_interrupted_run_ends_the_same,
    assert_same_but_for_rounding,
)

WORDS = ["red", "green", "blue", "black", "white", "brown"]
OPTIONS = [*SMALL_MODEL, "--init=none", "--data.max_length=16", "--data.buckets=16", "--tokenizer.vocab_size=80",
           "--tokenizer.min_frequency=1", "--training.batch_size=16", "--training.eval_batch_size=8",
           "--training.steps=12", "--training.epochs=null", "--training.eval_every=6", "--training.checkpoint_every=4",
           "--training.log_every=3", "--optimizer.learning_rate=1e-2", "--model.initializer_range=0.2"]  # fmt: skip


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    """The document with the word of the query is right; every third row has two negatives."""
    stream, rows = random.Random(seed), []
    for number in range(count):
        word, *others = stream.sample(WORDS, 3)
        negatives = [f"the {other} {number % 7}" for other in others]
        rows.append(
            {
                "query": f"{word} {number}",
                "positive": f"the {word} {number % 7}",
                "negatives": negatives if number % 3 == 0 else negatives[0],
            }
        )
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("queries")
    for split, count in (("train", 128), ("dev", 20)):
        rows = rows_of(count, count)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder: Path, data: Path, *arguments: str) -> int:
    return main(["--config=reranker", f"--data.dir={data}", f"--output_dir={folder}", *OPTIONS, *arguments])


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "reranker"
    assert run(folder, data) == 0
    return folder


@pytest.mark.medium
def test_a_run_is_scored_ranks_and_is_exported(trained: Path, data: Path, capsys, tmp_path: Path) -> None:
    results = json.loads((trained / "results.json").read_text())
    assert set(results["dev"]) == {"loss", "ndcg_at_10", "mrr_at_10"}
    assert (results["main_metric"], results["collapsed"]) == ("ndcg_at_10", False)
    model, row = bert.load(trained), rows_of(20, 20)[3]
    documents = [row["positive"], *row["negatives"]]
    ranked = model.rank(row["query"], documents)
    answers = model.predict([(row["query"], text) for text in documents])
    assert [found.score for found in ranked] == pytest.approx(sorted((a.score for a in answers), reverse=True))
    written = [line.split("\t") for line in (trained / "predictions/dev.tsv").read_text().splitlines()]
    of_row = [float(line[2]) for line in written if line[0] == "3"]
    np.testing.assert_allclose([answer.score for answer in answers], of_row, atol=2e-5)
    scores = model.score(rows_of(20, 20))
    assert scores == pytest.approx({name: results["dev"][name] for name in scores})
    capsys.readouterr()
    assert predict([str(trained), "dev", "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/dev.tsv").read_bytes() == (trained / "predictions/dev.tsv").read_bytes()
    model.warm_up([8])
    model.save(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], len(config["id2label"])) == (["BertForSequenceClassification"], 1)
    again = bert.load(tmp_path / "out").rank(row["query"], documents)
    assert [found.number for found in again] == [found.number for found in ranked]
    assert [found.score for found in again] == pytest.approx([found.score for found in ranked], abs=1e-5)


@pytest.mark.slow
def test_a_reranker_is_trained_on_with_its_head(trained: Path, data: Path, tmp_path: Path, capsys) -> None:
    """Its first step already finds what the run before has learned, which a new head would not."""
    given = [f"--init={trained}", "--data.max_length=16", "--data.buckets=16", "--training.steps=1",
             "--training.epochs=null", "--optimizer.learning_rate=1e-9"]  # fmt: skip
    assert main(["--config=reranker", f"--data.dir={data}", f"--output_dir={tmp_path / 'run'}", *given]) == 0
    before, after = (json.loads((run / "results.json").read_text())["dev"] for run in (trained, tmp_path / "run"))
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-3)


@pytest.mark.slow
def test_an_interrupted_run_ends_the_same(trained: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    def train(folder: Path) -> int:
        return run(folder, data)

    assert_interrupted_run_ends_the_same(train, tmp_path / "run", trained, ChoiceRows, monkeypatch)


@pytest.mark.slow
def test_eight_devices_and_micro_batches_are_as_one(trained: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "finetune.py"), "--config=reranker", f"--data.dir={data}"]
    eight = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "BERT_NUM_DEVICES": ""}
    more = ["--training.gradient_accumulation_steps=2", f"--output_dir={tmp_path / 'run'}"]
    subprocess.run([*command, *OPTIONS, *more], env=eight, check=True, cwd=REPOSITORY)
    assert_same_but_for_rounding(tmp_path / "run", trained)
