"""Rotary positions in BERT's form, in RoFormer's folders."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from bert.interchange import families
from bert.tokenizer.hf_settings import SETTINGS
from tests.interchange.hf_folders import CONFIG, assert_same

ROFORMER = dataclasses.replace(
    CONFIG, hidden_size=24, hidden_act="gelu", pooler_act="gelu", position_embedding_type="rotary"
)


@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize("architecture", families.ROFORMER.classes)
def test_every_class_in_and_out(architecture: str, width: int | None, made, tmp_path: Path) -> None:
    config = dataclasses.replace(ROFORMER, embedding_size=width)
    model = made(architecture, config)
    said: list[str] = []
    model.save(tmp_path / "out", say=said.append)
    assert "read back identical" in said[0]
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, config, model.labels)
    assert_same(again.params, model.params)
    content = read_json(tmp_path / "out/config.json")
    assert (content["model_type"], content["embedding_size"]) == ("roformer", width or 24)


def test_features_that_are_rotated_together_stand_next_to_each_other(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", ROFORMER)
    model.save(tmp_path / "out")
    theirs = load_file(tmp_path / "out/model.safetensors")["roformer.encoder.layer.1.attention.self.key.bias"]
    ours = model.params["bert"]["encoder"]["layer_1"]["attention"]["key"]["bias"]
    first_head = [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(theirs[:8], np.asarray(ours)[first_head])


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("BertForMaskedLM", {"rotary_base": 500.0}, "rotary_base 500.0, .*RoFormer cannot express"),
        ("BertForMaskedLM", {"attention_window": 4}, "attention_window 4, .*RoFormer cannot express"),
        ("BertForSequenceClassification", {"pooler_act": "tanh"}, "pooler_act tanh, .*heads over a row have gelu"),
        ("BertForPreTraining", {}, "of RoFormer's form, which transformers does not have"),
    ],
)
def test_what_it_lacks_is_refused(architecture: str, changes: dict, reason: str, made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        made(architecture, dataclasses.replace(ROFORMER, **changes)).save(tmp_path / "out")


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_classifiers_head_has_the_activation_of_the_layers(activation: str, made, tmp_path: Path) -> None:
    made("BertForSequenceClassification", ROFORMER).save(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "gelu"', f'"hidden_act": "{activation}"'))
    if activation == "silu":
        with pytest.raises(UserError, match="hidden_act is 'silu', which the classifier takes too"):
            bert.load(tmp_path / "out")
        return
    assert bert.load(tmp_path / "out").config.pooler_act == "relu"


def test_a_vocabulary_without_the_class_that_reads_it_is_refused(made, tmp_path: Path) -> None:
    """transformers would take RoFormer's own, which reads other tokens."""
    made("BertForMaskedLM", ROFORMER).save(tmp_path / "out")
    assert bert.load(tmp_path / "out").config.position_embedding_type == "rotary"
    own = [{}, {"do_lower_case": True}, {"tokenizer_class": "RoFormerTokenizer"}]  # whose tokenizer.json lacks its step
    for settings in own:
        (tmp_path / "out" / SETTINGS).write_text(json.dumps(settings))
        with pytest.raises(UserError, match=r"names no other tokenizer_class than .* set it to BertTokenizer"):
            bert.load(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    (tmp_path / "out" / SETTINGS).write_text('{"tokenizer_class": "BertTokenizer"}')
    assert bert.load(tmp_path / "out").config.position_embedding_type == "rotary"
