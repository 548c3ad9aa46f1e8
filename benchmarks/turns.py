"""Runs the sides of a comparison in turns. Each measurement is a separate process, saved at once and not repeated.

A helper for the other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CACHES = ("JAX_COMPILATION", "JAX_PERSISTENT", "BERT_COMPILATION")
"""Environment variables removed for all sides, because the benchmark controls the compilation caches."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "sentence-transformers", "bm25s", "onnxruntime")
CHOICES = ("output", "rounds", "sides", "seeds", "tasks", "worker")
"""Arguments that select measurements and do not change their settings."""


def in_turns(
    sides: dict[str, list[str]],
    given: argparse.Namespace,
    environment: dict[str, str] | None = None,
    pythons: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs each side's command ``given.rounds`` times, in rounds over all sides.

    Args:
        sides: maps a name to arguments for Python. The last line of output is a JSON object with ``seconds``.
        given: arguments of the benchmark. Results in the JSON file ``output`` are not measured again, unless they
            failed. The file is complete after every measurement, and has results of one setting on one machine.
        environment: environment variables for all sides.
        pythons: the interpreters of sides that need another one than this.

    Returns:
        {"versions": ..., "hardware": ..., "settings": ..., "sides": {name: [what each measurement printed]}}.
    """
    output: Path = given.output
    settings = {name: str(value) for name, value in vars(given).items() if name not in CHOICES}
    settings["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "")
    here: dict[str, Any] = {"versions": versions(), "hardware": hardware(), "settings": settings}
    found: dict[str, Any] = {**here, "sides": {}}
    if output.is_file():
        found = json.loads(output.read_text(encoding="utf-8"))
    if other := [name for name, value in here.items() if found.get(name) != value]:
        sys.exit(f"{output} holds measurements of other {' and '.join(other)}: name another file with --output")
    for turn in range(given.rounds):
        for name, arguments in sides.items():
            measured = found["sides"].setdefault(name, [])
            if len(measured) > turn and "error" not in measured[turn]:
                continue
            measured[turn:] = [
                run(arguments, environment or {}, (pythons or {}).get(name, sys.executable)),
                *measured[turn + 1 :],
            ]
            write(output, found)
            print(f"{name}, {turn + 1} of {given.rounds}: {json.dumps(measured[turn])}", flush=True)
    return found


def run(arguments: list[str], environment: dict[str, str], python: str = sys.executable) -> dict[str, Any]:
    """Runs one measurement. If it fails, the end of its output is recorded."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {name: value for name, value in os.environ.items() if not name.startswith(CACHES)}
    done = subprocess.run(
        [python, *arguments],
        env={**own, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1])


def write(output: Path, found: dict[str, Any]) -> None:
    """Writes the file atomically."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(output)


def table(found: dict[str, Any], keys: tuple[str, ...], against: str | None = None) -> str:
    """Formats the medians of all sides as Markdown, with the ratio of the first key to the side ``against``."""
    head = ["side", "runs", *keys] + ([f"{keys[0]} / {against}'s"] if against else [])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    medians = {name: [_median(runs, key) for key in keys] for name, runs in found["sides"].items()}
    for name, values in medians.items():
        runs = found["sides"][name]
        good = sum("error" not in run for run in runs)
        cells = [name, str(good), *("-" if value is None else f"{value:.4g}" for value in values)]
        if against:
            mine, other = values[0], medians[against][0]
            cells.append("-" if mine is None or other is None else f"{mine / other:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
        lines += [f"|   {run['error']} |" + " |" * (len(head) - 1) for run in runs if "error" in run]
    return "\n".join(lines)


def _median(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if key in run]
    return statistics.median(values) if values else None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """Returns the processor's name and the number of available cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{cores} x {name}"
