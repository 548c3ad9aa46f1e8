"""Times training steps of an embedding model, next to products of matrices alone, the roofline of a step:

    PYTHONPATH=. python benchmarks/embedding_step.py MODEL DATA

MODEL and DATA are those of `retrieval.py`. The steps are those of `bert finetune --config embedding`. Prints the tokens
computed for each token of the texts, in groups of similar lengths (`bert.data.batching.LengthGroups`) and padded in one
piece; the median seconds of a step; its floating-point operations per second (6 per parameter of a layer and token, and
attention); and the rate of the faster one of two products, as wide as the model's feed-forward and square.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from retrieval import read_pairs

import bert
from bert.config import EmbeddingConfig, FinetuneConfig, ModelConfig, OptimizerConfig, TaskDataConfig, TrainingConfig
from bert.data.batching import FinetuningLoader, LengthGroups, make_batches
from bert.data.long_texts import LongTexts, tokenize_queries
from bert.model.heads import BertForEmbedding
from bert.parallel.backends import PmapParallelism
from bert.runtime.process import reexec_with_huge_pages
from bert.training.finetuning.kinds import make_apply
from bert.training.finetuning.ranking_losses import embed, embedding_loss, make_embedding_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, compile_bucketed_train_step

Batch = dict[str, np.ndarray]


def main() -> None:
    """Measures the steps of one data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="each is run once before it is timed")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text; longer ones are cut")
    parser.add_argument("--pairs", type=int, help="training pairs, to try the script")
    given = parser.parse_args()
    reexec_with_huge_pages()
    model = bert.load(given.model)
    grouped, whole = (loader(given, model.tokenizer, in_groups) for in_groups in (True, False))
    steps = range(min(grouped.steps_per_epoch, whole.steps_per_epoch))
    for name, loaded in (("in groups", grouped), ("in one piece", whole)):
        print(f"{name}: {np.mean([padding(loaded.batch(step)) for step in steps]):.2f} tokens for each of the texts")
    batches = [grouped.batch(step) for step in range(given.steps)]
    seconds = time_steps(model, batches)
    operations = statistics.mean(flops(model.config, batch) for batch in batches)
    print(
        f"{seconds:.3f} s a step, {operations / seconds / 1e9:.0f} GFLOP/s, products {peak(model.config):.0f} GFLOP/s"
    )


def loader(given: argparse.Namespace, tokenizer: Any, in_groups: bool) -> FinetuningLoader:
    """Returns the training batches of the pairs."""
    queries, documents = zip(*read_pairs(given, "train"), strict=True)
    rows = tokenize_queries(tokenizer, queries, [[text] for text in documents], None, LongTexts(given.length))
    data, training = TaskDataConfig(max_length=given.length), TrainingConfig(batch_size=given.batch_size, epochs=1)
    config = FinetuneConfig(data=data, training=training)
    groups = LengthGroups(data.buckets, given.length, 1, False, (0,) * 4) if in_groups else None
    return FinetuningLoader(rows, config, (0, 1), make_batches(rows, config, 1, by_length=False), groups)


def shapes(batch: Batch) -> list[tuple[int, int]]:
    """Returns the number of sequences and the padded length of each group."""
    arrays = [array for name, array in batch.items() if name.startswith("input_ids")]
    return [(array.size // array.shape[-1], array.shape[-1]) for array in arrays]


def padding(batch: Batch) -> float:
    """Returns the tokens computed for each token of the texts."""
    real = sum(array.sum() for name, array in batch.items() if name.startswith("attention_mask"))
    return float(sum(count * length for count, length in shapes(batch)) / real)


def flops(config: ModelConfig, batch: Batch) -> float:
    """Returns the operations of a step in the layers, forward and backward."""
    width, inner = config.hidden_size, config.intermediate_size
    of_layer = [
        count * length * (6 * (4 * width**2 + 2 * width * inner) + 12 * length * width)
        for count, length in shapes(batch)
    ]
    return float(config.num_hidden_layers * sum(of_layer))


def time_steps(model: Any, batches: list[Batch]) -> float:
    """Returns the median seconds of the steps."""
    parallel = PmapParallelism(jax.devices()[:1])
    apply = make_apply(BertForEmbedding(model.config), None, embed)
    loss = make_embedding_loss(embedding_loss(EmbeddingConfig(), parallel.axis), apply)
    optimizer = make_optimizer(OptimizerConfig(bias_correction=True), 1_000_000)
    step = compile_bucketed_train_step(loss, optimizer, 0, "hash", parallel)
    encoder = {name: array for name, array in model.params["bert"].items() if name != "pooler"}
    params = jax.tree.map(jnp.array, {"bert": encoder})
    state, seconds = parallel.put_state(TrainState.create(params, optimizer, loss.metrics)), []
    for batch in [*batches, *batches]:
        on_device = parallel.shard_batch(batch, 1)
        start = time.perf_counter()
        state, outcome = step(state, on_device)
        jax.block_until_ready((state, outcome))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[len(batches) :])


def peak(config: ModelConfig, repeats: int = 20) -> float:
    """Returns the GFLOP/s of the fastest product."""
    rates = []
    for rows, inner, columns in ((4096, config.hidden_size, config.intermediate_size), (2048, 2048, 2048)):
        left, right, multiply = jnp.ones((rows, inner)), jnp.ones((inner, columns)), jax.jit(jnp.matmul)
        multiply(left, right).block_until_ready()
        start = time.perf_counter()
        for _ in range(repeats):
            multiply(left, right).block_until_ready()
        rates.append(repeats * 2 * rows * inner * columns / (time.perf_counter() - start) / 1e9)
    return max(rates)


if __name__ == "__main__":
    main()
