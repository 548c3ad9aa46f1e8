"""Quality rules: each is broken by one hand-made document, and prose passes all of them."""

from __future__ import annotations

import pytest

from bert.data.corpus.quality_rules import RULES
from tests.helpers import PROSE

WORDS = [f"{start}{end}" for start in ("alpha", "bravo", "delta", "mikes") for end in ("moor", "leaf", "side", "way")]


def unlike(count: int) -> list[str]:
    """Different words with two stop words."""
    return ["the", "of", *(f"{a[0]}{a[5:7]}{b[0]}{b[5:7]}" for a in WORDS for b in WORDS)][:count]


BROKEN = {
    "c4": [
        (PROSE[:2], "fewer than 5 sentences"),
        ([*PROSE, "A curly { bracket in a line."], "curly bracket"),
        ([*PROSE, "There is Lorem Ipsum in it."], "lorem ipsum"),
    ],
    "gopher": [
        ([" ".join(unlike(40))], "fewer than 50 words"),
        ([" ".join(["to", "of", *"abcdefghij"] * 5)], "words of under 3 characters on average"),
        ([" ".join(f"{word}{'x' * 8}" for word in unlike(80))], "words of over 10 characters on average"),
        ([" ".join(f"{word} a#{word}" for word in unlike(60))], "over 0.1 hashes or ellipses per word"),
        ([f"- {line}" for line in PROSE], "over 90% of the lines start with a bullet"),
        ([f"{line[:-1]}..." for line in PROSE], "over 30% of the lines end with an ellipsis"),
        ([" ".join(f"{word} {len(word) + 100}" for word in unlike(60))], "under 80% of the words have a letter"),
        ([" ".join(unlike(90)[2:])], "fewer than 2 stop words"),
        ([*PROSE, *PROSE], "over 30% of the lines are repeated"),
        ([*(f"{word} of the {a}." for a in WORDS for word in unlike(3)[2:]), *PROSE, PROSE[0] * 3, PROSE[0] * 3],
         "over 20% of the characters in repeated lines"),
        ([" ".join(f"{word} of the" for word in unlike(60))], "over 20% of the characters in one 2-gram"),
        ([" ".join([*unlike(200), *unlike(52)[2:]])], "over 15% of the characters in repeated 5-grams"),
    ],
    "fineweb": [
        ([line[:-1] for line in PROSE], "under 12% of the lines end with punctuation"),
        ([*PROSE, *(f"Line {number}." for number in range(15))], "over 67% of the lines have at most 30 characters"),
        ([*PROSE, PROSE[0]], "over 1% of the characters in repeated lines"),
        ([f"{word * 8} {word * 3}." for word in WORDS], "over 0.3 line ends per word"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("rule", "document", "reason"), [(r, *case) for r, cases in BROKEN.items() for case in cases])
def test_a_document_breaks_one_rule(rule: str, document: list[str], reason: str) -> None:
    outcome = RULES[rule](document, "en")
    assert (outcome.document, outcome.removed) == (None, [(reason, "\n".join(document))])


@pytest.mark.parametrize("rule", RULES)
def test_prose_passes_unchanged(rule: str) -> None:
    document, removed = RULES[rule](PROSE, "en")
    assert (document, list(removed)) == (PROSE, [])


def test_c4_removes_lines_and_citations() -> None:
    lines = {
        "A heading without an end": "line without an end mark",
        "It goes on and on...": "line without an end mark",
        "Two words.": "line of fewer than 3 words",
        "Please enable JavaScript to go on.": "line with javascript",
        "This site uses cookies for you.": "line about cookies or terms of use",
        f"A word {'w' * 1001} is too long.": "line with a word of over 1,000 characters",
    }
    cited = PROSE[0].replace("loved", "loved[12][citation needed]")
    document, removed = RULES["c4"]([cited, *lines, *PROSE[1:]], "en")
    assert document == PROSE
    assert list(removed) == [(reason, line) for line, reason in lines.items()]


def test_stop_words_are_english_only() -> None:
    document = [" ".join(unlike(90)[2:])]
    assert RULES["gopher"](document, "de").document == document
