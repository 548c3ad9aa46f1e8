"""Compares the modes of `data.long_texts` on long documents: from which package the docstrings of a module are.

    PYTHONPATH=. python benchmarks/long_texts.py ENCODER --output FOLDER [--seeds 3]

A document is the prose of all docstrings of a module, from 100 to its first 400 words, without names of packages. 300
modules train and 200 others are dev. Rows have 64 tokens; windows start every 48, and training reads 4 of a text.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import numpy as np

import bert
from bert.config.model import WINDOW_MODES
from bert.data.corpus.docstrings import read_prose
from bert.tasks.sequence_classification.custom import Names

PACKAGES = frozenset({"jax", "matplotlib", "numpy", "pandas", "scipy", "sklearn"})
MIN_WORDS, MAX_WORDS, TRAIN_ROWS, DEV_ROWS = 100, 400, 300, 200
MODES = ("cut", "head_tail", "windows", "windows_max")


def documents() -> list[dict[str, str]]:
    """Returns the documents in random order."""
    prose = read_prose(PACKAGES)
    names = Names.from_packages(PACKAGES, [module.name for module, _ in prose])
    rows = []
    for module, docstrings in prose:
        words = " ".join(names.remove_from(" ".join(docstring)) for docstring in docstrings).split()
        if len(words) >= MIN_WORDS:
            rows.append({"text": " ".join(words[:MAX_WORDS]), "label": module.package})
    random.Random(0).shuffle(rows)
    return rows


def accuracy(mode: str, encoder: Path, rows: list[dict[str, str]], seed: int, folder: Path) -> float:
    """Returns the accuracy of one run on dev, and removes its folder."""
    windows = {"doc_stride": 48, "max_train_windows": 4} if mode in WINDOW_MODES else {}
    run = bert.finetune(
        "classification",
        init=encoder,
        train=rows[:TRAIN_ROWS],
        dev=rows[TRAIN_ROWS : TRAIN_ROWS + DEV_ROWS],
        output_dir=folder,
        batch_size=16,
        epochs=3,
        max_length=64,
        seed=seed,
        overrides={
            "data": {"long_texts": mode, **windows},
            "training": {"eval_every": 1000, "gradient_accumulation_steps": 4 if windows else 1, "eval_batch_size": 32},
        },
    )
    score: float = run.results["dev"]["accuracy"]
    shutil.rmtree(folder)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows, scores = documents(), {mode: list[float]() for mode in MODES}
    for seed in range(arguments.seeds):
        for mode in MODES:
            score = accuracy(mode, arguments.encoder, rows, seed, arguments.output / f"{mode}-{seed}")
            scores[mode].append(score)
            print(f"{mode} seed {seed}: {score:.3f}", flush=True)
    for mode, values in scores.items():
        print(f"| {mode} | {np.mean(values):.3f} ± {np.std(values, ddof=1) if len(values) > 1 else 0:.3f} |")


if __name__ == "__main__":
    main()
