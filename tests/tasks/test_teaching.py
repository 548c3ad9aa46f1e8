"""Rows with the outputs of a teacher: rows without labels, labels by name, and words of two vocabularies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bert.config import TaskDataConfig
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.errors import UserError
from bert.tasks import find_task
from bert.tasks.base import Task
from bert.tasks.registry import published_task
from bert.tasks.sequence_classification import CustomClassification, CustomMultilabel, CustomRegression, Examples
from bert.tasks.teaching import (
    TaughtRows,
    inputs_of,
    output_order,
    read_unlabelled,
    values_per_input,
    with_unlabelled,
    word_numbers,
)
from bert.tasks.token_classification import TokenClassificationTask
from bert.tasks.token_classification.conll import Sentences
from bert.tokenizer.vocabulary import load_tokenizer
from tests.tiny_models import PIECES

ROWS = TokenRows(np.arange(9, dtype=np.int32), np.array([0, 2, 5, 9]), np.array([2, 3, 4]), np.array([1, 1, 0]))


def classification(*labels: str) -> CustomClassification:
    return CustomClassification(labels=labels, label_names=labels)


def tagging(*labels: str) -> TokenClassificationTask:
    return TokenClassificationTask(name="ner", labels=labels)


def test_a_batch_has_the_targets_of_its_rows() -> None:
    targets = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = TaughtRows(ROWS, targets, 2)
    batch = rows.batch(np.array([2, 0]), 4, 3)
    np.testing.assert_array_equal(batch["targets"], [[4, 5], [0, 1], [0, 0]])
    np.testing.assert_array_equal(batch["target_weights"], [1, 1, 0])
    np.testing.assert_array_equal(batch["labelled"], [0, 1, 0])
    np.testing.assert_array_equal(batch["labelled_share"], np.full(3, 2 / 3, np.float32))
    plain = ROWS.batch(np.array([2, 0]), 4, 3)
    for name, array in plain.items():
        np.testing.assert_array_equal(batch[name], array)
    assert (rows.digest(), len(rows), list(rows.sizes)) == (ROWS.digest(), 3, [2, 3, 4])


def test_a_batch_of_tokens_has_the_targets_of_its_words() -> None:
    words = np.array([-1, 0, -1, 1, 2, 3, -1, 4, -1], np.int32)
    labels = np.where(words < 0, IGNORE_INDEX, 1).astype(np.int32)
    rows = dataclasses.replace(ROWS, labels=labels, token_labels=True)
    targets = np.arange(1, 6, dtype=np.float32)[:, None]
    batch = TaughtRows(rows, targets, 2, words).batch(np.array([1, 2]), 4, 3)
    np.testing.assert_array_equal(batch["targets"][..., 0], [[0, 2, 3, 0], [4, 0, 5, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["target_weights"], [[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch["labels"], [[-1, 1, 1, -1], [-1] * 4, [-1] * 4])


def test_texts_without_labels_are_read_like_the_inputs_of_predict(tmp_path: Path) -> None:
    task = dataclasses.replace(classification("a", "b"), text_columns=("review",))
    files = {
        "u.txt": "one\ntwo words\n",
        "u.tsv": "stars\treview\n5\tone\n1\ttwo words\n",
        "u.jsonl": '{"review": "one"}\n{"review": "two words", "label": "a"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        examples = read_unlabelled(task, TaskDataConfig(dir=str(tmp_path), unlabelled=name))
        assert examples.texts == ["one", "two words"]
        assert not examples.labelled
    there = read_unlabelled(task, TaskDataConfig(dir="elsewhere", unlabelled=str(tmp_path / "u.txt")))
    assert there.texts == ["one", "two words"]
    assert read_unlabelled(task, TaskDataConfig(dir=str(tmp_path))) is None
    (tmp_path / "u.txt").write_text("one\n\ntwo\n\n")
    (tmp_path / "empty.txt").write_text("")
    for name, words in {
        "u.txt": r"u\.txt, line 2: an empty text.*\(2 lines",
        "empty.txt": "empty.txt holds no input",
        "none.txt": "data.unlabelled.*none.txt",
    }.items():
        with pytest.raises(UserError, match=words):
            read_unlabelled(task, TaskDataConfig(dir=str(tmp_path), unlabelled=name))


def test_rows_without_labels_follow_the_training_rows() -> None:
    task = find_task("mrpc")
    train = Examples(["a"], ["b"], np.array([1], np.int32), ["7"])
    both = with_unlabelled(task, train, task.examples_from_inputs([("c", "d")]))
    assert both.texts == [("a", "b"), ("c", "d")]
    assert list(both.labels) == [1, 0]
    labelled = Examples(["a"], None, np.array([[0, 1]], np.int8), ["0"])
    several = with_unlabelled(CustomMultilabel(), labelled, Examples(["b"], None, None, ["0"]))
    np.testing.assert_array_equal(several.labels, [[0, 1], [0, 0]])
    tagger = tagging("O", "B-X")
    sentences = with_unlabelled(tagger, Sentences([["a", "b"]], [["O", "B-X"]]), tagger.examples_from_inputs(["c d."]))
    assert sentences.words == inputs_of(tagger, sentences) == [["a", "b"], ["c", "d", "."]]
    assert sentences.tags == [["O", "B-X"], ["O"] * 3]
    with pytest.raises(UserError, match=r"distillation\.teacher.*mrpc"):
        inputs_of(task, object())


@pytest.mark.parametrize(
    ("task", "teacher", "order"),
    [
        (classification("a", "b", "c"), classification("c", "a", "b"), [1, 2, 0]),
        (classification("0", "1"), find_task("sst2"), [0, 1]),
        (find_task("sst2"), classification("1", "0"), [1, 0]),
        (classification("No", "yes"), published_task("sequence_classification", "X", ("YES", "NO"), None), [1, 0]),
        (CustomRegression(), find_task("stsb"), [0]),
        (tagging("O", "B-X", "I-X"), tagging("I-X", "O", "B-X"), [1, 2, 0]),
    ],
)
def test_labels_are_matched_by_name(task: Task, teacher: Task, order: list[int]) -> None:
    assert output_order(task, teacher, "T") == order


@pytest.mark.parametrize(
    ("task", "teacher", "words"),
    [
        (classification("a", "b"), classification("a", "c"), "T are 'a', 'c'.*classification are 'a', 'b'"),
        (classification("a", "b"), classification("a", "b", "c"), "T are 'a', 'b', 'c'"),
        (classification("a", "b"), CustomRegression(), "a score per text.*one label per text"),
        (classification("a", "b"), CustomMultilabel(labels=("a", "b"), label_names=("a", "b")), "several labels"),
        (classification("a", "b"), tagging("a", "b"), "a tag per word"),
        (CustomRegression(), find_task("squad"), "question_answering"),
        (tagging("O", "B-X"), tagging("O", "B-X", "I-X"), "'I-X'"),
    ],
)
def test_other_labels_and_answers_are_errors_that_name_both(task: Task, teacher: Task, words: str) -> None:
    with pytest.raises(UserError, match=words):
        output_order(task, teacher, "T")


def test_outputs_of_words_do_not_depend_on_vocabulary_and_length(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "vocab.txt").write_text("\n".join(PIECES))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "vocab.txt").write_text("\n".join([*PIECES, "cab", "##bed"]))
    task = tagging("O", "B-X")
    sentences = Sentences([["a", "cabbed", "bed"], ["cab"], ["d", "cab", "e", "f", "g", "hi", "j", "cabbed"]], None)
    numbers = [np.arange(12)]
    for name, max_length in (("a", 12), ("b", 6)):
        data = TaskDataConfig(max_length=max_length)
        features = task.features(load_tokenizer(tmp_path / name), sentences, data)
        words = word_numbers(features)
        starts = zip(features.offsets[:-1], features.offsets[1:], strict=True)
        outputs = [np.repeat(words[first:last, None], 2, axis=1).astype(np.float32) for first, last in starts]
        numbers.append(values_per_input(outputs, features, 2)[:, 0])
        assert len(features) > 3, "a long sentence has several rows"
    np.testing.assert_array_equal(numbers[1], numbers[0])
    np.testing.assert_array_equal(numbers[2], numbers[0])
