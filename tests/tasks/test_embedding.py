"""Queries with documents and pairs with scores: files, rows, predictions, and sentences on what is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.config import ColumnsConfig, EmbeddingConfig, FinetuneConfig, TaskDataConfig, TrainingConfig
from bert.config.options import TEACHER_LOSSES
from bert.config.run_file import DERIVED_KEYS
from bert.data.rows import QueryDocumentRows
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.text_pairs import TextExamples
from bert.tokenizer.vocabulary import load_tokenizer
from bert.training.finetuning.embedding_defaults import POOLING_KEYS
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


def rows_of(task: EmbeddingTask, tokenizer: Any, examples: TextExamples) -> QueryDocumentRows:
    return task.features(tokenizer, examples, TaskDataConfig(max_length=16, buckets=[8]))


def test_rows_have_a_query_its_document_and_any_negatives(tmp_path: Path, tokenizer: Any) -> None:
    task = own()
    examples = read(tmp_path, ROWS, task)
    assert examples.negatives == [["f", "g h"], ["f"], []]
    assert list(examples.sentences()) == ["a b", "b", "b", "c d e", "d", "c d e", "f", "g h", "f"]
    rows = rows_of(task, tokenizer, examples)
    batch = rows.batch(np.array([0, 2]), 8, 3)
    assert {name: array.shape for name, array in batch.items() if name.endswith("ids")} == {
        "input_ids": (3, 4, 8), "token_type_ids": (3, 4, 8)}  # fmt: skip
    assert batch["document_numbers"].tolist() == [[0, 1, 2], [0, -1, -1], [-1, -1, -1]]
    assert batch["query_numbers"].tolist() == [0, 1, -1]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert rows.lengths.tolist() == [5, 3, 5]
    taken = rows_of(task, tokenizer, examples.take([2]))
    assert taken.batch(np.array([0]), 8, 1)["input_ids"].shape == (1, 2, 8)
    assert taken.digest() != rows.digest()


def test_the_first_negatives_are_taken(tmp_path: Path) -> None:
    assert read(tmp_path, ROWS, own(num_negatives=1)).negatives == [["f"], ["f"], []]
    with pytest.raises(UserError, match=r"num_negatives is 3.*train.jsonl has more than 2 negatives"):
        read(tmp_path, ROWS, own(num_negatives=3))
    assert read(tmp_path, ROWS, own(num_negatives=3), "dev").negatives[1] == ["f"]


@pytest.mark.parametrize("loss", TEACHER_LOSSES)
def test_a_teachers_scores_are_those_of_the_documents(loss: str, tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**ROWS[0], "score": [3, 2.5, -1]}, {**ROWS[1], "score": [4, 0]}]
    task = own(PAIRS, loss=loss)
    examples = read(tmp_path, rows, task)
    assert examples.known_scores.tolist() == [[3, 2.5, -1], [4, 0, 0]]
    result = rows_of(task, tokenizer, examples.take([1]))
    assert result.batch(np.array([0]), 8, 2)["labels"].tolist() == [[4, 0], [0, 0]]
    first = read(tmp_path, rows, own(PAIRS, loss=loss, num_negatives=1))
    assert (first.negatives, first.known_scores.tolist()) == ([["f"], ["f"]], [[3, 2.5], [4, 0]])
    assert rows_of(task, tokenizer, read(tmp_path, ROWS[:2], task, "test")).labels is None
    for scores in (3, [3, 2], [3, 2, "1"], [3, 2, float("nan")], None):
        with pytest.raises(UserError, match=r"line 1: score is.*3 numbers"):
            read(tmp_path, [{**rows[0], "score": scores}], task)


def test_a_row_is_compared_with_its_own_negatives(tmp_path: Path) -> None:
    examples = read(tmp_path, ROWS, own(loss="triplet"))
    assert (len(examples), examples.notes) == (2, ("1 training rows without negatives are left out",))
    assert len(read(tmp_path, ROWS, own(loss="triplet"), "dev")) == 3
    with pytest.raises(UserError, match=r"has negatives, and embedding\.loss"):
        read(tmp_path, ROWS[2:], own(loss="triplet"))


def test_a_text_to_predict_is_a_query(tokenizer: Any) -> None:
    task = own(query_prompt="q ", document_prompt="d d ")
    rows = task.features(tokenizer, task.examples_from_inputs(["a", "b"]), TaskDataConfig(max_length=16))
    assert rows.lengths.tolist() == [4, 4], "[CLS] q a [SEP]"


TEXTS = [
    {"text": "a b", "label": "x"},
    {"text": "c", "label": 1},
    {"text": "d", "label": "x"},
    {"text": "e", "label": 1},
]


def test_texts_with_labels_are_scored_by_the_nearest_other_one(tmp_path: Path, tokenizer: Any) -> None:
    task = own(ColumnsConfig(label="label"), loss="same_label", query_prompt="q ")
    examples = read(tmp_path, TEXTS, task)
    rows = task.features(tokenizer, examples, TaskDataConfig(max_length=16, buckets=[8]))
    assert rows.labels.tolist() == [[0, 0], [1, 1], [0, 2], [1, 3]]
    assert rows.lengths.tolist() == [5, 4, 4, 4], "with the prompt"
    outputs = np.array([[1, 0], [1, 0.5], [1, 0.1], [0, 1]], np.float32)
    assert task.score(task.predict(outputs, rows, examples), examples) == {"accuracy": 0.75}
    assert task.baseline_scores(examples) == {"accuracy": pytest.approx(1 / 3)}
    assert task.main_metric == "accuracy" and not task.is_degenerate(outputs, examples)
    [path] = task.write_predictions(tmp_path / "out", "dev", outputs, examples)
    assert path.read_text().splitlines()[:2] == ["index\tcosine\tfirst", "0\t0.995037\t2"]
    unlabelled = read(tmp_path, [{"text": "a"}, {"text": "b"}], task, "test")
    assert not unlabelled.labelled and task.table_columns == (("text",), ("text",))
    alone = task.examples_from_inputs(["a"])
    for rest in (
        task.features(tokenizer, unlabelled, TaskDataConfig(max_length=16)),
        task.features(tokenizer, task.examples_from_inputs(["a", "b"]), TaskDataConfig(max_length=16)),
    ):
        assert rest.lengths.tolist() == [4, 4], "with the prompt, as dev"
    assert len(task.format_predictions(task.predict(outputs[:1], None, alone), alone)) == 1
    single = dataclasses.replace(examples, queries=examples.queries[:1], scores=examples.scores[:1])
    assert task.score(outputs[:1], single) == {"accuracy": 0.0}, "its nearest other text would be itself"
    single = dataclasses.replace(single, ids=["0"])
    [path] = task.write_predictions(tmp_path / "single", "dev", outputs[:1], single)
    assert path.read_text().splitlines()[1] == "0\t0.000000\t0"
    padded = read(tmp_path, [TEXTS[0], {"text": "b", "label": f" {TEXTS[0]['label']} "}, *TEXTS[2:]], task)
    assert padded.scores[0] == padded.scores[1], "blanks around labels do not count"
    with pytest.raises(UserError, match="all rows have the same label"):
        read(tmp_path, TEXTS[::2], task)
    with pytest.raises(UserError, match="no two rows have the same label"):
        read(tmp_path, TEXTS[:2], task)


def test_prompts_come_before_queries_and_documents(tmp_path: Path, tokenizer: Any) -> None:
    examples = read(tmp_path, ROWS, own())
    rows = rows_of(own(query_prompt="x ", document_prompt="y "), tokenizer, examples)
    written = [
        {"query": f"x {row['query']}", "positive": f"y {row['positive']}", "negatives": [f"y {n}" for n in negatives]}
        for row, negatives in zip(ROWS, examples.negatives, strict=True)
    ]
    assert rows.digest() == rows_of(own(), tokenizer, read(tmp_path, written, own())).digest()


def test_tables_have_one_negative_in_a_cell(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("query,positive,negatives\na,b,c\nd,e,\n")
    examples = own().read(tmp_path, "train")
    assert (examples.queries, examples.negatives) == (["a", "d"], [["c"], []])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"query": "a"},
            "line 2: the query has no 'positive'",
        ),
        ({"query": "a", "positive": None}, "line 2: the query has no 'positive'"),
        ({"query": "a", "positive": " "}, "line 2: positive is empty"),
        ({"query": "", "positive": "b"}, "line 2: query is empty"),
        ({"positive": "b"}, r"line 2: no 'query' among 'positive': add it there, or set data\.columns\.query"),
        ({"query": "a", "positive": "b", "negatives": ["c", ""]}, "line 2: negatives has ''"),
        ({"query": "a", "positive": "b", "negatives": 3}, "line 2: negatives has 3"),
        ({"query": "a", "positive": "b", "negatives": ["b"]}, r"line 2: negatives has the positive itself \('b'\)"),
    ],
)
def test_wrong_rows_are_one_sentence(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read(tmp_path, [ROWS[0], row], own())
    assert "\n" not in str(caught.value)


def test_rows_of_the_other_kind_of_losses_are_told(tmp_path: Path) -> None:
    columns = ColumnsConfig(text_a="text_a", text_b="text_b", label="score")
    with pytest.raises(UserError, match=r"line 1: a pair.*embedding\.loss in_batch"):
        read(tmp_path, [{"text_a": "a", "text_b": "b", "score": 1}], own(columns))
    with pytest.raises(UserError, match=r"line 1: a query.*embedding\.loss cosent .* to in_batch"):
        read(tmp_path, [{"query": "a", "positive": "b"}], own(columns, loss="cosent"))


def test_pairs_have_scores_in_their_range(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text_a": "a b", "text_b": "c", "score": 1}, {"text_a": "d", "text_b": "e f", "score": "3.5"}]
    examples = read(tmp_path, rows, own(PAIRS, loss="cosent"))
    assert examples.known_scores.tolist() == [1, 3.5]
    scaled = own(PAIRS, [0, 5], loss="cosine")
    assert rows_of(scaled, tokenizer, read(tmp_path, rows, scaled)).labels.tolist() == pytest.approx([0.2, 0.7])
    with pytest.raises(UserError, match=r"line 2: score is '3.5'.*0 to 1.*data\.score_r"):
        read(tmp_path, rows, own(PAIRS, loss="cosine"))
    with pytest.raises(UserError, match=r"line 2: score is '3.5'.*0 to 3"):
        read(tmp_path, rows, own(PAIRS, [0, 3], loss="cosent"))
    with pytest.raises(UserError, match="line 1: score is 'x'"):
        read(tmp_path, [{**rows[0], "score": "x"}], own(PAIRS, loss="cosent"))
    with pytest.raises(UserError, match="line 1: score is 'nan'"):
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
            r"training.batch",
        ),
        ({"num_feature_layers": 2}, "num_feature_layers is 2"),
        ({"classifier_dropout": 0.5}, r"classifier_dropout is 0.5"),
        ({"head_init": "none"}, "head_init is none"),
        ({"data": TaskDataConfig(score_range=[0, 1])}, r"data\.score_range is set, but embedding\.loss is in_batch"),
        (
            {"data": TaskDataConfig(metrics=["f1"])},
            r"data\.metrics is set",
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
        ({"loss": "cosent", "num_negatives": 2}, "num_negatives.*cosent"),
        ({"matryoshka": [4, 4]}, r"matryoshka is \[4, 4\]: list each width once"),
        ({"matryoshka": []}, r"matryoshka is \[\]: list each width once"),
        (
            {"loss": "pairs"},
            r"embedding.loss is 'pairs'.*in_batch, triplet, margin_mse.*same_l",
        ),
        ({"loss": "same_label", "num_negatives": 1}, "num_negatives.*same_label"),
        ({"temperature": 0.0}, "embedding.temperature is 0.0: it must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        EmbeddingConfig(**settings).check()
    with pytest.raises(UserError, match=r"matryoshka.*16"):
        EmbeddingConfig(matryoshka=[8, 16]).check_width(16)


def test_predictions_of_a_search_are_ranks(tmp_path: Path, tokenizer: Any) -> None:
    """The first row finds the document of the second one first; the third shares its query and the first's document."""
    task = own()
    examples = read(tmp_path, ROWS, task)
    texts = np.zeros((3, 4, 2), np.float32)
    texts[:, 0] = [[0, 2], [1, 0.2], [1, 0.2]]
    texts[:, 1] = [[1, 0.1], [0.1, 1], [1, 0.1]]
    predictions = task.predict(list(texts.reshape(3, -1)), rows_of(task, tokenizer, examples), examples)
    assert predictions.ranks.tolist() == [2, 1, 1]
    assert predictions.first.tolist() == [1, 0, 0]
    scores = task.score(predictions, examples)
    assert scores["mrr_at_10"] == pytest.approx((1 / 2 + 1) / 2)
    assert scores["recall_at_10"] == 1
    baseline = task.baseline_scores(examples)
    assert baseline["mrr_at_10"] == pytest.approx((0.75 + 1) / 2)
    [file] = task.write_predictions(tmp_path, "dev", predictions, examples)
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert [row[2:] for row in lines] == [["rank", "first"], ["2", "1"], ["1", "0"], ["1", "0"]]
    [errors] = task.write_details(tmp_path, "dev", predictions, examples)
    assert errors.read_text().splitlines()[1:] == ["a b\tc d e\td\t2"]
    same = np.ones((3, 8), np.float32)
    assert task.is_degenerate(task.predict(list(same), rows_of(task, tokenizer, examples), examples), examples)
    assert not task.is_degenerate(predictions._replace(ranks=np.array([1, 1, 1])), examples)


def test_predictions_of_pairs_are_cosines(tmp_path: Path, tokenizer: Any) -> None:
    task = own(PAIRS, loss="cosent")
    examples = read(tmp_path, [{"text_a": "a", "text_b": "b", "score": score} for score in (0, 1, 2)], task)
    texts = np.array([[[1, 0], [0, 3]], [[1, 0], [2, 1]], [[1, 0], [4, 0]]], np.float32)
    predictions = task.predict(list(texts.reshape(3, -1)), rows_of(task, tokenizer, examples), examples)
    assert predictions.similarities.tolist() == pytest.approx([0, 2 / 5**0.5, 1])
    assert task.score(predictions, examples)["spearman"] == 1
    assert task.main_metric == "spearman"
    [file] = task.write_predictions(tmp_path, "dev", predictions, examples)
    assert file.read_text().splitlines()[:2] == ["index\tcosine\tscore", "0\t0.000000\t0"]
    assert task.write_details(tmp_path, "dev", predictions, examples) == []


def test_texts_are_lower_cased_if_the_model_declares_it(tmp_path: Path, tokenizer: Any) -> None:
    task = own(lowercase=True)
    examples = read(tmp_path, [{"query": "A", "positive": "B", "negatives": ["C"]}], task)
    batch = rows_of(task, tokenizer, examples).batch(np.array([0]), 8, 1)
    letters = [PIECES[ids[1]] for ids in batch["input_ids"][0]]
    assert letters == ["a", "b", "c"]


def test_a_run_resumes_without_what_its_initial_model_declares():
    """config.yaml records it in place of null, which the same command has again."""
    assert {f"embedding.{key}" for key in (*POOLING_KEYS, "pooling")} <= set(DERIVED_KEYS)


def test_all_rows_without_a_document_are_reported_at_once(tmp_path: Path) -> None:
    rows = [{"query": "a", "positive": "b"}, {"query": "c", "positive": ""}, {"query": "d", "positive": None}]
    with pytest.raises(UserError, match=r"line 2: the query has no 'positive'.*2.*2, 3"):
        read(tmp_path, rows, own())
    rows = [{"query": "a", "positive": "b", "negatives": 3}, {"query": "c", "positive": "d", "negatives": ["d"]}]
    with pytest.raises(UserError, match=r"line 1: negatives has 3.*2.*1, 2"):
        read(tmp_path, rows, own())
