"""Labelled data for the evaluation of runs and published models: files, folders, rows in memory, names of labels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.errors import UserError
from bert.model.pooling import Pooling
from bert.tasks import TASKS
from bert.tasks.base import Task
from bert.tasks.labelled import embedding_task, match_labels, read_labelled, read_with_new_labels, relabelled
from bert.tasks.registry import published_task
from bert.tasks.sequence_classification.custom import CustomClassification

ROWS = [{"text": "fine", "label": "Positive"}, {"text": "bad", "label": "negative"}, {"text": "ok", "label": "neutral"}]
MOODS = ("NEGATIVE", "NEUTRAL", "POSITIVE")


def published(
    kind: str = "sequence_classification", names: tuple[str, ...] = MOODS, problem: str | None = None
) -> Task:
    task = published_task(kind, "org/model", names, problem)
    assert task is not None
    return task


def read(task: Task, data: Any, split: str = "dev", **columns: str) -> Any:
    return read_labelled(task, data, split, columns)


def test_labels_are_matched_by_name_in_any_case() -> None:
    labelled = read(published(), ROWS)
    assert labelled.examples.labels.tolist() == [2, 0, 1]
    assert labelled.scorer.metrics == ("accuracy", "macro_f1", "matthews")
    assert read(published(names=("a", "b")), [{"text": "t", "label": "b"}]).scorer.metrics[1] == "f1"


def test_names_that_do_not_match_are_one_error_with_both_sets() -> None:
    stars = [{"text": "fine", "label": number} for number in (1, 2, 3)]
    with pytest.raises(UserError, match=r"'1', '2', '3', but the labels of org/model are 'NEGATIVE', 'NEUTRAL'"):
        read(published(), stars)
    with pytest.raises(UserError, match="labels 'Yes'"):  # two names differ only in their case
        match_labels(["Yes"], [("YES", "yes")], "the data", "m")
    assert match_labels(["yes", "1.0"], [("YES", "yes", "1")], "the data", "m") == {"yes": 1, "1.0": 2}
    assert match_labels(["1", "0"], [("LABEL_0", "LABEL_1")], "the data", "m") == {"1": 1, "0": 0}


def test_a_file_a_folder_a_data_frame_and_rows_are_the_same(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "test.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS))
    files = [tmp_path / "dev.jsonl", str(tmp_path / "test.csv"), tmp_path]
    for task in (published(), CustomClassification(labels=(*MOODS, "Positive", "negative", "neutral"))):
        sources = [ROWS, iter(ROWS), pandas.DataFrame(ROWS), *files]
        read_all = [read(task, source).examples for source in sources] + [read(task, tmp_path, "test").examples]
        for examples in read_all:
            assert examples.texts_a == ["fine", "bad", "ok"]
            np.testing.assert_array_equal(examples.labels, read_all[0].labels)
    with pytest.raises(UserError, match="no train"):
        read(published(), tmp_path, "train")
    with pytest.raises(UserError, match=r"'half'.*folder of files: use train, dev, test"):
        read(published(), tmp_path, "half")


def test_a_saved_data_set_has_its_own_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, 0]}, features)
    datasets.DatasetDict({"validation": rows, "other": rows.select([0])}).save_to_disk(tmp_path / "saved")
    task = published(names=("POS", "NEG"))
    assert read(task, tmp_path / "saved", text_a="sentence").examples.labels.tolist() == [0, 1]
    assert read(task, tmp_path / "saved", "other", text_a="sentence").examples.labels.tolist() == [0]
    assert read(task, rows, text_a="sentence").examples.labels.tolist() == [0, 1]


def test_the_columns_of_pairs_scores_and_several_labels_are_found() -> None:
    pair = [{"text_a": "one", "text_b": "two", "label": "positive"}]
    assert read(published(), pair).examples.texts == [("one", "two")]
    labelled = read(published(names=("LABEL_0",)), [{"text": "a", "score": 1.5}, {"text": "b", "score": 2}])
    assert labelled.examples.labels.tolist() == [1.5, 2]
    several = published(problem="multi_label_classification")
    rows = [{"text": "a", "labels": ["positive", "Negative"]}, {"text": "b", "labels": []}]
    assert read(several, rows).examples.labels.tolist() == [[1, 0, 1], [0, 0, 0]]
    named = read(published(), [{"review": "a", "mood": "neutral"}], text_a="review", label="mood")
    assert named.examples.texts_a == ["a"]
    with pytest.raises(UserError, match=r"no 'text' among 'review', 'label': set data\.columns\.text_a"):
        read(published(), [{"review": "a", "label": "neutral"}])
    with pytest.raises(UserError, match=r"columns has 'stars': use a key of data\.columns: text_a"):
        read(published(), ROWS, stars="x")


def test_built_in_tasks_read_their_folder_or_columns(sst2: Path) -> None:
    whole = read(TASKS["sst2"], sst2)
    assert len(whole.examples) == 17 and whole.scorer is TASKS["sst2"]
    named = read(TASKS["sst2"], sst2 / "dev.tsv")
    np.testing.assert_array_equal(named.examples.labels, whole.examples.labels)
    words = read(TASKS["sst2"], [{"text": "a", "label": "positive"}, {"text": "b", "label": "0"}])
    assert words.examples.labels.tolist() == [1, 0]
    with pytest.raises(UserError, match="the data has no labels"):
        read(TASKS["sst2"], sst2, "test")
    with pytest.raises(UserError, match=r"no split 'half' of sst2: use train, dev, test"):
        read(TASKS["sst2"], sst2, "half")


def test_entity_types_are_matched_by_name(tmp_path: Path) -> None:
    task = published("token_classification", ("O", "PER-B", "PER-I", "LOC-B", "LOC-I"))
    (tmp_path / "dev.conll").write_text("Ann B-per\nDoe I-per\nleft O\n\nOslo B-LOC\n")
    labelled = read(task, tmp_path / "dev.conll")
    assert labelled.examples.tags == [["B-PER", "I-PER", "O"], ["B-LOC"]]
    assert labelled.inputs.tags is None
    rows = [{"words": ["Ann", "left"], "tags": ["B-PER", "O"]}]
    assert read(task, rows).examples.tags == [["B-PER", "O"]]
    with pytest.raises(UserError, match=r"labels 'ORG', but the labels of org/model are 'LOC', 'PER'"):
        read(task, [{"words": ["UN"], "tags": ["B-ORG"]}])


def test_questions_without_an_answer_are_scored_as_squad_2(tmp_path: Path) -> None:
    rows = [{"question": "who", "context": "it is Ann", "answer": "Ann", "answer_start": 6}]
    task = published("question_answering", ())
    assert not read(task, rows).task.may_be_impossible
    none = {"question": "why", "context": "it is Ann", "answer": "", "answer_start": None}
    assert read(task, [*rows, none]).task.may_be_impossible
    answers = [{"text": "Ann", "answer_start": 6}]
    questions = [{"id": "1", "question": "who", "answers": answers}]
    content = {"data": [{"paragraphs": [{"context": "it is Ann", "qas": questions}]}]}
    for name in ("any.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(json.dumps(content))
    assert len(read(task, tmp_path / "any.json").examples) == 1
    assert len(read(TASKS["squad"], tmp_path).examples) == 1


def test_choices_are_read_from_rows_and_files(tmp_path: Path) -> None:
    rows = [{"question": {"stem": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]},
             "answerKey": "B"}]  # fmt: skip
    (tmp_path / "dev.jsonl").write_text(json.dumps(rows[0]) + "\n")
    for data in (rows, tmp_path / "dev.jsonl", tmp_path):
        assert read(published("multiple_choice", ()), data).examples.labels.tolist() == [1]
    with pytest.raises(UserError, match="data, row 1: answerKey is 'C'"):
        read(published("multiple_choice", ()), [{**rows[0], "answerKey": "C"}])


def test_embeddings_are_scored_by_their_columns() -> None:
    task = embedding_task("org/encoder", Pooling("mean", True, 64, False, "query: ", ""))
    queries = [{"query": "a", "positive": "b"}, {"query": "c", "positive": "d"}]
    assert read(task, queries).task.main_metric == "ndcg_at_10"
    assert read(task, [{"text_a": "a", "text_b": "b", "score": 0.5}]).task.main_metric == "spearman"
    assert read(task, [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}]).task.main_metric == "accuracy"
    assert read(task, queries).task.settings.query_prompt == "query: "


def test_rows_of_a_generator_have_their_own_labels() -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    assert read_with_new_labels(iter(rows), "dev", {}).task.num_labels == 2


def test_pairs_are_read_from_the_named_columns() -> None:
    rows = [{"text": "a", "hypothesis": "b", "label": "POSITIVE"}]
    pairs = published_task("sequence_classification", "org/pairs", MOODS, None, texts_per_input=2)
    assert read(pairs, rows, text_b="hypothesis").examples.texts_b == ["b"]
    assert read(TASKS["mrpc"], [{**rows[0], "label": 1}], text_b="hypothesis").examples.texts_b == ["b"]
    for task, row in ((pairs, rows[0]), (TASKS["sst2"], {"text_a": "a", "text_b": "b", "label": 1})):
        with pytest.raises(UserError, match=r"takes a .*text.* would be read: name its columns"):
            read(task, [row])
    scored = [{"text": "a", "other": "b", "score": 3}]
    assert read(embedding_task("org/model", Pooling()), scored, text_b="other").examples.documents == ["b"]


def test_texts_are_split_into_the_words_of_predictions() -> None:
    tagger = dataclasses.replace(TASKS["ner"], labels=("O", "B-PER", "I-PER"), clitics=())
    examples = read(tagger, [{"text": "geht's gut, Anna", "entities": []}]).examples
    assert examples.words == tagger.examples_from_inputs(["geht's gut, Anna"]).words


def test_what_is_no_rows_is_one_sentence() -> None:
    for data in ({"text": "a", "label": "b"}, 3):
        with pytest.raises(UserError, match="pass a path, a list of dictionaries"):
            read(published(), data)


def test_a_second_model_gets_its_own_labels() -> None:
    labelled = read(published(), ROWS)
    other, order = relabelled(labelled, published(names=("positive", "mixed", "neutral", "negative")))
    assert other.examples.labels.tolist() == labelled.examples.labels.tolist()
    assert order == [3, 2, 0, 1]
    assert other.task.output_names == other.scorer.output_names == ("negative", "neutral", "positive", "mixed")
    assert other.scorer.metrics == tuple(name for name in labelled.scorer.metrics if name != "f1")
    several = read(published(problem="multi_label_classification"), [{"text": "a", "label": ["neutral"]}])
    reordered = published(names=("neutral", "positive", "negative"), problem="multi_label_classification")
    multilabel, order = relabelled(several, reordered)
    assert (multilabel.examples.labels.tolist(), order) == ([[1, 0, 0]], None)
    assert multilabel.scorer.metrics == several.scorer.metrics
    more = published(names=("neutral", "positive", "negative", "mixed"), problem="multi_label_classification")
    assert relabelled(several, more)[0].scorer.metrics == ("micro_f1",), "no row has the label mixed"
    for wrong, message in (
        (published(names=("LABEL_0",)), "predicts a score, but org/model one label"),
        (published("question_answering", ()), "question_answering"),
        (reordered, "several labels"),
        (published(names=("good", "bad")), "'NEGATIVE', 'NEUTRAL', 'POSITIVE', but the labels of org/model are 'good'"),
    ):
        with pytest.raises(UserError, match=message):
            relabelled(labelled, wrong)
