"""Detects and converts tagging schemes: tags with prefixes such as B-, I- and O that mark spans of words.

`extract_entities` defines entities by the rules of conlleval from the CoNLL shared tasks, like seqeval's default mode:
every tag except O belongs to an entity, even if its prefix is invalid.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

SCHEMES = ("BIO", "IOB1", "BIOES")
"""Supported tagging schemes.

- BIO: B- starts every entity.
- IOB1: I- starts entities; B- starts an entity only right after one of the same type.
- BIOES: E- ends entities, and S- is an entity of one word.
"""

OUTSIDE = "O"

LETTERS = {
    "BIOES": {"B": "B", "I": "I", "E": "E", "S": "S"},
    "BILOU": {"B": "B", "I": "I", "L": "E", "U": "S"},
    "BMES": {"B": "B", "M": "I", "E": "E", "S": "S"},
    "BMEWO": {"B": "B", "M": "I", "E": "E", "W": "S"},
}
"""The letters of each scheme, and the corresponding letters of BIOES. BIO and IOB1 use two of them."""

IO = "IO"
"""The scheme of types without prefixes. Adjacent words of one type are one entity."""


class Span(NamedTuple):
    """An entity, as a range of words."""

    type: str
    start: int
    """Index of the first word."""
    end: int
    """Index after the last word."""


def split_tag(tag: str) -> tuple[str, str]:
    """Returns ("B", "PER") for "B-PER"; the type of "B" and "O" is empty."""
    prefix, _, type = tag.partition("-")
    return prefix, type


def join_tag(prefix: str, type: str) -> str:
    """Returns the tag with a prefix and a type."""
    return f"{prefix}-{type}" if type else prefix


def is_span_tag(tag: str) -> bool:
    """Whether a tag is O, or B, I, E or S with or without a type."""
    prefix, type = split_tag(tag)
    return tag == OUTSIDE or (prefix in ("B", "I", "E", "S") and (type != "" or "-" not in tag))


class Spelling(NamedTuple):
    """The spelling of tags in a file or a model. The canonical spelling is B-PER, I-PER, and so on."""

    scheme: str
    """A key of LETTERS, or IO."""
    separator: str = "-"
    type_first: bool = False
    """Whether tags are spelled PER-B."""
    lowercase: bool = False
    """Whether tags are spelled b-PER."""
    outside: str = OUTSIDE

    def read(self, tag: str) -> str | None:
        """Parses a tag to O, or to B-, I-, E- or S- and a type; None if it has another spelling."""
        if tag == self.outside:
            return OUTSIDE
        if self.scheme == IO:
            return f"I-{tag}"
        prefix, separator, type = tag.rpartition(self.separator) if self.type_first else tag.partition(self.separator)
        prefix, type = (type, prefix) if self.type_first else (prefix, type)
        letter = LETTERS[self.scheme].get(prefix.upper() if self.lowercase else prefix)
        is_sound = separator and type and letter and prefix.islower() == self.lowercase
        return f"{letter}-{type}" if is_sound else None

    def write(self, tag: str) -> str:
        """Formats a BIO or BIOES tag in this spelling."""
        if tag == OUTSIDE:
            return self.outside
        prefix, type = split_tag(tag)
        if self.scheme == IO:
            return type
        prefix = next(letter for letter, canonical in LETTERS[self.scheme].items() if canonical == prefix)
        parts = [prefix.lower() if self.lowercase else prefix, type]
        return self.separator.join(reversed(parts) if self.type_first else parts)


CANONICAL = Spelling("BIOES")


def find_spelling(tags: Collection[str], types: Collection[str] | None = None) -> Spelling | None:
    """Returns the spelling of tags that mark entities; None for other tags and unknown spellings.

    Args:
      tags: all tags that occur.
      types: types that may be tags of the scheme IO; None for no types, empty for all types.
    """
    if all(map(is_span_tag, tags)):
        return CANONICAL
    for lowercase, type_first, separator, scheme in itertools.product((False, True), (False, True), "-_:/", LETTERS):
        outside = OUTSIDE.lower() if lowercase and OUTSIDE not in tags else OUTSIDE
        spelling = Spelling(scheme, separator, type_first, lowercase, outside)
        if all(spelling.read(tag) for tag in tags):
            return spelling
    others = set(tags) - {OUTSIDE}
    if types is None or any(map(is_span_tag, others)):
        return None
    return Spelling(IO, "") if others and (others <= set(types) if types else OUTSIDE in tags) else None


def other_spelling(labels: Collection[str]) -> Spelling | None:
    """Returns the spelling of a published model's labels; None if they are canonical or do not mark entities."""
    spelling = find_spelling(labels)
    return None if spelling == CANONICAL else spelling


def extract_entities(tags: Sequence[str]) -> list[Span]:
    """Returns the entities of a sentence.

    An entity ends before O, B- and S-, after E- and S-, and when the type changes. It starts at any tag except O that
    does not continue an entity.
    """
    spans: list[Span] = []
    start, last, last_type = 0, OUTSIDE, ""
    for index, tag in enumerate((*tags, OUTSIDE)):
        prefix, type = split_tag(tag)
        continues = prefix in ("I", "E") and last in ("B", "I") and type == last_type
        if last != OUTSIDE and not continues:
            spans.append(Span(last_type, start, index))
        if not continues:
            start = index
        last, last_type = prefix, type
    return spans


def tags_from_entities(entities: Iterable[Span], words: int, scheme: str) -> list[str]:
    """Returns the tags of a sentence in one of SCHEMES."""
    tags = [OUTSIDE] * words
    before: Span | None = None
    for entity in entities:
        touches = before is not None and before.end == entity.start and before.type == entity.type
        prefixes = ["I"] * (entity.end - entity.start)
        if scheme == "BIOES":
            prefixes[-1] = "E"
            prefixes[0] = "B" if len(prefixes) > 1 else "S"
        elif scheme == "BIO" or touches:
            prefixes[0] = "B"
        tags[entity.start : entity.end] = [join_tag(prefix, entity.type) for prefix in prefixes]
        before = entity
    return tags


def convert(tags: Sequence[str], scheme: str) -> list[str]:
    """Converts the tags of a sentence from any scheme to one of SCHEMES."""
    return tags_from_entities(extract_entities(tags), len(tags), scheme)


def first_invalid_tag(tags: Sequence[str], scheme: str) -> int | None:
    """Returns the index of the first invalid tag; None if all are valid."""
    last, last_type = OUTSIDE, ""
    for index, tag in enumerate((*tags, OUTSIDE)):
        prefix, type = split_tag(tag)
        same = type == last_type and last != OUTSIDE
        if scheme == "BIOES":
            is_open = last in ("B", "I")
            is_valid = (prefix in ("I", "E") and same) if is_open else prefix in (OUTSIDE, "B", "S")
        elif scheme == "BIO":
            is_valid = prefix in (OUTSIDE, "B") or (prefix == "I" and same)
        else:
            is_valid = prefix in (OUTSIDE, "I") or (prefix == "B" and same)
        if not is_valid:
            return min(index, len(tags) - 1)
        last, last_type = prefix, type
    return None


def detect_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """Returns the scheme with the fewest invalid sentences; BIO if there is a tie."""
    sentences = list(sentences)
    if any(split_tag(tag)[0] in ("E", "S") for tags in sentences for tag in tags):
        return "BIOES"
    faults = {
        scheme: sum(first_invalid_tag(tags, scheme) is not None for tags in sentences) for scheme in ("BIO", "IOB1")
    }
    return min(faults, key=faults.__getitem__)
