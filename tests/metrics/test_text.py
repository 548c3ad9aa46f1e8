"""BLEU, chrF and ROUGE against examples by hand and the examples of their papers."""

import sys

import pytest

from bert.errors import UserError
from bert.metrics import HIGHER_IS_BETTER
from bert.metrics.text import LIBRARIES, ROUGE, bleu, chrf, require_latin, require_libraries, rouge

pytest.importorskip("sacrebleu", reason="needs the extra `text`")
pytest.importorskip("rouge_score", reason="needs the extra `text`")

GUNMAN = "police killed the gunman"


def test_bleu_by_hand():
    score, signature = bleu(["a b c d e"], [["a b c d f"]])
    assert score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_bleu_splits_punctuation_unless_the_text_is_tokenized():
    assert bleu(["a b c, d"], [["a b c , d"]]).score == pytest.approx(100)
    assert bleu(["a b c, d"], [["a b c , d"]], tokenizer="none").score < 100


def test_lower_case_is_in_the_signature():
    predictions, references = ["A dog runs over grass"], [["a Dog runs over grass"]]
    assert bleu(predictions, references).score < 100
    score, signature = bleu(predictions, references, lowercase=True)
    assert score == pytest.approx(100) and "case:lc" in signature
    score, signature = chrf(predictions, references, lowercase=True)
    assert score == pytest.approx(100) and "case:lc" in signature


def test_any_of_several_references_counts_and_rows_may_have_different_numbers():
    predictions = ["one two three four", "five six seven eight"]
    references = [["one", "one two three four"], ["five six seven eight"]]
    score, signature = bleu(predictions, references)
    assert score == pytest.approx(100) and "nrefs:var" in signature
    assert chrf(predictions, references).score == pytest.approx(100)
    assert rouge(predictions, references) == dict.fromkeys(ROUGE, pytest.approx(100))


def test_chrf_by_hand():
    # one of two characters, none of one pair: precision and recall are both (1/2 + 0) / 2
    score, signature = chrf(["ab"], [["ac"]])
    assert score == pytest.approx(25) and "nc:6|nw:0" in signature


def test_rouge_of_the_paper_s_example():
    """Lin 2004, section 3.1: S2 has the order of the reference, S3 does not; the stems of killed and kill are equal."""
    assert rouge(["police kill the gunman"], [[GUNMAN]]) == dict.fromkeys(ROUGE, pytest.approx(100))
    scores = rouge(["the gunman kill police"], [[GUNMAN]])
    assert scores == pytest.approx({"rouge1": 100, "rouge2": 100 / 3, "rougeL": 50, "rougeLsum": 50})


def test_rouge_is_the_mean_of_rows_and_of_several_references_the_best():
    scores = rouge(["the gunman kill police", ""], [["nothing", GUNMAN], [GUNMAN]])
    assert scores == pytest.approx({"rouge1": 50, "rouge2": 100 / 6, "rougeL": 25, "rougeLsum": 25})


def test_sentences_of_rouge_l_sum_are_lines():
    scores = rouge(["c d\na b"], [["a b\nc d"]])
    assert (scores["rougeL"], scores["rougeLsum"]) == pytest.approx((50, 100))


def test_rouge_refuses_other_scripts():
    require_latin(["Ein Müller geht über die Straße", "§"])
    with pytest.raises(UserError, match="letters a to z and digits"):
        rouge(["Кошка"], [["Кошка спит 2 часа"]])


def test_rows_without_a_reference_are_refused():
    for predictions, references in (([], []), (["a"], []), (["a"], [[]])):
        for metric in (bleu, chrf, rouge):
            with pytest.raises(ValueError, match="each needs a reference"):
                metric(predictions, references)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    require_libraries(LIBRARIES)
    for name in ("rouge_score", "rouge_score.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    require_libraries(["bleu", "chrf"])
    with pytest.raises(UserError, match=r"rouge2 needs rouge_score.*not installed.*'bert-jax\[text\]'"):
        require_libraries(["bleu", "rouge2"])


def test_every_metric_has_a_direction():
    assert all(HIGHER_IS_BETTER[name] for name in LIBRARIES)
