"""Rows without a text or a label: an error that counts them, or a warning, in every kind of task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bert.config import ColumnsConfig, EmbeddingConfig, FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.base import Task
from tests.messages import has_all


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SWAG = "sent1,sent2,ending0,ending1,label\na,b,c,d,0\n,b,c,d,1\na,b,c,d,\na,b,c,d,1\n"
ONE, TWO = {"text": "a", "label": "x"}, {"text": "b", "label": "y"}
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any], list[int]]] = {
    "csv": ("classification", {"train.csv": "text,label\na,x\n,x\nb,\nb,y\n"}, {}, [3, 4]),
    "jsonl": (
        "classification",
        {"train.jsonl": lines(ONE, {"text": None, "label": "x"}, {"text": "a"}, {"label": "y"}, TWO)},
        {},
        [2, 3, 4],
    ),
    "regression": ("regression", {"train.csv": "text,label\na,1\n,2\nb,\nb,2\n"}, {}, [3, 4]),
    "multilabel": ("multilabel", {"train.csv": "text,label\na,x\n ,x\nb,y\nc,\n"}, {}, [3]),
    "columns of labels": (
        "multilabel",
        {"train.csv": "text,x,y\na,1,0\n,0,1\nb,,1\nb,0,1\n"},
        {"labels": ["x", "y"]},
        [3, 4],
    ),
    "glue": ("sst2", {"train.tsv": "sentence\tlabel\na\t1\n\t0\nb\t0\n"}, {}, [3]),
    "choices": ("swag", {"train.csv": SWAG}, {}, [3, 4]),
    "parallel": (
        "translation",
        {"train.de": "rot\n\nblau\nneu\n", "train.en": "red\ngreen\nblue\n \n"},
        {"source": "de", "target": "en"},
        [2, 4],
    ),
    "summaries": (
        "translation",
        {"train.jsonl": lines({"source": "a", "target": "b"}, {"source": "a", "target": ""}, {"target": "b"})},
        {},
        [2, 3],
    ),
    "queries": (
        "embedding",
        {"train.jsonl": lines({"query": "a", "positive": "b"}, {"query": "a"}, {"query": " ", "positive": "b"})},
        {},
        [2, 3],
    ),
    "reranker": (
        "reranker",
        {"train.jsonl": lines({"query": "a", "positive": "b", "negatives": ["c"]}, {"query": "a", "positive": None})},
        {},
        [2],
    ),
}


def task_of(name: str, mode: str, data: dict[str, Any]) -> Task:
    config = TaskDataConfig(dir=".", bad_rows=mode, **data)
    return make_task(FinetuneConfig(task=name, data=config, embedding=EmbeddingConfig()))


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_are_an_error_that_counts_them_or_left_out(tmp_path: Path, case: str) -> None:
    name, files, data, bad = CASES[case]
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(UserError) as caught:
        task_of(name, "error", data).read(tmp_path, "train")
    message = str(caught.value)
    assert f"line {bad[0]}" in message
    if len(bad) > 1 and case not in ("columns of labels", "queries"):
        assert has_all(message, f"{len(bad)} lines", ", ".join(map(str, bad))), message
    train = task_of(name, "skip", data).read(tmp_path, "train")
    [note] = train.notes
    assert has_all(note, "train.", f"{len(bad)} row", f"line {', '.join(map(str, bad))}")
    assert note.rows == len(bad)
    rows = next(iter(files.values())).count("\n") - (0 if any(map(_has_no_header, files)) else 1)
    assert len(train) == rows - len(bad)


def _has_no_header(file: str) -> bool:
    return not file.endswith(("csv", "tsv"))


def test_a_file_without_good_rows_or_without_the_column_is_an_error(tmp_path: Path) -> None:
    task = task_of("classification", "skip", {})
    (tmp_path / "train.jsonl").write_text(lines({"text": "a"}, {"text": "b"}))
    with pytest.raises(UserError) as caught:
        task.read(tmp_path, "train")
    assert has_all(str(caught.value), "train.jsonl", "'text'", "'label'")
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.csv").write_text("text,tag\na,x\n")
    with pytest.raises(UserError) as caught:
        task.read(tmp_path, "train")
    assert has_all(str(caught.value), "train.csv, line 1", "'label'", "data.columns.label")


def test_a_test_file_may_have_no_labels(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "test.csv").write_text("text\na\n\nb\n")
    task = task_of("classification", "skip", {"columns": ColumnsConfig()})
    task = task.fit(task.read(tmp_path, "train"))
    assert task.skips_bad_rows
    test = task.read(tmp_path, "test")
    assert (len(test), test.labelled) == (2, False)


def test_results_count_the_rows_of_each_split_once(tmp_path: Path) -> None:
    from bert.training.finetuning.evaluation import Split
    from bert.training.finetuning.results import _skipped_rows

    (tmp_path / "train.csv").write_text("text,label\na,x\n,x\nb,y\nc,\nd,x\n")
    (tmp_path / "test.csv").write_text("text,label\na,x\n,x\n")
    task = task_of("classification", "skip", {})
    train = task.read(tmp_path, "train")
    task = task.fit(train)
    examples = {"train": train.take([0, 1]), "dev": train.take([2]), "test": task.read(tmp_path, "test")}
    assert _skipped_rows({name: Split(rows, None) for name, rows in examples.items()}) == {"train": 2, "test": 1}
