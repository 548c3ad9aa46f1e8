"""Prints a table of fine-tuning runs: python benchmarks/finetuning_table.py runs/sst2 runs/mrpc-0 ...

Runs with the same task and initial model, and all seeds of a folder, are aggregated: mean, standard deviation and each.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def main(folders: list[str]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
        groups[results["task"], results["init"]] += results.get("runs", [results])
    print("| task | from | metric | dev, best of the epochs | last epoch | each (best) | baseline |")
    print("|---|---|---|---|---|---|---|")
    for (task, start), runs in sorted(groups.items()):
        for metric, baseline in runs[0][runs[0].get("baseline", "majority_class")].items():
            best = [run["dev"][metric] for run in runs]
            last = [run["last"][metric] for run in runs]
            each = ", ".join(f"{value:.4f}" for value in best)
            start_name = "random weights" if start == "none" else start
            print(f"| {task} | {start_name} | {metric} | {spread(best)} | {spread(last)} | {each} | {baseline:.4f} |")


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


if __name__ == "__main__":
    main(sys.argv[1:])
