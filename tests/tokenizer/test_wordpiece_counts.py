"""Vocabularies trained from word counts equal vocabularies trained from text, for any number of parts."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.config import TokenizerConfig
from bert.errors import UserError
from bert.tokenizer.vocabulary import train_tokenizer, word_steps
from bert.tokenizer.wordpiece import WordCounts, blocks, count_words
from tests.helpers import REPOSITORY

HARD = [
    "two  spaces\tand a tab, a \x1c separator \x00 and  an   end ",
    "Élan vital; naïve façade: cafe\u0301 \u0301x İstanbul ẞ ﬁn",
    "東京 と 大阪、서울 العَرَبِيَّة 👩‍👩‍👧‍👦 a\u00a0b\u3000c\u2028d ▁ ▁x ☃",
    "",
    "\u200b",
    "half a pair \ud83d, [MASK] and ##ing",
]
TEXTS = [*(REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines(), *HARD, *HARD]
CONFIGS = {
    "wordpiece": TokenizerConfig(vocab_size=400),
    "cased": TokenizerConfig(vocab_size=300, lowercase=False, num_unused_tokens=3, min_frequency=1),
    "accents": TokenizerConfig(vocab_size=300, strip_accents=False, limit_alphabet=40),
    "byte_level": TokenizerConfig(kind="byte_level", vocab_size=500),
    "unigram": TokenizerConfig(kind="unigram", vocab_size=300),
    "unigram, few characters": TokenizerConfig(kind="unigram", vocab_size=300, lowercase=False, limit_alphabet=50),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_counts_of_one_two_or_three_parts_train_the_vocabulary_of_the_text(name: str) -> None:
    config = CONFIGS[name]
    whole = train_tokenizer(iter(TEXTS), config).to_str()
    for parts in (1, 2, 3):
        counts = WordCounts()
        for part in reversed(range(parts)):
            counts.words.update(count_words(TEXTS[part::parts], word_steps(config)).words)
        assert train_tokenizer(counts, config).to_str() == whole, parts


@given(st.lists(st.text(st.sampled_from("ab's1,é\u0301\u3000\t\x1c\u2028 東▁"), max_size=12), max_size=4))
def test_words_are_those_of_whole_lines(texts: list[str]) -> None:
    for config in CONFIGS.values():
        normalizer, pre_tokenizer = steps = word_steps(config)
        expected: collections.Counter[str] = collections.Counter()
        for text in texts:
            clean = normalizer.normalize_str(text) if normalizer else text
            expected.update(word for word, _ in pre_tokenizer.pre_tokenize_str(clean))
        assert count_words(texts, steps).words == expected


def test_lines_hold_each_word_as_often_as_it_was_counted() -> None:
    counts = WordCounts(collections.Counter({"the": 2500, "cat": 3}))
    assert max(line.count(" ") for line in counts.lines()) < 2000
    assert count_words(counts.lines(), WordCounts.steps()) == counts
    assert counts.characters() == {"t": 2503, "h": 2500, "e": 2500, "c": 3, "a": 3}


def test_blocks_hold_every_line_once() -> None:
    result = list(blocks(TEXTS, 500))
    assert len(result) > 3
    assert "".join(result) == "".join(text.encode("utf-8", "replace").decode() + "\n" for text in TEXTS)


@pytest.mark.parametrize("kind", ["wordpiece", "byte_level", "unigram"])
def test_no_words_are_one_sentence(kind: str) -> None:
    with pytest.raises(UserError, match="holds no text"):
        train_tokenizer(WordCounts(), TokenizerConfig(kind=kind))
