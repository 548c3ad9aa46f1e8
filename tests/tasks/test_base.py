"""The interface of a task."""

from __future__ import annotations

import logging

import pytest

from bert.tasks.sequence_classification import CustomClassification, CustomRegression
from bert.tasks.token_classification import CustomTokenClassification


def test_a_class_that_names_a_head_and_a_loss_still_works(caplog, monkeypatch) -> None:
    monkeypatch.setattr("bert.errors.LOGGER.propagate", True)
    with caplog.at_level(logging.WARNING, "bert"):

        class Scores(CustomClassification):
            head = "classification"
            loss = "mean_squared_error"

    assert (Scores.kind, Scores().problem_type) == ("sequence_classification", "regression")
    assert "Scores.head is now called kind" in caplog.text


@pytest.mark.parametrize(
    ("task", "calls"),
    [
        (CustomClassification(), {"predict", "score"}),
        (CustomClassification(text_columns=("a", "b")), {"predict", "score", "rank"}),
        (CustomRegression(text_columns=("a", "b")), {"predict", "score", "rank"}),
        (CustomTokenClassification(), {"predict", "score"}),
    ],
)
def test_calls(task, calls) -> None:
    assert task.calls == calls


def test_settings_of_answers_are_rejected_by_other_tasks() -> None:
    from bert.errors import UserError

    with pytest.raises(UserError, match="n_best is for question answering models"):
        CustomClassification().with_answer_settings({"doc_stride": None, "n_best": 2})
