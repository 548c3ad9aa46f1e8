"""Measures startup time: import, help, the first vector, and the quickstart's first training step, in turns:

    PYTHONPATH=. python benchmarks/startup.py --model MODEL --output startup.json

"first step" is the time from the start of `bert pretrain` without arguments to its first line of training metrics. That
is the second step, because log_every is 1 and the first step is not timed. "cold" has empty caches, and includes
vocabulary and examples. "warm" uses the caches of an earlier start. "first vector" is the embedding of one sentence by
MODEL, a sentence-transformers folder, with warm caches; `onnxruntime` and `jax` are engines of `bert.load`. CPU time
includes children. An interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import in_turns, table

VECTOR = "first vector"
OURS = "import bert, sys; bert.load(sys.argv[1], engine='{engine}').embed('a text')"
THEIRS = "import sentence_transformers as s, sys; s.SentenceTransformer(sys.argv[1], device='cpu').encode('a text')"
SIDES = {
    "python, nothing": ["-c", "pass"],
    "import bert": ["-c", "import bert"],
    "bert --help": ["-m", "bert", "--help"],
    "bert pretrain --help": ["-m", "bert", "pretrain", "--help"],
    f"{VECTOR}, jax": ["-c", OURS.format(engine="jax")],
    f"{VECTOR}, onnxruntime": ["-c", OURS.format(engine="onnxruntime")],
    f"{VECTOR}, sentence-transformers": ["-c", THEIRS],
    "first step, cold": [],
    "first step, warm": [],
}


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("startup.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="(default: all; vectors need --model)")
    parser.add_argument("--model", metavar="MODEL", help="folder of all-MiniLM-L6-v2 or another sentence encoder")
    parser.add_argument("--quickstart", nargs=argparse.REMAINDER, default=[], help="further arguments to bert pretrain")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        side, cache = given.worker
        before = time.process_time() + cpu_of_children()
        seconds = measured(side, cache, given.model, given.quickstart)
        print(json.dumps({"seconds": seconds, "cpu_seconds": time.process_time() + cpu_of_children() - before}))
        return
    given.sides = given.sides or [side for side in SIDES if given.model or not side.startswith(VECTOR)]
    with tempfile.TemporaryDirectory() as folder:
        last = [*(["--model", given.model] if given.model else []), "--quickstart", *given.quickstart]
        sides = {side: [__file__, "--worker", side, str(Path(folder, "caches")), *last] for side in given.sides}
        found = in_turns(sides, given)
    print(found["hardware"], found["versions"])
    print(table(found, ("seconds", "cpu_seconds")))


def measured(side: str, cache: str, model: str | None, arguments: list[str]) -> float:
    """Returns the seconds of one start."""
    if SIDES[side]:
        command = [sys.executable, *SIDES[side], *([model] if model and side.startswith(VECTOR) else [])]
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
        if side.startswith(VECTOR) and not Path(cache, side).exists():  # fills the caches
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            Path(cache, side).mkdir(parents=True)
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start
    if side == "first step, cold":
        with tempfile.TemporaryDirectory() as empty:
            return first_step(empty, arguments)
    if not Path(cache).is_dir():
        first_step(cache, arguments)
    return first_step(cache, arguments)


def cpu_of_children() -> float:
    """Returns the CPU seconds of all finished children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_step(cache: str, arguments: list[str]) -> float:
    """Returns the seconds from the quickstart's start to the first line of metrics.jsonl, and stops the run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-m", "bert", "pretrain", "--output_dir", str(out), "--training.log_every", "1"]
        start = time.perf_counter()
        running = subprocess.Popen(
            [*command, *arguments], env={**os.environ, "XDG_CACHE_HOME": cache}, stdout=subprocess.DEVNULL
        )
        lines = out / "metrics.jsonl"
        while not (lines.is_file() and lines.stat().st_size):
            if running.poll() is not None:
                sys.exit(f"bert pretrain ended with {running.returncode} before its first step")
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        running.terminate()
        running.wait()
    return seconds


if __name__ == "__main__":
    main()
