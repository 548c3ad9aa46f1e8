"""Padded batches of labels in other shapes than one a row: spans, tokens, choices."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.data.encoding import tokenize
from bert.data.rows import IGNORE_INDEX, ChoiceRows, TokenRows
from tests.tasks.letter_examples import WORDS, question_tokenizer

# Rows of 3, 2, 4 and 2 tokens.
OFFSETS = np.array([0, 3, 5, 9, 11])
PLAIN = TokenRows(np.arange(1, 12, dtype=np.int32), OFFSETS, np.array([3, 2, 2, 2], np.int32), None)


def test_scores_and_spans_keep_their_shape() -> None:
    scores = dataclasses.replace(PLAIN, labels=np.array([0.5, 1.5, 2.5, 3.5], np.float32))
    batch = scores.batch(np.array([2, 0]), 4, 3)
    assert batch["labels"].dtype == np.float32
    assert batch["labels"].tolist() == [2.5, 0.5, 0]
    spans = dataclasses.replace(PLAIN, labels=np.array([[1, 2], [0, 1], [2, 3], [0, 0]], np.int32))
    assert spans.batch(np.array([2, 0]), 4, 3)["labels"].tolist() == [[2, 3], [1, 2], [0, 0]]


def test_lengths_are_taken_once_and_are_no_part_of_what_the_rows_are() -> None:
    rows = dataclasses.replace(PLAIN)
    digest = rows.digest()
    rows.batch(np.array([2, 0]), 4, 3)
    assert rows.lengths is rows.lengths
    assert rows.digest() == digest
    assert pickle.loads(pickle.dumps(rows)).lengths.tolist() == [3, 2, 4, 2]
    assert dataclasses.replace(rows, offsets=np.array([0, 1, 11])).lengths.tolist() == [1, 10]
    choices = ChoiceRows(rows, np.array([0, 1, 4]), None)
    assert choices.lengths is choices.lengths
    assert choices.choices is choices.choices


def test_labels_of_tokens_are_padded_with_ignored_ones() -> None:
    tags = np.array([IGNORE_INDEX, 1, IGNORE_INDEX, IGNORE_INDEX, 2, 3, 4, 5, 6, 7, 8], np.int32)
    tagged = dataclasses.replace(PLAIN, labels=tags, token_labels=True)
    batch = tagged.batch(np.array([2, 0]), 5, 3)
    i = IGNORE_INDEX
    assert batch["labels"].tolist() == [[3, 4, 5, 6, i], [i, 1, i, i, i], [i, i, i, i, i]]
    assert (batch["labels"][batch["attention_mask"] == 0] == i).all()


def test_choices_are_padded_to_the_most_that_a_row_has() -> None:
    choices = ChoiceRows(PLAIN, np.array([0, 1, 4]), np.array([0, 2], np.int32))
    assert (len(choices), choices.lengths.tolist(), choices.choices.tolist()) == (2, [3, 4], [1, 3])
    batch = choices.batch(np.array([1, 0]), 4, 3)
    assert batch["input_ids"].tolist() == [
        [[4, 5, 0, 0], [6, 7, 8, 9], [10, 11, 0, 0]],
        [[1, 2, 3, 0], [1, 2, 3, 0], [1, 2, 3, 0]],
        [[4, 5, 0, 0], [6, 7, 8, 9], [10, 11, 0, 0]],
    ]
    assert batch["token_type_ids"][0].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch["attention_mask"].sum(-1).tolist() == [[2, 4, 2], [3, 3, 3], [2, 4, 2]]
    assert batch["choice_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]
    assert (batch["labels"].tolist(), batch["weights"].tolist()) == ([2, 0, 0], [1, 1, 0])
    with pytest.raises(ValueError, match=r"2 rows do not fit.*1"):
        choices.batch(np.array([1, 0]), 4, 1)


def test_digests_tell_tokens_and_labels_apart() -> None:
    labelled = dataclasses.replace(PLAIN, labels=np.arange(4, dtype=np.int32))
    other = dataclasses.replace(PLAIN, labels=np.arange(1, 5, dtype=np.int32))
    choices = [ChoiceRows(PLAIN, np.array([0, at, 4]), np.array([0, 1], np.int32)) for at in (1, 2)]
    assert len({rows.digest() for rows in (PLAIN, labelled, other, *choices)}) == 5
    assert labelled.digest() == dataclasses.replace(labelled).digest()


def google_pair(first: list, second: list, room: int) -> None:
    """``_truncate_seq_pair``, after run_classifier.py of google-research/bert."""
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(5, 40))
def test_pairs_are_cut_as_by_google(first: int, second: int, length: int) -> None:
    tokenizer = question_tokenizer()
    pair = " ".join(itertools.islice(itertools.cycle("abc"), first)), " ".join("d" * second)
    a, b = pair[0].split(), pair[1].split()
    google_pair(a, b, length - 3)
    features = tokenize(tokenizer, [pair], length, pair_truncation="google")
    assert [WORDS[i] for i in features.ids] == ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
    assert features.segment_a_lengths.tolist() == [len(a) + 2]


def test_an_odd_token_goes_to_the_first_text_as_by_google_and_else_as_by_the_library() -> None:
    tokenizer = question_tokenizer()
    for way, expected in (("google", "a b [SEP] c"), ("longest_first", "a [SEP] c d"), (None, "a [SEP] c d")):
        features = tokenize(tokenizer, [("a b", "c d"), "a b c d e f"], 6, pair_truncation=way)
        rows = [" ".join(WORDS[i] for i in row) for row in np.split(features.ids, features.offsets[1:-1])]
        assert rows == [f"[CLS] {expected} [SEP]", "[CLS] a b c d [SEP]"]
