"""In any script, what an answer's or an entity's offsets cut out of the text is the answer."""

import functools
import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from bert.config import TokenizerConfig
from bert.tasks import question_answering
from bert.tasks.question_answering import Answer, Example
from bert.tasks.token_classification import entities, split_text
from bert.tokenizer.vocabulary import train_tokenizer
from tests.languages import PARAGRAPHS
from tests.tasks.letter_examples import oracle

TEXTS = {
    "Latin": ["Zoë", "cafe\u0301s", "in", "Đà\u00a0Nẵng", "o\u0308ffnet", "a", "b"],
    "Greek": ["ΟΔΟΣ", "Άνοιξη", "α\u0301λφα", "ᾠδή"],
    "Cyrillic": ["Ёлка", "йод", "и\u0306од", "Їжак"],
    "Arabic": ["العَرَبِيَّة", "أمّ", "مِصر", "می\u200cخواهم"],
    "Hebrew": ["שָׁלוֹם", "בְּרֵאשִׁית", "תל־אביב", "א"],
    "Devanagari": ["हिन्दी", "क़लम", "क\u093cलम", "में", "की"],
    "Thai": ["ที่นี่", "น้ำ", "กรุงเทพฯ", "ก็"],
    "Japanese": ["がぎぐ", "ハ\u309aン", "東京", "ｶﾞ"],
    "Korean": ["한국어", "\u1112\u1161\u11ab", "값"],
    "emoji": ["👩‍👩‍👧", "❤️", "🇩🇪", "👍🏽", "1️⃣"],
}
WORDS = st.lists(st.sampled_from([word for words in TEXTS.values() for word in words]), min_size=1, max_size=8)
LINES = [*PARAGRAPHS.values(), *(" ".join(words) for words in TEXTS.values())]
KINDS = {
    "wordpiece": TokenizerConfig(vocab_size=2000),
    "BERT's own": TokenizerConfig(vocab_size=2000, strip_accents=None),
    "cased": TokenizerConfig(vocab_size=2000, lowercase=False),
    "unigram": TokenizerConfig("unigram", vocab_size=2000),
    "unigram without marks": TokenizerConfig("unigram", vocab_size=2000, strip_accents=True),
    "byte_level": TokenizerConfig("byte_level", vocab_size=1000),
    "RobBERT's": TokenizerConfig("byte_level", vocab_size=1000),
}


@functools.cache
def vocabulary(kind):
    made = train_tokenizer(LINES * 3, KINDS[kind])
    if kind == "RobBERT's":  # a space in front of every word, whether or not the text has one
        spaces = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), spaces])
        made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=True)
    return made


def answers(kind, context, expected):
    """Each wanted span as it is found again at the tokens that it is labelled with."""
    examples = [Example(str(i), "q", context, (Answer(context[a:b], a),)) for i, (a, b) in enumerate(expected)]
    windows = question_answering.make_qa_features(vocabulary(kind), examples, 384, 128, 16)
    result = question_answering.decode_answers(examples, windows, *oracle(windows), max_answer_length=200)
    return [result.best[str(i)] for i in range(len(expected))]


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_whole_words_is_found_again(kind, script):
    words = [*TEXTS[script], *TEXTS[script]]
    context = " ".join(words)
    ends = list(itertools.accumulate(len(word) + 1 for word in words))
    spans = [(end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True)]
    expected = [*spans, *((spans[i][0], spans[i + 1][1]) for i in range(len(spans) - 1))]
    for (start, end), best in zip(expected, answers(kind, context, expected), strict=True):
        assert (best.start, best.end) == (start, end)
        assert best.text == context[start:end]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.lists(st.sampled_from([word for words in TEXTS.values() for word in words]), min_size=1, max_size=8), st.data()
)
def test_any_words_of_mixed_scripts_are_found_again(kind, words, data):
    """Includes answers beside punctuation and after other white space."""
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    gaps = [data.draw(st.sampled_from([" ", "  ", "\u00a0", "\n", " (", ") ", ", ", "» «"])) for _ in words]
    before = "".join(word + gap for word, gap in zip(words[:first], gaps, strict=False))
    inside = "".join(word + gap for word, gap in zip(words[first:last], gaps[first:], strict=False)) + words[last]
    after = gaps[last] + "".join(word + gap for word, gap in zip(words[last + 1 :], gaps[last + 1 :], strict=False))
    context = before + inside + after
    [best] = answers(kind, context, [(len(before), len(before + inside))])
    assert best.text == context[best.start : best.end]
    assert (best.start, best.end) == (len(before), len(before + inside))


@given(
    st.lists(st.sampled_from([word for words in TEXTS.values() for word in words]), min_size=1, max_size=8), st.data()
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_words_and_entities_of_any_script_are_parts_of_the_text(words, data):
    text = data.draw(st.sampled_from([" ", ", ", " («", "\u200f "])).join(words)
    found, spans = split_text(text)
    assert [text[start:end] for start, end in spans] == found
    assert "".join(found) == "".join(text.split())
    tags = [data.draw(st.sampled_from(["O", "B-X", "I-X", "B-Y"])) for _ in found]
    for entity in entities(text, spans, tags):
        assert text[entity.start : entity.end] == entity.text
        assert entity.text == entity.text.strip()


def test_a_text_after_normalization_forms_is_found_in_each():
    """The same words composed and decomposed have the same tokens, and each its own offsets."""
    for form in ("NFC", "NFD"):
        words = [unicodedata.normalize(form, word) for word in TEXTS["Korean"] + TEXTS["Devanagari"]]
        context = " ".join(words)
        starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
        expected = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
        assert [(best.start, best.end) for best in answers("wordpiece", context, expected)] == expected
