"""Quality rules against datatrove's filters, which published FineWeb, on 1,000 articles, half of them damaged.

With words and sentences divided as here, all verdicts are equal. datatrove's own words are spaCy's tokens. They include
punctuation marks, so that more documents fall below Gopher's 80% of words with a letter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bert.data.corpus.documents import documents, split_sentences
from bert.data.corpus.quality_rules import LINE_ENDS, RULES

pytestmark = pytest.mark.real

ARTICLES, MAX_LINES = 1000, 12

EQUAL_VERDICTS = {"c4": 997, "gopher": 910, "fineweb": 997}
"""Minimum number of articles with the verdict of datatrove's defaults. Measured: 1,000, 919 and 1,000."""


@pytest.fixture
def split_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces datatrove's words and sentences."""
    pytest.importorskip("datatrove")
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: text.split())
    monkeypatch.setattr(c4_filters, "split_into_sentences", lambda text, language: split_sentences([text], "en"))


def datatrove_filters(rule: str, **fineweb: Any) -> list[Any]:
    """datatrove's filters of a rule, with their defaults except for arguments of FineWeb's."""
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    if rule == "gopher":
        return [GopherQualityFilter(), GopherRepetitionFilter()]
    return [C4QualityFilter() if rule == "c4" else FineWebQualityFilter(**fineweb)]


def articles(shared: Path) -> Iterator[list[str]]:
    """The first lines of articles; every second one is damaged."""
    draw = random.Random(0)
    corpus = documents(str(shared / "data/pretrain/enwiki/train.txt"))
    for number, article in zip(range(ARTICLES), corpus, strict=False):
        yield damaged(article[:MAX_LINES], draw) if number % 2 else article[:MAX_LINES]


def damaged(lines: list[str], draw: random.Random) -> list[str]:
    """The article with one of several faults, or unchanged."""
    kind = draw.randrange(8)
    if kind < 4:
        half = max(1, len(lines) // 2)
        return [lines[:1], lines + lines[:half], [line[:25] for line in lines], [f"- {line}" for line in lines]][kind]
    if kind == 4:
        return [line.rstrip('.!?"') + (" ..." if draw.random() < 0.4 else "") for line in lines]
    if kind == 5:
        return [" ".join(word if draw.random() < 0.7 else "1,234" for word in line.split()) for line in lines]
    return [line + " the same old words again and again in this place" * (3 * (kind == 6)) for line in lines]


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_datatrove(rule: str, shared: Path, split_as_here: None) -> None:
    from datatrove.data import Document

    steps = datatrove_filters(rule, stop_chars=LINE_ENDS)
    for lines in articles(shared):
        document = Document(text="\n".join(lines), id="0")
        is_kept = all(step.filter(document) is True for step in steps)
        kept = RULES[rule](lines, "en").document
        assert (kept is not None) == is_kept, lines[:2]
        if kept is not None:
            assert "\n".join(kept).strip() == document.text.strip()


@pytest.mark.parametrize("rule", RULES)
def test_few_verdicts_differ_from_those_of_datatrove_with_its_own_words(rule: str, shared: Path) -> None:
    pytest.importorskip("datatrove")
    pytest.importorskip("spacy", reason="datatrove's words are those of spaCy: pip install spacy")
    from datatrove.data import Document

    steps = datatrove_filters(rule)
    equal = 0
    for lines in articles(shared):
        document = Document(text="\n".join(lines), id="0")
        is_kept = all(step.filter(document) is True for step in steps)
        equal += (RULES[rule](lines, "en").document is not None) == is_kept
    assert equal >= EQUAL_VERDICTS[rule]
