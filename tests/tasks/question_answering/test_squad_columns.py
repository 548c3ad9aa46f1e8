"""Custom questions from JSONL, CSV and data sets: accepted and rejected files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import datasets
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.data.records import dataset_records, read_records
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.question_answering import Answer, Dataset, Example, read, read_questions
from tests.messages import has_all

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
    assert "answer 'Bob' does not stand" in message


def test_null_answers_and_impossible_questions(tmp_path: Path) -> None:
    """Compares rows with data sets on the hub and with files of SQuAD."""
    fields = {name: ROW[name] for name in ("question", "context")}
    one = {**fields, "id": "q1", "answers": {"text": ["Ann"], "answer_start": [16]}}
    none = {**fields, "id": "q2", "answers": None}
    for rows in ((one, none), (none, one)):
        by_id = {example.id: example for example in questions(tmp_path, *rows).examples}
        assert (by_id["q1"], by_id["q2"].answers, by_id["q2"].is_impossible) == (READ, (), True)
    assert questions(tmp_path, {**none, "is_impossible": True}, one).examples[0].is_impossible
    article = {"paragraphs": [{"context": ROW["context"], "qas": [{**one, "is_impossible": True}]}]}
    for row in ({**one, "is_impossible": True}, {**ROW, "is_impossible": True}, article):
        assert "is_impossible is true, but there is an answer: remove the answer" in error_of(tmp_path, row)
    header = "question,context,answer,answer_start,is_impossible\n"
    (tmp_path / "train.csv").write_text(f"{header}Who?,Ann left,Ann,0,True\n")
    with pytest.raises(UserError, match="line 2: is_impossible is true"):
        read_questions(read_records(tmp_path / "train.csv"), ColumnsConfig())


def test_an_answer_elsewhere_is_counted_or_an_error_when_asked(tmp_path: Path) -> None:
    moved = {**ROW, "answer_start": 15}
    dataset = questions(tmp_path, moved)
    assert (dataset.misplaced, dataset.trainable) == (["q1"], [])
    assert "answer 'Ann' does not stand" in error_of(tmp_path, moved, strict=True)


def test_a_split_is_labelled_if_any_of_its_rows_has_an_answer(tmp_path: Path) -> None:
    """The first one may be a question that its context does not answer."""
    none = {**ROW, "id": "q0", "answer": "", "answer_start": None}
    result = questions(tmp_path, none, ROW, needed=False).examples
    assert [(example.is_impossible, example.answers) for example in result] == [(True, ()), (False, READ.answers)]
    rows = "".join(
        ",".join(f'"{"" if value is None else value}"' for value in row.values()) + "\n" for row in (none, ROW)
    )
    (tmp_path / "test.csv").write_text(f"{','.join(ROW)}\n{rows}")
    assert read_questions(read_records(tmp_path / "test.csv"), COLUMNS, needed=False).examples == result
    [example] = questions(tmp_path, none, needed=False).examples
    assert not example.is_impossible


def test_a_split_to_predict_has_no_answers(tmp_path: Path) -> None:
    bare = {name: ROW[name] for name in ("question", "context")}
    [example] = questions(tmp_path, bare, columns=ColumnsConfig(), needed=False).examples
    assert example == Example("0", ROW["question"], ROW["context"], ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"question": " "}, "question is empty"),
        ({"answer_start": "x"}, "answer_start is 'x'"),
        ({"answer_start": float("inf")}, "answer_start is inf"),
        ({"answer_start": 2.7}, "answer_start is 2.7"),
        ({"answer_start": None}, "answer_start is None"),
        ({"answer": 3}, "answer is '3'"),
        (
            {"answer": ["Ann", "Ann"], "answer_start": [7]},
            "answer has 2 texts, answer_start is [7]",
        ),
        ({"id": "q1"}, "id 'q1' is on line 1 already"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    assert words in error_of(tmp_path, ROW, {**ROW, "id": "q2", **changed})
    missing = {name: value for name, value in ROW.items() if name != "answer_start"}
    assert "no 'answer_start' among" in error_of(tmp_path, ROW, {**missing, "id": "q2"})


def test_a_question_without_an_answer_in_train_makes_it_like_squad2(tmp_path: Path) -> None:
    none = {**ROW, "id": "q2", "answer": None, "answer_start": None}
    (tmp_path / "dev.jsonl").write_text(json.dumps(none) + "\n")
    task = make_task(FinetuneConfig(task="span", data=TaskDataConfig(dir=str(tmp_path), columns=COLUMNS)))
    questions(tmp_path, ROW)
    plain = task.fit(task.read(tmp_path, "train"))
    assert (plain.main_metric, plain.baseline) == ("f1", "")
    with pytest.raises(UserError, match=r"dev\.jsonl, line 1: no answer"):
        plain.read(tmp_path, "dev")
    questions(tmp_path, ROW, none)
    fitted = task.fit(task.read(tmp_path, "train"))
    assert (fitted.main_metric, fitted.baseline) == ("best_f1", "no_answer")
    assert fitted.read(tmp_path, "dev").labelled
    result = dataclasses.replace(fitted, null_score_diff_threshold=-0.5).to_config(
        TaskDataConfig(dir="x", columns=COLUMNS)
    )
    assert make_task(FinetuneConfig(task="span", data=result)).may_be_impossible


def test_misplaced_answers_are_skipped_in_train_and_told(tmp_path: Path) -> None:
    questions(tmp_path, {**ROW, "answer_start": 2}, {**ROW, "id": "q2"})
    task = make_task(FinetuneConfig(task="span", data=TaskDataConfig(dir=str(tmp_path), columns=COLUMNS)))
    train = task.read(tmp_path, "train")
    assert [example.id for example in train.examples] == ["q2"]
    assert has_all(train.notes[0], "1 question(s)", "(id q1)")


ARTICLES = [
    {
        "title": "Ann",
        "paragraphs": [
            {
                "context": ROW["context"],
                "qas": [
                    {"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 16}]},
                    {"id": "q2", "question": "Who is it?", "answers": [{"text": "Ann", "answer_start": 7}]},
                ],
            },
            {"context": "Bob.", "qas": [{"id": "q3", "question": "Who?", "answers": [], "is_impossible": True}]},
        ],
    }
]
FLAT = [
    {"id": "q1", "question": "Who?", "context": ROW["context"], "answers": {"text": ["Ann"], "answer_start": [16]}},
    {
        "id": "q2",
        "question": "Who is it?",
        "context": ROW["context"],
        "answers": {"text": ["Ann"], "answer_start": [7]},
    },
    {"id": "q3", "question": "Who?", "context": "Bob.", "answers": {"text": [], "answer_start": []}},
]  # fmt: skip
LISTED = [
    {
        **row,
        "answers": [
            {"text": text, "answer_start": start} for text, start in zip(*row["answers"].values(), strict=True)
        ],
    }
    for row in FLAT
]
IN_COLUMNS = [
    {**{name: row[name] for name in ("id", "question", "context")}, "answer": row["answers"]["text"],
     "answer_start": row["answers"]["answer_start"]}
    for row in FLAT
]  # fmt: skip
FORMS = {"articles": ARTICLES, "flat": FLAT, "lists": LISTED, "columns": IN_COLUMNS}


def span_task(name: str = "span", **data: object):
    columns = COLUMNS if name == "span" else ColumnsConfig()
    return make_task(FinetuneConfig(task=name, data=TaskDataConfig(dir=".", columns=columns, **data)))


def write_form(folder: Path, form: str, file: str) -> None:
    rows = FORMS[form]
    if file.endswith(".json"):
        (folder / file).write_text(json.dumps({"version": "v2.0", "data": rows}))
    elif file.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(folder / file)
    else:
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


CASES = [("articles", "train.json"), *((form, "train.jsonl") for form in FORMS)]
CASES += [(form, "train.parquet") for form in FORMS]


@pytest.mark.parametrize(("form", "file"), CASES)
@pytest.mark.parametrize("name", ["span", "squad2"])
def test_every_form_of_squad_has_the_same_questions(tmp_path: Path, name: str, form: str, file: str) -> None:
    if name == "squad2" and form == "columns":
        return  # the columns of another task
    write_form(tmp_path, "articles", "reference.json")
    expected = read(tmp_path / "reference.json").examples
    write_form(tmp_path, form, file)
    task = span_task(name)
    dataset = task.read(tmp_path, "train")
    assert dataset.examples == expected
    assert task.fit(dataset).may_be_impossible
    assert "train" in task.splits(tmp_path)


@pytest.mark.parametrize("rows", [{"data": ARTICLES}, ARTICLES, FLAT, LISTED, IN_COLUMNS])
def test_questions_in_memory_have_the_forms_of_files(rows: object) -> None:
    task = dataclasses.replace(span_task(), may_be_impossible=True)
    examples = task.labelled_examples(rows).examples
    assert [(example.question, example.answers) for example in examples] == [
        ("Who?", (Answer("Ann", 16),)),
        ("Who is it?", (Answer("Ann", 7),)),
        ("Who?", ()),
    ]


@pytest.mark.parametrize("mode", ["error", "skip"])
@pytest.mark.parametrize("file", ["train.json", "train.jsonl"])
def test_questions_without_a_text(tmp_path: Path, mode: str, file: str) -> None:
    empty = [{"id": id, "question": " ", "answers": []} for id in ("e1", "e2")]
    paragraphs = [{"context": "Bob.", "qas": empty}, *ARTICLES[0]["paragraphs"]]
    articles = [{"title": "", "paragraphs": paragraphs}]
    content = json.dumps({"data": articles}) if file == "train.json" else json.dumps(articles[0])
    (tmp_path / file).write_text(content + "\n")
    task = span_task(bad_rows=mode)
    if mode == "skip":
        dataset = task.read(tmp_path, "train")
        assert [example.question for example in dataset.examples] == ["Who?", "Who is it?", "Who?"]
        assert dataset.notes[0].rows == 2
        return
    with pytest.raises(UserError) as caught:
        task.read(tmp_path, "train")
    assert has_all(str(caught.value), file, "empty", "data.bad_rows skip")
