"""Windows over contexts, their answers and offsets, n-best lists and the official files."""

from __future__ import annotations

import functools
import itertools
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bert import metrics
from bert.config import TokenizerConfig
from bert.errors import UserError
from bert.tasks import question_answering
from bert.tasks.question_answering import Answer, Answers, Example, Windows
from bert.tasks.token_classification import entities, split_text
from bert.tokenizer.byte_level import build_byte_level
from bert.tokenizer.vocabulary import train_tokenizer
from tests.languages import PARAGRAPHS
from tests.tasks.letter_examples import CLS, LETTERS, SEP, WORDS, example, oracle, question_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return question_tokenizer()


def rows(windows: Windows) -> list[list[str]]:
    return [[WORDS[id] for id in row] for row in np.split(windows.ids, windows.offsets[1:-1])]


def test_a_short_context_is_one_row(tokenizer):
    windows = question_answering.make_qa_features(tokenizer, [example("c (De f", "De")], 16, max_query_length=4)
    assert rows(windows) == [["[CLS]", "q", "[SEP]", "c", "(", "d", "##e", "f", "[SEP]"]]
    assert windows.labels.tolist() == [[5, 6]]
    assert windows.char_starts.tolist() == [-1, -1, -1, 0, 2, 3, 4, 6, -1]
    assert windows.char_ends.tolist() == [-1, -1, -1, 1, 3, 4, 5, 7, -1]
    assert windows.is_max_context.tolist() == [False] * 3 + [True] * 5 + [False]
    assert windows.segment_a_lengths.tolist() == [3]
    batch = windows.batch(np.array([0]), 12, 2)
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert batch["labels"].tolist() == [[5, 6], [0, 0]]
    assert batch["weights"].tolist() == [1, 0]


def test_a_long_context_is_read_through_windows(tokenizer):
    """Ten tokens through windows of six, two apart; by hand, after run_squad.py's rule."""
    windows = question_answering.make_qa_features(
        tokenizer, [example("a b c d e f g h i j", "g h")], 10, 2, max_query_length=1
    )
    assert [row[3:-1] for row in rows(windows)] == [list("abcdef"), list("cdefgh"), list("efghij")]
    assert windows.examples.tolist() == [0, 0, 0]
    # Not in the first, whole in the others.
    assert windows.labels.tolist() == [[0, 0], [7, 8], [5, 6]]
    # d has 2 tokens on its lesser side in the first window and 1 in the second; e has 1, 2 and 0; g has 1 and 2.
    shown = [row.tolist() for row in np.split(windows.is_max_context, windows.offsets[1:-1])]
    shown = ["".join(word for word, best in zip(row, own, strict=True) if best) for row, own in
             zip(rows(windows), shown, strict=True)]  # fmt: skip
    assert shown == ["abcd", "ef", "ghij"]


def test_every_token_has_its_most_context_in_one_window(tokenizer):
    text = " ".join(LETTERS * 3)
    for max_length, stride in [(20, 3), (20, 16), (20, 99), (47, 7), (100, 1)]:
        windows = question_answering.make_qa_features(
            tokenizer, [example(text), example("a", "a", id="q2")], max_length, stride, 1
        )
        starts = windows.char_starts[windows.is_max_context]
        assert sorted(starts.tolist()) == sorted([*range(0, len(text), 2), 0])
        assert windows.lengths.max() <= max_length


def test_questions_are_cut_and_share_their_context(tokenizer):
    examples = [example("a b", "b", "c d e f"), example("a b", "a", "x", "q2")]
    windows = question_answering.make_qa_features(tokenizer, examples, 9, max_query_length=2)
    assert rows(windows) == [
        ["[CLS]", "c", "d", "[SEP]", "a", "b", "[SEP]"],
        ["[CLS]", "x", "[SEP]", "a", "b", "[SEP]"],
    ]
    assert windows.labels[:, 0].tolist() == [5, 3]


def test_a_context_without_tokens_has_a_row_and_no_answer(tokenizer):
    examples = [example("\u200b", None), example("a", "a", id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    assert rows(windows)[0] == ["[CLS]", "q", "[SEP]", "[SEP]"]
    logits = np.ones((2, 5))
    assert question_answering.decode_answers(examples, windows, logits, logits).texts == {"q1": "", "q2": "a"}
    assert question_answering.decode_answers(
        examples, windows, logits, logits, null_score_diff_threshold=9.0
    ).texts == {
        "q1": "",
        "q2": "a",
    }


def test_special_tokens_in_a_text_are_prose(tokenizer):
    windows = question_answering.make_qa_features(tokenizer, [example("a [SEP] b", "b", "[MASK]")])
    assert np.isin(windows.ids, [CLS, SEP]).sum() == 3


def test_lengths_that_leave_no_room_are_refused(tokenizer):
    with pytest.raises(UserError, match=r"64 tokens.*64"):
        question_answering.make_qa_features(tokenizer, [example("a", "a")], 64)
    with pytest.raises(UserError, match="doc_stride is 0"):
        question_answering.make_qa_features(tokenizer, [example("a", "a")], doc_stride=0)


def test_the_tokenizer_of_the_caller_stays_as_it_is(tokenizer):
    tokenizer.enable_truncation(3)
    before = tokenizer.to_str()
    assert question_answering.make_qa_features(tokenizer, [example("a b c d e f", "b")]).lengths.tolist() == [10]
    assert tokenizer.to_str() == before


def test_answers_come_back_as_they_stand_in_the_context(tokenizer):
    """White space, case, accents, punctuation: all as written, whatever the tokens are; and half a word widened."""
    context = "abc d\u00e9  F\tghi. J'k  (Lm) o\u0308p\u00a0qe\u0301 " + " r s t" * 9
    expected = ["abc d\u00e9", "d\u00e9  F", "F\tghi", "J'k", "Lm", "o\u0308p", "qe\u0301", "s t"]
    examples = [example(context, answer, id=answer) for answer in expected]
    for max_length in (99, 20, 14):
        windows = question_answering.make_qa_features(tokenizer, examples, max_length, 3, 1)
        answers = question_answering.decode_answers(examples, windows, *oracle(windows))
        assert answers.texts == {answer: answer for answer in expected}
        for id, best in answers.best.items():
            assert context[best.start : best.end] == id
    whole = Tokenizer(
        models.WordPiece({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}, unk_token="[UNK]")
    )
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    windows = question_answering.make_qa_features(whole, examples := [example("in the 1990s .", "1990")])
    assert question_answering.decode_answers(examples, windows, *oracle(windows)).texts == {"q1": "1990s"}


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_space_before_a_word_is_no_part_of_an_answer(kind):
    """Some vocabularies count it among the characters of the word."""
    context, special = "Bob saw Ann  in New York.", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "byte_level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("Ġ", "A"), ("ĠA", "n"), ("ĠAn", "n")]
        pieces = [*special, *alphabet, *("".join(pair) for pair in merges)]
        built = build_byte_level({piece: number for number, piece in enumerate(pieces)}, merges)
    else:
        pieces = [*special, "▁", *(f"▁{word}" for word in ("Bob", "saw", "Ann", "in", "New", "York.", "q"))]
        built = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1))
        built.pre_tokenizer = pre_tokenizers.Metaspace()
    expected = ["Bob", "saw", "Ann", "Ann  in", "New York."]
    examples = [example(context, answer, id=answer) for answer in expected]
    windows = question_answering.make_qa_features(built, examples, 64, max_query_length=4)
    answers = question_answering.decode_answers(examples, windows, *oracle(windows))
    assert answers.texts == {answer: answer for answer in expected}
    for id, best in answers.best.items():
        assert context[best.start : best.end] == id
    texts = [candidate.text for candidates in answers.n_best.values() for candidate in candidates]
    assert all(text and text == text.strip() for text in texts)


def slow_n_best(windows: Windows, row: int, start: np.ndarray, end: np.ndarray, max_length: int) -> list[tuple]:
    """Every span of a row, best first."""
    tokens = range(windows.lengths[row])
    offset = windows.offsets[row]
    return sorted(
        (
            (float(start[row, first] + end[row, last]), first, last)
            for first in tokens
            for last in tokens[first : first + max_length]
            if windows.is_max_context[offset + first] and windows.char_starts[offset + last] >= 0
        ),
        reverse=True,
    )


def test_n_best_lists_are_those_of_trying_every_span(tokenizer, monkeypatch):
    monkeypatch.setattr("bert.tasks.question_answering.span_features.ROWS_SCORED_AT_ONCE", 2)
    random = np.random.default_rng(5)
    texts = [" ".join(random.choice(list(LETTERS), 26, replace=False)) for _ in range(3)]
    examples = [example(text, None, id=str(number)) for number, text in enumerate([*texts, "a"])]
    windows = question_answering.make_qa_features(tokenizer, examples, 16, 4, 1)
    start, end = random.normal(size=(2, len(windows), 20)).astype(np.float32)
    answers = question_answering.decode_answers(
        examples, windows, start, end, n_best_size=7, max_answer_length=5, null_score_diff_threshold=0.5
    )
    for number, one in enumerate(examples):
        own = np.flatnonzero(windows.examples == number)
        best = sorted((span for row in own for span in slow_n_best(windows, row, start, end, 5)), reverse=True)[:6]
        null = min(float(start[row, 0]) + float(end[row, 0]) for row in own)
        listed = answers.n_best[one.id]
        scores = [candidate.start_logit + candidate.end_logit for candidate in listed]
        assert scores == pytest.approx(sorted([null, *(score for score, _, _ in best)], reverse=True))
        assert len({candidate.text for candidate in listed}) == len(listed) == len(best) + 1
        shares = np.exp(scores) / np.exp(scores).sum()
        assert [candidate.probability for candidate in listed] == pytest.approx(shares)
        assert answers.null_odds[one.id] == pytest.approx(null - best[0][0])
        assert answers.texts[one.id] == ("" if null - best[0][0] > 0.5 else answers.best[one.id].text)


def test_equal_texts_count_once_and_the_better_stays(tokenizer):
    examples = [example("a b a", "a")]
    windows = question_answering.make_qa_features(tokenizer, examples, 16, max_query_length=1)
    start = np.array([[0, 0, 0, 1.0, 0, 3.0, 0]])
    listed = question_answering.decode_answers(examples, windows, start, np.zeros((1, 7)), max_answer_length=1).n_best[
        "q1"
    ]
    assert [(candidate.text, candidate.start) for candidate in listed] == [("a", 4), ("b", 2)]
    assert [candidate.probability for candidate in listed] == pytest.approx([1 / (1 + np.exp(-3)), 1 / (1 + np.exp(3))])


def test_no_answer_is_given_where_the_odds_pass_the_threshold(tokenizer):
    """The null score is the least of the windows'; a threshold moves the answer, not the lists."""
    examples = [example("a b c d e f g h", None)]
    windows = question_answering.make_qa_features(tokenizer, examples, 8, 4, 1)
    start, end = np.zeros((2, 2, 8))
    start[:, 0], start[1, 4] = [5.0, 2.0], 1.0
    for threshold, text in [(0.9, ""), (1.0, "f"), (1.1, "f")]:
        answers = question_answering.decode_answers(
            examples, windows, start, end, 1, 1, null_score_diff_threshold=threshold
        )
        assert answers.null_odds == {"q1": 1.0}
        assert answers.texts == {"q1": text}
        assert [candidate.text for candidate in answers.n_best["q1"]] == ["", "f"]
        assert answers.n_best["q1"][0][1:3] == (-1, -1)


def test_no_answer_is_at_the_last_token_of_xlnet_rows():
    tokenizer = question_tokenizer()
    tokens = [(WORDS[id], id) for id in (CLS, SEP)]
    rows_of = "$A:0 [SEP]:0 {}[CLS]:2"
    tokenizer.post_processor = processors.TemplateProcessing(
        rows_of.format(""), rows_of.format("$B:1 [SEP]:1 "), tokens
    )
    examples = [example("a b c d e f", None), example("a b", "b", id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples, 8, 4, 1)
    assert rows(windows)[-1] == ["q", "[SEP]", "a", "b", "[SEP]", "[CLS]"]
    assert windows.labels.tolist() == [[7, 7], [5, 5], [3, 3]]
    start = np.zeros((3, 8))
    start[0, 7], start[1, 5], start[1, 2], start[:, 0], start[2, 3] = 5, 2, 1, 9, 4
    answers = question_answering.decode_answers(
        examples, windows, start, np.zeros((3, 8)), max_answer_length=1, null_score_diff_threshold=0
    )
    assert answers.null_odds == {"q1": 1.0, "q2": -4.0}
    assert answers.texts == {"q1": "", "q2": "b"}


def test_logits_of_other_rows_are_refused(tokenizer):
    examples = [example("a b", "a")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    for shape in [(1, 5), (2, 6)]:
        with pytest.raises(ValueError, match="expected"):
            question_answering.decode_answers(examples, windows, np.zeros(shape), np.zeros(shape))


def test_the_official_files(tokenizer, tmp_path):
    examples = [example("Ada met Bob.", "Bob"), example("x y", None, id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    paths = question_answering.write_predictions(
        tmp_path / "v1", question_answering.decode_answers(examples, windows, *oracle(windows))
    )
    assert [path.name for path in paths] == ["predictions.json", "nbest_predictions.json"]
    assert json.loads(paths[0].read_text())["q1"] == "Bob"

    answers = question_answering.decode_answers(examples, windows, *oracle(windows), null_score_diff_threshold=0.0)
    paths = question_answering.write_predictions(tmp_path / "v2", answers)
    written = {path.name: json.loads(path.read_text()) for path in paths}
    assert written["predictions.json"] == {"q1": "Bob", "q2": ""}
    assert written["null_odds.json"] == {"q1": -20.0, "q2": 20.0}
    best = written["nbest_predictions.json"]["q1"][0]
    assert best == {"text": "Bob", "probability": best["probability"], "start_logit": 10.0, "end_logit": 10.0}
    assert best["probability"] > 0.99


def test_the_best_threshold_is_found_on_answers_that_are_ones(tokenizer):
    examples = [example("a b", "a"), example("a b", None, id="q2")]
    windows = question_answering.make_qa_features(tokenizer, examples)
    answers = question_answering.decode_answers(examples, windows, *oracle(windows), null_score_diff_threshold=-99.0)
    best = {id: candidate.text for id, candidate in answers.best.items()}
    thresholds = metrics.best_null_threshold(best, answers.null_odds, question_answering.references(examples))
    assert thresholds == {"best_exact": 100, "best_exact_thresh": -20, "best_f1": 100, "best_f1_thresh": -20}
    again = Answers(answers.n_best, answers.null_odds, thresholds["best_f1_thresh"])
    assert again.texts == {"q1": "a", "q2": ""}


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
WORD_LISTS = st.lists(st.sampled_from([word for words in TEXTS.values() for word in words]), min_size=1, max_size=8)
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
    """Includes answers next to punctuation and after other white space."""
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
