"""Rerankers: files, rows, scores over each query's documents, and sentences on what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.config import ColumnsConfig, EmbeddingConfig, FinetuneConfig, RerankerConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.reranker import RankedExamples, RerankerTask
from bert.tasks.sequence_classification import Score
from bert.tokenizer.vocabulary import load_tokenizer
from tests.tiny_models import PIECES

COLUMNS = ColumnsConfig(text_a="query", text_b="document", label="score")
ROWS = [
    {"query": "a b", "positive": "c d e", "negatives": ["f", "g h"]},
    {"query": "b", "positive": "d", "negatives": "f"},
    {"query": "a b", "positive": "g h"},
]
GRADED = [
    {"query": "a", "document": "b", "score": 3},
    {"query": "c", "document": "d", "score": 0},
    {"query": "a", "document": "e", "score": 1},
    {"query": "a", "document": "f", "score": 0},
]


def own(score_range: list[float] | None = None, **settings: Any) -> RerankerTask:
    data = TaskDataConfig(columns=COLUMNS, score_range=score_range)
    return make_task(FinetuneConfig(task="reranker", data=data, reranker=RerankerConfig(**settings)))


def read(folder: Path, rows: list[dict[str, Any]], task: RerankerTask, split: str = "train") -> RankedExamples:
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return task.read(folder, split)


def test_rows_of_a_query_are_put_together(tmp_path: Path) -> None:
    """A document that is right on another row is no negative."""
    examples = read(tmp_path, ROWS, own())
    assert (examples.queries, examples.ids) == (["a b", "b"], ["0", "1"])
    assert examples.documents == [["c d e", "f", "g h"], ["d", "f"]]
    assert [own.tolist() for own in examples.known_relevance] == [[1, 0, 1], [1, 0]]
    assert examples.notes == (
        "1 documents have a lower relevance for the same query elsewhere: the highest one counts",
    )
    assert examples.take([1]).documents == [["d", "f"]]
    assert list(examples.sentences()) == ["a b", "b", "c d e", "f", "g h", "d", "f"]


def test_dev_and_test_are_scored_with_all_negatives(tmp_path: Path) -> None:
    for split, documents in (
        ("train", ["c d e", "f"]),
        ("dev", ["c d e", "f", "g h"]),
        ("test", ["c d e", "f", "g h"]),
    ):
        assert read(tmp_path, ROWS[:1], own(num_negatives=1), split).documents == [documents]


def test_tables_may_have_the_columns_of_rows_with_a_score() -> None:
    columns = ColumnsConfig(text_a="question", text_b="passage", label="grade")
    task = RerankerTask().from_config(TaskDataConfig(columns=columns))
    assert task.input_of_row({"question": "a", "passage": "b"}) == ("a", "b")


def test_a_row_of_the_model_is_a_query_with_all_documents(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    task = own([0, 3])
    examples = read(tmp_path, GRADED, task)
    assert [own.tolist() for own in examples.known_relevance] == [[1, pytest.approx(1 / 3), 0], [0]]
    rows = task.features(load_tokenizer(tmp_path / "vocab.txt"), examples, TaskDataConfig(max_length=8, buckets=[8]))
    batch = rows.batch(np.array([1, 0]), 8, 3)
    assert batch["input_ids"].shape == (3, 3, 8)
    assert batch["choice_mask"][:2].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert (batch["labels"].dtype, batch["labels"].shape) == (np.float32, (3, 3))
    np.testing.assert_allclose(batch["labels"][:2], [[0, 0, 0], [1, 1 / 3, 0]], rtol=1e-6)
    assert batch["weights"].tolist() == [1, 1, 0]
    unlabelled = read(tmp_path, [{"query": "a", "document": "b"}], task, "test")
    assert not unlabelled.labelled


def test_predictions_are_scored_and_written(tmp_path: Path) -> None:
    task = own()
    examples = read(tmp_path, ROWS, task, "dev")
    outputs = [np.array([0.5, 0.7, 0.2], np.float32), np.array([np.nan, -1, 9], np.float32)]
    predictions = task.predict(outputs, None, examples)
    assert [len(scores) for scores in predictions] == [3, 2]
    scores = task.score(predictions, examples)
    # The right ones of the first query come in the places 2 and 3.
    assert scores["mrr_at_10"] == pytest.approx((1 / 2 + 1) / 2)
    discounts = 1 / np.log2(np.arange(2, 5))
    assert scores["ndcg_at_10"] == pytest.approx((discounts[1:].sum() / discounts[:2].sum() + 1) / 2)
    chance = task.baseline_scores(examples)
    assert chance["mrr_at_10"] == pytest.approx(((2 / 3 + 1 / 3 / 2) + (1 + 1 / 2) / 2) / 2)
    assert not task.is_degenerate([np.array([3, 1, 2]), np.array([2, 1])], examples)
    assert task.is_degenerate([np.zeros(3), np.zeros(2)], examples)
    [path] = task.write_predictions(tmp_path / "out", "dev", predictions, examples)
    lines = path.read_text().splitlines()
    assert lines[:3] == ["index\tdocument\tscore\trelevance\trank", "0\t0\t0.500000\t1\t2", "0\t1\t0.700000\t0\t1"]
    inputs = task.examples_from_inputs([("a", "b")])
    assert task.format_predictions(task.predict([np.array([2.5])], None, inputs), inputs) == [Score(2.5)]


def test_queries_without_two_grades_are_left_out_where_documents_are_compared(tmp_path: Path) -> None:
    examples = read(tmp_path, GRADED, own([0, 3], loss="ordinal"))
    assert examples.queries == ["a"]
    assert examples.notes == ("1 training queries whose documents are equally relevant are left out",)
    assert len(read(tmp_path, GRADED, own([0, 3], loss="ordinal"), "dev")) == 2


PLAIN = {"query": "a", "positive": "b"}


@pytest.mark.parametrize(
    ("rows", "settings", "told"),
    [
        ([PLAIN], {}, r"train.jsonl are equally relevant"),
        ([PLAIN], {"loss": "listwise"}, "has no query"),
        ([ROWS[0], {"query": "c"}], {}, r"line 2: the query has no 'positive':.*score have 'document'"),
        ([{"query": "c"}], {}, "line 1: the query has no 'positive'"),
        (
            [*GRADED[:2], {"query": "a"}],
            {"score_range": [0, 3]},
            "line 3: no 'document' and 'score' among 'query': add them there, or set data.columns.text_b and",
        ),
        (GRADED, {}, r"line 1: score is '3'.*0 to 1.*data\.score_range"),
        ([{**GRADED[0], "score": 0}], {}, "has no relevant document"),
        (ROWS, {"num_negatives": 3}, r"reranker.num_negatives is 3.*has more than 2 negatives"),
    ],
)
def test_wrong_rows_are_one_sentence(tmp_path: Path, rows: list, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read(tmp_path, rows, own(**settings))
    assert "\n" not in str(caught.value)


def test_sections_are_for_their_task() -> None:
    with pytest.raises(UserError, match=r"reranker\.loss is listwise"):
        make_task(FinetuneConfig(task="embedding", reranker=RerankerConfig(loss="listwise")))
    with pytest.raises(UserError, match=r"embedding\.temperature is 1"):
        make_task(FinetuneConfig(task="reranker", embedding=EmbeddingConfig(temperature=1)))
