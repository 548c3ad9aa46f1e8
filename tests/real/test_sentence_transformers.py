"""Exported embedding runs read by sentence-transformers, and one of its cross-encoders read here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.config import EmbeddingConfig, TaskDataConfig
from bert.errors import UserError
from bert.training.finetuning.ranking_losses import embedding_loss
from tests.real.family_cases import CASES
from tests.real.hf_models import drawn, torch, transformers
from tests.tiny_models import EMBEDDING_RECIPES, embedding_recipe_run

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


def set_keys(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


TEXTS = [
    "A man plays the guitar.",
    "someone makes Music",
    "The shares fell by 2%. " * 30,
    "ünïcödé, 中文",
    "a",
]


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_a_trained_folder_gives_the_same_embeddings(pooling: str, library: Any, shared: Path, tmp_path: Path) -> None:
    rows = [{"query": f"number {n}", "positive": f"the digits {n} of a number"} for n in range(16)]
    overrides = {"training.batch_size": 8, "training.steps": 2, "training.epochs": None, "data.max_length": 64,
                 "embedding.pooling": pooling, "embedding.normalize": pooling != "max",
                 "embedding.query_prompt": "find: " if pooling == "cls" else None}  # fmt: skip
    model = str(shared / "models" / "all-MiniLM-L6-v2")
    run = bert.finetune("embedding", init=model, train=rows, output_dir=tmp_path / "run", overrides=overrides)
    run.model.save(tmp_path / "out")
    theirs = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert theirs.max_seq_length == 64
    ours = run.model.embed(TEXTS)
    np.testing.assert_allclose(theirs.encode(TEXTS), ours, atol=1e-5)
    prompted = theirs.encode(TEXTS, prompt_name="query" if pooling == "cls" else None)
    np.testing.assert_allclose(prompted, run.model.embed(TEXTS, prompt="query"), atol=1e-5)
    untrained = bert.load(model).embed(TEXTS)
    assert pooling != "mean" or np.abs(ours - untrained).max() > 1e-4
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.json")}
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config.json"} <= names
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["BertModel"]


@pytest.mark.parametrize("recipe", EMBEDDING_RECIPES)
def test_runs_of_published_recipes_have_their_prompts(recipe: str, library: Any, tmp_path: Path) -> None:
    run = embedding_recipe_run(recipe, tmp_path)
    run.model.save(tmp_path / "out")
    theirs = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for prompt, encode in (("query", theirs.encode_query), ("document", theirs.encode_document), (None, theirs.encode)):
        np.testing.assert_allclose(run.model.embed(TEXTS, prompt=prompt), encode(TEXTS), atol=1e-5)


def test_a_graph_returns_the_same_embeddings(library: Any, shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The README of the export, executed."""
    pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    model = str(shared / "models" / "all-MiniLM-L6-v2")
    bert.load(model).save(tmp_path / "out", "onnx")
    blocks = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1:]
    monkeypatch.chdir(tmp_path / "out")
    code = "".join(block.split("```")[0] for block in blocks)
    assert '["one text", "another text"]' in code
    result: dict[str, Any] = {"TEXTS": TEXTS}
    exec(code.replace('["one text", "another text"]', "TEXTS"), result)
    theirs = library.SentenceTransformer(model, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(result["embeddings"], theirs, atol=1e-5)


KINDS = ["dense", "modes", "sqrt", "weighted", "last", "prompt", "cls_prompt", "truncated", "default"]


@pytest.mark.parametrize("kind", [*KINDS, "dot", "euclidean", "manhattan"])
def test_every_module_and_setting_gives_the_same_embeddings(
    kind: str, library: Any, shared: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    encoder = library.SentenceTransformer(str(shared / "models" / "all-MiniLM-L6-v2"), device="cpu")[0]
    modes = {"modes": ("weightedmean", "cls", "mean"), "sqrt": "mean_sqrt_len_tokens", "weighted": "weightedmean"}
    modes |= {"last": "lasttoken", "cls_prompt": ("cls", "max", "lasttoken"), "dense": "cls"}
    pooling = library.models.Pooling(384, pooling_mode=modes.get(kind, "mean"), include_prompt="prompt" not in kind)
    more = []
    if kind == "dense":  # as LaBSE, and a second layer without bias, as EmbeddingGemma
        more = [
            library.models.Dense(384, 96),
            library.models.Dense(96, 48, bias=False, activation_function=torch.nn.Identity()),
        ]
    prompts = {"query": "find this: ", "document": "page: "}
    settings = {"prompts": prompts, "truncate_dim": 20 if kind == "truncated" else None, "device": "cpu"}
    settings["default_prompt_name"] = "document" if kind == "default" else None
    settings["similarity_fn_name"] = "cosine" if kind in KINDS else kind
    more += [library.models.Normalize()] if kind in KINDS else []
    theirs = library.SentenceTransformer(modules=[encoder, pooling, *more], **settings)
    theirs.save(str(tmp_path / "theirs"))
    ours = bert.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    for model in (theirs, again):
        for name in (None, "query", "document"):
            expected = model.encode(TEXTS, prompt_name=name)
            np.testing.assert_allclose(ours.embed(TEXTS, prompt=name), expected, atol=1e-5)
        expected = model.similarity(model.encode(TEXTS[:3]), model.encode(TEXTS))
        np.testing.assert_allclose(
            ours.similarity(TEXTS[:3], TEXTS), expected, atol=1e-5 * np.abs(expected.numpy()).max()
        )
    many = ["find", "this one"] * 150
    np.testing.assert_allclose(ours.embed(many, 4, "query"), theirs.encode(many, prompt_name="query"), atol=1e-5)


def sparse_encoder(library: Any, shared: Path, folder: Path, mode: str = "max", activation: str = "relu") -> Any:
    """Writes a sparse encoder with random weights to ``theirs`` in a folder."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models" / "all-MiniLM-L6-v2")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, initializer_range=0.1
    )
    for part in (transformers.BertForMaskedLM(config), tokenizer):
        part.save_pretrained(folder / "mlm")
    splade = library.sparse_encoder.modules.SpladePooling(mode, activation)
    modules = [library.sparse_encoder.modules.MLMTransformer(str(folder / "mlm")), splade]
    model = library.SparseEncoder(modules=modules, prompts={"query": "find this: "}, device="cpu")
    model.save_pretrained(str(folder / "theirs"))
    return model


@pytest.mark.parametrize(("mode", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")])
def test_a_sparse_encoder_weights_the_same_words(
    mode: str, activation: str, library: Any, shared: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A folder of SparseEncoder, both engines, our export read by it, and the README of the graph."""
    theirs = sparse_encoder(library, shared, tmp_path, mode, activation)
    said: list[str] = []
    ours = bert.load(tmp_path / "theirs", said.append)
    assert len(said) == 1, "no setting is reported as not applied"
    ours.save(tmp_path / "ours")
    again = library.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    graph = bert.load(tmp_path / "theirs", engine="onnxruntime")
    for model in (theirs, again):
        for name in (None, "query"):
            expected = model.encode(TEXTS, prompt_name=name, convert_to_sparse_tensor=False).numpy()
            assert 0.2 < (expected > 0).mean() < 0.99
            for engine in (ours, graph):
                np.testing.assert_allclose(engine.embed(TEXTS, prompt=name), expected, atol=1e-4, rtol=1e-5)
        expected = model.similarity(model.encode(TEXTS[:3]), model.encode(TEXTS)).numpy()
        np.testing.assert_allclose(ours.similarity(TEXTS[:3], TEXTS), expected, rtol=1e-5)
    ours.save(tmp_path / "graph", "onnx")
    blocks = (tmp_path / "graph" / "README.md").read_text().split("```python\n")[1:]
    monkeypatch.chdir(tmp_path / "graph")
    result: dict[str, Any] = {"TEXTS": TEXTS}
    code = "".join(block.split("```")[0] for block in blocks)
    exec(code.replace('["one text", "another text"]', "TEXTS"), result)
    np.testing.assert_allclose(result["embeddings"], ours.embed(TEXTS), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("loss", ["in_batch", "margin_mse", "kl_divergence"])
def test_the_loss_of_a_sparse_encoder_is_the_same(loss: str, library: Any, shared: Path, tmp_path: Path) -> None:
    """The ranking loss, both FLOPS regularizers, and the gradient of the embeddings."""
    theirs, losses = sparse_encoder(library, shared, tmp_path), library.sparse_encoder.losses
    random = np.random.default_rng(0)
    vectors = random.normal(size=(6, 3, 50)).clip(0).astype(np.float32)
    scores = random.normal(size=(6, 2)).astype(np.float32)
    ranking, labels = {
        "in_batch": (losses.SparseMultipleNegativesRankingLoss(theirs, scale=1.0), None),
        "margin_mse": (losses.SparseMarginMSELoss(theirs), torch.tensor(scores[:, 0] - scores[:, 1])),
        "kl_divergence": (losses.SparseDistillKLDivLoss(theirs, temperature=1.0), torch.tensor(scores)),
    }[loss]
    columns = [torch.tensor(vectors[:, text], requires_grad=True) for text in range(3)]
    parts = [ranking.compute_loss_from_embeddings(columns, labels)]
    flops = losses.FlopsLoss(theirs).compute_loss_from_embeddings
    parts.append(0.02 * flops(columns[0]) + 0.05 * flops(torch.cat(columns[1:])))
    sum(parts).backward()
    batch = {
        "query_numbers": np.arange(6),
        "document_numbers": np.arange(12).reshape(6, 2),
        "weights": np.ones(6, np.float32),
        "labels": scores,
    }
    weights = {"query_flops_weight": 0.02, "document_flops_weight": 0.05}
    ours = embedding_loss(EmbeddingConfig(loss=loss, pooling="splade", **weights), None)

    def values(vectors: Any) -> tuple[Any, Any]:
        sums = dict(zip(ours.metrics, ours.sums(vectors.reshape(6, -1), batch), strict=True))
        found = [total / weight for name, (total, weight) in sums.items() if name.endswith("_loss")]
        return sum(found), found

    gradient, found = jax.grad(values, has_aux=True)(jnp.asarray(vectors))
    np.testing.assert_allclose(found, [part.item() for part in parts], rtol=1e-5)
    expected = np.stack([column.grad.numpy() for column in columns], axis=1)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_trained_sparse_encoder_gives_the_same_embeddings(library: Any, shared: Path, tmp_path: Path) -> None:
    """Trained on from a published folder, whose pooling and prompt are the defaults, and exported."""
    sparse_encoder(library, shared, tmp_path)
    rows = [{"query": f"number {n}", "positive": f"the digits {n} of a number"} for n in range(16)]
    overrides = {"training.batch_size": 8, "training.steps": 4, "training.epochs": None, "data.max_length": 64,
                 "optimizer.learning_rate": 1e-2, "training.log_every": 1}  # fmt: skip
    folder = str(tmp_path / "theirs")
    run = bert.finetune("embedding", init=folder, train=rows, output_dir=tmp_path / "run", overrides=overrides)
    assert run.model.pooling == replace(bert.load(folder).pooling, max_length=64)
    run.model.save(tmp_path / "out")
    theirs = library.SparseEncoder(str(tmp_path / "out"), device="cpu")
    for name in (None, "query"):
        expected = theirs.encode(TEXTS, prompt_name=name, convert_to_sparse_tensor=False).numpy()
        np.testing.assert_allclose(run.model.embed(TEXTS, prompt=name), expected, atol=1e-4, rtol=1e-5)
    assert np.abs(run.model.embed(TEXTS) - bert.load(folder).embed(TEXTS)).max() > 1e-2
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ramp = [line["flops_loss"] for line in lines if line["split"] == "train"]
    assert ramp[0] == 0 < ramp[1], "the weight grows from 0 over the first third of the steps"


def test_an_exported_cross_encoder_ranks_alike(library: Any, shared: Path, tmp_path: Path) -> None:
    rows = [{"query": f"number {n}", "positive": f"the digits {n}", "negatives": f"a {n % 3}"} for n in range(16)]
    overrides = {"training.batch_size": 8, "training.steps": 2, "training.epochs": None, "data.max_length": 64}
    model = str(shared / "models" / "all-MiniLM-L6-v2")
    run = bert.finetune("reranker", init=model, train=rows, output_dir=tmp_path / "run", overrides=overrides)
    run.model.save(tmp_path / "out")
    theirs = library.CrossEncoder(str(tmp_path / "out"), device="cpu", max_length=64)
    expected = theirs.predict([("number 3", text) for text in TEXTS], activation_fn=torch.nn.Identity())
    ranked = run.model.rank("number 3", TEXTS)
    assert [document.number for document in ranked] == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([document.score for document in ranked], -np.sort(-expected), atol=1e-5)


def test_a_cross_encoder_has_the_same_scores(library: Any, shared: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = str(shared / "models" / "all-MiniLM-L6-v2")
    theirs = library.CrossEncoder(model, num_labels=1, device="cpu", max_length=8, prompts={"query": "digits"})
    theirs.save_pretrained(str(tmp_path / "out"))
    pairs = [("number 3", text) for text in (*TEXTS, "the house of the day is far away from the sea")]
    log: list[str] = []

    def check() -> None:
        model = bert.load(tmp_path / "out", log.append)
        theirs = library.CrossEncoder(str(tmp_path / "out"), device="cpu")
        np.testing.assert_allclose([answer.score for answer in model.predict(pairs)], theirs.predict(pairs), atol=1e-5)

    check()
    whole = [answer.score for answer in bert.load(tmp_path / "out").replace(data=TaskDataConfig()).predict(pairs)]
    assert abs(whole[-1] - theirs.predict(pairs)[-1]) > 1e-3, "the last pair is cut"
    assert not any("not applied" in line for line in log)
    bert.load(tmp_path / "out").save(tmp_path / "again")
    np.testing.assert_allclose(
        library.CrossEncoder(str(tmp_path / "again")).predict(pairs), theirs.predict(pairs), atol=1e-5
    )
    set_keys(tmp_path / "out/config_sentence_transformers.json", activation_fn="torch.nn.modules.linear.Identity")
    check()
    bert.load(tmp_path / "out").save(tmp_path / "logits")
    logits = library.CrossEncoder(str(tmp_path / "logits")).predict(pairs)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), theirs.predict(pairs), atol=1e-5)
    set_keys(tmp_path / "out/config_sentence_transformers.json", activation_fn=None)
    check()
    set_keys(tmp_path / "out/sentence_bert_config.json", max_seq_length=11, do_lower_case=True)
    check()
    set_keys(tmp_path / "out/config_sentence_transformers.json", default_prompt_name="query")
    bert.load(tmp_path / "out", log.append)
    assert any("do_lower_case is true, which is not applied" in line for line in log)
    assert any("the prompt query is not applied: put it before the first text of a pair" in line for line in log)
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    score = {
        "idx": 1,
        "name": "1",
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.LogitScore",
    }
    (tmp_path / "out/modules.json").write_text(json.dumps([*modules, score]))
    with pytest.raises(UserError, match="lists Transformer, LogitScore: a cross-encoder needs Transformer alone"):
        bert.load(tmp_path / "out")


def test_texts_are_lower_cased_except_special_tokens(library: Any, shared: Path, tmp_path: Path) -> None:
    theirs = library.SentenceTransformer(str(shared / "models" / "all-MiniLM-L6-v2"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "out"))
    settings = json.loads((tmp_path / "out/tokenizer.json").read_text())
    settings["normalizer"]["lowercase"] = False
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(settings))
    set_keys(tmp_path / "out/tokenizer_config.json", do_lower_case=False)
    set_keys(tmp_path / "out/sentence_bert_config.json", max_seq_length=30, do_lower_case=True)
    texts = ["ΟΔΟΣ ΣΟΦΟΣ", "The capital is [MASK].", "[SEP] A", "PLAIN Words", "Élan"]
    expected = library.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts)
    model = bert.load(tmp_path / "out")
    np.testing.assert_allclose(model.embed(texts), expected, atol=1e-5)
    model.save(tmp_path / "again")
    again = library.SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(texts)
    np.testing.assert_allclose(again, expected, atol=1e-5)


@pytest.mark.parametrize("include", [True, False])
def test_a_default_prompt_precedes_the_first_text_of_a_pair(
    include: bool, library: Any, shared: Path, tmp_path: Path
) -> None:
    prompts = {"query": "question: ", "passage": "passage: ", "Clustering": "cluster: "}
    theirs = library.SentenceTransformer(
        str(shared / "models" / "all-MiniLM-L6-v2"), device="cpu", prompts=prompts, default_prompt_name="query"
    )
    theirs.set_pooling_include_prompt(include)
    theirs.save_pretrained(str(tmp_path / "out"))
    log: list[str] = []
    model = bert.load(tmp_path / "out", log.append)
    texts = [("number 3", "a house"), ("a", "the digits 3"), *TEXTS]
    np.testing.assert_allclose(model.embed(texts), np.stack([theirs.encode([text])[0] for text in texts]), atol=1e-5)
    assert any("the prompts Clustering, passage are not applied: put them before your texts" in line for line in log)
    set_keys(tmp_path / "out/config_sentence_transformers.json", prompts=prompts)
    model = bert.load(tmp_path / "out", log.append)
    assert any("the prompts Clustering are not applied" in line for line in log)
    assert any("the prompt passage is used for documents, unlike in sentence-transformers" in line for line in log)
    np.testing.assert_allclose(
        model.embed(TEXTS, prompt="document"), theirs.encode(TEXTS, prompt_name="passage"), atol=1e-5
    )


def test_a_folder_of_an_mpnet(tmp_path: Path) -> None:
    """In the layout of all-mpnet-base-v2: the class of an MLM is declared, a bare encoder is stored."""
    reference = drawn(tmp_path / "model", "Bert", "mpnet", **CASES["mpnet"].settings)
    content = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**content, "architectures": ["MPNetForMaskedLM"]}))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(modules)
    ]
    (tmp_path / "model/1_Pooling").mkdir()
    for name, data in {
        "modules.json": listed,
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True},
    }.items():
        (tmp_path / "model" / name).write_text(json.dumps(data))
    model = bert.load(tmp_path / "model")
    assert (model.architecture, model.pooling.mode, model.pooling.normalize) == ("Bert", "mean", True)
    texts = [*TEXTS, "the house of the day " * 60]
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(
        texts, padding=True, truncation=True, max_length=100, return_tensors="pt"
    )
    with torch.no_grad():
        states = reference(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    np.testing.assert_allclose(model.embed(texts), means, atol=1e-4)
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/modules.json").read_text())[2]["type"].endswith("Normalize")
    np.testing.assert_array_equal(bert.load(tmp_path / "out").embed(texts), model.embed(texts))
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    for folder in ("model", "out"):
        theirs = library.SentenceTransformer(str(tmp_path / folder), device="cpu")
        np.testing.assert_allclose(theirs.encode(texts), model.embed(texts), atol=1e-5)
