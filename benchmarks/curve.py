"""Compares pretraining with PyTorch: held-out MLM loss with equal rows, masks, schedule and initial weights.

    PYTHONPATH=. python benchmarks/curve.py OUT --train train.txt --eval valid.txt --tokenizer vocab.txt

Trains `mini` at T 128 with dropout and dynamic masking. Our side is the library's own step. The peer is transformers'
BertForPreTraining with torch's AdamW, in the loop that its users write: no decay on biases and LayerNorm, clipping,
linear schedule. Only its decoder differs: it reads just the masked positions, which halves its time. Each run first
checks that loss and gradients equal the model's own.

For each seed, both sides start from the same weights and read the same batches. Dropout differs. Each (side, seed) is
one JSON file in OUT. Existing files are not run again, so processes can share the work (`--only torch-1`). At the end,
OUT/curve.png and a table are made from all files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from bert.config import DataConfig, ModelConfig, OptimizerConfig, PretrainConfig, recipe_folder
from bert.config.yaml_io import load_config as load_config
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, held_out_batches, make_masking
from bert.inference.pretrained import Pretrained
from bert.metrics import unigram_log_probabilities
from bert.model.pretraining import BertForPreTraining
from bert.parallel.backends import PmapParallelism
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.losses import make_pretraining_loss
from bert.training.means import accumulate_sums, compute_means
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, make_eval_step, make_train_step

matplotlib.use("Agg")
from matplotlib import pyplot

SIDES = ("ours", "torch")
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Experiment:
    """Data and initial weights that both sides share.

    Attributes:
        batches: maps (seed, step) to a batch.
        held_out: the held-out batches, equal at every call.
        start: maps a seed to a model with random weights.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    steps: int
    eval_every: int
    batches: Callable[[int, int], Batch]
    held_out: Callable[[], Iterator[Batch]]
    start: Callable[[int], Pretrained]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--train", required=True, help="corpus to train on")
    parser.add_argument("--eval", required=True, help="held-out corpus")
    parser.add_argument("--tokenizer", required=True, help="vocab.txt, tokenizer.json or their folder")
    parser.add_argument("--config", default="mini", help="recipe whose model is trained (default: mini)")
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--eval_every", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--eval_rows", type=int, default=512, help="held-out rows, the first ones")
    parser.add_argument("--dropout", type=float, default=0.1, help="0: then both sides are to be equal")
    parser.add_argument("--only", nargs="+", metavar="SIDE-SEED", help="the runs that this process makes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    experiment = prepare(arguments)
    runs = {"ours": train_ours, "torch": train_torch}
    for seed in range(arguments.num_seeds):
        for side in SIDES if seed % 2 == 0 else SIDES[::-1]:
            file = arguments.out / f"{side}-{seed}.json"
            if not file.is_file() and file.stem in (arguments.only or [file.stem]):
                began = time.perf_counter()
                curve = runs[side](experiment, seed)
                seconds = round(time.perf_counter() - began)
                file.write_text(json.dumps({"settings": settings_of(arguments), "curve": curve, "seconds": seconds}))
                print(f"{side} seed {seed}: {curve[-1][1]:.4f} after {curve[-1][0]} steps, {seconds} s", flush=True)
    if arguments.only is None:
        show(arguments)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name not in ("out", "num_seeds", "only")}


def prepare(arguments: argparse.Namespace) -> Experiment:
    recipe = load_config(PretrainConfig, recipe_folder() / f"{arguments.config}.yaml")
    data: DataConfig = replace(recipe.data, train=arguments.train, eval=arguments.eval)
    tokenizer = load_tokenizer(arguments.tokenizer, recipe.tokenizer)
    rates = {"hidden_dropout_prob": arguments.dropout, "attention_probs_dropout_prob": arguments.dropout}
    model = replace(recipe.model, vocab_size=embedding_rows(tokenizer), **rates)
    examples = build_examples(data, tokenizer)
    masking = make_masking(data, tokenizer)
    train = open_rows(examples.train)
    held_out = list(held_out_batches(First(open_rows(examples.eval), arguments.eval_rows), masking, 32))
    counts = examples.unigram_counts.copy()
    counts[list(special_ids(tokenizer).all)] = 0
    bias = unigram_log_probabilities(counts).astype(np.float32)

    def start(seed: int) -> Pretrained:
        module = BertForPreTraining(model)
        params = jax.device_get(module.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))["params"])
        params["predictions"]["bias"] = bias
        return Pretrained(config=model, params=params, tokenizer=tokenizer, source=f"seed {seed}")

    def batches(seed: int, step: int) -> Batch:
        return PretrainingLoader(train, masking, arguments.batch_size, seed).batch(step)

    return Experiment(
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=arguments.learning_rate, warmup_steps=arguments.steps // 10, bias_correction=True
        ),
        steps=arguments.steps,
        eval_every=arguments.eval_every,
        batches=batches,
        held_out=lambda: iter(held_out),
        start=start,
    )


@dataclass(frozen=True)
class First:
    """The first rows of a row source."""

    rows: Any
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.rows))

    def take(self, indices: np.ndarray) -> Batch:
        return self.rows.take(indices)


def train_ours(experiment: Experiment, seed: int) -> list[tuple[int, float]]:
    module = BertForPreTraining(experiment.model)
    loss = make_pretraining_loss(module.apply)
    optimizer = make_optimizer(experiment.optimizer, experiment.steps)
    parallel = PmapParallelism()
    step_fn = parallel.compile(make_train_step(loss, optimizer, seed), donate=(0,))
    eval_fn = parallel.compile(make_eval_step(loss))
    state = parallel.put_state(TrainState.create(experiment.start(seed).params, optimizer, loss.metrics))
    curve = []
    for step in range(1, experiment.steps + 1):
        state, outcome = step_fn(state, parallel.shard_batch(experiment.batches(seed, step - 1), 1))
        outcome.loss.block_until_ready()
        if step % experiment.eval_every == 0:
            sums = (eval_fn(state.params, parallel.shard_batch(batch)) for batch in experiment.held_out())
            curve.append((step, compute_means(accumulate_sums(sums, parallel))["mlm_loss"]))
    return curve


def train_torch(experiment: Experiment, seed: int) -> list[tuple[int, float]]:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        experiment.start(seed).save(Path(folder, "start"))
        model = transformers.BertForPreTraining.from_pretrained(Path(folder, "start")).train()
    settings = experiment.optimizer
    spared = {name for name, _ in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in spared) == without], "weight_decay": decay}
        for without, decay in ((False, settings.weight_decay), (True, 0.0))
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.epsilon)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, settings.warmup_steps, experiment.steps)
    check_torch_loss(model, torch_inputs(experiment.batches(seed, 0)))
    curve = []
    for step in range(1, experiment.steps + 1):
        loss = torch_loss(model, torch_inputs(experiment.batches(seed, step - 1)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        if step % experiment.eval_every == 0:
            curve.append((step, torch_held_out(model, experiment)))
    return curve


def torch_loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes the loss of `BertForPreTraining`, with the decoder only at the masked positions."""
    hidden, pooled = encoded(model, inputs)
    known = inputs["labels"] >= 0
    mlm = cross_entropy(model.cls.predictions(hidden[known]), inputs["labels"][known])
    return mlm + cross_entropy(model.cls.seq_relationship(pooled), inputs["next_sentence_label"])


def encoded(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last layer [B, T, D] and the pooled output [B, D]."""
    names = ("input_ids", "token_type_ids", "attention_mask")
    found = model.bert(**{name: inputs[name] for name in names})
    return found.last_hidden_state, found.pooler_output


def check_torch_loss(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Checks that `torch_loss` equals the model's own loss without dropout, up to float32 rounding."""
    model.eval()
    both = []
    for loss in (model(**inputs).loss, torch_loss(model, inputs)):
        model.zero_grad()
        loss.backward()
        both.append([loss.detach()] + [p.grad for p in model.parameters()])
    for stock, gathered in zip(*both, strict=True):
        torch.testing.assert_close(gathered, stock, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    model.train()


def torch_held_out(model: Any, experiment: Experiment) -> float:
    """Computes the mean over all masked tokens of the held-out rows, like our evaluation."""
    model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for inputs in map(torch_inputs, experiment.held_out()):
            known = inputs["labels"] >= 0
            logits = model.cls.predictions(encoded(model, inputs)[0][known])
            total += cross_entropy(logits, inputs["labels"][known], reduction="sum").item()
            weight += known.sum().item()
    model.train()
    return total / weight


def torch_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    labels = np.full(batch["input_ids"].shape, -100)
    row, place = np.nonzero(batch["masked_lm_weights"])
    labels[row, batch["masked_lm_positions"][row, place]] = batch["masked_lm_ids"][row, place]
    arrays = {
        "input_ids": batch["input_ids"],
        "token_type_ids": batch["token_type_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": labels,
        "next_sentence_label": batch["next_sentence_labels"],
    }
    return {name: torch.tensor(array, dtype=torch.long) for name, array in arrays.items()}


def show(arguments: argparse.Namespace) -> None:
    """Writes the table and the figure of all finished runs."""
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for side in SIDES:
        read = [json.loads(file.read_text()) for file in sorted(arguments.out.glob(f"{side}-*.json"))]
        if any(run["settings"] != settings_of(arguments) for run in read):
            raise SystemExit(f"{arguments.out} holds runs of other settings: name another folder")
        curves[side] = [run["curve"] for run in read]
        print(f"{side}: {', '.join(str(run['seconds']) for run in read)} s")
    print("| step | ours | torch | difference | pooled standard deviation |")
    print("|---|---|---|---|---|")
    for place, (step, _) in enumerate(curves["ours"][0]):
        values = {side: [curve[place][1] for curve in curves[side]] for side in SIDES}
        means = {side: statistics.mean(values[side]) for side in SIDES}
        spread = {side: statistics.stdev(values[side]) if len(values[side]) > 1 else 0.0 for side in SIDES}
        pooled = (sum(value**2 for value in spread.values()) / 2) ** 0.5
        cells = " | ".join(f"{means[side]:.4f} ± {spread[side]:.4f}" for side in SIDES)
        print(f"| {step} | {cells} | {means['ours'] - means['torch']:+.4f} | {pooled:.4f} |")
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for side, color in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
        for number, curve in enumerate(curves[side]):
            axes.plot(*zip(*curve, strict=True), color=color, alpha=0.7, label=side if number == 0 else None)
    axes.set(
        xlabel="step",
        ylabel="held-out MLM loss [nats]",
        title=f"{arguments.config}, T 128, {arguments.num_seeds} seeds",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(arguments.out / "curve.png", dpi=120)


if __name__ == "__main__":
    main()
