"""Compares packed and unpacked rows of English Wikipedia: fraction of padding, and real tokens per second of training.

    PYTHONPATH=. python benchmarks/packing.py [--shared ../shared] [--cache_dir DIR] [--input_format nsp]

Uses BERT's uncased vocabulary. Both kinds of rows hold the same examples. Training steps with mini's sizes, dropout and
equally many rows run in turns in one process, so that other load affects both. Quote the ratios, and on a busy machine
the ratio of processor time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert.config import DataConfig, ModelConfig, OptimizerConfig, PretrainConfig
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, RowSource, make_masking
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.parallel.backends import PmapParallelism
from bert.runtime.process import reexec_with_huge_pages
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.objectives import build_model_and_loss
from bert.training.step import TrainState, make_train_step


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
    options = parser.parse_args()
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


if __name__ == "__main__":
    reexec_with_huge_pages()  # as in `bert pretrain`
    main()
