"""What the training step reaches on one large GPU, in one call of under ten minutes:

    PYTHONPATH=. python benchmarks/gpu.py --output gpu.json

Imports jax, flax, optax, numpy and, for the shapes in the model's annotations, jaxtyping; the peer's rows need torch
and transformers, and say so where these are missing. Each row is written as soon as it is measured, and a row that the
file has is not measured again (one that failed is): a run that is killed, or whose budget ends, goes on with the same
command, and takes what it had compiled from the cache (``first call`` is then short). JAX and PyTorch take turns as
processes of their own, for neither leaves the other its memory. ``--small`` runs every row at toy sizes on whatever
device there is; without a GPU, cuDNN's rows say that there is none, and the fast ones run its twin.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from gpu_parts import attention, ceiling_shapes, dropout, gaps, matmul, projections
from gpu_steps import SMALL, Scale, let_go, remat_of, torch_step, train
from turns import hardware, versions, write

from bert.runtime.compilation_cache import use_compilation_cache

GRACE = 50
"""Seconds that a row may take beyond the end of its process's share."""
SHARES = {"ours": 0.55, "torch": 0.9, "rest": 1.0}
"""The processes in their order, and when, as a share of the budget, each begins its last row."""
ALLOCATOR = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
"""All of the memory, and in one token: an allocator that grows gives none back, and a step asks for all it needs at
once."""
ALSO = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "optax", "numpy")
"""Packages whose versions count here besides those of every benchmark."""
NOTES = ("host_gap", "waiting_for_input", "making_a_batch", "difference")
"""Shares that the table has next to a row's name."""

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
    also = {part.name: part.version for part in metadata.distributions() if part.name in ALSO}
    command = f"PYTHONPATH=. python {shlex.join(sys.argv)}"
    found |= {"versions": versions() | also, "hardware": machine(), "command": command, "small": given.small}
    write(given.output, found)
    began = time.time()
    for process, share in SHARES.items():
        until = began + share * given.budget
        own = ["--process", process, "--until", str(until), "--output", str(given.output)]
        arguments = [sys.executable, __file__, *own, *(["--small"] if given.small else [])]
        try:
            subprocess.run(arguments, env=os.environ | ALLOCATOR, timeout=max(until - time.time(), 0) + GRACE)
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


def machine() -> str:
    """The processor, and the GPUs with their driver where NVIDIA's own program is there to ask."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return "; ".join([hardware(), *(f"{gpu} (name, memory, driver)" for gpu in gpus)])


def measure(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """The rows of one process, each written down and printed when it is there."""
    if given.process != "torch":
        use_compilation_cache()
        device = jax.devices()[0]
        found["device"] = f"{device.device_kind}, {' '.join(device.client.platform_version.split())}"
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
            let_go()
        took, date = round(time.monotonic() - start, 1), time.strftime("%Y-%m-%d")
        found["rows"][name] = {**figures, "took": took, "date": date}
        write(given.output, found)
        print(f"{name}: {json.dumps(found['rows'][name])}", flush=True)


def rows(process: str, scale: Scale) -> Iterator[Row]:
    """The rows of a process: what compiles quickly, then what matters most, the dearest last."""
    batch, (short, long) = scale.tokens[1], scale.lengths
    models = {"base": scale.base, "large": scale.large}

    def ours(model: str, length: int, preset: str, more: str = "", tokens: int = batch, scan: bool = False) -> Row:
        is_fast = preset == "fast"
        remat = remat_of(scale, models[model], length, tokens, is_fast)
        name = f"{model} T{length} {preset}{more}" + (f", remat {remat}" if remat != "none" else "")
        return name, partial(train, scale, models[model], length, tokens, is_fast, scan, remat)

    if process == "ours":
        for name, shape in ceiling_shapes(scale).items():
            yield f"matmul {name}", partial(matmul, shape, scale.steps)
        for length in scale.lengths:
            for kind in ("written", "xla", "cudnn"):
                yield f"attention T{length} {kind}", partial(attention, scale, length, batch, kind)
        for generator in ("none", "hash", "threefry", "rbg"):
            yield f"dropout {generator}", partial(dropout, scale, batch, generator)
        for kind in ("three products", "one product of glued weights"):
            yield f"query, key and value as {kind}", partial(projections, scale, batch, kind.startswith("one"))
        yield ours("base", short, "fast")
        yield f"base T{short} fast, host gap and input", partial(gaps, scale, scale.base, short, batch)
        for model, length in (("base", long), ("large", short), ("large", long)):
            yield ours(model, length, "fast")
    elif process == "torch":
        for model in models:
            for length in scale.lengths:
                for kind in ("best", "stock"):
                    peer = partial(torch_step, scale, models[model], length, batch, kind == "best")
                    yield f"{model} T{length} torch {kind}", peer
    else:
        for tokens in scale.tokens:
            if tokens != batch:
                yield ours("base", short, "fast", f", {tokens} tokens", tokens)
        yield ours("base", short, "fast", ", scanned", scan=True)
        for model in models:
            for length in scale.lengths:
                yield ours(model, length, "reference")


def table(found: dict[str, Any]) -> str:
    """All rows as Markdown: TFLOP/s also as a share of the best measured product, ours next to the peer's where both
    have the same batch. Above them what they were measured with."""
    measured = {name: row for name, row in found["rows"].items() if "error" not in row}
    products = [row["tflops"] for name, row in measured.items() if name.startswith("matmul")]
    ceiling = max(products, default=None)
    heads = ("row", "ms", "sequences/s", "TFLOP/s", "of the ceiling", "/ torch best", "/ torch stock", "first call, s")
    dates = sorted({row["date"] for row in found["rows"].values()})
    lines = [", ".join([f"`{found['command']}`", *dates]), f"{found['hardware']}; JAX on {found.get('device')}"]
    lines += [", ".join(f"{name} {version}" for name, version in found["versions"].items()), ""]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, row in found["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * (len(heads) - 2))
            continue
        tflops, rate = row.get("tflops"), row.get("sequences_per_second")
        at = " ".join(name.replace(",", "").split()[:2])
        peers = [measured.get(f"{at} torch {kind}", {}) for kind in ("best", "stock")]
        theirs = [peer.get("sequences_per_second") if peer.get("batch") == row.get("batch") else None for peer in peers]
        cells = [
            f"{1000 * row['seconds']:.2f}",
            "" if rate is None else f"{rate:.0f}",
            "" if tflops is None else f"{tflops:.1f}",
            "" if tflops is None or ceiling is None else f"{tflops / ceiling:.0%}",
            *("" if rate is None or other is None else f"{rate / other:.2f}" for other in theirs),
            f"{row['first_seconds']:.1f}",
        ]
        extra = {key: row[key] for key in NOTES if row.get(key) is not None}
        notes = "".join(f", {key.replace('_', ' ')} {value:.2%}" for key, value in extra.items())
        notes += f", {row['skipped']} steps skipped" if row.get("skipped") else ""
        lines.append(f"| {name}{notes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
