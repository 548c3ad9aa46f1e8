"""Token ids as text that reads naturally: WordPiece has lost the spaces, which rules for punctuation bring back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from bert.tokenizer.library import decode
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import is_wordpiece

CLOSING = frozenset(".,!?;:%)]}’”»…、。，！？；：）」』】")
"""Written without a space in front."""
OPENING = frozenset("([{¿¡$£“„‘«（「『【")
"""Written without a space behind."""
JOINING = frozenset("-/_’'@\\")
"""Written without spaces within a word, as in t-shirt."""
CLOSING_QUOTES = frozenset("”“»")
"""Around a part of a compound, as in „Open“-Anzeige."""
QUOTES = frozenset("\"'`")
"""The same at the start and at the end of what they are around."""

ENDINGS = frozenset(("s", "t", "m", "d", "re", "ve", "ll", "em", "n"))
"""What follows an apostrophe within a word, as in don't."""


def detokenize(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of token ids, on one line, without special tokens.

    A byte-level vocabulary gives the text that was written. In WordPiece's, spaces next to punctuation are those of
    English: none before a comma, none within t-shirt and don't.
    """
    special = set(special_ids(tokenizer).all)
    kept = [int(i) for i in ids if int(i) not in special]
    text = decode(tokenizer, kept)
    if not is_wordpiece(tokenizer):
        return " ".join(text.split())
    return join_words(_words(tokenizer, kept))


def lowercases(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary reads, and so writes, every text in lower case."""
    return tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A").strip("▁ ") == "a"


def join_words(words: Sequence[str]) -> str:
    """Words and punctuation marks, as WordPiece splits a text, with spaces between where a text has them."""
    text, quoted, glued = "", dict.fromkeys(QUOTES, False), True
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        after = words[place + 1] if place + 1 < len(words) else ""
        if _joins(before, word, after):
            space, glued_after = False, True
        elif word in QUOTES:
            opens = not quoted[word] and not (word == "'" and before.endswith("s"))  # the boys' hats
            space, glued_after = opens, opens
            quoted[word] = opens
        elif word == "“" and "„" in words[:place]:  # which closes in German
            space, glued_after = False, after in JOINING
        else:
            space, glued_after = word not in CLOSING, word in OPENING or _within_number(before, word, after)
        text += word if glued or not space else f" {word}"
        glued = glued_after
    return text


def _joins(before: str, word: str, after: str) -> bool:
    """Whether a mark is within a word: between two parts of it, as the hyphen of t-shirt."""
    if word not in JOINING or not ((_is_word(before) or before in CLOSING_QUOTES) and _is_word(after)):
        return False
    return word not in "'’" or after in ENDINGS or len(before) == 1


def _is_word(text: str) -> bool:
    return bool(text) and text[-1].isalnum()


def _within_number(before: str, word: str, after: str) -> bool:
    """Whether a mark is between two digits, as in 3.5."""
    return word in ".,:" and before[-1:].isdigit() and after[:1].isdigit()


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The tokens, those of one word put together."""
    words: list[str] = []
    for token in (tokenizer.id_to_token(i) or "" for i in ids):
        if token.startswith("##") and words:
            words[-1] += token[2:]
        else:
            words.append(re.sub(r"^##", "", token))
    return words
