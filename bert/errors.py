"""The error type for mistakes of the user, and small helpers of its messages."""

from __future__ import annotations

import re
import reprlib
import textwrap
from collections.abc import Iterable
from typing import TypeVar

UTF8_HINT = (
    "convert the file with iconv -f ENCODING -t UTF-8, where ENCODING is its own encoding, such as GB18030, SHIFT_JIS "
    "or WINDOWS-1252"
)
"""How to fix a text that is not UTF-8."""

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks that begin a file in UTF-16."""

UTF32_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
"""Byte order marks that begin a file in UTF-32; one of them also begins with a mark of UTF-16."""


def convert(content: bytes) -> str:
    """The fix for a file that is not UTF-8, by its first bytes."""
    if not content.startswith((*UTF16_MARKS, *UTF32_MARKS)):
        return UTF8_HINT
    encoding = "UTF-32" if content.startswith(UTF32_MARKS) else "UTF-16"
    return f"convert the file, for example with iconv -f {encoding} -t UTF-8"


LISTED_CHARACTERS = 200
"""Maximum length of a list of names in a message, except for a first name that is longer."""

NAME_CHARACTERS = 60
"""Maximum length of one of the names."""

Value = TypeVar("Value")

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change how a terminal shows a text, marks of direction included, and halves of surrogate pairs."""


class UserError(Exception):
    """A mistake the user can fix. Its text is one sentence: what, where, and the fix. Programs exit with 2.

    Control characters and lone surrogates, which come from file names and contents, are escaped: a terminal would obey
    the former, and no UTF-8 stream takes the latter.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(escape_controls(text) if isinstance(text, str) else text for text in arguments))


def escape_controls(text: str) -> str:
    """The text with control characters except line ends and tabs, and lone surrogates, as backslash escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quoted(names: Iterable[object]) -> str:
    """Returns names for a message: each in quotes and cut_at_word if it is long, and how many more there are."""
    return listed(map(repr, names))


def listed(words: Iterable[str]) -> str:
    """Returns words for a message: each cut_at_word if it is long, and how many more there are."""
    shown: list[str] = []
    words = list(words)
    for number, word in enumerate(words):
        word = word if len(word) <= NAME_CHARACTERS else f"{word[: NAME_CHARACTERS - 4]}...{word[-1]}"
        if shown and len(", ".join([*shown, word])) > LISTED_CHARACTERS:
            return f"{', '.join(shown)} and {len(words) - number:,} more"
        shown.append(word)
    return ", ".join(shown)


def cut_at_word(text: str) -> str:
    """Returns a text of another program for a message: on one line, and cut after a word if it is long."""
    return textwrap.shorten(text, LISTED_CHARACTERS, placeholder=" ...")


def without_surrogates(text: str) -> str:
    """The text with ``?`` for each half of a surrogate pair: JSON can spell one, UTF-8 and tokenizers cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shorten(value: object) -> str:
    """A value in an error, on one line of at most about 100 characters."""
    return " ".join(reprlib.repr(value).split())


def require(value: Value | None, name: str) -> Value:
    """Returns `value`; raises ValueError if it is None."""
    if value is None:
        raise ValueError(f"{name} is not known yet")
    return value


def unreadable(path: object, error: OSError) -> UserError:
    """The error for a file that the system cannot read."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} has disappeared: put it back or leave it out")
    return UserError(f"{path} cannot be read ({error.strerror}): fix its permissions or leave it out")


def damaged(path: object, where: str, error: Exception) -> UserError:
    """The error for a file that is not complete; ``where`` is how much of it was read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} is cut short or damaged{where} ({reason}): copy it again")
