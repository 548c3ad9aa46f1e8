"""Benchmarks the training step on one large GPU, in one call of under ten minutes:

    PYTHONPATH=. python benchmarks/gpu.py --output gpu.json

Needs jax, flax, optax, numpy and jaxtyping. The peer's rows also need torch and transformers, and report if they are
missing. Each row is written as soon as it is measured. Rows in the file are not measured again, except failed ones. If
the run is killed or its budget ends, the same command resumes it and uses the compilation cache (``first call`` is then
short). JAX and PyTorch run in turns in separate processes, because neither frees its memory for the other. ``--small``
runs every row at toy sizes on any device. Without a GPU, cuDNN's rows report that, and the fast rows use a substitute.
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
"""Maximum seconds of a row beyond its process's share of the budget."""
SHARES = {"ours": 0.55, "torch": 0.9, "rest": 1.0}
"""The processes in order, and the share of the budget after which each starts no further row."""
ALLOCATOR = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
"""All memory is allocated in one block.

A growing allocator does not return memory, and a step allocates all memory it needs at once.
"""
ALSO = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "optax", "numpy")
"""Packages whose versions are recorded in addition to the common ones."""
NOTES = ("host_gap", "waiting_for_input", "making_a_batch", "difference")
"""Ratios that the table shows next to a row's name."""

Row = tuple[str, Callable[[], dict[str, Any]]]


def main(argv: list[str] | None = None) -> None:
    """Measures missing rows while the budget lasts, and prints the table."""
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
    left = [name for process in SHARES for name, _ in rows(process, scale_of(given))]
    left = [name for name in left if name not in found["rows"]]
    if left:
        print(f"the budget of {given.budget:g} s has ended before {', '.join(left)}: the same command goes on")
    print(table(found))


def read(output: Path) -> dict[str, Any]:
    """Reads the results so far."""
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"rows": {}}
    return found


def machine() -> str:
    """Returns the processor and, if NVIDIA's tool is installed, the GPUs with their driver."""
    gpus = gpu_properties("name,memory.total,driver_version")
    return "; ".join([hardware(), *(f"{gpu} (name, memory, driver)" for gpu in gpus)])


def scale_of(given: argparse.Namespace) -> Scale:
    """Returns the sizes to measure, with the memory of this machine's smallest GPU."""
    if given.small:
        return SMALL
    mebibytes = [int(gpu.split()[0]) for gpu in gpu_properties("memory.total")]
    return Scale(memory=min(mebibytes) * 2**20) if mebibytes else Scale()


def gpu_properties(names: str) -> list[str]:
    """Returns a line for each GPU from NVIDIA's tool; none if it is not installed. Takes no GPU memory."""
    asked = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def measure(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measures the rows of one process. Writes and prints each row when it is done."""
    if given.process != "torch":
        use_compilation_cache()
        device = jax.devices()[0]
        found["device"] = f"{device.device_kind}, {' '.join(device.client.platform_version.split())}"
    for name, row in rows(given.process, scale_of(given)):
        if "error" not in found["rows"].get(name, {"error": "not there"}):
            continue
        if time.time() > given.until:
            break
        start = time.monotonic()
        try:
            figures = row()
        except Exception as error:  # out of memory, no cuDNN, no torch: recorded in the row
            figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
            let_go()
        took, date = round(time.monotonic() - start, 1), time.strftime("%Y-%m-%d")
        found["rows"][name] = {**figures, "took": took, "date": date}
        write(given.output, found)
        print(f"{name}: {json.dumps(found['rows'][name])}", flush=True)


def rows(process: str, scale: Scale) -> Iterator[Row]:
    """Yields the rows of a process: first fast compilations, then the most important rows, then the most expensive."""
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
            for kind in ("eager", "xla", "cudnn", "xla, packed", "cudnn, packed"):
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
    """Formats all rows as Markdown, below a description of the setup.

    TFLOP/s are also given as a ratio to the best matrix product, and our rows next to the peer's if the batch is the
    same.
    """
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
