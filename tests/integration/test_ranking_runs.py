"""Embeddings and rerankers from files to vectors and ranked documents: trained, resumed, on devices, exported."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.data.rows import ChoiceRows, QueryDocumentRows
from bert.model.heads import BertForEmbedding
from bert.model.late_interaction import LateInteraction
from bert.model.pooling import Pooling
from tests.conftest import SMALL_MODEL
from tests.helpers import assert_interrupted_run_ends_the_same, assert_same_but_for_rounding, results_of
from tests.processes import finish, launch

WORDS = ["red", "green", "blue", "black", "white", "brown", "cat", "dog", "bird", "fish"]
OPTIONS = [*SMALL_MODEL, "--init=none", "--data.max_length=16", "--data.buckets=16", "--tokenizer.vocab_size=80",
           "--tokenizer.min_frequency=1", "--training.batch_size=16", "--training.eval_batch_size=8",
           "--training.steps=12", "--training.epochs=null", "--training.eval_every=6", "--training.checkpoint_every=4",
           "--training.log_every=3", "--optimizer.learning_rate=1e-2"]  # fmt: skip
MORE = {
    "embedding": ["--embedding.matryoshka=8"],
    "tokens": ["--embedding.pooling=tokens", "--embedding.dimensions=8", "--data.buckets=[8,12,16]",
               "--embedding.late_interaction.query_length=8", "--embedding.late_interaction.skipped_tokens=the",
               "--tokenizer.num_unused_tokens=2"],
    "reranker": ["--model.initializer_range=0.2"],
}  # fmt: skip
ROWS = {"embedding": QueryDocumentRows, "tokens": QueryDocumentRows, "reranker": ChoiceRows}


def described(count: int) -> list[dict[str, Any]]:
    """A query of two words, answered by the document that has both; every third row has a negative."""
    stream, rows = random.Random(count), []
    for number in range(count):
        first, second, other = (stream.choice(WORDS) for _ in range(3))
        negatives = {"negatives": [f"the {other} is there"]} if number % 3 == 0 else {}
        rows.append({"query": f"{first} {second}", "positive": f"the {second} {first} is here", **negatives})
    return rows


def ranked(count: int) -> list[dict[str, Any]]:
    """The document with the word of the query is right; every third row has two negatives."""
    stream, rows = random.Random(count), []
    for number in range(count):
        word, *others = stream.sample(WORDS[:6], 3)
        wrong = [f"the {other} {number % 7}" for other in others]
        negatives = wrong if number % 3 == 0 else wrong[0]
        rows.append({"query": f"{word} {number}", "positive": f"the {word} {number % 7}", "negatives": negatives})
    return rows


class Trained(NamedTuple):
    """A finished run of one kind and the folder of its data."""

    kind: str
    run: Path
    data: Path

    @property
    def options(self) -> list[str]:
        recipe = "embedding" if self.kind == "tokens" else self.kind
        return [f"--config={recipe}", f"--data.dir={self.data}", *OPTIONS, *MORE[self.kind]]

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.data / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(request.param)
    trained = Trained(request.param, folder / "run", folder / "queries")
    trained.data.mkdir()
    for split, count in (("train", 128), ("dev", 20)):
        rows = (ranked if trained.kind == "reranker" else described)(count)
        (trained.data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*trained.options, f"--output_dir={trained.run}"]) == 0
    return trained


of_embeddings = pytest.mark.parametrize("trained", ["embedding"], indirect=True)
of_rerankers = pytest.mark.parametrize("trained", ["reranker"], indirect=True)
of_tokens = pytest.mark.parametrize("trained", ["tokens"], indirect=True)
of_all = pytest.mark.parametrize("trained", ["embedding", "tokens", "reranker"], indirect=True)


@of_all
@pytest.mark.slow
def test_an_interrupted_run_ends_the_same(trained: Trained, tmp_path: Path, monkeypatch) -> None:
    def train(folder: Path) -> int:
        return main([*trained.options, f"--output_dir={folder}"])

    assert_interrupted_run_ends_the_same(train, tmp_path / "run", trained.run, ROWS[trained.kind], monkeypatch)


@of_all
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--training.mesh=4x2x1"], ["--training.gradient_accumulation_steps=2"]])
def test_eight_devices_and_micro_batches_are_as_one(trained: Trained, tmp_path: Path, more: list[str]) -> None:
    """None of these changes the negatives."""
    finish(launch("finetune.py", *trained.options, *more, f"--output_dir={tmp_path / 'run'}", devices=8))
    assert_same_but_for_rounding(tmp_path / "run", trained.run)


@of_embeddings
@pytest.mark.medium
def test_an_embedding_run_leaves_scores_and_the_trained_embedding(trained: Trained, caplog, tmp_path: Path) -> None:
    results = json.loads((trained.run / "results.json").read_text())
    assert set(results["dev"]) == {"loss", "ndcg_at_10", "mrr_at_10", "recall_at_10"}
    assert results["dev"]["ndcg_at_10"] > results["chance"]["ndcg_at_10"] + 0.2
    assert not results["collapsed"]
    rows, model = trained.rows("dev"), bert.load(trained.run)
    assert model.pooling == Pooling("mean", True, 16, False)
    queries, documents = (model.embed([row[name] for row in rows]) for name in ("query", "positive"))
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    written = [line.split("\t") for line in (trained.run / "predictions/dev.tsv").read_text().splitlines()]
    assert written[0] == ["index", "cosine", "rank", "first"]
    cosines = [float(row[1]) for row in written[1:]]
    np.testing.assert_allclose(np.sum(queries * documents, axis=1), cosines, atol=2e-6)
    [answer] = model.predict(["red cat"])
    np.testing.assert_allclose(answer.embedding, model.embed("red cat"), atol=1e-6)
    assert model.predict([]) == []
    caplog.clear()
    model.predict(["red cat " * 40])
    assert "1 text is cut to data.max_length" in caplog.text
    assert_scores_and_predictions_are_repeated(trained, model, tmp_path)


def assert_scores_and_predictions_are_repeated(trained: Trained, model: bert.Pretrained, folder: Path) -> None:
    scores = model.score(trained.rows("dev"))
    results = json.loads((trained.run / "results.json").read_text())
    assert scores == pytest.approx({name: results["dev"][name] for name in scores})
    assert predict([str(trained.run), "dev", "--output", str(folder / "again")]) == 0
    assert (folder / "again/dev.tsv").read_bytes() == (trained.run / "predictions/dev.tsv").read_bytes()
    model.warm_up([8])


@of_embeddings
@pytest.mark.medium
def test_an_embedding_run_is_exported_with_its_pooling(trained: Trained, tmp_path: Path) -> None:
    prompts = Pooling("mean", True, 16, False, "find: ", "passage: ")
    model = dataclasses.replace(bert.load(trained.run), pooling=prompts)
    model.save(tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].rsplit(".", 1)[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    again = bert.load(tmp_path / "out")
    assert again.pooling == prompts
    texts = ["red cat", "the blue bird " * 9]
    np.testing.assert_allclose(again.embed(texts), model.embed(texts), atol=1e-6)


@of_embeddings
@pytest.mark.slow
def test_pooling_is_that_of_the_initial_model(trained: Trained, tmp_path: Path, fails) -> None:
    published = dataclasses.replace(bert.load(trained.run), pooling=Pooling("cls", False, 12, True))
    published.save(tmp_path / "published")
    options = ["--config=embedding", f"--data.dir={trained.data}", "--data.max_length=16", "--training.epochs=null",
               "--training.batch_size=16", f"--init={tmp_path / 'published'}", "--training.steps=1",
               "--training.eval_every=1"]  # fmt: skip
    own, other, largest = f"--output_dir={tmp_path / 'run'}", tmp_path / "other", "--embedding.pooling=max"
    assert main([*options, own]) == 0
    assert bert.load(tmp_path / "run").pooling == Pooling("cls", False, 16, True)
    assert "embedding.pooling is 'cls', here 'max'" in fails(main, *options, own, largest)
    assert main([*options, f"--output_dir={other}", largest]) == 0
    assert bert.load(other).pooling == Pooling("max", False, 16, True)


@pytest.mark.medium
def test_pairs_with_scores_are_trained_and_scored(tmp_path: Path) -> None:
    rows = [
        {"text_a": f"the {a} is here", "text_b": f"the {b} is here", "score": 5.0 * (a == b)}
        for a in WORDS[:6] for b in WORDS[:6]
    ]  # fmt: skip
    keys = dict(option.removeprefix("--").split("=") for option in OPTIONS if not option.startswith("--init"))
    settings = {name: yaml.safe_load(value) for name, value in keys.items()}
    settings |= {"optimizer.learning_rate": 1e-2, "data.buckets": [16]}
    settings |= {"embedding.loss": "cosine", "data.score_range": [0, 5]}
    data = {"train": rows, "dev": rows}
    run = bert.finetune("embedding", init="none", output_dir=tmp_path / "run", overrides=settings, **data)
    assert set(run.results["dev"]) == {"loss", "spearman", "pearson"}
    assert run.results["main_metric"] == "spearman"
    assert run.results["dev"]["spearman"] > 0.2
    similar, different = run.model.similarity("the red is here", ["the red is here", "the blue is here"])[0]
    assert similar == pytest.approx(1, abs=1e-5)
    assert different < similar


@of_embeddings
@pytest.mark.medium
@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("--embedding.matryoshka=16", "embedding.matryoshka has 16"),
        ("--embedding.num_negatives=2", "embedding.num_negatives is 2"),
        ("--training.tokens_per_batch=64", "training.tokens_per_batch"),
        ("--embedding.loss=cosent", "embedding.loss cosent"),
        ("--embedding.pooling=splade", "embedding.matryoshka is [8], but embedding.pooling is splade"),
    ],
)
def test_settings_that_do_not_fit_are_named(trained: Trained, argument: str, named: str, tmp_path: Path, fails) -> None:
    options = [option for option in trained.options if option.partition("=")[0] != argument.partition("=")[0]]
    assert named in fails(main, *options, f"--output_dir={tmp_path / 'x'}", argument)


@of_embeddings
@pytest.mark.slow
def test_every_way_to_train_an_embedding_works(trained: Trained, tmp_path: Path) -> None:
    """Adapters, frozen embeddings, triplets, and a teacher's scores."""
    scored = [{**row, "score": [0.5, 0.1]} for row in trained.rows("train") if "negatives" in row]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    base = ["--config=embedding", f"--data.dir={trained.data}", f"--init={trained.run}", "--data.max_length=16",
            "--data.buckets=16", "--training.steps=2", "--training.epochs=null", "--training.batch_size=16",
            "--training.eval_every=2"]  # fmt: skip
    for name, more in (("lora", ["--lora.rank=2"]), ("frozen", ["--num_frozen_layers=0"]),
                       ("triplet", ["--embedding.loss=triplet"]),
                       ("taught words", ["--embedding.loss=margin_mse", f"--data.dir={tmp_path}",
                                         "--embedding.pooling=splade", "--embedding.normalize=null"]),
                       ("teacher", ["--embedding.loss=kl_divergence", f"--data.dir={tmp_path}"])):  # fmt: skip
        assert main([*base, f"--output_dir={tmp_path / name}", *more]) == 0
        model = bert.load(tmp_path / name)
        assert model.embed("red cat").shape == (model.config.vocab_size if name == "taught words" else 16,)


@of_embeddings
@pytest.mark.slow
def test_a_sparse_encoder_is_trained_scored_and_exported(trained: Trained, tmp_path: Path) -> None:
    """A stronger regularizer leaves fewer words, and dev is scored by inner products, as `search` compares."""
    options = [option for option in trained.options if "matryoshka" not in option]
    words = {}
    for name, weight in (("weak", "1e-4"), ("strong", "1")):
        more = [f"--embedding.{side}_flops_weight={weight}" for side in ("query", "document")]
        assert main([*options, "--embedding.pooling=splade", *more, f"--output_dir={tmp_path / name}"]) == 0
        last = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()][-2:]
        words[name] = [line["document_words"] for line in last if line["split"] == "train"]
    assert words["strong"] < words["weak"]
    run = tmp_path / "weak"
    results, model = json.loads((run / "results.json").read_text()), bert.load(run)
    assert results["dev"]["ndcg_at_10"] > results["chance"]["ndcg_at_10"] + 0.2
    assert model.pooling == Pooling("max", False, 16, False, num_log1p=1, similarity="dot")
    rows = trained.rows("dev")
    queries, documents = (model.embed([row[name] for row in rows]) for name in ("query", "positive"))
    lines = [line.split("\t") for line in (run / "predictions/dev.tsv").read_text().splitlines()]
    assert lines[0] == ["index", "dot", "rank", "first"]
    np.testing.assert_allclose(np.sum(queries * documents, axis=1), [float(row[1]) for row in lines[1:]], rtol=1e-4)
    assert_scores_and_predictions_are_repeated(trained._replace(run=run), model, tmp_path)
    model.save(tmp_path / "out")
    np.testing.assert_allclose(bert.load(tmp_path / "out").embed(["red cat"]), model.embed(["red cat"]), atol=1e-5)


@of_tokens
@pytest.mark.medium
def test_late_interaction_is_trained_scored_and_exported(trained: Trained, tmp_path: Path) -> None:
    """Dev is scored by MaxSim, as `search` and `rank` compare, and better than by random weights."""
    results, model = json.loads((trained.run / "results.json").read_text()), bert.load(trained.run)
    first = model.replace(params=BertForEmbedding(model.config).init(jax.random.key(1), np.ones((1, 8), int))["params"])
    rows = trained.rows("dev")
    assert results["dev"]["ndcg_at_10"] > first.score(rows)["ndcg_at_10"] + 0.1
    interaction = LateInteraction(8, None, 8, skipped_tokens=("the",))
    expected = Pooling("tokens", True, 16, query_prompt="[unused0] ", document_prompt="[unused1] ",
                       dense=model.pooling.dense, similarity="maxsim", interaction=interaction)  # fmt: skip
    assert model.pooling == expected and model.pooling.dense[0].kernel.shape == (16, 8)
    queries = model.embed([row["query"] for row in rows], prompt="query")
    assert {query.shape for query in queries} == {(8, 8)}
    similarities = model.similarity([row["query"] for row in rows], [row["positive"] for row in rows])
    lines = [line.split("\t") for line in (trained.run / "predictions/dev.tsv").read_text().splitlines()]
    assert lines[0] == ["index", "maxsim", "rank", "first"]
    np.testing.assert_allclose(np.diag(similarities), [float(row[1]) for row in lines[1:]], rtol=1e-4)
    assert_scores_and_predictions_are_repeated(trained, model, tmp_path)
    [answer] = model.predict(["red cat"])
    np.testing.assert_allclose(answer.embedding, model.embed("red cat", prompt="query"), atol=1e-6)
    documents = ["the cat red is here", "the blue bird is here"]
    assert [document.number for document in model.rank("red cat", documents)] == [0, 1]
    assert model.search("red cat", documents).indices.tolist() == [0, 1]
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert again.pooling == model.pooling
    for text, role in (("red cat", "query"), (documents[0], "document")):
        np.testing.assert_allclose(again.embed(text, prompt=role), model.embed(text, prompt=role), atol=1e-6)
    metrics = again.evaluate(rows).metrics
    assert metrics == pytest.approx({name: results["dev"][name] for name in metrics})


@of_tokens
@pytest.mark.slow
def test_late_interaction_is_trained_on_with_its_projection(trained: Trained, tmp_path: Path, fails) -> None:
    """From a run, from an exported folder and with adapters; with a teacher, triplets and pairs with scores."""
    bert.load(trained.run).save(tmp_path / "out")
    scored = [{**row, "score": [0.5, 0.1]} for row in trained.rows("train") if "negatives" in row]
    pairs = [{"text_a": row["query"], "text_b": row["positive"], "score": 1.0 * (number % 2)}
             for number, row in enumerate(trained.rows("train"))]  # fmt: skip
    for name, rows in (("scored", scored), ("pairs", pairs)):
        (tmp_path / name).mkdir()
        for split in ("train", "dev"):
            (tmp_path / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = ["--config=embedding", f"--data.dir={trained.data}", "--data.max_length=16", "--data.buckets=16",
            "--training.steps=1", "--training.epochs=null", "--training.batch_size=16", "--training.eval_every=1",
            "--optimizer.learning_rate=1e-9", f"--init={trained.run}"]  # fmt: skip
    before = bert.load(trained.run)
    for name, more in (("run", []), ("folder", [f"--init={tmp_path / 'out'}"]), ("lora", ["--lora.rank=2"]),
                       ("triplet", ["--embedding.loss=triplet"]),
                       ("teacher", ["--embedding.loss=kl_divergence", f"--data.dir={tmp_path / 'scored'}"]),
                       ("pairs", ["--embedding.loss=cosent", f"--data.dir={tmp_path / 'pairs'}"])):  # fmt: skip
        assert main([*base, f"--output_dir={tmp_path / name / 'of'}", *more]) == 0
        after = bert.load(tmp_path / name / "of")
        assert after.pooling.interaction == before.pooling.interaction
        np.testing.assert_allclose(after.embed("red cat"), before.embed("red cat"), atol=1e-5)
    said = fails(main, *base, f"--output_dir={tmp_path / 'x'}", "--data.max_length=8", "--data.long_texts=windows")
    assert "data.long_texts is windows, but embedding.pooling is tokens" in said
    said = fails(main, *base, f"--output_dir={tmp_path / 'x'}", "--embedding.late_interaction.query_length=17")
    assert "queries have up to 17 tokens (embedding.late_interaction), but data.max_length is 16" in said


@of_rerankers
@pytest.mark.medium
def test_a_reranker_is_scored_ranks_and_is_exported(trained: Trained, tmp_path: Path) -> None:
    results = json.loads((trained.run / "results.json").read_text())
    assert set(results["dev"]) == {"loss", "ndcg_at_10", "mrr_at_10"}
    assert (results["main_metric"], results["collapsed"]) == ("ndcg_at_10", False)
    model, row = bert.load(trained.run), trained.rows("dev")[3]
    documents = [row["positive"], *row["negatives"]]
    order = model.rank(row["query"], documents)
    answers = model.predict([(row["query"], text) for text in documents])
    assert [match.score for match in order] == pytest.approx(sorted((a.score for a in answers), reverse=True))
    written = [line.split("\t") for line in (trained.run / "predictions/dev.tsv").read_text().splitlines()]
    of_row = [float(line[2]) for line in written if line[0] == "3"]
    np.testing.assert_allclose([answer.score for answer in answers], of_row, atol=2e-5)
    assert_scores_and_predictions_are_repeated(trained, model, tmp_path)
    model.save(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], len(config["id2label"])) == (["BertForSequenceClassification"], 1)
    tokenizer_config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert bert.load(tmp_path / "out").data.max_length == model.data.max_length == tokenizer_config["model_max_length"]
    again = bert.load(tmp_path / "out").rank(row["query"], documents)
    assert [match.number for match in again] == [match.number for match in order]
    assert [match.score for match in again] == pytest.approx([match.score for match in order], abs=1e-5)


@of_rerankers
@pytest.mark.slow
def test_a_reranker_is_trained_on_with_its_head(trained: Trained, tmp_path: Path) -> None:
    """Its first step already has what the run before learned, which a new head would not."""
    options = [f"--init={trained.run}", "--data.max_length=16", "--data.buckets=16", "--training.steps=1",
               "--training.epochs=null", "--optimizer.learning_rate=1e-9", f"--output_dir={tmp_path}"]  # fmt: skip
    assert main(["--config=reranker", f"--data.dir={trained.data}", *options]) == 0
    before, after = (results_of(run)["dev"] for run in (trained.run, tmp_path))
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-3)
