"""CoNLL columns: reading, errors, and writing with one more column."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from bert.errors import UserError
from bert.tasks.token_classification import Sentences, conll
from tests.messages import has_all


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
    """WNUT-17's format: lines with only a tab also end sentences, and words may contain anything except tabs."""
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
    assert has_all(error_of(path), "line 5", "I-X", "BIO")
    sentences = conll.read(path, reading="count")
    assert sentences.broken == [5]
    assert sentences.tags[1] == ["O", "B-X", "B-Y"]
    assert has_all(error_of(write(tmp_path, "a I-X\n\nb B-X\n")), "line 1", "I-X")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no words"),
        ("\n \n-DOCSTART- O\n", "has no words"),
        ("a O\nb\n", "line 2: 1 columns between spaces, but the lines above have 2"),
        ("a x O\nb O\n", "line 2: 2 columns between spaces, but the lines above have 3"),
        ("a\tO\nb O\n", "line 2: 1 columns between tabs"),
        ("a\nb\n", "line 1: one column: write the word first and its tag last"),
        ("a\tO\n\tO\n", "line 2: the word is empty"),
        ("a\tO\nb\t\n", "line 2: the tag is empty"),
        ("a O\n\nb B-X\nc Borg\n", "line 4: the tag 'Borg' is not part of BIO, IOB1, BIOES"),
        ("a B-\nb B-X\n", "line 1: the tag 'B-' is not part of"),
        ("a O\nb Borg\n\nc B-X\nd Dorg\n", "and a type; 2 lines have such tags: 2, 5"),
        ("a B-X\nb O\nc I-X\n\nd B-X\n\ne I-X\n", "--data.invalid_tags count; 2 lines have such tags: 3, 7"),
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


def test_predictions_are_one_more_column_in_the_scheme_of_the_file(tmp_path):
    content = "EU NNP I-ORG\nrejects VBZ O\n\nPeter NNP I-PER\n\n"
    sentences = conll.read(write(tmp_path, content))
    path = conll.write_predictions(tmp_path / "out" / "dev.txt", sentences, [["B-ORG", "B-ORG"], ["I-PER"]])
    assert path.read_text() == "EU NNP I-ORG I-ORG\nrejects VBZ O B-ORG\n\nPeter NNP I-PER I-PER\n\n"
    tabs = conll.read(write(tmp_path, "a b\tDT\n"))
    assert conll.write_predictions(path, tabs, [["NN"]]).read_text() == "a b\tDT\tNN\n\n"
    free = Sentences([["a"]], None)
    assert conll.write_predictions(path, free, [["B-X"]]).read_text() == "a B-X\n\n"


def test_other_schemes_are_read_and_written_as_in_the_file(tmp_path):
    content = "a U-X\nb O\nc B-Y\nd L-Y\n"
    sentences = conll.read(write(tmp_path, content))
    assert sentences.tags == [["B-X", "O", "B-Y", "I-Y"]]
    written = conll.write_predictions(tmp_path / "out.conll", sentences, [["O", "B-X", "B-Y", "I-Y"]])
    assert written.read_text() == "a U-X O\nb O U-X\nc B-Y B-Y\nd L-Y L-Y\n\n"


def test_types_alone_mark_entities_if_most_words_have_none(tmp_path):
    sentences = conll.read(write(tmp_path, "a X\nb X\nc O\nd O\n"))
    assert sentences.tags == [["B-X", "I-X", "O", "O"]]
    assert "adjacent words of one type are one entity" in sentences.notes[0]
    sentences = conll.read(write(tmp_path, "a X\nb X\nc O\n"))
    assert (sentences.tags, sentences.scheme) == ([["X", "X", "O"]], "plain")
    assert "read as plain tags" in sentences.notes[0]
    assert conll.read(write(tmp_path, "a X\n"), types=["X"]).tags == [["B-X"]]
    assert conll.read(write(tmp_path, "a X\nb O\n"), reading="plain").tags == [["X", "O"]]


@pytest.mark.parametrize(
    "content",
    [
        "# id 1 domain=en\na _ _ B-X\nb _ _ O\n\n# id 2 domain=en\nc _ _ O\n",
        "# id 1 domain=en\na\tB-X\nb\tO\n\n# id 2 domain=en\nc\tO\n",
        "# id 1\tdomain=en\na B-X\nb O\n\n# id 2\tdomain=en\nc O\n",
    ],
)
def test_comments_before_sentences_are_left_out(tmp_path, content):
    sentences = conll.read(write(tmp_path, content))
    assert (sentences.words, sentences.tags) == ([["a", "b"], ["c"]], [["B-X", "O"], ["O"]])
    assert has_all(sentences.notes[0], "2 lines", "with #")


@pytest.mark.parametrize("comment", ["#", "#\n# id 1 x=y", "#id=3", "###PMID:1"])
def test_comments_of_one_word_are_left_out(tmp_path, comment):
    sentences = conll.read(write(tmp_path, f"{comment}\na B-X\nb O\n\n{comment}\n#c O\n"))
    assert (sentences.words, sentences.tags) == ([["a", "b"], ["#c"]], [["B-X", "O"], ["O"]])
    assert conll.read(write(tmp_path, "#c\nb\n\n#d\n"), labelled=False).words == [["#c", "b"], ["#d"]]


def test_the_word_hash_is_no_comment(tmp_path):
    sentences = conll.read(write(tmp_path, "# O\na B-X\n\nb O\n# O\n"))
    assert (sentences.words, sentences.notes) == ([["#", "a"], ["b", "#"]], ())
    assert conll.read(write(tmp_path, "# id 1\na\n\n#\nb\n"), labelled=False).words == [["a"], ["#", "b"]]
