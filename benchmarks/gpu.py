"""What the training step reaches on one large GPU, in one call of under ten minutes:

    PYTHONPATH=. python benchmarks/gpu.py --output gpu.json

Needs jax, flax, optax, jaxtyping and numpy; the peer's rows need torch and transformers, and say so where these are
missing. Each row is written as soon as it is measured, and a row that the file has is not measured again (one that
failed is): a run that is killed, or whose budget ends, goes on with the same command. JAX and PyTorch take turns as
processes of their own, for neither leaves the other its memory. ``--small`` runs every row at toy sizes on whatever
device there is; without a GPU, cuDNN's rows say that there is none, and the fast ones run its twin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from gpu_parts import attention, ceiling_shapes, dropout, matmul, projections
from gpu_steps import SMALL, Scale, gaps, torch_step, train
from turns import versions, write

GRACE = 50
"""Seconds that a row may take beyond the end of its process's share."""
SHARES = {"ours": 0.5, "torch": 0.9, "parts": 1.0}
"""The processes in their order, and when, as a share of the budget, each begins its last row."""

Row = tuple[str, Callable[[], dict[str, Any]]]


def main(argv: list[str] | None = None) -> None:
    """Measures the rows that the file lacks, as long as the budget lasts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=540, help="seconds; no row is begun after it")
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the script")
    parser.add_argument("--process", choices=list(SHARES), help="the rows of one process, begun before --until alone")
    parser.add_argument("--until", type=float, help="seconds since 1970")
    given = parser.parse_args(argv)
    found = read(given.output)
    if found["rows"] and found["small"] != given.small:
        parser.error(f"{given.output} holds rows of the other sizes: name another file with --output")
    if given.process:
        measure(given, found)
        return
    began = time.time()
    for process, share in SHARES.items():
        until = began + share * given.budget
        own = ["--process", process, "--until", str(until), "--output", str(given.output)]
        command = [sys.executable, __file__, *own, *(["--small"] if given.small else [])]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            subprocess.run(command, env=environment, timeout=max(until - time.time(), 0) + GRACE)
        except subprocess.TimeoutExpired:
            print(f"a row of {process} took longer than there was time: it was ended")
    found = read(given.output)
    left = [name for process in SHARES for name, _ in rows(process, SMALL if given.small else Scale())]
    left = [name for name in left if name not in found["rows"]]
    if left:
        print(f"the budget of {given.budget:g} s has ended before {', '.join(left)}: the same command goes on")
    print(table(found))


def read(output: Path) -> dict[str, Any]:
    """What has been measured so far."""
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"rows": {}}
    return found


def measure(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """The rows of one process, each written down and printed when it is there."""
    found |= {"versions": versions(), "small": given.small}
    if given.process != "torch":
        found["device"] = jax.devices()[0].device_kind
    for name, row in rows(given.process, SMALL if given.small else Scale()):
        if "error" not in found["rows"].get(name, {"error": "not there"}):
            continue
        if time.time() > given.until:
            break
        start = time.monotonic()
        try:
            figures = row()
        except Exception as error:  # out of memory, no cuDNN, no torch: the row says so, and the others are measured
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        found["rows"][name] = {**figures, "took": round(time.monotonic() - start, 1)}
        write(given.output, found)
        print(f"{name}: {json.dumps(found['rows'][name])}", flush=True)


def rows(process: str, scale: Scale) -> Iterator[Row]:
    """The rows of a process with their names, the dearest last."""
    batch, (short, long) = scale.tokens[1], scale.lengths
    models = {"base": scale.base, "large": scale.large}
    if process == "ours":
        for name, shape in ceiling_shapes(scale).items():
            yield f"matmul {name}", partial(matmul, shape, scale.steps)
        yield f"base T{short} fast", partial(train, scale, scale.base, short, batch, True)
        yield f"base T{short} fast, host gap and input", partial(gaps, scale, scale.base, short, batch)
        for model, length in (("base", long), ("large", short), ("large", long)):
            yield f"{model} T{length} fast", partial(train, scale, models[model], length, batch, True)
    elif process == "torch":
        for model in models:
            for length in scale.lengths:
                for kind in ("best", "stock"):
                    peer = partial(torch_step, scale, models[model], length, batch, kind == "best")
                    yield f"{model} T{length} torch {kind}", peer
    else:
        for length in scale.lengths:
            for kind in ("written", "xla", "cudnn"):
                yield f"attention T{length} {kind}", partial(attention, scale, length, batch, kind)
        for generator in ("none", "hash", "threefry", "rbg"):
            yield f"dropout {generator}", partial(dropout, scale, batch, generator)
        for kind in ("three products", "one product of glued weights"):
            yield f"query, key and value as {kind}", partial(projections, scale, batch, kind.startswith("one"))
        for model, length in (("base", short), ("base", long)):
            yield f"{model} T{length} faithful", partial(train, scale, models[model], length, batch, False)
        for tokens in scale.tokens:
            if tokens != batch:
                yield f"base T{short} fast, {tokens} tokens", partial(train, scale, scale.base, short, tokens, True)
        yield f"base T{short} fast, scanned", partial(train, scale, scale.base, short, batch, True, scan=True)
        for length in scale.lengths:
            yield f"large T{length} faithful", partial(train, scale, scale.large, length, batch, False)


def table(found: dict[str, Any]) -> str:
    """All rows as Markdown: TFLOP/s also as a share of the best measured product, ours beside the peer's at the same
    sizes."""
    measured = {name: row for name, row in found["rows"].items() if "error" not in row}
    products = [row["tflops"] for name, row in measured.items() if name.startswith("matmul")]
    ceiling = max(products, default=None)
    heads = ("row", "ms", "sequences/s", "TFLOP/s", "of the ceiling", "/ torch best", "/ torch stock", "first call, s")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, row in found["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * (len(heads) - 2))
            continue
        tflops, rate = row.get("tflops"), row.get("sequences_per_second")
        at = " ".join(name.replace(",", "").split()[:2])
        peers = [measured.get(f"{at} torch {kind}", {}).get("sequences_per_second") for kind in ("best", "stock")]
        cells = [
            f"{1000 * row['seconds']:.2f}",
            "" if rate is None else f"{rate:.0f}",
            "" if tflops is None else f"{tflops:.1f}",
            "" if tflops is None or ceiling is None else f"{tflops / ceiling:.0%}",
            *("" if rate is None or peer is None else f"{rate / peer:.2f}" for peer in peers),
            f"{row['first_seconds']:.1f}",
        ]
        extra = {key: row[key] for key in ("device_idle", "input", "difference") if row.get(key) is not None}
        notes = "".join(f", {key.replace('_', ' ')} {value:.2%}" for key, value in extra.items())
        notes += f", {row['skipped']} steps skipped" if row.get("skipped") else ""
        lines.append(f"| {name}{notes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
