"""RoFormer's folders: rotated features, the activation of its classifier, and its tokenizer."""

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
from tests.interchange.hf_folders import EXAMPLES, assert_same

ROFORMER = EXAMPLES["roformer"]


@pytest.mark.parametrize("architecture", families.ROFORMER.classes)
def test_narrow_embeddings_in_and_out(architecture: str, made, tmp_path: Path) -> None:
    model = made(architecture, dataclasses.replace(ROFORMER, embedding_size=8))
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, model.config, model.labels)
    assert_same(again.params, model.params)
    assert read_json(tmp_path / "out/config.json")["embedding_size"] == 8


def test_features_that_are_rotated_together_stand_next_to_each_other(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", ROFORMER)
    model.save(tmp_path / "out")
    expected = load_file(tmp_path / "out/model.safetensors")["roformer.encoder.layer.1.attention.self.key.bias"]
    actual = model.params["bert"]["encoder"]["layer_1"]["attention"]["key"]["bias"]
    first_head = [0, 4, 1, 5, 2, 6, 3, 7]
    np.testing.assert_array_equal(expected[:8], np.asarray(actual)[first_head])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_classifiers_head_has_the_activation_of_the_layers(activation: str, made, tmp_path: Path) -> None:
    made("BertForSequenceClassification", ROFORMER).save(tmp_path / "out")
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "gelu"', f'"hidden_act": "{activation}"'))
    if activation == "silu":
        with pytest.raises(UserError, match="hidden_act is 'silu'"):
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
        with pytest.raises(UserError, match=r"tokenizer_class .*: set it to BertTokenizer"):
            bert.load(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    (tmp_path / "out" / SETTINGS).write_text('{"tokenizer_class": "BertTokenizer"}')
    assert bert.load(tmp_path / "out").config.position_embedding_type == "rotary"
