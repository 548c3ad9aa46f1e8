"""What the training step reaches on one large GPU, in one call of under ten minutes:

    PYTHONPATH=. python benchmarks/gpu.py --output gpu.json

Needs jax, flax, optax, jaxtyping and numpy; the peer's rows need torch and transformers, and say so where these are
missing. Each row is written as soon as it is measured, and a row that the file has is not measured again (one that
failed is): a run that is killed, or whose budget ends, goes on with the same command. JAX and PyTorch take turns as
processes of their own, for neither leaves the other its memory. ``--small`` runs every row at toy sizes on whatever
device there is; without a GPU, cuDNN's rows say that there is none, and the fast ones run its twin.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from turns import versions, write

from bert.config import Count, ModelConfig, OptimizerConfig, TrainingConfig
from bert.data.loader import PretrainingLoader
from bert.data.masking import Masking
from bert.dot_product import dot_product_attention, fused_attention, padding_mask
from bert.dropout import Dropout
from bert.flops import TRAINING, forward_flops
from bert.heads import BertForPreTraining
from bert.losses import pretraining_objective
from bert.model import Execution
from bert.optimizer import make_optimizer
from bert.parallel import DataParallel
from bert.profiling import LEFT_OUT, STEPS, ProfiledStep
from bert.stop import StopRequest
from bert.train import TrainState, Work, fit, make_train_step

FAITHFUL = Execution()
ROUNDS = 3
GRACE = 50
"""Seconds that a row may take beyond the end of its process's share."""
SHARES = {"ours": 0.5, "torch": 0.9, "parts": 1.0}
"""The processes in their order, and when, as a share of the budget, each begins its last row."""


def fast(scan: bool = False) -> Execution:
    """As `training.preset: fast` has it on these devices."""
    return Execution.of(TrainingConfig(preset="fast", vocab_multiple=64, scan_layers=scan))


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        base: sizes of the smaller model, as layers, width, heads.
        large: of the larger one.
        pieces: V.
        lengths: T of both phases.
        tokens: of the batches of the sweep; the second is that of all other rows.
        steps: timed at a time, three times for a row.
    """

    base: tuple[int, int, int] = (12, 768, 12)
    large: tuple[int, int, int] = (24, 1024, 16)
    pieces: int = 30522
    lengths: tuple[int, int] = (128, 512)
    tokens: tuple[int, ...] = (32768, 65536, 131072, 262144)
    steps: int = 8


SMALL = Scale((1, 32, 2), (2, 32, 2), 99, (16, 32), (32, 64), 2)

Row = tuple[str, Callable[[], dict[str, Any]]]


def main(argv: list[str] | None = None) -> None:
    """Measures the rows that the file lacks, as long as the budget lasts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=540, help="seconds; no row is begun after it")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--process", choices=list(SHARES), help="the rows of one process, begun before --until alone")
    parser.add_argument("--until", type=float, help="seconds since 1970")
    given = parser.parse_args(argv)
    found = read(given.output)
    if found["rows"] and found["small"] != given.small:
        parser.error(f"{given.output} holds rows of the other sizes: name another file with --output")
    if given.process:
        measure(given, found)
        return
    began = time.time()
    for process, share in SHARES.items():
        until = began + share * given.budget
        own = ["--process", process, "--until", str(until), "--output", str(given.output)]
        command = [sys.executable, __file__, *own, *(["--small"] if given.small else [])]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            subprocess.run(command, env=environment, timeout=max(until - time.time(), 0) + GRACE)
        except subprocess.TimeoutExpired:
            print(f"a row of {process} took longer than there was time: it was ended")
    found = read(given.output)
    left = [name for process in SHARES for name, _ in rows(process, SMALL if given.small else Scale())]
    left = [name for name in left if name not in found["rows"]]
    if left:
        print(f"the budget of {given.budget:g} s has ended before {', '.join(left)}: the same command goes on")
    print(table(found))


def read(output: Path) -> dict[str, Any]:
    """What has been measured so far."""
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"rows": {}}
    return found


def measure(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """The rows of one process, each written down and printed when it is there."""
    found |= {"versions": versions(), "small": given.small}
    if given.process != "torch":
        found["device"] = jax.devices()[0].device_kind
    for name, row in rows(given.process, SMALL if given.small else Scale()):
        if "error" not in found["rows"].get(name, {"error": "not there"}):
            continue
        if time.time() > given.until:
            break
        start = time.monotonic()
        try:
            figures = row()
        except Exception as error:  # out of memory, no cuDNN, no torch: the row says so, and the others are measured
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        found["rows"][name] = {**figures, "took": round(time.monotonic() - start, 1)}
        write(given.output, found)
        print(f"{name}: {json.dumps(found['rows'][name])}", flush=True)


def rows(process: str, scale: Scale) -> Iterator[Row]:
    """The rows of a process with their names, the dearest last."""
    batch, (short, long) = scale.tokens[1], scale.lengths
    models = {"base": scale.base, "large": scale.large}
    if process == "ours":
        for name, shape in ceiling_shapes(scale).items():
            yield f"matmul {name}", partial(matmul, shape, scale.steps)
        yield f"base T{short} fast", partial(train, scale, scale.base, short, batch, True)
        yield f"base T{short} fast, host gap and input", partial(gaps, scale, scale.base, short, batch)
        for model, length in (("base", long), ("large", short), ("large", long)):
            yield f"{model} T{length} fast", partial(train, scale, models[model], length, batch, True)
    elif process == "torch":
        for model in models:
            for length in scale.lengths:
                for kind in ("best", "stock"):
                    peer = partial(torch_step, scale, models[model], length, batch, kind == "best")
                    yield f"{model} T{length} torch {kind}", peer
    else:
        for length in scale.lengths:
            for kind in ("written", "xla", "cudnn"):
                yield f"attention T{length} {kind}", partial(attention, scale, length, batch, kind)
        for generator in ("none", "hash", "threefry", "rbg"):
            yield f"dropout {generator}", partial(dropout, scale, batch, generator)
        for kind in ("three products", "one product of glued weights"):
            yield f"query, key and value as {kind}", partial(projections, scale, batch, kind.startswith("one"))
        for model, length in (("base", short), ("base", long)):
            yield f"{model} T{length} faithful", partial(train, scale, models[model], length, batch, False)
        for tokens in scale.tokens:
            if tokens != batch:
                yield f"base T{short} fast, {tokens} tokens", partial(train, scale, scale.base, short, tokens, True)
        yield f"base T{short} fast, scanned", partial(train, scale, scale.base, short, batch, True, scan=True)
        for length in scale.lengths:
            yield f"large T{length} faithful", partial(train, scale, scale.large, length, batch, False)


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> dict[str, float]:
    """Median seconds of a call among ``steps`` queued one after the other; and of the first, which compiles."""
    start = time.perf_counter()
    wait(call())
    first = time.perf_counter() - start
    wait(call())
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(steps):
            result = call()
        wait(result)
        taken.append((time.perf_counter() - start) / steps)
    return {"seconds": statistics.median(taken), "first_seconds": first}


def jax_seconds(function: Callable[..., Any], *given: Any, steps: int) -> dict[str, float]:
    return seconds(lambda: function(*given), jax.block_until_ready, steps)


def ceiling_shapes(scale: Scale) -> dict[str, tuple[int, int, int]]:
    """[M, K] times [K, N] of the layers and of the decoder."""
    shapes, tokens = {}, scale.tokens[1]
    for model, (_, width, _) in (("base", scale.base), ("large", scale.large)):
        shapes[f"{model} projection"] = (tokens, width, width)
        shapes[f"{model} feed-forward"] = (tokens, width, 4 * width)
        shapes[f"{model} decoder"] = (tokens // 6, width, -(-scale.pieces // 64) * 64)
    return shapes


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> jax.Array:
    """bfloat16 noise: products of ones would draw less power, and so run at a higher clock."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(jnp.bfloat16)


def matmul(shape: tuple[int, int, int], steps: int) -> dict[str, float]:
    """[M, K] by [K, N] and back by [N, K], many in a row, with nothing in between."""
    count, inner, columns = shape
    there, back = normal((inner, columns), 1, inner**-0.5), normal((columns, inner), 2, columns**-0.5)
    pairs = 8

    @jax.jit
    def run(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, pairs, lambda _, x: (x @ there) @ back, x)

    found = jax_seconds(run, normal((count, inner), 0), there, back, steps=steps)
    return {**found, "tflops": 4 * count * inner * columns * pairs / found["seconds"] / 1e12}


def model_config(scale: Scale, sizes: tuple[int, int, int], rate: float) -> ModelConfig:
    """A model of these sizes; ``rate`` is the dropout on attention weights alone."""
    layers, width, heads = sizes
    return ModelConfig(
        vocab_size=scale.pieces,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attention_probs_dropout_prob=rate,
    )


@dataclass(frozen=True)
class Corpus:
    """Pairs of random pieces without padding; 0 to 4 are special."""

    pieces: int
    length: int
    count: int = 4096

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of `bert.data.examples` at these rows."""
        ids, follows = self._columns
        return {
            "input_ids": ids[indices],
            "length": np.full(len(indices), self.length),
            "segment_a_length": np.full(len(indices), self.length // 2 + 1),
            "next_sentence_label": follows[indices],
        }

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        ids = random.integers(5, self.pieces, (self.count, self.length)).astype(np.uint16)
        ids[:, 0], ids[:, self.length // 2], ids[:, -1] = 2, 3, 3
        return ids, random.integers(0, 2, self.count).astype(np.uint8)


def loader_of(scale: Scale, length: int, tokens: int) -> PretrainingLoader:
    """Batches as pretraining has them, 15% of the tokens predicted."""
    masking = Masking(scale.pieces, 4, range(5), max_predictions=round(0.15 * length))
    return PretrainingLoader(Corpus(scale.pieces, length), masking, max(tokens // length, 1), seed=0)


class Step:
    """The train step at its sizes, with its state: each call is one step."""

    def __init__(self, scale: Scale, sizes: tuple[int, int, int], is_fast: bool, scan: bool) -> None:
        self.config = model_config(scale, sizes, 0.0 if is_fast else 0.1)
        model = BertForPreTraining(self.config, jnp.bfloat16, fast(scan) if is_fast else FAITHFUL)
        objective, optimizer = pretraining_objective(model.apply), make_optimizer(OptimizerConfig(), 1_000_000)
        self.parallel = DataParallel(jax.devices()[:1])
        self.fresh = TrainState.create(parameters(self.config), optimizer, objective.metrics)
        self.state = self.parallel.replicate(self.fresh)
        self.run = self.parallel.compile(make_train_step(objective, optimizer, 0), donate=(0,))

    def __call__(self, placed: dict[str, jax.Array]) -> Any:
        self.state, outcome = self.run(self.state, placed)
        return outcome


step_of = functools.lru_cache(maxsize=1)(Step)  # rows that follow each other share what is compiled


def parameters(config: ModelConfig) -> Any:
    """Noise of BERT's width, made without compiling anything."""
    shapes = jax.eval_shape(BertForPreTraining(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    noise = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    constant = {"scale": 1.0, "bias": 0.0}

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, constant[path[-1]], np.float32) if path[-1] in constant else np.resize(noise, shape)

    flat = traverse_util.flatten_dict(shapes)
    return traverse_util.unflatten_dict({path: leaf(path, value.shape) for path, value in flat.items()})


def train(
    scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, is_fast: bool, scan: bool = False
) -> dict[str, float]:
    """A step of pretraining. ``loss`` is that after all steps, on one batch: learnt by heart on both sides."""
    step, batch = step_of(scale, sizes, is_fast, scan), loader_of(scale, length, tokens).batch(0)
    placed = step.parallel.place(batch, 1)
    found = jax_seconds(step, placed, steps=scale.steps)
    outcome = step.parallel.fetch(step(placed))
    return {
        **rates(found, step.config, batch["masked_lm_positions"].shape[1], batch["input_ids"].shape),
        "loss": float(outcome.loss),
        "skipped": int(outcome.skipped[1]),
    }


def rates(found: dict[str, float], config: ModelConfig, predicted: int, shape: tuple[int, ...]) -> dict[str, float]:
    """Figures of a step on [B, T] = ``shape``; of its operations, those of the decoded positions alone."""
    count, length = shape
    parts = forward_flops(config, length, ("pooler", "predictions"), predicted, {})
    operations = TRAINING * sum(parts.values()) * count * length
    return {
        **found,
        "sequences_per_second": count / found["seconds"],
        "tflops": operations / found["seconds"] / 1e12,
    }


class Silent:
    """A listener for the loop."""

    def begins(self, step: int, seconds_per_step: float) -> None: ...

    def step(self, step: int, loss: float) -> None: ...

    def skipped(self, step: Any) -> None: ...

    def metrics(self, step: int, split: str, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int) -> bool:
        return True

    def save(self, step: int, state: Any) -> None: ...


def gaps(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int) -> dict[str, Any]:
    """The loop of `bert pretrain` with its loader, under the profiler.

    ``device_idle`` is the share of the traced time in which no kernel runs, whatever for; ``input`` what the host
    takes to make a batch, as a share of a step: the device does not wait for it while it is below 1.
    """
    step, loader = step_of(scale, sizes, True, False), loader_of(scale, length, tokens)
    made: list[float] = []

    def batch(number: int) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        rows_of_step = loader.batch(number)
        made.append(time.perf_counter() - start)
        return rows_of_step

    with tempfile.TemporaryDirectory() as folder:
        profiled = ProfiledStep(step.run, Path(folder), lambda said: None)
        steps = LEFT_OUT + STEPS + 2
        work = Work(
            total_steps=steps,
            eval_every=10 * steps,
            batch=batch,
            rows=loader.numbers,
            train_step=profiled,
            learning_rate=lambda number: 0.0,
            evaluate=lambda params: {},
        )
        config = TrainingConfig(steps=Count(steps), log_every=Count(10 * steps), checkpoint_every=Count(10 * steps))
        with StopRequest() as stop:
            fit(work, step.fresh, config, step.parallel, Silent(), Silent(), stop)
        profiled.end()
        [trace] = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    placed = step.parallel.place(loader.batch(0), 1)
    found = jax_seconds(step, placed, steps=scale.steps)
    return {**found, "input": statistics.median(made) / found["seconds"], "device_idle": idle(events)}


def idle(events: list[dict[str, Any]]) -> float | None:
    """Share of the time from the first kernel to the last in which none ran; None without a GPU's lines."""
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event.get("args", {}).get("name", "")
    }
    spans = sorted(
        (event["ts"], event["ts"] + event.get("dur", 0))
        for event in events
        if event.get("pid") in devices and event.get("ph") == "X"
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for begins, ends in spans:
        busy += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    return 1 - busy / (end - spans[0][0])


def attention(scale: Scale, length: int, tokens: int, kind: str) -> dict[str, float]:
    """Forward and backward of one layer's attention in bfloat16, a quarter of each row being padding.

    ``difference`` is how far its gradients are from those of attention as written out, as a share of their norm.
    """
    _, width, heads = scale.base
    shape = (max(tokens // length, 1), length, heads, width // heads)
    query, key, value, upstream = (normal(shape, number) for number in range(4))
    lengths = jnp.full(shape[0], 3 * length // 4, jnp.int32)
    real = jnp.arange(length) < lengths[:, None]

    def gradients(kind: str) -> Callable[..., Any]:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            if kind == "written":
                mixed = dot_product_attention(query, key, value, padding_mask(real))[0]
            else:
                mixed = fused_attention(query, key, value, lengths, kind)
            return jnp.sum(jnp.where(real[:, :, None, None], mixed * upstream, 0), dtype=jnp.float32)

        return jax.jit(jax.grad(attend, (0, 1, 2)))

    run = gradients(kind)
    found = jax_seconds(run, query, key, value, steps=scale.steps)
    mine, other = (
        jnp.concatenate([part.astype(jnp.float32).ravel() for part in of(query, key, value)])
        for of in (run, gradients("written"))
    )
    return {**found, "difference": float(jnp.linalg.norm(mine - other) / jnp.linalg.norm(other))}


def dropout(scale: Scale, tokens: int, generator: str) -> dict[str, float]:
    """Dropout with the addition and the sum around it, of the feed-forward's width, forward and backward."""
    length = scale.lengths[0]
    count = max(tokens // length, 1)

    def drop(x: jax.Array, step: jax.Array) -> jax.Array:
        if generator == "none":
            return x
        if generator == "rbg":
            keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0, impl="rbg"), step), 0.9, x.shape)
            return jnp.where(keep, x / 0.9, 0)
        return Dropout.of(0, step, jnp.arange(count), generator)(x, 0.1, "site")

    @jax.jit
    def run(x: jax.Array, step: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.square(x + drop(x, step)).astype(jnp.float32)))(x)

    x = normal((count, length, 4 * scale.base[1]), 0)
    return jax_seconds(run, x, jnp.int32(1), steps=scale.steps)


def projections(scale: Scale, tokens: int, glued: bool) -> dict[str, float]:
    """Query, key and value of one layer from float32 parameters, forward and backward."""
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


def torch_step(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, best: bool) -> dict[str, float]:
    """The peer: transformers' model with SDPA under torch.compile and autocast to bfloat16, decoding every position
    (stock); or with the masked ones gathered before the decoder and fused AdamW (best)."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import BertConfig, BertForPreTraining

    layers, width, heads = sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gc.collect()  # the model of the row before is still in its closures
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = BertConfig(
        vocab_size=-(-scale.pieces // 64) * 64 if best else scale.pieces,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attention_probs_dropout_prob=0.0 if best else 0.1,
    )
    model = BertForPreTraining(config).train()  # with SDPA, transformers' default
    model.to(torch.device(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=best)
    arrays = loader_of(scale, length, tokens).batch(0)
    decoded = arrays["masked_lm_weights"] > 0
    every = np.full(arrays["input_ids"].shape, -100)
    every[np.nonzero(decoded)[0], arrays["masked_lm_positions"][decoded]] = arrays["masked_lm_ids"][decoded]
    arrays |= {"labels": every, "masked_lm_ids": np.where(decoded, arrays["masked_lm_ids"], -100)}
    batch = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
    names = ("input_ids", "token_type_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels", "labels")
    ids, segments, places, targets, follows, labels = (batch[name].long() for name in names)
    numbers = torch.arange(len(ids), device=device)[:, None]

    def gathered() -> torch.Tensor:
        hidden, pooled = model.bert(input_ids=ids, token_type_ids=segments, return_dict=False)[:2]
        logits = model.cls.predictions(hidden[numbers, places].flatten(0, 1)).float()
        return cross_entropy(logits, targets.flatten()) + cross_entropy(
            model.cls.seq_relationship(pooled).float(), follows
        )

    def published() -> torch.Tensor:
        mask = batch["attention_mask"].long()
        given = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        return model(**given, labels=labels, next_sentence_label=follows).loss

    loss = gathered if best else published
    if device == "cuda":
        loss = torch.compile(loss, dynamic=False)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    def wait(value: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = seconds(step, wait, scale.steps)
    sizes_of_step = (arrays["masked_lm_positions"].shape[1], arrays["input_ids"].shape)
    return {**rates(found, model_config(scale, sizes, 0.0), *sizes_of_step), "loss": float(step())}


def table(found: dict[str, Any]) -> str:
    """All rows as Markdown: TFLOP/s also as a share of the best measured product, ours beside the peer's at the same
    sizes."""
    measured = {name: row for name, row in found["rows"].items() if "error" not in row}
    products = [row["tflops"] for name, row in measured.items() if name.startswith("matmul")]
    ceiling = max(products, default=None)
    heads = ("row", "ms", "sequences/s", "TFLOP/s", "of the ceiling", "/ torch best", "/ torch stock", "first call, s")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, row in found["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * (len(heads) - 2))
            continue
        tflops, rate = row.get("tflops"), row.get("sequences_per_second")
        at = " ".join(name.replace(",", "").split()[:2])
        peers = [measured.get(f"{at} torch {kind}", {}).get("sequences_per_second") for kind in ("best", "stock")]
        cells = [
            f"{1000 * row['seconds']:.2f}",
            "" if rate is None else f"{rate:.0f}",
            "" if tflops is None else f"{tflops:.1f}",
            "" if tflops is None or ceiling is None else f"{tflops / ceiling:.0%}",
            *("" if rate is None or peer is None else f"{rate / peer:.2f}" for peer in peers),
            f"{row['first_seconds']:.1f}",
        ]
        extra = {key: row[key] for key in ("device_idle", "input", "difference") if row.get(key) is not None}
        notes = "".join(f", {key.replace('_', ' ')} {value:.2%}" for key, value in extra.items())
        notes += f", {row['skipped']} steps skipped" if row.get("skipped") else ""
        lines.append(f"| {name}{notes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
