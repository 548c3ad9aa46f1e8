"""The contrastive loss of a classifier's vectors, and the classifier that is fitted to them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax
from sklearn.linear_model import LogisticRegression

from bert.config import FinetuneConfig, ModelConfig, TaskDataConfig, TrainingConfig
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.sequence_classification import CustomClassification
from bert.tasks.sequence_classification.base import Examples
from bert.training.finetuning import contrastive
from bert.training.length_groups import SequenceOutputs

CONFIG = FinetuneConfig(
    task="classification",
    classifier_training="contrastive",
    init="encoder",
    training=TrainingConfig(steps=1),
    data=TaskDataConfig(dir="x"),
)


@pytest.mark.medium
@pytest.mark.parametrize("num_labels", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_dense_layer_is_scikit_learns_logistic_regression(num_labels: int, weighted: bool) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(24) % num_labels
    vectors = random.normal(size=(24, 16)) + np.eye(16)[labels]
    weights = (1.0, 3.0, 0.5)[:num_labels] if weighted else ()
    layer = contrastive.fit_classifier(vectors.astype(np.float32), labels, num_labels, weights)
    regression = LogisticRegression(
        C=contrastive.INVERSE_REGULARIZATION, class_weight=dict(enumerate(weights)) or None, tol=1e-9, max_iter=10000
    ).fit(vectors / 4, labels)
    new = random.normal(size=(8, 16))
    probabilities = softmax(new @ layer["kernel"] + layer["bias"], axis=1)
    np.testing.assert_allclose(probabilities, regression.predict_proba(new / 4), atol=1e-3)


@pytest.mark.medium
def test_the_loss_compares_each_row_with_all_others() -> None:
    vectors, labels = np.random.default_rng(0).normal(size=(6, 4)), np.array([0, 1, 0, 1, 0, 2])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    losses = []
    for row in range(5):  # no other row has the label of the last one
        others = [other for other in range(6) if other != row]
        logits = unit[others] @ unit[row] / contrastive.TEMPERATURE
        same = labels[others] == labels[row]
        losses.append(np.mean(logsumexp(logits) - logits[same]))
    batch = {"labels": labels, "rows": np.arange(6), "weights": np.ones(6, np.float32)}
    loss = contrastive.contrastive_loss(None)
    order = np.array([3, 0, 5, 1, 2, 4])  # groups have any order
    outputs = SequenceOutputs(jnp.asarray(vectors[order]), jnp.asarray(order))
    [(total, weight)] = loss.sums(outputs, {name: jnp.asarray(array) for name, array in batch.items()})
    assert total / weight == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_label_with_one_row_is_an_error() -> None:
    task = CustomClassification(labels=("billing", "login"), label_names=("billing", "login"))
    examples = Examples(["a", "b", "c"], None, np.array([0, 0, 1]), ["0", "1", "2"])
    with pytest.raises(UserError, match=r"'login' has 1 of the 3 training rows"):
        contrastive.check_rows_per_label(task, examples)


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"num_feature_layers": 1}, "num_feature_layers"),
        ({"language_model_weight": 0.5}, "language_model_weight"),
        ({"training": TrainingConfig(steps=1, tokens_per_batch=512)}, "training.tokens_per_batch"),
        ({"training": TrainingConfig(steps=1, average_checkpoints=2)}, "training.average_checkpoints"),
    ],
)
def test_settings_that_a_fitted_classifier_lacks_are_errors(changes: dict, other: str) -> None:
    with pytest.raises(UserError, match=f"classifier_training is contrastive, but {other}"):
        dataclasses.replace(CONFIG, **changes).check()


def test_the_encoder_must_pool_by_the_mean() -> None:
    config = dataclasses.replace(CONFIG, model=ModelConfig(vocab_size=100))
    with pytest.raises(UserError, match=r"classifier_training .* mean of the tokens.*classifier_pooling"):
        config.check_model()


@pytest.mark.parametrize("task", ["multilabel", "regression", "tagging"])
def test_tasks_without_one_label_per_text_are_errors(task: str) -> None:
    with pytest.raises(UserError, match=f"classifier_training.* the task is {task}"):
        make_task(dataclasses.replace(CONFIG, task=task))
