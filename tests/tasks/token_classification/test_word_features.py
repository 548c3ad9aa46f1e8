"""Words become rows of tokens with a label each; predicted labels become tags and entities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.errors import UserError
from bert.tasks.token_classification import (
    CLITICS,
    Sentences,
    WordFeatures,
    conll,
    separate_clitics,
    split_text,
    word_features,
)
from tests.letters import letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "-", "."]
LABELS = ("O", "B-X", "I-X")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_labels_the_training_data_lacks_are_told_with_their_line(tmp_path, tokenizer):
    sentences = conll.read(write(tmp_path, "a B-X\n\nb O\nc B-Z\n"))
    with pytest.raises(UserError, match=r"train.txt, line 4.*B-Z does not occur.*I-X"):
        word_features.tokenize(tokenizer, sentences, LABELS)


def tokens(rows: WordFeatures) -> list[list[str]]:
    return [[WORDS[id] for id in row] for row in np.split(rows.ids, rows.offsets[1:-1])]


def test_the_first_token_carries_the_label(tokenizer):
    sentences = Sentences([["ab", "C-d", "e"], ["f"]], [["B-X", "I-X", "O"], ["B-X"]])
    rows = word_features.tokenize(tokenizer, sentences, LABELS, 16)
    assert tokens(rows) == [["[CLS]", "a", "##b", "c", "-", "d", "e", "[SEP]"], ["[CLS]", "f", "[SEP]"]]
    assert rows.words.tolist() == [-1, 0, -1, 1, -1, -1, 2, -1, -1, 3, -1]
    batch = rows.batch(np.array([1, 0]), 10, 3)
    assert batch["labels"].tolist() == [[-1, 1, *[-1] * 8], [-1, 1, -1, 2, -1, -1, 0, -1, -1, -1], [-1] * 10]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert batch["attention_mask"].sum(axis=1).tolist() == [3, 8, 0]
    assert not batch["token_type_ids"].any()
    assert batch["weights"].dtype == np.float32


def test_words_without_tokens_have_a_label_too(tokenizer):
    rows = word_features.tokenize(tokenizer, Sentences([["a", "\u200d", "\x01", "[SEP]"]], [["O"] * 4]), LABELS)
    assert tokens(rows) == [["[CLS]", "a", "[UNK]", "[UNK]", "[UNK]", *("s", "##e", "##p"), "[UNK]", "[SEP]"]]
    assert rows.words[rows.words >= 0].tolist() == [0, 1, 2, 3]


def test_a_long_sentence_is_read_through_windows(tokenizer):
    """Ten words through windows of four, two apart: each is labelled where it has most around it."""
    rows = word_features.tokenize(tokenizer, Sentences([list("abcdefghij")], None), LABELS, 6)
    assert [row[1:-1] for row in tokens(rows)] == [list("abcd"), list("cdef"), list("efgh"), list("ghij")]
    assert np.split(rows.words, rows.offsets[1:-1])[1].tolist() == [-1, -1, 3, 4, -1, -1]
    assert rows.labels is None


def test_every_word_is_labelled_once_and_its_tag_comes_back(tokenizer):
    random = np.random.default_rng(3)
    words = [
        ["".join(random.choice(list(LETTERS + "-"), random.integers(1, 30))) for _ in range(random.integers(0, 40))]
        for _ in range(25)
    ]
    tags = [[LABELS[number] for number in random.integers(0, 3, len(sentence))] for sentence in words]
    sentences = Sentences(words, tags)
    for max_length in (4, 5, 12, 33, 512):
        rows = word_features.tokenize(tokenizer, sentences, LABELS, max_length)
        assert rows.lengths.max() <= max_length
        assert sorted(rows.words[rows.words >= 0]) == list(range(sum(map(len, words))))
        batch = rows.batch(np.arange(len(rows)), max_length, len(rows))
        predictions = np.where(batch["labels"] >= 0, batch["labels"], 99)
        assert word_features.decode_tags(sentences, rows, predictions, LABELS) == tags


def test_nothing_to_tag_is_no_error(tokenizer):
    sentences = Sentences([[]], None)
    rows = word_features.tokenize(tokenizer, sentences, LABELS)
    assert len(rows) == 0
    assert word_features.decode_tags(sentences, rows, np.zeros((0, 8), int), LABELS) == [[]]


def test_predictions_and_lengths_that_do_not_fit_are_refused(tokenizer):
    sentences = Sentences([["a"]], None)
    rows = word_features.tokenize(tokenizer, sentences, LABELS)
    for shape in [(2, 8), (1, 2)]:
        with pytest.raises(ValueError, match="for 1 rows of up to 3 tokens"):
            word_features.decode_tags(sentences, rows, np.zeros(shape, int), LABELS)
    with pytest.raises(UserError, match="max_length is 3"):
        word_features.tokenize(tokenizer, sentences, LABELS, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("U.N. met AL-AIN O'Neill", "U.N. met AL-AIN O'Neill"),
        ("(the U.N.), e.g. 3.5% of $10,000.", "( the U.N. ) , e.g. 3.5 % of $ 10,000 ."),
        ("See example.com. Ph.D. or U.S.S.R.", "See example.com . Ph.D. or U.S.S.R."),
        ("\u201cWell...\u201d, U.N.-led \u2013 J. said --", "\u201c Well . . . \u201d , U.N.-led \u2013 J . said - -"),
        ("\u5f20\u4e09\u5728\u5317\u4eac\u3002iPhone15\u6765\u4e86(U.N.)\U00020001x",
         "\u5f20 \u4e09 \u5728 \u5317 \u4eac \u3002 iPhone15 \u6765 \u4e86 ( U.N. ) \U00020001 x"),
        ("\u3000a\u2028b\u00a0", "a b"),
        ("@ann: #fun, @ 5#, (@bob)", "@ann : #fun , @ 5 # , ( @bob )"),
        ("?! .", "? ! ."),
        (" \n", ""),
    ],
)  # fmt: skip
def test_a_text_has_the_words_that_training_files_have(text, words):
    """Only punctuation around a word is split off; each Chinese character is a word."""
    split, places = split_text(text)
    assert split == words.split()
    assert [text[start:end] for start, end in places] == split


def test_a_text_is_read_as_the_columns_of_training_are(tmp_path, tokenizer):
    """Predicts each word's tag at the token that had the label in training."""
    trained = conll.read(write(tmp_path, "U.N. B-X\nmet O\nAL-AIN B-X\nO-Neil I-X\n. O\n"))
    words, places = split_text("U.N. met AL-AIN O-Neil.")
    rows, asked = (
        word_features.tokenize(tokenizer, inputs, LABELS) for inputs in (trained, Sentences(words=[words], tags=None))
    )
    assert tokens(asked) == tokens(rows)
    assert asked.words.tolist() == rows.words.tolist()
    assert word_features.entities("U.N. met AL-AIN O-Neil.", places, trained.tags[0]) == [
        ("X", "U.N.", 0, 4, None), ("X", "AL-AIN O-Neil", 9, 22, None)]  # fmt: skip


def test_entities_of_a_text_stand_at_their_characters():
    text = "Mr. Bob-Ray\u00a0 Smith, of New  York"
    words, places = split_text(text)
    assert words == ["Mr", ".", "Bob-Ray", "Smith", ",", "of", "New", "York"]
    tags = ["O", "O", "B-PER", "I-PER", "O", "O", "I-LOC", "I-LOC"]
    entities = word_features.entities(text, places, tags)
    assert entities == [("PER", "Bob-Ray\u00a0 Smith", 4, 18, None), ("LOC", "New  York", 23, 32, None)]
    shares = [0.5] * 6 + [0.9, 0.7]
    assert word_features.entities(text, places, tags, shares)[1].probability == pytest.approx(0.8)
    assert all(text[entity.start : entity.end] == entity.text for entity in entities)
    assert word_features.entities("", [], []) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Germany's GDP, Bob\u2019s.", "Germany 's GDP , Bob \u2019s ."),
        ("don't shouldn't've CAN'T", "do n't should n't 've CA N'T"),
        ("the boys' (O'Neill's) U.S.'s 1990's", "the boys ' ( O'Neill 's ) U.S. 's 1990 's"),
        ("already separate: Ann 's, do n't", "already separate : Ann 's , do n't"),
        ("\u0130 Ann's", "\u0130 Ann 's"),
    ],
)
def test_clitics_are_separate_words(text, words):
    split, places = split_text(text, CLITICS)
    assert split == words.split()
    assert [text[start:end] for start, end in places] == split
    assert split_text("Germany's")[0] == ["Germany's"]


def test_clitics_are_those_of_the_training_words():
    assert separate_clitics({"'s": 2, "\u2019s": 1, "n't": 1, "don't": 2, "it": 5}) == ("'s",)
    assert separate_clitics({"Germany's": 2, "it": 5}) == ()
