"""The files and fields that text-embeddings-inference requires, by its router/src/lib.rs and models/bert.rs.

Its readers reject a file that lacks a field without a default, or has null in it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

import bert
from bert.model.pooling import Pooling

CONFIG = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), int),
    **dict.fromkeys(("intermediate_size", "max_position_embeddings", "type_vocab_size", "pad_token_id"), int),
    **dict.fromkeys(("hidden_dropout_prob", "initializer_range", "layer_norm_eps"), (int, float)),
    **{"architectures": list, "model_type": str, "hidden_act": str},
}
"""Required fields of config.json and their types."""

POOLING = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
"""Required booleans of 1_Pooling/config.json: the last two up to version 1.5."""


def required(file: Path, fields: dict[str, type]) -> dict:
    """The content of a file that has all fields, of their types."""
    content = json.loads(file.read_text())
    for name, kind in fields.items():
        assert isinstance(content[name], kind), f"{file.name}: {name}"
        assert isinstance(content[name], bool) == (kind is bool), f"{file.name}: {name}"
    return content


@pytest.mark.parametrize(
    ("pooling", "length"),
    [
        (Pooling("mean", normalize=True), None),
        (Pooling("cls", max_length=5), 5),
        (Pooling("mean", lowercase=True), None),
        (Pooling("mean", query_prompt="find: "), None),
    ],
)
def test_an_embedding_folder_is_complete(made, tmp_path: Path, pooling: Pooling, length: int | None) -> None:
    made(pooling=pooling).save(tmp_path / "out")
    config = required(tmp_path / "out" / "config.json", CONFIG)
    assert config["model_type"] == "bert"
    assert not any(name.endswith("Classification") for name in config["architectures"])
    fields = {f"pooling_mode_{name}": bool for name in POOLING}
    pooled = required(tmp_path / "out" / "1_Pooling" / "config.json", fields)
    assert [name for name in POOLING if pooled[f"pooling_mode_{name}"]] == [
        "cls_token" if pooling.mode == "cls" else "mean_tokens"
    ]
    lengths = tmp_path / "out" / "sentence_bert_config.json"  # without it, as long as the position table
    assert lengths.is_file() == (length is not None)
    assert length is None or required(lengths, {"max_seq_length": int})["max_seq_length"] == length
    if pooling.query_prompt:
        prompts = required(tmp_path / "out" / "config_sentence_transformers.json", {"prompts": dict})["prompts"]
        assert prompts == {"query": "find: ", "document": ""}
    Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as tensors:
        names = {name.removeprefix("bert.") for name in tensors.keys()}  # noqa: SIM118
    assert {"embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"} <= names
    assert {"embeddings.LayerNorm.weight", "encoder.layer.0.output.LayerNorm.bias"} <= names


@pytest.mark.medium
def test_the_folder_of_a_graph_is_complete(made, tmp_path: Path) -> None:
    """For the backend ort of text-embeddings-inference (backends/ort/src/lib.rs), which reads this output."""
    pytest.importorskip("onnx", reason="needs the extra `onnx`")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    made(pooling=Pooling("cls", normalize=True, max_length=5)).save(tmp_path / "out", "onnx")
    required(tmp_path / "out" / "config.json", {"hidden_size": int, "num_hidden_layers": int, "pad_token_id": int})
    assert required(tmp_path / "out" / "1_Pooling" / "config.json", {"pooling_mode_cls_token": bool})
    assert required(tmp_path / "out" / "sentence_bert_config.json", {"max_seq_length": int})["max_seq_length"] == 5
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].split(".")[-1] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    assert {port.name for port in session.get_inputs()} <= {"input_ids", "attention_mask", "token_type_ids"}
    assert {port.type for port in session.get_inputs()} == {"tensor(int64)"}
    assert "sentence_embedding" in {port.name for port in session.get_outputs()}


@pytest.mark.medium
@pytest.mark.parametrize("labels", [("LABEL_0",), ("no", "yes")])
def test_a_reranker_and_a_classifier_have_numbered_labels(made, tmp_path: Path, labels: tuple[str, ...]) -> None:
    model = made("BertForSequenceClassification")
    classifier = {name: array[..., : len(labels)] for name, array in model.params["classifier"].items()}
    model = dataclasses.replace(model, labels=labels, params={**model.params, "classifier": classifier})
    model.save(tmp_path / "out")
    config = required(tmp_path / "out" / "config.json", {**CONFIG, "id2label": dict, "label2id": dict})
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {str(number): label for number, label in enumerate(labels)}
    assert config["label2id"] == {label: number for number, label in enumerate(labels)}
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as tensors:
        assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight"} <= set(tensors.keys())


@pytest.mark.parametrize("clitics", [None, (), ("'s",)])
def test_a_tagger_keeps_how_it_splits_texts(made, tmp_path: Path, clitics: tuple[str, ...] | None) -> None:
    model = made("BertForTokenClassification")
    kernel, bias = (model.params["classifier"][name][..., :3] for name in ("kernel", "bias"))
    params = {**model.params, "classifier": {"kernel": kernel, "bias": bias}}
    labels = ("O", "B-PER", "I-PER")
    dataclasses.replace(model, labels=labels, params=params, clitics=clitics).save(tmp_path / "out")
    assert required(tmp_path / "out" / "config.json", CONFIG).get("clitics") == (
        None if clitics is None else [*clitics]
    )
    assert bert.load(tmp_path / "out").task.clitics == clitics
    assert 'aggregation_strategy="first"' in (tmp_path / "out" / "README.md").read_text()
