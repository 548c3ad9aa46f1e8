"""Classifiers for few labels: contrastive training of the encoder, then logistic regression on its vectors.

This is the method of SetFit (Tunstall et al. 2022), with all pairs of a batch instead of sampled pairs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from bert.errors import UserError
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.reductions import normalized
from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main
from bert.tasks.base import Task
from bert.training.finetuning.evaluation import Evaluator, Split
from bert.training.finetuning.ranking_losses import same_label_loss
from bert.training.length_groups import SequenceOutputs, apply_to_groups
from bert.training.losses import Batch, TaskLoss, WeightedSum
from bert.training.step import TrainState

TEMPERATURE = 0.05
"""Divisor of the cosines in the contrastive loss."""

INVERSE_REGULARIZATION = 10.0
"""C of scikit-learn's LogisticRegression, for vectors of length 1."""

MIN_ROWS = 2
"""Minimum number of training rows of each label, because rows with the same label are compared."""


def row_vectors(model: nn.Module, variables: Any, batch: Batch, dropout: Dropout | None) -> Float[Array, "M D"]:
    """Returns the inputs of the classifier for rows or groups (`apply_to_groups`)."""
    return apply_to_groups(partial(model.apply, variables, method=_row_features), batch, dropout)


def _row_features(model: Any, *inputs: Any, dropout: Dropout | None) -> Float[Array, "B D"]:
    features: Array = model.row_features(inputs, dropout)
    return features.astype(jnp.float32)


def contrastive_loss(axis: str | None, maximum: bool = False) -> TaskLoss:
    """Returns `same_label_loss` as a function of the outputs of `row_vectors` and labels [B].

    Args:
        axis, maximum: see `bert.training.finetuning.ranking_losses.embedding_loss`.
    """

    def sums(outputs: SequenceOutputs, batch: Batch) -> tuple[WeightedSum, ...]:
        vectors = outputs.of_rows(batch, axis, maximum)
        labels = jnp.stack([batch["labels"], batch["rows"]], axis=1)  # a row is not compared with itself
        loss, _ = same_label_loss(normalized(vectors)[:, None], {**batch, "labels": labels}, TEMPERATURE, axis)
        return (loss,)

    return TaskLoss(sums, lambda batch: jnp.sum(batch["weights"]), ("same_label_loss",), by_length=False)


def check_rows_per_label(task: Task, examples: Any) -> None:
    """Raises UserError if a label has fewer than `MIN_ROWS` training rows."""
    counts = task.rows_by_label(examples)
    rare = [
        f"{label!r} has {count}" for label, count in zip(task.output_words, counts, strict=True) if count < MIN_ROWS
    ]
    if rare:
        raise UserError(
            f"classifier_training is contrastive, which compares training rows with the same label, but the label "
            f"{rare[0]} of the {len(examples):,} training rows: label at least {MIN_ROWS} rows of each label, or lower "
            "data.dev_fraction if dev is held out of them"
        )


def fit_classifier(
    vectors: Float[np.ndarray, "R D"], labels: np.ndarray, num_labels: int, class_weights: Sequence[float] = ()
) -> dict[str, np.ndarray]:
    """Fits logistic regression (scikit-learn), and returns the parameters of the equivalent dense layer.

    The vectors are multiplied by 1 / sqrt(D), which scales standardized vectors to length 1. With two labels, the
    logits are -z / 2 and z / 2 for the log odds z.

    Returns:
        kernel [D, L] and bias [L], float32.
    """
    from sklearn.linear_model import LogisticRegression

    scale = 1 / math.sqrt(vectors.shape[1])
    weights = dict(enumerate(class_weights)) or None
    regression = LogisticRegression(C=INVERSE_REGULARIZATION, class_weight=weights, tol=1e-6, max_iter=1000)
    regression.fit(np.asarray(vectors, np.float64) * scale, labels)
    kernel, bias = regression.coef_.T * scale, regression.intercept_
    if num_labels == 2:
        kernel, bias = (np.concatenate([-half, half], axis=-1) for half in (kernel / 2, bias / 2))
    return {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}


def make_classifier_fit(
    evaluator: Evaluator, task: Task, train: Split, parallel: Parallelism, merge: Callable[[Any], Any]
) -> Callable[[TrainState], TrainState]:
    """Returns a function that replaces the classifier of a state on the devices by `fit_classifier` on all rows.

    Args:
        evaluator: computes `row_vectors`.
        train: the training rows.
        merge: maps the state's parameters to the model's, both on the devices.
    """
    features: Any = train.features
    labels = np.asarray(features.labels)
    rows = Split(train.examples, dataclasses.replace(features, labels=None))

    def fit(state: TrainState) -> TrainState:
        vectors = np.stack(list(evaluator(merge(state.params), rows)[0]))

        def fitted() -> dict[str, Any]:
            layer = fit_classifier(vectors, labels, task.num_labels, task.class_weights)
            return {name: array.tolist() for name, array in layer.items()}

        layer = {name: np.array(values, np.float32) for name, values in broadcast_from_main(fitted).items()}
        return state.replace(params={**state.params, **parallel.put_state({"classifier": layer})})

    return fit
