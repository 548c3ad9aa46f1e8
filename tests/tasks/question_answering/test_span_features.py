"""Windows over contexts, their answers, n-best lists and the official files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bert import metrics
from bert.errors import UserError
from bert.tasks import question_answering
from bert.tasks.question_answering import Answers, Windows
from bert.tokenizer.byte_level import build_byte_level
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
