"""Models with their objectives, put together from a configuration: for training, `bert plan`, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import FinetuneConfig, PretrainConfig
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.model.execution import LayerExecution
from bert.model.heads import HEADS
from bert.model.language_model import ClassifierWithLanguageModel
from bert.model.text_embedding import BertForEmbedding
from bert.parallel.backends import Parallelism
from bert.tasks.base import Task
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.reranker import RerankerTask
from bert.tasks.sequence_to_sequence import HEAD
from bert.training.distillation import Distillation, Teacher, with_projections
from bert.training.embedding_losses import embed_rows, embedding_loss
from bert.training.initialization import Initializable, Params
from bert.training.losses import LOSSES, Apply, Batch, Objective, TaskLoss, with_class_weights
from bert.training.optimizer import ParameterPath
from bert.training.predictions import PREDICTIONS
from bert.training.reranker_losses import reranker_loss
from bert.training.token_losses import sequence_loss

MakeBody = Callable[[Objective], Callable[..., Any]]
"""Objective -> body of a step or of an evaluation, (state or parameters, batch) -> anything."""


def build_model_and_objective(
    config: PretrainConfig, devices: Sequence[Any] | None = None
) -> tuple[nn.Module, Objective]:
    """The model of a pretraining run, and the objective that it is trained with.

    Args:
        devices: those that it is compiled for; None for the local ones.

    Raises:
        UserError: the devices cannot run the model as the configuration demands.
    """
    prediction = PREDICTIONS[config.data.prediction]
    model = prediction.build_model(config, lambda sizes: LayerExecution.from_config(config.training, sizes, devices))
    return model, prediction.build_objective(model, config)


class Learner(NamedTuple):
    """What a pretraining run trains.

    Attributes:
        model: draws the initial parameters.
        metrics: names of the losses and counts of a step.
        loss_factors: those of the `Objective`.
        compile: (objective -> body of a step, donated arguments) -> the body over all devices.
    """

    model: Initializable
    metrics: tuple[str, ...]
    loss_factors: Mapping[str, float]
    compile: Callable[[MakeBody, Sequence[int]], Callable[..., Any]]


def build_learner(config: PretrainConfig, teacher: Teacher | None, parallel: Parallelism) -> Learner:
    """The model and objective of a pretraining run on its devices, which keep the teacher's parameters as well."""
    model, objective = build_model_and_objective(config)
    if teacher is None:
        return Learner(
            model,
            objective.metrics,
            objective.factors,
            lambda make_body, donate: parallel.compile(make_body(objective), donate),
        )
    distillation = Distillation(objective, model, teacher, config)
    teacher_params = parallel.put_state(teacher.params)

    def compile_with_teacher(make_body: MakeBody, donate: Sequence[int]) -> Callable[..., Any]:
        def body(state: Any, batch: Any, params: Params) -> Any:
            return make_body(distillation.bind(params))(state, batch)

        compiled = parallel.compile(body, donate)
        return lambda state, batch: compiled(state, batch, teacher_params)

    projected = with_projections(model, config, teacher)
    return Learner(projected, distillation.metrics, distillation.loss_factors, compile_with_teacher)


def build_task_model(task: Task, config: FinetuneConfig) -> nn.Module:
    """The encoder with a task's head, or with a decoder. Raises UserError if the devices cannot run it as the
    configuration demands."""
    execution = LayerExecution.from_config(config.training, config.model)
    if task.head == HEAD:
        return BertForSequenceToSequence(config.model, jnp.dtype(config.training.dtype), execution)
    if isinstance(task, EmbeddingTask):
        pooling = task.settings.pooling or "mean"
        return BertForEmbedding(config.model, jnp.dtype(config.training.dtype), pooling, execution)
    # Without the default, so that custom heads need no field `execution`.
    options = {} if execution == LayerExecution() else {"execution": execution}
    return HEADS[task.head](
        config.model,
        task.num_labels,
        config.classifier_dropout,
        jnp.dtype(config.training.dtype),
        config.num_feature_layers,
        **options,
    )


def task_loss(task: Task, config: FinetuneConfig, axis: str | None = None) -> TaskLoss:
    """The loss of a task, of what `make_apply` gives.

    Args:
        axis: that of `Parallelism`, for a loss that compares the rows of all devices.
    """
    if isinstance(task, EmbeddingTask):
        return embedding_loss(config.embedding, axis)
    if isinstance(task, RerankerTask):
        return reranker_loss(config.reranker)
    if task.head == HEAD:
        return sequence_loss(config.training.label_smoothing, config.model.decoder.known_vocab_size)
    return with_class_weights(task.loss, task.class_weights) if task.class_weights else LOSSES[task.loss]


def build_classifier_with_language_model(task: Task, config: FinetuneConfig) -> nn.Module:
    """The model that is trained with ``language_model_weight``. Raises UserError for a task without a label a text."""
    if task.head != "classification":
        raise UserError(
            f"language_model_weight is {config.language_model_weight}, and {task.name} neither classifies nor scores "
            "texts: remove it"
        )
    return ClassifierWithLanguageModel(
        config.model,
        task.num_labels,
        config.classifier_dropout,
        jnp.dtype(config.training.dtype),
        LayerExecution.from_config(config.training, config.model),
    )


def make_apply(model: nn.Module, frozen: Callable[[ParameterPath], bool] | None) -> Apply:
    """(params, batch, dropout) -> the head's outputs, the embeddings of all texts of a row, or what a decoder's loss
    reads, without gradients of ``frozen`` parameters."""
    is_decoder = isinstance(model, BertForSequenceToSequence)

    def stop_gradients(params: Params) -> Any:
        if frozen is None:
            return params
        return traverse_util.path_aware_map(lambda path, x: jax.lax.stop_gradient(x) if frozen(path) else x, params)

    def apply(params: Params, batch: Batch, dropout: Dropout | None) -> Any:
        variables = {"params": stop_gradients(params)}
        if is_decoder:
            return model.apply(variables, batch, dropout, method=_read_targets)
        if isinstance(model, BertForEmbedding):
            return embed_rows(model, variables, batch, dropout)
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        return model.apply(variables, *inputs, dropout=dropout)

    return apply


def _read_targets(
    model: BertForSequenceToSequence, batch: Batch, dropout: Dropout | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the decoder's matrix reads of each target token, the matrix and its bias."""
    inputs = (batch["input_ids"], batch["target_ids"], batch["attention_mask"])
    return model.hidden_states(*inputs, dropout=dropout), *model.decoder_weights()
