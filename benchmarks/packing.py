"""Compares packed and unpacked rows of English Wikipedia: fraction of padding, and real tokens per second of training.

    PYTHONPATH=. python benchmarks/packing.py [--shared ../shared] [--cache_dir DIR] [--input_format nsp]
    PYTHONPATH=. python benchmarks/packing.py --finetune sst2 --data GLUE/SST-2 --init MODEL --batch_size 32

Uses BERT's uncased vocabulary. Both kinds of rows hold the same examples. Training steps with mini's sizes, dropout and
equally many rows run in turns in one process, so that other load affects both. Quote the ratios, and on a busy machine
the ratio of processor time. With --finetune, the steps are those of a recipe with and without `data.packing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert.config import DataConfig, FinetuneConfig, ModelConfig, OptimizerConfig, PretrainConfig, recipe_folder
from bert.config.yaml_io import load_config
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, RowSource, make_masking
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.data.windows import row_shape
from bert.parallel.backends import PmapParallelism
from bert.runs.folder import RunFolder
from bert.runtime.process import reexec_with_huge_pages
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.finetuning.data import make_loader
from bert.training.finetuning.setup import resolve_setup
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.objectives import build_model_and_loss
from bert.training.step import TrainState, compile_bucketed_train_step, make_train_step


class OneExampleARow:
    """The examples of packed rows, one per row. Implements `bert.data.pretraining.loader.RowSource`."""

    def __init__(self, rows: RowSource, lengths: np.ndarray) -> None:
        self._rows, self._of = rows, np.argwhere(lengths > 0)

    def __len__(self) -> int:
        return len(self._of)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        row, number = self._of[indices].T
        packed = self._rows.take(row)
        ids, lengths = packed.pop("input_ids"), packed[EXAMPLE_LENGTH]
        at = np.arange(len(row))
        start, length = (np.cumsum(lengths, axis=1) - lengths)[at, number], lengths[at, number]
        position = np.arange(ids.shape[1])
        places = np.minimum(start[:, None] + position, ids.shape[1] - 1)
        alone = {name: values[at, number] for name, values in packed.items() if values.ndim == 2}
        del alone[EXAMPLE_LENGTH]
        shown = np.where(position < length[:, None], np.take_along_axis(ids, places, axis=1), 0)  # 0 is [PAD]
        return {"input_ids": shown, "length": length, **alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--cache_dir")
    parser.add_argument("--corpus", type=Path, help="another text file than the Wikipedia sample")
    parser.add_argument("--input_format", default="nsp")
    parser.add_argument("--sequence_length", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--finetune", metavar="RECIPE")
    parser.add_argument("--data", help="the data of the recipe")
    parser.add_argument("--init", help="the model to fine-tune")
    options = parser.parse_args()
    if options.finetune:
        finetune(options)
        return
    length = options.sequence_length
    corpus = options.corpus or options.shared / "data/pretrain/enwiki/train.txt"
    tokenizer = load_tokenizer(options.shared / "data/vocab/bert-base-uncased")
    config = DataConfig(
        train=str(corpus),
        input_format=options.input_format,
        sequence_length=length,
        max_predictions_per_sequence=math.ceil(0.15 * length),
        packing=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = build_examples(config, tokenizer, Path(options.cache_dir or folder))
        packed = open_rows(found.train)
        blocks = np.array_split(np.arange(len(packed)), len(packed) // 4096 + 1)
        lengths = np.concatenate([packed.take(block)[EXAMPLE_LENGTH] for block in blocks])
        describe(lengths, length)
        speed(config, options, tokenizer, {"unpacked": OneExampleARow(packed, lengths), "packed": packed})


def describe(lengths: np.ndarray, longest: int) -> None:
    """Prints padding before and after packing, and how many more rows there are than the minimum."""
    alone, rows = lengths[lengths > 0], len(lengths)
    shorter, tokens = alone[alone < longest], int(alone.sum())
    bound = len(alone) - len(shorter) + math.ceil(shorter.sum() / longest)
    print(f"{len(alone):,} examples of {tokens / len(alone):.1f} tokens, {len(shorter) / len(alone):.1%} not full")
    print(f"unpacked: {len(alone):,} rows, {1 - tokens / (len(alone) * longest):.2%} padding")
    print(f"packed:   {rows:,} rows, {1 - tokens / (rows * longest):.2%} padding; no packing has under {bound:,} rows")
    print(f"examples a row: {dict(enumerate(np.bincount((lengths > 0).sum(axis=1)).tolist()))}")


def speed(config: DataConfig, options: argparse.Namespace, tokenizer: Tokenizer, kinds: dict[str, RowSource]) -> None:
    """Runs steps of both kinds in turns. Prints wall-clock and CPU seconds, and real tokens per second."""
    sizes = ModelConfig(embedding_rows(tokenizer), 256, 4, 4, 1024, max_position_embeddings=config.sequence_length)
    model, loss = build_model_and_loss(PretrainConfig(data=config, model=sizes))
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    optimizer = make_optimizer(OptimizerConfig(), 1000)
    parallel, masking = PmapParallelism(), make_masking(config, tokenizer)
    start = parallel.put_state(jax.tree.map(np.asarray, TrainState.create(params, optimizer, loss.metrics)))
    step = parallel.compile(make_train_step(loss, optimizer, seed=0))
    loaders = {name: PretrainingLoader(rows, masking, options.batch_size, seed=0) for name, rows in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    busy: dict[str, list[float]] = {name: [] for name in kinds}
    tokens: dict[str, list[int]] = {name: [] for name in kinds}
    for number in range(options.rounds + 1):
        for name, loader in loaders.items():
            began, busy_before = time.perf_counter(), time.process_time()
            batch = loader.batch(number)
            step(start, parallel.shard_batch(batch, 1))[1].loss.block_until_ready()
            if number:  # the first one compiles
                seconds[name].append(time.perf_counter() - began)
                busy[name].append(time.process_time() - busy_before)
                tokens[name].append(int(batch["attention_mask"].sum()))
    print(f"{options.rounds} steps of each in turns, B {options.batch_size}, {parallel.describe()}:")
    for name in kinds:
        predictions = loaders[name].batch(0)["masked_lm_ids"].shape[1]
        rate = statistics.mean(tokens[name]) / statistics.median(seconds[name])
        print(
            f"{name:9} P {predictions}: median step {statistics.median(seconds[name]):.3f} s, {rate:,.0f} real tokens/s"
        )
    more = sum(tokens["packed"]) / sum(tokens["unpacked"])
    for clock, spent in (("seconds", seconds), ("processor seconds", busy)):
        cost = statistics.median(b / a for a, b in zip(spent["unpacked"], spent["packed"], strict=True))
        print(f"a packed step takes {cost:.3f} times the {clock} for {more:.3f} times the tokens: {more / cost:.3f}")


def finetune(options: argparse.Namespace) -> None:
    """Runs steps of a recipe in turns, each twice because the first one compiles, and prints tokens per CPU second."""
    recipe = load_config(FinetuneConfig, recipe_folder() / f"{options.finetune}.yaml")
    training = dataclasses.replace(recipe.training, batch_size=options.batch_size)
    sides: dict[str, Any] = {}
    for name in ("padded", "packed"):
        data = dataclasses.replace(recipe.data, dir=options.data, packing=name == "packed")
        config = dataclasses.replace(recipe, data=data, training=training, init=options.init, output_dir="unused")
        config, setup = resolve_setup(RunFolder(Path("unused"), config, resumed=False), print)
        optimizer = make_optimizer(config.optimizer, 1_000_000)
        step = compile_bucketed_train_step(setup.loss, optimizer, 0, "hash", setup.parallel)
        params = jax.jit(setup.model.init)(jax.random.key(0), jnp.zeros((*row_shape(setup.train), 8), jnp.int32))
        state = TrainState.create(params["params"], optimizer, setup.loss.metrics)
        sides[name] = (make_loader(setup, config), step, setup.parallel.put_state(state), setup.parallel)
    tokens, computed, busy = (dict[str, list[float]]((name, []) for name in sides) for _ in range(3))
    for turn in range(2 * options.rounds):
        for name, (loader, step, state, parallel) in sides.items():
            began = time.process_time()
            batch = loader.batch(turn % options.rounds)
            state, metrics = step(state, parallel.shard_batch(batch, 1))
            metrics.loss.block_until_ready()
            sides[name] = loader, step, state, parallel
            if turn >= options.rounds:
                busy[name].append(time.process_time() - began)
                tokens[name].append(sum(int(x.sum()) for key, x in batch.items() if key.startswith("attention_mask")))
                ids = [x.size for key, x in batch.items() if key.startswith("input_ids")]
                computed[name].append(batch["token_sources"].size if "token_sources" in batch else sum(ids))
    for name in sides:
        own, spent = sum(tokens[name]), sum(busy[name])
        print(
            f"{options.finetune}, {name}: {sum(computed[name]) / own:.2f} tokens computed for each of the texts, "
            f"{own / spent:,.0f} tokens per processor second"
        )
    costs = [[second / token for second, token in zip(busy[name], tokens[name], strict=True)] for name in sides]
    ratios = [packed / padded for padded, packed in zip(*costs, strict=True)]
    print(f"a token in packed rows takes {statistics.median(ratios):.2f} times the processor time (median of {ratios})")


if __name__ == "__main__":
    reexec_with_huge_pages()  # as in `bert pretrain`
    main()
