"""Writes pairs of neighbouring passages of a corpus, as queries and positives for the recipe `embedding`.

    python benchmarks/neighbours.py CORPUS.txt OUTPUT

CORPUS.txt has an empty line between documents and a paragraph per line. A passage is at most 45 words of a paragraph.
OUTPUT gets dev.jsonl with 1,000 pairs, and train.jsonl with the others.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_WORDS, MIN_WORDS, NUM_DEV = 45, 12, 1_000


def main() -> None:
    """Writes the pairs in a random order with a fixed seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    pairs: list[tuple[str, str]] = []
    for document in given.corpus.read_text(encoding="utf-8").split("\n\n"):
        found = passages(document)
        pairs += zip(found[::2], found[1::2], strict=False)
    random.Random(0).shuffle(pairs)
    given.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("dev", pairs[:NUM_DEV]), ("train", pairs[NUM_DEV:])):
        lines = [json.dumps({"query": first, "positive": second}) + "\n" for first, second in rows]
        (given.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def passages(document: str) -> list[str]:
    """Returns the passages of a document that have enough words."""
    paragraphs = [paragraph.split() for paragraph in document.splitlines()]
    parts = [words[start : start + NUM_WORDS] for words in paragraphs for start in range(0, len(words), NUM_WORDS)]
    return [" ".join(part) for part in parts if len(part) >= MIN_WORDS]


if __name__ == "__main__":
    main()
