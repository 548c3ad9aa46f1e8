"""Embeddings from files to vectors: trained, resumed, on eight devices, exported, started from a sentence encoder."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import bert
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.data.rows import QueryDocumentRows
from bert.model.pooling import Pooling
from tests.conftest import SMALL_MODEL
from tests.helpers import (
    REPOSITORY,
    assert_interrupted_run_ends_the_same,
    assert_same_but_for_rounding,
)

WORDS = ["red", "green", "blue", "black", "white", "brown", "cat", "dog", "bird", "fish"]
OPTIONS = [*SMALL_MODEL, "--init=none", "--data.max_length=16", "--data.buckets=16", "--tokenizer.vocab_size=80",
           "--tokenizer.min_frequency=1", "--training.batch_size=16", "--training.eval_batch_size=8",
           "--training.steps=12", "--training.epochs=null", "--training.eval_every=6", "--training.checkpoint_every=4",
           "--training.log_every=3", "--optimizer.learning_rate=1e-2", "--embedding.matryoshka=8"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A query of two words, answered by the document that has both; every third row has a negative."""
    folder, stream = tmp_path_factory.mktemp("queries"), random.Random(0)
    for split, count in (("train", 96), ("dev", 20)):
        rows = []
        for number in range(count):
            first, second, other = (stream.choice(WORDS) for _ in range(3))
            negatives = {"negatives": [f"the {other} is there"]} if number % 3 == 0 else {}
            rows.append({"query": f"{first} {second}", "positive": f"the {second} {first} is here", **negatives})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder: Path, data: Path, *arguments: str) -> int:
    given = {argument.partition("=")[0] for argument in arguments}
    options = [option for option in OPTIONS if option.partition("=")[0] not in given]
    return main(["--config=embedding", f"--data.dir={data}", f"--output_dir={folder}", *options, *arguments])


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "embedding"
    assert run(folder, data) == 0
    return folder


@pytest.mark.medium
def test_a_run_leaves_scores_and_the_trained_embedding(trained: Path, data: Path, capsys, tmp_path: Path) -> None:
    results = json.loads((trained / "results.json").read_text())
    assert set(results["dev"]) == {"loss", "ndcg_at_10", "mrr_at_10", "recall_at_10"}
    assert results["dev"]["ndcg_at_10"] > results["chance"]["ndcg_at_10"] + 0.2
    assert not results["collapsed"]
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    model = bert.load(trained)
    assert model.pooling == Pooling("mean", True, 16, False)
    queries, documents = (model.embed([row[name] for row in rows]) for name in ("query", "positive"))
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    written = [line.split("\t") for line in (trained / "predictions/dev.tsv").read_text().splitlines()]
    assert written[0] == ["index", "cosine", "rank", "first"]
    cosines = [float(row[1]) for row in written[1:]]
    np.testing.assert_allclose(np.sum(queries * documents, axis=1), cosines, atol=2e-6)
    scores = model.score(rows)
    assert scores == pytest.approx({name: results["dev"][name] for name in scores})
    [answer] = model.predict(["red cat"])
    np.testing.assert_allclose(answer.embedding, model.embed("red cat"), atol=1e-6)
    assert model.predict([]) == []
    capsys.readouterr()
    assert predict([str(trained), "dev", "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/dev.tsv").read_bytes() == (trained / "predictions/dev.tsv").read_bytes()
    model.warm_up([8])


@pytest.mark.medium
def test_a_run_is_exported_with_its_pooling(trained: Path, tmp_path: Path) -> None:
    own = bert.load(trained)
    prompts = Pooling("mean", True, 16, False, "find: ", "passage: ")
    own = dataclasses.replace(own, pooling=prompts)
    own.save(tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].rsplit(".", 1)[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    again = bert.load(tmp_path / "out")
    assert again.pooling == own.pooling == prompts
    texts = ["red cat", "the blue bird " * 9]
    np.testing.assert_allclose(again.embed(texts), own.embed(texts), atol=1e-6)


@pytest.mark.slow
def test_pooling_is_that_of_the_initial_model(trained: Path, data: Path, tmp_path: Path, fails) -> None:
    published = bert.load(trained)
    published = dataclasses.replace(published, pooling=Pooling("cls", False, 12, True))
    published.save(tmp_path / "published")
    arguments = [f"--init={tmp_path / 'published'}", "--training.steps=1", "--training.eval_every=1"]
    folder = tmp_path / "run"
    base = ["--config=embedding", f"--data.dir={data}", f"--output_dir={folder}", "--data.max_length=16",
            "--training.epochs=null", "--training.batch_size=16"]  # fmt: skip
    assert main([*base, *arguments]) == 0
    assert bert.load(folder).pooling == Pooling("cls", False, 16, True)
    assert "its embedding.pooling is 'cls', here 'max'" in fails(main, *base, *arguments, "--embedding.pooling=max")
    assert (
        main([*base[:2], f"--output_dir={tmp_path / 'other'}", *base[3:], *arguments, "--embedding.pooling=max"]) == 0
    )
    assert bert.load(tmp_path / "other").pooling == Pooling("max", False, 16, True)


@pytest.mark.medium
def test_pairs_with_scores_are_trained_and_scored(tmp_path: Path) -> None:
    rows = [
        {"text_a": f"the {a} is here", "text_b": f"the {b} is here", "score": 5.0 * (a == b)}
        for a in WORDS[:6] for b in WORDS[:6]
    ]  # fmt: skip
    keys = dict(option.removeprefix("--").split("=") for option in OPTIONS if not option.startswith("--init"))
    settings = {name: yaml.safe_load(value) for name, value in keys.items()}
    settings |= {"optimizer.learning_rate": 1e-2, "embedding.matryoshka": None, "data.buckets": [16]}
    settings |= {"embedding.loss": "cosine", "data.score_range": [0, 5]}
    data = {"train": rows, "dev": rows}
    found = bert.finetune("embedding", init="none", output_dir=tmp_path / "run", overrides=settings, **data)
    assert set(found.results["dev"]) == {"loss", "spearman", "pearson"}
    assert found.results["main_metric"] == "spearman"
    assert found.results["dev"]["spearman"] > 0.2
    similar, different = found.model.similarity("the red is here", ["the red is here", "the blue is here"])[0]
    assert similar == pytest.approx(1, abs=1e-5)
    assert different < similar


@pytest.mark.slow
def test_an_interrupted_run_ends_the_same(trained: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    def train(folder: Path) -> int:
        return run(folder, data)

    assert_interrupted_run_ends_the_same(train, tmp_path / "run", trained, QueryDocumentRows, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--training.mesh=4x2x1"], ["--training.gradient_accumulation_steps=2"]])
def test_eight_devices_and_micro_batches_are_as_one(trained: Path, data: Path, tmp_path: Path, more: list[str]) -> None:
    """None of these changes the negatives."""
    command = [sys.executable, str(REPOSITORY / "finetune.py"), "--config=embedding", f"--data.dir={data}"]
    eight = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "BERT_NUM_DEVICES": ""}
    folder = tmp_path / "run"
    subprocess.run([*command, f"--output_dir={folder}", *OPTIONS, *more], env=eight, check=True, cwd=REPOSITORY)
    assert_same_but_for_rounding(folder, trained)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--embedding.matryoshka=16"], "embedding.matryoshka has 16, but embeddings have 16 numbers"),
        (["--embedding.num_negatives=2"], "embedding.num_negatives is 2, but no row of"),
        (["--training.tokens_per_batch=64"], "would depend on the lengths of texts"),
        (
            ["--embedding.loss=cosent"],
            "a query with a document, and embedding.loss cosent reads pairs with scores",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: list[str], told: str, data: Path, tmp_path: Path, fails) -> None:
    given = {argument.partition("=")[0] for argument in arguments}
    options = [option for option in OPTIONS if option.partition("=")[0] not in given]
    assert told in fails(
        main, "--config=embedding", f"--data.dir={data}", f"--output_dir={tmp_path / 'x'}", *options, *arguments
    )


@pytest.mark.slow
def test_every_way_to_train_works(trained: Path, data: Path, tmp_path: Path) -> None:
    """Adapters, frozen embeddings, triplets, and a teacher's scores."""
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    scored = [{**row, "score": [0.5, 0.1]} for row in rows if "negatives" in row]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    base = ["--config=embedding", f"--data.dir={data}", f"--init={trained}", "--data.max_length=16",
            "--data.buckets=16", "--training.steps=2", "--training.epochs=null", "--training.batch_size=16",
            "--training.eval_every=2"]  # fmt: skip
    for name, more in (("lora", ["--lora.rank=2"]), ("frozen", ["--num_frozen_layers=0"]),
                       ("triplet", ["--embedding.loss=triplet"]),
                       ("teacher", ["--embedding.loss=margin_mse", f"--data.dir={tmp_path}"])):  # fmt: skip
        assert main([*base, f"--output_dir={tmp_path / name}", *more]) == 0
        assert bert.load(tmp_path / name).embed(["red cat"]).shape == (1, 16)
