"""Vocabularies of ten languages: which characters they keep, where sentences end, and which tokens continue a word."""

import functools
import itertools
import json
import random
import unicodedata

import pytest

from bert.config import TokenizerConfig
from bert.data.corpus.documents import split_sentences
from bert.data.corpus.vocabulary import measure_losses
from bert.data.pretraining.tokenization import StretchEncoder, are_words_separate, encode_texts, text_encoder
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import (
    literal_tokenizer,
    load_tokenizer,
    normalization,
    save_tokenizer,
    subword_ids,
    tokenizer_fingerprint,
    train_tokenizer,
    word_steps,
)
from bert.tokenizer.wordpiece import count_words
from tests.languages import ALL_KEPT, NUM_SENTENCES, PARAGRAPHS, training_texts

KINDS = ("wordpiece", "unigram", "byte_level")


@functools.cache
def vocabulary(language, kind, strip_accents="european"):
    return train_tokenizer(training_texts(language), TokenizerConfig(kind, None, 900, strip_accents=strip_accents))


def read_again(tokenizer, text):
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)


def comparable(text):
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_letters_and_marks_survive_encoding(language, kind):
    text = PARAGRAPHS[language]
    keeps_all = kind == "byte_level" or language in ALL_KEPT
    tokenizer = vocabulary(language, kind)
    if keeps_all:
        assert comparable(read_again(tokenizer, text)) == comparable(text)
    else:
        decomposed = unicodedata.normalize("NFD", comparable(text))
        assert comparable(read_again(tokenizer, text)) == "".join(c for c in decomposed if not unicodedata.combining(c))
    losses = measure_losses(tokenizer, [text])
    assert losses.unknown == 0
    assert (losses.removed == 0) == keeps_all


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_without_stripping_all_ten_languages_survive(language, kind):
    text = PARAGRAPHS[language]
    assert comparable(read_again(vocabulary(language, kind, False), text)) == comparable(text)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_null_removes_the_marks_of_all_scripts_as_bert_does(kind):
    assert measure_losses(vocabulary("th", kind, None), [PARAGRAPHS["th"]]).removed > 0.2
    assert vocabulary("th", kind, None).normalizer.normalize_str("ที่").strip("▁") == "ท"


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_mixed_corpus_loses_the_marks_of_european_letters_alone(kind):
    texts = [*training_texts("th"), *training_texts("de"), *training_texts("ru")]
    tokenizer = train_tokenizer(iter(texts), TokenizerConfig(kind, None, 900))
    assert tokenizer.normalizer.normalize_str("Für Ёлка ΆΛΦΑ e\u0301 ที่ ガ 한 क़") == "fur елка αλφα e ที่ ガ 한 क़"


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_an_almost_european_corpus_is_read_by_the_steps_of_bert(kind):
    """BERT's other tools can then read the vocabulary, whatever a few foreign words become."""
    texts = [*training_texts("de"), "ที่ ❤️ ≠"]
    trained, bert = (
        train_tokenizer(iter(texts), TokenizerConfig(kind, None, 300, strip_accents=strip_accents))
        for strip_accents in ("european", None)
    )
    assert trained.to_str() == bert.to_str()
    if kind == "wordpiece":
        assert json.loads(trained.to_str())["normalizer"]["strip_accents"] is None


def test_chinese_characters_continue_no_word_and_fill_their_share():
    characters = [chr(0x4E00 + i) for i in range(700)]
    draw = random.Random(0)
    texts = ["".join(draw.choices(characters, [1 / (i + 1) for i in range(700)], k=40)) for _ in range(300)]
    tokens = train_tokenizer(texts, TokenizerConfig(vocab_size=1200)).get_vocab()
    # A quarter, and up to a tenth more for those that are as common as the last one.
    assert 300 <= sum(token in tokens for token in characters) <= 330
    assert not any(f"##{character}" in tokens for character in characters)


@pytest.mark.parametrize("language", PARAGRAPHS)
def test_sentences_end_where_the_language_ends_them(language):
    assert len(split_sentences([PARAGRAPHS[language]], language)) == NUM_SENTENCES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_tokens_that_continue_a_word_are_in_one_word_with_the_token_before(language, kind):
    """Words as whole-word masking finds them."""
    text, tokenizer = PARAGRAPHS[language][::2], vocabulary(language, kind)
    continuing = set(subword_ids(tokenizer))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    tokens = list(zip(encoding.ids, encoding.offsets, strict=True))
    pairs = [(before[0], end) for (_, before), (id, (_, end)) in itertools.pairwise(tokens) if id in continuing]
    assert all(len(text[start:end].split()) == 1 for start, end in pairs)
    assert bool(pairs) == (kind != "wordpiece" or language != "zh")


@pytest.mark.parametrize("language", ALL_KEPT)
def test_counted_words_train_the_vocabulary_of_the_text(language):
    for kind in ("wordpiece", "unigram"):
        config = TokenizerConfig(kind, None, 900)
        counts = count_words(training_texts(language), word_steps(config))
        assert train_tokenizer(counts, config).to_str() == vocabulary(language, kind).to_str()


@pytest.mark.parametrize("language", ["th", "ko", "vi"])
def test_words_are_read_one_by_one_and_the_vocabulary_is_saved_whole(language, tmp_path):
    tokenizer = vocabulary(language, "wordpiece")
    literal = literal_tokenizer(tokenizer)
    assert are_words_separate(literal)
    text = unicodedata.normalize("NFD", PARAGRAPHS[language]) + " e\u0301 \u0301x"
    assert isinstance(text_encoder(literal), StretchEncoder)
    assert text_encoder(literal)([text])[0].tolist() == encode_texts(literal, [text])[0].tolist()
    save_tokenizer(tokenizer, tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(tokenizer)
    assert normalization(tokenizer) == (True, True if language == "vi" else "european")
    assert special_ids(tokenizer).all == (0, 1, 2, 3, 4)
