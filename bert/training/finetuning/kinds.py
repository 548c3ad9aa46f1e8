"""Model, loss and evaluators of each kind of task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from tokenizers import Tokenizer

from bert.config import Decoding, FinetuneConfig
from bert.data.multi_text_rows import target_boundaries
from bert.errors import UserError
from bert.inference.load import architecture_of
from bert.model.decoders import BertForSequenceToSequence, ClassifierWithLanguageModel
from bert.model.dropout import Dropout
from bert.model.execution import LayerExecution
from bert.model.heads import HEADS, BertForEmbedding
from bert.parallel.backends import Parallelism
from bert.tasks.base import Task
from bert.tasks.embedding import EmbeddingTask
from bert.tasks.reranker import RerankerTask
from bert.tasks.sequence_to_sequence import HEAD, SequenceToSequenceTask
from bert.training.finetuning.evaluation import Evaluator, SequenceEvaluator, TaskEvaluator
from bert.training.finetuning.initialization import Head
from bert.training.finetuning.ranking_losses import embed_rows, embedding_loss, make_embedding_loss, reranker_loss
from bert.training.initialization import Params
from bert.training.losses import LOSSES, Apply, Batch, Loss, TaskLoss, make_task_loss, with_class_weights
from bert.training.optimizer import ParameterPath
from bert.training.token_losses import make_classifier_loss, sequence_loss


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


def make_evaluators(
    task: Task, apply: Apply, parallel: Parallelism, config: FinetuneConfig, tokenizer: Tokenizer
) -> tuple[Evaluator, Evaluator]:
    """What scores dev in training, and what makes the final predictions: of a decoder the one is greedy, and the other
    has the settings of ``decoding``.

    Args:
        tokenizer: of what the task writes, if it writes.
    """
    loss = task_loss(task, config, parallel.axis)
    if not isinstance(task, SequenceToSequenceTask):
        evaluator = TaskEvaluator(apply, loss, parallel, config)
        return evaluator, evaluator
    greedy = Decoding(max_tokens=config.decoding.max_tokens)
    parts = (apply, loss, parallel, config, target_boundaries(tokenizer))
    in_training = SequenceEvaluator(*parts, greedy)
    return in_training, in_training if config.decoding == greedy else SequenceEvaluator(*parts, config.decoding)


def build_model_and_loss(
    task: Task, config: FinetuneConfig, frozen: Callable[[ParameterPath], bool] | None, axis: str | None
) -> tuple[nn.Module, Apply, Loss]:
    """The model that is trained, the task's outputs of its parameters, and what is minimised. Raises UserError."""
    model, loss = build_task_model(task, config), task_loss(task, config, axis)
    apply = make_apply(model, frozen)
    if isinstance(task, EmbeddingTask):
        return model, apply, make_embedding_loss(loss, apply)
    if not config.language_model_weight:
        return model, apply, make_task_loss(loss, apply)
    both = build_classifier_with_language_model(task, config)
    factor, vocab_size = config.language_model_weight, config.model.known_vocab_size
    return both, apply, make_classifier_loss(loss, make_apply(both, frozen), factor, vocab_size)


def head_of_task(task: Task, num_feature_layers: int | None) -> Head:
    """The head that a run trains."""
    return Head(architecture_of(task), task.problem_type, task.output_names, task.output_words, num_feature_layers)
