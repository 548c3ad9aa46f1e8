"""DistilBERT's folders: their format, and the settings that are rejected."""

import dataclasses
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from bert.interchange import families
from tests.interchange.hf_folders import DISTILBERT, assert_same, edit


@pytest.mark.parametrize("architecture", families.DISTILBERT.classes)
def test_every_class_in_and_out(architecture: str, made, tmp_path: Path) -> None:
    model = made(architecture, DISTILBERT)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, DISTILBERT, model.labels)
    assert_same(again.params, model.params)


def test_names_and_settings_are_distilberts(made, tmp_path: Path) -> None:
    made("BertForSequenceClassification", DISTILBERT).save(tmp_path / "out")
    tensors, content = load_file(tmp_path / "out/model.safetensors"), read_json(tmp_path / "out/config.json")
    assert {"pre_classifier.weight", "distilbert.transformer.layer.1.attention.q_lin.bias"} <= set(tensors)
    assert (content["model_type"], content["dim"], content["n_layers"], content["hidden_dim"]) == (
        "distilbert",
        12,
        2,
        20,
    )
    assert read_json(tmp_path / "out/tokenizer_config.json")["model_input_names"] == ["input_ids", "attention_mask"]
    edit(tmp_path / "out", seq_classif_dropout=0.2)
    assert bert.load(tmp_path / "out").classifier_dropout == 0.2
    edit(tmp_path / "out", classifier_dropout=0.4)
    assert bert.load(tmp_path / "out").classifier_dropout == 0.4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"type_vocab_size": 2},
            "type_vocab_size 2, which transformers' DistilBERT cannot express, as it has no segments",
        ),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05, .*as its LayerNorm has no other epsilon"),
        ({"embedding_norm": False}, "embedding_norm false, .*as its embeddings have LayerNorm"),
    ],
)
def test_what_distilbert_lacks_is_refused(changes: dict, reason: str, made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{reason}: export it as stablehlo or onnx$"):
        made("BertForMaskedLM", dataclasses.replace(DISTILBERT, **changes)).save(tmp_path / "out")
