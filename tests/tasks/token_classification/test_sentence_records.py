"""Sentences in every form that people have: words and tags, entities by character, and data sets like the hub's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import TASKS, make_task
from bert.tasks.token_classification import Tagged
from tests.messages import has_all

WORDS = [["Ann", "O'Neill", "'s", "in", "New", "York", "."], ["Ümit", "left", "🙂", "Paris"], ["nothing"]]
TAGS = [["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"], ["B-PER", "O", "O", "B-LOC"], ["O"]]
TEXTS = ["Ann O'Neill's in New York.", "Ümit left 🙂 Paris", "nothing"]
ENTITIES = [[(0, 11, "PER"), (17, 25, "LOC")], [(0, 4, "PER"), (12, 17, "LOC")], []]


def own(name: str = "tagging", **data: Any):
    return make_task(FinetuneConfig(task=name, data=TaskDataConfig(dir=".", **data)))


def write(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def marked(label: str) -> list[dict[str, Any]]:
    """Texts with entities, as most labelling tools write them."""
    return [
        {"text": text, "entities": [{"start": start, "end": end, label: type} for start, end, type in entities]}
        for text, entities in zip(TEXTS, ENTITIES, strict=True)
    ]


def listed() -> list[dict[str, Any]]:
    """Texts with entities as lists of three, in no order."""
    return [{"text": text, "entities": entities[::-1]} for text, entities in zip(TEXTS, ENTITIES, strict=True)]


FORMS = {
    "words": [{"words": words, "tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)],
    "tokens": [{"tokens": words, "ner_tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)],
    "label": marked("label"),
    "type": marked("type"),
    "lists": listed(),
    "spans": [{"text": row["text"], "spans": row["entities"]} for row in marked("label")],
    "doccano": [
        {
            "text": text,
            "entities": [{"id": 7, "label": type, "start_offset": a, "end_offset": b} for a, b, type in each],
        }
        for text, each in zip(TEXTS, ENTITIES, strict=True)
    ],
    "Prodigy": [
        {"text": row["text"], "tokens": [{"text": word, "id": 0} for word in words], "spans": row["entities"]}
        for row, words in zip(marked("label"), WORDS, strict=True)
    ],
    "doccano lists": [{"text": row["text"], "label": row["entities"]} for row in listed()],
    "Label Studio": [
        {"text": text, "label": [{"start": a, "end": b, "text": text[a:b], "labels": [type]} for a, b, type in each]}
        for text, each in zip(TEXTS, ENTITIES, strict=True)
    ],
}


CASES = [(form, "train.jsonl") for form in FORMS]
CASES += [(form, "train.parquet") for form in FORMS if "lists" not in form]  # values of an Arrow list have one type


@pytest.mark.parametrize(("form", "file"), CASES)
def test_every_form_has_the_same_words_and_tags(tmp_path: Path, form: str, file: str) -> None:
    rows = FORMS[form]
    if file == "train.parquet":
        pd.DataFrame(rows).to_parquet(tmp_path / file)
    else:
        write(tmp_path, rows)
    for name in ("tagging", "ner"):
        task = own(name)
        train = task.read(tmp_path, "train")
        assert (train.words, train.tags) == (WORDS, TAGS)
        assert task.fit(train).labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
        assert task.splits(tmp_path) == ["train", "dev"] if name == "ner" else ["train"]


def test_predictions_are_training_data(tmp_path: Path) -> None:
    """The words, tags and clitics do not change when a model is trained on its predictions."""
    write(tmp_path, marked("label"))
    task = own()
    task = task.fit(task.read(tmp_path, "train"))
    examples = task.examples_from_inputs(TEXTS)
    assert examples.words == WORDS
    answers = task.format_predictions(Tagged(TAGS, [[1.0] * len(tags) for tags in TAGS]), examples)
    rows = [{**task.input_fields(text), **one._asdict()} for text, one in zip(TEXTS, answers, strict=True)]
    (tmp_path / "again").mkdir()
    again = own().read(write(tmp_path / "again", rows), "train")
    assert (again.words, again.tags) == (WORDS, TAGS)
    restored = own(labels=list(task.labels), clitics=list(task.clitics))
    assert restored.examples_from_inputs(TEXTS).words == WORDS


def test_texts_are_split_as_in_predict_with_labels_named(tmp_path: Path) -> None:
    write(tmp_path, marked("label"))
    for settings in ({"labels": ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]}, {"clitics": ["'s"]}, {}):
        task = own(**settings)
        train = task.read(tmp_path, "train")
        assert train.words == task.fit(train).examples_from_inputs(TEXTS).words == WORDS
    with pytest.raises(UserError) as caught:
        own(clitics=[]).read(tmp_path, "train")
    assert has_all(str(caught.value), "line 1", "0 to 11", "O'Neill's", "4 to 13")


def test_other_columns_and_test_files(tmp_path: Path) -> None:
    rows = [{"body": row["text"], "marks": row["entities"]} for row in marked("label")]
    write(tmp_path, rows)
    write(tmp_path, [{"body": text} for text in TEXTS], "test.jsonl")
    task = own(columns=ColumnsConfig(text_a="body", tags="marks"))
    assert task.read(tmp_path, "train").tags == TAGS
    test = task.fit(task.read(tmp_path, "train")).read(tmp_path, "test")
    assert (test.words, test.labelled) == (WORDS, False)


@pytest.mark.parametrize(
    ("entity", "parts"),
    [
        ({"start": 0, "end": 2, "label": "PER"}, ["0 to 2", "'An'", "'Ann'", "0 to 3", "data.invalid_tags count"]),
        ({"start": 1, "end": 6, "label": "PER"}, ["1 to 6", "0 to 8", "data.invalid_tags"]),
        ({"start": 4, "end": 99, "label": "PER"}, ["4 to 99", "8 characters", "not bytes"]),
        ({"start": -1, "end": 3, "label": "PER"}, ["-1 to 3", "8 characters"]),
        ({"start": 3, "end": 3, "label": "PER"}, ["3 to 3"]),
        ({"start": 3, "end": 4, "label": "PER"}, ["3 to 4", "no word"]),
        ({"start": "0", "end": 3, "label": "PER"}, ["entities has", '"start"', '"end"']),
        ({"start": True, "end": 3, "label": "PER"}, ["entities has"]),
        ({"start": 0, "end": 3}, ["entities has", '"end": 3', '"label"']),
        ({"start": 0, "end": 3, "label": " "}, ["0 to 3", "text"]),
        ([0, 3], ["entities has", "[0, 3]"]),
        ("Ann", ["entities has", "Ann"]),
    ],
)
def test_invalid_entities_are_named(tmp_path: Path, entity: Any, parts: list[str]) -> None:
    write(tmp_path, [{"text": "Bob", "entities": []}, {"text": "Ann left", "entities": [entity]}])
    with pytest.raises(UserError) as caught:
        own().read(tmp_path, "train")
    assert has_all(str(caught.value), f"{tmp_path / 'train.jsonl'}, line 2: ", *parts), caught.value


def test_a_json_array_is_rejected_with_its_conversion(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(marked("label")), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        own(train=str(file)).read(tmp_path, "train")
    assert has_all(str(caught.value), str(file), "unsupported format", ".jsonl", "jq -c '.[]'")


def test_overlapping_entities_and_all_faulty_lines_are_named(tmp_path: Path) -> None:
    overlapping = [{"start": 0, "end": 8, "label": "ORG"}, {"start": 4, "end": 8, "label": "PER"}]
    rows = [{"text": "Ann left", "entities": entities} for entities in (overlapping, [], overlapping, 5)]
    with pytest.raises(UserError) as caught:
        own().read(write(tmp_path, rows), "train")
    assert has_all(str(caught.value), "line 1: ", "0 to 8 (ORG", "4 to 8 (PER", "overlap", "3 lines", "1, 3, 4")


def test_entities_inside_words_are_widened_on_request(tmp_path: Path) -> None:
    """White space at the ends of an entity is no fault."""
    entities = [{"start": 0, "end": 4, "label": "PER"}, {"start": 9, "end": 12, "label": "LOC"}]
    entities += [{"start": 13, "end": 19, "label": "LOC"}]
    rows = [{"text": "Ann left Yor-ker Street", "entities": entities}]
    task = own(invalid_tags="count")
    train = task.read(write(tmp_path, rows), "train")
    assert train.words == [["Ann", "left", "Yor-ker", "Street"]]
    assert train.tags == [["B-PER", "O", "B-LOC", "B-LOC"]]
    assert has_all(train.notes[0], "train.jsonl", "2 entities", "line 1")


def test_an_entity_whose_word_is_taken_is_reported(tmp_path: Path) -> None:
    entities = [{"start": 0, "end": 6, "label": "M"}, {"start": 7, "end": 13, "label": "N"}]
    rows = [{"text": "German-French war", "entities": entities}]
    train = own(invalid_tags="count").read(write(tmp_path, rows), "train")
    assert (train.words, train.tags) == ([["German-French", "war"]], [["B-M", "O"]])
    assert has_all(train.notes[0], "1 entities that start or end inside a word widened")
    assert has_all(train.notes[1], "1 entities shortened or left out, because an earlier", "(line 1)")


def test_an_entity_that_loses_words_is_reported(tmp_path: Path) -> None:
    entities = [{"start": 0, "end": 6, "label": "M"}, {"start": 7, "end": 18, "label": "N"}]
    train = own(invalid_tags="count").read(
        write(tmp_path, [{"text": "German-French army won", "entities": entities}]), "train"
    )
    assert train.tags == [["B-M", "B-N", "O"]]
    assert has_all(train.notes[1], "1 entities shortened or left out", "(line 1)")


def test_rejected_rows_of_prodigy_are_left_out(tmp_path: Path) -> None:
    span = {"start": 0, "end": 3, "label": "PER"}
    rows = [
        {"text": "Ann left", "spans": [span], "answer": "accept"},
        {"text": "Bob left", "spans": [{**span, "label": "LOC"}], "answer": "reject"},
        {"text": "Cid left", "spans": [], "answer": "ignore"},
    ]
    train = own().read(write(tmp_path, rows), "train")
    assert (train.words, train.tags) == ([["Ann", "left"]], [["B-PER", "O"]])
    assert has_all(train.notes[0], "train.jsonl: 2 rejected or ignored rows left out (line 2, 3)")


def test_rows_of_another_form_are_told_both(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        own().read(write(tmp_path, [{"body": "Ann left", "entities": []}]), "train")
    assert has_all(str(caught.value), "line 1", "'words'", "'body'", "data.columns.words", "data.columns.text_a")


@pytest.mark.parametrize("mode", ["error", "skip"])
def test_rows_without_a_text_or_tags(tmp_path: Path, mode: str) -> None:
    good = marked("label")
    bad = [
        {"text": " ", "entities": []},
        {"text": None, "entities": []},
        {"text": "a"},
        {"text": "a", "entities": None},
    ]
    write(tmp_path, [good[0], *bad, *good[1:]])
    task = own(bad_rows=mode)
    if mode == "error":
        with pytest.raises(UserError) as caught:
            task.read(tmp_path, "train")
        assert has_all(str(caught.value), "line 2", "data.bad_rows skip", "4 lines", "2, 3, 4, 5")
        return
    train = task.read(tmp_path, "train")
    assert (train.words, train.tags) == (WORDS, TAGS)
    [note] = train.notes
    assert has_all(note, "train.jsonl", "4 rows", "line 2, 3, 4, 5")
    assert note.rows == 4


@pytest.mark.parametrize("name", ["tagging", "ner"])
def test_rows_of_words_cannot_be_skipped(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.conll").write_text("Ann B-PER\nleft O\n")
    with pytest.raises(UserError) as caught:
        own(name, bad_rows="skip").read(tmp_path, "train")
    assert has_all(str(caught.value), "data.bad_rows", "train.conll", ".jsonl")
    assert own(name).read(tmp_path, "train").words == [["Ann", "left"]]


def hub_set(names: list[str]) -> datasets.DatasetDict:
    """The columns of CoNLL-2003 and WNUT-17 on the hub."""
    features = {
        "id": datasets.Value("string"),
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=names)),
    }
    rows = {"id": ["0", "1", "2"], "tokens": WORDS, "ner_tags": [[names.index(tag) for tag in tags] for tags in TAGS]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    return datasets.DatasetDict({"train": table, "validation": table, "test": table})


@pytest.mark.parametrize("name", ["conll2003", "wnut17", "ner", "tagging"])
def test_data_sets_of_the_hub_are_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
    saved = hub_set(names)
    saved.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda source, config: saved)
    for place in (tmp_path / "saved", Path("hub:me/names")):
        task = own(name)
        assert task.splits(place) == ["train", "dev", "test"]
        task = task.fit(task.read(place, "train"))
        assert task.labels == tuple(names)
        for split in ("train", "dev", "test"):
            examples = task.read(place, split)
            assert (examples.words, examples.tags) == (WORDS, TAGS)


def test_words_are_inputs() -> None:
    task = TASKS["ner"].examples_from_inputs([["Ann", "left"], "Ann left"])
    assert task.words == [["Ann", "left"], ["Ann", "left"]]
    assert task.spans == [[(0, 3), (4, 8)]] * 2
