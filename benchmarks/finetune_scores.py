"""Compares scores of tagging and question answering with PyTorch: equal rows, several seeds per side, in turns.

    PYTHONPATH=. taskset -c 0 nice -n 19 python benchmarks/finetune_scores.py MODEL --wnut17 WNUT_DIR --squad SQUAD_DIR

MODEL is a folder in Hugging Face's layout, such as MiniLM. WNUT_DIR has train.conll and dev.conll. SQUAD_DIR has
train.json (made by `squad_split.py`). Each run trains for one epoch. A run takes minutes on one core, because the rows
are few: the first sentences of WNUT-17, and SQuAD's questions about short contexts, the first for training and the last
for dev.

The other side is `torch_peer.py` with the batches of `bert finetune` in the same order, because the order alone changes
the scores of such short runs a lot. Head weights and dropout differ. An interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from turns import in_turns

LEARNING_RATE, LENGTH = 2e-4, 128
"""The learning rate is 4 times, and the batch size a quarter of the recipes', because the rows are few."""
TRAIN_SENTENCES, DEV_SENTENCES = 1_200, 500
TRAIN_QUESTIONS, DEV_QUESTIONS, CHARACTERS = 560, 200, 350
BATCH = 8
PEER = {"wnut17": "ner", "squad": "squad"}


def main() -> None:
    """Runs all seeds of both sides or, as a worker, one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--wnut17", type=Path)
    parser.add_argument("--squad", type=Path)
    parser.add_argument("--output", type=Path, default=Path("finetune_scores.json"))
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="training rows, to try the script")
    parser.add_argument("--rounds", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "TASK", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    tasks = {task: folder for task in PEER if (folder := getattr(given, task)) is not None}
    if given.worker:
        side, task, seed = given.worker
        print(json.dumps((ours if side == "ours" else peer)(task, tasks[task], given.model, seed)))
        return
    with tempfile.TemporaryDirectory() as made:
        sides = {}
        for task, folder in tasks.items():
            cut = Path(made, task)
            (first_sentences if task == "wnut17" else short_questions)(folder, cut, given.rows)
            for seed in range(given.num_seeds):
                for side in ("ours", "PyTorch"):
                    run = [__file__, str(given.model.resolve()), f"--{task}", str(cut), "--worker", side, task]
                    sides[f"{task}, {side}, seed {seed}"] = [*run, str(seed)]
        found = in_turns(sides, given)
    print(found["hardware"], found["versions"])
    print("\n".join(line for task in tasks for line in summary(task, found["sides"])))


def first_sentences(folder: Path, out: Path, rows: int | None) -> None:
    """Writes WNUT-17 with fewer sentences."""
    out.mkdir(parents=True)
    for name, left in (("train.conll", rows or TRAIN_SENTENCES), ("dev.conll", DEV_SENTENCES)):
        kept = []
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            kept.append(line)
            left -= not line.strip()
            if not left:
                break
        (out / name).write_text("\n".join(kept) + "\n", encoding="utf-8")


def short_questions(folder: Path, out: Path, rows: int | None) -> None:
    """Writes SQuAD's questions about contexts of at most CHARACTERS. Training and dev have different contexts."""
    out.mkdir(parents=True)
    articles = json.loads((folder / "train.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    short = [paragraph for paragraph in paragraphs if len(paragraph["context"]) <= CHARACTERS]
    for name, ordered, left in (("train", short, rows or TRAIN_QUESTIONS), ("dev", short[::-1], DEV_QUESTIONS)):
        kept = []
        for paragraph in ordered:
            if questions := paragraph["qas"][:left]:
                kept.append({**paragraph, "qas": questions})
                left -= len(questions)
        content = {"version": "1.1", "data": [{"title": name, "paragraphs": kept}]}
        (out / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def ours(task: str, folder: Path, model: Path, seed: str) -> dict[str, float]:
    """Returns the scores of a `bert finetune` run."""
    with tempfile.TemporaryDirectory() as made:
        run = Path(made, "run")
        arguments = ["-m", "bert", "finetune", "--config", task, "--init", model, "--data.dir", folder]
        arguments += ["--data.max_length", LENGTH, "--training.epochs", 1, "--training.batch_size", BATCH]
        arguments += ["--optimizer.learning_rate", LEARNING_RATE, "--seed", seed, "--output_dir", run]
        called(arguments)
        results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return flat({split: results[split] for split in ("dev", "test") if split in results})


def peer(task: str, folder: Path, model: Path, seed: str) -> dict[str, float]:
    """Returns the scores of a `torch_peer.py` run."""
    arguments = [Path(__file__).with_name("torch_peer.py"), PEER[task], model, folder, "--seed", seed]
    arguments += ["--same_batches", "--max_length", LENGTH, "--epochs", 1]
    arguments += ["--batch_size", BATCH, "--learning_rate", LEARNING_RATE]
    printed = json.loads(called(arguments).splitlines()[-1])
    return flat({split: printed[split] for split in ("dev", "test") if split in printed})


def called(arguments: list[object]) -> str:
    """Returns the output of a Python process."""
    done = subprocess.run([sys.executable, *map(str, arguments)], env=os.environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{arguments[0]} ended with {done.returncode}")
    return done.stdout


def flat(scores: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the scores that both sides have, with F1 in percent."""
    percent = {"f1": 1.0 if "exact_match" in scores["dev"] else 100.0}
    return {
        f"{split} {name}": of_split[name] * percent.get(name, 1.0)
        for split, of_split in scores.items()
        for name in ("exact_match", "f1", "loss")
        if name in of_split
    }


def summary(task: str, runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Formats a Markdown table: mean and standard deviation per side and of the paired differences, and each run."""
    sound = {name: run for name, [run] in runs.items() if "error" not in run}
    names = [name for name in sound if name.startswith(f"{task}, ours") and name.replace("ours", "PyTorch") in sound]
    pairs = [(sound[name], sound[name.replace("ours", "PyTorch")]) for name in names]
    if not pairs:
        return [f"{task}: no seed has run on both sides"]
    lines = [f"| {task} | ours | PyTorch | difference of pairs | ours, each | PyTorch, each |", "|" + "---|" * 6]
    for name in pairs[0][0]:
        mine, theirs = ([run[name] for run in side] for side in zip(*pairs, strict=True))
        digits = 4 if "loss" in name else 1
        columns = mine, theirs, [a - b for a, b in zip(mine, theirs, strict=True)]
        cells = [spread(values, digits) for values in columns]
        cells += [", ".join(f"{value:.{digits}f}" for value in values) for values in (mine, theirs)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def spread(values: list[float], digits: int) -> str:
    """Formats mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


if __name__ == "__main__":
    main()
