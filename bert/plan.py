"""What a training step takes of a device's memory, from a compilation for that device: it need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bert.config import PretrainConfig, UserError
from bert.data.objectives import OBJECTIVES
from bert.heads import BertForMaskedLM, BertForPreTraining
from bert.losses import pretraining_objective
from bert.model import Execution
from bert.optimizer import make_optimizer
from bert.parallel import MeshParallel
from bert.train import TrainState, make_train_step


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device while a train step runs, as its compiler gives them.

    Attributes:
        state: parameters, optimizer state and the batch, which the step gets; it hands them on in the same place.
        working: gradients, stored activations and whatever else lives within the step.
    """

    state: int
    working: int

    @property
    def peak(self) -> int:
        return self.state + self.working


def step_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory:
    """Compiles the train step of a pretraining run for the devices of a mesh; there are no weights and no data.

    Raises:
        UserError: rows or the model cannot be dealt out over the mesh.
    """
    compiled = lower_step(config, mesh).compile()
    found = compiled.memory_analysis()
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return StepMemory(found.argument_size_in_bytes, found.temp_size_in_bytes + new)


def lower_step(config: PretrainConfig, mesh: MeshParallel) -> jax.stages.Lowered:
    """The train step of a run, traced for the devices of a mesh, ready to be compiled."""
    training = config.training
    mesh.check_model(config.model)
    mesh.check_batch("training.batch_size", training.batch_size, training.gradient_accumulation_steps)
    rows = OBJECTIVES[config.data.objective]
    heads = BertForPreTraining if rows.label else BertForMaskedLM
    model = heads(config.model, jnp.dtype(training.dtype), Execution.of(training))
    objective = pretraining_objective(model.apply, rows.label, rows.metric)
    optimizer = make_optimizer(config.optimizer, int(training.steps or 1_000_000))
    step = make_train_step(objective, optimizer, config.seed, training.dropout_rng, mesh.axis)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(params, optimizer, objective.metrics)

    return mesh.lower(step, jax.eval_shape(create, jax.random.key(0)), batch_shapes(config), donate=(0,))


def batch_shapes(config: PretrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a global pretraining batch, [k, B / k, ...] with k micro-batches."""
    micro_batches = config.training.gradient_accumulation_steps
    first = (micro_batches, config.training.batch_size // micro_batches)

    def of(*more: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*first, *more), dtype)

    length, predictions = config.data.sequence_length, config.data.max_predictions_per_sequence
    shapes = {
        **{name: of(length) for name in ("input_ids", "token_type_ids", "attention_mask")},
        **{name: of(predictions) for name in ("masked_lm_positions", "masked_lm_ids")},
        "masked_lm_weights": of(predictions, dtype=jnp.float32),
        "rows": of(),
    }
    if label := OBJECTIVES[config.data.objective].label:
        shapes |= {f"{label}_labels": of(), f"{label}_weights": of(dtype=jnp.float32)}
    return shapes


def tpu_devices(topology: str) -> Sequence[jax.Device]:
    """The devices of a TPU slice such as v5e:2x4, to be compiled for; libtpu has to be installed, no TPU has to be.

    Raises:
        UserError: libtpu is missing, or knows no such slice.
    """
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # a RuntimeError, ValueError or XLA's own, by the version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot compile for the TPU slice {topology}: {reason}; is libtpu installed?") from None
