"""Folders with an embedding per token: what is kept, what follows from the files of PyLate, and errors."""

import dataclasses
import json
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from bert.analysis.diagnosis import diagnose
from bert.analysis.inspection import summarize
from bert.config import ModelConfig
from bert.errors import UserError, WarningText
from bert.interchange.sentence_transformers.reader import IDENTITY, TANH, read_pooling
from bert.model.late_interaction import LateInteraction
from bert.model.pooling import PooledDense, Pooling
from tests.interchange.hf_folders import CONFIG, edit

PROJECTION = PooledDense(np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32), None, IDENTITY)
CLASSIC = Pooling(
    "tokens",
    normalize=True,
    max_length=10,
    query_prompt="a ",
    document_prompt="b ",
    default_prompt="c ",
    dense=(PROJECTION,),
    similarity="maxsim",
    interaction=LateInteraction(
        query_length=8, document_length=9, expanded_length=8, skipped_tokens=("d", "e"), skipping_roles=("document",)
    ),
)
VARIANTS = {
    "classic": CLASSIC,
    "at least": dataclasses.replace(
        CLASSIC,
        normalize=False,
        similarity="meanmaxsim",
        dense=(
            PooledDense(PROJECTION.kernel, np.ones(6, np.float32), TANH),
            PooledDense(np.eye(6, 4, dtype=np.float32), None, IDENTITY),
        ),
        interaction=LateInteraction(
            expanded_length=5, attends_to_expansion=True, expansion_token="d", skipping_roles=("query", "document")
        ),
    ),
    "bare": Pooling("tokens", similarity="maxsim"),
}


@pytest.mark.medium
@pytest.mark.parametrize("pooling", [*VARIANTS.values(), Pooling("mean", dense=VARIANTS["at least"].dense)])
def test_dense_layers_are_counted_with_and_without_weights(pooling: Pooling, made, tmp_path: Path) -> None:
    made(pooling=pooling).save(tmp_path / "out")
    expected = summarize(tmp_path / "out", 10)
    for file in (tmp_path / "out").rglob("*.safetensors"):
        file.unlink()
    facts = summarize(tmp_path / "out", 10)
    assert (facts["parameters"], facts["parts"]) == (expected["parameters"], expected["parts"])
    elements = sum(layer.kernel.size for layer in pooling.dense)
    biases = sum(layer.bias.size for layer in pooling.dense if layer.bias is not None)
    [part] = [part for part in facts["parts"] if part["part"] in ("projection", "dense")] or [None]
    texts = 10 if pooling.mode == "mean" else 1  # a mean is projected once per row, embeddings of tokens at each one
    assert (part is None) == (not pooling.dense)
    assert part is None or (part["parameters"], part["flops_per_token"]) == (elements + biases, 2 * elements / texts)


@pytest.mark.medium
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_folder_keeps_all_settings(kind: str, made, tmp_path: Path) -> None:
    model = made(pooling=VARIANTS[kind])
    model.save(tmp_path / "out")
    said: list[str] = []
    again = bert.load(tmp_path / "out", said.append)
    assert again.pooling == VARIANTS[kind]
    assert not any(isinstance(line, WarningText) for line in said)
    for prompt in ("query", "document", None):
        for actual, expected in zip(
            again.embed(["a d", "b"], prompt=prompt), model.embed(["a d", "b"], prompt=prompt), strict=True
        ):
            np.testing.assert_array_equal(actual, expected)


def test_inspect_describes_the_embeddings(made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    assert not diagnose(tmp_path / "out")
    expected = "6 features per token, compared by maxsim, queries extended to 8 tokens, none for 2 tokens such as d"
    assert any(line.endswith(f"embeddings of {expected}") for line in summarize(tmp_path / "out")["read"])
    (tmp_path / "out/model.safetensors").unlink()
    assert any(expected in line for line in summarize(tmp_path / "out")["read"]), "before the weights are downloaded"


def settings_of(folder: Path) -> Path:
    return folder / "config_sentence_transformers.json"


def as_pylate(folder: Path, **settings: Any) -> None:
    """Rewrites an exported folder in PyLate's layout."""
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": name} for path, name in modules]))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 10, "do_lower_case": False}))
    settings_of(folder).write_text(json.dumps(settings))


PUNCTUATION = tuple(string.punctuation)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"query_prefix": "a "}, LateInteraction(32, None, 32, False, None, PUNCTUATION)),
        (
            {"query_prefix": "a ", "query_length": 8, "document_length": 9, "attend_to_expansion_tokens": True},
            LateInteraction(8, 9, 8, True, None, PUNCTUATION),
        ),
        (
            {"do_query_expansion": False, "query_length": 8, "skiplist_words": ["d"]},
            LateInteraction(8, None, None, False, None, ("d",)),
        ),
        ({"query_length": 8}, LateInteraction(8, None, 8)),
        ({"model_type": "ColBERT"}, LateInteraction(None, None, None, False, None, PUNCTUATION)),
        ({"model_type": "ColBERT", "query_expansion": None, "query_length": 7, "skiplist_words": []},
         LateInteraction(7)),
    ],
)  # fmt: skip
def test_settings_of_pylate(settings: dict[str, Any], expected: LateInteraction, made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    as_pylate(tmp_path / "out", similarity_fn_name="cosine", **settings)
    pooling = read_pooling(tmp_path / "out", pytest.fail)
    assert pooling is not None
    assert (pooling.interaction, pooling.similarity, pooling.normalize) == (expected, "maxsim", True)
    assert pooling.dense == CLASSIC.dense
    assert pooling.query_prompt == settings.get("query_prefix", "")


def test_a_prefix_comes_before_the_prompt_once(made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    prompts = {"query": "a find ", "document": "page ", "other": "c "}
    as_pylate(tmp_path / "out", query_prefix="a ", document_prefix="b ", prompts=prompts, default_prompt_name="other")
    pooling = read_pooling(tmp_path / "out", pytest.fail)
    assert pooling is not None
    assert (pooling.query_prompt, pooling.document_prompt, pooling.default_prompt) == ("a find ", "b page ", "c ")


def test_a_folder_of_stanford(made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    modules = (tmp_path / "out/modules.json").read_text()
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (tmp_path / "out" / name).unlink()
    edit(tmp_path / "out", architectures=["HF_ColBERT"])
    file = tmp_path / "out/model.safetensors"
    tensors = {f"bert.{name}": array for name, array in load_file(file).items()}
    save_file({**tensors, "linear.weight": np.ascontiguousarray(PROJECTION.kernel.T)}, file)
    metadata = {
        "query_token_id": "[MASK]",
        "doc_token_id": "b",
        "query_maxlen": 8,
        "doc_maxlen": 9,
        "similarity": "l2",
        "dim": 6,
    }
    (tmp_path / "out/artifact.metadata").write_text(json.dumps(metadata))
    said: list[str] = []
    model = bert.load(tmp_path / "out", said.append)
    expected = LateInteraction(8, 9, 8, False, None, PUNCTUATION)
    assert model.pooling is not None
    assert (model.pooling.interaction, model.pooling.dense) == (expected, CLASSIC.dense)
    assert (model.pooling.query_prompt, model.pooling.document_prompt) == ("[MASK] ", "b ")
    declared = read_pooling(tmp_path / "out", lambda text: None, weights=False)
    assert declared is not None and declared.shapes == model.pooling.shapes == {"projection/0/kernel": (12, 6)}
    warned = [line for line in said if isinstance(line, WarningText)]
    assert len(warned) == 2
    assert "similarity is 'l2', which is not applied" in warned[0]
    assert "skiplist_words has no effect for ! " in warned[1]
    (tmp_path / "out/modules.json").write_text(modules)
    said.clear()
    assert bert.load(tmp_path / "out", said.append).pooling.normalize, "the modules replace the projection"
    assert any(line.endswith("linear.weight is read as a Dense module, or replaced by one") for line in said)
    (tmp_path / "out/modules.json").unlink()
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"lacks linear.weight, the projection of ColBERT"):
        bert.load(tmp_path / "out")


def test_a_prefix_in_the_vocabulary_becomes_one_token(made, tmp_path: Path) -> None:
    """A tokenizer would split "[Q] ". A text that holds it gets the same token, as in sentence-transformers."""
    model = made(pooling=CLASSIC)
    model.tokenizer.add_tokens(["[Q] "])
    grown = np.concatenate([model.params["bert"]["embeddings"]["word"]["embedding"], np.ones((1, 12), np.float32)])
    model.params["bert"]["embeddings"]["word"]["embedding"] = grown
    config: ModelConfig = dataclasses.replace(CONFIG, vocab_size=24)
    dataclasses.replace(model, config=config).save(tmp_path / "out")
    as_pylate(tmp_path / "out", query_prefix="[Q] ", query_length=8)
    again = bert.load(tmp_path / "out", lambda text: None)
    assert again.tokenizer.encode("[Q] a").ids == [2, 23, 5, 3]
    again.save(tmp_path / "two")
    assert bert.load(tmp_path / "two").tokenizer.encode("[Q] a").ids == [2, 23, 5, 3]


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids is set"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["passage"]}, r"skiplist_tasks is \['passage'\]"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": "abc"}, "skiplist_words is 'abc'"),
        ("3_Normalize/config.json", {"module_input_name": None}, "module_input_name is 'sentence_embedding'"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "only token_embeddings is supported"),
        ("1_Dense/config.json", {"module_output_name": "other"}, "module_output_name is 'other'"),
        ("1_Dense/config.json", {"out_features": 7}, r"linear.weight is \[6, 12\]"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "xtr"}, "set it to maxsim, meanmaxsim"),
        ("sentence_bert_config.json", {"query_length": 0}, r"sentence_bert_config\.json: query_length is 0: set it to"),
        ("config_sentence_transformers.json", {"query_prefix": 3}, "query_prefix is 3: set it to a text, or null"),
        ("sentence_bert_config.json", {"query_length": 7}, "query_length is 7, below query_expansion's length 8"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "all"}}, "strategy fixed or min"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "set length to a number of tokens"),
        (
            "sentence_bert_config.json",
            {"query_length": None, "query_expansion": {"strategy": "fixed", "length": 17}},
            "queries are extended to 17 tokens, but the model reads 16",
        ),
        (
            "sentence_bert_config.json",
            {"query_expansion": {"strategy": "fixed", "length": 8, "token": "[EXTRA]"}},
            r"no token '\[EXTRA\]'",
        ),
        ("tokenizer_config.json", {"padding_side": "left"}, "padding_side is left"),
    ],
)
def test_a_setting_that_is_not_supported_is_an_error(file: str, values, match: str, made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    content = {**json.loads((tmp_path / "out" / file).read_text()), **values}
    (tmp_path / "out" / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=match):
        bert.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("config_sentence_transformers.json", {"truncate_dim": 3}, "truncate_dim is 3, which is not applied"),
        ("config_sentence_transformers.json", {"pool_factor": 2}, "not loaded from .*: pool_factor"),
        ("2_MultiVectorMask/config.json", {"pool_factor": 2}, "not loaded from .*: pool_factor"),
        ("sentence_bert_config.json", {"document_length": 17}, "document_length is 17, but the model reads 16 tokens"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": ["d", "?"]}, "skiplist_words has no effect for [?]:"),
    ],
)
def test_a_setting_that_is_not_applied_is_a_warning(file: str, values, match: str, made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    content = {**json.loads((tmp_path / "out" / file).read_text()), **values}
    (tmp_path / "out" / file).write_text(json.dumps(content))
    said: list[str] = []
    bert.load(tmp_path / "out", said.append)
    [warned] = [line for line in said if isinstance(line, WarningText)]
    assert re.search(match, warned)


def test_case_of_texts(made, tmp_path: Path) -> None:
    """An uncased vocabulary does not need do_lower_case, a cased one gets it, except for special tokens."""
    made(pooling=CLASSIC).save(tmp_path / "out")
    edited = {"sentence_bert_config.json": {"do_lower_case": True}, "tokenizer_config.json": {"do_lower_case": True}}
    for file, values in edited.items():
        content = {**json.loads((tmp_path / "out" / file).read_text()), **values}
        (tmp_path / "out" / file).write_text(json.dumps(content))
    assert bert.load(tmp_path / "out").pooling == CLASSIC
    content["do_lower_case"] = False
    (tmp_path / "out/tokenizer_config.json").write_text(json.dumps(content))
    model = bert.load(tmp_path / "out")
    assert model.pooling == CLASSIC
    assert model.tokenizer.normalizer.normalize_str("ΟΔΟΣ") == "οδοσ"
    assert "[MASK]" in model.tokenizer.encode("A [MASK]").tokens


MODULES = "sentence_transformers.models."


@pytest.mark.parametrize(
    "names",
    [
        ["Transformer", "Pooling", "MultiVectorMask"],
        ["Transformer", "MultiVectorMask", "Dense"],
        ["Transformer", "Dense", "HierarchicalTokenPooling", "MultiVectorMask"],
    ],
)
def test_other_orders_of_modules_are_errors(names: list[str], made, tmp_path: Path) -> None:
    made(pooling=CLASSIC).save(tmp_path / "out")
    (tmp_path / "out/modules.json").write_text(json.dumps([{"path": "", "type": f"{MODULES}{name}"} for name in names]))
    with pytest.raises(UserError, match="use a model with Transformer, any number of Dense, MultiVectorMask"):
        bert.load(tmp_path / "out")
