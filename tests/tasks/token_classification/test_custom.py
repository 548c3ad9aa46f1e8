"""Custom words and tags from JSONL, data sets and named columns: accepted and rejected files."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.token_classification import CustomTokenClassification, Tagged, conll
from tests.messages import has_all

WORDS, TAGS = [["Ann", "left"], ["New York"]], [["B-PER", "O"], ["B-LOC"]]


def own(**data: object) -> CustomTokenClassification:
    return make_task(FinetuneConfig(task="tagging", data=TaskDataConfig(**data)))


def jsonl(folder: Path, name: str, *rows: dict[str, object]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines(words: str = "words", tags: str = "tags") -> list[dict[str, object]]:
    return [{words: row, tags: row_tags} for row, row_tags in zip(WORDS, TAGS, strict=True)]


def error_of(task: CustomTokenClassification, folder: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        task.read(folder, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lists_of_words_and_tags_are_sentences(tmp_path: Path) -> None:
    task = own(columns=ColumnsConfig(words="tokens", tags="ner"))
    train = task.read(jsonl(tmp_path, "train", *lines("tokens", "ner")), "train")
    assert (train.words, train.tags, train.scheme) == (WORDS, TAGS, "BIO")
    assert train.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert task.fit(train).main_metric == "f1"
    [path, _] = task.fit(train).write_predictions(tmp_path, "dev", Tagged(TAGS, []), train)
    assert path.read_text() == "Ann\tB-PER\tB-PER\nleft\tO\tO\n\nNew York\tB-LOC\tB-LOC\n\n"


def test_a_test_file_without_tags_is_predicted(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", *lines())
    assert own().splits(jsonl(tmp_path, "test", {"words": WORDS[0]})) == ["train", "test"]
    assert not own().read(tmp_path, "test").labelled
    jsonl(tmp_path, "test", *lines())
    assert own().read(tmp_path, "test").labelled


def test_a_data_set_has_lists_of_class_labels(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["O", "B-PER", "B-LOC"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)})
    table = datasets.Dataset.from_dict({"tokens": WORDS, "ner_tags": [[1, 0], [2]]}, features=features)
    datasets.DatasetDict({"train": table, "validation": table}).save_to_disk(str(tmp_path))
    task = own(columns=ColumnsConfig(words="tokens", tags="ner_tags"))
    assert task.splits(tmp_path) == ["train", "dev"]
    assert task.read(tmp_path, "dev").tags == TAGS


def test_columns_are_named_by_the_header(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("1 Ann NNP B-PER\n2 left VBD O\n\n1 He PRP O\n")
    header = ["number", "word", "pos", "entity"]
    sentences = own(column_names=header, columns=ColumnsConfig(words="word", tags="pos")).read(tmp_path, "train")
    assert (sentences.words, sentences.tags) == ([["Ann", "left"], ["He"]], [["NNP", "VBD"], ["PRP"]])
    assert sentences.labels == ("NNP", "PRP", "VBD")
    assert own(column_names=header, columns=ColumnsConfig(words="word")).read(tmp_path, "train").labels[1:] == (
        "B-PER",
        "I-PER",
    )
    assert own().read(tmp_path, "train").words[0] == ["1", "2"]
    message = error_of(own(column_names=header, columns=ColumnsConfig(tags="ner")), tmp_path)
    assert message == "data.columns.tags is 'ner', which is not in data.column_names: number, word, pos, entity"
    message = error_of(own(column_names=["a", "b"]), tmp_path)
    assert message.endswith("train.conll, line 1: 4 columns, but data.column_names has 2 names: name each one")
    message = error_of(own(columns=ColumnsConfig(words="word")), tmp_path)
    assert "train.conll, line 1: no 'word' among '1', 'Ann', 'NNP', 'B-PER': set data.columns.words" in message
    assert message.endswith("name them all in their order as data.column_names")


NAMED = ColumnsConfig(words="word", tags="tag")
TABLE = "id,word,tag\n1,Ann,B-PER\n2,left,O\n{}\n3,New York,B-LOC\n"
"""A CSV file, of which ``{}`` ends the first sentence."""


@pytest.mark.parametrize("ending", ["", ",,", " , ,"])
def test_csv_names_its_columns_and_an_empty_row_ends_a_sentence(tmp_path: Path, ending: str) -> None:
    (tmp_path / "train.csv").write_text("\ufeff" + TABLE.format(ending).replace("\n", "\r\n"))
    sentences = own(columns=NAMED).read(tmp_path, "train")
    assert (sentences.words, sentences.tags, sentences.lines) == (WORDS, TAGS, [2, 5])
    [path, _] = own().fit(sentences).write_predictions(tmp_path, "dev", Tagged(TAGS, []), sentences)
    assert path.read_text() == "1\tAnn\tB-PER\tB-PER\n2\tleft\tO\tO\n\n3\tNew York\tB-LOC\tB-LOC\n\n"


def test_what_csv_quotes_is_one_cell(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('word,tag\n",",PUNCT\n"""",PUNCT\n\n\n\n"1,000",NUM\n')
    sentences = own(columns=NAMED).read(tmp_path, "train")
    assert (sentences.words, sentences.tags) == ([[",", '"'], ["1,000"]], [["PUNCT", "PUNCT"], ["NUM"]])
    assert own().fit(sentences).write_predictions(tmp_path, "dev", Tagged([["X", "X"], ["X"]], []), sentences)[
        0
    ].read_text() == (', PUNCT X\n" PUNCT X\n\n1,000 NUM X\n\n')


def test_tsv_that_a_csv_writer_quoted_has_the_words_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('words\ttags\nAnn\tB-PER\n""""\tO\n\nBob\tB-PER\n')
    sentences = own().read(tmp_path, "train")
    assert (sentences.words, sentences.tags) == ([["Ann", '"'], ["Bob"]], [["B-PER", "O"], ["B-PER"]])
    (tmp_path / "train.tsv").write_text('words\ttags\nAnn\tB-PER\n"\tO\n')
    assert own().read(tmp_path, "train").words == [["Ann", '"']]


def test_blanks_around_tags_do_not_count(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", {"words": ["Ann", "left"], "tags": ["B-PER ", "O"]}, {"words": ["Bob"], "tags": ["B-PER"]})
    assert own().read(tmp_path, "train").labels == ("O", "B-PER", "I-PER")


def test_a_single_tag_is_nothing_to_learn(tmp_path: Path) -> None:
    train = own().read(jsonl(tmp_path, "train", {"words": ["Ann", "left"], "tags": ["O", "O"]}), "train")
    with pytest.raises(UserError, match="tag 'O'"):
        own().fit(train)


def test_columns_without_an_end_of_a_sentence_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("words,tags\n" + "Ann,B-PER\nleft,O\n" * 150)
    [note] = own().read(tmp_path, "train").notes
    assert note.endswith("is one sentence of 300 words: put an empty line after each sentence")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_tables_may_be_packed(tmp_path: Path, kind: str, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    text = TABLE.format("") if kind == ".csv" else TABLE.format("").replace(",", "\t")
    (tmp_path / f"train{kind}{suffix}").write_bytes(pack(text.encode()))
    sentences = own(columns=NAMED).read(tmp_path, "train")
    assert (sentences.words, sentences.tags) == (WORDS, TAGS)
    (tmp_path / f"train{kind}{suffix}").write_bytes(pack(text.encode())[:-9])
    assert "is cut short or damaged" in error_of(own(columns=NAMED), tmp_path)


def test_the_header_of_tsv_is_no_word(tmp_path: Path) -> None:
    """Plain tags are the worst case: any word may be one."""
    (tmp_path / "train.tsv").write_text("word\ttag\nNew York\tNNP\n\nis\tVBZ\n")
    sentences = own(columns=NAMED).read(tmp_path, "train")
    assert (sentences.words, sentences.labels, sentences.lines) == ([["New York"], ["is"]], ("NNP", "VBZ"), [2, 4])
    assert own(columns=ColumnsConfig(tags="tag")).read(tmp_path, "train") == sentences
    assert own(columns=ColumnsConfig(words="word")).read(tmp_path, "train") == sentences
    assert own(column_names=["word", "tag"]).read(tmp_path, "train") == sentences, "named twice"
    message = error_of(own(), tmp_path)
    assert message.startswith(f"{tmp_path / 'train.tsv'}, line 1: 'word' and 'tag' look like names of columns: ")
    (tmp_path / "train.tsv").write_text("tags\twords\nNNP\tAnn\n")
    assert own().read(tmp_path, "train").words == [["Ann"]], "these need no configuration"
    (tmp_path / "train.tsv").write_text("Word\tNN\nof\tIN\nhonour\tNN\n")
    assert own().read(tmp_path, "train").words == [["Word", "of", "honour"]], "a word, for its tag is one"


@pytest.mark.parametrize("between", [",", "\t"])
def test_test_tables_may_lack_the_tags(tmp_path: Path, between: str) -> None:
    kind = ".csv" if between == "," else ".tsv"
    (tmp_path / f"train{kind}").write_text(f"tag{between}word\nO{between}a\n")
    test = tmp_path / f"test{kind}"
    for columns in (NAMED, ColumnsConfig(words="word")):
        test.write_text("word\nNew York\n\nb\n")
        sentences = own(columns=columns).read(tmp_path, "test")
        assert (sentences.words, sentences.tags) == ([["New York"], ["b"]], None)
    test.write_text(f"tag{between}word\n{between}a\n")
    assert not own(columns=NAMED).read(tmp_path, "test").labelled, "the cells are empty"
    test.write_text(f"tag{between}word\nO{between}a\n")
    assert own(columns=NAMED).read(tmp_path, "test").tags == [["O"]]
    test.write_text("a\nb\n")
    assert own(column_names=["tag", "word"], columns=NAMED).read(tmp_path, "test").words == [["a", "b"]]
    assert f"test{kind}, line 1: no 'word' among 'a'" in error_of(own(columns=NAMED), tmp_path, "test")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", " has no words: "),
        ("word,tag\n", " has no words: "),
        ("Ann,B-PER\n", ", line 1: no 'word' among 'Ann', 'B-PER': set data.columns.words to the right one, or name "),
        ("\nword,pos\n", ", line 2: no 'tag' among 'word', 'pos': set data.columns.tags to the right one, or name "),
        ("word,tag,tag\n", ", line 1: the columns are 'word', 'tag', 'tag': use unique names"),
        ("word,tag\na,O\nb\n", ", line 3: 1 columns between commas, but the lines above have 2"),
        ("word,tag\na,O,x\n", ", line 2: 3 columns between commas, but the lines above have 2"),
        ("word,tag\na,\n", ", line 2: the tag is empty"),
        ("word,tag\na,B-X\n\nb,I-Y\n", ", line 4: the tag I-Y after the start of the sentence violates"),
        ('word,tag\n"a\nb",O\n', ", line 2: the cell 'a\\nb' has a tab or a line end: remove it"),
        ('word,tag\n"a,O\n', ", line 2: not CSV (unexpected end of data): fix its quotes"),
    ],
)
def test_what_is_wrong_in_csv_is_told_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "train.csv").write_text(content)
    assert f"{tmp_path / 'train.csv'}{words}" in error_of(own(columns=NAMED), tmp_path)


def test_csv_without_names_has_words_and_tags(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("tags,words\nO,a\n")
    assert own().read(tmp_path, "train").words == [["a"]]
    (tmp_path / "train.csv").write_text("a,O\nb,O\n")
    assert "line 1: no 'words' among 'a', 'O': set data.columns.words" in error_of(own(), tmp_path)
    assert own(column_names=["x", "y"]).read(tmp_path, "train").words == [["a", "b"]]
    (tmp_path / "train.csv").write_text("x,y\na,O\n")
    assert own(column_names=["x", "y"]).read(tmp_path, "train").words == [["a"]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"words": ["a", "b"], "tags": ["O"]}, "line 3: 2 words, but 1 tags: write one for each word"),
        ({"words": ["a"]}, "line 3: no 'tags' among 'words': add it there, or set data.columns.tags to the right one"),
        ({"words": [], "tags": ["O"]}, "line 3: 0 words, but 1 tags: write one for each word"),
        ({"words": None, "tags": []}, "line 3: words is 'None': it must be a list of words"),
        ({"words": "a b", "tags": ["O"]}, "line 3: words is 'a b': it must be a list"),
        ({"words": [None], "tags": ["O"]}, "line 3: words has None: each word must be a text or a number"),
        ({"words": ["a"], "tags": [None]}, "line 3: tags is missing (null): write it or remove the line"),
        ({"words": ["a"], "tags": [" "]}, "line 3: tags is ' ': it must be a text without tabs and line ends"),
        (
            {"words": ["a", "b"], "tags": ["O", "I-PER"]},
            "line 3: the tag I-PER after O violates the file's scheme, BIO",
        ),
        ({"words": ["a", "b"], "tags": ["O", "Borg"]}, "line 3: the tag 'Borg' is not part of BIO, IOB1, BIOES"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_and_line(tmp_path: Path, row: dict[str, object], words: str) -> None:
    jsonl(tmp_path, "train", {"words": ["c", "d"], "tags": ["B-X", "I-X"]}, lines()[0], row)
    assert f"{tmp_path / 'train.jsonl'}, {words}" in error_of(own(), tmp_path)


def test_broken_tags_are_counted_when_asked(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", {"words": ["c", "d", "e"], "tags": ["B-X", "I-X", "B-X"]},
          {"words": ["a", "b"], "tags": ["O", "I-PER"]})  # fmt: skip
    assert own(invalid_tags="count").read(tmp_path, "train").broken == [2]


def test_a_fault_in_a_data_set_is_told_with_its_row(tmp_path: Path) -> None:
    rows = {"words": [["c", "d"], ["a", "b"]], "tags": [["B-X", "I-X"], ["O", "I-PER"]]}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows)).save_to_disk(tmp_path)
    assert has_all(error_of(own(), tmp_path), "row 2", "I-PER")
    [note] = own(invalid_tags="count").read(tmp_path, "train").notes
    assert note.endswith("(row 2)")


def test_spaces_never_separate_the_columns_of_tsv(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("EU\tB-ORG\nleft\tO\n")
    (tmp_path / "test.tsv").write_text("New York\nLos Angeles\n")
    test = own().read(tmp_path, "test")
    assert test.words == [["New York", "Los Angeles"]]
    assert not test.labelled


@pytest.mark.parametrize("first", ["words", "words O"])
def test_the_word_words_is_no_header_of_columns_without_names(tmp_path: Path, first: str) -> None:
    (tmp_path / "train.txt").write_text("EU B-ORG\nleft O\n")
    rest = first.replace("words", "fail")
    (tmp_path / "test.txt").write_text(f"{first}\n{rest}\n")
    assert own().read(tmp_path, "test").words == [["words", "fail"]]


def test_tags_of_several_words_are_written_between_tabs(tmp_path: Path) -> None:
    train = own().read(jsonl(tmp_path, "train", {"words": ["a", "b"], "tags": ["proper noun", "verb"]}), "train")
    [path, *_] = own().fit(train).write_predictions(tmp_path, "dev", Tagged(train.tags, []), train)
    assert path.read_text() == "a\tproper noun\tproper noun\nb\tverb\tverb\n\n"


def test_names_of_files_may_end_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "A.CSV").write_text("words,tags\nEU,B-ORG\n")
    assert own(train="A.CSV").read(tmp_path, "train").words == [["EU"]]


def test_words_may_be_white_space_and_numbers(tmp_path: Path) -> None:
    words = ["Dear", "\n\n", "Ann", " ", "", 1.5]
    jsonl(tmp_path, "train", {"words": words, "tags": ["O", "O", "B-X", "O", "O", "O"]}, {"words": [], "tags": []},
          {"words": [" "], "tags": ["O"]})  # fmt: skip
    sentences = own().read(tmp_path, "train")
    assert sentences.words == [["Dear", "\n\n", "Ann", " ", "", "1.5"], [], [" "]]
    path = conll.write_predictions(tmp_path / "out.conll", sentences, sentences.tags)
    assert conll.read(path).words == [["Dear", "\u00a0\u00a0", "Ann", "\u00a0", "\u00a0", "1.5"], ["\u00a0"]]


def test_a_data_set_keeps_the_order_of_its_tags(tmp_path: Path) -> None:
    names = ["B-PER", "I-PER", "O", "B-ZIP", "I-ZIP"]
    features = {
        "words": datasets.List(datasets.Value("string")),
        "tags": datasets.List(datasets.ClassLabel(names=names)),
    }
    rows = {"words": [["a", "b"], ["c"], ["d"]], "tags": [[0, 2], [-1], [2]]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path))
    train = own().read(tmp_path, "train")
    assert own().fit(train).labels == tuple(names)
    assert train.words == [["a", "b"], ["d"]]
    assert has_all(train.notes[0], "1 row without a label", "2)")


def test_bad_rows_are_reported_at_once(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", {"words": ["a"], "tags": ["O"]}, {"words": [None], "tags": ["O"]}, {"words": ["b"]})
    assert error_of(own(), tmp_path).endswith("2 lines have such errors: 2, 3")


def test_columns_that_are_swapped_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("".join(f"{'NN' if row % 2 else 'VB'} word{row}\n" for row in range(40)))
    with pytest.raises(UserError, match="40 tags and 2 different"):
        own().fit(own().read(tmp_path, "train"))
