"""Compares a pretraining step with PyTorch on the same machine, in turns:

    PYTHONPATH=. python benchmarks/train_step.py --output train_step.json

L4 H256 A4, 30,522 tokens, 32 rows of 128 tokens, 20 predictions per row, dropout 0.1, AdamW, clipping at 1, NSP. Sides:

- ours, in float32 and bfloat16;
- "stock", transformers' BertForPreTraining as users run it;
- "best", the same model with masked positions gathered before the decoder, SDPA and fused AdamW, compiled and not, in
  float32 and with autocast to bfloat16.

Every measurement runs in a separate process. An interrupted comparison resumes.

With ``--causal 1`` the model is GPT-2: every token is predicted, and the peer is GPT2LMHeadModel, as "best" with fused
AdamW. With ``--modern 1`` it is ModernBERT without NSP, and "best" decodes only the masked positions
(`sparse_prediction`). The feed-forward layer is 4 times as wide as the encoder, and 1.5 times for ModernBERT.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import in_turns, table

from bert.runtime.process import reexec_with_huge_pages

SIZES = {"layers": 4, "width": 256, "heads": 4, "vocab_size": 30522, "rows": 32, "length": 128, "predicted": 20,
         "causal": 0, "modern": 0, "dropout": 0.1}  # fmt: skip
GPT2: dict[str, Any] = {
    "causal": True, "pre_layer_norm": True, "embedding_norm": False, "prediction_transform": False,
    "prediction_bias": False, "type_vocab_size": 0, "hidden_act": "gelu_tanh", "layer_norm_eps": 1e-5,
}  # fmt: skip
MODERN: dict[str, Any] = {
    "gated_feed_forward": True, "use_bias": False, "norm_bias": False, "layer_norm_eps": 1e-5, "pre_layer_norm": True,
    "first_layer_norm": False, "type_vocab_size": 0, "position_embedding_type": "rotary", "rotary_base": 160000.0,
    "local_rotary_base": 10000.0, "attention_window": 64, "global_attention_every": 3, "pooler_type": "transform",
    "pooler_input": "mean",
}  # fmt: skip
SIDES = {
    "ours float32": ("ours", "float32", ""),
    "ours bfloat16": ("ours", "bfloat16", ""),
    "stock float32": ("stock", "float32", ""),
    "stock bfloat16": ("stock", "bfloat16", ""),
    "best float32": ("best", "float32", ""),
    "best float32, compiled": ("best", "float32", "compiled"),
    "best bfloat16": ("best", "bfloat16", ""),
    "best bfloat16, compiled": ("best", "bfloat16", "compiled"),
}


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("train_step.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="timed in each process, after three that are not")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "DTYPE", "HOW"), help=argparse.SUPPRESS)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = parser.parse_args()
    sizes = argparse.Namespace(**{name: getattr(given, name) for name in SIZES})
    if given.worker:
        side, dtype, how = given.worker
        if side != "stock":  # as in `bert pretrain`, and as in a well-tuned PyTorch program
            reexec_with_huge_pages()
        step = {"ours": ours, "stock": stock, "best": best}[side](sizes, dtype, how)
        print(json.dumps(timed(step, given.steps)))
        return
    shape = [part for name in SIZES for part in (f"--{name}", str(getattr(given, name)))]
    sides = {name: [__file__, "--worker", *SIDES[name], "--steps", str(given.steps), *shape] for name in given.sides}
    found = in_turns(sides, given)
    print(found["hardware"], found["versions"])
    against = "stock float32" if "stock float32" in given.sides else None
    print(table(found, ("seconds", "cpu_seconds", "first_seconds", "peak_gigabytes"), against))


def timed(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Returns median wall-clock and CPU seconds of a step, seconds of the first, which compiles, and peak memory."""
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    step(), step()
    wall, cpu = [], []
    for _ in range(steps):
        start, used = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return {
        "seconds": statistics.median(wall),
        "cpu_seconds": statistics.median(cpu),
        "first_seconds": first,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def batch_of(sizes: Any) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, equal for all sides."""
    random = np.random.default_rng(0)
    shape = (sizes.rows, sizes.length)
    ids = random.integers(5, sizes.vocab_size, shape).astype(np.int32)
    if sizes.causal:
        return {
            "input_ids": ids,
            "attention_mask": np.ones(shape, np.int32),
            "next_token_ids": np.roll(ids, -1, axis=1),
            "next_token_weights": np.broadcast_to(np.arange(sizes.length) < sizes.length - 1, shape).astype(np.float32),
            "rows": np.arange(sizes.rows, dtype=np.int32),
        }
    places = np.sort([random.permutation(sizes.length - 2)[: sizes.predicted] + 1 for _ in range(sizes.rows)], axis=1)
    batch = {
        "input_ids": ids,
        "token_type_ids": np.broadcast_to(np.arange(sizes.length) > sizes.length // 2, shape).astype(np.int32),
        "attention_mask": np.ones(shape, np.int32),
        "masked_lm_positions": places.astype(np.int32),
        "masked_lm_ids": np.take_along_axis(ids, places, 1),
        "masked_lm_weights": np.ones(places.shape, np.float32),
        "next_sentence_labels": random.integers(0, 2, sizes.rows).astype(np.int32),
        "next_sentence_weights": np.ones(sizes.rows, np.float32),
        "rows": np.arange(sizes.rows, dtype=np.int32),
    }
    return {name: array for name, array in batch.items() if not (sizes.modern and name.startswith("next_sentence"))}


def ours(sizes: Any, dtype: Any, how: str) -> Callable[[], None]:
    """Runs the step like `bert pretrain`."""
    import jax
    import jax.numpy as jnp

    from bert.config import DataConfig, ModelConfig, OptimizerConfig, PretrainConfig, TrainingConfig
    from bert.parallel.backends import PmapParallelism
    from bert.training.optimizer import make_optimizer
    from bert.training.pretraining.objectives import build_model_and_loss
    from bert.training.step import TrainState, make_train_step

    config = ModelConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.width * 3 // 2 if sizes.modern else 4 * sizes.width,
        max_position_embeddings=max(512, sizes.length),
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=sizes.dropout,
        **(GPT2 if sizes.causal else MODERN if sizes.modern else {}),
    )
    data = DataConfig(input_format="full_sentences") if sizes.modern else DataConfig()
    if sizes.causal:
        data = DataConfig(input_format="blocks")
    training = TrainingConfig(dtype=dtype, objective="clm" if sizes.causal else "mlm")
    model, loss = build_model_and_loss(PretrainConfig(data=data, model=config, training=training))
    optimizer = make_optimizer(OptimizerConfig(), 1_000_000)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"])
    parallel = PmapParallelism(jax.devices()[:1])
    state = parallel.put_state(TrainState.create(params, optimizer, loss.metrics))
    train_step = parallel.compile(make_train_step(loss, optimizer, 0), donate=(0,))
    placed = parallel.shard_batch(batch_of(sizes), 1)

    def step() -> None:
        nonlocal state
        state, outcome = train_step(state, placed)
        jax.block_until_ready((state, outcome))

    return step


def stock(sizes: Any, dtype: str, how: str) -> Callable[[], None]:
    """Runs transformers' model with torch's AdamW, as in transformers' examples."""
    import torch

    model, batch = _peer(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    if sizes.causal:
        return _torch_step(model, optimizer, dtype, lambda: _language_model_loss(model, batch))
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": _labels(batch)}
    if not sizes.modern:
        inputs["token_type_ids"] = batch["token_type_ids"]
        inputs["next_sentence_label"] = batch["next_sentence_labels"]
    return _torch_step(model, optimizer, dtype, lambda: model(**inputs).loss)


def best(sizes: Any, dtype: str, how: str) -> Callable[[], None]:
    """Gathers masked positions before the decoder, with SDPA, fused AdamW, and no mask without padding."""
    import torch
    from torch.nn.functional import cross_entropy

    model, batch = _peer(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if sizes.causal:
        loss = functools.partial(_language_model_loss, model, batch)
        return _torch_step(model, optimizer, dtype, torch.compile(loss) if how == "compiled" else loss)
    if sizes.modern:
        model.sparse_prediction, labels = True, _labels(batch)

        def loss_of_masked() -> torch.Tensor:
            return model(input_ids=batch["input_ids"], labels=labels).loss

        return _torch_step(
            model, optimizer, dtype, torch.compile(loss_of_masked) if how == "compiled" else loss_of_masked
        )
    rows = torch.arange(sizes.rows)[:, None]

    def loss_of_pairs() -> torch.Tensor:
        hidden, pooled = model.bert(
            input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"], return_dict=False
        )[:2]
        logits = model.cls.predictions(hidden[rows, batch["masked_lm_positions"]].flatten(0, 1))
        mlm = cross_entropy(logits.float(), batch["masked_lm_ids"].flatten())
        return mlm + cross_entropy(model.cls.seq_relationship(pooled).float(), batch["next_sentence_labels"])

    return _torch_step(model, optimizer, dtype, torch.compile(loss_of_pairs) if how == "compiled" else loss_of_pairs)


def _labels(batch: dict[str, Any]) -> Any:
    import torch

    labels = torch.full(batch["input_ids"].shape, -100)
    return labels.scatter_(1, batch["masked_lm_positions"], batch["masked_lm_ids"])


def _language_model_loss(model: Any, batch: dict[str, Any]) -> Any:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["input_ids"]).loss


def _peer(sizes: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import (
        BertConfig,
        BertForPreTraining,
        GPT2Config,
        GPT2LMHeadModel,
        ModernBertConfig,
        ModernBertForMaskedLM,
    )

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch = {name: torch.tensor(array) for name, array in batch_of(sizes).items()}
    batch |= {name: array.long() for name, array in batch.items() if not array.is_floating_point()}
    shape: dict[str, Any]
    if sizes.causal:
        shape = {"n_embd": sizes.width, "n_layer": sizes.layers, "n_head": sizes.heads, "n_positions": 1024}
        dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), sizes.dropout)
        return GPT2LMHeadModel(GPT2Config(vocab_size=sizes.vocab_size, **shape, **dropout)).train(), batch
    shape = {"hidden_size": sizes.width, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads}
    shape |= {"vocab_size": sizes.vocab_size, "max_position_embeddings": max(512, sizes.length)}
    if sizes.modern:
        special: dict[str, Any] = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
        modern = ModernBertConfig(**shape, **special, intermediate_size=sizes.width * 3 // 2)
        return ModernBertForMaskedLM(modern).train(), batch
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), sizes.dropout)
    config = BertConfig(**shape, **dropout, intermediate_size=4 * sizes.width)
    return BertForPreTraining(config).train(), batch  # uses SDPA, transformers' default


def _torch_step(model: Any, optimizer: Any, dtype: str, loss: Callable[[], Any]) -> Callable[[], None]:
    import torch

    def step() -> None:
        low = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
        with low:
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
