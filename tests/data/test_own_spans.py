"""Questions of one's own from JSONL, CSV and data sets: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from bert.config import ColumnsConfig, UserError
from bert.data.records import dataset_records, read_records
from bert.data.spans import Answer, Example
from bert.data.tasks.own_spans import read_questions
from bert.data.tasks.squad import Dataset

COLUMNS = ColumnsConfig(id="id")
ROW = {"id": "q1", "question": "Who?", "context": "It was Ann, and Ann alone.", "answer": "Ann", "answer_start": 16}
READ = Example("q1", ROW["question"], ROW["context"], (Answer("Ann", 16),))


def questions(folder: Path, *rows: dict[str, object], **settings: object) -> Dataset:
    columns = settings.pop("columns", COLUMNS)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_questions(read_records(folder / "train.jsonl"), columns, **settings)


def error_of(folder: Path, *rows: dict[str, object], **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        questions(folder, *rows, **settings)
    assert str(caught.value).startswith(f"{folder / 'train.jsonl'}, line {len(rows)}: ")
    return str(caught.value)


def test_jsonl_csv_and_data_sets_say_the_same(tmp_path: Path) -> None:
    assert questions(tmp_path, ROW).examples == [READ]
    cells = ",".join(f'"{value}"' for value in ROW.values())
    (tmp_path / "train.csv").write_text(f"{','.join(ROW)}\n{cells}\n")
    assert read_questions(read_records(tmp_path / "train.csv"), COLUMNS).examples == [READ]
    row = {name: [ROW[name]] for name in ("id", "question", "context")}
    table = datasets.Dataset.from_dict({**row, "answers": [{"text": ["Ann"], "answer_start": [16]}]})
    as_squad = ColumnsConfig(id="id", answer="answers.text", answer_start="answers.answer_start")
    assert read_questions(dataset_records("squad", {"train": table}, "train"), as_squad).examples == [READ]


def test_several_answers_none_and_places_that_are_looked_for(tmp_path: Path) -> None:
    several = {**ROW, "answer": ["Ann", "Ann alone"], "answer_start": [7, 16]}
    none = {**ROW, "id": "q2", "answer": "", "answer_start": None}
    first, second = questions(tmp_path, several, none).examples
    assert first.answers == (Answer("Ann", 7), Answer("Ann alone", 16))
    assert (second.answers, second.is_impossible, first.is_impossible) == ((), True, False)
    looked = ColumnsConfig(id="id", answer_start=None)
    assert questions(tmp_path, ROW, columns=looked).examples[0].answers == (Answer("Ann", 7),)
    message = error_of(tmp_path, {**ROW, "answer": "Bob"}, columns=looked)
    assert "the answer 'Bob' does not stand in its context" in message


def test_an_answer_elsewhere_is_counted_or_an_error_when_asked(tmp_path: Path) -> None:
    moved = {**ROW, "answer_start": 15}
    dataset = questions(tmp_path, moved)
    assert (dataset.misplaced, dataset.trainable) == (["q1"], [])
    assert "the answer 'Ann' does not stand at its place in its context" in error_of(tmp_path, moved, strict=True)


def test_a_split_to_predict_has_no_answers(tmp_path: Path) -> None:
    bare = {name: ROW[name] for name in ("question", "context")}
    [example] = questions(tmp_path, bare, columns=ColumnsConfig(), needed=False).examples
    assert example == Example("0", ROW["question"], ROW["context"], ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"question": " "}, "question is empty: write it or remove the line"),
        ({"answer_start": "x"}, "answer_start is 'x': it has to be a whole number"),
        ({"answer_start": None}, "answer_start is None: it has to be a whole number"),
        ({"answer": 3}, "answer is '3': it has to be a text, or empty"),
        (
            {"answer": ["Ann", "Ann"], "answer_start": [7]},
            "answer has 2 texts, answer_start is [7]: give one for each",
        ),
        ({"id": "q1"}, "id 'q1' stands on line 1 already"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    assert words in error_of(tmp_path, ROW, {**ROW, "id": "q2", **changed})
    missing = {name: value for name, value in ROW.items() if name != "answer_start"}
    assert "no 'answer_start' among" in error_of(tmp_path, ROW, {**missing, "id": "q2"})
