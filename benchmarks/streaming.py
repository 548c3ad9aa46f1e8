"""Compares streaming and built examples for a tiny model on English Wikipedia: time to first step, and held-out loss.

    PYTHONPATH=. python benchmarks/streaming.py [--steps 200] [--readers 2]

Both sides have empty caches, BERT's uncased vocabulary, and the same 59 held-out articles. The time is measured from
process start to the first line of metrics.jsonl. With built examples it includes building all of them.
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
from typing import Any

from examples import family

SIDES = {"streamed": ["--data.streaming=true"], "built": []}

TINY = [
    "--config=tiny",
    "--phases=null",
    "--training.batch_size=32",
    "--training.gradient_accumulation_steps=1",
    "--optimizer.learning_rate=2e-3",
    "--optimizer.warmup_ratio=0.1",
    "--training.log_every=1",
    "--training.checkpoint_every=100000",
    "--data.sequence_length=64",
    "--data.max_predictions_per_sequence=10",
    "--data.input_format=full_sentences",
]


def main() -> None:
    """Runs both sides sequentially."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval_every", type=int, default=50)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    given = parser.parse_args()
    for seed in given.seeds:
        for side in given.sides:
            first, cpu, lines = measured(side, seed, given)
            losses = [f"{line['step']}: {line['mlm_loss']:.3f}" for line in lines if line["split"] == "eval"]
            print(
                f"{side:8} seed {seed}  first step after {first:.1f} s, {cpu:.1f} CPU seconds; "
                f"held-out loss {', '.join(losses)}",
                flush=True,
            )


def measured(side: str, seed: int, given: argparse.Namespace) -> tuple[float, float, list[dict[str, Any]]]:
    """Returns seconds to the first step, CPU seconds of all processes, and the lines of metrics.jsonl."""
    corpus, vocabulary = given.shared / "data/pretrain/enwiki", given.shared / "data/vocab/bert-base-uncased"
    readers = [f"--data.stream_readers={given.readers}"] if side == "streamed" else []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [
            sys.executable, "-m", "bert", "pretrain", *TINY, *SIDES[side], *readers, f"--output_dir={run}",
            f"--data.train={corpus / 'train.txt'}", f"--data.eval={corpus / 'valid.txt'}", f"--seed={seed}",
            f"--tokenizer.path={vocabulary}", f"--training.steps={given.steps}",
            f"--training.eval_every={given.eval_every}",
        ]  # fmt: skip
        log, environment = run / "metrics.jsonl", {**os.environ, "XDG_CACHE_HOME": folder}
        start = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (log.is_file() and log.stat().st_size):
                time.sleep(0.02)
            first, cpu = time.perf_counter() - start, sum(map(cpu_seconds, family(process.pid)))
        if process.returncode:
            raise SystemExit(f"bert pretrain ended with {process.returncode}")
        return first, cpu, [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and its finished children; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
