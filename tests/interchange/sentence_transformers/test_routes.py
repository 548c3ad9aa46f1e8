"""Separate models for queries and documents: each method uses the right one, and a folder keeps both."""

import dataclasses
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.analysis.diagnosis import diagnose
from bert.errors import UserError
from bert.inference.load import load_for_training
from bert.interchange import hub
from bert.interchange.sentence_transformers import names
from bert.model.pooling import PooledDense, Pooling
from tests.interchange.hf_folders import CONFIG

IDENTITY = "torch.nn.modules.linear.Identity"
POOLING = Pooling(max_length=9, query_prompt="a ", document_prompt="b ", default_prompt="a ")
TEXTS = ["c d", "e f", "g h i j", "k"]


def head(seed: int, width: int = 5) -> tuple[PooledDense, ...]:
    return (PooledDense(np.random.default_rng(seed).normal(size=(12, width)).astype(np.float32), None, IDENTITY),)


@pytest.fixture
def both(made) -> bert.Pretrained:
    """Two encoders of different sizes, lengths and casing."""
    pooling = dataclasses.replace(POOLING, dense=head(0), max_length=7, lowercase=True)
    queries = made(config=dataclasses.replace(CONFIG, intermediate_size=30), pooling=pooling)
    return made(pooling=dataclasses.replace(POOLING, dense=head(1)), query_model=queries)


@pytest.fixture
def folder(both: bert.Pretrained, tmp_path: Path) -> Path:
    both.save(tmp_path / "both")
    return tmp_path / "both"


def change_router(folder: Path, **changes: Any) -> None:
    file = folder / "router_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def sides(model: bert.Pretrained) -> tuple[bert.Pretrained, bert.Pretrained]:
    """The models of queries and documents without routes."""
    assert model.query_model is not None
    return model.query_model, model.replace(query_model=None)


@pytest.mark.medium
def test_each_method_uses_the_model_of_the_role(both: bert.Pretrained) -> None:
    queries, documents = sides(both)
    vectors = queries.embed(TEXTS, prompt="query"), documents.embed(TEXTS, prompt="document")
    np.testing.assert_array_equal(both.embed(TEXTS, prompt="query"), vectors[0])
    np.testing.assert_array_equal(both.embed(TEXTS, prompt="document"), vectors[1])
    np.testing.assert_array_equal(both.embed(TEXTS), documents.embed(TEXTS))
    np.testing.assert_array_equal(both.embed("c"), documents.embed("c"))
    np.testing.assert_array_equal(both.replace(default_route="query").embed(TEXTS), queries.embed(TEXTS))
    scores = POOLING.compare(*vectors)
    np.testing.assert_array_equal(both.similarity(TEXTS, TEXTS), scores)
    found = both.search(TEXTS, TEXTS, 2)
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :2], atol=1e-6)
    np.testing.assert_array_equal(both.search(TEXTS, vectors[1], 2).indices, found.indices)
    rows = [{"query": text, "positive": other} for text, other in zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True)]
    [mined, *_] = both.mine_negatives(rows, num_negatives=1, relative_margin=0, margin=0)
    assert mined["score"][0] == pytest.approx(scores[0, 1], abs=1e-6)
    assert "queries: 2 layers, hidden size 12, 3 heads, feed-forward size 30" in repr(both)
    both.warm_up([8])


@pytest.mark.medium
def test_an_evaluation_uses_both_models(both: bert.Pretrained) -> None:
    """Long queries, which are cut to the length of their model, and queries in upper case."""
    queries = ["C d e f g h i j k l m", "e", "g H", "k"]
    rows = [{"query": query, "positive": text} for query, text in zip(queries, TEXTS, strict=True)]
    scores = both.similarity(queries, TEXTS)
    ranks = 1 + (scores > np.diagonal(scores)[:, None]).sum(axis=1)
    assert both.evaluate(rows).metrics["mrr_at_10"] == pytest.approx((1 / ranks).mean())
    both_sides = zip(queries, TEXTS, strict=True)
    pairs = [{"text_a": query, "text_b": text, "score": n / 4} for n, (query, text) in enumerate(both_sides)]
    expected = np.corrcoef(np.diagonal(scores), np.arange(4))[0, 1]
    assert both.evaluate(pairs).metrics["pearson"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("default", ["query", "document", None])
def test_a_folder_keeps_both_models(default: Any, both: bert.Pretrained, tmp_path: Path) -> None:
    both = both.replace(default_route=default)
    both.save(tmp_path / "out")
    said: list[str] = []
    again = bert.load(tmp_path / "out", said.append)
    assert len(said) == 2, "no key is reported as not applied"
    for role in ("query", "document"):
        np.testing.assert_array_equal(again.embed(TEXTS, prompt=role), both.embed(TEXTS, prompt=role))
    for one, other in zip(sides(again), sides(both), strict=True):
        pooling = dataclasses.replace(other.pooling_or_default, lowercase=False)  # the exported tokenizer does it
        assert (one.pooling, one.config.intermediate_size) == (pooling, other.config.intermediate_size)
    assert again.default_route == default
    np.testing.assert_array_equal(bert.load(tmp_path / "out/query").embed(TEXTS), again.for_role("query").embed(TEXTS))
    assert "encode_query" in (tmp_path / "out/README.md").read_text()
    assert diagnose(tmp_path / "out") == []
    again.save(tmp_path / "again")
    assert (tmp_path / "again/router_config.json").read_text() == (tmp_path / "out/router_config.json").read_text()
    if default is None:
        with pytest.raises(UserError, match="no default route: pass prompt='query' or prompt='document'"):
            again.embed(TEXTS)
        again.warm_up([8])


@pytest.mark.medium
def test_a_shared_encoder_is_stored_once(made, tmp_path: Path) -> None:
    model = made(pooling=dataclasses.replace(POOLING, dense=head(1)))
    both = model.replace(query_model=model.replace(pooling=dataclasses.replace(POOLING, dense=head(0))))
    both.save(tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("tokenizer.json"))) == 1
    again = bert.load(tmp_path / "out")
    assert again.query_model is not None and again.query_model.params is again.params
    for role in ("query", "document"):
        np.testing.assert_array_equal(again.embed(TEXTS, prompt=role), both.embed(TEXTS, prompt=role))
    again.save(tmp_path / "again")
    assert len(list((tmp_path / "again").rglob("tokenizer.json"))) == 1


@pytest.mark.medium
def test_settings_of_documents_are_not_read_for_queries(both: bert.Pretrained, tmp_path: Path) -> None:
    """The encoder of documents is in the root folder, like the settings that older versions share."""
    queries = both.for_role("query")
    unlimited = dataclasses.replace(queries.pooling_or_default, max_length=None, lowercase=False)
    both.replace(query_model=queries.replace(pooling=unlimited)).save(tmp_path / "out")
    assert bert.load(tmp_path / "out").for_role("query").pooling == unlimited


def test_the_files_of_both_models_are_fetched_from_the_hub(folder: Path) -> None:
    """Our folder, and paths of published ones."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    files -= {"README.md", *(f"query/{name}" for name in ("README.md", "modules.json", names.PROMPTS))}  # not read
    files |= {
        f"query_0_SparseStaticEmbedding/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    files |= {"document_1_SpladePooling/config.json", "0_StaticEmbedding/tokenizer.json", "2_Asym/config.json"}
    files |= {"0_StaticEmbedding/model.safetensors", "2_Asym/140_Dense/model.safetensors"}
    patterns = [*hub.SETTINGS, *hub.WEIGHTS, *hub.DENSE_WEIGHTS]
    assert {file for file in files if any(fnmatch(file, pattern) for pattern in patterns)} == files


def test_a_router_of_older_versions(folder: Path) -> None:
    """Asym after an encoder, whose configuration is config.json in a subfolder."""
    shutil.rmtree(folder / "query")
    place = folder / "2_Asym"
    for name in ("1_Dense", "2_Dense"):
        shutil.copytree(folder / "2_Dense", place / name)
    content = {
        "types": dict.fromkeys(("1_Dense", "2_Dense"), "sentence_transformers.models.Dense.Dense"),
        "structure": {"query": ["1_Dense"], "document": ["2_Dense"]},
        "parameters": {"allow_empty_key": True},
    }
    (place / "config.json").write_text(json.dumps(content))
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Asym": "Asym"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    model = bert.load(folder)
    assert model.default_route == "query", "the first route, without a default"
    assert model.query_model is not None and model.query_model.params is model.params


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"structure": {"query": [], "doc": []}}, "has the routes 'query', 'doc': use a model with query and document"),
        ({"structure": {"query": ["nowhere"], "document": []}}, "has no types and structure of routes"),
        ({"types": []}, "has no types and structure of routes"),
        ({"parameters": {"route_mappings": {"(None, 'text')": "query"}}}, "route_mappings is .* not supported"),
        ({"parameters": {"default_route": "text"}}, "default_route is 'text': set it to query or document, or null"),
    ],
)
def test_a_router_that_is_not_read_is_an_error(changes: dict[str, Any], match: str, folder: Path) -> None:
    change_router(folder, **changes)
    with pytest.raises(UserError, match=match):
        bert.load(folder)


def test_paths_of_a_router_stay_inside(folder: Path) -> None:
    text = (folder / "router_config.json").read_text()
    (folder / "router_config.json").write_text(text.replace('"query/1_Pooling"', '"../1_Pooling"'))
    with pytest.raises(UserError, match=r"'../1_Pooling', which may be outside of its folder"):
        bert.load(folder)


def test_both_models_have_embeddings_of_one_width(both: bert.Pretrained, tmp_path: Path) -> None:
    queries = both.for_role("query")
    narrow = queries.replace(pooling=dataclasses.replace(queries.pooling_or_default, dense=head(0, 3)))
    both.replace(query_model=narrow).save(tmp_path / "out")
    with pytest.raises(UserError, match="the embeddings of queries have 3 features, and the embeddings of documents 5"):
        bert.load(tmp_path / "out")


def test_what_two_models_cannot_do_is_one_sentence(both: bert.Pretrained, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="separate model for queries, which onnx does not hold"):
        both.save(tmp_path / "graph", "onnx")
    with pytest.raises(UserError, match="separate models for queries and documents, to which no adapter is added"):
        bert.load(folder, adapter=tmp_path)
    said: list[str] = []
    assert load_for_training(folder, said.append).query_model is None
    assert said[-1].endswith("the model of queries; the one of documents is used")


def test_missing_weights_of_queries_are_reported(folder: Path) -> None:
    (folder / "query/model.safetensors").unlink()
    assert [finding.problem for finding in diagnose(folder) if "query holds no weights" in finding.problem]
