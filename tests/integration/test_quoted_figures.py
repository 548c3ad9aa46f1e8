"""Every measured figure in the README, the guides and the recipes' headers is the one in benchmarks/RESULTS.md.

A sentence (in a table, a row) that links a section of RESULTS.md holds only numbers of that section. A sentence with a
figure and a word such as "perplexity" or "seconds" has such a link, cites the figure's source, or calls it an estimate.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))

LINK = re.compile(r"RESULTS\.md#([\w-]+)")
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
"""A number that is no part of a name such as F1, SST-2 or 4m27s."""

MEASURABLE = re.compile(
    r"\b(measured|perplexity|accurac(y|ies)|F1|Matthews|Pearson|Spearman|exact match|loss of|(a|per) second"
    r"|\d+ (seconds?|minutes?|ms|[MG]i?B|times (as|the)|of the time))\b",
    re.IGNORECASE,
)
PUBLISHED = re.compile(
    r"et al\. \d{4}|Geiping and Goldstein|arXiv|\d{4}\.\d{5}|google-research/bert|model card of|mosaicml/examples"
    r"|MosaicBERT"
)
NOT_MEASURED = re.compile(r"\b(estimated?|arithmetic|counted|chance is|are enough|at most)\b", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """The sentences of prose and lists and the rows of tables; no code, no block marked as published or estimated."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    parts = []
    for block in re.split(r"\n\s*\n", text):
        mark = re.search(r"<!-- (estimated|published): ?(.*?) -->", block)
        if mark and (mark[1] == "estimated" or PUBLISHED.search(mark[2])):
            continue
        for part in re.split(r"\n(?=[-|#<]|\d+\. |\w+: |Measured|bert )", block):
            parts += [part] if part.startswith("|") else re.split(r"(?<=[.:;])\s+(?=[A-Z*\[(])", " ".join(part.split()))
    return parts


def read(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        text = "\n".join(re.findall(r"^ *# ?(.*)$", text, re.MULTILINE))
    return sentences(text)


def sections(text: str) -> dict[str, str]:
    """The text below each heading up to the next one of its level, by the heading's anchor."""
    text_by_anchor, headings = {}, list(re.finditer(r"^(#+) (.+)$", text, re.MULTILINE))
    for number, heading in enumerate(headings):
        ends = [later.start() for later in headings[number + 1 :] if len(later[1]) <= len(heading[1])]
        anchor = re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-")
        text_by_anchor[anchor] = text[heading.start() : ends[0] if ends else len(text)]
    return text_by_anchor


def numbers(text: str) -> set[Decimal]:
    return {Decimal(number.replace(",", "")) for number in NUMBER.findall(text)}


def missing(sentence: str, results: dict[str, str]) -> set[Decimal]:
    """The numbers of a sentence that its sections lack; a score may be in per cent."""
    there = set().union(*(numbers(results[anchor]) for anchor in LINK.findall(sentence)))
    there |= {100 * number for number in there if number < 1}
    return numbers(re.sub(r"\]\([^)]*\)|\S*RESULTS\.md\S*", "", sentence)) - there


def is_unsourced(sentence: str) -> bool:
    """Whether a sentence has a figure of which it does not say where it is from."""
    told = any(pattern.search(sentence) for pattern in (LINK, PUBLISHED, NOT_MEASURED))
    return bool(numbers(sentence)) and bool(MEASURABLE.search(sentence)) and not told


@pytest.mark.parametrize("file", [*PAGES, *RECIPES], ids=lambda file: file.name)
def test_figures_are_those_of_the_results(file: Path) -> None:
    results = sections(RESULTS.read_text(encoding="utf-8"))
    for sentence in read(file):
        assert set(LINK.findall(sentence)) <= results.keys(), sentence
        assert not is_unsourced(sentence), f"link a section of benchmarks/RESULTS.md, or cite: {sentence}"
        if LINK.search(sentence):
            assert not missing(sentence, results), f"not in the section: {missing(sentence, results)}: {sentence}"


def test_enough_sentences_are_compared() -> None:
    linked = [sentence for file in (*PAGES, *RECIPES) for sentence in read(file) if LINK.search(sentence)]
    assert len([sentence for sentence in linked if numbers(sentence)]) > 25


def test_a_changed_figure_is_found() -> None:
    results = {"a-run": "accuracy 0.278 ± 0.021 after 1,200 steps of the SST-2 rows in 14 minutes"}
    good = "It took 14 minutes for 1200 steps, Matthews 27.8 ± 2.1 ([measured](../benchmarks/RESULTS.md#a-run))."
    assert not missing(good, results)
    assert missing(good.replace("27.8", "27.9"), results) == {Decimal("27.9")}
    assert missing(good.replace("14 minutes", "2 minutes"), results) == {Decimal(2)}
    assert not is_unsourced(good)
    assert [is_unsourced(text) for text in sentences("Fast. It took 14 minutes.")] == [False, True]
    assert is_unsourced(sentences("<!-- published: somewhere -->\n| F1 | 12.5 |")[-1])
    assert not any(map(is_unsourced, sentences("<!-- published: Devlin et al. 2019, table 4 -->\n| F1 | 12.5 |")))
