"""Rows of every input format, by the origin of their tokens: each word of each sentence is a different token."""

import itertools

import numpy as np
import pytest

from bert import config
from bert.config import DataConfig
from bert.data.pretraining import build
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.input_formats import (
    INPUT_FORMATS,
    SWAPPED,
    make_rng,
    rows_across_documents,
    rows_within_documents,
    sentence_order_pairs,
)
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer

T, FIRST, PAD, CLS, SEP = 48, len(SPECIAL_TOKENS), 0, 2, 3


def lengths(documents: int) -> list[list[int]]:
    """Documents of 1 to 25 sentences of 2 to 12 words."""
    draw = make_rng("lengths")
    return [[2 + int(draw.random() * 11) for _ in range(1 + int(draw.random() * 25))] for _ in range(documents)]


def boundaries(documents: list[list[int]]) -> tuple[list[int], list[int]]:
    flat = itertools.chain.from_iterable(documents)
    return [0, *itertools.accumulate(flat)], [0, *itertools.accumulate(map(len, documents))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    number, documents = itertools.count(), []
    for document in lengths(120):
        documents.append("\n".join(" ".join(f"w{next(number)}" for _ in range(length)) for length in document))
    (folder / "corpus.txt").write_text("\n\n".join(documents))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *(f"w{i}" for i in range(next(number)))]))
    return folder


def build_rows(place, input_format: str, **changes):
    values = {"train": str(place / "corpus.txt"), "sequence_length": T, "num_workers": 1, "one_sentence_per_line": True}
    tokenizer = load_tokenizer(place / "vocab.txt")
    return build_examples(DataConfig(**{**values, "input_format": input_format, **changes}), tokenizer, place / "cache")


def rows_of(paths) -> dict[str, np.ndarray]:
    rows = open_rows(paths)
    return rows.take(np.arange(len(rows)))


def documents_of(ids: np.ndarray) -> np.ndarray:
    """Which document each of some tokens is from."""
    sentences, documents = boundaries(lengths(120))
    return np.searchsorted(np.array(sentences)[documents], ids - FIRST, side="right") - 1


def test_the_configuration_names_every_objective() -> None:
    assert tuple(INPUT_FORMATS) == config.INPUT_FORMATS
    with pytest.raises(UserError, match=r"data\.input_format is 'rtd'.*full_sentences"):
        DataConfig(train="docstrings:stdlib", input_format="rtd").check()


@pytest.mark.medium
def test_each_objective_is_a_set_of_its_own_with_the_same_text_held_out(place) -> None:
    settings = {"blocks": {"one_sentence_per_line": False}}
    sets = [build_rows(place, input_format, **settings.get(input_format, {})) for input_format in INPUT_FORMATS]
    assert len({example_set.folder for example_set in sets}) == 5
    held_out = [set(rows_of(example_set.eval)["input_ids"].ravel().tolist()) - {CLS, PAD} for example_set in sets[2:]]
    assert held_out[0] == held_out[1] == held_out[2]


def test_sentence_order_pairs_are_neighbours_and_half_are_swapped(place) -> None:
    built = build_rows(place, "sop")
    rows = rows_of(built.train)
    for ids, length, second, label in zip(*rows.values(), strict=True):
        a, b = ids[1 : second - 1], ids[second : length - 1]
        assert ids[0] == CLS
        assert (ids[[second - 1, length - 1]] == SEP).all()
        assert (ids[length:] == PAD).all()
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        assert len(set(documents_of(np.concatenate([a, b])))) == 1
        first, then = (b, a) if label == SWAPPED else (a, b)
        assert then[0] > first[-1]
        assert then[0] == first[-1] + 1 or length == T, "only truncation parts the two"
    labels = rows["sentence_order_label"]
    assert len(labels) > 200
    assert labels.mean() == pytest.approx(0.5, abs=4 * 0.5 / len(labels) ** 0.5)
    assert built.counts["train_positive_rows"] == labels.sum()
    assert "next_sentence_label" not in rows


def test_sentence_order_uses_all_text_but_lone_sentences() -> None:
    sentences, documents = boundaries([[3], [2, 2], [1] * 41, [4] * 7])
    covered = set()
    for pair in sentence_order_pairs(sentences, documents, 13, 0.1, make_rng("all")):
        assert pair.a_end - pair.a_start + pair.b_end - pair.b_start <= 13
        covered |= {*range(pair.a_start, pair.a_end), *range(pair.b_start, pair.b_end)}
    assert not covered & set(range(3)), "one sentence alone has no order"
    assert covered >= set(range(3, 7 + 41)), "one-token sentences are never truncated"
    swapped = [pair.label for pair in sentence_order_pairs([0, 2, 4], [0, 2], 13, 0.0, make_rng("one"))]
    assert len(swapped) == 1


@pytest.mark.medium
@pytest.mark.parametrize("input_format", ["full_sentences", "doc_sentences"])
def test_full_rows_hold_whole_sentences_each_once(place, input_format) -> None:
    built = build_rows(place, input_format)
    rows = rows_of(built.train)
    assert set(rows) == {"input_ids", "length", "segment_a_length"}
    np.testing.assert_array_equal(rows["length"], rows["segment_a_length"])
    tokens = rows["input_ids"][rows["input_ids"] >= FIRST]
    assert len(set(tokens.tolist())) == len(tokens) == built.counts["train_tokens"]
    assert built.counts["train_unused_tokens"] == built.counts["train_positive_rows"] == 0
    starts = set(boundaries(lengths(120))[0])
    crossing = 0
    for ids, length in zip(rows["input_ids"], rows["length"], strict=True):
        assert ids[0] == CLS
        assert ids[length - 1] == SEP
        assert (ids[length:] == PAD).all()
        assert ids[1] - FIRST in starts
        assert ids[length - 2] - FIRST + 1 in starts
        inside = ids[1 : length - 1]
        documents = documents_of(inside[inside >= FIRST])
        crossing += len(set(documents)) > 1
        # Between two documents stands one [SEP], and nowhere else.
        parts = np.split(inside, np.flatnonzero(inside == SEP))
        assert len(parts) == len(set(documents))
        assert all(len(set(documents_of(part[part >= FIRST]))) == 1 for part in parts)
    assert (crossing > 0) == (input_format == "full_sentences")


def test_rows_across_documents_are_full_but_for_a_sentence() -> None:
    sentences, documents = boundaries(lengths(120))
    ends = set(documents)
    rows = list(rows_across_documents(sentences, documents, T - 2))
    index = {start: number for number, start in enumerate(sentences)}
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(rows))
    for start, end in rows[:-1]:
        first, stop = index[start], index[end]
        separators = sum(number in ends for number in range(first + 1, stop))
        assert end - start + separators <= T - 2
        following = sentences[stop + 1] - start + separators + (stop in ends)
        assert following > T - 2, "the next sentence would not have fitted"


def test_rows_within_documents_end_with_them() -> None:
    sentences, documents = [0, 4, 8, 12, 13], [0, 3, 4]
    assert list(rows_within_documents(sentences, documents, 9)) == [(0, 8), (8, 12), (12, 13)]
    assert list(rows_across_documents(sentences, documents, 9)) == [(0, 8), (8, 13)]
    assert list(rows_across_documents(sentences, documents, 5)) == [(0, 4), (4, 8), (8, 12), (12, 13)]


@pytest.mark.parametrize("input_format", ["nsp", "sop", "full_sentences", "doc_sentences"])
def test_a_sentence_longer_than_a_row_is_cut(place, tmp_path, input_format) -> None:
    (tmp_path / "long.txt").write_text("\n\n".join(" ".join(f"w{40 * d + i}" for i in range(200)) for d in range(8)))
    rows = build_rows(place, input_format, train=str(tmp_path / "long.txt"), eval_fraction=0.25)
    assert rows_of(rows.train)["length"].max() <= T
    assert rows_of(rows.train)["length"].mean() > T / 2


def test_without_pairs_two_documents_are_enough_and_without_two_sentences_there_is_no_order(place, tmp_path) -> None:
    (tmp_path / "two.txt").write_text("w1 w2\nw3\n\nw4\nw5")
    rows = build_rows(place, "doc_sentences", train=str(tmp_path / "two.txt"))
    assert (rows.counts["train_rows"], rows.counts["eval_rows"]) == (1, 1)
    (tmp_path / "one.txt").write_text("w1 w2\nw3")
    with pytest.raises(UserError, match="1 document: at least 2 are needed"):
        build_rows(place, "full_sentences", train=str(tmp_path / "one.txt"))
    (tmp_path / "lone.txt").write_text("w1\n\nw2\n\nw3")
    with pytest.raises(UserError, match=r"eval.*: raise data\.eval_fraction"):
        build_rows(place, "sop", train=str(tmp_path / "lone.txt"))


@pytest.mark.medium
def test_duplicates_are_the_same_text_in_other_pairs(place, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", 2500)
    once, thrice = build_rows(place, "nsp"), build_rows(place, "nsp", dupe_factor=3)
    names = [path.name for path in thrice.train]
    assert names[: len(once.train)] == [path.name for path in once.train]
    assert len(once.train) > 2
    assert names[len(once.train)] == "train-1-00000.arrow"
    assert len(names) == 3 * len(once.train)
    assert [path.read_bytes() for path in thrice.train[: len(once.train)]] == [path.read_bytes() for path in once.train]
    assert [path.read_bytes() for path in thrice.eval] == [path.read_bytes() for path in once.eval]
    for name in ("documents", "sentences", "tokens"):
        assert thrice.counts[f"train_{name}"] == once.counts[f"train_{name}"]
    copies = np.split(np.array(thrice.train), 3)
    rows = [rows_of(paths)["input_ids"] for paths in copies]
    assert len({row.tobytes() for copy in rows for row in copy}) > 0.9 * sum(map(len, rows))
    texts = [set(copy.ravel().tolist()) for copy in rows]
    assert len(texts[0] & texts[1] & texts[2]) > 0.9 * len(texts[0])
    (tmp_path / "vocab.txt").write_bytes((place / "vocab.txt").read_bytes())
    two = build_rows(tmp_path, "nsp", train=str(place / "corpus.txt"), num_workers=2, dupe_factor=3)
    assert [path.read_bytes() for path in two.train] == [path.read_bytes() for path in thrice.train]
