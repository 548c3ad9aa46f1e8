"""RoBERTa-PreLayerNorm's and MPNet's folders: names, settings, positions and vocabulary."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.files import read_json
from bert.interchange import families
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import load_tokenizer
from tests.interchange.hf_folders import CONFIG, EXAMPLES, MPNET, edit

PRE_LN = EXAMPLES["roberta-prelayernorm"]


def test_a_last_layer_norm_is_stored(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", PRE_LN).save(tmp_path / "out")
    assert "roberta_prelayernorm.LayerNorm.weight" in load_file(tmp_path / "out/model.safetensors")


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
    actual, expected = model.encode(texts).last_hidden_state, again.encode(texts).last_hidden_state
    np.testing.assert_allclose(actual, expected, atol=1e-5)


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


def test_names_and_settings_are_mpnets(made, tmp_path: Path) -> None:
    model = made("BertForSequenceClassification", MPNET)
    model.save(tmp_path / "out")
    tensors, content = load_file(tmp_path / "out/model.safetensors"), read_json(tmp_path / "out/config.json")
    table = tensors["mpnet.encoder.relative_attention_bias.weight"]
    np.testing.assert_array_equal(table, model.params["bert"]["encoder"]["relative_attention_bias"]["embedding"])
    block = "mpnet.encoder.layer.1.attention"
    assert {f"{block}.attn.o.weight", f"{block}.LayerNorm.bias", "classifier.dense.weight"} <= set(tensors)
    keys = ("model_type", "relative_attention_num_buckets", "max_position_embeddings", "pad_token_id", "eos_token_id")
    assert [content[key] for key in keys] == ["mpnet", 32, 18, 1, 2]
    assert "type_vocab_size" not in content
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "MPNetTokenizer"
    assert (settings["cls_token"], settings["unk_token"], settings["mask_token"]) == ("<s>", "[UNK]", "<mask>")


def test_rows_of_mpnet(mpnet_vocabulary: Path) -> None:
    tokenizer = load_tokenizer(mpnet_vocabulary)
    assert tokenizer.encode("ab", "c ?").tokens == ["<s>", "a", "##b", "</s>", "</s>", "c", "[UNK]", "</s>"]
    special = special_ids(tokenizer)
    assert tokenizer.encode("a <mask>b").ids == [0, 9, special.mask, 10, 2], "the mask takes the space before it"
    assert (special.pad, special.cls, special.sep, special.unk) == (1, 0, 2, 5)
    assert special.mask == tokenizer.get_vocab_size() - 1
    assert 6 not in special.all, "[CLS] is a token like others"
