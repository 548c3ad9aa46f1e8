"""Measures startup time: import, help, and the quickstart's first training step, cold and warm, in turns:

    PYTHONPATH=. python benchmarks/startup.py --output startup.json

"first step" is the time from the start of `bert pretrain` without arguments to its first line of training metrics. That
is the second step, because log_every is 1 and the first step is not timed. "cold" has empty caches, and includes
vocabulary and examples. "warm" uses the caches of an earlier start. An interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import in_turns, table

SIDES = {
    "python, nothing": ["-c", "pass"],
    "import bert": ["-c", "import bert"],
    "bert --help": ["-m", "bert", "--help"],
    "bert pretrain --help": ["-m", "bert", "pretrain", "--help"],
    "first step, cold": [],
    "first step, warm": [],
}


def main() -> None:
    """Measures all sides or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("startup.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--quickstart", nargs=argparse.REMAINDER, default=[], help="further arguments to bert pretrain")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        side, cache = given.worker
        print(json.dumps({"seconds": measured(side, cache, given.quickstart)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        last = ["--quickstart", *given.quickstart]
        sides = {side: [__file__, "--worker", side, str(Path(folder, "caches")), *last] for side in given.sides}
        found = in_turns(sides, given)
    print(found["hardware"], found["versions"])
    print(table(found, ("seconds",)))


def measured(side: str, cache: str, arguments: list[str]) -> float:
    """Returns the seconds of one start."""
    if SIDES[side]:
        start = time.perf_counter()
        subprocess.run([sys.executable, *SIDES[side]], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start
    if side == "first step, cold":
        with tempfile.TemporaryDirectory() as empty:
            return first_step(empty, arguments)
    if not Path(cache).is_dir():
        first_step(cache, arguments)
    return first_step(cache, arguments)


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
