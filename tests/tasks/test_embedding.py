"""Queries with documents and pairs with scores: files, rows, predictions, and sentences on what is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.config import ColumnsConfig, EmbeddingConfig, FinetuneConfig, TaskDataConfig, TrainingConfig
from bert.data.text_groups import TextGroups
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.readers.text_pairs import TextExamples
from bert.tokenizer.wordpiece import load_tokenizer
from tests.tiny_models import PIECES

PAIRS = ColumnsConfig(text_a="text_a", text_b="text_b", label="score")
ROWS = [
    {"query": "a b", "positive": "c d e", "negatives": ["f", "g h"]},
    {"query": "b", "positive": "d", "negatives": "f"},
    {"query": "b", "positive": "c d e"},
]


def own(columns: ColumnsConfig | None = None, score_range: list[float] | None = None, **settings: Any) -> EmbeddingTask:
    data = TaskDataConfig(columns=columns or ColumnsConfig(), score_range=score_range)
    config = FinetuneConfig(task="embedding", data=data, embedding=EmbeddingConfig(**settings))
    config.embedding.check()
    return make_task(config)


def read(folder: Path, rows: list[dict[str, Any]], task: EmbeddingTask, split: str = "train") -> TextExamples:
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return task.read(folder, split)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    file.write_text("\n".join(PIECES) + "\n")
    return load_tokenizer(file)


def rows_of(task: EmbeddingTask, tokenizer: Any, examples: TextExamples) -> TextGroups:
    return task.features(tokenizer, examples, TaskDataConfig(max_length=16, buckets=[8]))


def test_rows_have_a_query_its_document_and_any_negatives(tmp_path: Path, tokenizer: Any) -> None:
    task = own()
    examples = read(tmp_path, ROWS, task)
    assert examples.negatives == [["f", "g h"], ["f"], []]
    assert list(examples.sentences()) == ["a b", "b", "b", "c d e", "d", "c d e", "f", "g h", "f"]
    rows = rows_of(task, tokenizer, examples)
    batch = rows.batch(np.array([0, 2]), 8, 3)
    assert {name: array.shape for name, array in batch.items() if name.endswith("ids")} == {
        "input_ids": (3, 8), "token_type_ids": (3, 8), "document_ids": (3, 3, 8)}  # fmt: skip
    assert batch["document_numbers"].tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]]
    assert batch["query_numbers"].tolist() == [0, 1, -1]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert rows.lengths.tolist() == [5, 3, 5]
    taken = rows_of(task, tokenizer, examples.take([2]))
    assert taken.batch(np.array([0]), 8, 1)["document_ids"].shape == (1, 1, 8)
    assert taken.digest() != rows.digest()


def test_queries_are_padded_to_the_longest_of_them(tmp_path: Path, tokenizer: Any) -> None:
    examples = read(tmp_path, [{"query": "a", "positive": "b " * 12}, {"query": "a b", "positive": "c"}], own())
    rows = rows_of(own(), tokenizer, examples)
    assert {length: rows.batch(np.array([1]), length, 1)["input_ids"].shape[1] for length in (4, 16)} == {4: 4, 16: 8}


def test_the_first_negatives_are_taken(tmp_path: Path) -> None:
    assert read(tmp_path, ROWS, own(num_negatives=1)).negatives == [["f"], ["f"], []]
    with pytest.raises(UserError, match=r"num_negatives is 3, and no row of .*train.jsonl has more than 2 negatives"):
        read(tmp_path, ROWS, own(num_negatives=3))
    assert read(tmp_path, ROWS, own(num_negatives=3), "dev").negatives[1] == ["f"]


def test_prompts_come_before_queries_and_documents(tmp_path: Path, tokenizer: Any) -> None:
    examples = read(tmp_path, ROWS, own())
    found = rows_of(own(query_prompt="x ", document_prompt="y "), tokenizer, examples)
    written = [
        {"query": f"x {row['query']}", "positive": f"y {row['positive']}", "negatives": [f"y {n}" for n in negatives]}
        for row, negatives in zip(ROWS, examples.negatives, strict=True)
    ]
    assert found.digest() == rows_of(own(), tokenizer, read(tmp_path, written, own())).digest()


def test_tables_have_one_negative_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("query,positive,negatives\na,b,c\nd,e,\n")
    examples = own().read(tmp_path, "train")
    assert (examples.queries, examples.negatives) == (["a", "d"], [["c"], []])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"query": "a"},
            r"line 2: the query has no 'positive': write the document that answers it, or remove the line",
        ),
        ({"query": "a", "positive": None}, "line 2: the query has no 'positive'"),
        ({"query": "a", "positive": " "}, "line 2: positive is empty: write it or remove the line"),
        ({"query": "", "positive": "b"}, "line 2: query is empty"),
        ({"positive": "b"}, r"line 2: no 'query' among 'positive': set data\.columns\.query"),
        ({"query": "a", "positive": "b", "negatives": ["c", ""]}, "line 2: negatives has '', which is no text"),
        ({"query": "a", "positive": "b", "negatives": 3}, "line 2: negatives has 3, which is no text"),
        ({"query": "a", "positive": "b", "negatives": ["b"]}, r"line 2: negatives has the positive itself \('b'\)"),
    ],
)
def test_wrong_rows_are_one_sentence(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read(tmp_path, [ROWS[0], row], own())
    assert "\n" not in str(caught.value)


def test_pairs_have_scores_in_their_range(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text_a": "a b", "text_b": "c", "score": 1}, {"text_a": "d", "text_b": "e f", "score": "3.5"}]
    examples = read(tmp_path, rows, own(PAIRS, loss="cosent"))
    assert examples.known_scores.tolist() == [1, 3.5]
    scaled = own(PAIRS, [0, 5], loss="cosine")
    assert rows_of(scaled, tokenizer, read(tmp_path, rows, scaled)).labels.tolist() == pytest.approx([0.2, 0.7])
    with pytest.raises(
        UserError, match=r"line 2: score is '3.5': it must be from 0 to 1: fix it, or set data\.score_r"
    ):
        read(tmp_path, rows, own(PAIRS, loss="cosine"))
    with pytest.raises(UserError, match=r"line 2: score is '3.5': it must be from 0 to 3"):
        read(tmp_path, rows, own(PAIRS, [0, 3], loss="cosent"))
    with pytest.raises(UserError, match=r"line 1: score is 'x': it must be a number"):
        read(tmp_path, [{**rows[0], "score": "x"}], own(PAIRS, loss="cosent"))
    with pytest.raises(UserError, match=r"line 1: score is 'nan': it must be finite"):
        read(tmp_path, [{**rows[0], "score": "nan"}], own(PAIRS, loss="cosent"))
    unlabelled = read(tmp_path, [{"text_a": "a", "text_b": "b"}], own(PAIRS, loss="cosent"), "test")
    assert not unlabelled.labelled and unlabelled.scores is None
    with pytest.raises(UserError, match=r"data\.columns\.text_b is not set"):
        read(tmp_path, rows, own(loss="cosent"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"training": TrainingConfig(tokens_per_batch=512)},
            "would depend on the lengths of texts: set training.batch",
        ),
        ({"num_feature_layers": 2}, "num_feature_layers is 2, but embedding has no head over a frozen encoder"),
        ({"classifier_dropout": 0.5}, "classifier_dropout is 0.5, but embedding has no classifier: remove it"),
        ({"data": TaskDataConfig(score_range=[0, 1])}, r"data\.score_range is set, but embedding\.loss is in_batch"),
        (
            {"data": TaskDataConfig(metrics=["f1"])},
            r"data\.metrics is set, but it is for .*, and the task is embedding",
        ),
        (
            {"task": "regression", "embedding": EmbeddingConfig(temperature=1)},
            r"embedding\.temperature is 1, but it is",
        ),
    ],
)
def test_settings_that_are_not_read_are_one_sentence(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make_task(dataclasses.replace(FinetuneConfig(task="embedding"), **change))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "cosent", "num_negatives": 2}, "num_negatives is set, but embedding.loss is cosent"),
        ({"matryoshka": [4, 4]}, r"matryoshka is \[4, 4\]: list each width once"),
        ({"matryoshka": []}, r"matryoshka is \[\]: list each width once"),
        ({"loss": "triplet"}, "embedding.loss is 'triplet': use one of in_batch, cosent, cosine"),
        ({"temperature": 0.0}, "embedding.temperature is 0.0: it must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        EmbeddingConfig(**settings).check()
    with pytest.raises(UserError, match="matryoshka has 16, but embeddings have 16 numbers"):
        EmbeddingConfig(matryoshka=[8, 16]).check_width(16)


def test_predictions_of_a_search_are_ranks(tmp_path: Path, tokenizer: Any) -> None:
    """The first row finds the document of the second one first; the third shares its query and the first's document."""
    task = own()
    examples = read(tmp_path, ROWS, task)
    texts = np.zeros((3, 4, 2), np.float32)
    texts[:, 0] = [[0, 2], [1, 0.2], [1, 0.2]]
    texts[:, 1] = [[1, 0.1], [0.1, 1], [1, 0.1]]
    found = task.predict(list(texts.reshape(3, -1)), rows_of(task, tokenizer, examples), examples)
    assert found.ranks.tolist() == [2, 1, 1]
    assert found.first.tolist() == [1, 0, 0]
    scores = task.score(found, examples)
    assert scores["mrr_at_10"] == pytest.approx((1 / 2 + 1) / 2)
    assert scores["recall_at_10"] == 1
    baseline = task.baseline_scores(examples)
    assert baseline["mrr_at_10"] == pytest.approx((0.75 + 1) / 2)
    [file] = task.write_predictions(tmp_path, "dev", found, examples)
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert [row[2:] for row in lines] == [["rank", "first"], ["2", "1"], ["1", "0"], ["1", "0"]]
    [errors] = task.write_details(tmp_path, "dev", found, examples)
    assert errors.read_text().splitlines()[1:] == ["a b\tc d e\td\t2"]
    same = np.ones((3, 8), np.float32)
    assert task.is_degenerate(task.predict(list(same), rows_of(task, tokenizer, examples), examples), examples)
    assert not task.is_degenerate(found._replace(ranks=np.array([1, 1, 1])), examples)


def test_predictions_of_pairs_are_cosines(tmp_path: Path, tokenizer: Any) -> None:
    task = own(PAIRS, loss="cosent")
    examples = read(tmp_path, [{"text_a": "a", "text_b": "b", "score": score} for score in (0, 1, 2)], task)
    texts = np.array([[[1, 0], [0, 3]], [[1, 0], [2, 1]], [[1, 0], [4, 0]]], np.float32)
    found = task.predict(list(texts.reshape(3, -1)), rows_of(task, tokenizer, examples), examples)
    assert found.cosines.tolist() == pytest.approx([0, 2 / 5**0.5, 1])
    assert task.score(found, examples)["spearman"] == 1
    assert task.main_metric == "spearman"
    [file] = task.write_predictions(tmp_path, "dev", found, examples)
    assert file.read_text().splitlines()[:2] == ["index\tcosine\tscore", "0\t0.000000\t0"]
    assert task.write_details(tmp_path, "dev", found, examples) == []


def test_texts_are_lower_cased_if_the_model_declares_it(tmp_path: Path, tokenizer: Any) -> None:
    task = own(lowercase=True)
    examples = read(tmp_path, [{"query": "A", "positive": "B", "negatives": ["C"]}], task)
    batch = rows_of(task, tokenizer, examples).batch(np.array([0]), 8, 1)
    letters = [PIECES[ids[1]] for ids in (batch["input_ids"][0], *batch["document_ids"][0])]
    assert letters == ["a", "b", "c"]
