"""Metrics of SQuAD: worked examples, and the official rules on random answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert import metrics


def squad_of(prediction: str, *golds: str) -> tuple[float, float]:
    """Exact match and F1 of one answer."""
    return tuple(metrics.squad_metrics({"q": prediction}, {"q": golds}).values())


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "f1"),
    [
        ("The Cat!", ["a cat"], 100, 100),  # case, articles, punctuation
        ("cat's", ["cats"], 100, 100),  # punctuation goes without a trace
        ("state-of-the-art", ["stateoftheart"], 100, 100),  # before the articles are looked for
        ("anthem", ["them"], 0, 0),
        (" the\u00a0 big\n cat", ["big cat"], 100, 100),
        ("the cat", ["big cat", "cat"], 100, 100),  # the best of several
        ("big black cat", ["cat", "black dog"], 0, 50),  # 1/3 and 1; 1/3 and 1/2
        ("cat cat dog", ["cat dog dog"], 0, 100 * 2 / 3),  # words count as often as they occur
        ("", ["cat"], 0, 0),
        ("the", ["a"], 100, 0),  # nothing is left on either side: v1.1 calls that exact but gives no F1
        ("£5", ["5"], 0, 0),  # only ASCII punctuation
        ("1\u20132", ["12"], 0, 0),
    ],
)
def test_squad_answers_by_hand(prediction, golds, exact, f1):
    assert squad_of(prediction, *golds) == pytest.approx((exact, f1))


def test_squad_averages_over_questions_and_counts_missing_ones_as_wrong():
    references = {"a": ["x y"], "b": ["x"], "c": ["z"], "d": ["z"]}
    scores = metrics.squad_metrics({"a": "x", "b": "x", "c": "z", "more": "z"}, references)
    assert scores == {"exact_match": 50, "f1": pytest.approx(100 * (2 / 3 + 2) / 4)}
    with pytest.raises(ValueError, match="no questions"):
        metrics.squad_metrics({}, {})


def test_squad_2_by_hand():
    references = {"a": ["x y"], "b": [], "c": [], "d": ["the", "z"], "e": ["the"]}
    predictions = {"a": "x", "b": "", "c": "x", "d": "Z.", "e": ""}
    scores = metrics.squad_metrics(predictions, references)
    # e: an answer of articles alone is none, so that none is right.
    assert scores == {
        "exact": 60, "f1": pytest.approx(100 * (2 / 3 + 3) / 5), "total": 5,
        "HasAns_exact": pytest.approx(200 / 3), "HasAns_f1": pytest.approx(100 * (2 / 3 + 2) / 3), "HasAns_total": 3,
        "NoAns_exact": 50, "NoAns_f1": 50, "NoAns_total": 2,
    }  # fmt: skip
    # What has no words is as good as no answer.
    assert metrics.squad_metrics({"q": "the ."}, {"q": []})["exact"] == 100
    assert "HasAns_exact" not in metrics.squad_metrics({"q": ""}, {"q": []})
    with pytest.raises(ValueError, match="1 questions have no prediction"):
        metrics.squad_metrics({"a": "x"}, {"a": ["x"], "b": []})


def test_best_null_threshold_by_hand():
    """In order of their odds: right +1, half right, an answer where there is none -1, one without text 0."""
    references = {"a": ["x"], "b": ["x y"], "c": [], "d": ["z"], "e": [], "f": ["z"]}
    predictions = {"a": "x", "b": "x", "c": "x", "d": "z", "e": "", "f": "x"}
    odds = {"f": 9.0, "e": 5.0, "d": 4.0, "c": 0.5, "b": -1.0, "a": -2.0}
    # Of 6: 2 where nothing is answered; exact 3, 3, 2, 3; F1 3, 3 2/3, 2 2/3, 3 2/3: the first that is best.
    assert metrics.best_null_threshold(predictions, odds, references) == {
        "best_exact": 50,
        "best_exact_thresh": -2.0,
        "best_f1": pytest.approx(100 * (3 + 2 / 3) / 6),
        "best_f1_thresh": -1.0,
    }


def test_best_null_threshold_is_0_where_answers_do_not_help():
    best = metrics.best_null_threshold({"a": "x", "b": "x"}, {"a": 1.0, "b": 2.0}, {"a": [], "b": ["z"]})
    assert best == {"best_exact": 50, "best_exact_thresh": 0, "best_f1": 50, "best_f1_thresh": 0}


def test_odds_of_other_questions_are_passed_over():
    """null_odds.json of a whole dev set, scored on a part of it: the official search skips the others."""
    predictions, odds = {"a": "x", "b": "x", "more": "x"}, {"more": -9.0, "a": 1.0, "b": 2.0, "unknown": 1.5}
    best = metrics.best_null_threshold(predictions, odds, {"a": ["x"], "b": []})
    assert best == {"best_exact": 100, "best_exact_thresh": 1, "best_f1": 100, "best_f1_thresh": 1}
    with pytest.raises(ValueError, match="no questions"):
        metrics.best_null_threshold(predictions, odds, {})
    with pytest.raises(ValueError, match="1 questions have no prediction"):
        metrics.best_null_threshold(predictions, odds, {"a": ["x"], "c": []})


def official_normalized(text: str) -> str:
    """Both evaluators' normalize_answer: lower case, no punctuation, no articles, single spaces, in this order."""
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def official_f1(gold: str, text: str, v2: bool) -> float:
    """compute_f1 (v2.0), or f1_score (v1.1), which does not support empty answers."""
    gold_words, words = official_normalized(gold).split(), official_normalized(text).split()
    if v2 and (not gold_words or not words):
        return float(gold_words == words)
    same = sum((Counter(gold_words) & Counter(words)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def official_raw(
    predictions: dict[str, str], references: dict[str, list[str]], v2: bool
) -> dict[str, tuple[float, float]]:
    """Exact match and F1 of each question: get_raw_scores (v2.0), or the loop of evaluate (v1.1)."""
    raw = {}
    for id, golds in references.items():
        if v2:
            golds = [gold for gold in golds if official_normalized(gold)] or [""]
        elif id not in predictions:
            raw[id] = (0.0, 0.0)
            continue
        text = predictions[id]
        raw[id] = (
            max(float(official_normalized(gold) == official_normalized(text)) for gold in golds),
            max(official_f1(gold, text, v2) for gold in golds),
        )
    return raw


def official_scores(predictions: dict[str, str], references: dict[str, list[str]], v2: bool) -> dict[str, float]:
    """evaluate (v1.1), or make_eval_dict over all questions, HasAns and NoAns (v2.0)."""
    raw = official_raw(predictions, references, v2)

    def mean(side: int, ids: list[str]) -> float:
        return 100 * sum(raw[id][side] for id in ids) / len(ids)

    everything = list(references)
    if not v2:
        return {"exact_match": mean(0, everything), "f1": mean(1, everything)}
    scores: dict[str, float] = {}
    has = [id for id in everything if references[id]]
    for name, ids in (("", everything), ("HasAns_", has), ("NoAns_", [id for id in everything if id not in has])):
        if ids:
            scores |= {f"{name}exact": mean(0, ids), f"{name}f1": mean(1, ids), f"{name}total": len(ids)}
    return scores


def official_best(
    predictions: dict[str, str], odds: dict[str, float], references: dict[str, list[str]]
) -> dict[str, float]:
    """find_all_best_thresh."""
    raw, result = official_raw(predictions, references, v2=True), {}
    for side, name in enumerate(("exact", "f1")):
        current = best = sum(1 for golds in references.values() if not golds)
        threshold = 0.0
        for id in sorted(odds, key=lambda id: odds[id]):
            if id not in raw:
                continue
            if references[id]:
                current += raw[id][side]
            elif predictions[id]:
                current -= 1
            if current > best:
                best, threshold = current, odds[id]
        result |= {f"best_{name}": 100 * best / len(raw), f"best_{name}_thresh": threshold}
    return result


PIECES = ("a", "an", "the", "The", "A", "cat", "Cat", "cats", "dog", "them", "the-cat", "a.", "U.S.", "'s", "£5",
          "\u2013", "(", ".", ",", "-", "_", "an_", "\u00a0", "\t", "İ", "ß", "é")  # fmt: skip


TEXTS = st.builds(lambda pieces, gap: gap.join(pieces), st.lists(st.sampled_from(PIECES), max_size=4),
                  st.sampled_from((" ", "  ", "", "\n")))  # fmt: skip


IDS = ("q1", "q2", "q3", "q4", "q5", "q6")


@st.composite
def questions(draw: Callable[..., object], least: int) -> tuple[dict[str, str], dict[str, list[str]], dict[str, float]]:
    """Answers, right answers (``least`` of them or more a question) and odds, with ties; other ids have odds too."""
    ids = draw(st.lists(st.sampled_from(IDS), min_size=1, unique=True))
    references = {id: draw(st.lists(TEXTS, min_size=least, max_size=3)) for id in ids}
    # Texts by chance are seldom right: some are a right answer.
    predictions = {id: draw(TEXTS | st.sampled_from([*golds, ""])) for id, golds in references.items()}
    odds = {id: draw(st.sampled_from((-2.0, -0.5, 0.0, 0.0, 1.5))) for id in draw(st.permutations(IDS))}
    return predictions, references, odds


@pytest.mark.medium
@settings(max_examples=300, derandomize=True, deadline=None)
@given(questions(least=0))
def test_squad_2_is_that_of_the_official_rules(case):
    predictions, references, odds = case
    actual = metrics.squad_metrics(predictions, references, v2=True)
    assert actual == pytest.approx(official_scores(predictions, references, v2=True), abs=1e-9)
    best = metrics.best_null_threshold(predictions, odds, references)
    assert best == pytest.approx(official_best(predictions, odds, references), abs=1e-9)
    if any(not golds for golds in references.values()):
        assert metrics.squad_metrics(predictions, references) == actual, "which evaluator it is, the questions tell"


@pytest.mark.medium
@settings(max_examples=300, derandomize=True, deadline=None)
@given(questions(least=1), st.sampled_from(IDS))
def test_squad_1_is_that_of_the_official_rules(case, missing):
    predictions, references, _ = case
    predictions = {id: text for id, text in predictions.items() if id != missing}
    assert metrics.squad_metrics(predictions, references) == pytest.approx(
        official_scores(predictions, references, v2=False), abs=1e-9
    )
