"""Quality rules against datatrove's filters, which published FineWeb, on 1,000 articles, half of them damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bert.data.corpus.documents import documents, split_sentences
from bert.data.corpus.quality_rules import LINE_ENDS, RULES

pytestmark = pytest.mark.real

ARTICLES, MAX_LINES = 1000, 12
DRAW = random.Random(0)


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest):
    """datatrove's filters of each rule, with words and sentences divided as here."""
    pytest.importorskip("datatrove")
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
        patch.setattr(module, "split_into_words", lambda text, language: text.split())
    patch.setattr(c4_filters, "split_into_sentences", lambda text, language: split_sentences([text], "en"))
    repetition = gopher_repetition_filter.GopherRepetitionFilter()
    return {
        "c4": [c4_filters.C4QualityFilter()],
        "gopher": [gopher_quality_filter.GopherQualityFilter(), repetition],
        "fineweb": [fineweb_quality_filter.FineWebQualityFilter(stop_chars=LINE_ENDS)],
    }


def damaged(lines: list[str]) -> list[str]:
    """The article with one of several faults, or unchanged."""
    kind = DRAW.randrange(8)
    if kind < 4:
        half = max(1, len(lines) // 2)
        return [lines[:1], lines + lines[:half], [line[:25] for line in lines], [f"- {line}" for line in lines]][kind]
    if kind == 4:
        return [line.rstrip('.!?"') + (" ..." if DRAW.random() < 0.4 else "") for line in lines]
    if kind == 5:
        return [" ".join(word if DRAW.random() < 0.7 else "1,234" for word in line.split()) for line in lines]
    return [line + " the same old words again and again in this place" * (3 * (kind == 6)) for line in lines]


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_datatrove(rule: str, shared: Path, published) -> None:
    from datatrove.data import Document

    corpus = documents(str(shared / "data/pretrain/enwiki/train.txt"))
    for number, article in zip(range(ARTICLES), corpus, strict=False):
        lines = damaged(article[:MAX_LINES]) if number % 2 else article[:MAX_LINES]
        document = Document(text="\n".join(lines), id="0")
        is_kept = all(step.filter(document) is True for step in published[rule])
        kept = RULES[rule](lines, "en").document
        assert (kept is not None) == is_kept, lines[:2]
        if kept is not None:
            assert "\n".join(kept).strip() == document.text.strip()
