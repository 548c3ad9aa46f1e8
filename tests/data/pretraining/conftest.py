"""A corpus whose sentences name their document and place."""

from __future__ import annotations

import pytest

from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer

DOCUMENTS, SENTENCES, WORDS, T = 60, 12, 7, 32


FIRST = len(SPECIAL_TOKENS)


PAD, UNK, CLS, SEP, MASK = range(5)


def word(document, sentence, place):
    return f"d{document}s{sentence}w{place}"


def sentence_of(document, sentence):
    return " ".join(word(document, sentence, place) for place in range(WORDS))


def text_of(documents):
    return "\n\n".join("\n".join(sentence_of(d, s) for s in range(SENTENCES)) for d in documents)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpus.txt and a vocabulary of its words; id = FIRST + running number of the word."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "corpus.txt").write_text(text_of(range(DOCUMENTS)), encoding="utf-8")
    words = [word(d, s, w) for d in range(DOCUMENTS) for s in range(SENTENCES) for w in range(WORDS)]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(place):
    return load_tokenizer(place / "vocab.txt")
