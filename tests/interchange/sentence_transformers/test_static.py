"""Tables of vectors and of weights, by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import bert
from bert.analysis.diagnosis import diagnose
from bert.analysis.inspection import summarize
from bert.commands.reports import inspect_command
from bert.demo.abilities import abilities_of
from bert.errors import UserError
from bert.inference.attention_maps import compute_attention_map
from bert.interchange.sentence_transformers.names import STATIC_EMBEDDING, TOKEN_TABLE
from bert.model.pooling import PooledDense, Pooling
from bert.tokenizer.vocabulary import save_tokenizer

VECTORS = np.random.default_rng(0).normal(size=(52, 6)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=52).astype(np.float32)
ONE, TEXT, UNKNOWN = 50, 51, 1
"""Ids of tokens."""


@pytest.fixture
def folder(make, tmp_path: Path) -> Path:
    """A folder with a table of vectors."""
    return write(tmp_path / "table", make("Bert").tokenizer, {"embedding.weight": VECTORS})


def write(
    folder: Path, tokenizer: Tokenizer, tensors: dict[str, Any], module: str = STATIC_EMBEDDING, *more: str
) -> Path:
    save_tokenizer(tokenizer, folder)
    save_file(tensors, folder / "model.safetensors")
    names = [module, *more]
    modules = [
        {"path": "" if name == module else name, "type": f"sentence_transformers.models.{name}"} for name in names
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_the_mean_has_no_special_tokens(folder: Path) -> None:
    model = bert.load(folder)
    expected = [VECTORS[ONE], (2 * VECTORS[TEXT] + VECTORS[ONE]) / 3, VECTORS[UNKNOWN], np.zeros(6)]
    np.testing.assert_allclose(model.embed(["one", "text one text", "unknown", ""]), expected, atol=1e-7)
    np.testing.assert_allclose(model.embed(["one text"] * 100, 7)[-1], (VECTORS[ONE] + VECTORS[TEXT]) / 2, atol=1e-7)
    np.testing.assert_allclose(model.embed("one " * 5000 + "text"), VECTORS[ONE], atol=1e-2)
    hidden, pooled, mask, embeddings = model.encode(["text one", "one"])
    np.testing.assert_array_equal(hidden, [VECTORS[[TEXT, ONE]], [VECTORS[ONE], np.zeros(6)]])
    np.testing.assert_allclose(embeddings, model.embed(["text one", "one"]), atol=1e-7)
    assert (pooled, mask.tolist()) == (None, [[1, 1], [1, 0]])
    assert model.embed(["one"], long_texts="windows").shape == (1, 6)
    model.warm_up()
    assert "a table without layers, hidden size 6" in repr(model)
    with pytest.raises(UserError, match="is a table of embeddings without attention"):
        compute_attention_map(model, "one text")
    assert "attention" not in [ability.name for ability in abilities_of(model)]


def test_a_prompt_is_part_of_the_text(folder: Path) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "text "}}))
    model = bert.load(folder)
    np.testing.assert_array_equal(model.embed("one", prompt="query"), model.embed("text one"))
    scores = model.similarity(["one"], ["text"])
    np.testing.assert_allclose(scores[0, 0], Pooling().compare(VECTORS[[ONE]], VECTORS[[TEXT]])[0, 0], rtol=1e-6)
    assert model.search("one", ["text", "one one"]).indices[0] == 1
    rows = [{"query": "one", "positive": "one"}, {"query": "w3", "positive": "w3 w3"}]
    assert model.evaluate(rows).metrics["recall_at_10"] == 1


def test_texts_of_a_truncating_tokenizer_are_cut(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1}')  # which a table does not read
    bert.load(folder).save(tmp_path / "out")
    for place in (folder, tmp_path / "out"):
        model = bert.load(place)
        np.testing.assert_array_equal(model.embed("one w1 w2"), model.embed("w1 w2"))


def test_later_modules_are_applied_and_kept(folder: Path, tmp_path: Path) -> None:
    kernel = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)
    pooling = Pooling(
        normalize=True, dense=(PooledDense(kernel, None, "torch.nn.modules.linear.Identity"),), truncate_dim=3,
        query_prompt="text ", similarity="dot",
    )  # fmt: skip
    bert.load(folder).replace(pooling=pooling).save(tmp_path / "out")
    model = bert.load(tmp_path / "out")
    assert model.pooling == pooling and model.config == bert.load(folder).config
    expected = VECTORS[ONE] @ kernel
    np.testing.assert_allclose(model.embed("one"), (expected / np.linalg.norm(expected))[:3], atol=1e-6)


def test_tensors_of_model2vec_are_joined(folder: Path) -> None:
    numbers, weights = np.arange(52) % 5, np.arange(52, dtype=np.float64)
    save_file({"embeddings": VECTORS[:5], "mapping": numbers, "weights": weights}, folder / "model.safetensors")
    np.testing.assert_allclose(bert.load(folder).embed("one"), VECTORS[ONE % 5] * ONE, rtol=1e-6)


def test_each_token_of_a_text_has_its_weight_once(make, tmp_path: Path) -> None:
    folder = write(tmp_path / "table", make("Bert").tokenizer, {"weight": WEIGHTS}, TOKEN_TABLE)
    bert.load(folder).save(tmp_path / "out")
    for place in (folder, tmp_path / "out"):
        model = bert.load(place)
        expected = np.zeros((3, 52), np.float32)
        expected[0, [ONE, TEXT]], expected[1, UNKNOWN] = WEIGHTS[[ONE, TEXT]], WEIGHTS[UNKNOWN]
        np.testing.assert_array_equal(model.embed(["one text one", "unknown", ""]), expected)
        assert (model.pooling.similarity, model.embedding_size) == ("dot", 52)
        np.testing.assert_array_equal(model.encode(["one text one", "unknown", ""]).embeddings, expected)


def test_a_table_is_inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = summarize(folder)
    assert (facts["parameters"], facts["flops_per_token"]["forward"]) == (52 * 6, 0)
    assert inspect_command([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "a table without layers, 6 wide" in out and "problems: none found" in out
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in diagnose(folder)[0].problem
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="sizes in its weights"):
        summarize(folder)


@pytest.mark.parametrize(
    ("module", "tensors", "match"),
    [
        (STATIC_EMBEDDING, {"weight": WEIGHTS}, "holds weight, but StaticEmbedding has embedding.weight"),
        (STATIC_EMBEDDING, {"embedding.weight": VECTORS[0]}, r"embedding.weight is \[6\] float32, but a table has 2"),
        (STATIC_EMBEDDING, {"embedding.weight": VECTORS.astype(np.int8)}, r"is \[52, 6\] int8"),
        (STATIC_EMBEDDING, {"embedding.weight": VECTORS[:9]}, "the vocabulary needs 52 rows"),
        (STATIC_EMBEDDING, {"embeddings": VECTORS[:5], "mapping": np.arange(52)}, "mapping does not number the 5"),
        (STATIC_EMBEDDING, {"embeddings": VECTORS, "weights": WEIGHTS[:3]}, "3 weights for 52 tokens"),
        (STATIC_EMBEDDING, {"embeddings": VECTORS, "more": WEIGHTS}, "holds embeddings, more"),
        (TOKEN_TABLE, {"embedding.weight": VECTORS}, "but SparseStaticEmbedding has weight"),
        (TOKEN_TABLE, {"weight": VECTORS}, "a table has 1 axes"),
    ],
)
def test_wrong_weights_are_errors(module: str, tensors: Any, match: str, make, tmp_path: Path) -> None:
    write(tmp_path / "table", make("Bert").tokenizer, tensors, module)
    with pytest.raises(UserError, match=match):
        bert.load(tmp_path / "table")


@pytest.mark.medium
def test_what_a_table_cannot_do_is_one_sentence(folder: Path, make, tmp_path: Path) -> None:
    model = bert.load(folder)
    for format in ("onnx", "stablehlo", "peft"):
        with pytest.raises(UserError, match=f"table of static embeddings, which {format} does not hold"):
            model.save(tmp_path / "out", format)
    rows = [{"query": "one", "positive": "text"}] * 8
    with pytest.raises(UserError, match="table of static embeddings, which is not trained"):
        bert.finetune("embedding", init=str(folder), train=rows, output_dir=tmp_path / "run")
    with pytest.raises(UserError, match="use a reranker"):
        model.rank("one", ["text"])
    write(tmp_path / "weights", make("Bert").tokenizer, {"weight": WEIGHTS}, TOKEN_TABLE, "1_Normalize")
    with pytest.raises(UserError, match="lists SparseStaticEmbedding, 1_Normalize"):
        bert.load(tmp_path / "weights")
    write(tmp_path / "weights", make("Bert").tokenizer, {"weight": WEIGHTS}, TOKEN_TABLE)
    (tmp_path / "weights/config.json").write_text('{"path": "idf.json"}')
    with pytest.raises(UserError, match=r"path is 'idf.json', and only weights in model.safetensors are read"):
        bert.load(tmp_path / "weights")


def test_ids_and_values_are_checked(folder: Path) -> None:
    broken = load_file(folder / "model.safetensors")["embedding.weight"]
    broken[TEXT] = np.nan
    save_file({"embedding.weight": broken}, folder / "model.safetensors")
    model = bert.load(folder)
    assert np.isfinite(model.embed(["one"])).all()
    with pytest.raises(UserError, match=r"input 2: the model's output is NaN"):
        model.embed(["one", "text"])
    model.tokenizer.add_tokens(["new"])
    with pytest.raises(UserError, match="the tokenizer returns the id 52"):
        model.embed("new")


def test_the_engine_of_a_table_needs_no_graph(folder: Path) -> None:
    model = bert.load(folder, engine="onnxruntime")
    np.testing.assert_array_equal(model.embed(["one text"]), bert.load(folder).embed(["one text"]))
