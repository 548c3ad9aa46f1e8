"""Unigram vocabularies: trained, saved, read, and laid out in rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from bert.commands.corpus import tokenizer_command as main
from bert.config import TokenizerConfig
from bert.data.encoding import row_template
from bert.errors import UserError
from bert.tokenizer.library import special_ids, vocabulary_kind
from bert.tokenizer.unigram import TRAINED_SPECIAL_TOKENS, build_unigram
from bert.tokenizer.vocabulary import (
    continues_word,
    literal_tokenizer,
    load_tokenizer,
    save_tokenizer,
    subword_ids,
    token_text,
    train_tokenizer,
)
from tests.helpers import REPOSITORY, thoroughly

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
CONFIG = TokenizerConfig(kind="unigram", vocab_size=400)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(iter(TEXT), CONFIG)


def test_training_again_gives_the_same_file(trained: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXT), CONFIG).to_str() == trained.to_str()


def test_size_and_special_tokens(trained: Tokenizer) -> None:
    assert trained.get_vocab_size() <= 400
    assert [trained.id_to_token(number) for number in range(5)] == list(TRAINED_SPECIAL_TOKENS)
    assert special_ids(trained).by_role == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert vocabulary_kind(trained) == "unigram"


def test_the_most_probable_tokens_are_taken_not_the_longest_first() -> None:
    """P(ab) P(cd) > P(abc) P(d): 0.3 * 0.3 > 0.4 * 0.1, by hand."""
    pieces = {"▁": 0.1, "ab": 0.3, "cd": 0.3, "abc": 0.4, "d": 0.1, "a": 0.01, "b": 0.01, "c": 0.01}
    tokenizer = build_unigram([(token, float(np.log(p))) for token, p in pieces.items()], CONFIG)
    assert tokenizer.encode("abcd", add_special_tokens=False).tokens == ["▁", "ab", "cd"]


def test_rows_and_types_are_berts(trained: Tokenizer) -> None:
    row = trained.encode("a text", "another")
    assert (row.tokens[0], row.tokens[-1], row.tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    assert row_template(trained, pair=True).types_of_special == (0, 0, 1)
    assert trained.decode(trained.encode("the text of a run").ids) == "the text of a run"


def test_text_steps_follow_the_keys() -> None:
    pieces = [(token, -1.0) for token in ["▁", "é", "É", "e", "E"]]

    def read(**keys) -> list[str]:
        tokenizer = build_unigram(pieces, TokenizerConfig(kind="unigram", **keys))
        return tokenizer.encode("É", add_special_tokens=False).tokens

    assert read() == ["▁", "e"]
    assert read(strip_accents=False) == ["▁", "é"]
    assert read(lowercase=False) == ["▁", "É"]
    assert read(lowercase=False, strip_accents=True) == ["▁", "E"]


def test_words_begin_with_the_mark(trained: Tokenizer) -> None:
    assert (continues_word(trained, "▁the"), continues_word(trained, "ing")) == (False, True)
    inside = [trained.id_to_token(number) for number in subword_ids(trained)]
    assert inside and not any(token.startswith("▁") or token in TRAINED_SPECIAL_TOKENS for token in inside)
    assert token_text(trained, trained.token_to_id("▁the")) == " the"
    assert token_text(trained, special_ids(trained).mask) == "[MASK]"


def test_rare_characters_are_unknown_and_do_not_take_room() -> None:
    texts = ["common words and letters again and again"] * 3 + ["rare ☃"]
    vocab = train_tokenizer(texts, TokenizerConfig(kind="unigram", vocab_size=40)).get_vocab()
    assert "☃" not in vocab and "▁" in vocab
    few = train_tokenizer(texts, TokenizerConfig(kind="unigram", vocab_size=40, limit_alphabet=3))
    assert few.get_vocab_size() <= 40
    assert 1 in few.encode("rare ☃").ids
    many = [chr(0x4E00 + number) * 2 for number in range(400)]
    assert train_tokenizer(many, TokenizerConfig(kind="unigram", vocab_size=120)).get_vocab_size() <= 120


@pytest.mark.parametrize("texts", [[], ["", " \n\t "]])
def test_a_corpus_without_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match="the corpus holds no text to train a vocabulary on"):
        train_tokenizer(texts, CONFIG)


def test_unused_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_unused_tokens is 5, but tokenizer\.kind is unigram: remove"):
        TokenizerConfig(kind="unigram", num_unused_tokens=5).check()


@given(st.text(st.characters(), max_size=40))
@thoroughly(50)
def test_any_text_is_read_and_special_tokens_in_it_are_prose(trained: Tokenizer, text: str) -> None:
    literal = literal_tokenizer(trained)
    assert special_ids(literal) == special_ids(trained)
    ids = literal.encode(text.encode("utf-8", "replace").decode() + " [MASK] <pad>", add_special_tokens=False).ids
    assert not set(ids) & {0, 2, 3, 4}


def test_saved_and_read(trained: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(trained, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    assert load_tokenizer(tmp_path).to_str() == trained.to_str()
    content = json.loads(trained.to_str())
    content["model"] = json.loads(Tokenizer(models.WordLevel({"[CLS]": 0}, unk_token="[CLS]")).to_str())["model"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"WordLevel.*only WordPiece"):
        load_tokenizer(tmp_path)


def test_the_command_trains_one(corpus: Path, tmp_path: Path, capsys) -> None:
    arguments = [f"--data.train={corpus}", "--tokenizer.kind=unigram", "--tokenizer.vocab_size=60"]
    assert main([*arguments, f"--output={tmp_path / 'words'}"]) == 0
    assert "holds tokenizer.json with" in capsys.readouterr().out
    assert vocabulary_kind(load_tokenizer(tmp_path / "words")) == "unigram"


def test_special_tokens_after_the_models_pieces_stay_known_where_texts_are_prose(trained: Tokenizer) -> None:
    """Converters of DeBERTa-v3's vocabulary place its mask token this way."""
    content = json.loads(trained.to_str())
    pieces, added = content["model"]["vocab"], content["added_tokens"]
    [mask] = [token for token in added if token["content"] == "[MASK]"]
    pieces[mask["id"]][0] = "unused"
    mask["id"] = len(pieces)
    moved = Tokenizer.from_str(json.dumps({**content, "added_tokens": sorted(added, key=lambda token: token["id"])}))
    literal = literal_tokenizer(moved)
    assert special_ids(literal) == special_ids(moved)
    assert special_ids(moved).mask == len(pieces)
    assert len(pieces) not in literal.encode("a [MASK] b", add_special_tokens=False).ids
