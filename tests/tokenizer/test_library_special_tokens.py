"""Special tokens are found by role; any may be missing, and asking for a missing one is one sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bert.config import DataConfig
from bert.data.encoding import row_template, tokenize
from bert.data.pretraining.loader import make_masking
from bert.errors import UserError
from bert.interchange.writers.hf_files import save_published_tokenizer
from bert.tokenizer.byte_level import TRAINED_SPECIAL_TOKENS, build_byte_level
from bert.tokenizer.library import SPECIAL_TOKENS, TOKEN_SETS, special_ids, special_tokens
from bert.tokenizer.vocabulary import load_tokenizer, subword_ids

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = "<|endoftext|>"


def numbered(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate([*tokens, *BYTES, "Ġa"])}


def write_gpt2(folder: Path) -> Path:
    (folder / "vocab.json").write_text(json.dumps(numbered(END)))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    return folder


def test_a_vocabulary_of_one_special_token(tmp_path: Path) -> None:
    """GPT-2's: the end of a text is the only one, and rows have none."""
    tokenizer = load_tokenizer(write_gpt2(tmp_path))
    special = special_ids(tokenizer)
    assert (special.bos, special.eos, special.all) == (0, 0, (0,))
    assert (special.find("pad"), special.find("eos")) == (None, 0)
    assert row_template(tokenizer).size == row_template(tokenizer, pair=True).size == 0
    text = " a é\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(END).ids == [0]
    assert 0 not in subword_ids(tokenizer)
    rows = tokenize(tokenizer, [" a a"], 8)
    assert rows.ids.tolist() == [tokenizer.token_to_id("Ġa")] * 2
    save_published_tokenizer(tokenizer, tmp_path / "out", 16)
    written = json.loads((tmp_path / "out" / "special_tokens_map.json").read_text())
    assert written == {"bos_token": END, "eos_token": END, "pad_token": END}
    assert load_tokenizer(tmp_path / "out").to_str() == tokenizer.to_str()


def test_gpt2_with_a_padding_token() -> None:
    assert special_tokens(numbered(END, "<pad>")) == {"bos": END, "eos": END, "pad": "<pad>"}


@pytest.mark.parametrize("role", ["pad", "unk", "cls", "sep", "mask"])
def test_a_missing_role_is_one_sentence(role: str, tmp_path: Path) -> None:
    special = special_ids(load_tokenizer(write_gpt2(tmp_path)))
    names = " or ".join(dict.fromkeys(tokens[role] for tokens in TOKEN_SETS if role in tokens))
    with pytest.raises(UserError) as raised:
        getattr(special, role)
    assert str(raised.value) == (f"the vocabulary has no {role} token ({names}): use a vocabulary that has one")


def test_masks_need_a_mask(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no mask token"):
        make_masking(DataConfig(), load_tokenizer(write_gpt2(tmp_path)))


def test_a_byte_level_vocabulary_with_the_tokens_of_bert(tmp_path: Path) -> None:
    """ModernBERT's form."""
    vocab = numbered(*SPECIAL_TOKENS)
    tokenizer = build_byte_level(vocab, [("Ġ", "a")])
    assert tokenizer.encode(" a", " a").tokens == ["[CLS]", "Ġa", "[SEP]", "Ġa", "[SEP]"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    assert special_ids(again).all == tuple(range(5))
    with pytest.raises(UserError, match="has no bos token"):
        special_ids(again).bos  # noqa: B018


def test_the_set_of_which_most_is_there_counts() -> None:
    both = dict.fromkeys([*SPECIAL_TOKENS, *TRAINED_SPECIAL_TOKENS], 0)
    assert special_tokens(both)["mask"] == "<mask>"
    del both["<pad>"]
    assert special_tokens(both)["mask"] == "[MASK]"
    assert special_tokens({"word": 0}) == {}
    assert set(special_tokens(dict.fromkeys(TRAINED_SPECIAL_TOKENS[:3], 0))) == {"pad", "cls", "sep", "bos", "eos"}


def test_a_wordpiece_without_a_mask_is_read_from_its_tokenizer_file(tmp_path: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "a"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    assert np.array(again.encode("a").ids).tolist() == [1, 3, 2]
    with pytest.raises(UserError, match="has no mask token"):
        special_ids(again).mask  # noqa: B018
    (tmp_path / "tokenizer.json").write_text(again.to_str().replace("[", "{").replace("]", "}"))
    with pytest.raises(UserError, match="is not a complete"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    with pytest.raises(UserError, match=r"lacks \[PAD\], \[MASK\]"):
        load_tokenizer(tmp_path)
