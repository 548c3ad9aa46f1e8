"""Zero-shot labels that a model was not trained on: the texts that it scores, and error messages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.inference.scoring import best_label, entailment_labels
from bert.model.heads import BertForSequenceClassification
from bert.tasks.registry import published_task
from tests.tiny_models import CONFIG, model_of

NAMES = ("contradiction", "neutral", "ENTAILMENT")


def nli(*names: str) -> Any:
    return published_task("sequence_classification", "nli", names, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bert.Pretrained:
    folder: Path = tmp_path_factory.mktemp("model")
    return model_of(folder, BertForSequenceClassification(CONFIG, len(NAMES)), nli(*NAMES))


@pytest.mark.medium
def test_each_label_is_asked_with_the_text(model: bert.Pretrained) -> None:
    texts, labels = ["a b c", "d"], ["e", "f g", "h"]
    answers = model.zero_shot(texts, labels, "x {}", batch_size=4)
    alone = model.zero_shot("d", labels, "x {}", multi_label=True)
    for text, answer in zip(texts, answers, strict=True):
        pairs = [(text, f"x {label}") for label in labels]
        features = model.task.features(model.tokenizer, model.task.examples_from_inputs(pairs), model.data)
        logits = np.array(model.outputs(features))
        shares = np.exp(logits[:, 2]) / np.exp(logits[:, 2]).sum()
        assert [answer.probabilities[label] for label in labels] == pytest.approx(shares.tolist(), abs=1e-6)
        assert answer.label == labels[int(shares.argmax())] == next(iter(answer.probabilities))
    each = 1 / (1 + np.exp(logits[:, 0] - logits[:, 2]))
    assert [alone.probabilities[label] for label in labels] == pytest.approx(each.tolist(), abs=1e-6)
    softer = dataclasses.replace(model, task=dataclasses.replace(model.task, calibration=4.0))
    [answer] = softer.zero_shot(["d"], labels, "x {}")
    shares = np.exp(logits[:, 2] / 4) / np.exp(logits[:, 2] / 4).sum()
    assert [answer.probabilities[label] for label in labels] == pytest.approx(shares.tolist(), abs=1e-6)
    assert model.zero_shot([], labels) == []
    assert model.zero_shot("d", ["e"], "x {}") == model.zero_shot("d", ["e"], "x {}", multi_label=True)
    assert model.zero_shot("d", iter(labels), "x {}", multi_label=True) == alone


def test_entailment_and_its_opposite_are_found_by_name() -> None:
    assert entailment_labels(nli(*NAMES), "made") == (2, 0)
    assert entailment_labels(nli("entailment", "neutral", "contradiction"), "made") == (0, 2)
    assert entailment_labels(nli("not_entailment", "entailment"), "made") == (1, 0)
    assert entailment_labels(nli("ENTAIL", "NON-ENTAIL"), "made") == (0, 1)
    assert entailment_labels(nli("CONTR", "NEUTRAL", "ENTAIL"), "made") == (2, 0)
    assert entailment_labels(nli("entail", "other", "refute"), "made") == (0, 2)
    answer = best_label(np.array([[0.0, 9, 0], [0, 9, 1]]), ["a", "b"], 2, 0, False)
    assert answer.label == "b" and sum(answer.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("a", []), "labels must be a list"),
        (("a", "bcd"), "labels must be a list"),
        (("a", ["b", " "]), "label 2 is empty"),
        (("a", ["b", "b"]), "labels has a label twice"),
        (("a", ["b"], "about"), "template is 'about': write {} once"),
        (("a", ["b"], None), "template is None"),
        (("a", None), "labels must be a list"),
        (("a", 3), "the inputs are 3"),
        ((None, ["b"]), "the inputs are None"),
        ((["a", ""], ["b"]), "text 2 is empty"),
    ],
)
def test_a_question_without_sense_is_one_sentence(model: bert.Pretrained, arguments: Any, told: str) -> None:
    with pytest.raises(bert.UserError, match=told):
        model.zero_shot(*arguments)


def test_a_model_of_other_labels_is_refused(model: bert.Pretrained) -> None:
    other = dataclasses.replace(model, task=nli("good", "bad"))
    with pytest.raises(bert.UserError, match="made has no labels"):
        other.zero_shot("a", ["b"])
    encoder = dataclasses.replace(model, task=None)
    with pytest.raises(bert.UserError, match="made is no entailment model"):
        encoder.zero_shot("a", ["b"])
    with pytest.raises(bert.UserError, match="use a reranker"):
        encoder.rank("a", ["b"])
