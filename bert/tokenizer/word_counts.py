"""How often each word of a text occurs, which is all that training a vocabulary needs to know of it.

The counts of parts of a corpus add up to those of the whole, so parts may be counted anywhere and in any order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bert.errors import without_surrogates

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_WORDS_A_LINE = 1000


class WordSteps(NamedTuple):
    """The first two steps of a tokenizer, which make words of a text."""

    normalizer: Normalizer | None
    pre_tokenizer: PreTokenizer


@dataclass(frozen=True)
class WordCounts:
    """Each different word of some texts, and how often it occurs."""

    words: collections.Counter[str] = field(default_factory=collections.Counter)

    def characters(self) -> dict[str, int]:
        """How often each character occurs."""
        counts: dict[str, int] = {}
        for word, count in self.words.items():
            for character in word:
                counts[character] = counts.get(character, 0) + count
        return counts

    def lines(self) -> Iterator[str]:
        """Lines with each word as often as it occurs, between spaces: a text with these counts."""
        for word, count in sorted(self.words.items()):
            for start in range(0, count, _WORDS_A_LINE):
                yield " ".join([word] * min(_WORDS_A_LINE, count - start))

    @staticmethod
    def steps() -> WordSteps:
        """The steps that make words of `lines` again."""
        from tokenizers import pre_tokenizers

        return WordSteps(None, pre_tokenizers.WhitespaceSplit())


def count_words(texts: Iterable[str], steps: WordSteps) -> WordCounts:
    """Counts the words of texts.

    Args:
        texts: lines or paragraphs.
        steps: those of the vocabulary. No word of theirs continues after a space.
    """
    stretches: collections.Counter[str] = collections.Counter()
    for text in map(without_surrogates, texts):
        words = text.split()
        if " ".join(words) == text:  # each with the space before it, as byte-level words have it
            stretches.update(words[:1])
            stretches.update(f" {word}" for word in words[1:])
        else:
            stretches[text] += 1
    counts = WordCounts()
    for stretch, count in stretches.items():  # many times fewer than the words
        clean = steps.normalizer.normalize_str(stretch) if steps.normalizer else stretch
        for word, _ in steps.pre_tokenizer.pre_tokenize_str(clean):
            counts.words[word] += count
    return counts


def blocks(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The texts, one a line, in blocks of about so many characters."""
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
