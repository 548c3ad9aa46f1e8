"""CoNLL columns: read or refused, words labelled once each, tags and entities back."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.errors import UserError
from bert.tasks.readers import conll
from bert.tasks.readers.conll import Rows, Sentences
from bert.tasks.token_classification import split_text
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


def error_of(path: Path, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        conll.read(path, **arguments)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def test_four_columns_as_in_conll_2003(tmp_path):
    content = (
        "-DOCSTART- -X- -X- O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n-DOCSTART- -X- -X- O\nPeter NNP I-NP I-PER\n"
    )
    sentences = conll.read(write(tmp_path, content))
    assert sentences.words == [["EU", "rejects"], ["Peter"]]
    assert sentences.tags == [["B-ORG", "O"], ["B-PER"]]
    assert (sentences.scheme, sentences.delimiter, sentences.lines) == ("IOB1", " ", [3, 7])
    assert conll.label_names(sentences) == ("O", "B-ORG", "I-ORG", "B-PER", "I-PER")


def test_two_columns_with_tabs_and_windows_ends(tmp_path):
    """As WNUT-17: lines of a tab alone end sentences too; words may be anything but tabs."""
    content = "\ufeffEmpire State\tB-location\r\n\u2028\tI-location\r\n\t\r\n\t\r\n\u00a0\tO\r\n\x85\tO"
    sentences = conll.read(write(tmp_path, content))
    assert sentences.words == [["Empire State", "\u2028"], ["\u00a0", "\x85"]]
    assert sentences.tags == [["B-location", "I-location"], ["O", "O"]]
    assert sentences.lines == [1, 5]


def test_runs_of_spaces_are_one(tmp_path):
    assert conll.read(write(tmp_path, "a   B-X \n  b  O\n")).columns == [[["a", "B-X"], ["b", "O"]]]


def test_bioes_becomes_bio(tmp_path):
    sentences = conll.read(write(tmp_path, "a B-X\nb E-X\nc S-X\nd O\n"))
    assert (sentences.tags, sentences.scheme) == ([["B-X", "I-X", "B-X", "O"]], "BIOES")


def test_tags_that_mark_no_entities_stay(tmp_path):
    sentences = conll.read(write(tmp_path, "a DT\nb NN\nc .\n"))
    assert (sentences.tags, sentences.scheme) == ([["DT", "NN", "."]], "plain")
    assert conll.label_names(sentences) == (".", "DT", "NN")


def test_a_file_to_predict_has_words_alone(tmp_path):
    for content in ("a\nb\n\nc\n", "a x\nb y\n\nc z\n"):
        sentences = conll.read(write(tmp_path, content), labelled=False)
        assert sentences.words == [["a", "b"], ["c"]]
        assert sentences.tags is None


def test_broken_sequences_are_errors_or_counted(tmp_path):
    path = write(tmp_path, "a B-X\nb I-X\n\nc O\nd I-X\ne I-Y\n\nf B-Y\n\ng B-X\n")
    assert "line 5: the tag I-X after O breaks the file's scheme, BIO" in error_of(path)
    sentences = conll.read(path, broken="count")
    assert sentences.broken == [5]
    assert sentences.tags[1] == ["O", "B-X", "B-Y"]
    assert "line 1: the tag I-X after the start of the sentence breaks" in error_of(write(tmp_path, "a I-X\n\nb B-X\n"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no words"),
        ("\n \n-DOCSTART- O\n", "holds no words"),
        ("a O\nb\n", "line 2: 1 columns between spaces where the lines above have 2"),
        ("a x O\nb O\n", "line 2: 2 columns between spaces where the lines above have 3"),
        ("a\tO\nb O\n", "line 2: 1 columns between tabs"),
        ("a\nb\n", "line 1: one column: the word must come first and its tag last"),
        ("a\tO\n\tO\n", "line 2: the word is empty"),
        ("a\tO\nb\t\n", "line 2: the tag is empty"),
        ("a O\n\nb B-X\nc Borg\n", "line 4: the tag 'Borg' is none of BIO, IOB1, BIOES"),
        ("a B-\nb B-X\n", "line 1: the tag 'B-' is none of"),
        (b"a O\ncaf\xe9 O\n", "line 2: not UTF-8"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, content, words):
    assert words in error_of(write(tmp_path, content))


def test_missing_files_are_named(tmp_path):
    assert "has disappeared: put it back" in error_of(tmp_path / "x")


def test_columns_may_be_packed(tmp_path):
    path = tmp_path / "train.conll.gz"
    path.write_bytes(gzip.compress(b"a B-X\n\nb O\n"))
    assert conll.read(path).words == [["a"], ["b"]]
    assert conll.width(path) == 2
    path.write_bytes(b"a B-X\n")
    assert "is cut short or damaged" in error_of(path)


def test_labels_the_training_data_lacks_are_told_with_their_line(tmp_path, tokenizer):
    sentences = conll.read(write(tmp_path, "a B-X\n\nb O\nc B-Z\n"))
    with pytest.raises(UserError, match=r"train.txt, line 4: the tag B-Z does not occur in the training data, .* I-X:"):
        conll.tokenize(tokenizer, sentences, LABELS)


def pieces(rows: Rows) -> list[list[str]]:
    return [[WORDS[id] for id in row] for row in np.split(rows.features.ids, rows.features.offsets[1:-1])]


def test_the_first_piece_carries_the_label(tokenizer):
    sentences = Sentences([["ab", "C-d", "e"], ["f"]], [["B-X", "I-X", "O"], ["B-X"]])
    rows = conll.tokenize(tokenizer, sentences, LABELS, 16)
    assert pieces(rows) == [["[CLS]", "a", "##b", "c", "-", "d", "e", "[SEP]"], ["[CLS]", "f", "[SEP]"]]
    assert rows.words.tolist() == [-1, 0, -1, 1, -1, -1, 2, -1, -1, 3, -1]
    batch = rows.batch(np.array([1, 0]), 10, 3)
    assert batch["labels"].tolist() == [[-1, 1, *[-1] * 8], [-1, 1, -1, 2, -1, -1, 0, -1, -1, -1], [-1] * 10]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert batch["attention_mask"].sum(axis=1).tolist() == [3, 8, 0]
    assert not batch["token_type_ids"].any()
    assert batch["weights"].dtype == np.float32


def test_words_without_pieces_have_a_label_too(tokenizer):
    rows = conll.tokenize(tokenizer, Sentences([["a", "\u200d", "\x01", "[SEP]"]], [["O"] * 4]), LABELS)
    assert pieces(rows) == [["[CLS]", "a", "[UNK]", "[UNK]", "[UNK]", *("s", "##e", "##p"), "[UNK]", "[SEP]"]]
    assert rows.words[rows.words >= 0].tolist() == [0, 1, 2, 3]


def test_a_long_sentence_is_read_through_windows(tokenizer):
    """Ten words through windows of four, two apart: each is labelled where it has most around it."""
    rows = conll.tokenize(tokenizer, Sentences([list("abcdefghij")], None), LABELS, 6)
    assert [row[1:-1] for row in pieces(rows)] == [list("abcd"), list("cdef"), list("efgh"), list("ghij")]
    assert np.split(rows.words, rows.features.offsets[1:-1])[1].tolist() == [-1, -1, 3, 4, -1, -1]
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
        rows = conll.tokenize(tokenizer, sentences, LABELS, max_length)
        assert rows.lengths.max() <= max_length
        assert sorted(rows.words[rows.words >= 0]) == list(range(sum(map(len, words))))
        batch = rows.batch(np.arange(len(rows)), max_length, len(rows))
        predictions = np.where(batch["labels"] >= 0, batch["labels"], 99)
        assert conll.answers(sentences, rows, predictions, LABELS) == tags


def test_nothing_to_tag_is_no_error(tokenizer):
    sentences = Sentences([[]], None)
    rows = conll.tokenize(tokenizer, sentences, LABELS)
    assert len(rows) == 0
    assert conll.answers(sentences, rows, np.zeros((0, 8), int), LABELS) == [[]]


def test_predictions_and_lengths_that_do_not_fit_are_refused(tokenizer):
    sentences = Sentences([["a"]], None)
    rows = conll.tokenize(tokenizer, sentences, LABELS)
    for shape in [(2, 8), (1, 2)]:
        with pytest.raises(ValueError, match="for 1 rows of up to 3 tokens"):
            conll.answers(sentences, rows, np.zeros(shape, int), LABELS)
    with pytest.raises(UserError, match="max_length is 3"):
        conll.tokenize(tokenizer, sentences, LABELS, 3)


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
    found, places = split_text(text)
    assert found == words.split()
    assert [text[start:end] for start, end in places] == found


def test_a_text_is_read_as_the_columns_of_training_are(tmp_path, tokenizer):
    """Each word's tag is asked of the piece that had the label in training."""
    trained = conll.read(write(tmp_path, "U.N. B-X\nmet O\nAL-AIN B-X\nO-Neil I-X\n. O\n"))
    words, places = split_text("U.N. met AL-AIN O-Neil.")
    rows, asked = (conll.tokenize(tokenizer, given, LABELS) for given in (trained, Sentences(words=[words], tags=None)))
    assert pieces(asked) == pieces(rows)
    assert asked.words.tolist() == rows.words.tolist()
    assert conll.entities("U.N. met AL-AIN O-Neil.", places, trained.tags[0]) == [
        ("X", "U.N.", 0, 4, None), ("X", "AL-AIN O-Neil", 9, 22, None)]  # fmt: skip


def test_entities_of_a_text_stand_at_their_characters():
    text = "Mr. Bob-Ray\u00a0 Smith, of New  York"
    words, places = split_text(text)
    assert words == ["Mr", ".", "Bob-Ray", "Smith", ",", "of", "New", "York"]
    tags = ["O", "O", "B-PER", "I-PER", "O", "O", "I-LOC", "I-LOC"]
    found = conll.entities(text, places, tags)
    assert found == [("PER", "Bob-Ray\u00a0 Smith", 4, 18, None), ("LOC", "New  York", 23, 32, None)]
    shares = [0.5] * 6 + [0.9, 0.7]
    assert conll.entities(text, places, tags, shares)[1].probability == pytest.approx(0.8)
    assert all(text[entity.start : entity.end] == entity.text for entity in found)
    assert conll.entities("", [], []) == []


def test_predictions_are_one_more_column_in_the_scheme_of_the_file(tmp_path):
    content = "EU NNP I-ORG\nrejects VBZ O\n\nPeter NNP I-PER\n\n"
    sentences = conll.read(write(tmp_path, content))
    path = conll.write_predictions(tmp_path / "out" / "dev.txt", sentences, [["B-ORG", "B-ORG"], ["I-PER"]])
    assert path.read_text() == "EU NNP I-ORG I-ORG\nrejects VBZ O B-ORG\n\nPeter NNP I-PER I-PER\n\n"
    tabs = conll.read(write(tmp_path, "a b\tDT\n"))
    assert conll.write_predictions(path, tabs, [["NN"]]).read_text() == "a b\tDT\tNN\n\n"
    free = Sentences([["a"]], None)
    assert conll.write_predictions(path, free, [["B-X"]]).read_text() == "a B-X\n\n"
