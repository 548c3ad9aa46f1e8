"""What the training step reaches on one large GPU, in one call of under ten minutes:

    PYTHONPATH=. python benchmarks/gpu.py --output gpu.json --budget 570

Needs jax, flax, optax and numpy; the peer's rows need torch and transformers and stay out where these are missing. Each
row is written as soon as it is measured, and rows that the file has are not measured again: a run that is killed, or
whose budget ends, goes on with the same command. ``--small`` runs every row at toy sizes on whatever device there is;
without a GPU, cuDNN's rows say that there is none, and the fast ones run its twin.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer needs memory of its own

import jax
import jax.numpy as jnp
import numpy as np
from turns import versions, write

from bert.config import ModelConfig, OptimizerConfig, TrainingConfig
from bert.dot_product import dot_product_attention, fused_attention, padding_mask
from bert.dropout import Dropout
from bert.flops import TRAINING, forward_flops
from bert.heads import BertForPreTraining
from bert.losses import pretraining_objective
from bert.model import Execution
from bert.optimizer import make_optimizer
from bert.parallel import DataParallel
from bert.train import TrainState, make_train_step

FAITHFUL = Execution()


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
        steps: timed for a row.
    """

    base: tuple[int, int, int] = (12, 768, 12)
    large: tuple[int, int, int] = (24, 1024, 16)
    pieces: int = 30522
    lengths: tuple[int, int] = (128, 512)
    tokens: tuple[int, ...] = (32768, 65536, 131072, 262144)
    steps: int = 10


SMALL = Scale((1, 32, 2), (2, 32, 2), 99, (16, 32), (32, 64), 2)


def main(argv: list[str] | None = None) -> None:
    """Measures the rows that the file lacks, as long as the budget lasts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=570, help="seconds; no row is begun after it")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    given = parser.parse_args(argv)
    began, scale = time.monotonic(), SMALL if given.small else Scale()
    found = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    found |= {"device": jax.devices()[0].device_kind, "versions": versions(), "small": given.small}
    for name, measure in rows(scale):
        if name in found["rows"]:
            continue
        if time.monotonic() - began > given.budget:
            print(f"the budget of {given.budget:g} s has ended before {name}: the same command goes on")
            break
        start = time.monotonic()
        try:
            row = measure()
        except Exception as error:  # out of memory, no cuDNN, no torch: the row says so, and the others are measured
            row = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        found["rows"][name] = {**row, "took": round(time.monotonic() - start, 1)}
        write(given.output, found)
        print(f"{name}: {json.dumps(found['rows'][name])}", flush=True)
    print(table(found))


def rows(scale: Scale) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every row with its name, the dearest questions first."""
    batch = scale.tokens[1]
    for name, shape in ceiling_shapes(scale).items():
        yield f"matmul {name}", partial(matmul, shape, scale.steps)
    for model, sizes in (("base", scale.base), ("large", scale.large)):
        for length in scale.lengths:
            at = (scale, sizes, length, batch)
            yield f"{model} T{length} fast", partial(train, *at, fast(), 0.0)
            yield f"{model} T{length} faithful", partial(train, *at, FAITHFUL, 0.1)
            yield f"{model} T{length} torch best", partial(torch_step, *at, best=True)
            yield f"{model} T{length} torch stock", partial(torch_step, *at, best=False)
    yield "host gap and input, base fast", partial(gaps, scale, scale.base, scale.lengths[0], batch)
    for tokens in scale.tokens:
        yield (
            f"base T{scale.lengths[0]} fast, {tokens} tokens",
            partial(train, scale, scale.base, scale.lengths[0], tokens, fast(), 0.0),
        )
    for length in scale.lengths:
        for kind in ("written", "xla", "cudnn"):
            yield f"attention T{length} {kind}", partial(attention, scale, length, batch, kind)
    for generator in ("none", "hash", "threefry", "rbg"):
        yield f"dropout {generator}", partial(dropout, scale, batch, generator)
    yield (
        f"base T{scale.lengths[0]} fast, scanned",
        partial(train, scale, scale.base, scale.lengths[0], batch, fast(scan=True), 0.0),
    )


def seconds(function: Callable[..., Any], *given: Any, steps: int) -> dict[str, float]:
    """Median seconds of a call, and of the first one, which compiles."""
    start = time.perf_counter()
    jax.block_until_ready(function(*given))
    first = time.perf_counter() - start
    jax.block_until_ready(function(*given))
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(function(*given))
        taken.append(time.perf_counter() - start)
    return {"seconds": statistics.median(taken), "first_seconds": first}


def ceiling_shapes(scale: Scale) -> dict[str, tuple[int, int, int]]:
    """[M, K] times [K, N] of the layers and of the decoder."""
    shapes, tokens = {}, scale.tokens[1]
    for model, (_, width, _) in (("base", scale.base), ("large", scale.large)):
        shapes[f"{model} projection"] = (tokens, width, width)
        shapes[f"{model} feed-forward"] = (tokens, width, 4 * width)
        shapes[f"{model} decoder"] = (tokens // 6, width, -(-scale.pieces // 64) * 64)
    return shapes


def matmul(shape: tuple[int, int, int], steps: int) -> dict[str, float]:
    """bfloat16 products, several in a row so that launching them costs nothing."""
    rows_, inner, columns = shape
    left = jnp.ones((rows_, inner), jnp.bfloat16)
    right = jnp.ones((inner, columns), jnp.bfloat16)
    repeats = 8

    @jax.jit
    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        def once(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            product = (left + total[:1, :1]) @ right
            return product, None

        return jax.lax.scan(once, jnp.zeros((rows_, columns), jnp.bfloat16), jnp.arange(repeats))[0]

    found = seconds(run, left, right, steps=steps)
    return {**found, "tflops": 2 * rows_ * inner * columns * repeats / found["seconds"] / 1e12}


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


def batch_of(scale: Scale, length: int, tokens: int) -> dict[str, np.ndarray]:
    """Rows without padding; 15% of the tokens are predicted, as the recipes have it."""
    random = np.random.default_rng(0)
    count, predicted = max(tokens // length, 1), round(0.15 * length)
    ids = random.integers(5, scale.pieces, (count, length)).astype(np.int32)
    places = np.tile(np.linspace(1, length - 2, predicted).astype(np.int32), (count, 1))
    return {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids),
        "attention_mask": np.ones_like(ids),
        "masked_lm_positions": places,
        "masked_lm_ids": np.take_along_axis(ids, places, 1),
        "masked_lm_weights": np.ones(places.shape, np.float32),
        "next_sentence_labels": random.integers(0, 2, count).astype(np.int32),
        "next_sentence_weights": np.ones(count, np.float32),
        "rows": np.arange(count, dtype=np.int32),
    }


def flops(config: ModelConfig, length: int, tokens: int) -> float:
    """Of a training step, of the decoded positions alone."""
    parts = forward_flops(config, length, ("pooler", "predictions"), round(0.15 * length), {})
    return TRAINING * sum(parts.values()) * tokens


class Step:
    """A train step with its state: each call is one step."""

    def __init__(self, scale: Scale, sizes: tuple[int, int, int], execution: Execution, rate: float) -> None:
        self.config = model_config(scale, sizes, rate)
        model = BertForPreTraining(self.config, jnp.bfloat16, execution)
        objective, optimizer = pretraining_objective(model.apply), make_optimizer(OptimizerConfig(), 1_000_000)
        plain = BertForPreTraining(self.config)
        params = jax.device_get(jax.jit(plain.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
        self.parallel = DataParallel(jax.devices()[:1])
        self._state = self.parallel.replicate(TrainState.create(params, optimizer, objective.metrics))
        self._step = self.parallel.compile(make_train_step(objective, optimizer, 0), donate=(0,))

    def __call__(self, placed: dict[str, jax.Array]) -> Any:
        self._state, outcome = self._step(self._state, placed)
        return outcome


def train(
    scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, execution: Execution, rate: float
) -> dict[str, float]:
    """A step of pretraining."""
    step = Step(scale, sizes, execution, rate)
    found = seconds(step, step.parallel.place(batch_of(scale, length, tokens), 1), steps=scale.steps)
    return _rates(found, step.config, length, tokens)


def _rates(found: dict[str, float], config: ModelConfig, length: int, tokens: int) -> dict[str, float]:
    tokens = max(tokens // length, 1) * length
    return {
        **found,
        "sequences_per_second": tokens / length / found["seconds"],
        "tflops": flops(config, length, tokens) / found["seconds"] / 1e12,
    }


def gaps(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int) -> dict[str, Any]:
    """Steps as the loop runs them, the next batch made and placed meanwhile, under the profiler.

    ``device_idle`` is the share of the traced time in which no kernel runs; ``input`` the time to make and place a
    batch as a share of a step: the loop does not wait for it while it is below 1.
    """
    step = Step(scale, sizes, fast(), 0.0)
    batch = batch_of(scale, length, tokens)
    placed = step.parallel.place(batch, 1)
    for _ in range(3):
        jax.block_until_ready(step(placed))
    with tempfile.TemporaryDirectory() as folder:
        inputs, start = 0.0, time.perf_counter()
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(scale.steps):
                outcome = step(placed)
                began = time.perf_counter()
                placed = step.parallel.place({name: array.copy() for name, array in batch.items()}, 1)
                inputs += time.perf_counter() - began
            jax.block_until_ready(outcome)
            taken = time.perf_counter() - start
        [trace] = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {"seconds": taken / scale.steps, "input": inputs / taken, "device_idle": _idle(events)}


def _idle(events: list[dict[str, Any]]) -> float | None:
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
    """Forward and backward of one layer's attention in bfloat16, a quarter of each row being padding."""
    _, width, heads = scale.base
    count = max(tokens // length, 1)
    query, key, value = (
        jax.random.normal(jax.random.key(number), (count, length, heads, width // heads), jnp.bfloat16)
        for number in range(3)
    )
    lengths = jnp.full(count, 3 * length // 4, jnp.int32)
    mask = padding_mask(jnp.arange(length) < lengths[:, None])

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if kind == "written":
            return dot_product_attention(query, key, value, mask)[0].astype(jnp.float32).sum()
        return fused_attention(query, key, value, lengths, kind).astype(jnp.float32).sum()

    return seconds(jax.jit(jax.grad(attend, (0, 1, 2))), query, key, value, steps=scale.steps)


def dropout(scale: Scale, tokens: int, generator: str) -> dict[str, float]:
    """Dropout with the addition and the sum around it, of the feed-forward's width, forward and backward."""
    length = scale.lengths[0]
    count = max(tokens // length, 1)
    x = jnp.ones((count, length, 4 * scale.base[1]), jnp.bfloat16)

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

    return seconds(run, x, jnp.int32(1), steps=scale.steps)


def torch_step(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, best: bool) -> dict[str, float]:
    """The peer: transformers' model with SDPA under torch.compile and autocast to bfloat16, decoding every position
    (stock); or with the masked ones gathered before the decoder and fused AdamW (best)."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import BertConfig, BertForPreTraining

    layers, width, heads = sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    batch = {name: torch.tensor(array, device=device) for name, array in batch_of(scale, length, tokens).items()}
    ids, places, targets = (batch[name].long() for name in ("input_ids", "masked_lm_positions", "masked_lm_ids"))
    follows = batch["next_sentence_labels"].long()
    labels = torch.full(ids.shape, -100, device=device).scatter_(1, places, targets)
    numbers = torch.arange(len(ids), device=device)[:, None]

    def gathered() -> torch.Tensor:
        hidden, pooled = model.bert(input_ids=ids, return_dict=False)[:2]
        logits = model.cls.predictions(hidden[numbers, places].flatten(0, 1)).float()
        return cross_entropy(logits, targets.flatten()) + cross_entropy(
            model.cls.seq_relationship(pooled).float(), follows
        )

    def published() -> torch.Tensor:
        mask = batch["attention_mask"].long()
        return model(input_ids=ids, attention_mask=mask, labels=labels, next_sentence_label=follows).loss

    loss = gathered if best else published
    if device == "cuda":
        loss = torch.compile(loss)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    gc.collect()  # the model of the row before is still in its closures
    if device == "cuda":
        torch.cuda.empty_cache()
    return _rates(seconds(step, steps=scale.steps), model_config(scale, sizes, 0.0), length, tokens)


def table(found: dict[str, Any]) -> str:
    """All rows as Markdown; TFLOP/s also as a share of the best measured matrix product."""
    products = [row["tflops"] for name, row in found["rows"].items() if name.startswith("matmul") and "tflops" in row]
    ceiling = max(products, default=None)
    lines = ["| row | ms | sequences/s | TFLOP/s | of the ceiling | first call, s |", "|" + "---|" * 6]
    for name, row in found["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        tflops = row.get("tflops")
        cells = [
            f"{1000 * row['seconds']:.2f}",
            f"{row['sequences_per_second']:.0f}" if "sequences_per_second" in row else "",
            "" if tflops is None else f"{tflops:.1f}",
            "" if tflops is None or ceiling is None else f"{tflops / ceiling:.0%}",
            f"{row['first_seconds']:.1f}" if "first_seconds" in row else "",
        ]
        extra = {key: row[key] for key in ("device_idle", "input") if row.get(key) is not None}
        notes = "".join(f", {key.replace('_', ' ')} {value:.1%}" for key, value in extra.items())
        lines.append(f"| {name}{notes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
