"""Whole pretraining steps for gpu.py, ours and PyTorch's. Not a benchmark on its own."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert.analysis.memory import activation_bytes
from bert.config import ModelConfig, OptimizerConfig, TrainingConfig
from bert.config.training import Remat
from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.masking import Masking
from bert.model.layers import LayerExecution
from bert.model.pretraining import BertForPreTraining
from bert.parallel.backends import PmapParallelism
from bert.training.flops import TRAINING, forward_flops
from bert.training.losses import make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, make_train_step

ROUNDS = 3
INPUT = "input"
"""Name of the host's work for a batch in a trace."""


def execution(is_fast: bool, scan: bool, remat: Remat) -> LayerExecution:
    """Returns the settings that `training.preset` resolves to on these devices, fast or reference."""
    if is_fast:
        return LayerExecution.from_config(
            TrainingConfig(preset="fast", pad_vocab_to_multiple_of=64, scan_layers=scan, remat=remat)
        )
    return LayerExecution(remat, scan)


@dataclass(frozen=True)
class Scale:
    """Sizes of the benchmark.

    Attributes:
        base: layers, width and heads of the smaller model.
        large: layers, width and heads of the larger model.
        vocab_size: V.
        lengths: T in both phases.
        tokens: tokens per batch in the sweep. All other rows use the second value.
        steps: number of steps per measurement. Each row has three measurements.
        memory: bytes of device memory; the default is an H100's.
    """

    base: tuple[int, int, int] = (12, 768, 12)
    large: tuple[int, int, int] = (24, 1024, 16)
    vocab_size: int = 30522
    lengths: tuple[int, int] = (128, 512)
    tokens: tuple[int, ...] = (32768, 65536, 131072, 262144)
    steps: int = 8
    memory: int = 80 * 2**30


SMALL = Scale((1, 32, 2), (2, 32, 2), 99, (16, 32), (32, 64, 256), 2, 400_000)


def remat_of(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, is_fast: bool) -> Remat:
    """Returns `LayerExecution.remat` for a row: "dots" if storing everything would fill the memory.

    Estimates the layers with `bert.analysis.memory`, and the logits with 10 bytes per token of the vocabulary and
    decoded position. The limit is 45% of the memory, because XLA uses about 1.5 times the estimate.
    """
    config = model_config(scale, sizes, 0.0 if is_fast else 0.1)
    layers = activation_bytes(config, length, stores_scores=not is_fast)
    stored = layers * tokens / length + 0.15 * 10 * scale.vocab_size * tokens
    return "dots" if stored > 0.45 * scale.memory else "none"


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> dict[str, float]:
    """Returns the median seconds among ``steps`` queued calls, and the seconds of the first call, which compiles."""
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


def model_config(scale: Scale, sizes: tuple[int, int, int], rate: float) -> ModelConfig:
    """Returns a configuration with these sizes. ``rate`` is the dropout rate of attention weights only."""
    layers, width, heads = sizes
    return ModelConfig(
        vocab_size=scale.vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attention_probs_dropout_prob=rate,
    )


@dataclass(frozen=True)
class Corpus:
    """Pairs of random tokens without padding. Ids 0 to 4 are special tokens."""

    vocab_size: int
    length: int
    count: int = 4096

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of `bert.data.pretraining.build` for these rows."""
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
        ids = random.integers(5, self.vocab_size, (self.count, self.length)).astype(np.uint16)
        ids[:, 0], ids[:, self.length // 2], ids[:, -1] = 2, 3, 3
        return ids, random.integers(0, 2, self.count).astype(np.uint8)


def loader_of(scale: Scale, length: int, tokens: int) -> PretrainingLoader:
    """Returns a loader of pretraining batches in which 15% of the tokens are predicted."""
    masking = Masking(scale.vocab_size, 4, range(5), max_predictions=round(0.15 * length))
    return PretrainingLoader(Corpus(scale.vocab_size, length), masking, max(tokens // length, 1), seed=0)


class Watched(PmapParallelism):
    """Parallelism that marks the transfer of batches in a trace."""

    def shard_batch(self, batch: dict[str, np.ndarray], micro_batches: int | None = None) -> dict[str, jax.Array]:
        with jax.profiler.TraceAnnotation(INPUT):
            return super().shard_batch(batch, micro_batches)


class Step:
    """The train step and its state. Each call runs one step."""

    def __init__(self, scale: Scale, sizes: tuple[int, int, int], is_fast: bool, scan: bool, remat: Remat) -> None:
        self.config = model_config(scale, sizes, 0.0 if is_fast else 0.1)
        model = BertForPreTraining(self.config, jnp.bfloat16, execution(is_fast, scan, remat))
        loss, optimizer = make_pretraining_loss(model.apply), make_optimizer(OptimizerConfig(), 1_000_000)
        self.parallel = Watched(jax.devices()[:1])
        self.fresh = TrainState.create(parameters(self.config), optimizer, loss.metrics)
        self.state = self.parallel.put_state(self.fresh)
        self.run = self.parallel.compile(make_train_step(loss, optimizer, 0), donate=(0,))

    def __call__(self, placed: dict[str, jax.Array]) -> Any:
        self.state, outcome = self.run(self.state, placed)
        return outcome


_made: dict[tuple[Any, ...], Step] = {}


def step_of(*settings: Any) -> Step:
    """Returns the step for these settings. Consecutive rows share it, because two states may not fit into memory."""
    if settings not in _made:
        let_go()
        _made[settings] = Step(*settings)
    return _made[settings]


def let_go() -> None:
    """Frees the last step. A failed step has already donated its state."""
    _made.clear()
    gc.collect()


def parameters(config: ModelConfig) -> Any:
    """Returns random parameters of BERT's scale, without compiling anything."""
    shapes = jax.eval_shape(BertForPreTraining(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    noise = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(np.float32)
    constant = {"scale": 1.0, "bias": 0.0}

    def leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, constant[path[-1]], np.float32) if path[-1] in constant else np.resize(noise, shape)

    flat = traverse_util.flatten_dict(shapes)
    return traverse_util.unflatten_dict({path: leaf(path, value.shape) for path, value in flat.items()})


def train(
    scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, is_fast: bool, scan: bool, remat: str
) -> dict[str, Any]:
    """Measures a pretraining step. ``loss`` is the loss after all steps on one batch, which both sides memorize."""
    step, batch = step_of(scale, sizes, is_fast, scan, remat), loader_of(scale, length, tokens).batch(0)
    placed = step.parallel.shard_batch(batch, 1)
    found = jax_seconds(step, placed, steps=scale.steps)
    outcome = step.parallel.to_host(step(placed))
    return {
        **rates(found, step.config, batch["masked_lm_positions"].shape[1], batch["input_ids"].shape),
        "loss": float(outcome.loss),
        "skipped": int(outcome.skipped[1]),
    }


def rates(found: dict[str, float], config: ModelConfig, predicted: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns figures of a step on [B, T] = ``shape``, counting only the decoder operations at predicted positions."""
    count, length = shape
    parts = forward_flops(config, length, ("pooler", "predictions"), predicted, {})
    operations = TRAINING * sum(parts.values()) * count * length
    return {
        **found,
        "batch": list(shape),
        "sequences_per_second": count / found["seconds"],
        "tflops": operations / found["seconds"] / 1e12,
    }


def torch_step(scale: Scale, sizes: tuple[int, int, int], length: int, tokens: int, best: bool) -> dict[str, Any]:
    """Measures the peer: transformers' model with SDPA, torch.compile and autocast to bfloat16.

    "stock" decodes every position. "best" gathers the masked positions before the decoder, and uses fused AdamW.

    Embeddings, one layer, and heads with losses are compiled separately, and all layers share one compilation. The
    budget does not suffice to compile the whole model, which might also fuse operations across layers.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import BertConfig, BertForPreTraining

    layers, width, heads = sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gc.collect()  # the previous row's model is still referenced by its closures
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = BertConfig(
        vocab_size=-(-scale.vocab_size // 64) * 64 if best else scale.vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attention_probs_dropout_prob=0.0 if best else 0.1,
    )
    model = BertForPreTraining(config).train()  # uses SDPA, transformers' default
    model.to(torch.device(device))
    # None, not False, which would override PyTorch's own choice.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=best or None)
    arrays = loader_of(scale, length, tokens).batch(0)
    decoded = arrays["masked_lm_weights"] > 0
    every = np.full(arrays["input_ids"].shape, -100)
    every[np.nonzero(decoded)[0], arrays["masked_lm_positions"][decoded]] = arrays["masked_lm_ids"][decoded]
    arrays |= {"labels": every, "masked_lm_ids": np.where(decoded, arrays["masked_lm_ids"], -100)}
    batch = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
    names = ("input_ids", "token_type_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels", "labels")
    ids, segments, places, targets, follows, labels = (batch[name].long() for name in names)
    numbers = torch.arange(len(ids), device=device)[:, None]

    given = {} if best else {"attention_mask": batch["attention_mask"].long()}

    def gathered(hidden: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits = model.cls.predictions(hidden[numbers, places].flatten(0, 1)).float()
        return cross_entropy(logits, targets.flatten()) + cross_entropy(
            model.cls.seq_relationship(pooled).float(), follows
        )

    def published(hidden: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits, answers = model.cls(hidden, pooled)
        return cross_entropy(logits.flatten(0, 1), labels.flatten()) + cross_entropy(answers, follows)

    loss = gathered if best else published
    if device == "cuda":
        loss = torch.compile(loss, dynamic=False)
        for part in (model.bert.embeddings, *model.bert.encoder.layer):
            part.compile(dynamic=False)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            value = loss(*model.bert(input_ids=ids, token_type_ids=segments, return_dict=False, **given)[:2])
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def wait(value: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = seconds(step, wait, scale.steps)
    sizes_of_step = (arrays["masked_lm_positions"].shape[1], arrays["input_ids"].shape)
    return {**rates(found, model_config(scale, sizes, 0.0), *sizes_of_step), "loss": float(step())}
