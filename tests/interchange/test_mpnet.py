"""MPNet's folders: their format, their vocabulary, and the settings that are rejected."""

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
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import load_tokenizer
from tests.interchange.hf_folders import MPNET, assert_same, edit, random_model, rewrite

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the order of the published one, which has BERT's special tokens as ordinary ones."""
    file = tmp_path_factory.mktemp("mpnet") / "vocab.txt"
    tokens = [*SPECIAL, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi", "##a", "##b", "<", ">", "<mask>"]
    file.write_text("".join(f"{token}\n" for token in tokens))
    return file


@pytest.mark.parametrize("architecture", families.MPNET.classes)
def test_every_class_in_and_out(architecture: str, vocabulary: Path, tmp_path: Path) -> None:
    model = random_model(vocabulary, architecture, MPNET)
    model.save(tmp_path / "out")
    again = bert.load(tmp_path / "out")
    assert (again.architecture, again.config, again.labels) == (architecture, MPNET, model.labels)
    assert_same(again.params, model.params)


def test_names_and_settings_are_mpnets(vocabulary: Path, tmp_path: Path) -> None:
    model = random_model(vocabulary, "BertForSequenceClassification", MPNET)
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


def test_its_rows(vocabulary: Path) -> None:
    tokenizer = load_tokenizer(vocabulary)
    assert tokenizer.encode("ab", "c ?").tokens == ["<s>", "a", "##b", "</s>", "</s>", "c", "[UNK]", "</s>"]
    special = special_ids(tokenizer)
    assert tokenizer.encode("a <mask>b").ids == [0, 9, special.mask, 10, 2], "the mask takes the space before it"
    assert (special.pad, special.cls, special.sep, special.unk) == (1, 0, 2, 5)
    assert special.mask == tokenizer.get_vocab_size() - 1
    assert 6 not in special.all, "[CLS] is a token like others"


def test_what_is_not_read_or_written(vocabulary: Path, tmp_path: Path) -> None:
    random_model(vocabulary, "BertForMaskedLM", MPNET).save(tmp_path / "out")
    edit(tmp_path / "out", relative_attention_num_buckets=64)
    with pytest.raises(UserError, match="relative_attention_num_buckets is 64, and only 32 is read: name another"):
        bert.load(tmp_path / "out")
    edit(tmp_path / "out", relative_attention_num_buckets=None)
    lost = "mpnet.encoder.relative_attention_bias.weight"
    rewrite(tmp_path / "out", lambda tensors: {name: x for name, x in tensors.items() if name != lost})
    with pytest.raises(UserError, match=f"lacks {lost}: copy it again"):
        bert.load(tmp_path / "out")
    for changes, reason in (
        ({"relative_attention_buckets": 8}, "relative_attention_buckets 8, .*MPNet cannot express, as it has 32 bucke"),
        ({"position_offset": 0}, "position_offset 0, .*MPNet cannot express, as its positions begin at row 2"),
        ({"type_vocab_size": 2}, "type_vocab_size 2, .*MPNet cannot express, as it has no segments"),
        ({"causal": True}, "relative_attention_buckets 32, .*GPT-2 cannot express, as its attention scores have no"),
    ):
        config = dataclasses.replace(MPNET, **changes)
        with pytest.raises(UserError, match=rf"{reason}.*: export it as stablehlo$"):
            random_model(vocabulary, "BertForCausalLM" if config.causal else "BertForMaskedLM", config).save(
                tmp_path / "no"
            )
