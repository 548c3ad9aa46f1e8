"""Distillation of a fine-tuned model: losses against a teacher's outputs, and rows with and without labels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.special import expit, rel_entr, softmax

from bert.config import FinetuneConfig, TaskDataConfig, TaskDistillationConfig, TrainingConfig
from bert.errors import UserError
from bert.tasks.teaching import TaughtRows
from bert.training.finetuning.distillation import (
    TARGETS_FILE,
    TEACHER,
    TEACHER_LOSSES,
    _read_targets,
    make_distilled_loss,
    save_targets,
)
from bert.training.losses import LOSSES, Loss, make_task_loss
from tests.tiny_training import assert_same_gradients, sharded_gradients

B, T, D, L, HEAT = 16, 5, 6, 3, 2.5
RANDOM = np.random.default_rng(0)
LABELS = {
    "sequence_classification": RANDOM.integers(0, L, B).astype(np.int32),
    "multi_label_classification": RANDOM.integers(0, 2, (B, L)).astype(np.int8),
    "regression": RANDOM.normal(size=B).astype(np.float32),
    "token_classification": RANDOM.integers(-1, L, (B, T)).astype(np.int32),
}
NUM_UNLABELLED = 9


def batch_of(kind: str, taught: bool = True) -> dict[str, np.ndarray]:
    """Rows of features; the last rows have no labels, and row 4 fills the batch."""
    random = np.random.default_rng(1)
    shape = (B, T) if kind == "token_classification" else (B,)
    weights = (np.arange(B) != 4).astype(np.float32)
    labels = LABELS[kind].copy()
    batch = {"features": random.normal(size=(*shape, D)).astype(np.float32), "labels": labels, "weights": weights}
    batch["rows"] = np.arange(B, dtype=np.int32)
    if not taught:
        return batch
    labelled = (np.arange(B) < B - NUM_UNLABELLED).astype(np.float32)
    places = weights
    if kind == "token_classification":
        labels[labelled == 0] = -1
        labels[4] = -1
        places = (random.random(shape) < 0.6).astype(np.float32) * weights[:, None]
    targets = random.normal(size=(*shape, 1 if kind == "regression" else L)).astype(np.float32)
    share = np.full(B, 1 - NUM_UNLABELLED / B, np.float32)
    return batch | {"targets": targets, "target_weights": places, "labelled": labelled, "labelled_share": share}


def apply(params: Any, batch: Any, dropout: Any) -> Any:
    return batch["features"] @ params["kernel"]


def params_of(kind: str) -> dict[str, np.ndarray]:
    return {"kernel": np.random.default_rng(2).normal(size=(D, 1 if kind == "regression" else L)).astype(np.float32)}


def loss_of(kind: str, weight: float = 0.3) -> Loss:
    config = FinetuneConfig(distillation=TaskDistillationConfig("X", None, HEAT, weight))
    return make_distilled_loss(LOSSES[kind], kind, config, apply)


def distances(kind: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The loss of each place, by SciPy's relative entropy."""
    if kind == "regression":
        return (outputs - targets)[..., 0] ** 2
    if kind == "multi_label_classification":
        s, t = expit(outputs / HEAT), expit(targets / HEAT)
        return HEAT**2 * (rel_entr(t, s) + rel_entr(1 - t, 1 - s)).mean(-1)
    return HEAT**2 * rel_entr(softmax(targets / HEAT, -1), softmax(outputs / HEAT, -1)).sum(-1)


@pytest.mark.medium
@pytest.mark.parametrize("kind", TEACHER_LOSSES)
def test_the_losses_are_those_of_the_formula_and_end_at_the_teacher(kind: str) -> None:
    batch, params = batch_of(kind), params_of(kind)
    losses, counts = loss_of(kind).forward(params, batch, None)
    total, weight = losses[TEACHER]
    expected = distances(kind, apply(params, batch, None), batch["targets"]) * batch["target_weights"]
    assert total == pytest.approx(expected.sum(), rel=1e-4)
    assert weight == batch["target_weights"].sum()
    assert set(counts) == set(LOSSES[kind].metrics[1:])
    own = {**batch, "targets": np.asarray(apply(params, batch, None))}
    total, gradient = jax.value_and_grad(lambda params: loss_of(kind).forward(params, own, None)[0][TEACHER][0])(params)
    assert abs(total) < 1e-4
    assert np.abs(gradient["kernel"]).max() < 1e-4


@pytest.mark.medium
@pytest.mark.parametrize("kind", TEACHER_LOSSES)
def test_rows_without_labels_are_in_the_teachers_loss_only(kind: str) -> None:
    loss, batch, params = loss_of(kind), batch_of(kind), params_of(kind)
    first = {name: array[: B - NUM_UNLABELLED] for name, array in batch.items()}
    own = make_task_loss(LOSSES[kind], apply)
    name = LOSSES[kind].metrics[0]

    def of_labels(loss: Loss, batch: Any) -> Any:
        def total(params: Any) -> Any:
            return loss.forward(params, batch, None)[0][name][0]

        return jax.value_and_grad(total)(params)

    expected, gradient = of_labels(own, first)
    total, grads = of_labels(loss, batch)
    assert total == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(grads["kernel"], gradient["kernel"], rtol=1e-5, atol=1e-6)
    weights = loss.weights(batch)
    if kind == "token_classification":
        assert weights[name] == (batch["labels"] >= 0).sum()
    else:  # the expected number of labelled rows, whatever the batch has
        assert weights[name] == pytest.approx((B - 1) * (1 - NUM_UNLABELLED / B))
    assert weights[TEACHER] == batch["target_weights"].sum()
    assert loss.factors == {name: 0.7, TEACHER: 0.3}


@pytest.mark.medium
@pytest.mark.parametrize("kind", TEACHER_LOSSES)
def test_devices_and_micro_batches_do_not_matter(kind: str) -> None:
    loss, batch, params = loss_of(kind), batch_of(kind), params_of(kind)
    expected, sums = sharded_gradients(loss, params, batch, 1, 1)
    for devices, micro_batches in ((4, 1), (2, 4)):
        grads, other = sharded_gradients(loss, params, batch, devices, micro_batches)
        assert_same_gradients(grads, expected)
        for name, pair in sums.items():
            np.testing.assert_allclose(other[name], pair, rtol=1e-5)


@pytest.mark.medium
def test_the_labels_have_the_gradient_of_an_ordinary_run() -> None:
    kind = "sequence_classification"
    batch, params = batch_of(kind), params_of(kind)
    batch |= {"labelled": np.ones(B, np.float32), "labelled_share": np.ones(B, np.float32)}
    grads, _ = sharded_gradients(loss_of(kind, 1e-30), params, batch, 1, 1)
    plain, _ = sharded_gradients(make_task_loss(LOSSES[kind], apply), params, batch_of(kind, taught=False), 1, 1)
    np.testing.assert_allclose(grads["kernel"], plain["kernel"], rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_labelled_rows_that_are_rarer_than_batches_keep_their_weight() -> None:
    """The expected number of labelled rows of a batch may be below 1."""
    kind = "sequence_classification"
    batch, params = batch_of(kind), params_of(kind)
    scaled = []
    for share in (0.5, 0.1 / B):
        batch |= {"labelled_share": np.full(B, share, np.float32)}
        grads, _ = sharded_gradients(loss_of(kind, 1e-30), params, batch, 1, 1)
        scaled.append(grads["kernel"] * share)
    np.testing.assert_allclose(scaled[1], scaled[0], rtol=1e-5, atol=1e-8)


def test_stored_outputs_are_used_for_the_same_rows_and_weights_only(tmp_path: Path) -> None:
    targets = RANDOM.normal(size=(4, 2)).astype(np.float32)
    rows = TaughtRows(None, targets, 4, None, "key")  # type: ignore[arg-type]
    save_targets(tmp_path, rows)
    np.testing.assert_array_equal(_read_targets(tmp_path / TARGETS_FILE, "key"), targets)
    assert _read_targets(tmp_path / TARGETS_FILE, "other") is None
    save_targets(tmp_path, dataclasses.replace(rows, key="other", targets=targets + 1))
    np.testing.assert_array_equal(_read_targets(tmp_path / TARGETS_FILE, "other"), targets + 1)
    whole = (tmp_path / TARGETS_FILE).read_bytes()
    for damaged in (b"", whole[:100], whole[:-30], b"no archive"):
        (tmp_path / TARGETS_FILE).write_bytes(damaged)
        assert _read_targets(tmp_path / TARGETS_FILE, "other") is None
    assert _read_targets(tmp_path / "none.npz", "other") is None


def test_keys_that_do_not_fit_a_teacher_are_errors() -> None:
    config = FinetuneConfig(init="X", data=TaskDataConfig(dir="D"), training=TrainingConfig(epochs=1))
    config.check()
    taught = dataclasses.replace(config, distillation=TaskDistillationConfig("X"))
    taught.check()
    for changed, words in (
        (dataclasses.replace(config, data=dataclasses.replace(config.data, unlabelled="u.txt")), "data.unlabelled"),
        (dataclasses.replace(config, distillation=TaskDistillationConfig(temperature=3.0)), "distillation.temperature"),
        (dataclasses.replace(taught, distillation=TaskDistillationConfig("X", weight=1.5)), "distillation.weight"),
        (dataclasses.replace(taught, language_model_weight=0.5), "language_model_weight"),
        (dataclasses.replace(taught, classifier_training="contrastive"), "distillation.teacher.*classifier_training"),
        (dataclasses.replace(config, init="none", num_init_layers=1), "num_init_layers"),
    ):
        with pytest.raises(UserError, match=words):
            changed.check()
