"""Pre-LN encoders in RoBERTa-PreLayerNorm's folders."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from bert.interchange import families
from tests.interchange.hf_folders import CONFIG, ROBERTA, assert_same, edit

PRE_LN = dataclasses.replace(ROBERTA, pre_layer_norm=True, position_offset=1)


@pytest.mark.parametrize("architecture", families.ROBERTA_PRELAYERNORM.classes)
def test_every_class_in_and_out(architecture: str, made, tmp_path: Path) -> None:
    """The vocabulary's padding id is 0, and positions begin after it."""
    model = made(architecture, PRE_LN)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, PRE_LN, model.labels)
    assert_same(again.params, model.params)
    assert (
        "roberta_prelayernorm.LayerNorm.weight" in load_file(tmp_path / "out/model.safetensors")
        or architecture == "Bert"
    )


@pytest.mark.medium
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_positions_from_row_0_get_a_row_for_padding(positions: str, made, tmp_path: Path) -> None:
    sizes = {"pre_layer_norm": True, "hidden_act": "gelu", "position_embedding_type": positions}
    model = made("BertForMaskedLM", dataclasses.replace(CONFIG, **sizes))
    model.save(tmp_path / "out")
    content = read_json(tmp_path / "out/config.json")
    assert (content["model_type"], content["pad_token_id"], content["max_position_embeddings"]) == (
        "roberta-prelayernorm",
        0,
        17,
    )
    again = bert.load(tmp_path / "out")
    assert (again.config.position_offset, again.config.max_position_embeddings) == (1, 16)
    table = again.params["bert"]["embeddings"]["position"]["embedding"]
    assert not table[0].any()
    if positions == "learned":
        np.testing.assert_array_equal(table[1:], model.params["bert"]["embeddings"]["position"]["embedding"])
    texts = ["a b c", "d"]
    ours, theirs = model.encode(texts).last_hidden_state, again.encode(texts).last_hidden_state
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_padding_id_after_the_first_token_gets_rows_up_to_it(made) -> None:
    """Byte-level vocabularies have [PAD] as the second token."""
    model = made("BertForMaskedLM", dataclasses.replace(CONFIG, pre_layer_norm=True, hidden_act="gelu"))
    config, params = families.ROBERTA_PRELAYERNORM.separate(
        model.config, {"bert/embeddings/position/embedding": np.ones((16, 8), np.float32)}, 1
    )
    assert config.position_offset == 2
    assert params["bert/embeddings/position/embedding"].sum(axis=1).tolist() == [0, 0, *[8] * 16]


def test_a_folder_without_a_type_is_of_its_classs_family(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", PRE_LN).save(tmp_path / "out")
    edit(tmp_path / "out", model_type=None)
    assert bert.load(tmp_path / "out").config == PRE_LN


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale_embeddings": True}, "scale_embeddings true, which transformers' RoBERTa-PreLayerNorm cannot express"),
        ({"hidden_act": "relu"}, "hidden_act relu, .*as its MLM head has gelu"),
        ({"position_offset": 2}, "position_offset 2, .*counts positions from the padding id, which is 0"),
    ],
)
def test_what_it_lacks_is_refused(changes: dict, reason: str, made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        made("BertForMaskedLM", dataclasses.replace(PRE_LN, **changes)).save(tmp_path / "out")
