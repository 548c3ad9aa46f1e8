"""DeBERTa-v3's folders: their format, and the settings that are rejected."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.errors import UserError
from bert.files import read_json
from tests.interchange.hf_folders import DEBERTA, assert_same, edit, random_model, rewrite

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("deberta") / "vocab.txt"
    file.write_text("".join(f"{token}\n" for token in [*SPECIAL, *"abcdefghi", "[MASK]"]))
    return file


def test_in_and_out_under_its_names(vocabulary: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    model = random_model(vocabulary, "BertForSequenceClassification", DEBERTA)
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


def test_a_missing_epsilon_is_that_of_transformers(vocabulary: Path, tmp_path: Path) -> None:
    random_model(vocabulary, "BertForMaskedLM", dataclasses.replace(DEBERTA, layer_norm_eps=1e-5)).save(
        tmp_path / "out"
    )
    edit(tmp_path / "out", layer_norm_eps=None)
    assert bert.load(tmp_path / "out").config.layer_norm_eps == 1e-7


def test_what_is_not_read_or_written(vocabulary: Path, tmp_path: Path) -> None:
    model = random_model(vocabulary, "BertForMaskedLM", DEBERTA)
    model.save(tmp_path / "out")
    plain = (tmp_path / "out/config.json").read_text()
    for changes, said in (
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3, and only 0 is read: name another model"),
        ({"share_att_key": None}, "share_att_key is False, and only True is read"),
        ({"position_biased_input": None}, "position_biased_input is True, and only False is read"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd is 'none', and only 'layer_norm' is read"),
        ({"pos_att_type": "c2p"}, "pos_att_type is 'c2p', and only p2c|c2p is read"),
        ({"attention_head_size": 8}, "attention_head_size is 8, and only 4 is read"),
        ({"embedding_size": 8}, "embedding_size is 8, and only 12 is read"),
        ({"max_relative_positions": 8}, "max_relative_positions is 8, and only max_position_embeddings .16. is read"),
        ({"position_buckets": -1}, "position_buckets is -1: set it to a number from 1 on, or name another model"),
        ({"position_buckets": None}, "lacks position_buckets: copy it again"),
        ({"type_vocab_size": 2}, "type_vocab_size is 2, and only 0 is read"),
        ({"legacy": False}, "legacy is False, and only True is read"),
    ):
        edit(tmp_path / "out", **changes)
        with pytest.raises(UserError, match=f"config.json:? {said.replace('|', '[|]')}"):
            bert.load(tmp_path / "out")
        (tmp_path / "out/config.json").write_text(plain)
    for changes, reason in (
        ({"type_vocab_size": 2}, "type_vocab_size 2, .*DeBERTa-v3 cannot express, as it has no segments"),
        ({"pre_layer_norm": True}, "pre_layer_norm true, .*DeBERTa-v3 cannot express, as it has LayerNorm after"),
    ):
        config = dataclasses.replace(DEBERTA, **changes)
        with pytest.raises(UserError, match=rf"{reason}.*: export it as stablehlo$"):
            random_model(vocabulary, "BertForMaskedLM", config).save(tmp_path / "no")
