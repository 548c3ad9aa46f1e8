"""Memory of a training step: an estimate, a measurement by the compiler, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from bert.config import ModelConfig, PretrainConfig, TrainingConfig
from bert.config.training import Remat, check_mesh_sizes
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.data.pretraining.loader import MEMORY_TOKENS, masked_batch, random_uint64s_per_row
from bert.data.pretraining.masking import MASKINGS, NextTokens, Predictions, philox_uint64
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.errors import UserError, require
from bert.parallel.backends import MeshParallel
from bert.parallel.sharding import partition_spec, path_str
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.objectives import build_model_and_loss
from bert.training.recurrence import memory_shape
from bert.training.step import TrainState, make_train_step


def activation_bytes(
    model: ModelConfig, length: int, itemsize: int = 2, remat: str = "none", stores_scores: bool = True, tensor: int = 1
) -> int:
    """Returns the bytes of activations that one row keeps on a device for the backward pass of all encoder layers.

    Korthikanti et al. 2022 (arXiv 2205.05198), equation 2: each layer keeps s h (10 + 24 / t + 5 a s / (h t)), with
    sequence length s, hidden size h, a heads and tensor parallelism t. 8 of the 24 are queries, keys, values and the
    input of the output layer, here with the width of the heads. Fused attention kernels do not have the last term. All
    others repeat keys and values for the heads of queries that share them. With full rematerialization, each layer
    keeps 2 s h, except for the layer being computed. The formula assumes
    16-bit activations and a feed-forward width of 4 h; it excludes embeddings, the convolution, logits and gradients.

    Args:
        length: s.
        itemsize: bytes per activation, by which the formula is scaled.
        remat: value of ``training.remat``; dots counts as none.
        stores_scores: whether attention stores its s x s matrices.
        tensor: t, number of devices along the mesh's last axis.
    """
    scores = 5 * model.num_attention_heads * length if stores_scores else 0
    heads = 4 * model.num_attention_heads * model.head_size
    heads += 4 * model.head_size * (model.num_attention_heads if stores_scores else model.key_value_heads)
    of_layer = model.hidden_size * (10 + 16 / tensor) + (heads + scores) / tensor
    layers = model.num_hidden_layers
    per_token = layers * 2 * model.hidden_size + of_layer if remat == "full" else layers * of_layer
    return int(length * per_token * itemsize / 2)


ALL_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
CALLED = re.compile(r"(?:calls|to_apply|computations?)=\{?(%?[\w.-]+(?:, %[\w.-]+)*)")
LOOP = re.compile(r" while\(.*condition=(%?[\w.-]+), body=(%?[\w.-]+)")
KNOWN_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
CONSTANT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")


def all_reduce_bytes(hlo: str) -> int | None:
    """Returns the bytes that one execution of a program sums over devices, including repetitions in loops.

    Args:
        hlo: text of a compiled program, from `jax.stages.Compiled.as_text`.

    Returns:
        Bytes of one device's arrays; None if the trip count of a loop is unknown.
    """
    computations = _computations(hlo)

    @cache
    def added(name: str) -> int:
        total = 0
        for line in computations[name]:
            if match := ALL_REDUCE.search(line):
                total += _array_bytes(match[1])
            elif match := LOOP.search(line):
                condition, body = (part.lstrip("%") for part in match.groups())
                if each := added(body):
                    known = KNOWN_ROUNDS.search(line)
                    total += each * (int(known[1]) if known else _rounds(computations[condition]))
            else:
                total += sum(added(name) for called in CALLED.findall(line) for name in re.findall(r"[\w.-]+", called))
        return total

    try:
        return added("ENTRY")
    except _UnknownRoundsError:
        return None


class _UnknownRoundsError(Exception):
    """Raised if the trip count of a loop is not a constant."""


def _computations(hlo: str) -> dict[str, list[str]]:
    """Returns the lines of each computation by its name; the entry computation is ENTRY."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            lines = computations["ENTRY" if match[1] else match[2]] = []
        elif line.startswith(" "):
            lines.append(line)
    return computations


def _rounds(condition: list[str]) -> int:
    """Returns the trip count of a loop over a range: the only constant in its condition."""
    constants = {int(match[1]) for line in condition if (match := CONSTANT.search(line))}
    if len(constants) != 1:
        raise _UnknownRoundsError
    return constants.pop()


def _array_bytes(shapes: str) -> int:
    """Returns the bytes of an HLO type, such as (f32[2,3]{1,0}, bf16[]); pred counts as one byte."""
    return sum(
        math.prod(int(side) for side in sides.split(",") if side) * int(bits or 8) // 8
        for bits, sides in ARRAY.findall(shapes)
    )


ANY_STEPS = 1_000_000
"""Number of steps for the optimizer, whose memory does not depend on it."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of one device during a train step in bytes, from the compiler.

    Attributes:
        state: parameters, optimizer state and batch, which are updated in place.
        working: gradients, stored activations and other temporary arrays.
        all_reduced: arrays summed over devices in all micro-batches; None if unknown.
    """

    state: int
    working: int
    all_reduced: int | None = None

    @property
    def peak(self) -> int:
        return self.state + self.working


def compiled_step_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory:
    """Compiles the train step of a pretraining run for the devices of a mesh, without weights or data.

    Raises:
        UserError: rows or the model cannot be sharded over the mesh.
    """
    compiled = lower_step(config, mesh).compile()
    memory = require(compiled.memory_analysis(), "the memory of the step")
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    all_reduced = all_reduce_bytes(compiled.as_text() or "")
    return StepMemory(memory.argument_size_in_bytes, memory.temp_size_in_bytes + new, all_reduced)


def lower_step(config: PretrainConfig, mesh: MeshParallel) -> jax.stages.Lowered:
    """Traces the train step of a run for the devices of a mesh."""
    training = config.training
    check_mesh_sizes(mesh.shape, config.model)
    mesh.check_batch("training.batch_size", training.batch_size, training.gradient_accumulation_steps)
    _, loss = build_model_and_loss(config, list(mesh.mesh.devices.flat))
    optimizer = make_optimizer(config.optimizer, training.steps or ANY_STEPS)
    step = make_train_step(loss, optimizer, config.seed, training.dropout_rng, mesh.axis)
    return mesh.lower(step, state_shapes(config), batch_shapes(config), donate=(0,))


def state_shapes(config: PretrainConfig) -> TrainState:
    """Returns the shapes of the training state of a pretraining run, which do not depend on the devices."""
    training = TrainingConfig(objective=config.training.objective, label_smoothing=config.training.label_smoothing)
    model, loss = build_model_and_loss(dataclasses.replace(config, training=training))
    optimizer = make_optimizer(config.optimizer, int(config.training.steps or ANY_STEPS))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        shape = memory_shape(config.model, config.training.batch_size)
        return TrainState.create(params, optimizer, loss.metrics, shape)

    return jax.eval_shape(create, jax.random.key(0))


def batch_shapes(config: PretrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a global pretraining batch, [k, B / k, ...] with k micro-batches, from one made-up row."""
    micro_batches = config.training.gradient_accumulation_steps
    rows = config.training.batch_size // micro_batches
    length, special = config.data.sequence_length, range(5)
    max_examples = config.data.max_sequences_per_pack
    examples: tuple[int, ...] = (1, max_examples) if config.data.packing else (1,)
    row = {
        "input_ids": np.full((1, length), len(special)),
        "length": np.array([length]),
        "segment_a_length": np.ones(examples, int),
    }
    if config.data.packing:
        row[EXAMPLE_LENGTH] = np.array([[length] + [0] * (max_examples - 1)])
    if label := INPUT_FORMATS[config.data.input_format].label:
        row[f"{label}_label"] = np.zeros(examples, int)
    predictions: Predictions = NextTokens()
    if config.training.objective != "clm":
        predictions = MASKINGS[config.training.objective](
            vocab_size=config.model.known_vocab_size,
            mask_id=special[-1],
            special_ids=tuple(special),
            max_predictions=config.data.predictions_per_row,
            prob=config.data.masked_lm_prob,
        )
    words = philox_uint64((0, 0), 0, 1, random_uint64s_per_row(predictions, row))
    batch = masked_batch(row, predictions, words, 0)
    if config.model.memory_length is not None:
        batch[MEMORY_TOKENS] = np.zeros(1, np.int32)
    return {
        name: jax.ShapeDtypeStruct((micro_batches, rows, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def tpu_devices(topology: str) -> Sequence[jax.Device]:
    """Returns the devices of a TPU slice such as v5e:2x4 for compilation, which needs libtpu but no TPU.

    Raises:
        UserError: libtpu is missing or does not support the slice.
    """
    # Without these, libtpu looks for a TPU on the network and logs errors.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No TPU is used, so that other processes may compile, or train on the TPUs of this machine.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # RuntimeError, ValueError or XLA's error, depending on the version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"cannot compile for the TPU slice {topology} ({reason}): name one such as v5e:2x4, with libtpu installed"
        ) from None


def state_bytes(config: PretrainConfig, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    """Returns the exact bytes of parameters and optimizer state on one device, by the sharding rules."""
    state = state_shapes(config)
    return _bytes_per_device(state.params, "params", mesh), _bytes_per_device(state.opt_state, "opt_state", mesh)


def _bytes_per_device(tree: Any, name: str, mesh: Mesh | AbstractMesh) -> int:
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = partition_spec(f"{name}/{path_str(path)}", leaf.shape, mesh.shape)
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        total += math.prod(shard) * leaf.dtype.itemsize
    return total


def _silent(line: str) -> None:
    pass


@dataclass(frozen=True)
class BatchFit:
    """The maximum number of rows that fit a device at once, for one kind of rematerialization.

    Attributes:
        rows: rows of a micro-batch on one device; 0 if none fits.
        micro_batches: number of micro-batches of a step with these rows.
        memory: memory of a step with these rows, or with one row if none fits; None if one row does not compile.
    """

    remat: Remat
    rows: int
    micro_batches: int
    memory: StepMemory | None


def fit_rows(
    config: PretrainConfig, mesh: MeshParallel, memory: int, remat: Remat, progress: Callable[[str], None] = _silent
) -> BatchFit:
    """Finds the minimum number of micro-batches that fit into ``memory`` bytes of a device, by compiling the step.

    The search starts at the rough estimate, moves over the divisors of the batch in strides of 1, 1, 2, 4 and so on,
    and then bisects. It usually needs two or three compilations. ``progress`` is called with a line before each.

    Raises:
        UserError: the batch cannot be sharded over the mesh.
    """
    mesh.check_batch("training.batch_size", config.training.batch_size)
    share = config.training.batch_size // (mesh.shape[0] * mesh.shape[1])
    choices = [rows for rows in range(1, share + 1) if share % rows == 0]
    measured: dict[int, StepMemory | None] = {}
    row_bytes = _row_bytes(config, mesh, remat)
    index = max((i for i, rows in enumerate(choices) if rows * row_bytes <= memory), default=0)
    fitting, too_many = -1, len(choices)
    while too_many - fitting > 1:
        rows = choices[index]
        progress(f"  compiling remat {remat}, {rows} rows of {config.data.sequence_length} tokens at once")
        training = dataclasses.replace(config.training, gradient_accumulation_steps=share // rows, remat=remat)
        measured[rows] = compiled_memory(dataclasses.replace(config, training=training), mesh)
        step = measured[rows]
        if step is not None and step.peak <= memory:
            fitting = index
        else:
            too_many = index
        index = _next_index(fitting, too_many, len(choices), len(measured))
    if fitting < 0:
        return BatchFit(remat, 0, share, measured[1])
    rows = choices[fitting]
    return BatchFit(remat, rows, share // rows, measured[rows])


def _row_bytes(config: PretrainConfig, mesh: MeshParallel, remat: Remat) -> int:
    """Returns the rough estimate for one row; ``remat dots`` stores everything except the scores."""
    training = config.training
    itemsize, length = jnp.dtype(training.dtype).itemsize, config.data.sequence_length
    stores_scores = training.attention_implementation not in ("cudnn", "splash") and remat != "dots"
    return activation_bytes(config.model, length, itemsize, remat, stores_scores, tensor=mesh.shape[2])


def _next_index(fitting: int, too_many: int, count: int, tried: int) -> int:
    """Returns the next choice to compile: halfway between fitting and too many, or further on until both are known."""
    stride = 2 ** max(0, tried - 2)
    if too_many == count:
        return min(fitting + stride, count - 1)
    if fitting < 0:
        return max(too_many - stride, 0)
    return (fitting + too_many) // 2


def compiled_memory(config: PretrainConfig, mesh: MeshParallel) -> StepMemory | None:
    """Returns `compiled_step_memory`; None if the compiler reports that the step does not fit, as on TPUs."""
    try:
        return compiled_step_memory(config, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
