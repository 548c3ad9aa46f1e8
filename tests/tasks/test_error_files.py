"""errors.tsv of each kind of task, by hand. Single labels are in tests/runs/test_plots.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bert.tasks import TASKS, multiple_choice
from bert.tasks.question_answering.span_features import Answer, Answers, Candidate, Example
from bert.tasks.question_answering.squad import Dataset
from bert.tasks.sequence_classification import Examples
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.task import Tagged


def errors_of(folder: Path, task: str, predictions: Any, examples: Any, split: str = "dev") -> list[list[str]]:
    [path] = TASKS[task].write_details(folder, split, predictions, examples)
    assert path.name == ("errors.tsv" if split == "dev" else f"{split}_errors.tsv")
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_regression_lists_the_greatest_deviations_first(tmp_path: Path) -> None:
    scores, found = np.array([1.0, 2.0, 5.0], np.float32), np.array([1.5, 2.0, 2.5], np.float32)
    examples = Examples(["a", "b", "c\td"], ["x", "y", "z"], scores, list("012"))
    assert errors_of(tmp_path, "stsb", found, examples, "test") == [
        ["text_a", "text_b", "prediction", "score", "deviation"],
        ["c d", "z", "2.5", "5", "-2.5"],
        ["a", "x", "1.5", "1", "0.5"],
        ["b", "y", "2", "2", "0"],
    ]


def test_tagging_lists_the_wrong_words(tmp_path: Path) -> None:
    sentences = Sentences([["Ann", "left"], ["in", "Rome"]], [["B-PER", "O"], ["O", "B-LOC"]])
    tagged = Tagged([["O", "O"], ["B-LOC", "B-LOC"]], [[0.6, 0.9], [0.8, 0.9]])
    assert errors_of(tmp_path, "ner", tagged, sentences) == [
        ["word", "prediction", "label", "probability", "sentence"],
        ["in", "B-LOC", "O", "0.800000", "in Rome"],
        ["Ann", "O", "B-PER", "0.600000", "Ann left"],
    ]


def test_question_answering_lists_the_questions_without_an_exact_match(tmp_path: Path) -> None:
    context = "Ann left Rome in May"
    answers = {"a": ("Ann", 0), "b": ("Rome", 9), "c": ("May", 17)}
    examples = [Example(id, f"{id}?", context, (Answer(*answer),)) for id, answer in answers.items()]
    found = {"a": ("the Ann", 0.5), "b": ("left Rome", 0.4), "c": ("Ann", 0.7)}
    n_best = {id: [Candidate(text, 0, len(text), share, 1.0, 1.0)] for id, (text, share) in found.items()}
    rows = errors_of(tmp_path, "squad", Answers(n_best, None), Dataset(examples, [], labelled=True))
    assert rows == [
        ["id", "question", "prediction", "answers", "f1", "probability"],
        ["c", "c?", "Ann", "May", "0.000000", "0.700000"],
        ["b", "b?", "left Rome", "Rome", "0.666667", "0.400000"],
    ]


def test_multiple_choice_lists_the_wrong_choices(tmp_path: Path) -> None:
    examples = multiple_choice.Examples(
        ["one", "two"], [["x", "y"], ["u", "v"]], [["A", "B"], ["A", "B"]], np.array([0, 1]), ["7", "8"]
    )
    chosen = multiple_choice.Chosen(np.array([0, 0]), [np.array([0.9, 0.1]), np.array([0.7, 0.3])])
    assert errors_of(tmp_path, "swag", chosen, examples) == [
        ["id", "question", "prediction", "label", "probability"],
        ["8", "two", "u", "v", "0.700000"],
    ]
