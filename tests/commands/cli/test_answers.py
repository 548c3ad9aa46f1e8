"""Files of new inputs: the columns of a run, one input per line, and errors for malformed inputs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from bert.commands.cli.answers import read_inputs
from bert.config import ColumnsConfig, TaskDataConfig
from bert.data.input_files import Input
from bert.errors import UserError
from bert.tasks import find_task
from bert.tasks.registry import published_task

TICKETS = TaskDataConfig(columns=ColumnsConfig(text_a="message", label="queue", id="ticket"))


def tickets(name: str = "classification", **data: Any) -> Any:
    return find_task(name).from_config(TaskDataConfig(columns=TICKETS.columns, **data))


def inputs(path: Path, content: str | bytes, task: Any = None) -> list[Input]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [entry for chunk in read_inputs(str(path), task or tickets()) for entry in chunk]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'ticket,queue,message\n7,x,"one, two"\n8,y,three\n'),
        ("a.csv", '\n\nticket,queue,message\n7,x,"one, two"\n8,y,three\n'),
        ("a.csv", "ticket;queue;message\n7;x;one, two\n8;y;three\n"),
        ("a.tsv", "ticket\tqueue\tmessage\n7\tx\tone, two\n8\ty\tthree\n\n"),
        ("a.jsonl", '{"ticket": "7", "message": "one, two", "n": 1}\n{"message": "three", "ticket": "8"}\n\n'),
        ("a.tsv", "ticket\tmessage\n7\tone, two\n8\tthree\n".encode("utf-16")),
        ("a.csv.gz", gzip.compress(b'\xef\xbb\xbfmessage,ticket\r\n"one, two",7\r\nthree,8\r\n', mtime=0)),
    ],
    ids=["comma", "empty lines first", "semicolon", "tab", "JSON lines", "UTF-16", "gzip"],
)
def test_tables_are_read_by_the_columns_of_the_run(name, content, tmp_path):
    inputs_read = inputs(tmp_path / name, content)
    assert [(entry.value, entry.id, entry.error) for entry in inputs_read] == [
        ("one, two", {"ticket": "7"}, None),
        ("three", {"ticket": "8"}, None),
    ]


def test_columns_of_the_tasks_of_the_toolkit(tmp_path):
    glue = "index\tsentence1\tsentence2\n3\ta\tb\n"
    [entry] = inputs(tmp_path / "a.tsv", glue, find_task("rte"))
    assert (entry.value, entry.id) == (("a", "b"), {"index": "3"})
    [entry] = inputs(tmp_path / "a.tsv", "g\t1\t\ta b\n", find_task("cola"))  # as its training file, without a header
    assert entry.value == "a b"
    line = '{"idx": 5, "sentence1": "a", "sentence2": "b"}\n'
    assert inputs(tmp_path / "a.jsonl", line, find_task("mrpc"))[0].value == ("a", "b")
    assert inputs(tmp_path / "a.csv", "id,question,context\n1,who,b\n", find_task("squad"))[0].value == ("who", "b")
    swag = "id,sent1,sent2,ending1,ending0\n1,a,,d,c\n"
    assert inputs(tmp_path / "a.csv", swag, find_task("swag"))[0].value == ("a", "c", "d")
    choices = [{"label": "A", "text": "b"}, {"label": "B", "text": "c"}]
    line = json.dumps({"id": "x", "question": {"stem": "a", "choices": choices}})
    [entry] = inputs(tmp_path / "a.jsonl", line, find_task("commonsenseqa"))
    assert (entry.value, entry.id) == (("a", "b", "c"), {"id": "x"})
    line = json.dumps({"question": "a", "choices": ["b", "c"]})
    assert inputs(tmp_path / "a.jsonl", line, find_task("swag"))[0].value == ("a", "b", "c")
    other = published_task("sequence_classification", "other", ("n", "p"), None)
    assert inputs(tmp_path / "a.csv", "text_b,text_a\nb,a\n", other)[0].value == ("a", "b")
    assert inputs(tmp_path / "a.csv", "text,label\nb,a\n", other)[0].value == "b"


def test_lines_of_a_published_model_whose_number_of_texts_is_known(tmp_path):
    single, pairs = (
        published_task("sequence_classification", "it", ("n", "p"), None, texts_per_input=n) for n in (1, 2)
    )
    assert inputs(tmp_path / "a.txt", "a\tb\n", single)[0].value == "a\tb"
    assert inputs(tmp_path / "a.txt", "a\tb\n", pairs)[0].value == ("a", "b")
    wrong = "1 column(s) where two are taken: write two texts with a tab between"
    assert inputs(tmp_path / "a.txt", "a\n", pairs)[0].error == wrong
    with pytest.raises(UserError, match="no 'text_a' among 'text'"):
        inputs(tmp_path / "a.csv", "text\na\n", pairs)
    assert pairs.input_columns == ("text_a", "text_b")


def test_names_of_the_configuration_stand_for_a_missing_header(tmp_path):
    task = tickets(column_names=["queue", "message"])
    assert [entry.value for entry in inputs(tmp_path / "a.csv", "x,one\ny,two\n", task)] == ["one", "two"]
    assert [entry.value for entry in inputs(tmp_path / "a.csv", "queue,message\ny,two\n", task)] == ["two"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.csv", "text,label\na,b\n", "line 1: no 'message' among 'text', 'label'"),
        ("a.tsv", "a b\nc d\n", "line 1: no 'message' among 'a b'"),
        ("a.csv", "message,message\na,b\n", "two columns have the name 'message'"),
        ("a.csv", "message\n", "holds no input"),
        ("a.csv", "", "holds no input"),
        ("a.jsonl", "\n\n", "holds no input"),
        ("a.json", "{}", "does not hold one"),
        ("a.csv.gz", "message\n", "damaged"),
        ("a.ndjson", "\n\n", "holds no input"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(name, content, error, tmp_path):
    with pytest.raises(UserError, match=error):
        inputs(tmp_path / name, content)


def test_ndjson_is_jsonl(tmp_path):
    assert [entry.value for entry in inputs(tmp_path / "a.ndjson", '{"message": "one"}\n')] == ["one"]


def test_a_bad_row_is_marked_and_the_others_are_read(tmp_path):
    rows = inputs(tmp_path / "a.csv", b'message,ticket\na,1\nb\n\n"x"y,2\n,3\n\xff,4\n"c\nd",5\n"open,6\n')
    assert [entry.value for entry in rows] == ["a", None, None, None, None, None, "c\nd", None]
    told = ("1 column, but the header has 2", "an empty line", "not CSV", "message is empty", "not UTF-8", "not CSV")
    for entry, error in zip([entry for entry in rows if entry.error], told, strict=True):
        assert entry.error.startswith(error)
    assert [entry.line for entry in rows] == [2, 3, 4, 5, 6, 7, 8, 10]
    assert rows[5].failed() == {"line": 7, "text": "\ufffd,4", "error": rows[5].error}
    assert rows[4].failed()["ticket"] == "3"

    deep = "[" * 100_000
    lines = [
        '{"message": "a"}',
        "",
        "{",
        "[1]",
        '{"message": 5}',
        '{"message": null}',
        '{"text": "a"}',
        deep,
        "9" * 5000,
    ]
    rows = inputs(tmp_path / "a.jsonl", "\n".join([*lines, '{"message": "b"}']))
    assert [entry.value for entry in rows] == ["a", *[None] * 8, "b"]
    assert [entry.line for entry in rows] == list(range(1, 11))


def test_a_text_file_has_one_input_a_line(tmp_path):
    rows = inputs(tmp_path / "a.txt", b'\xef\xbb\xbfa\r\n\n\xff b\nmessage,ticket\n{"message": "c"}')
    assert [entry.value for entry in rows] == ["a", None, None, "message,ticket", '{"message": "c"}']
    assert [entry.text for entry in rows[1:3]] == ["", "\ufffd b"]
    pairs = inputs(tmp_path / "a.txt", "a\tb\na\n", find_task("rte"))
    assert (pairs[0].value, pairs[1].value) == (("a", "b"), None)
    assert pairs[1].error.startswith("1 column(s), but this task needs 2")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"words": ["a", "b c"]}\n{"words": ["d"], "tags": ["O"]}\n'),
        ("a.tsv", "words\nx\ny\n\nd\n"),
        ("a.csv", "tags,words\nO,x\nO,y\n,\nO,d\n"),
        ("a.conll", "x NN\ny VB\n\nd NN\n"),
        ("a.txt", '{"words": ["a", "b"]}\n{d} is a text\n'),
    ],
)
def test_a_tagger_reads_words(name, content, tmp_path):
    entry = [one.value for one in inputs(tmp_path / name, content, find_task("tagging"))]
    assert [one.error for one in inputs(tmp_path / name, content, find_task("tagging"))] == [None, None]
    assert entry in ([["a", "b c"], ["d"]], [["x", "y"], ["d"]], [["a", "b"], "{d} is a text"])
    assert find_task("tagging").input_fields(["a"]) == {"words": ["a"]}


def test_a_tagger_still_reads_a_column_of_texts(tmp_path):
    inputs_read = inputs(tmp_path / "a.tsv", "id\ttext\n7\ta b\n", find_task("tagging"))
    assert [one.value for one in inputs_read] == ["a b"]


def test_words_that_are_no_list_are_an_error_of_their_line(tmp_path):
    inputs_read = inputs(tmp_path / "a.jsonl", '{"words": 3}\n{"words": []}\n', find_task("tagging"))
    assert ["words is 3" in inputs_read[0].error, "words is []" in inputs_read[1].error] == [True, True]


def test_parquet_is_read_like_other_tables(tmp_path):
    datasets.Dataset.from_dict({"ticket": ["7", "8"], "message": ["fine", " "]}).to_parquet(tmp_path / "a.parquet")
    [[good, bad]] = read_inputs(str(tmp_path / "a.parquet"), tickets())
    [same] = inputs(tmp_path / "a.jsonl", '{"ticket": "7", "message": "fine"}\n')
    assert (good.value, good.id) == (same.value, same.id) == ("fine", {"ticket": "7"})
    assert bad.error is not None
