"""Compares LoRA adapters with full fine-tuning: scores, trained parameters and time on MRPC and STS-B.

    PYTHONPATH=. python benchmarks/lora.py OUT --init all-MiniLM-L6-v2 --glue GLUE

Each of the four runs has three seeds. An interrupted comparison resumes. Finished runs are only read, so `--tasks` and
`--sides` can distribute the work among processes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import bert

FOLDERS = {"mrpc": "MRPC", "stsb": "STS-B"}
SIDES = ("full", "lora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--init", required=True)
    parser.add_argument("--glue", type=Path, required=True, help="folder of MRPC/ and STS-B/")
    parser.add_argument("--tasks", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--num_seeds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of adapters; full runs have the recipe's")
    parser.add_argument("--epochs", type=float, default=5, help="of adapters")
    arguments = parser.parse_args()
    print("| task | side | trained parameters | metric | dev, best of the epochs | each | seconds a seed |")
    print("|---|---|---|---|---|---|---|", flush=True)
    adapters = {
        "lora.rank": arguments.rank,
        "optimizer.learning_rate": arguments.learning_rate,
        "training.epochs": arguments.epochs,
    }
    for task in arguments.tasks:
        for side in arguments.sides:
            overrides: dict[str, Any] = {"num_seeds": arguments.num_seeds}
            overrides |= {"data.dir": str(arguments.glue / FOLDERS[task]), **(adapters if side == "lora" else {})}
            folder = arguments.out / f"{task}-{side}"
            run = bert.finetune(task, init=arguments.init, output_dir=folder, overrides=overrides)
            print_rows(task, side, run.results.get("runs", [run.results]))


def print_rows(task: str, side: str, runs: list[dict[str, Any]]) -> None:
    """Prints a row for each metric."""
    trained, total = runs[0]["trained_parameters"], runs[0]["parameters"]
    seconds = statistics.mean(run["seconds"] for run in runs)
    for metric in (name for name in runs[0]["dev"] if name != "loss"):
        scores = [run["dev"][metric] for run in runs]
        deviation = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        print(
            f"| {task} | {side} | {trained:,} ({trained / total:.2%}) | {metric} | {statistics.mean(scores):.4f}"
            f"{deviation} | {', '.join(f'{score:.4f}' for score in scores)} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
