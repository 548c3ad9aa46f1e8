"""Model, loss and evaluators of each kind of task: the table `TASK_KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from tokenizers import Tokenizer

from bert.config import Decoding, FinetuneConfig
from bert.data.encoding import target_boundaries
from bert.errors import Log, UserError
from bert.inference.load import architecture_of
from bert.model.copying import Copying
from bert.model.decoders import BertForSequenceToSequence, ClassifierWithLanguageModel
from bert.model.dropout import Dropout
from bert.model.heads import HEADS, BertForEmbedding
from bert.model.layers import LayerExecution
from bert.model.names import COPY_ATTENTION, PROJECTION
from bert.model.packing import packing_variables
from bert.model.parameters import Params
from bert.model.pooling import Pooling
from bert.model.reductions import pool_windows
from bert.parallel.backends import Parallelism
from bert.tasks import register_task
from bert.tasks.base import Task
from bert.training.finetuning.contrastive import contrastive_loss, row_vectors
from bert.training.finetuning.distillation import TEACHER_LOSSES, make_distilled_loss
from bert.training.finetuning.embedding_defaults import resolve_pooling
from bert.training.finetuning.evaluation import Evaluator, SequenceEvaluator, TaskEvaluator
from bert.training.finetuning.initialization import EncoderDecoderInit, Head, decoder_source
from bert.training.finetuning.ranking_losses import embed, embedding_loss, make_embedding_loss, reranker_loss
from bert.training.initialization import Initializable
from bert.training.losses import LOSSES, Apply, Batch, Loss, TaskLoss, make_task_loss, with_class_weights
from bert.training.optimizer import STACKS, ParameterPath
from bert.training.token_losses import make_classifier_loss, sequence_loss

Evaluators = tuple[Evaluator, Evaluator]
"""The evaluator of dev during training, and the evaluator that makes the final predictions."""


def build_head(task: Task, config: FinetuneConfig, execution: LayerExecution) -> nn.Module:
    """Returns the encoder with the head of the task's kind in `HEADS`."""
    # The default is omitted because custom heads may lack the field `execution`.
    options = {} if execution == LayerExecution() else {"execution": execution}
    return HEADS[task.kind](
        config.model,
        task.num_labels,
        config.classifier_dropout,
        jnp.dtype(config.training.dtype),
        config.num_feature_layers,
        **options,
    )


def apply_head(model: nn.Module, variables: Any, batch: Batch, dropout: Dropout | None, maximum: bool = False) -> Any:
    """Returns the outputs of the head; for texts with windows, the mean or maximum over the windows."""
    inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
    apply = partial(model.apply, variables)
    if "window_mask" in batch:
        return pool_windows(apply, inputs, batch["window_mask"], dropout, maximum)
    return apply(*inputs, dropout=dropout)


def one_evaluator(
    apply: Apply, loss: TaskLoss, parallel: Parallelism, config: FinetuneConfig, tokenizer: Tokenizer
) -> Evaluators:
    """Returns the same evaluator twice, because the outputs do not depend on settings of the final predictions."""
    evaluator = TaskEvaluator(apply, loss, parallel, config)
    return evaluator, evaluator


@dataclass(frozen=True)
class TaskKind:
    """How the tasks of one kind are trained and evaluated.

    Attributes:
        loss: (task, configuration, device axis or None) -> the loss of the outputs of ``forward``.
        build_model: (task, configuration, execution of the layers) -> the model.
        forward: (model, variables, batch, dropout or None) -> the outputs for the loss.
        make_loss: (loss of the outputs, apply) -> the `Loss` that a step minimizes.
        make_evaluators: (apply, loss of the outputs, devices, configuration, vocabulary of the targets) -> evaluators.
        resolve: (configuration, pooling that the initial model declares, tokenizer, name of the model, log) -> the
            configuration with defaults that depend on the initial model. It may add special tokens to the tokenizer.
        init_modules: modules that are copied from ``init`` in addition to the output layer.
        init_params: (configuration, parameters of ``init``, its name) -> the parameters to copy from.
        initializable: model -> the object that draws its initial parameters.
        stacks: modules with layers, to which LoRA adapters are added.
        classifies_rows: whether the head reads one vector per row, as ``classifier_pooling`` sets.
        has_decoder: whether the model has the decoder of ``init``, if ``init`` has one.
        with_language_model: (task, configuration) -> the model with a language model as auxiliary loss; None if
            ``language_model_weight`` is not supported.
    """

    loss: Callable[[Task, FinetuneConfig, str | None], TaskLoss]
    build_model: Callable[[Task, FinetuneConfig, LayerExecution], nn.Module] = build_head
    forward: Callable[..., Any] = apply_head
    make_loss: Callable[[TaskLoss, Apply], Loss] = make_task_loss
    make_evaluators: Callable[[Apply, TaskLoss, Parallelism, FinetuneConfig, Tokenizer], Evaluators] = one_evaluator
    resolve: Callable[[FinetuneConfig, Pooling | None, Tokenizer, str, Log], FinetuneConfig] = lambda config, *_: config
    init_modules: tuple[str, ...] = ("bert", "predictions")
    init_params: Callable[[FinetuneConfig, Params, str], Params] = lambda config, params, name: params
    initializable: Callable[[Any], Initializable] = lambda model: model
    stacks: tuple[str, ...] = ("bert",)
    classifies_rows: bool = False
    has_decoder: bool = False
    with_language_model: Callable[[Task, FinetuneConfig], nn.Module] | None = None


def _fixed_loss(task: Task, config: FinetuneConfig, axis: str | None) -> TaskLoss:
    return LOSSES[task.kind]


# Sequence classification


def _classification_loss(task: Task, config: FinetuneConfig, axis: str | None) -> TaskLoss:
    loss = LOSSES[task.problem_type or task.kind]
    return with_class_weights(loss, task.class_weights) if task.class_weights else loss


def _classifier_with_language_model(task: Task, config: FinetuneConfig) -> nn.Module:
    return ClassifierWithLanguageModel(
        config.model,
        task.num_labels,
        config.classifier_dropout,
        jnp.dtype(config.training.dtype),
        LayerExecution.from_config(config.training, config.model),
    )


# Embeddings


def _embedding_loss(task: Task, config: FinetuneConfig, axis: str | None) -> TaskLoss:
    return embedding_loss(config.embedding, axis, config.data.long_texts == "windows_max")


def _embedding_model(task: Task, config: FinetuneConfig, execution: LayerExecution) -> nn.Module:
    pooling = config.embedding.pooling or "mean"
    normalize, dimensions = bool(config.embedding.normalize), config.embedding.token_dimensions
    return BertForEmbedding(config.model, jnp.dtype(config.training.dtype), pooling, execution, normalize, dimensions)


# Sequence to sequence


def _encoder_decoder(task: Task, config: FinetuneConfig, execution: LayerExecution) -> nn.Module:
    return BertForSequenceToSequence(config.model, jnp.dtype(config.training.dtype), execution)


def _apply_decoder(model: nn.Module, variables: Any, batch: Batch, dropout: Dropout | None) -> Any:
    return model.apply(variables, batch, dropout, method=_hidden_targets)


def _hidden_targets(
    model: BertForSequenceToSequence, batch: Batch, dropout: Dropout | None
) -> tuple[jax.Array, jax.Array, jax.Array, Copying | None]:
    """Returns the hidden states of the targets, the matrix and bias of the output layer, and the copies."""
    inputs = (batch["input_ids"], batch["target_ids"], batch["attention_mask"])
    hidden, copying = model.hidden_states(*inputs, dropout=dropout)
    return hidden, *model.decoder_weights(), copying


def _sequence_loss(task: Task, config: FinetuneConfig, axis: str | None) -> TaskLoss:
    model = config.model.decoder
    return sequence_loss(config.training.label_smoothing, model.known_vocab_size, model.prediction_softcap)


def _sequence_evaluators(
    apply: Apply, loss: TaskLoss, parallel: Parallelism, config: FinetuneConfig, tokenizer: Tokenizer
) -> Evaluators:
    """Returns a greedy evaluator for training, and an evaluator with the settings of ``decoding``."""
    greedy = Decoding(max_tokens=config.decoding.max_tokens)
    parts = (apply, loss, parallel, config, target_boundaries(tokenizer))
    in_training = SequenceEvaluator(*parts, greedy)
    return in_training, in_training if config.decoding == greedy else SequenceEvaluator(*parts, config.decoding)


TASK_KINDS: dict[str, TaskKind] = {
    "sequence_classification": TaskKind(
        _classification_loss, classifies_rows=True, with_language_model=_classifier_with_language_model
    ),
    "token_classification": TaskKind(_fixed_loss),
    "question_answering": TaskKind(_fixed_loss),
    "multiple_choice": TaskKind(_fixed_loss),
    "reranker": TaskKind(lambda task, config, axis: reranker_loss(config.reranker)),
    "embedding": TaskKind(
        _embedding_loss,
        build_model=_embedding_model,
        forward=embed,
        make_loss=make_embedding_loss,
        resolve=resolve_pooling,
        init_modules=("bert", "predictions", PROJECTION),
    ),
    "sequence_to_sequence": TaskKind(
        _sequence_loss,
        build_model=_encoder_decoder,
        forward=_apply_decoder,
        make_evaluators=_sequence_evaluators,
        init_modules=("bert", "decoder", "predictions", COPY_ATTENTION),
        init_params=decoder_source,
        initializable=EncoderDecoderInit,
        stacks=STACKS,
        has_decoder=True,
    ),
}
"""The kinds of tasks, by `Task.kind`."""


def register_kind(kind: TaskKind, task: Task, head: type[nn.Module]) -> None:
    """Registers a task of a new kind: a model with another head, or another loss.

    Args:
        kind: the entry of `TASK_KINDS` under the name ``task.kind``.
        head: the model, with the interface of the models in `bert.model.heads.HEADS`.
    """
    TASK_KINDS[task.kind] = kind
    HEADS[task.kind] = head
    register_task(task)


def build_task_model(task: Task, config: FinetuneConfig) -> nn.Module:
    """Returns the model that is trained for a task. Raises UserError if the devices cannot run it as configured."""
    return TASK_KINDS[task.kind].build_model(task, config, LayerExecution.from_config(config.training, config.model))


def task_loss(task: Task, config: FinetuneConfig, axis: str | None = None) -> TaskLoss:
    """Returns the loss of a task's outputs.

    Args:
        axis: the device axis of `Parallelism`, for losses that compare the rows of all devices.
    """
    return TASK_KINDS[task.kind].loss(task, config, axis)


def sorts_by_length(task: Task, config: FinetuneConfig) -> bool:
    """Returns whether the rows of a training batch have similar lengths."""
    has_other_loss = bool(config.language_model_weight) or config.classifier_training == "contrastive"
    return task_loss(task, config).by_length and not has_other_loss and not config.data.packing


def has_groups_of_rows(task: Task, config: FinetuneConfig, loss: Loss) -> bool:
    """Returns whether a training batch is divided into groups of rows (`bert.data.batching.LengthGroups`).

    Batches of rows of similar lengths are not, nor those whose rows are compared or packed. Other devices than CPUs
    would be slower, because a small batch does not occupy them.
    """
    has_similar_rows = sorts_by_length(task, config) or config.training.tokens_per_batch is not None
    is_cpu = jax.default_backend() == "cpu"
    return is_cpu and not has_similar_rows and not loss.over_micro_batches and not config.data.packing


def make_apply(
    model: nn.Module,
    frozen: Callable[[ParameterPath], bool] | None,
    forward: Callable[[nn.Module, Any, Batch, Dropout | None], Any] = apply_head,
) -> Apply:
    """Returns ``forward`` as a function of (params, batch, dropout) without gradients of ``frozen`` parameters."""

    def stop_gradients(params: Params) -> Any:
        if frozen is None:
            return params
        return traverse_util.path_aware_map(lambda path, x: jax.lax.stop_gradient(x) if frozen(path) else x, params)

    def apply(params: Params, batch: Batch, dropout: Dropout | None) -> Any:
        return forward(model, {"params": stop_gradients(params), **packing_variables(batch)}, batch, dropout)

    return apply


def make_evaluators(
    task: Task, apply: Apply, parallel: Parallelism, config: FinetuneConfig, tokenizer: Tokenizer
) -> Evaluators:
    """Returns the evaluators of a task.

    Args:
        tokenizer: the vocabulary of the texts that the task generates, if it generates any.
    """
    loss = task_loss(task, config, parallel.axis)
    return TASK_KINDS[task.kind].make_evaluators(apply, loss, parallel, config, tokenizer)


def build_model_and_loss(
    task: Task, config: FinetuneConfig, frozen: Callable[[ParameterPath], bool] | None, axis: str | None
) -> tuple[nn.Module, Apply, Loss]:
    """Returns the model that is trained, the function that computes its outputs, and the loss of a step.

    Raises:
        UserError: ``language_model_weight`` or a teacher is set for a task that does not support it.
    """
    kind = TASK_KINDS[task.kind]
    model, loss = build_task_model(task, config), task_loss(task, config, axis)
    maximum = config.data.long_texts == "windows_max"
    apply = make_apply(model, frozen, partial(kind.forward, maximum=True) if maximum else kind.forward)
    if config.classifier_training == "contrastive":
        vectors = make_apply(model, frozen, row_vectors)
        return model, apply, make_embedding_loss(contrastive_loss(axis, maximum), vectors)
    if config.distillation.is_used:
        outputs = task.problem_type or task.kind
        if outputs not in TEACHER_LOSSES or kind.make_loss is not make_task_loss:
            raise UserError(
                f"distillation.teacher is {config.distillation.teacher}, but {task.name} neither classifies, scores "
                "nor tags texts: remove it"
            )
        return model, apply, make_distilled_loss(loss, outputs, config, apply)
    if not config.language_model_weight:
        return model, apply, kind.make_loss(loss, apply)
    if kind.with_language_model is None:
        raise UserError(
            f"language_model_weight is {config.language_model_weight}, and {task.name} neither classifies nor scores "
            "texts: remove it"
        )
    both = kind.with_language_model(task, config)
    settings = (config.language_model_weight, config.model.known_vocab_size, config.model.prediction_softcap)
    return both, apply, make_classifier_loss(loss, make_apply(both, frozen), *settings)


def head_of_task(task: Task, num_feature_layers: int | None) -> Head:
    """Returns the description of the head that a run trains."""
    return Head(architecture_of(task), task.problem_type, task.output_names, task.output_words, num_feature_layers)
