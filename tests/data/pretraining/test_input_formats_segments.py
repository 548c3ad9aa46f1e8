"""Next-sentence pairs against the rules of the paper's appendix A.2, by where their tokens come from."""

import itertools
from pathlib import Path

import pytest

from bert.data.pretraining.input_formats import IS_NEXT, IS_RANDOM, make_rng, sentence_pairs, truncate_pair


def corpus(lengths_of_documents):
    """(sentence boundaries, document boundaries) of documents given as lists of sentence lengths."""
    flat = list(itertools.chain.from_iterable(lengths_of_documents))
    ends = itertools.accumulate(map(len, lengths_of_documents))
    return [0, *itertools.accumulate(flat)], [0, *ends]


def many(documents=400, sentences=30):
    draw = make_rng("lengths")
    return corpus([[3 + int(draw.random() * 20) for _ in range(sentences)] for _ in range(documents)])


def document_of(token, sentences, documents):
    return sum(sentences[boundary] <= token for boundary in documents[1:-1])


def test_half_of_the_pairs_are_random_where_there_is_a_choice_and_all_where_there_is_none():
    sentences, documents = many()
    pairs = list(sentence_pairs(sentences, documents, 125, 0.0, make_rng(1)))
    starts = set(sentences)
    # Sentences of at most 22 tokens: a chunk of 125 always has several, except the last one of a document.
    last = {sentences[boundary] for boundary in documents[1:]}
    choice = [pair for pair in pairs if pair.a_end not in last]
    assert len(choice) > 1500
    assert sum(pair.label == IS_RANDOM for pair in choice) / len(choice) == pytest.approx(0.5, abs=0.03)
    alone = [pair for pair in pairs if pair.a_end in last]
    assert len(alone) > 100
    assert all(pair.label == IS_RANDOM for pair in alone)
    assert all(pair.a_start in starts for pair in pairs if pair.b_end - pair.b_start + pair.a_end - pair.a_start < 125)


@pytest.mark.parametrize(("minimum", "maximum", "share"), [(100, 100, 0.52), (1, 15, 0.59), (1, 1, 1.0)])
def test_short_documents_have_more_random_pairs_than_half(minimum, maximum, share):
    """The shares in docs/how_it_works.md: the last sentence of a document, where it is alone, has no next one."""
    draw = make_rng("lengths", minimum, maximum)
    counts = [minimum + int(draw.random() * (maximum - minimum + 1)) for _ in range(20_000 // (minimum + maximum))]
    sentences, documents = corpus([[3 + int(draw.random() * 40) for _ in range(count)] for count in counts])
    pairs = [pair.label == IS_RANDOM for pair in sentence_pairs(sentences, documents, 128, 0.1, make_rng(1))]
    assert sum(pairs) / len(pairs) == pytest.approx(share, abs=0.02)
    page = (Path(__file__).parents[3] / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert f"{share:.0%} for " in page


def test_next_is_next_random_is_elsewhere_and_both_are_there_and_fit():
    sentences, documents = many(documents=50)
    for length, short in ((16, 0.5), (64, 0.1), (512, 0.1)):
        pairs = list(sentence_pairs(sentences, documents, length - 3, short, make_rng(length)))
        for pair in pairs:
            assert pair.a_end > pair.a_start
            assert pair.b_end > pair.b_start
            assert pair.a_end - pair.a_start + pair.b_end - pair.b_start <= length - 3
            a, b = (document_of(token, sentences, documents) for token in (pair.a_start, pair.b_start))
            assert a == document_of(pair.a_end - 1, sentences, documents)
            assert b == document_of(pair.b_end - 1, sentences, documents)
            assert (a == b) == (pair.label == IS_NEXT)
            if pair.label == IS_NEXT:
                full = pair.a_end - pair.a_start + pair.b_end - pair.b_start < length - 3
                assert pair.b_start == pair.a_end or not full
                assert pair.b_start >= pair.a_end


def test_sentences_that_a_random_b_replaced_are_used_again():
    """Without truncation the A segments and the B segments that are next tile every document."""
    sentences, documents = corpus([[1] * 40 for _ in range(30)])
    pairs = list(sentence_pairs(sentences, documents, 13, 0.2, make_rng("tile")))
    own = [(pair.a_start, pair.a_end) for pair in pairs]
    own += [(pair.b_start, pair.b_end) for pair in pairs if pair.label == IS_NEXT]
    own.sort()
    assert own[0][0] == 0
    assert own[-1][1] == sentences[-1]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(own))


def test_a_tenth_of_the_targets_is_short():
    sentences, documents = corpus([[1] * 5000 for _ in range(20)])
    pairs = list(sentence_pairs(sentences, documents, 125, 0.1, make_rng("short")))
    # One-token sentences fill their target exactly, except random ones at the end of a document.
    lengths = [pair.a_end - pair.a_start + pair.b_end - pair.b_start for pair in pairs]
    assert len(lengths) > 700
    assert sum(length < 125 for length in lengths) / len(lengths) == pytest.approx(0.11, abs=0.03)
    assert min(lengths) < 30
    never = list(sentence_pairs(sentences, documents, 125, 0.0, make_rng("short")))
    assert sum(p.a_end - p.a_start + p.b_end - p.b_start < 125 for p in never) / len(never) < 0.03


def test_every_other_document_is_drawn_from():
    sentences, documents = corpus([[2]] * 6)
    drawn = {0: set(), 5: set()}
    for seed in range(200):
        for number, pair in enumerate(sentence_pairs(sentences, documents, 29, 0.0, make_rng(seed))):
            if number in drawn:
                drawn[number].add(pair.b_start // 2)
    assert drawn == {0: {1, 2, 3, 4, 5}, 5: {0, 1, 2, 3, 4}}


def test_truncation_takes_from_the_longer_at_both_ends():
    fronts = []
    for seed in range(300):
        a_start, a_end, b_start, b_end = truncate_pair(0, 30, 100, 110, 24, make_rng(seed))
        assert (a_end - a_start, b_end - b_start) == (14, 10)
        fronts.append(a_start)
    assert sum(fronts) / len(fronts) == pytest.approx(8, abs=0.5)
    assert truncate_pair(0, 30, 100, 110, 40, make_rng(0)) == (0, 30, 100, 110)
    a_start, a_end, b_start, b_end = truncate_pair(0, 30, 100, 130, 11, make_rng(0))
    assert (a_end - a_start, b_end - b_start) in ((5, 6), (6, 5))


def test_the_stream_is_pinned():
    """The same seed must give the same examples on every version of Python."""
    assert [round(make_rng(12345, "train-00000").random(), 12)] == [PINNED]
    assert make_rng(1, "a").random() != make_rng(2, "a").random() != make_rng(1, "b").random()


PINNED = 0.564913468555


def test_a_copy_is_no_other_document():
    """Twenty documents occur twice among the others, as in a mixture that repeats them."""
    sentences, documents = many(documents=60)
    numbers = [place % 20 if place < 40 else place for place in range(60)]
    pairs = list(sentence_pairs(sentences, documents, 61, 0.1, make_rng("copies"), numbers))
    of = [
        (
            numbers[document_of(pair.a_start, sentences, documents)],
            numbers[document_of(pair.b_start, sentences, documents)],
        )
        for pair in pairs
        if pair.label == IS_RANDOM
    ]
    assert len(of) > 200
    assert all(a != b for a, b in of)
    assert list(sentence_pairs(sentences, documents, 61, 0.1, make_rng(1))) == list(
        sentence_pairs(sentences, documents, 61, 0.1, make_rng(1), list(range(60)))
    )
