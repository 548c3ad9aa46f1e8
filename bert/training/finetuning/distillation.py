"""Distillation of a fine-tuned model: the student learns the teacher's outputs in addition to the labels.

Follows Hinton et al. 2015 (section 2): the weighted sum of the loss of the labels and the divergence from the teacher's
softened distribution. The teacher reads every row once, before training and without dropout. Teacher and student share
texts and labels, but no token ids, so their vocabularies may differ.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer

from bert.config import FinetuneConfig
from bert.data.rows import digest_of
from bert.errors import Log, UserError, require
from bert.files import atomic_write
from bert.inference.load import load
from bert.inference.pretrained import Pretrained
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.parameters import params_checksum
from bert.tasks.base import Task
from bert.tasks.teaching import (
    TaughtRows,
    inputs_of,
    output_order,
    read_unlabelled,
    values_per_input,
    with_unlabelled,
    word_numbers,
)
from bert.training.finetuning.evaluation import Split
from bert.training.losses import (
    Apply,
    Batch,
    Loss,
    TaskLoss,
    WeightedSum,
    WeightedSums,
    expected_rows,
    softened_divergence,
)

TEACHER = "teacher_loss"

TARGETS_FILE = "teacher_outputs.npz"
"""File in the run's folder with the teacher's outputs for the training rows, for a run that resumes."""

INPUTS_AT_ONCE = 8192
"""Number of inputs that the teacher tokenizes and answers at a time, which bounds the memory."""


# Losses


def _divergence(temperature: float, logits: Float[Array, "B L"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes temperature² * KL(teacher || student) for logits [B, L], or [B, T, L] with a target per token."""
    losses = softened_divergence(logits.astype(jnp.float32), batch["targets"], temperature)
    return (_weighted_sum(losses, batch),)


def _binary_divergence(temperature: float, logits: Float[Array, "B L"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes temperature² * KL(teacher || student) of each label's probability, as the mean over the labels."""
    student, teacher = logits.astype(jnp.float32) / temperature, batch["targets"] / temperature
    losses = sum(
        jax.nn.sigmoid(sign * teacher) * (jax.nn.log_sigmoid(sign * teacher) - jax.nn.log_sigmoid(sign * student))
        for sign in (1, -1)
    )
    return (_weighted_sum(temperature**2 * jnp.mean(losses, axis=-1), batch),)


def _squared_error(temperature: float, outputs: Float[Array, "B 1"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the squared difference of the scores. Scores have no temperature."""
    return (_weighted_sum(jnp.square(outputs[..., 0].astype(jnp.float32) - batch["targets"][..., 0]), batch),)


def _weighted_sum(losses: Array, batch: Batch) -> WeightedSum:
    return jnp.sum(losses * batch["target_weights"]), jnp.sum(batch["target_weights"])


TEACHER_LOSSES = {
    "sequence_classification": _divergence,
    "multi_label_classification": _binary_divergence,
    "regression": _squared_error,
    "token_classification": _divergence,
}
"""The loss against a teacher's outputs, by the keys of `bert.training.losses.LOSSES`."""


def make_distilled_loss(loss: TaskLoss, kind: str, config: FinetuneConfig, apply: Apply) -> Loss:
    """Returns the weighted sum of a task's loss of the labels and the loss against the teacher's outputs.

    Args:
        kind: a key of `TEACHER_LOSSES`.
        apply: computes the outputs of the task's head.
    """
    settings, name = config.distillation, loss.metrics[0]
    teacher_sums = partial(TEACHER_LOSSES[kind], settings.temperature)
    weight_of_targets = _sum_of_weights if kind == "token_classification" else expected_rows

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        outputs = apply(params, batch, dropout)
        (_, labels), *counts = zip(loss.metrics, loss.sums(outputs, _labelled(batch)), strict=True)
        [teacher] = teacher_sums(outputs, batch)
        return {name: labels, TEACHER: teacher}, dict(counts)

    def weights(batch: Batch) -> dict[str, Array]:
        return {name: loss.weight(_labelled(batch)), TEACHER: weight_of_targets(batch)}

    factors = {name: 1 - settings.weight, TEACHER: settings.weight}
    return Loss(forward, weights, (name, TEACHER, *loss.metrics[1:]), factors)


def _sum_of_weights(batch: Batch) -> Array:
    return jnp.sum(batch["target_weights"])


def _labelled(batch: Batch) -> Mapping[str, Array]:
    """Returns the batch with a weight of 0 for rows without labels.

    A loss per row is divided by the expected number of labelled rows. Dividing by the batch's own number would give a
    row among few labelled ones more weight than a row among many.
    """
    expected = batch.get("mean_rows", batch["weights"]) * batch["labelled_share"]
    return {**batch, "weights": batch["weights"] * batch["labelled"], "mean_rows": expected}


# Rows


def teach(
    folder: Path, config: FinetuneConfig, task: Task, train: Split, tokenizer: Tokenizer, log: Log
) -> tuple[FinetuneConfig, TaughtRows]:
    """Adds the rows without labels to the training rows, and the teacher's outputs to all rows.

    Args:
        folder: folder of the run, which holds the outputs if the run has begun.
        tokenizer: the student's tokenizer.

    Returns:
        The configuration with the teacher's checksum, and the rows.

    Raises:
        UserError: the teacher cannot be used, differs from the one that the run began with, or has other labels; or the
            texts without labels cannot be read.
    """
    settings, source = config.distillation, require(config.distillation.teacher, "distillation.teacher")
    teacher = load(source, log)
    order = output_order(task, teacher.require_task(), source)
    checksum = params_checksum(teacher.params)
    if settings.checksum not in (None, checksum):
        raise UserError(
            f"distillation.teacher {source} is not the model that the run began with: restore it, or set "
            "distillation.checksum to null and pass another --output_dir"
        )
    examples, features = train
    unlabelled = read_unlabelled(task, config.data)
    if unlabelled is not None:
        examples = with_unlabelled(task, train.examples, unlabelled)
        features = task.features(tokenizer, examples, config.data)
    key = digest_of(np.frombuffer(f"{checksum} {features.digest()} {order}".encode(), np.uint8))
    sizes = f"{teacher.config.num_hidden_layers} layers of {teacher.config.hidden_size}"
    log(f"teacher {source}: {sizes}, checksum {checksum[:16]}, {len(examples):,} rows")
    targets = _read_targets(folder / TARGETS_FILE, key)
    if targets is None:
        targets = _answers(teacher, inputs_of(task, examples), source, config.training.rows_per_evaluation)[:, order]
    rows = TaughtRows(features, targets, len(train.features), word_numbers(features), key)
    return dataclasses.replace(config, distillation=dataclasses.replace(settings, checksum=checksum)), rows


def _answers(teacher: Pretrained, inputs: Any, source: str, batch_size: int) -> np.ndarray:
    """Returns the teacher's outputs of all inputs or, for tags, of all words."""
    task, answers = teacher.require_task(), []
    for start in range(0, len(inputs), INPUTS_AT_ONCE):
        try:
            examples = task.examples_from_inputs(inputs[start : start + INPUTS_AT_ONCE])
        except UserError as error:
            raise UserError(f"the teacher {source}: {error}") from None
        features = task.features(teacher.tokenizer, examples, teacher.data)
        outputs = teacher.outputs(features, batch_size)
        if task.problem_type == "regression":  # a published model may scale its scores
            outputs = list(np.reshape(task.predict(outputs, features, examples), (-1, 1)))
        answers.append(values_per_input(outputs, features, task.num_labels))
    return np.concatenate(answers)


def _read_targets(path: Path, key: str) -> np.ndarray | None:
    """Returns the stored outputs of the teacher; None if there are none for these rows and weights."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return stored["targets"] if str(stored["key"]) == key else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def save_targets(folder: Path, rows: TaughtRows) -> None:
    """Writes the teacher's outputs into the folder of a run, unless it has them."""
    path = folder / TARGETS_FILE
    if _read_targets(path, rows.key) is None:
        with atomic_write(path) as partial_file, partial_file.open("wb") as file:
            np.savez(file, key=np.array(rows.key), targets=rows.targets)
