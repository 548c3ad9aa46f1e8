"""Runs of the recipe few_shot: a contrastively trained encoder with a fitted classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import bert
from bert.commands import finetune
from bert.errors import UserError
from bert.interchange.writers import hf
from bert.training.finetuning.contrastive import INVERSE_REGULARIZATION
from tests.tiny_models import sentence_encoder

pytestmark = pytest.mark.medium

TEXTS = {"x": ("a b c", "a c c a", "c b", "b a c"), "y": ("d e", "e e d", "f d", "d f e e"), "z": ("g h", "h g h")}
ROWS = [{"text": text, "label": label} for label, texts in TEXTS.items() for text in texts]
NEW = ["a b a", "d", "h h g e", "a e"]
SETTINGS: dict[str, Any] = {
    "data": {"max_length": 16, "buckets": [16]},
    "optimizer": {"learning_rate": 5e-3},
    "training": {"batch_size": 8, "steps": 6, "eval_every": 3, "log_every": 1, "checkpoint_every": 2},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return sentence_encoder(tmp_path_factory.mktemp("encoder"))


def train(folder: Path, encoder: Path, rows: Any = ROWS, dev: Any = ROWS, **more: Any) -> bert.Run:
    callbacks = more.pop("callbacks", ())
    overrides = {**SETTINGS, **more}
    return bert.finetune(
        "few_shot", init=encoder, train=rows, dev=dev, output_dir=folder, overrides=overrides, callbacks=callbacks
    )


def vectors_of(model: bert.Pretrained, texts: list[str]) -> np.ndarray:
    """The standardized mean of the tokens of each text, scaled to length 1."""
    hidden = model.encode(texts)
    means = [states[: mask.sum()].mean(axis=0) for states, mask in zip(hidden[0], hidden[2], strict=True)]
    centred = np.stack(means) - np.mean(means, axis=1, keepdims=True)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)


def probabilities(model: bert.Pretrained, texts: list[str]) -> np.ndarray:
    return np.array([list(answer.probabilities.values()) for answer in model.predict(texts)])


def test_the_classifier_is_fitted_to_the_trained_vectors(encoder: Path, tmp_path: Path, monkeypatch) -> None:
    run = train(tmp_path / "run", encoder)
    model, source = run.model, bert.load(encoder)
    before, after = (each.params["bert"]["encoder"]["layer_0"] for each in (source, model))
    assert not np.allclose(before["attention"]["value"]["kernel"], after["attention"]["value"]["kernel"], atol=1e-4)
    assert run.results["best_step"] in (3, 6)
    losses = [line["same_label_loss"] for line in run.metrics if line["split"] == "train"]
    assert losses[-1] < losses[0]
    texts = [row["text"] for row in ROWS]
    regression = LogisticRegression(C=INVERSE_REGULARIZATION, max_iter=1000)
    regression.fit(vectors_of(model, texts), [row["label"] for row in ROWS])
    expected = regression.predict_proba(vectors_of(model, NEW))
    np.testing.assert_allclose(probabilities(model, NEW), expected, atol=1e-3)
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    model.save(tmp_path / "hf")
    np.testing.assert_allclose(probabilities(bert.load(tmp_path / "hf"), NEW), probabilities(model, NEW), atol=1e-5)


class Fails(bert.Callback):
    """Ends a run with an exception at a step that is not evaluated."""

    def on_metrics(self, step: int, split: str, metrics: Any) -> None:
        if step == 5:
            raise RuntimeError("stop")


class Stops(bert.Callback):
    """Ends a run early, at a step that would not be evaluated."""

    def on_metrics(self, step: int, split: str, metrics: Any) -> bool:
        return step == 2


def test_an_interrupted_run_continues_bit_for_bit(encoder: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", encoder).model
    with pytest.raises(RuntimeError, match="stop"):
        train(tmp_path / "resumed", encoder, callbacks=[Fails()])
    assert not (tmp_path / "resumed" / "results.json").exists()
    resumed = train(tmp_path / "resumed", encoder).model
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole.params, resumed.params)))


def test_a_stopped_run_has_a_fitted_classifier(encoder: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", encoder, callbacks=[Stops()])
    assert run.results["steps"] == 2
    assert run.results["dev"]["accuracy"] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"lora": {"rank": 2}}, {"data": {"max_length": 8, "long_texts": "windows", "doc_stride": 2}}]
)
def test_it_trains_adapters_and_reads_windows(encoder: Path, tmp_path: Path, more: dict) -> None:
    long = [{**row, "text": f"{row['text']} {row['text']} {row['text']}"} for row in ROWS]
    run = train(tmp_path / "run", encoder, long, **more)
    expected = run.model.predict([row["text"] for row in long])
    dev = json.loads((tmp_path / "run" / "results.json").read_text())["dev"]
    assert np.isfinite(dev["loss"])
    assert np.mean([answer.label == row["label"] for answer, row in zip(expected, long, strict=True)]) > 0.6


def test_a_frozen_encoder_only_gets_a_classifier(encoder: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", encoder, num_frozen_layers=1, training={**SETTINGS["training"], "steps": 1})
    trained, source = run.model.params["bert"], bert.load(encoder).params["bert"]
    source = {part: source[part] for part in trained}  # without the pooler
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, trained, source)))
    assert run.results["dev"]["accuracy"] > 0.6


def test_without_dev_rows_all_rows_are_trained_on(encoder: Path, tmp_path: Path, capsys) -> None:
    """The scores of the training rows are reported as such; a resumed run has the same rows."""
    run = train(tmp_path / "run", encoder, dev=None)
    assert "dev" not in run.results and run.results["train"]["accuracy"] > 0.6
    assert (run.results["best_step"], run.results["steps"]) == (6, 6)
    assert not list((tmp_path / "run").glob("predictions/*dev*"))
    texts = [row["text"] for row in ROWS]
    regression = LogisticRegression(C=INVERSE_REGULARIZATION, max_iter=1000)
    regression.fit(vectors_of(run.model, texts), [row["label"] for row in ROWS])
    np.testing.assert_allclose(
        probabilities(run.model, NEW), regression.predict_proba(vectors_of(run.model, NEW)), atol=1e-3
    )
    finetune._show(run.results, "runs/few")
    printed = capsys.readouterr().out
    assert "training rows, which do not show how well new rows are predicted" in printed
    assert "bert evaluate runs/few train --cross_validate 4" in printed
    with pytest.raises(UserError, match=r"has no dev rows"):
        run.model.evaluate("dev")
    assert train(tmp_path / "run", encoder, dev=None).results["train"] == run.results["train"]


def test_rows_of_one_label_are_an_error(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'z' has 1 of the 9 training rows"):
        train(tmp_path / "run", encoder, ROWS[:-1])
    assert not (tmp_path / "run" / "checkpoints").exists()
