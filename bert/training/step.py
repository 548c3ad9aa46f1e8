"""One step: the training state, the functions that update and evaluate it, and their compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct, traverse_util

from bert.model.dropout import Dropout
from bert.model.linear import NOTHING_FROZEN, FrozenWeights
from bert.parallel.backends import AXIS, Parallelism, psum_if_axis
from bert.parallel.sharding import constrain_state
from bert.training.losses import Loss, WeightedSums, total_loss
from bert.training.recurrence import MEMORY, gather_memory, scatter_memory, split_memory
from bert.training.spikes import spike_counts


class TrainState(struct.PyTreeNode):
    """State that a resumed run needs; batches, masks and dropout are functions of ``step``.

    Attributes:
        sums: metrics since the last log line, each [2]: sum and weight.
        skipped: [2] int32, consecutive and total steps skipped because the loss, a gradient or an update was not
            finite.
        memory: [B, layers, M, D] float32, the memory of each row of the global batch
            (`bert.model.recurrence.SegmentMemory`); None without one.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    sums: dict[str, jax.Array]
    skipped: jax.Array
    memory: jax.Array | None = None

    @classmethod
    def create(
        cls,
        params: Any,
        optimizer: optax.GradientTransformation,
        metrics: Iterable[str],
        memory_shape: Sequence[int] | None = None,
    ) -> TrainState:
        """Returns the state before the first step; ``metrics`` are the names of the loss's results."""
        sums = {name: jnp.zeros(2) for name in (*metrics, "grad_norm")}
        memory = None if memory_shape is None else jnp.zeros(tuple(memory_shape))
        return cls(jnp.zeros([], jnp.int32), params, optimizer.init(params), sums, jnp.zeros(2, jnp.int32), memory)


class StepMetrics(struct.PyTreeNode):
    """Diagnostics of a training step, fetched asynchronously a few steps later.

    Attributes:
        loss: loss of the global batch, before the update.
        norms: norms of the gradient by groups of parameters, and of the whole ``update``.
        skipped: the value in the state after the step.
        spikes: `bert.training.spikes.SpikeState.spikes` after the step; None without spike detection.
    """

    loss: jax.Array
    norms: dict[str, jax.Array]
    skipped: jax.Array
    spikes: jax.Array | None = None


def compute_gradients(
    params: Any,
    batch: dict[str, jax.Array],
    loss: Loss,
    dropout: Callable[[jax.Array], Dropout | None],
    axis: str | None = AXIS,
) -> tuple[Any, WeightedSums]:
    """Computes the gradients of the global batch's loss, and its (sum, weight) metrics, the same on every device.

    Each loss is divided by the weight of the global batch before it is differentiated. The gradients of micro-batches
    and devices therefore only need to be added, even if masked tokens and rows are unevenly distributed.

    Args:
        batch: this device's share, arrays [k, b, ...] of k micro-batches, with ``rows`` [k, b].
        dropout: rows [b] -> the source of dropout for these rows, or None without dropout.
        axis: the device axis to sum over; None without one.

    Returns:
        Gradients and metrics. With a memory, the metrics include the memory of the global batch as `MEMORY`.
    """
    num_rows = batch["rows"].size * (1 if axis is None else jax.lax.axis_size(axis))
    weights = psum_if_axis(loss.weights(batch), axis)

    def micro_batch_loss(params: Any, micro: dict[str, jax.Array]) -> tuple[jax.Array, WeightedSums]:
        losses, counts = loss.forward(params, micro, dropout(micro["rows"]))
        means = {name: value / jnp.where(weights[name] > 0, weights[name], 1.0) for name, (value, _) in losses.items()}
        return jnp.asarray(total_loss(means, loss.factors)), {**losses, **counts}

    def one(micro: dict[str, jax.Array]) -> tuple[Any, WeightedSums]:
        (_, sums), grads = jax.value_and_grad(micro_batch_loss, has_aux=True)(params, micro)
        return constrain_state(grads), scatter_memory(sums, micro["rows"], num_rows)

    if loss.over_micro_batches:
        return psum_if_axis(one(batch), axis)
    first = jax.tree.map(lambda x: x[0], batch)
    if len(batch["rows"]) == 1:
        return psum_if_axis(one(first), axis)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, first))
    total, _ = jax.lax.scan(lambda done, micro: (jax.tree.map(jnp.add, done, one(micro)), None), zeros, batch)
    return psum_if_axis(total, axis)


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, seed: int, dropout_rng: str = "hash", axis: str | None = AXIS
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, StepMetrics]]:
    """Returns a step, (state, batch) -> (state, metrics): `make_grad_fn` and `make_update_fn` in one program."""
    gradients = make_grad_fn(loss, seed, dropout_rng, axis)
    update = make_update_fn(optimizer, loss.factors)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, StepMetrics]:
        return update(state, *gradients(state.params, state.step, gather_memory(state.memory, batch)))

    return train_step


def make_grad_fn(
    loss: Loss, seed: int | jax.Array, dropout_rng: str = "hash", axis: str | None = AXIS
) -> Callable[[Any, jax.Array, dict[str, jax.Array]], tuple[Any, WeightedSums]]:
    """Returns the first half of a step, (params, step, batch) -> the result of `compute_gradients`."""

    def gradients(params: Any, step: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, WeightedSums]:
        def dropout(rows: jax.Array) -> Dropout:
            return Dropout.for_step(seed, step, rows, dropout_rng)

        return compute_gradients(params, batch, loss, dropout, axis)

    return gradients


def make_update_fn(
    optimizer: optax.GradientTransformation, factors: Mapping[str, float]
) -> Callable[[TrainState, Any, WeightedSums], tuple[TrainState, StepMetrics]]:
    """Returns the second half of a step, (state, gradients, their sums) -> (state, metrics).

    A step whose loss, gradient or update is not finite only increments the step. Parameters, optimizer and metrics stay
    unchanged. The decision uses only all-reduced values, so that every device takes the same branch without
    synchronization. The host reads it from the step's metrics a few steps later.
    """
    apply = optax.with_extra_args_support(optimizer).update

    def update(state: TrainState, grads: Any, sums: WeightedSums) -> tuple[TrainState, StepMetrics]:
        sums, memory = split_memory(sums)
        loss = total_loss({name: total / jnp.maximum(weight, 1) for name, (total, weight) in sums.items()}, factors)
        updates, opt_state = apply(grads, state.opt_state, state.params, loss=jnp.asarray(loss))
        params = optax.apply_updates(state.params, updates)
        squares = _squared_norms_by_module(grads)
        grad_norm = jnp.sqrt(sum(squares.values()))
        norms = {name: jnp.sqrt(square) for name, square in squares.items()} | {"update": optax.global_norm(updates)}
        sums = {**sums, "grad_norm": (grad_norm, jnp.float32(1))}
        running = {name: state.sums[name] + jnp.stack(pair) for name, pair in sums.items()}
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(norms["update"])
        bad = 1 - finite.astype(jnp.int32)
        new, old = (params, opt_state, running, memory), (state.params, state.opt_state, state.sums, state.memory)
        params, opt_state, running, memory = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        skipped = jnp.stack([(state.skipped[0] + 1) * bad, state.skipped[1] + bad])
        after = TrainState(state.step + 1, params, opt_state, running, skipped, memory)
        spikes = spike_counts(opt_state)
        spikes = None if spikes is None else spikes * finite  # a step that is not finite does not change the state
        return after, StepMetrics(jnp.asarray(loss), norms, skipped, spikes)

    return update


def compile_bucketed_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    seed: int,
    dropout_rng: str,
    parallel: Parallelism,
    frozen: FrozenWeights = NOTHING_FROZEN,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, StepMetrics]]:
    """Compiles a step for batches of several lengths: (state, batch) -> (state, metrics), donating the state.

    It is compiled as two programs because the update takes over half of the compile time and does not depend on the row
    length.

    Args:
        frozen: the weights that the state's adapters modify.
    """
    weights = parallel.put_state(frozen.params)

    def gradients(params: Any, step: jax.Array, batch: dict[str, jax.Array], weights: Any) -> tuple[Any, WeightedSums]:
        adapted = _adapt(loss, frozen, weights)
        return make_grad_fn(adapted, seed, dropout_rng, parallel.axis)(params, step, batch)

    differentiate = parallel.compile(gradients)
    update = parallel.compile(make_update_fn(optimizer, loss.factors), donate=(0,))

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, StepMetrics]:
        after: tuple[TrainState, StepMetrics] = update(state, *differentiate(state.params, state.step, batch, weights))
        return after

    return train_step


def _adapt(loss: Loss, frozen: FrozenWeights, weights: Any) -> Loss:
    """Returns the loss as a function of all trained parameters; ``weights`` are the frozen ones on the devices."""

    def forward(trained: Any, *inputs: Any) -> tuple[WeightedSums, WeightedSums]:
        return loss.forward(frozen.merge_traced(weights, trained), *inputs)

    return dataclasses.replace(loss, forward=forward)


def _squared_norms_by_module(grads: Any) -> dict[str, jax.Array]:
    """Returns the squared norms by group: the embeddings, each layer, the pooler, each head."""
    squares: dict[str, jax.Array] = {}
    for path, leaf in traverse_util.flatten_dict(grads).items():
        is_stack = path[0] in ("bert", "decoder")
        depth = 3 if is_stack and path[1] == "encoder" else 2 if is_stack else 1
        name = "/".join(path[:depth])
        squares[name] = squares.get(name, 0.0) + jnp.sum(jnp.square(leaf))
    return squares


def make_eval_step(loss: Loss, axis: str | None = AXIS) -> Callable[[Any, dict[str, jax.Array]], WeightedSums]:
    """Returns an evaluation, (params, batch) -> (sum, weight) pairs over all devices, without dropout.

    With a memory, the result includes the memory after the batch's rows as `MEMORY`.
    """

    def eval_step(params: Any, batch: dict[str, jax.Array]) -> WeightedSums:
        losses, counts = loss.forward(params, batch, None)
        counts, memory = split_memory(counts)
        sums = psum_if_axis({**losses, **counts}, axis)
        return sums if memory is None else {**sums, MEMORY: memory}

    return eval_step
