"""DeBERTa-v3's folders: names and settings."""

import dataclasses
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import bert
from bert.files import read_json
from tests.interchange.hf_folders import DEBERTA, assert_same, edit, rewrite


def test_in_and_out_under_its_names(made, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    model = made("BertForSequenceClassification", DEBERTA)
    model.save(folder)
    again = bert.load(folder)
    assert (again.architecture, again.config, again.labels) == (model.architecture, DEBERTA, model.labels)
    assert_same(again.params, model.params)
    tensors, content = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    table = tensors["deberta.encoder.rel_embeddings.weight"]
    np.testing.assert_array_equal(table, model.params["bert"]["encoder"]["relative_attention_embeddings"]["embedding"])
    layer = "deberta.encoder.layer.1.attention"
    names = {f"{layer}.self.query_proj.bias", f"{layer}.output.dense.weight", "deberta.encoder.LayerNorm.weight"}
    assert {*names, "pooler.dense.weight", "classifier.bias"} <= set(tensors)
    keys = ("model_type", "position_buckets", "relative_attention", "position_biased_input", "type_vocab_size")
    assert [content[key] for key in keys] == ["deberta-v2", 4, True, False, 0]
    # As the published folders have them
    edit(folder, pos_att_type="p2c|c2p", cls_dropout=0.2, max_relative_positions=DEBERTA.max_position_embeddings)
    head = {"lm_predictions.lm_head.bias": np.zeros(23), "mask_predictions.dense.bias": np.zeros(12)}
    unused = {"deberta.embeddings.position_embeddings.weight": np.zeros((16, 12)), **head}
    rewrite(folder, lambda tensors: {**tensors, **unused})
    again = bert.load(folder)
    assert (again.config, again.classifier_dropout) == (DEBERTA, 0.2)
    assert_same(again.params, model.params)


def test_a_missing_epsilon_is_that_of_transformers(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", dataclasses.replace(DEBERTA, layer_norm_eps=1e-5)).save(tmp_path / "out")
    edit(tmp_path / "out", layer_norm_eps=None)
    assert bert.load(tmp_path / "out").config.layer_norm_eps == 1e-7
