"""What a training step takes of a device's memory where nothing can be compiled for it: counted from shapes.

Counted exactly: parameters, optimizer state and the batch, by the table of places. Traced: what the backward pass finds
stored of a layer (`layer_activation_bytes`). Beside it live the gradients, twice where micro-batches are added up; the
layers' parameters, stacked for the loop over layers and cast to the type of the computation; with FSDP the embedding
and two layers gathered, and their gradients before they are sharded; and the logits with their gradient, in float32
and cast, or all that one layer computes, whichever is larger. In the letters of `bert.model.encoder`, with b rows of a
micro-batch on a device and c bytes a number computed with, BERT's layer stores, in bytes:

    none   b T (6 * 4 D + 8 c D + 2 c F + 2 D + 16) + b N T (T (4 + c + 1) + 8)
    dots   b T (6 c D + c F)
    full   b T c D

Attention as one kernel (`training.preset` fast on GPUs) keeps nothing of T x T.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from bert.analysis.step_memory import StepMemory, batch_shapes, bytes_per_device, state_bytes, state_shapes
from bert.config import ModelConfig, PretrainConfig
from bert.model.dropout import Dropout
from bert.model.encoder import REMAT_POLICIES, Layer
from bert.model.execution import LayerExecution
from bert.parallel.backends import MeshParallel, check_mesh
from bert.parallel.sharding import AXES

ESTIMATE_ERROR_PERCENT = 21
"""Per cent by which an estimated peak is off at most from compilations for TPU v5e, of those that were made
(`benchmarks/plan.py`). The CPU's keeps 0.9 to 1.7 times as much (`tests/analysis/test_memory_estimate.py`)."""


class AbstractMeshParallel(MeshParallel):
    """A mesh of devices that are not there and cannot be compiled for.

    Args:
        shape: devices along data, fsdp and tensor.
        kind: what they are called.
        count: how many there are.
        cudnn_head: as `bert.parallel.devices.max_cudnn_head_dim` would say of them.

    Raises:
        UserError: the mesh takes more or fewer.
    """

    def __init__(self, shape: tuple[int, int, int], kind: str, count: int, cudnn_head: int) -> None:
        check_mesh(shape, count)
        self.shape, self.kind, self.cudnn_head = shape, kind, cudnn_head
        self.mesh = cast(Mesh, AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES)))

    def describe(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
        return f"{self.mesh.size} x {self.kind}, mesh {axes}"


def estimate_step(config: PretrainConfig, mesh: MeshParallel) -> StepMemory:
    """What `bert.analysis.step_memory.compiled_step_memory` would say, without a compiler.

    Raises:
        UserError: rows or the model cannot be sharded over the mesh.
    """
    training, model = config.training, config.model
    mesh.check_model(model)
    mesh.check_batch("training.batch_size", training.batch_size, training.gradient_accumulation_steps)
    data, fsdp, tensor = mesh.shape
    rows = training.batch_size // training.gradient_accumulation_steps // (data * fsdp)
    batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in batch_shapes(config).values())
    parameters, optimizer = state_bytes(config, mesh)
    layers = _layers_bytes(config, mesh)

    computed = jnp.dtype(training.dtype).itemsize
    pieces = model.known_vocab_size + -model.known_vocab_size % training.vocab_multiple
    gradients = parameters * (2 if training.gradient_accumulation_steps > 1 else 1)
    weights = (layers if training.scan_layers else 0) + (layers * computed // 4 if computed != 4 else 0)

    layer, embedding = layers * fsdp // model.num_hidden_layers, 4 * pieces * model.embedding_width // tensor
    gathered = (embedding + 2 * layer) * computed // 4 + embedding + layer if fsdp > 1 else 0

    kernel = LayerExecution.from_config(training, model.head_size, mesh.cudnn_head).attention

    def stored(remat: str) -> int:
        sizes = (training.dtype, remat, config.data.sequence_length, config.data.packing, training.dropout_rng)
        return rows * layer_activation_bytes(model, *sizes, kernel, tensor)

    logits = rows * config.data.max_predictions_per_sequence * pieces // tensor * (4 + 4 + computed)
    activations = model.num_hidden_layers * stored(training.remat)
    working = gradients + weights + gathered + activations + max(logits, stored("none"))
    return StepMemory(parameters + optimizer + batch // (data * fsdp), working)


ROWS = 10_007
"""Rows that a layer is traced with: a prime, so that no product of it is a dimension of the parameters."""


@functools.cache
def layer_activation_bytes(
    model: ModelConfig,
    dtype: str,
    remat: str,
    length: int,
    packed: bool,
    dropout_rng: str,
    kernel: str = "written",
    tensor: int = 1,
) -> int:
    """Bytes a row that the backward pass finds stored of one encoder layer, by tracing it: shapes and no numbers.

    Args:
        model: sizes.
        dtype: of the computation.
        remat: as ``training.remat`` has it.
        length: T.
        packed: whether several examples share a row, so that every row has a mask [T, T] of its own.
        dropout_rng: as ``training.dropout_rng`` has it.
        kernel: as `LayerExecution.attention`; cuDNN's is counted as its twin without all that is T x T.
        tensor: devices over which heads and feed-forward features are sharded.
    """
    kind = Layer if remat == "none" else nn.remat(Layer, prevent_cse=False, policy=REMAT_POLICIES[remat])
    layer = kind(model, jnp.dtype(dtype), "written" if kernel == "written" else "xla", parent=None)
    x = jax.ShapeDtypeStruct((ROWS, length, model.hidden_size), jnp.dtype(dtype))
    mask = jax.ShapeDtypeStruct((ROWS, 1, length if packed else 1, length), bool)
    params = jax.eval_shape(Layer(model).init, jax.random.key(0), x, mask)["params"]
    if kernel != "written":
        mask = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def backward(params: Any, x: jax.Array, mask: jax.Array, rows: jax.Array) -> Any:
        source = Dropout.for_step(0, 0, rows, dropout_rng)
        return jax.vjp(lambda params, x: layer.apply({"params": params}, x, mask, source)[0], params, x)[1]

    rows_of = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    traced = jax.make_jaxpr(backward)(params, x, mask, rows_of).jaxpr
    layer_input = traced.invars[len(jax.tree.leaves(params))]
    others = {id(variable) for variable in traced.invars} - {id(layer_input)}  # the loop over layers has them anyway
    kept = {id(variable): variable.aval for variable in traced.outvars if id(variable) not in others}
    dealt_out = {model.num_attention_heads, model.intermediate_size} - {model.hidden_size, length}
    square = _axes((ROWS, model.num_attention_heads, length, length))
    found = 0
    for leaf in kept.values():
        axes, size = _axes(leaf.shape), leaf.size * leaf.dtype.itemsize
        if axes[:1] != (ROWS,) or (axes == square and kernel == "cudnn"):
            continue
        if axes == square:
            size //= 2  # attention weights before and after each step of it: the compiler keeps one of two
        found += size // ROWS // (tensor if dealt_out & set(axes[1:]) else 1)
    return found


def _axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _layers_bytes(config: PretrainConfig, mesh: MeshParallel) -> int:
    """Bytes of all layers' parameters on one device."""
    encoder = state_shapes(config).params["bert"]["encoder"]
    return bytes_per_device({"bert": {"encoder": encoder}}, "params", mesh)
