"""Quality rules of published corpora for one document: C4, Gopher (MassiveText) and FineWeb.

The thresholds are the defaults of datatrove 0.10, which published FineWeb. Words are separated by white space, as in
the Gopher rules of Dolma. datatrove also counts punctuation marks as words, and so removes more documents as `gopher`.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert.data.corpus.documents import split_sentences
from bert.data.corpus.files import Document

END_MARKS = (".", "?", "!", '"', "'")
"""Ends of a line that C4 keeps (Raffel et al. 2020, section 2.2)."""

LINE_ENDS = (*END_MARKS, *"。！？｡।॥።؟۔။។…")
"""Ends of a line that count as punctuation for FineWeb, also in other scripts."""

POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""Phrases whose lines C4 removes."""

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
"""English words of which a document needs two (Rae et al. 2021, appendix A.1.1)."""

TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
"""Words of an n-gram and maximum share of the characters in the most common one (Rae et al. 2021, table A1)."""

REPEATED_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
"""Words of an n-gram and maximum share of the characters in repeated ones (Rae et al. 2021, table A1)."""

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


class Outcome(NamedTuple):
    """Result of a filter for one document.

    Attributes:
        document: the document, which may have lost lines; None if it is left out.
        removed: reason and text of each removed line or document.
    """

    document: Document | None
    removed: Sequence[tuple[str, str]] = ()


Rule = Callable[[Document, str], Outcome]
"""(document, language) -> outcome."""


def c4(document: Document, language: str) -> Outcome:
    """Removes lines that are no prose, and documents with fewer than 5 sentences (Raffel et al. 2020, section 2.2)."""
    kept: list[str] = []
    removed: list[tuple[str, str]] = []
    sentences = 0
    for line in map(str.strip, document):
        text, words = _CITATION.sub("", line), line.split()
        lower = text.lower()
        if max(map(len, words), default=0) > 1000:
            removed.append(("line with a word of over 1,000 characters", line))
        elif not text.endswith(END_MARKS) or text.endswith("..."):
            removed.append(("line without an end mark", line))
        elif len(words) < 3:
            removed.append(("line of fewer than 3 words", line))
        elif "lorem ipsum" in lower:
            return keep_unless("lorem ipsum", document)
        elif "javascript" in lower:
            removed.append(("line with javascript", line))
        elif "{" in text:
            return keep_unless("curly bracket", document)
        elif any(phrase in lower for phrase in POLICIES):
            removed.append(("line about cookies or terms of use", line))
        else:
            sentences += len(split_sentences([text], language))
            kept.append(text)
    return Outcome(kept, removed) if sentences >= 5 else keep_unless("fewer than 5 sentences", document)


def gopher(document: Document, language: str) -> Outcome:
    """Leaves out documents that are no prose or repeat themselves (Rae et al. 2021, appendix A.1.1)."""
    text = "\n".join(document)
    words = text.split()
    reason = _unlike_prose(text, words, document, language) or _repetition(text, words, document)
    return keep_unless(reason, document)


def fineweb(document: Document, language: str) -> Outcome:
    """Leaves out lists and repeated lines (Penedo et al. 2024, section 3.6)."""
    lines = [line for line in document if line.strip()]
    words = sum(len(line.split()) for line in lines)
    reason = None
    if sum(line.endswith(LINE_ENDS) for line in lines) < 0.12 * len(lines):
        reason = "under 12% of the lines end with punctuation"
    elif sum(len(line) <= 30 for line in lines) > 0.67 * len(lines):
        reason = "over 67% of the lines have at most 30 characters"
    elif sum(map(len, _repeated(lines))) > 0.01 * sum(map(len, document)):
        reason = "over 1% of the characters in repeated lines"
    elif len(document) - 1 > 0.3 * words:
        reason = "over 0.3 line ends per word"
    return keep_unless(reason, document)


RULES: dict[str, Rule] = {"c4": c4, "gopher": gopher, "fineweb": fineweb}


def keep_unless(reason: str | None, document: Document) -> Outcome:
    """Returns the outcome for a document that is left out if there is a reason."""
    return Outcome(document) if reason is None else Outcome(None, [(reason, "\n".join(document))])


def _unlike_prose(text: str, words: list[str], lines: Document, language: str) -> str | None:
    """Returns the first rule on words, symbols and lines that a document breaks."""
    unusual = [word for word in words if not word.isalpha()]
    symbols = [word for word in unusual if not any(map(str.isalnum, word))]
    count = len(words) - len(symbols)
    if not 50 <= count <= 100_000:
        return f"{'fewer than 50' if count < 50 else 'more than 100,000'} words"
    mean = (sum(map(len, words)) - sum(map(len, symbols))) / count
    if not 3 <= mean <= 10:
        return f"words of {'under 3' if mean < 3 else 'over 10'} characters on average"
    if max(text.count("#"), text.count("...") + text.count("…")) > 0.1 * len(words):
        return "over 0.1 hashes or ellipses per word"
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) > 0.9 * len(lines):
        return "over 90% of the lines start with a bullet"
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
        return "over 30% of the lines end with an ellipsis"
    if sum(not any(map(str.isalpha, word)) for word in unusual) > 0.2 * len(words):
        return "under 80% of the words have a letter"
    if language.split("-")[0] == "en" and len(STOP_WORDS.intersection(words)) < 2:
        return "fewer than 2 stop words"
    return None


def _repetition(text: str, words: list[str], lines: Document) -> str | None:
    """Returns the first rule on repeated lines and n-grams that a document breaks."""
    repeated = list(_repeated(lines))
    if len(repeated) > 0.3 * len(lines):
        return "over 30% of the lines are repeated"
    if sum(map(len, repeated)) > 0.2 * len(text):
        return "over 20% of the characters in repeated lines"
    for size, share in TOP_NGRAMS:
        counts = collections.Counter(_ngrams(words, size))
        ngram, count = counts.most_common(1)[0] if counts else ((), 0)
        if len(" ".join(ngram)) * count > share * len(text):
            return f"over {share:.0%} of the characters in one {size}-gram"
    smallest = min(share for _, share in REPEATED_NGRAMS)
    # The words of a repeated n-gram are also words of repeated 5-grams.
    if sum(len(words[i]) for i in _words_in_repeated_ngrams(words, REPEATED_NGRAMS[0][0])) <= smallest * len(text):
        return None
    for size, share in REPEATED_NGRAMS:
        if _repeated_characters(words, size) > share * len(text):
            return f"over {share:.0%} of the characters in repeated {size}-grams"
    return None


def _ngrams(words: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(size)), strict=False)


def _repeated(items: Iterable[Any]) -> Iterator[Any]:
    """Yields the items that are equal to an earlier one."""
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            yield item
        seen.add(item)


def _words_in_repeated_ngrams(words: list[str], size: int) -> set[int]:
    """Returns the indices of the words in n-grams that are equal to an earlier one."""
    ngrams = list(_ngrams(words, size))
    if len(set(ngrams)) == len(ngrams):
        return set()
    seen: set[tuple[str, ...]] = set()
    covered: set[int] = set()
    for start, ngram in enumerate(ngrams):
        if ngram in seen:
            covered.update(range(start, start + size))
        seen.add(ngram)
    return covered


def _repeated_characters(words: list[str], size: int) -> int:
    """Returns the number of characters in repeated n-grams that do not overlap."""
    seen: set[str] = set()
    start = characters = 0
    while start <= len(words) - size:
        ngram = "".join(words[start : start + size])
        if ngram in seen:
            characters += len(ngram)
            start += size
        else:
            seen.add(ngram)
            start += 1
    return characters
