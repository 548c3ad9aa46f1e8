"""Cached tokens of text segments equal the tokens of the whole text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from bert.config import TokenizerConfig
from bert.data.pretraining import tokenization
from bert.data.pretraining.tokenization import StretchEncoder, are_words_separate, encode_texts, text_encoder
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import literal_tokenizer, load_tokenizer, train_tokenizer

LETTERS = "abcdeé\u0301\u0323ßİΣσς中文\u3000\u00a0\u2028\u00ad\u200b\ufffd\x00\x1c\x85\t\n\r.,'[]-#ﬁ한\U0001f642"
"""Combining marks, capitals that lowercase to two characters, spaces of all kinds, control characters, punctuation."""

WORDS = ["a", "abc", "##b", "##c", "d", "e", "##e", "中", "文", ".", ",", "'", "[", "]", "-", "#", "mask", "ss", "##ss"]


def tokenizer_of(folder: Path, lowercase: bool) -> Tokenizer:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS, "##é", "é", "σ", "##σ", "한"]), "utf-8")
    return literal_tokenizer(load_tokenizer(folder / "vocab.txt", TokenizerConfig(lowercase=lowercase)))


TEXTS = st.lists(st.one_of(st.text(st.sampled_from(f"{LETTERS}    "), max_size=40), st.text(max_size=20)), max_size=8)


@pytest.mark.medium
@pytest.mark.parametrize("lowercase", [True, False])
def test_any_text_has_the_tokens_of_the_whole(tmp_path_factory: pytest.TempPathFactory, lowercase: bool) -> None:
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("vocabulary"), lowercase)
    encode = text_encoder(tokenizer)
    assert isinstance(encode, StretchEncoder)

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(texts: list[str]) -> None:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        for actual, expected in zip(encode(texts), encode_texts(tokenizer, texts), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)

    check()
    words = [" ".join(["[MASK] a", "x" * 300, "[SEP]", "", "abc"])]
    np.testing.assert_array_equal(encode(words)[0], encode_texts(tokenizer, words)[0])


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(tmp_path, True)
    encode = StretchEncoder(tokenizer)
    monkeypatch.setattr(tokenization, "MAX_STRETCHES", 50)
    for number in range(40):
        texts = [f"a{number}b{place} abc" for place in range(10)] + ["d" * 65]
        np.testing.assert_array_equal(encode(texts)[0], encode_texts(tokenizer, texts)[0])
        assert len(encode._known) <= 61
        assert "d" * 65 not in encode._known


def test_other_vocabularies_read_whole_texts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, True)
    tokenizer.add_tokens([AddedToken("new york")])
    assert not are_words_separate(tokenizer)
    assert not are_words_separate(load_tokenizer(tmp_path / "vocab.txt"))
    trained = train_tokenizer(["a b c"] * 10, TokenizerConfig(kind="byte_level", vocab_size=300))
    assert not are_words_separate(literal_tokenizer(trained))
