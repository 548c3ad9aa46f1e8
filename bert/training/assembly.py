"""Models with their objectives, put together from a configuration: for training, `bert plan`, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import FinetuneConfig, PretrainConfig
from bert.model.dropout import Dropout
from bert.model.execution import LayerExecution
from bert.model.heads import HEADS
from bert.tasks.base import Task
from bert.training.initialization import Params
from bert.training.losses import Apply, Batch, Objective
from bert.training.optimizer import ParameterPath
from bert.training.predictions import PREDICTIONS


def build_model_and_objective(config: PretrainConfig, cudnn_head: int | None = None) -> tuple[nn.Module, Objective]:
    """The model of a pretraining run, and the objective that it is trained with.

    Args:
        cudnn_head: largest head size of cuDNN's attention, for devices that are absent; None asks the local ones.

    Raises:
        UserError: the devices cannot run the model as the configuration demands.
    """
    prediction = PREDICTIONS[config.data.prediction]
    model = prediction.build_model(
        config, lambda sizes: LayerExecution.from_config(config.training, sizes.head_size, cudnn_head)
    )
    return model, prediction.build_objective(model, config)


def build_task_model(task: Task, config: FinetuneConfig) -> nn.Module:
    """The encoder with a task's head. Raises UserError if the devices cannot run it as the configuration demands."""
    execution = LayerExecution.from_config(config.training, config.model.head_size)
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


def make_apply(model: nn.Module, frozen: Callable[[ParameterPath], bool] | None) -> Apply:
    """(params, batch, dropout) -> the head's outputs, without gradients of ``frozen`` parameters."""
    forward: Callable[..., Any] = model.apply

    def stop_gradients(params: Params) -> Any:
        if frozen is None:
            return params
        return traverse_util.path_aware_map(lambda path, x: jax.lax.stop_gradient(x) if frozen(path) else x, params)

    def apply(params: Params, batch: Batch, dropout: Dropout | None) -> jax.Array:
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        return forward({"params": stop_gradients(params)}, *inputs, dropout=dropout)

    return apply
