"""Routers and tables of sentence-transformers, read here, and our exports of them, read there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from tests.real.hf_models import HOSTILE, torch, transformers

pytestmark = pytest.mark.real

TEXTS = [*HOSTILE[1:], "A man plays the guitar, and the man plays on.", "The shares fell by 2%. " * 150, "a"]
"""Texts with tokens: sentence-transformers fails on a batch without any."""

DENSE = {"atol": 1e-4, "rtol": 1e-4}
TABLE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


@pytest.fixture
def minilm(shared: Path) -> Path:
    """Has the vocabulary of all random models."""
    return shared / "models" / "all-MiniLM-L6-v2"


def drawn_encoder(folder: Path, minilm: Path, kind: str = "BertModel", width: int = 32) -> str:
    """Writes a random encoder of two layers."""
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, initializer_range=0.1,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(len(folder.name))
    for part in (getattr(transformers, kind)(config), transformers.AutoTokenizer.from_pretrained(minilm)):
        part.save_pretrained(folder)
    return str(folder)


def modules_of(library: Any) -> Any:
    return library.sentence_transformer.modules


def static_embedding(library: Any, minilm: Path, width: int = 24, length: int | None = None) -> Any:
    modules = modules_of(library)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)._tokenizer
    tokenizer.no_truncation()
    if length is not None:
        tokenizer.enable_truncation(length)
    table = np.random.default_rng(0).normal(size=(30522, width)).astype(np.float32)
    return modules.StaticEmbedding(tokenizer, embedding_weights=table)


def dense_modules(library: Any, folder: Path, minilm: Path, width: int = 24) -> list[Any]:
    """An encoder, the mean of its tokens, and a dense layer."""
    models = modules_of(library)
    encoder = models.Transformer(drawn_encoder(folder, minilm))
    return [encoder, models.Pooling(32), models.Dense(32, width)]


def inference_free(library: Any, folder: Path, minilm: Path, **settings: Any) -> Any:
    """A sparse encoder whose queries have the weights of a table, as OpenSearch publishes them."""
    modules = library.sparse_encoder.modules
    encoder = modules.MLMTransformer(drawn_encoder(folder, minilm, "BertForMaskedLM"))
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=30522).astype(np.float32))
    query = modules.SparseStaticEmbedding(encoder.tokenizer, weight=weights, frozen=True)
    documents = [encoder, modules.SpladePooling("max", "log1p_relu")]
    router = modules.Router.for_query_document([query], documents, **settings)
    return library.SparseEncoder(modules=[router], similarity_fn_name="dot", device="cpu")


def two_encoders(library: Any, folder: Path, minilm: Path, **settings: Any) -> Any:
    """Queries and documents with different encoders, lengths and layers."""
    sides = [dense_modules(library, folder / name, minilm) for name in ("q", "documents")]
    sides[0][0].max_seq_length = 20
    router = modules_of(library).Router.for_query_document(*sides, **settings)
    prompts = {"query": "find this: ", "document": "page: "}
    modules = [router, modules_of(library).Normalize()]
    return library.SentenceTransformer(modules=modules, prompts=prompts, truncate_dim=20, device="cpu")


def one_encoder(library: Any, folder: Path, minilm: Path, **settings: Any) -> Any:
    """Queries and documents with one encoder and different dense layers."""
    models, (encoder, pooling, dense) = (
        modules_of(library),
        dense_modules(library, folder / "both", minilm),
    )
    router = models.Router.for_query_document(
        [encoder, pooling, models.Dense(32, 24)], [encoder, pooling, dense, models.Normalize()], **settings
    )
    return library.SentenceTransformer(modules=[router], device="cpu")


def heads_after_an_encoder(library: Any, folder: Path, minilm: Path, **settings: Any) -> Any:
    """A Router after the encoder, as Asym was used."""
    models, (encoder, pooling, dense) = (
        modules_of(library),
        dense_modules(library, folder / "both", minilm),
    )
    router = models.Router.for_query_document([models.Dense(32, 24)], [dense], **settings)
    return library.SentenceTransformer(modules=[encoder, pooling, router], device="cpu")


def static_queries(library: Any, folder: Path, minilm: Path, **settings: Any) -> Any:
    """The example of the documentation of Router."""
    documents = dense_modules(library, folder / "documents", minilm)
    router = modules_of(library).Router.for_query_document([static_embedding(library, minilm)], documents, **settings)
    return library.SentenceTransformer(modules=[router, modules_of(library).Normalize()], device="cpu")


ROUTERS = (inference_free, two_encoders, one_encoder, heads_after_an_encoder, static_queries)


def encoded(model: Any, texts: list[str], role: str | None) -> np.ndarray:
    encode = {None: model.encode, "query": model.encode_query, "document": model.encode_document}[role]
    vectors = encode(texts)
    return vectors.to_dense().numpy() if hasattr(vectors, "to_dense") else vectors


def loaded(library: Any, theirs: Any, folder: Path) -> Any:
    return getattr(library, type(theirs).__name__)(str(folder), device="cpu")


@pytest.mark.parametrize("make", ROUTERS)
def test_each_route_gives_the_same_embeddings(make: Any, library: Any, minilm: Path, tmp_path: Path) -> None:
    """Their folder read here, both engines, and our export read by both."""
    theirs = make(library, tmp_path, minilm)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    said: list[str] = []
    ours = bert.load(tmp_path / "theirs", said.append)
    assert not [text for text in said if "not loaded" in text or "not applied" in text]
    ours.save(tmp_path / "ours")
    again = bert.load(tmp_path / "ours")
    graphs = [bert.load(tmp_path / "theirs", engine="onnxruntime") for _ in range(2)]  # the second one from a record
    for model in (theirs, loaded(library, theirs, tmp_path / "ours")):
        for role in (None, "query", "document"):
            expected = encoded(model, TEXTS, role)
            for engine in (ours, again, *graphs):
                np.testing.assert_allclose(engine.embed(TEXTS, prompt=role), expected, **DENSE)
        queries, documents = encoded(model, TEXTS[:3], "query"), encoded(model, TEXTS, "document")
        expected = model.similarity(queries, documents).numpy()
        np.testing.assert_allclose(ours.similarity(TEXTS[:3], TEXTS), expected, rtol=1e-3, atol=1e-4)
    found = ours.search(TEXTS[:3], TEXTS, top_k=4)
    np.testing.assert_allclose(found.scores, -np.sort(-expected, axis=1)[:, :4], rtol=1e-3, atol=1e-4)
    assert np.abs(ours.embed(TEXTS, prompt="query") - ours.embed(TEXTS, prompt="document")).max() > 0.1
    is_shared = make in (one_encoder, heads_after_an_encoder)
    assert (tmp_path / "ours/query/modules.json").is_file() != is_shared, "a shared encoder is written once"


def test_the_layout_of_published_inference_free_models(library: Any, minilm: Path, tmp_path: Path) -> None:
    """The encoder of documents is in the root folder, where transformers reads it."""
    theirs = inference_free(library, tmp_path, minilm)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    folder, file = tmp_path / "theirs", tmp_path / "theirs/router_config.json"
    [encoder] = [name for name in json.loads(file.read_text())["types"] if name.startswith("document_0")]
    for path in (folder / encoder).iterdir():
        path.rename(folder / path.name)
    file.write_text(file.read_text().replace(f'"{encoder}"', '""'))
    ours = bert.load(folder)
    for role in ("query", "document"):
        np.testing.assert_allclose(ours.embed(TEXTS, prompt=role), encoded(theirs, TEXTS, role), **DENSE)


@pytest.mark.parametrize("default", ["query", "document", None])
def test_texts_without_a_role_have_the_default_route(
    default: str | None, library: Any, minilm: Path, tmp_path: Path
) -> None:
    theirs = static_queries(library, tmp_path, minilm, default_route=default, allow_empty_key=False)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    bert.load(tmp_path / "theirs").save(tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        ours, model = bert.load(folder), loaded(library, theirs, folder)
        assert ours.default_route == default
        if default is not None:
            np.testing.assert_allclose(ours.embed(TEXTS), encoded(model, TEXTS, None), **DENSE)
            continue
        with pytest.raises(ValueError, match="task='query' and task='document'"):
            encoded(model, TEXTS, None)
        with pytest.raises(bert.UserError, match="prompt='query' or prompt='document'"):
            ours.embed(TEXTS)


@pytest.mark.parametrize("kind", ["plain", "normalized", "truncated", "short", "dense"])
def test_static_embeddings_are_the_same(kind: str, library: Any, minilm: Path, tmp_path: Path) -> None:
    """Repeated, special and unknown tokens, long texts, and texts without tokens."""
    modules = [static_embedding(library, minilm, length=6 if kind == "short" else None)]
    modules += [modules_of(library).Dense(24, 8)] if kind == "dense" else []
    modules += [modules_of(library).Normalize()] if kind == "normalized" else []
    settings = {"truncate_dim": 7 if kind == "truncated" else None, "default_prompt_name": None}
    prompts = {"query": "find this: ", "document": ""}
    theirs = library.SentenceTransformer(modules=modules, prompts=prompts, device="cpu", **settings)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = bert.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    texts = ["", *TEXTS, *HOSTILE]
    models = (ours, bert.load(tmp_path / "ours"), bert.load(tmp_path / "theirs", engine="onnxruntime"))
    for model in (theirs, library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")):
        for role in (None, "query"):
            expected = model.encode(texts, prompt_name=role)
            for each in models:
                np.testing.assert_allclose(each.embed(texts, prompt=role), expected, **TABLE)
    assert (ours.embed("").any()) == (kind == "dense"), "the mean of no tokens is 0"
    assert ours.encode(TEXTS[:2]).last_hidden_state.shape[2] == 24


@pytest.mark.parametrize("stored", ["float32", "float16", "with_weights", "with_mapping"])
def test_static_embeddings_of_model2vec(stored: str, library: Any, minilm: Path, tmp_path: Path) -> None:
    """The names of the tensors, a factor per token, and tokens that share a vector."""
    theirs = library.SentenceTransformer(modules=[static_embedding(library, minilm), modules_of(library).Normalize()])
    folder, random = tmp_path / "theirs", np.random.default_rng(2)
    theirs.save_pretrained(str(folder))
    table = load_file(folder / "model.safetensors")["embedding.weight"]
    tensors = {"embeddings": table.astype("float16" if stored == "float16" else "float32")}
    if stored != "float32" and stored != "float16":
        tensors["weights"] = random.uniform(size=30522)
    if stored == "with_mapping":
        tensors |= {"embeddings": table[:500], "mapping": random.integers(0, 500, 30522)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS).astype(np.float32)
    tolerance = {"atol": 1e-3} if stored == "float16" else TABLE
    np.testing.assert_allclose(bert.load(folder).embed(TEXTS), expected, **tolerance)


def test_a_table_of_weights_without_a_router(library: Any, minilm: Path, tmp_path: Path) -> None:
    """Negative weights, repeated tokens, and texts longer than model_max_length."""
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=30522).astype(np.float32))
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    module = library.sparse_encoder.modules.SparseStaticEmbedding(tokenizer, weight=weights)
    theirs = library.SparseEncoder(modules=[module], prompts={"query": "find this: "}, device="cpu")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    ours = bert.load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = library.SparseEncoder(str(tmp_path / "ours"), device="cpu")
    texts = [*HOSTILE, "the man and the man", "one two three four five " * 200, "[CLS] [SEP] [UNK]"]
    for model in (theirs, again):
        for role in (None, "query"):
            expected = model.encode(texts, prompt_name=role, convert_to_sparse_tensor=False).numpy()
            for each in (ours, bert.load(tmp_path / "ours")):
                np.testing.assert_array_equal(each.embed(texts, prompt=role), expected)
    assert ours.pooling.similarity == "dot" and (ours.embed("") == 0).all()
