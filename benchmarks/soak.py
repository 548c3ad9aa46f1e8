"""Checks long runs for growing memory, slowdown and leaked files: PYTHONPATH=. python benchmarks/soak.py [--steps 5000]

Trains the tiny model for about 5,000 steps, with a checkpoint every 100 and an evaluation every 500 steps, and monitors
the process from outside (Linux), on an idle machine. A window is a tenth of the steps. The first two windows are
warm-up, because the first plot, which loads fonts, comes late if evaluations are quick.

Exits with status 1 if memory differs by more than 2% between the third and any later window, or if speed differs by
more than 5%, or the number of open files at all, between the third and the last window.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WINDOWS, WARM_UP = 10, 2
MOST_MEMORY, MOST_TIME = 0.02, 0.05

# Few short rows make steps fast, because the loop is what is tested.
TINY = [
    "--config=tiny", "--phases=null", "--data.train=docstrings:stdlib", "--tokenizer.vocab_size=2048",
    "--data.sequence_length=32", "--data.max_predictions_per_sequence=5", "--training.batch_size=8",
    "--optimizer.warmup_steps=100",
]  # fmt: skip


class Window(NamedTuple):
    """Medians over a tenth of the steps."""

    last_step: int
    megabytes: float
    milliseconds: float
    files: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run = Path(folder) / "run"
        lengths = [f"--training.steps={steps}", f"--training.log_every={max(1, steps // 500)}"]
        lengths += [f"--training.checkpoint_every={max(1, steps // 50)}", f"--training.eval_every={steps // WINDOWS}"]
        arguments = [*TINY, *lengths, f"--output_dir={run}", f"--data.cache_dir={folder}/cache"]
        process = subprocess.Popen([sys.executable, "-m", "bert", "pretrain", *arguments], stdout=subprocess.DEVNULL)
        samples = watch(process, run)
        if process.wait():
            return process.returncode
        windows = summarise(samples, times_of_tokens(run), steps)
    return verdict(windows)


def watch(process: subprocess.Popen[bytes], run: Path) -> list[tuple[int, float, int]]:
    """Returns (last logged step, resident megabytes, open files), sampled a few times per second until the end."""
    page, samples = os.sysconf("SC_PAGE_SIZE"), []
    while process.poll() is None:
        time.sleep(0.1)
        try:
            resident = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * page / 1e6
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
        except (OSError, IndexError):  # it has just ended
            continue
        if files:  # otherwise it is about to end
            samples.append((last_step(run / "metrics.jsonl"), resident, files))
    return samples


def last_step(log: Path) -> int:
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        whole = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b'{"step"')]
    return json.loads(whole[-1])["step"] if whole else 0


def times_of_tokens(run: Path) -> dict[int, float]:
    """Returns milliseconds per token at each log line, without evaluations and checkpoints."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: 1e3 / line["tokens_per_second"] for line in lines if line["split"] == "train"}


def summarise(samples: list[tuple[int, float, int]], times: dict[int, float], steps: int) -> list[Window]:
    windows = []
    for number in range(WINDOWS):
        first, last = number * steps // WINDOWS, (number + 1) * steps // WINDOWS
        here = [sample for sample in samples if first < sample[0] <= last]
        windows.append(
            Window(
                last_step=last,
                megabytes=statistics.median(memory for _, memory, _ in here),
                milliseconds=statistics.median(value for step, value in times.items() if first < step <= last),
                files=statistics.median_low(files for _, _, files in here),
            )
        )
    return windows


def verdict(windows: list[Window]) -> int:
    reference, last = windows[WARM_UP], windows[-1]
    print(f"{'to step':>8}{'memory, MB':>12}{'ms per 1,000 tokens':>22}{'open files':>12}")
    for window in windows:
        print(f"{window.last_step:8,}{window.megabytes:12,.1f}{window.milliseconds * 1e3:22.2f}{window.files:12}")
    growth = max(abs(window.megabytes / reference.megabytes - 1) for window in windows[WARM_UP + 1 :])
    slower = last.milliseconds / reference.milliseconds - 1
    print(
        f"against the window to step {reference.last_step:,}: memory differs by {growth:.2%} at most, the last steps "
        f"take {slower:+.2%} more time, {last.files - reference.files:+} open files"
    )
    return int(growth > MOST_MEMORY or slower > MOST_TIME or last.files != reference.files)


if __name__ == "__main__":
    sys.exit(main())
