"""Texts from token ids: WordPiece's words and marks with the spaces of a text."""

import re

import pytest

from bert.config import TokenizerConfig
from bert.tokenizer.byte_level import train_byte_level
from bert.tokenizer.library import detokenize, join_words, lowercases
from bert.tokenizer.vocabulary import train_tokenizer

TEXTS = (
    "a man in a t-shirt, with 3.5 dogs (and a cat), isn't here.",
    'he said: "go home!" and went; who knows?',
    "the boys' hats cost $5 or 10% of 1,000.",
    "l'homme d'affaires",
    "auf dem „hier“ steht, ein „slow“-schild",
)


@pytest.mark.parametrize("text", TEXTS)
def test_marks_are_where_a_text_has_them(text: str) -> None:
    assert join_words(re.findall(r"\w+|[^\w\s]", text)) == text


@pytest.mark.parametrize("kind", ["wordpiece", "byte_level"])
def test_token_ids_become_text_again(kind: str) -> None:
    train = {"wordpiece": train_tokenizer, "byte_level": train_byte_level}[kind]
    tokenizer = train(iter(TEXTS), TokenizerConfig(kind=kind, vocab_size=300, min_frequency=1))
    for text in TEXTS:
        assert detokenize(tokenizer, tokenizer.encode(text).ids) == text
    assert lowercases(tokenizer) == (kind == "wordpiece")
