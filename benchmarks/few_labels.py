"""Compares three ways to train a classifier on few labelled rows: `few_shot`, fine-tuning and logistic regression.

    PYTHONPATH=. python benchmarks/few_labels.py ENCODER --sst2 SST-2 --squad dev-v1.1.json --output FOLDER

ENCODER is a sentence encoder. Tasks, with 300 dev rows each:

- sst2: the sentiment of a sentence (train.tsv and dev.tsv of GLUE).
- squad: from which of the five longest articles a question is. Dev has the questions on their second halves.
- packages: from which of five packages the start of a docstring is (recipe `packages`). Dev has other modules.

The training rows of a seed are a random sample with the same number of rows of each label. `few_shot` and fine-tuning
(recipe `classification`) take the same steps: 40, or three epochs if that is more. Logistic regression reads the frozen
embeddings. Finished trainings are not repeated, so the same command continues an interrupted comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

import bert
from bert.config import FinetuneConfig, TaskDataConfig
from bert.tasks import make_task
from bert.tasks.splits import read_splits

PACKAGES = "docstrings:jax,matplotlib,numpy,pandas,sklearn"
DEV_ROWS, ARTICLES, BATCH_SIZE, MIN_STEPS = 300, 5, 16, 40
METHODS = ("logistic regression", "few_shot", "fine-tuning")

Rows = list[dict[str, str]]


def sst2_rows(folder: Path) -> tuple[Rows, Rows]:
    """Returns the training and dev rows of SST-2."""

    def read(name: str) -> Rows:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()[1:]
        return [dict(zip(("text", "label"), line.split("\t"), strict=True)) for line in lines]

    return read("train.tsv"), read("dev.tsv")


def squad_rows(file: Path) -> tuple[Rows, Rows]:
    """Returns questions on the first and on the second half of the paragraphs of the longest articles."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    articles.sort(key=lambda article: -sum(len(paragraph["qas"]) for paragraph in article["paragraphs"]))
    halves: tuple[Rows, Rows] = ([], [])
    for article in articles[:ARTICLES]:
        middle = len(article["paragraphs"]) // 2
        for number, paragraph in enumerate(article["paragraphs"]):
            rows = ({"text": each["question"], "label": article["title"]} for each in paragraph["qas"])
            halves[number >= middle].extend(rows)
    return halves


def package_rows() -> tuple[Rows, Rows]:
    """Returns the starts of docstrings of the training and dev modules."""
    config = FinetuneConfig(task="packages", data=TaskDataConfig(dir=PACKAGES))
    task, examples, _, _ = read_splits(make_task(config), config)

    def rows(split: str) -> Rows:
        columns = examples[split]
        labels = (task.output_names[label] for label in columns.known_labels)
        return [{"text": text, "label": label} for text, label in zip(columns.texts_a, labels, strict=True)]

    return rows("train"), rows("dev")


def sample(rows: Rows, per_label: int, seed: int) -> Rows:
    """Returns a random sample with the same number of rows of each label."""
    stream, chosen = random.Random(seed), []
    for label in sorted({row["label"] for row in rows}):
        chosen += stream.sample([row for row in rows if row["label"] == label], per_label)
    return chosen


def embedding_accuracy(encoder: Path, train: Rows, dev: Rows) -> float:
    """Returns the accuracy of logistic regression on the embeddings of the encoder."""
    from sklearn.linear_model import LogisticRegression

    model = bert.load(encoder)
    vectors = [model.embed([row["text"] for row in rows]) for rows in (train, dev)]
    labels = [[row["label"] for row in rows] for rows in (train, dev)]
    return float(LogisticRegression(C=10.0, max_iter=1000).fit(vectors[0], labels[0]).score(vectors[1], labels[1]))


def trained_accuracy(method: str, encoder: Path, train: Rows, dev: Rows, seed: int, folder: Path) -> float:
    """Returns the dev accuracy of a run, whose folder is removed."""
    steps = max(MIN_STEPS, -(-3 * len(train) // BATCH_SIZE))
    run = bert.finetune(
        "few_shot" if method == "few_shot" else "classification",
        init=encoder,
        train=train,
        dev=dev,
        output_dir=folder,
        batch_size=BATCH_SIZE,
        max_length=32,
        seed=seed,
        overrides={
            "data": {"buckets": [16, 24, 32]},
            "training": {"epochs": None, "steps": steps, "eval_every": steps, "checkpoint_every": steps},
        },
    )
    score: float = run.results["dev"]["accuracy"]
    shutil.rmtree(folder)
    return score


def table(scores: dict[str, float], tasks: list[str], sizes: list[int]) -> str:
    """Returns the mean and standard deviation over the seeds by task, size and method, as Markdown."""
    lines = [f"| task | rows per label | {' | '.join(METHODS)} | seeds |", f"|---|---{'|---' * len(METHODS)}|---|"]
    for task in tasks:
        for size in sizes:
            cells, counts = [], set()
            for method in METHODS:
                values = [value for key, value in scores.items() if key.startswith(f"{task}/{size}/{method}/")]
                counts.add(len(values))
                spread = f"{np.std(values, ddof=1):.3f}" if len(values) > 1 else "-"
                cells.append(f"{np.mean(values):.3f} ± {spread}" if values else "-")
            lines.append(f"| {task} | {size} | {' | '.join(cells)} | {min(counts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--sst2", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=["sst2", "squad", "packages"])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    readers: dict[str, Callable[[], tuple[Rows, Rows]]] = {
        "sst2": lambda: sst2_rows(arguments.sst2),
        "squad": lambda: squad_rows(arguments.squad),
        "packages": package_rows,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "few_labels.json"
    scores: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    data = {task: readers[task]() for task in arguments.tasks}
    for seed in range(arguments.seeds):
        for task, (rows, dev) in data.items():
            dev = random.Random(0).sample(dev, DEV_ROWS)
            for size in arguments.sizes:
                train = sample(rows, size, seed)
                for method in METHODS:
                    key = f"{task}/{size}/{method}/{seed}"
                    if key in scores:
                        continue
                    if method == METHODS[0]:
                        scores[key] = embedding_accuracy(arguments.encoder, train, dev)
                    else:
                        folder = arguments.output / key.replace("/", "-")
                        scores[key] = trained_accuracy(method, arguments.encoder, train, dev, seed, folder)
                    file.write_text(json.dumps(scores, indent=1))
                    print(key, round(scores[key], 3), flush=True)
    print(table(scores, arguments.tasks, arguments.sizes))


if __name__ == "__main__":
    main()
