"""Words and tags of one's own from JSONL, data sets and named columns: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig, UserError
from bert.data.tasks import task_of
from bert.data.tasks.own_tags import Tagging
from bert.data.tasks.tagging import Tagged

WORDS, TAGS = [["Ann", "left"], ["New York"]], [["B-PER", "O"], ["B-LOC"]]


def own(**data: object) -> Tagging:
    return task_of(FinetuneConfig(task="tagging", data=TaskDataConfig(**data)))


def jsonl(folder: Path, name: str, *rows: dict[str, object]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines(words: str = "words", tags: str = "tags") -> list[dict[str, object]]:
    return [{words: ours, tags: theirs} for ours, theirs in zip(WORDS, TAGS, strict=True)]


def error_of(task: Tagging, folder: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        task.read(folder, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_lists_of_words_and_tags_are_sentences(tmp_path: Path) -> None:
    task = own(columns=ColumnsConfig(words="tokens", tags="ner"))
    train = task.read(jsonl(tmp_path, "train", *lines("tokens", "ner")), "train")
    assert (train.words, train.tags, train.scheme) == (WORDS, TAGS, "BIO")
    assert train.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert task.fitted(train).main_metric == "f1"
    assert task.read(tmp_path, "train", max_rows=1).words == WORDS[:1]
    [path, _] = task.fitted(train).write(tmp_path, "dev", Tagged(TAGS, []), train)
    assert path.read_text() == "Ann\tB-PER\tB-PER\nleft\tO\tO\n\nNew York\tB-LOC\tB-LOC\n\n"


def test_a_test_file_without_tags_is_predicted(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", *lines())
    assert own().splits(jsonl(tmp_path, "test", {"words": WORDS[0]})) == ["train", "dev", "test"]
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
    sentences = own(header=header, columns=ColumnsConfig(words="word", tags="pos")).read(tmp_path, "train")
    assert (sentences.words, sentences.tags) == ([["Ann", "left"], ["He"]], [["NNP", "VBD"], ["PRP"]])
    assert sentences.labels == ("NNP", "PRP", "VBD")
    assert own(header=header, columns=ColumnsConfig(words="word")).read(tmp_path, "train").labels[1:] == (
        "B-PER",
        "I-PER",
    )
    assert own().read(tmp_path, "train").words[0] == ["1", "2"]
    message = error_of(own(header=header, columns=ColumnsConfig(tags="ner")), tmp_path)
    assert message == "data.columns.tags is 'ner', which is not in data.header: number, word, pos, entity"
    assert "train.conll has 4 columns and data.header names 2" in error_of(own(header=["a", "b"]), tmp_path)
    assert "name them all in their order as data.header" in error_of(own(columns=ColumnsConfig(words="word")), tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"words": ["a", "b"], "tags": ["O"]}, "line 3: 2 words and 1 tags: give each word one"),
        ({"words": ["a"]}, "line 3: no 'tags' among 'words': set data.columns.tags to the right one"),
        ({"words": [], "tags": []}, "line 3: words is '[]': it must be a list with at least one entry"),
        ({"words": "a b", "tags": ["O"]}, "line 3: words is 'a b': it must be a list"),
        ({"words": [" "], "tags": ["O"]}, "line 3: words is ' ': it must be a text without tabs and line ends"),
        ({"words": ["a", "b"], "tags": ["O", "I-PER"]}, "line 3: the tag I-PER after O breaks the file's scheme, BIO"),
        ({"words": ["a", "b"], "tags": ["O", "Borg"]}, "line 3: the tag 'Borg' is none of BIO, IOB1, BIOES"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_and_line(tmp_path: Path, row: dict[str, object], words: str) -> None:
    jsonl(tmp_path, "train", {"words": ["c", "d"], "tags": ["B-X", "I-X"]}, lines()[0], row)
    assert f"{tmp_path / 'train.jsonl'}, {words}" in error_of(own(), tmp_path)


def test_broken_tags_are_counted_when_asked(tmp_path: Path) -> None:
    jsonl(tmp_path, "train", {"words": ["c", "d", "e"], "tags": ["B-X", "I-X", "B-X"]},
          {"words": ["a", "b"], "tags": ["O", "I-PER"]})  # fmt: skip
    assert own(broken_tags="count").read(tmp_path, "train").broken == [2]
