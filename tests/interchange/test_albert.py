"""ALBERT's folders: their format, the settings that are read, and the ones that are rejected."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from bert.interchange import families
from tests.interchange.hf_folders import ALBERT, assert_same, edit, rewrite


@pytest.mark.parametrize("architecture", families.ALBERT.classes)
def test_every_class_in_and_out(architecture: str, made, tmp_path: Path) -> None:
    model = made(architecture, ALBERT)
    said: list[str] = []
    model.save(tmp_path / "out", say=said.append)
    assert "read back identical" in said[0]
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, ALBERT, model.labels)
    assert_same(again.params, model.params)


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


REFUSED = {
    "inner_group_num": (2, "inner_group_num is 2, and only 1 is read: name another model"),
    "num_hidden_groups": (3, "layer_groups is 3, which does not divide num_hidden_layers .4.: change one of them"),
    "embedding_size": ("narrow", "embedding_size is 'narrow': copy the file again"),
    "hidden_size": (8, "embedding_size and hidden_size are both 8, and a mapping between equal sizes is not read"),
    "architectures": (["AlbertForCausalLM"], "the architecture is 'AlbertForCausalLM': one of"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_expressed_is_refused(key: str, made, tmp_path: Path) -> None:
    made("BertForMaskedLM", ALBERT).save(tmp_path / "out")
    value, message = REFUSED[key]
    edit(tmp_path / "out", **{key: value})
    with pytest.raises(UserError, match=message):
        bert.load(tmp_path / "out")


def test_a_missing_tensor_is_named(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", ALBERT).save(tmp_path / "out")
    lost = "albert.encoder.albert_layer_groups.1.albert_layers.0.ffn.weight"
    rewrite(tmp_path / "out", lambda tensors: {name: x for name, x in tensors.items() if name != lost})
    with pytest.raises(UserError, match=f"lacks {lost}: copy it again"):
        bert.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"embedding_size": None}, "layer_groups 2, .*BERT cannot express, as each of its layers has parameters"),
        ({"step_embedding": True}, "step_embedding true, .*ALBERT cannot express, as its layers read nothing of their"),
        ({"pre_layer_norm": True}, "pre_layer_norm true, .*ALBERT cannot express"),
    ],
)
def test_other_shared_layers_are_exported_in_other_formats(changes: dict, reason: str, made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{reason}.*: export it as stablehlo or onnx$"):
        made("BertForMaskedLM", dataclasses.replace(ALBERT, **changes)).save(tmp_path / "out")
