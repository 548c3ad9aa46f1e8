"""Compares scores of tasks for pretrained encoders, random weights and word counts.

    PYTHONPATH=. python benchmarks/transfer.py RUN [RUN ...] --glue GLUE --wnut17 WNUT_DIR --squad SQUAD_DIR

Each RUN is a pretraining run. The random weights have the sizes and vocabulary of the first run. GLUE has the folders
CoLA, SST-2, MRPC, STS-B and RTE. WNUT_DIR has train.conll and dev.conll, and SQUAD_DIR train.json and dev.json (made by
`squad_split.py`).

Each encoder has a separate learning rate for each task: the best of a grid on the first seed, used for the other seeds
too. Dev is scored once, at the end of each run. `--frozen` trains only the heads, except for `similarity`, which has
none. Finished runs are not repeated, so an interrupted comparison resumes, and several processes may work on different
`--tasks` in one `--output` folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from finetune_scores import spread

from bert.config import FinetuneConfig, recipe_folder
from bert.config.yaml_io import load_config
from bert.tasks import make_task
from bert.tasks.sequence_classification import lexical_baseline
from bert.tasks.splits import Splits, read_splits

RANDOM = "random"
SIMILARITY = "similarity"
"""STS-B with the recipe embedding: the cosine similarity of two embeddings. `stsb` reads both texts in one row."""


class Setting(NamedTuple):
    """How to read and train a task."""

    folder: str
    """Subfolder of GLUE; empty if the task has a separate folder."""
    epochs: int
    max_length: int
    buckets: list[int]
    rows: int | None = None
    """Number of training rows: the first rows of a GLUE file, or a sample of SQuAD."""
    options: tuple[str, ...] = ()
    """Further options for `bert finetune`."""


TASKS = {
    "cola": Setting("CoLA", 4, 64, [16, 64]),
    "sst2": Setting("SST-2", 3, 64, [16, 32, 64], rows=10_000),
    "mrpc": Setting("MRPC", 3, 128, [64, 128]),
    "stsb": Setting("STS-B", 4, 128, [32, 64, 128]),
    SIMILARITY: Setting(
        "STS-B",
        4,
        64,
        [32, 64],
        options=(
            *("--embedding.loss", "cosent", "--data.score_range", "[0, 5]"),
            *("--data.columns.text_a", "sentence1", "--data.columns.text_b", "sentence2"),
            *("--data.columns.label", "score"),
        ),
    ),
    "rte": Setting("RTE", 3, 128, [64, 128]),
    "wnut17": Setting("", 4, 128, [32, 64, 128]),
    "squad": Setting("", 2, 256, [256], rows=3_000),
}
GRID, FROZEN_GRID = ("1e-4", "3e-4", "1e-3"), ("3e-3", "1e-2", "3e-2")
BATCH_SIZE = 32


def main() -> None:
    """Runs missing comparisons and prints a table of all results in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--wnut17", type=Path, required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--starts", nargs="+", help="names of runs, and random; all of them if left out")
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument(
        "--learning_rates", nargs="+", help=f"the grid; {', '.join(GRID)}, frozen {', '.join(FROZEN_GRID)}"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/transfer"))
    given = parser.parse_args()
    given.learning_rates = given.learning_rates or (FROZEN_GRID if given.frozen else GRID)
    names = [*(run.name for run in given.runs), RANDOM]
    if len(set(names)) < len(names):
        sys.exit(
            f"the runs are named {', '.join(names[:-1])}: rename folders, so that none is {RANDOM} and no two alike"
        )
    starts = dict(zip(names, [*given.runs, given.runs[0]], strict=True))
    wanted = given.starts or list(starts)
    table = []
    for task in given.tasks:
        data = folder(task, given)
        row = {name: of_grid(task, name, starts[name], data, given) for name in wanted}
        table.append((task, row, None if given.frozen else word_counts(task, data)))
        print("\n".join(summary(table, wanted)), flush=True)


def folder(task: str, given: argparse.Namespace) -> Path:
    """Returns the task's data, with the number of training rows in its setting."""
    setting = TASKS[task]
    if not setting.folder:
        return Path(getattr(given, task))
    whole = given.glue / setting.folder
    if setting.rows is None:
        return Path(whole)
    cut = given.output / "data" / task
    if not (cut / "dev.tsv").exists():
        cut.mkdir(parents=True, exist_ok=True)
        lines = (whole / "train.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
        (cut / "train.tsv").write_text("".join(lines[: setting.rows + 1]), encoding="utf-8")
        (cut / "dev.tsv").write_bytes((whole / "dev.tsv").read_bytes())
    return Path(cut)


def of_grid(task: str, name: str, run: Path, data: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the scores of all seeds with the learning rate that is best on the first seed."""
    grid = {rate: score(task, name, run, data, rate, 0, given) for rate in given.learning_rates}
    best = max(grid, key=lambda rate: grid[rate])
    others = [score(task, name, run, data, best, seed, given) for seed in range(1, given.num_seeds)]
    return {"grid": grid, "learning_rate": best, "scores": [grid[best], *others]}


def score(task: str, name: str, run: Path, data: Path, rate: str, seed: int, given: argparse.Namespace) -> float:
    """Returns the main metric on dev. Runs the training unless it has already finished."""
    setting = TASKS[task]
    output = given.output / ("frozen" if given.frozen else "whole") / task / name / f"{rate}-{seed}"
    if not (output / "results.json").exists():
        recipe = "embedding" if task == SIMILARITY else task
        arguments: list[Any] = ["-m", "bert", "finetune", "--config", recipe, "--data.dir", data]
        arguments += ["--output_dir", output, *setting.options]
        arguments += ["--init", "none", "--architecture_from", run] if name == RANDOM else ["--init", run]
        arguments += ["--data.max_length", setting.max_length, "--data.buckets", json.dumps(setting.buckets)]
        arguments += ["--training.epochs", setting.epochs, "--training.batch_size", BATCH_SIZE]
        arguments += ["--training.eval_every", 10**6, "--training.checkpoint_every", 10**6, "--seed", seed]
        arguments += ["--optimizer.learning_rate", rate, "--data.sample_seed", 0]
        arguments += ["--num_feature_layers", 1] if given.frozen else []
        arguments += ["--data.max_train_samples", setting.rows] if setting.rows and not setting.folder else []
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output.parent / f"{output.name}.log", "w", encoding="utf-8") as log:
            subprocess.run([sys.executable, *map(str, arguments)], stdout=log, stderr=log, check=True)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return float(results["dev"][results["main_metric"]])


def splits_of(recipe: str, data: Path, **settings: Any) -> Splits:
    """Returns the rows of a recipe's task in a folder, with other settings of ``data``."""
    config = load_config(FinetuneConfig, recipe_folder() / f"{recipe}.yaml")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data), **settings))
    return read_splits(make_task(config), config)


def word_counts(task: str, data: Path) -> dict[str, float]:
    """Returns the scores of baselines that ignore order: TF-IDF with a linear model, and the task's baseline."""
    rows = None if TASKS[task].folder else TASKS[task].rows  # the files of GLUE are cut already
    splits = splits_of("stsb" if task == SIMILARITY else task, data, max_train_samples=rows, sample_seed=0)
    fitted, dev = splits.task, splits.examples["dev"]
    metric = "spearman" if task == SIMILARITY else fitted.main_metric
    scores = {}
    if lexical := lexical_baseline(fitted, splits.examples["train"], dev):
        scores[lexical[0]] = lexical[1][metric]
    if fitted.baseline:
        scores[fitted.baseline] = fitted.baseline_scores(dev)[metric]
    return scores


def summary(table: list[tuple[str, dict[str, Any], dict[str, float] | None]], starts: list[str]) -> list[str]:
    """Formats a Markdown table: mean and deviation of each encoder, its learning rate, and the baselines."""
    lines = ["| task | " + " | ".join(starts) + " | baselines |", "|" + "---|" * (len(starts) + 2)]
    for task, row, baselines in table:
        cells = [cell(row[name]) for name in starts]
        others = ", ".join(f"{name} {value:.3f}" for name, value in (baselines or {}).items())
        lines.append(f"| {task} | " + " | ".join(cells) + f" | {others} |")
    return lines


def cell(of_start: dict[str, Any]) -> str:
    """Formats mean, deviation and each score, the learning rate, and the first seed's scores for the whole grid."""
    each = ", ".join(f"{value:.3f}" for value in of_start["scores"])
    grid = ", ".join(f"{rate} {value:.3f}" for rate, value in of_start["grid"].items())
    return f"{spread(of_start['scores'], 3)} ({each}; {of_start['learning_rate']} of {grid})"


if __name__ == "__main__":
    main()
