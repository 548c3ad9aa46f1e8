"""Filters of documents that repeat another text: exact and near duplicates, and texts of evaluation sets."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert.data.corpus.data_sets import parquet_rows
from bert.data.corpus.files import Document, numbered_lines
from bert.data.corpus.quality_rules import Outcome, keep_unless
from bert.data.tables import file_suffix, open_table
from bert.errors import LOGGER, UserError
from bert.files import load_json
from bert.remote import fetch

SHINGLE = 5
"""Words per run. The similarity of two documents is the share of distinct runs that both have (Jaccard)."""

PERMUTATIONS = 128
"""Hashes per document. The standard deviation of an estimated similarity of 0.8 is 0.04."""

MISSES = 1e-3
"""Maximum share of pairs at the threshold that the index does not find."""

NGRAM = 13
"""Words that a document and an evaluation text may not share (Brown et al. 2020, appendix C)."""

MIN_NGRAM = 8
"""Minimum words of an evaluation text; one of fewer than `NGRAM` words is compared whole (the same appendix)."""

_UNSPACED_SCRIPTS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
_WORD = re.compile(rf"[{_UNSPACED_SCRIPTS}]|[^\W{_UNSPACED_SCRIPTS}]+")
"""A word, or a character of a script without spaces between words."""

UNSPACED = 20
"""Mean characters per word above which a text has no spaces between words. Its characters are then compared."""


def split_words(text: str) -> list[str]:
    """Returns the lower-cased words of a text, or its characters if it has no spaces between words."""
    words = text.lower().split()
    return words if len(text) <= UNSPACED * len(words) else [character for word in words for character in word]


class ExactDuplicates:
    """Recognizes documents with the same text as an earlier one, by a hash of 16 bytes."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, entry: int, document: Document) -> Outcome:
        """Filters one document."""
        digest = hashlib.blake2b("\n".join(document).encode(), digest_size=16).digest()
        is_known = digest in self._seen
        self._seen.add(digest)
        return keep_unless("equal to an earlier document" if is_known else None, document)


class NearDuplicates:
    """Recognizes documents that are similar to an earlier one, by MinHash (Broder 1997) from the library rensa."""

    def __init__(self, threshold: float) -> None:
        """Takes the minimum estimated similarity of a near-duplicate. Raises UserError without rensa."""
        require_package("rensa", "data.near_duplicates")
        from rensa import RMinHashDeduplicator

        # Candidates share a band of the hashes; their estimated similarity is then compared with the threshold.
        rows = next(r for r in (16, 8, 4, 2, 1) if (1 - threshold**r) ** (PERMUTATIONS // r) <= MISSES or r == 1)
        self._documents = RMinHashDeduplicator(threshold, PERMUTATIONS, True, PERMUTATIONS // rows, 0)
        self._count = 0

    def __call__(self, entry: int, document: Document) -> Outcome:
        """Filters one document."""
        from rensa import RMinHash

        hashes = RMinHash(PERMUTATIONS, 0)
        hashes.update(shingles(document))
        self._count += 1
        is_new = self._documents.add(str(self._count), hashes)
        return keep_unless(None if is_new else "similar to an earlier document", document)


def require_package(name: str, key: str) -> None:
    """Raises UserError if a library of the extra ``filters`` is not installed."""
    if importlib.util.find_spec(name) is None:
        fix = "use pip install 'bert-jax[filters]', or remove the key"
        raise UserError(f"{key} needs {name.replace('_', '-')}, which is not installed: {fix}")


def shingles(document: Document) -> list[str]:
    """Returns the lower-cased runs of words; a shorter document is one run."""
    words = split_words(" ".join(document))
    runs = list(map(" ".join, zip(*(words[start:] for start in range(SHINGLE)), strict=False)))
    return runs or [" ".join(words)]


class Contamination:
    """Recognizes documents that share `NGRAM` words in a row with a text of an evaluation set.

    Case and punctuation are ignored. A contaminated document is left out whole.
    """

    def __init__(self, files: list[str] | str) -> None:
        """Reads the evaluation sets. Raises UserError if a file is missing or damaged."""
        self._ngrams: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
        for path in evaluation_files(files):
            has_long = False
            for text in _texts(path):
                words = _ngram_words(text)
                size = min(NGRAM, len(words))
                has_long |= size >= MIN_NGRAM
                for start in range(len(words) - size + 1 if size >= MIN_NGRAM else 0):
                    ngram = tuple(words[start : start + size])
                    self._ngrams.setdefault(ngram[:MIN_NGRAM], {}).setdefault(ngram, path)
            if not has_long:
                LOGGER.warning(
                    f"warning: data.decontaminate: {path} has no text of {MIN_NGRAM} words, and removes nothing"
                )

    def __call__(self, entry: int, document: Document) -> Outcome:
        """Filters one document."""
        words = _ngram_words("\n".join(document))
        runs = zip(*(words[start:] for start in range(MIN_NGRAM)), strict=False)
        for start, run in enumerate(runs):
            for ngram, path in self._ngrams[run].items() if run in self._ngrams else ():
                if tuple(words[start : start + len(ngram)]) == ngram:
                    return keep_unless(f"shares {len(ngram)} words with {path}", document)
        return Outcome(document)


def _ngram_words(text: str) -> list[str]:
    return [part for word in _WORD.findall(text.lower()) for part in (word if len(word) > UNSPACED else (word,))]


def evaluation_files(names: list[str] | str) -> list[str]:
    """Returns the files of ``data.decontaminate``. Raises UserError if a name has none."""
    files: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        found = sorted(path for path in glob.glob(fetch(name, "data.decontaminate")) if Path(path).is_file())
        if not found:
            raise UserError(f"data.decontaminate: no file matches {name}: name files of evaluation sets, or a glob")
        files += found
    return files


def _texts(path: str) -> Iterator[str]:
    """Yields the texts of a file: strings of JSON, cells of tables, columns of Parquet, sentences of .conll files, and
    lines of other files."""
    kind = file_suffix(Path(path))
    if kind in (".csv", ".tsv"):
        for number, cells in open_table(Path(path))[1]:
            if isinstance(cells, str):
                raise UserError(f"{path}, line {number}: {cells}")
            yield from cells
        return
    if kind == ".parquet":
        for _, row in parquet_rows(Path(path)):
            yield from _strings(row)
        return
    lines = (line for _, line in numbered_lines(Path(path)))
    if kind in (".json", ".jsonl"):
        for number, text in enumerate(["\n".join(lines)] if kind == ".json" else lines, start=1):
            try:
                yield from _strings(load_json(text)) if text.strip() else ()
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not JSON ({error}): fix or remove it") from None
    elif kind == ".conll":
        for has_words, rows in itertools.groupby(lines, key=lambda line: bool(line.strip())):
            if has_words:
                yield " ".join(row.split()[0] for row in rows)
    else:
        for line in lines:
            yield from line.split("\t")


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings of nested lists and dictionaries, and lists of strings also joined, which may be words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        yield from (*value, " ".join(value))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
