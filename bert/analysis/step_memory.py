"""What a training step takes of a device's memory, from a compilation for that device: it need not be there."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from bert.analysis.collectives import all_reduce_bytes
from bert.config import PretrainConfig, TrainingConfig
from bert.config.training import check_mesh_sizes
from bert.data.pretraining.loader import masked_batch, random_uint64s_per_row
from bert.data.pretraining.masking import MASKINGS, philox_uint64
from bert.data.pretraining.objectives import OBJECTIVES
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.data.pretraining.predictions import NextTokens, Predictions
from bert.errors import UserError, require
from bert.parallel.backends import MeshParallel
from bert.parallel.sharding import partition_spec, path_str
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.objectives import build_model_and_objective
from bert.training.step import TrainState, make_train_step

ANY_STEPS = 1_000_000
"""Steps of an optimizer whose memory is planned: its state does not depend on them."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device while a train step runs, as its compiler gives them.

    Attributes:
        state: parameters, optimizer state and the batch; the step updates them in place.
        working: gradients, stored activations and whatever else lives within the step.
        all_reduced: arrays that the step adds over devices, those of each micro-batch; None if it cannot be read.
    """

    state: int
    working: int
    all_reduced: int | None = None

    @property
    def peak(self) -> int:
        return self.state + self.working


def compiled_step_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory:
    """Compiles the train step of a pretraining run for the devices of a mesh; there are no weights and no data.

    Raises:
        UserError: rows or the model cannot be sharded over the mesh.
    """
    compiled = lower_step(config, mesh).compile()
    memory = require(compiled.memory_analysis(), "the memory of the step")
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    all_reduced = all_reduce_bytes(compiled.as_text() or "")
    return StepMemory(memory.argument_size_in_bytes, memory.temp_size_in_bytes + new, all_reduced)


def lower_step(config: PretrainConfig, mesh: MeshParallel) -> jax.stages.Lowered:
    """The train step of a run, traced for the devices of a mesh, ready to be compiled."""
    training = config.training
    check_mesh_sizes(mesh.shape, config.model)
    mesh.check_batch("training.batch_size", training.batch_size, training.gradient_accumulation_steps)
    _, objective = build_model_and_objective(config, list(mesh.mesh.devices.flat))
    optimizer = make_optimizer(config.optimizer, training.steps or ANY_STEPS)
    step = make_train_step(objective, optimizer, config.seed, training.dropout_rng, mesh.axis)
    return mesh.lower(step, state_shapes(config), batch_shapes(config), donate=(0,))


def state_shapes(config: PretrainConfig) -> TrainState:
    """The training state of a pretraining run as shapes, which do not depend on the devices."""
    training = TrainingConfig(label_smoothing=config.training.label_smoothing)
    model, objective = build_model_and_objective(dataclasses.replace(config, training=training))
    optimizer = make_optimizer(config.optimizer, int(config.training.steps or ANY_STEPS))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(params, optimizer, objective.metrics)

    return jax.eval_shape(create, jax.random.key(0))


def batch_shapes(config: PretrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a global pretraining batch, [k, B / k, ...] with k micro-batches, by making one row of it."""
    micro_batches = config.training.gradient_accumulation_steps
    rows = config.training.batch_size // micro_batches
    length, special = config.data.sequence_length, range(5)
    most = config.data.max_sequences_per_pack
    examples: tuple[int, ...] = (1, most) if config.data.packing else (1,)
    row = {
        "input_ids": np.full((1, length), len(special)),
        "length": np.array([length]),
        "segment_a_length": np.ones(examples, int),
    }
    if config.data.packing:
        row[EXAMPLE_LENGTH] = np.array([[length] + [0] * (most - 1)])
    if label := OBJECTIVES[config.data.objective].label:
        row[f"{label}_label"] = np.zeros(examples, int)
    predictions: Predictions = NextTokens()
    if config.data.prediction != "next":
        predictions = MASKINGS[config.data.prediction](
            vocab_size=config.model.known_vocab_size,
            mask_id=special[-1],
            special_ids=tuple(special),
            max_predictions=config.data.max_predictions_per_sequence,
            prob=config.data.masked_lm_prob,
        )
    words = philox_uint64((0, 0), 0, 1, random_uint64s_per_row(predictions, row))
    batch = masked_batch(row, predictions, words, 0)
    return {
        name: jax.ShapeDtypeStruct((micro_batches, rows, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def tpu_devices(topology: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice such as v5e:2x4, to be compiled for; libtpu has to be installed, no TPU has to be.

    Raises:
        UserError: libtpu is missing, or knows no such slice.
    """
    # No TPU is needed: without these, libtpu looks for one through the network and logs errors.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No TPU is used, so another process may compile at the same time, or train on the TPUs of this machine.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # a RuntimeError, ValueError or XLA's own, by the version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"cannot compile for the TPU slice {topology} ({reason}): name one such as v5e:2x4, with libtpu installed"
        ) from None


def state_bytes(config: PretrainConfig, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Exact bytes of parameters and of optimizer state on one device, by the sharding rules."""
    state = state_shapes(config)
    return _bytes_per_device(state.params, "params", mesh), _bytes_per_device(state.opt_state, "opt_state", mesh)


def _bytes_per_device(tree: Any, name: str, mesh: Mesh | AbstractMesh) -> int:
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = partition_spec(f"{name}/{path_str(path)}", leaf.shape, mesh.shape)
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        total += math.prod(shard) * leaf.dtype.itemsize
    return total
