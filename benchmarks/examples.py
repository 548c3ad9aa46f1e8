"""Speed and memory of building examples from English Wikipedia: 15 MB and 60 MB, one and all workers.

    PYTHONPATH=. python benchmarks/examples.py [--shared ../shared]

Uses BERT's own uncased vocabulary and T = 128. Memory is the anonymous part of the resident set (RssAnon) of
the process and its workers together, sampled every 20 ms: mapped pages of spool and shards belong to the page
cache, which the kernel takes back when it needs them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bert.values import known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[15, 60])
    arguments = parser.parse_args()
    corpus = arguments.shared / "data/pretrain/enwiki/train.txt"
    vocabulary = arguments.shared / "data/vocab/bert-base-uncased"
    cores = len(os.sched_getaffinity(0))
    print("  MB workers  seconds   MB/s     rows  peak MB   main second call")
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in arguments.megabytes:
            text = head(corpus, megabytes * 1_000_000, Path(folder, f"{megabytes}.txt"))
            for workers in sorted({1, cores}):
                shutil.rmtree(Path(folder, "cache"), ignore_errors=True)
                measure(text, vocabulary, Path(folder, "cache"), workers)


def head(corpus: Path, size: int, target: Path) -> Path:
    """The first documents of a corpus, about ``size`` bytes of them."""
    with open(corpus, "rb") as source, open(target, "wb") as out:
        for line in source:
            out.write(line)
            if not line.strip() and out.tell() >= size:
                break
    return target


def measure(text: Path, vocabulary: Path, cache: Path, workers: int) -> None:
    """Builds in a process of its own, since the peak of this one would hide a smaller one after a larger."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=build, args=(text, vocabulary, cache, workers, sender))
    process.start()
    peak = peak_main = 0
    while not receiver.poll(0.02):
        if process.exitcode is not None:
            raise SystemExit(f"the build ended with status {process.exitcode}")
        sizes = [anonymous_bytes(pid) for pid in family(known(process.pid, "the process"))]
        peak, peak_main = max(peak, sum(sizes)), max(peak_main, sizes[0])
    seconds, again, rows = receiver.recv()
    process.join()
    size = text.stat().st_size / 1e6
    print(
        f"{size:4.0f} {workers:7} {seconds:8.1f} {size / seconds:6.2f} {rows:8} {peak / 1e6:8.0f} "
        f"{peak_main / 1e6:6.0f} {again:9.3f} s",
        flush=True,
    )


def build(text: Path, vocabulary: Path, cache: Path, workers: int, sender: Connection) -> None:
    from bert.config import DataConfig
    from bert.data.examples import build_examples
    from bert.tokenizer import load_tokenizer

    # Without this the library spreads over all cores, and one worker would be measured as several.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(vocabulary)
    config = DataConfig(train=str(text), num_workers=workers)
    start = time.perf_counter()
    found = build_examples(config, tokenizer, cache)
    middle = time.perf_counter()
    build_examples(config, tokenizer, cache)
    end = time.perf_counter()
    sender.send((middle - start, end - middle, found.counts["train_rows"] + found.counts["eval_rows"]))


def family(pid: int) -> list[int]:
    """A process and those it started, itself first."""
    found = [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is backed by no file; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
