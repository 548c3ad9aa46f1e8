"""Parts of a step for gpu.py: matrix products, attention, dropout, and idle gaps. Not a benchmark on its own."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_steps import INPUT, Scale, jax_seconds, loader_of, step_of

from bert.config import TrainingConfig
from bert.data.pretraining.loader import PretrainingLoader
from bert.model.attention import dot_product_attention, fused_attention
from bert.model.dropout import Dropout
from bert.model.mask import Mask
from bert.runs.environment import TRACED_STEPS, WARMUP_STEPS, StepProfiler
from bert.runs.report import Report
from bert.runtime.interrupts import InterruptHandler
from bert.training.loop import TrainLoop


def ceiling_shapes(scale: Scale) -> dict[str, tuple[int, int, int]]:
    """Returns the matrix products of the layers and the decoder, as [M, K] times [K, N]."""
    shapes, tokens = {}, scale.tokens[1]
    for model, (_, width, _) in (("base", scale.base), ("large", scale.large)):
        shapes[f"{model} projection"] = (tokens, width, width)
        shapes[f"{model} feed-forward"] = (tokens, width, 4 * width)
        shapes[f"{model} decoder"] = (tokens // 6, width, -(-scale.vocab_size // 64) * 64)
    return shapes


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> jax.Array:
    """Makes bfloat16 noise. Products of ones would use less power and so run at a higher clock rate."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def matmul(shape: tuple[int, int, int], steps: int) -> dict[str, float]:
    """Times many products in a row: [M, K] by [K, N], and back by [N, K], with nothing in between."""
    count, inner, columns = shape
    there, back = normal((inner, columns), 1, inner**-0.5), normal((columns, inner), 2, columns**-0.5)
    pairs = 8

    @jax.jit
    def run(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, pairs, lambda _, x: (x @ there) @ back, x)

    found = jax_seconds(run, normal((count, inner), 0), there, back, steps=steps)
    return {**found, "tflops": 4 * count * inner * columns * pairs / found["seconds"] / 1e12}


def attention(scale: Scale, length: int, tokens: int, kind: str) -> dict[str, float]:
    """Times forward and backward of one layer's attention in bfloat16.

    A quarter of each row is padding. If ``kind`` ends in "packed", this quarter is a second example instead.

    ``difference`` is the relative error of its gradients, compared with explicit attention.
    """
    _, width, heads = scale.base
    shape = (max(tokens // length, 1), length, heads, width // heads)
    query, key, value, upstream = (normal(shape, number) for number in range(4))
    kind, _, packed = kind.partition(", ")
    first = jnp.broadcast_to(jnp.arange(length) < 3 * length // 4, shape[:2])
    mask = Mask(examples=2 - first.astype(jnp.int32)) if packed else Mask(keys=first, right_padded=True)
    real = jnp.ones_like(first) if packed else first

    def gradients(kind: str) -> Callable[..., Any]:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            if kind == "eager":
                mixed = dot_product_attention(query, key, value, mask.booleans(length, length))[0]
            else:
                mixed = fused_attention(query, key, value, mask, kind)
            return jnp.sum(jnp.where(real[:, :, None, None], mixed * upstream, 0), dtype=jnp.float32)

        return jax.jit(jax.grad(attend, (0, 1, 2)))

    run = gradients(kind)
    found = jax_seconds(run, query, key, value, steps=scale.steps)
    mine, other = (
        jnp.concatenate([part.astype(jnp.float32).ravel() for part in of(query, key, value)])
        for of in (run, gradients("eager"))
    )
    return {**found, "difference": float(jnp.linalg.norm(mine - other) / jnp.linalg.norm(other))}


def dropout(scale: Scale, tokens: int, generator: str) -> dict[str, float]:
    """Times dropout of feed-forward width, with the surrounding addition and sum, forward and backward."""
    length = scale.lengths[0]
    count = max(tokens // length, 1)

    def drop(x: jax.Array, step: jax.Array) -> jax.Array:
        if generator == "none":
            return x
        if generator == "rbg":
            keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0, impl="rbg"), step), 0.9, x.shape)
            return jnp.where(keep, x / 0.9, 0)
        return Dropout.for_step(0, step, jnp.arange(count), generator)(x, 0.1, "site")

    @jax.jit
    def run(x: jax.Array, step: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.square(x + drop(x, step)).astype(jnp.float32)))(x)

    x = normal((count, length, 4 * scale.base[1]), 0)
    return jax_seconds(run, x, jnp.int32(1), steps=scale.steps)


def projections(scale: Scale, tokens: int, glued: bool) -> dict[str, float]:
    """Times query, key and value projections of one layer from float32 parameters, forward and backward."""
    width = scale.base[1]
    weights = tuple(normal((width, width), number, width**-0.5).astype(jnp.float32) for number in range(3))
    x, upstream = normal((tokens, width), 3), normal((tokens, 3 * width), 4)

    @jax.jit
    def run(weights: tuple[jax.Array, ...], x: jax.Array, upstream: jax.Array) -> Any:
        def total(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
            if glued:
                products = jnp.split(x @ jnp.concatenate(weights, 1).astype(x.dtype), 3, axis=1)
            else:
                products = [x @ weight.astype(x.dtype) for weight in weights]
            parts = zip(products, jnp.split(upstream, 3, axis=1), strict=True)
            return jnp.stack([jnp.sum(one * other, dtype=jnp.float32) for one, other in parts]).sum()

        return jax.grad(total, (0, 1))(weights, x)

    found = jax_seconds(run, weights, x, upstream, steps=scale.steps)
    return {**found, "tflops": 2 * 6 * tokens * width * width / found["seconds"] / 1e12}


class NoCheckpoints:
    """A checkpointer that saves nothing."""

    def save(self, step: int, state: Any) -> None: ...

    def set_best(self, step: int) -> None: ...

    def restore(self, like: Any = None) -> None: ...


class TimedLoader:
    """A loader that records the ``seconds`` of each batch."""

    def __init__(self, loader: PretrainingLoader) -> None:
        self.row_indices, self._loader = loader.row_indices, loader
        self.seconds: list[float] = []

    def batch(self, step: int) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(INPUT):
            batch = self._loader.batch(step)
        self.seconds.append(time.perf_counter() - start)
        return batch


def gaps(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int) -> dict[str, Any]:
    """Profiles the loop of `bert pretrain` with its loader. Returns `gaps_of` and ``making_a_batch``.

    The latter is the host's time per batch relative to a step. Below 1, the device need not wait for batches.
    """
    step, loader = step_of(scale, sizes, True, False, "none"), TimedLoader(loader_of(scale, length, tokens))
    steps, never = WARMUP_STEPS + TRACED_STEPS + 2, 1_000_000
    config = TrainingConfig(steps=steps, log_every=never, checkpoint_every=never, eval_every=never)
    with tempfile.TemporaryDirectory() as folder:
        with InterruptHandler() as interrupts, StepProfiler(Path(folder), lambda text: None) as profiler:
            TrainLoop(
                config=config,
                end_step=steps,
                loader=loader,
                train_step=step.run,
                schedule=lambda update: 0.0,
                evaluate=lambda params: {},
                parallel=step.parallel,
                checkpoints=NoCheckpoints(),
                report=Report(),
                interrupts=interrupts,
                profiler=profiler,
            ).run(step.fresh)
        [trace] = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    placed = step.parallel.shard_batch(loader.batch(0), 1)
    found = jax_seconds(step, placed, steps=scale.steps)
    return {**found, **gaps_of(events), "making_a_batch": statistics.median(loader.seconds) / found["seconds"]}


def gaps_of(events: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns fractions of the time between the first and last kernel of a trace; None without GPU events.

    ``host_gap`` is the fraction without any kernel. ``waiting_for_input`` is the part of it in which the host makes or
    places a batch, or a batch is copied to the device. Other GPU lines of the trace are ignored: they repeat the
    streams' events as whole steps and modules without gaps.
    """
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("name") in ("process_name", "thread_name")
    }
    gpus = {pid for (kind, pid, _), name in names.items() if kind == "process_name" and "/device:GPU" in name}
    streams = {(pid, tid) for (_, pid, tid), name in names.items() if pid in gpus and name.startswith("Stream #")}
    kernels, inputs = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (event["ts"], event["ts"] + event.get("dur", 0))
        on_stream = (event["pid"], event.get("tid")) in streams
        if event["name"] == INPUT or (on_stream and event["name"].startswith("MemcpyH2D")):
            inputs.append(span)
        elif on_stream:
            kernels.append(span)
    kernels, inputs = united(kernels), united(inputs)
    if not kernels:
        return {"host_gap": None, "waiting_for_input": None}
    idle = [(begins, ends) for (_, begins), (ends, _) in itertools.pairwise(kernels)]
    waiting = sum(max(0.0, min(ends, end) - max(begins, begin)) for begins, ends in idle for begin, end in inputs)
    traced = kernels[-1][1] - kernels[0][0]
    return {"host_gap": sum(ends - begins for begins, ends in idle) / traced, "waiting_for_input": waiting / traced}


def united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges overlapping spans, in order."""
    found: list[tuple[float, float]] = []
    for begins, ends in sorted(spans):
        if found and begins <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ends))
        else:
            found.append((begins, ends))
    return found
