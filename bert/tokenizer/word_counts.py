"""Splits texts into words and counts them, for the training of vocabularies.

Counts of the parts of a corpus add up, so parts may be counted on any machine and in any order.
"""

from __future__ import annotations

import collections
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bert.config import TokenizerConfig
from bert.config.model import StripAccents
from bert.errors import without_surrogates

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

EUROPEAN_MARKS = (
    "[\u0300-\u0337\u0339-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u2de0-\u2dff\ua66f\ua674-\ua67d\ua69e\ua69f"
    "\ufe20-\ufe2f]"
)
"""The combining marks of Latin, Greek and Cyrillic letters, without the stroke of symbols such as \u2260."""

OTHER_MARKS_SHARE = 1e-3
"""Share of the characters above which the marks of other scripts are kept.

Below it BERT's steps are used, so that the vocabulary of an English corpus with a few foreign names works in every tool
for BERT.
"""

_EUROPEAN_SCRIPTS = ("LATIN", "GREEK", "CYRILLIC")
_SHARED_MARKS = ("COMBINING", "VARIATION SELECTOR")
_WORDS_A_LINE = 1000


class WordSteps(NamedTuple):
    """The first two steps of a tokenizer, which split a text into words."""

    normalizer: Normalizer | None
    pre_tokenizer: PreTokenizer


def normalize_counts(characters: Mapping[str, int], normalizer: Normalizer) -> dict[str, int]:
    """Returns the counts of normalized characters, without white space."""
    counts: dict[str, int] = {}
    for character, count in characters.items():
        for part in normalizer.normalize_str(character):
            if not part.isspace():
                counts[part] = counts.get(part, 0) + count
    return counts


def resolve_strip_accents(config: TokenizerConfig, characters: Mapping[str, int]) -> StripAccents:
    """Returns which marks the vocabulary of a corpus removes; None (BERT's steps) if they lose almost nothing of it.

    Args:
        config: its ``strip_accents`` is returned unless it is "european".
        characters: counts of the characters of the corpus.
    """
    if config.strip_accents != "european":
        return config.strip_accents
    lost = sum(count for character, count in characters.items() if _loses_other_marks(character))
    total = sum(characters.values())
    return "european" if config.lowercase and lost > OTHER_MARKS_SHARE * total else None


def _loses_other_marks(character: str) -> bool:
    """Returns whether removing all marks changes a letter or mark of another script, such as a Korean syllable."""
    if character.isascii() or unicodedata.category(character)[0] not in "LM":
        return False
    kept = "".join(c for c in unicodedata.normalize("NFD", character) if unicodedata.category(c)[0] != "M")
    return kept != character and not unicodedata.name(character, "").startswith((*_EUROPEAN_SCRIPTS, *_SHARED_MARKS))


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of texts and their counts."""

    words: collections.Counter[str] = field(default_factory=collections.Counter)

    def characters(self) -> dict[str, int]:
        """Returns the counts of the characters."""
        counts: dict[str, int] = {}
        for word, count in self.words.items():
            for character in word:
                counts[character] = counts.get(character, 0) + count
        return counts

    def lines(self) -> Iterator[str]:
        """Yields the lines of a text with these counts: each word as often as it occurs."""
        for word, count in sorted(self.words.items()):
            for start in range(0, count, _WORDS_A_LINE):
                yield " ".join([word] * min(_WORDS_A_LINE, count - start))

    @staticmethod
    def steps() -> WordSteps:
        """Returns the steps that split `lines` into the same words."""
        from tokenizers import pre_tokenizers

        return WordSteps(None, pre_tokenizers.WhitespaceSplit())


def count_words(texts: Iterable[str], steps: WordSteps) -> WordCounts:
    """Counts the words of texts.

    Args:
        texts: lines or paragraphs.
        steps: steps of the vocabulary. Words must not continue after a space.
    """
    stretches: collections.Counter[str] = collections.Counter()
    for text in map(without_surrogates, texts):
        words = text.split()
        if " ".join(words) == text:  # with the space before each word, which is part of byte-level words
            stretches.update(words[:1])
            stretches.update(f" {word}" for word in words[1:])
        else:
            stretches[text] += 1
    counts = WordCounts()
    for stretch, count in stretches.items():  # far fewer than words
        clean = steps.normalizer.normalize_str(stretch) if steps.normalizer else stretch
        for word, _ in steps.pre_tokenizer.pre_tokenize_str(clean):
            counts.words[word] += count
    return counts


def blocks(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Yields the texts, one per line, in blocks of about ``characters`` characters."""
    lines: list[str] = []
    size = 0
    for text in texts:
        lines.append(without_surrogates(text) + "\n")
        size += len(text)
        if size >= characters:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)
