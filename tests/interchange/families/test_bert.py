"""DistilBERT's and ALBERT's folders: names and settings."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.files import read_json
from tests.interchange.hf_folders import ALBERT, DISTILBERT, assert_same, edit


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


def test_names_and_settings_are_alberts(made, tmp_path: Path) -> None:
    made("BertForPreTraining", ALBERT).save(tmp_path / "out")
    tensors, content = load_file(tmp_path / "out/model.safetensors"), read_json(tmp_path / "out/config.json")
    group = "albert.encoder.albert_layer_groups.1.albert_layers.0"
    assert {f"{group}.ffn_output.weight", "albert.encoder.embedding_hidden_mapping_in.bias"} <= set(tensors)
    assert {"sop_classifier.classifier.weight", "predictions.dense.weight"} <= set(tensors)
    assert not any(".albert_layer_groups.2." in name for name in tensors)
    keys = ("model_type", "embedding_size", "num_hidden_layers", "num_hidden_groups", "inner_group_num")
    assert [content[key] for key in keys] == ["albert", 8, 4, 2, 1]
    edit(tmp_path / "out", classifier_dropout_prob=0.2)
    assert bert.load(tmp_path / "out").classifier_dropout == 0.2


@pytest.mark.medium
def test_more_uses_of_the_same_layers_are_another_model(made, tmp_path: Path) -> None:
    """Settings of the folder decide how often each layer is applied; the tensors are the same."""
    model = made("Bert", ALBERT)
    model.save(tmp_path / "out")
    edit(tmp_path / "out", num_hidden_layers=2)
    shorter = bert.load(tmp_path / "out")
    assert_same(shorter.params, model.params)
    ids = np.arange(5)[None]
    outputs = [
        bert.Bert(one.config, add_pooling_layer=False).apply({"params": one.params["bert"]}, ids)
        for one in (model, shorter)
    ]
    assert np.abs(np.subtract(*(output.last_hidden_state for output in outputs))).max() > 1e-2
    assert jax.tree.structure(outputs[0]) == jax.tree.structure(outputs[1])
