"""Compares search with sentence-transformers, before and after training: on SQuAD, the paragraph of each question.

    pip install 'bert-jax[dev]' sentence-transformers accelerate bm25s
    PYTHONPATH=. python benchmarks/retrieval.py MODEL DATA --output retrieval.json

MODEL is a sentence-transformers folder, such as all-MiniLM-L6-v2. DATA is a folder with train-v1.1.head.json and
dev-v1.1.json. The questions of the first file and their paragraphs are the training pairs. All distinct paragraphs of
the second file are searched with each of its distinct questions. For short texts, DATA is GLUE's STS-B: the pairs with
a score of at least 3 count as questions with their paragraphs. Sides:

- untrained: MODEL without training;
- ours: after `bert finetune --config embedding` with the options below, with huge pages as in that command;
- peer: after sentence-transformers' trainer with MultipleNegativesRankingLoss, without duplicates in a batch, and with
  the same pairs, batch size, steps, learning rates, decay, clipping, epsilon, length and temperature;
- bm25: BM25 of the package bm25s with its defaults, without stemming.

Scores are trec_eval's (pytrec_eval) for the first ten documents: MRR@10, recall@10 and nDCG@10. ``seconds`` is the time
from pairs in memory to the trained model on disk, including loading and compilation, without imports. For bm25 it is
the time to build the index. ``embed_seconds`` is the time to embed all texts. Finished sides and seeds are only read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from turns import in_turns

from bert.runtime.process import reexec_with_huge_pages

SQUAD = {"train": "train-v1.1.head.json", "dev": "dev-v1.1.json"}
MIN_SCORE = 3.0
"""Minimum score of a pair of STS-B."""
SIDES = ("untrained", "bm25", "ours", "peer")
TRAINED = ("ours", "peer")
CUTOFF = 10
MEASURES = {"mrr_at_10": "recip_rank", "recall_at_10": "recall_10", "ndcg_at_10": "ndcg_cut_10"}
"""Maps our names to trec_eval's, for runs truncated to ten documents."""


def main() -> None:
    """Measures all sides and seeds or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("retrieval.json"))
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES), dest="sides")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=68, help="68 of 64 pairs are an epoch")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--length", type=int, default=256, help="tokens of a text; longer ones are cut")
    parser.add_argument("--pairs", type=int, help="training pairs and questions, to try the script")
    parser.add_argument("--rounds", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        if given.worker[0] != "peer":  # as in `bert finetune`
            reexec_with_huge_pages()
        print(json.dumps(measured(given)))
        return
    common = [__file__, str(given.model.resolve()), str(given.data.resolve())]
    for name in ("steps", "batch_size", "learning_rate", "length", *(["pairs"] if given.pairs else [])):
        common += [f"--{name}", str(getattr(given, name))]
    commands = {side: [*common, "--worker", side, "0"] for side in given.sides if side not in TRAINED}
    for seed in given.seeds:  # trained sides in turns
        for side in TRAINED:
            if side in given.sides:
                commands[f"{side}, seed {seed}"] = [*common, "--worker", side, str(seed)]
    found = in_turns(commands, given, {"HF_HUB_OFFLINE": "1", "BERT_COMPILATION_CACHE": "off"})
    print(found["hardware"], found["versions"])
    print(summary(found["sides"]))


Pairs = list[tuple[str, str]]


def read_pairs(given: argparse.Namespace, split: str) -> Pairs:
    """Returns the pairs of a split in file order, for SQuAD each question with its paragraph."""
    file = given.data / SQUAD[split]
    if file.exists():
        articles = json.loads(file.read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        pairs = [
            (row["question"].strip(), paragraph["context"]) for paragraph in paragraphs for row in paragraph["qas"]
        ]
    else:
        lines = (given.data / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
        rows = [line.split("\t") for line in lines]
        pairs = [(row[7], row[8]) for row in rows if float(row[9]) >= MIN_SCORE]
    return pairs[: given.pairs]


def measured(given: argparse.Namespace) -> dict[str, float]:
    """Returns scores and seconds of one side."""
    side, seed = given.worker[0], int(given.worker[1])
    dev = read_pairs(given, "dev")
    questions, paragraphs = (list(dict.fromkeys(texts)) for texts in zip(*dev, strict=True))
    if side == "bm25":
        found, seconds = bm25(questions, paragraphs)
        return {**scores(found, questions, paragraphs, dev), **seconds}
    with tempfile.TemporaryDirectory() as folder:
        make = {"untrained": untrained, "ours": ours, "peer": peer}[side]
        embed, seconds = make(given, seed, Path(folder))
        from bert.inference.search import blocks_of, find_nearest

        start = time.perf_counter()
        vectors = [embed(texts) for texts in (questions, paragraphs)]
        seconds["embed_seconds"] = time.perf_counter() - start
    found = find_nearest(vectors[0], blocks_of(vectors[1]), min(CUTOFF, len(paragraphs))).indices
    return {**scores(found, questions, paragraphs, dev), **seconds}


def scores(found: np.ndarray, questions: list[str], paragraphs: list[str], dev: Pairs) -> dict[str, float]:
    """Returns the means of trec_eval's measures over the questions.

    Args:
        found: [Q, K] indices of paragraphs, best first.
        dev: questions and their correct paragraphs. A question may have several.
    """
    from pytrec_eval import RelevanceEvaluator

    right: dict[str, dict[str, int]] = {}
    names = {text: str(number) for number, text in enumerate(paragraphs)}
    for question, paragraph in dev:
        right.setdefault(question, {})[names[paragraph]] = 1
    relevant = {str(number): right[question] for number, question in enumerate(questions)}
    run = {
        str(number): {str(document): float(-place) for place, document in enumerate(row)}
        for number, row in enumerate(found.tolist())
    }
    measures = {"recip_rank", f"recall.{CUTOFF}", f"ndcg_cut.{CUTOFF}"}
    of_each = RelevanceEvaluator(relevant, measures).evaluate(run).values()
    return {name: statistics.mean(one[theirs] for one in of_each) for name, theirs in MEASURES.items()}


def bm25(questions: list[str], paragraphs: list[str]) -> tuple[np.ndarray, dict[str, float]]:
    """Returns the first documents of BM25, and the seconds to build its index."""
    import bm25s

    start = time.perf_counter()
    index = bm25s.BM25()
    index.index(bm25s.tokenize(paragraphs, show_progress=False), show_progress=False)
    seconds = time.perf_counter() - start
    rows = bm25s.tokenize(questions, show_progress=False)
    found, _ = index.retrieve(rows, k=min(CUTOFF, len(paragraphs)), show_progress=False)
    return np.asarray(found), {"seconds": seconds}


def untrained(given: argparse.Namespace, seed: int, folder: Path) -> tuple[Any, dict[str, float]]:
    """Returns the model without training."""
    import bert
    from bert.model.pooling import Pooling

    model = bert.load(given.model)
    pooling = dataclasses.replace(model.pooling or Pooling(), max_length=given.length)
    return dataclasses.replace(model, pooling=pooling).embed, {}


def ours(given: argparse.Namespace, seed: int, folder: Path) -> tuple[Any, dict[str, float]]:
    """Trains with `bert.finetune` and the recipe `embedding`."""
    import bert
    import bert.training.launch  # not timed

    rows = [{"query": question, "positive": text} for question, text in read_pairs(given, "train")]
    overrides = {
        "data.max_length": given.length,
        "training.steps": given.steps,
        "training.epochs": None,
        "training.eval_every": given.steps,  # keep the last weights
        "training.batch_size": given.batch_size,
        "optimizer.learning_rate": given.learning_rate,
        "seed": seed,
    }
    start = time.perf_counter()
    run = bert.finetune(
        "embedding", init=given.model, train=rows, dev=rows[:8], output_dir=folder / "run", overrides=overrides
    )
    seconds = time.perf_counter() - start
    return run.model.embed, {"seconds": seconds}


def peer(given: argparse.Namespace, seed: int, folder: Path) -> tuple[Any, dict[str, float]]:
    """Trains with sentence-transformers' trainer and the settings of `configs/embedding.yaml`."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    pairs = read_pairs(given, "train")
    columns = dict(zip(("anchor", "positive"), map(list, zip(*pairs, strict=True)), strict=True))
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=int(0.1 * given.steps),
        weight_decay=0.01,
        adam_epsilon=1e-6,
        max_grad_norm=1.0,
        batch_sampler="no_duplicates",
        seed=seed,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    start = time.perf_counter()
    model = SentenceTransformer(str(given.model), device="cpu")
    model.max_seq_length = given.length
    loss = MultipleNegativesRankingLoss(model, scale=20.0)
    SentenceTransformerTrainer(model=model, args=settings, train_dataset=Dataset.from_dict(columns), loss=loss).train()
    model.save_pretrained(str(folder / "model"))
    seconds = time.perf_counter() - start
    return lambda texts: model.encode(texts, batch_size=32, show_progress_bar=False), {"seconds": seconds}


def summary(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Formats a Markdown table with mean and standard deviation of scores and seconds of each side over the seeds."""
    columns = (*MEASURES, "seconds", "embed_seconds")
    lines = ["| side | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (2 + len(columns))]
    for side in SIDES:
        mine = {name: run for name, [run] in runs.items() if name.split(",")[0] == side}
        good = [run for run in mine.values() if "error" not in run]
        cells = [_spread([run[name] for run in good if name in run], 1 if "seconds" in name else 3) for name in columns]
        if mine:
            lines.append(f"| {side} | {len(good) if side in TRAINED else '-'} | " + " | ".join(cells) + " |")
        lines += [f"{name}: {run['error']}" for name, run in mine.items() if "error" in run]
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    """Formats mean and standard deviation."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


if __name__ == "__main__":
    main()
