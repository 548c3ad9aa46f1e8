"""Measures the filters of a corpus: CPU seconds of near-duplicates, documents kept by the rules, and language speed.

    PYTHONPATH=. python benchmarks/filters.py [--parts near_duplicates rules decontaminate language]
        [--corpus FILE] [--evaluation dev.tsv ...]

    near_duplicates  `data.near_duplicates` (rensa) on all documents, and, if it is installed, datasketch with the same
                     words, hashes and threshold, in turns of 100 documents. Candidates of datasketch's index are
                     compared by all hashes, as rensa does
    rules            documents of the first --documents that c4, gopher and fineweb keep, each rule separately
    decontaminate    documents that share 13 words with the files of --evaluation, of all documents
    language         MB per CPU second of the first --texts paragraphs, and the share identified as English

CPU seconds are those of this process. Reading the corpus is not counted. By default, the corpus is English Wikipedia.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bert.data.corpus.documents import documents
from bert.data.corpus.duplicates import PERMUTATIONS, Contamination, NearDuplicates, shingles
from bert.data.corpus.files import Document
from bert.data.corpus.filters import LanguageStep
from bert.data.corpus.quality_rules import RULES

IN_TURN = 100
"""Documents of a turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(__file__).parents[2] / "shared"
    parser.add_argument("--corpus", type=Path, default=shared / "data/pretrain/enwiki/train.txt")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--evaluation", nargs="+", default=[str(shared / "data/squad/dev*.json")])
    parser.add_argument("--texts", type=int, default=3000)
    arguments = parser.parse_args()
    for part in arguments.parts:
        PARTS[part](arguments)


def near_duplicates(arguments: argparse.Namespace) -> None:
    """Prints the CPU seconds of each side, and how many near-duplicates it finds."""
    sides: dict[str, Callable[[Document], bool]] = {"rensa": _rensa(arguments.threshold)}
    try:
        sides["datasketch"] = _datasketch(arguments.threshold)
    except ModuleNotFoundError:
        print("datasketch is not installed")
    seconds, found = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0)
    corpus, size = documents(str(arguments.corpus)), arguments.corpus.stat().st_size / 1e6
    while turn := list(itertools.islice(corpus, IN_TURN)):
        for name, is_duplicate in sides.items():
            start = time.process_time()
            found[name] += sum(map(is_duplicate, turn))
            seconds[name] += time.process_time() - start
    for name in sides:
        ratio = seconds[name] / seconds["rensa"]
        print(f"{name}: {seconds[name]:.1f} CPU seconds for {size:.1f} MB ({ratio:.2f} of rensa), {found[name]} found")


def _rensa(threshold: float) -> Callable[[Document], bool]:
    step = NearDuplicates(threshold)
    return lambda document: step(0, document).document is None


def _datasketch(threshold: float) -> Callable[[Document], bool]:
    from datasketch import MinHash, MinHashLSH

    # The index has a maximum threshold of 0.9. The weights favour few misses, because candidates are compared.
    index = MinHashLSH(threshold=min(threshold, 0.9), num_perm=PERMUTATIONS, weights=(0.1, 0.9))
    empty = MinHash(num_perm=PERMUTATIONS)
    known: list[np.ndarray] = []

    def is_duplicate(document: Document) -> bool:
        hashes = empty.copy()
        hashes.update_batch({run.encode() for run in shingles(document)})
        values = hashes.hashvalues.astype(np.uint32)
        if any(np.mean(known[candidate] == values) >= threshold for candidate in index.query(hashes)):
            return True
        index.insert(len(known), hashes)
        known.append(values)
        return False

    return is_duplicate


def rules(arguments: argparse.Namespace) -> None:
    """Prints how many of the first documents each rule keeps."""
    corpus = list(itertools.islice(documents(str(arguments.corpus)), arguments.documents))
    for name, rule in RULES.items():
        start = time.process_time()
        kept = sum(rule(document, "en").document is not None for document in corpus)
        seconds = time.process_time() - start
        print(f"{name}: {kept} of {len(corpus)} documents are kept, {_speed(corpus, seconds)}")


def decontaminate(arguments: argparse.Namespace) -> None:
    """Prints how many documents share words with the evaluation sets."""
    step = Contamination(arguments.evaluation)
    corpus = list(documents(str(arguments.corpus)))
    start = time.process_time()
    left_out = sum(step(0, document).document is None for document in corpus)
    seconds = time.process_time() - start
    names = ", ".join(arguments.evaluation)
    print(f"decontaminate {names}: {left_out} of {len(corpus)} documents are left out, {_speed(corpus, seconds)}")


def language(arguments: argparse.Namespace) -> None:
    """Prints how many paragraphs are identified as English."""
    step = LanguageStep(["en"])
    paragraphs = itertools.chain.from_iterable(documents(str(arguments.corpus)))
    texts = [[text] for text in itertools.islice(paragraphs, arguments.texts)]
    step(0, ["Loads the model before the clock starts."])
    start = time.process_time()
    kept = sum(step(0, text).document is not None for text in texts)
    seconds = time.process_time() - start
    print(f"language: {kept} of {len(texts)} paragraphs are English, {_speed(texts, seconds)}")


def _speed(corpus: list[Document], seconds: float) -> str:
    size = sum(len(line.encode()) for document in corpus for line in document) / 1e6
    return f"{size / seconds:.2f} MB per CPU second"


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "near_duplicates": near_duplicates,
    "rules": rules,
    "decontaminate": decontaminate,
    "language": language,
}


if __name__ == "__main__":
    main()
