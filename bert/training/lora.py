"""Training low-rank adapters next to frozen weights (LoRA; Hu et al. 2021).

The state of such a run has the adapters, the pooler and the head alone, and so have its gradients, its optimizer and
its checkpoints. The model's parameters are made of these and of the frozen ones inside the loss.
"""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import FinetuneConfig, LoraConfig
from bert.errors import UserError
from bert.model.lora import LORA_A, LORA_B, FrozenWeights
from bert.runs.folder import RunFolder
from bert.runs.frozen_weights import params_checksum, read_frozen_weights, write_frozen_weights
from bert.training.initialization import ParameterPath, Params, is_cross_attention
from bert.training.optimizer import STACKS


def is_frozen(path: ParameterPath) -> bool:
    """Whether a parameter is not trained: all of encoder and decoder but the pooler and cross-attention, which may both
    start from random weights."""
    return path[0] in STACKS and path[1] != "pooler" and not is_cross_attention(path)


def take_frozen_weights(
    run: RunFolder[FinetuneConfig], source: Params | None, stacks: tuple[str, ...]
) -> FrozenWeights:
    """The frozen weights of a run, written into its folder at its start.

    Args:
        source: parameters of the model to start from; None reads those of a run that has begun.
        stacks: the modules of the run's model that have layers.

    Raises:
        UserError: they are not those that the run, or its configuration, began with.
    """
    lora = run.config.lora
    if source is None:
        return FrozenWeights(read_frozen_weights(run.path, lora.checksum), lora.scale)
    flat = traverse_util.flatten_dict(source)
    params = traverse_util.unflatten_dict(
        {path: leaf for path, leaf in flat.items() if is_frozen(path) and path[0] in stacks}
    )
    checksum = params_checksum(params)
    if lora.checksum not in (None, checksum):
        raise UserError(
            f"init {run.config.init} is not the model that the run began with (lora.checksum): restore it, or pass "
            "another output_dir and remove lora.checksum"
        )
    if run.is_writer:
        write_frozen_weights(run.path, params)
    run.save_config(dataclasses.replace(run.config, lora=dataclasses.replace(lora, checksum=checksum)))
    return FrozenWeights(params, lora.scale)


def trained_params(params: Params, config: LoraConfig, seed: int) -> Params:
    """The part of a model's parameters that is trained, with new adapters: A random, B zero. Without a rank, all.

    A is uniform up to 1 / sqrt(D), as in the authors' code (microsoft/LoRA, layers.py); the paper does not give the
    deviation of its normal distribution. Its bits depend on the seed and on the place in the model.

    Args:
        params: of the whole model, or their shapes.
    """
    if (rank := config.rank) is None:
        return params
    flat = traverse_util.flatten_dict(params)
    trained = {path: leaf for path, leaf in flat.items() if not is_frozen(path)}
    for path, kernel in flat.items():
        if is_frozen(path) and path[-3:] in {("attention", name, "kernel") for name in config.projections}:
            inputs, outputs = kernel.shape
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
            bound = inputs**-0.5
            trained[*path[:-1], LORA_A] = jax.random.uniform(key, (inputs, rank), minval=-bound, maxval=bound)
            trained[*path[:-1], LORA_B] = jnp.zeros((rank, outputs))
    return traverse_util.unflatten_dict(trained)
