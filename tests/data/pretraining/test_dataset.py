"""Warnings about documents that are too short for pairs of sentences."""

import pytest

from bert.data.pretraining.build import build_examples
from bert.errors import UserError
from tests.data.pretraining.conftest import DOCUMENTS, SENTENCES, sentence_of
from tests.helpers import config_of
from tests.messages import has_all


@pytest.fixture
def build_lengths(tokenizer, tmp_path):
    """Builds examples of documents with these numbers of sentences, repeated."""

    def build(*lengths, **changes):
        texts = (
            "\n".join(sentence_of(document, number) for number in range(lengths[(document + copy) % len(lengths)]))
            for copy in range(5)
            for document in range(DOCUMENTS)
        )
        (tmp_path / "corpus.txt").write_text("\n\n".join(texts))
        return build_examples(config_of(tmp_path, **changes), tokenizer, tmp_path / "cache")

    return build


@pytest.mark.parametrize("packing", [False, True])
def test_a_small_share_of_consecutive_pairs_is_a_warning(build_lengths, packing) -> None:
    result = build_lengths(1, 1, 1, 2, packing=packing)
    share = result.consecutive_share("train")
    assert 0.05 < share < 0.2
    (warning, *_) = result.pair_warnings()
    assert has_all(warning, f"{share:.1%}", "data.train are consecutive")
    assert "1.2 sentences" in warning or "1.3 sentences" in warning


@pytest.mark.parametrize("length", [2, 3, SENTENCES])
def test_documents_of_two_and_more_sentences_are_no_warning(build_lengths, length) -> None:
    result = build_lengths(length)
    assert result.consecutive_share("train") == pytest.approx(0.42, abs=0.1)
    assert result.pair_warnings() == []


def test_next_sentence_pairs_of_one_sentence_documents_are_an_error(build_lengths) -> None:
    with pytest.raises(UserError, match=r"train-00000 has two sentences, as data\.input_format"):
        build_lengths(1)
    assert build_lengths(1, input_format="full_sentences").pair_warnings() == []


def test_documents_without_a_sentence_order_pair_are_counted(build_lengths) -> None:
    result = build_lengths(1, 2, input_format="sop")
    count = result.counts["train_single_sentence_documents"]
    assert 0.4 < count / result.counts["train_documents"] < 0.6
    assert (
        f"{count} of {result.counts['train_documents']} documents of data.train have one" in result.pair_warnings()[0]
    )


def test_held_out_documents_of_one_sentence_are_a_warning(build_lengths, place, tmp_path) -> None:
    held_out = tmp_path / "eval.txt"
    held_out.write_text("\n\n".join(sentence_of(document, 0) for document in range(DOCUMENTS)))
    (warning,) = build_lengths(SENTENCES, eval=str(held_out)).pair_warnings()
    assert "0.0% of the next-sentence pairs of data.eval" in warning
