"""Times one epoch of fine-tuning, from process start to the dev score, compared with a PyTorch loop, in turns:

    PYTHONPATH=. python benchmarks/finetune_speed.py MODEL GLUE --output finetune_speed.json

MODEL is a folder in Hugging Face's layout, such as MiniLM, and GLUE a folder with MRPC and SST-2. Both sides read the
same files, namely all of MRPC and the first 10,000 rows of SST-2. The time includes imports, reading, compilation, the
epoch, the evaluation and saving. Our side runs with an empty compilation cache ("cold"), and with a cache that the same
command has filled ("warm"). The peer is `torch_peer.py glue`, as its users run it and, as "best", with huge pages
(which our side also uses) and a fused optimizer. An interrupted comparison resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import in_turns, table

ROWS = {"MRPC": None, "SST-2": 10_000}
LEARNING_RATE, BATCH = 5e-5, 32


def main() -> None:
    """Measures all sides of both tasks or, as a worker, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("glue", type=Path)
    parser.add_argument("--output", type=Path, default=Path("finetune_speed.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="of every training file, to try the script")
    parser.add_argument("--tasks", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "TASK", "CACHE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        side, task, cache = given.worker
        print(json.dumps(measured(side, task, cache, given)))
        return
    with tempfile.TemporaryDirectory() as made:
        cut = {task: _cut(given.glue, task, given.rows or ROWS[task], Path(made, "glue")) for task in given.tasks}
        sides = {}
        for task in given.tasks:
            cache = Path(made, "cache", task)
            for side in ("ours cold", "ours warm", "torch", "torch best"):
                places = [str(given.model.resolve()), str(cut[task])]
                sides[f"{task}, {side}"] = [__file__, *places, "--worker", side, task, str(cache)]
        found = in_turns(sides, given)
    print(found["hardware"], found["versions"])
    for task in given.tasks:
        of_task = {"sides": {name: runs for name, runs in found["sides"].items() if name.startswith(f"{task},")}}
        print("\n" + table(of_task, ("seconds", "accuracy"), f"{task}, torch"))


def _cut(glue: Path, task: str, rows: int | None, out: Path) -> Path:
    """Makes a folder with the task's dev file and the first rows of its training file, without a test file."""
    (out / task).mkdir(parents=True)
    for name, lines in (("train.tsv", None if rows is None else rows + 1), ("dev.tsv", None)):
        with (glue / task / name).open("rb") as file:
            (out / task / name).write_bytes(b"".join(itertools.islice(file, lines)))
    return out


def measured(side: str, task: str, cache: str, given: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds of the whole process, and the accuracy on dev."""
    if side.startswith("torch"):
        peer = [Path(__file__).with_name("torch_peer.py"), "glue", given.model, given.glue / task, "--epochs", 1]
        peer += ["--best"] if side == "torch best" else []
        seconds, printed = _run([*peer, "--learning_rate", LEARNING_RATE, "--batch_size", BATCH], {})
        return {"seconds": seconds, "accuracy": json.loads(printed.splitlines()[-1])["accuracy"]}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "bert", "finetune", "--config", task.lower().replace("-", ""), "--init", given.model]
        arguments += ["--data.dir", given.glue / task, "--training.epochs", 1, "--training.batch_size", BATCH]
        arguments += ["--optimizer.learning_rate", LEARNING_RATE, "--output_dir"]

        def once(name: str, compiled: str) -> tuple[float, Path]:
            out = Path(folder, name)
            return _run([*arguments, out], {"BERT_COMPILATION_CACHE": compiled})[0], out

        warm = side == "ours warm"
        if warm and not Path(cache).is_dir():
            once("fills", cache)
        seconds, out = once("run", cache if warm else str(Path(folder, "cache")))
        scores = json.loads((out / "results.json").read_text(encoding="utf-8"))["dev"]
    return {"seconds": seconds, "accuracy": scores["accuracy"]}


def _run(arguments: list[object], environment: dict[str, str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{arguments[0]} ended with {done.returncode}")
    return seconds, done.stdout


if __name__ == "__main__":
    main()
