"""Compares speed and memory of building examples from English Wikipedia with other tools on the same text.

    PYTHONPATH=. python benchmarks/examples.py [--megabytes 60 240] [--rounds 3] [--sides raw ours ray run_mlm google]

    raw      only encode_batch_fast of tokenizers over the paragraphs: the upper bound
    ours     bert.data.pretraining.build: sentences, pieces, pairs, rows on disk
    ray      the same with --engine ray, on the cluster in RAY_ADDRESS or a new one; only if named. Memory and
             CPU seconds are measured only in the process that starts the tasks
    run_mlm  like transformers' run_mlm.py: datasets.map over batches of lines, twice (tokenize; join and cut to T)
    google   the algorithm of google-research/bert's create_pretraining_data.py: one process, in memory, with masks. Its
             sentences are split beforehand and its pieces made by `tokenizers`, both in its favour

Uses BERT's uncased vocabulary and T = 128. Sides run in turns, each in a separate process. Imports are not counted. If
the corpus is larger than the file, the file is repeated. Memory is the anonymous part of the resident set (RssAnon) of
the process and its children, sampled every 20 ms, because mapped pages belong to the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.data.worker_processes import Engine
from bert.errors import require

LENGTH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[60, 240])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["raw", "ours", "run_mlm", "google"])
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    arguments = parser.parse_args()
    corpus = arguments.shared / "data/pretrain/enwiki/train.txt"
    vocabulary = arguments.shared / "data/vocab/bert-base-uncased"
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in arguments.megabytes:
            text = head(corpus, megabytes * 1_000_000, Path(folder, f"{megabytes}.txt"))
            cases = [
                (side, workers)
                for side, workers in itertools.product(arguments.sides, arguments.workers)
                if side != "google" or workers == 1
            ]
            seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
            cpu_seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
            last: dict[tuple[str, int], Measured] = {}
            for _, case in itertools.product(range(arguments.rounds), cases):
                last[case] = measure(text, vocabulary, Path(folder, "work"), *case)
                seconds[case].append(last[case].seconds)
                cpu_seconds[case].append(last[case].cpu_seconds)
            print(f"{megabytes} MB, medians of {arguments.rounds}")
            print("side     workers  seconds   MB/s  M tokens/s  of raw  CPU seconds  of raw  peak MB  main MB")
            for (side, workers), measured in last.items():
                median = statistics.median(seconds[side, workers])
                cpu_median = statistics.median(cpu_seconds[side, workers])
                raw = statistics.median(seconds.get(("raw", workers), [float("nan")]))
                cpu_raw = statistics.median(cpu_seconds.get(("raw", workers), [float("nan")]))
                print(
                    f"{side:8} {workers:7} {median:8.1f} {text.stat().st_size / 1e6 / median:6.2f} "
                    f"{measured.tokens / 1e6 / median:11.2f} {raw / median:7.2f} {cpu_median:12.1f} "
                    f"{cpu_raw / cpu_median:7.2f} {measured.peak / 1e6:8.0f} "
                    f"{measured.peak_main / 1e6:8.0f}",
                    flush=True,
                )


def head(corpus: Path, size: int, target: Path) -> Path:
    """Writes the first documents of a corpus, about ``size`` bytes, and repeats them if the corpus is smaller."""
    with open(target, "wb") as out:
        while out.tell() < size:
            with open(corpus, "rb") as source:
                for line in source:
                    out.write(line)
                    if not line.strip() and out.tell() >= size:
                        break
            out.write(b"\n\n")
    return target


class Measured(NamedTuple):
    """Results of one build: seconds, CPU seconds of all processes, tokens, and peak bytes of all and of the first."""

    seconds: float
    cpu_seconds: float
    tokens: int
    peak: float
    peak_main: float


def measure(text: Path, vocabulary: Path, folder: Path, side: str, workers: int) -> Measured:
    """Runs one build in a separate process, because an earlier peak would hide a smaller one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        process = context.Process(target=run, args=(side, text, vocabulary, Path(work), workers, sender))
        process.start()
        peak = peak_main = 0.0
        while not receiver.poll(0.02):
            if process.exitcode is not None:
                raise SystemExit(f"{side} ended with status {process.exitcode}")
            sizes = [anonymous_bytes(pid) for pid in family(require(process.pid, "the process"))]
            peak, peak_main = max(peak, sum(sizes)), max(peak_main, sizes[0])
        seconds, cpu_seconds, tokens = receiver.recv()
        process.join()
    return Measured(seconds, cpu_seconds, tokens, peak, peak_main)


def run(side: str, text: Path, vocabulary: Path, work: Path, workers: int, sender: Connection) -> None:
    threads = workers if side == "raw" else 1  # otherwise the library uses all cores
    os.environ |= {"TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "RAYON_NUM_THREADS": str(threads)}
    os.environ |= {"HF_HOME": str(work), "HF_DATASETS_OFFLINE": "1"}
    job = SIDES[side](text, vocabulary, work, workers)
    start, cpu_start = time.perf_counter(), os.times()
    tokens = job()
    cpu = sum(os.times()[:4]) - sum(cpu_start[:4])
    sender.send((time.perf_counter() - start, cpu, tokens))


Job = Callable[[], int]
"""The timed function. Returns the number of tokens."""


def raw(text: Path, vocabulary: Path, work: Path, workers: int) -> Job:
    from bert.tokenizer.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(vocabulary)

    def job() -> int:
        tokens = 0
        with open(text, encoding="utf-8") as lines:
            for batch in batches(filter(None, map(str.strip, lines)), 1000):
                tokens += sum(map(len, tokenizer.encode_batch_fast(batch, add_special_tokens=False)))
        return tokens

    return job


def ours(text: Path, vocabulary: Path, work: Path, workers: int, engine: Engine = "local") -> Job:
    import datasets.arrow_writer  # noqa: F401  imported here so that it is not timed

    from bert.config import DataConfig
    from bert.data.pretraining.build import build_examples
    from bert.tokenizer.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(vocabulary)

    def job() -> int:
        config = DataConfig(train=str(text), num_workers=workers, sequence_length=LENGTH)
        found = build_examples(config, tokenizer, work / "cache", engine=engine)
        return found.counts["train_tokens"] + found.counts["eval_tokens"]

    return job


def on_ray(text: Path, vocabulary: Path, work: Path, workers: int) -> Job:
    import ray

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    size = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="warning", **size)
    return ours(text, vocabulary, work, workers, "ray")


def run_mlm(text: Path, vocabulary: Path, work: Path, workers: int) -> Job:
    import datasets
    from transformers import BertTokenizer

    datasets.disable_progress_bars()
    tokenizer = BertTokenizer.from_pretrained(vocabulary)

    def tokenized(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], return_special_tokens_mask=True)

    def joined(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = {name: list(itertools.chain.from_iterable(lists)) for name, lists in rows.items()}
        whole = len(flat["input_ids"]) // LENGTH * LENGTH
        return {name: [ids[i : i + LENGTH] for i in range(0, whole, LENGTH)] for name, ids in flat.items()}

    def job() -> int:
        lines = datasets.load_dataset("text", data_files=str(text), split="train", cache_dir=str(work))
        processes = workers if workers > 1 else None
        pieces = lines.map(tokenized, batched=True, num_proc=processes, remove_columns=["text"])
        return LENGTH * len(pieces.map(joined, batched=True, num_proc=processes))

    return job


def google(text: Path, vocabulary: Path, work: Path, workers: int) -> Job:
    from bert.data.corpus.documents import documents, split_sentences
    from bert.tokenizer.library import special_ids
    from bert.tokenizer.vocabulary import load_tokenizer

    tokenizer = load_tokenizer(vocabulary)
    corpus = [split_sentences(paragraphs, "en") for paragraphs in documents(str(text))]
    special = special_ids(tokenizer)
    cls, sep, mask = special.cls, special.sep, special.mask
    size = tokenizer.get_vocab_size()

    def job() -> int:
        draw = random.Random(0)
        pieces = [
            [list(encoding.ids) for encoding in tokenizer.encode_batch_fast(document, add_special_tokens=False)]
            for document in corpus
        ]
        pieces = [sentences for sentences in ([s for s in document if s] for document in pieces) if sentences]
        draw.shuffle(pieces)
        rows = [
            masked([cls, *a, sep, *b, sep], {cls, sep}, mask, size, draw)
            for number in range(len(pieces))
            for a, b in google_pairs(pieces, number, draw)
        ]
        draw.shuffle(rows)
        table = np.zeros((len(rows), LENGTH), np.int32)
        for row, (ids, _, _) in zip(table, rows, strict=True):
            row[: len(ids)] = ids
        return sum(len(sentence) for document in pieces for sentence in document)

    return job


def google_pairs(
    documents: list[list[list[int]]], number: int, draw: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields two segments per row. In half of the rows, the second one is from another document."""
    document, room, at = documents[number], LENGTH - 3, 0
    target = draw.randint(2, room) if draw.random() < 0.1 else room
    while at < len(document):
        end, held = at, 0
        while end < len(document) and held < target:
            held += len(document[end])
            end += 1
        middle = draw.randint(at + 1, end - 1) if end - at > 1 else end
        a = list(itertools.chain.from_iterable(document[at:middle]))
        if end - at == 1 or draw.random() < 0.5:
            other = number
            while other == number:
                other = draw.randrange(len(documents))
            b: list[int] = []
            for sentence in documents[other][draw.randrange(len(documents[other])) :]:
                b += sentence
                if len(a) + len(b) >= target:
                    break
            end = middle
        else:
            b = list(itertools.chain.from_iterable(document[middle:end]))
        while len(a) + len(b) > room:
            longer = a if len(a) > len(b) else b
            del longer[0 if draw.random() < 0.5 else -1]
        yield a, b
        at = end


def masked(
    ids: list[int], special: set[int], mask: int, size: int, draw: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Masks 15% of the tokens by 80/10/10. Returns ids, positions and original tokens."""
    places = [place for place, piece in enumerate(ids) if piece not in special]
    draw.shuffle(places)
    places = sorted(places[: min(20, max(1, round(0.15 * len(ids))))])
    originals = [ids[place] for place in places]
    for place in places:
        if draw.random() < 0.8:
            ids[place] = mask
        elif draw.random() < 0.5:
            ids[place] = draw.randrange(size)
    return ids, places, originals


SIDES = {"raw": raw, "ours": ours, "ray": on_ray, "run_mlm": run_mlm, "google": google}


def batches(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := list(itertools.islice(lines, size)):
        yield batch


def family(pid: int) -> list[int]:
    """Returns the ids of a process and its descendants, itself first."""
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
    """Returns a process's memory that is not backed by files; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
