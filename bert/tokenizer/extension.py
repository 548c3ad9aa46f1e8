"""Extends a published vocabulary by the most useful new words of a corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert.errors import UserError, require
from bert.tokenizer.library import library_errors, special_ids
from bert.tokenizer.wordpiece import CONTINUATION, MAX_INPUT_CHARS_PER_WORD, WordCounts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNUSED_TOKEN = re.compile(r"\[unused\d+\]")
"""Placeholder tokens, which new words replace."""


@dataclass(frozen=True)
class NewWord:
    """A word that a vocabulary lacks, its count in the corpus, and its current tokens."""

    word: str
    count: int
    tokens: tuple[str, ...]
    is_unknown: bool
    """True if one of the tokens is the unknown token."""

    @property
    def tokens_saved(self) -> int:
        """Number of tokens by which the word shortens the corpus.

        An unknown word saves its number of characters minus one, but at least one. A single unknown character therefore
        counts as much as a word of two tokens.
        """
        return self.count * (max(len(self.word) - 1, 1) if self.is_unknown else len(self.tokens) - 1)


def select_new_words(tokenizer: Tokenizer, counts: WordCounts, number: int, min_frequency: int = 2) -> list[NewWord]:
    """Returns the words that save the most tokens, in descending order; ties are sorted alphabetically.

    Args:
      counts: words of the corpus, counted by the steps of this vocabulary.
    """
    vocab, unknown, new_words = tokenizer.get_vocab(), tokenizer.model.unk_token, []
    for word, count in counts.words.items():
        if count >= min_frequency and word not in vocab and len(word) <= MAX_INPUT_CHARS_PER_WORD:
            tokens = tuple(token.value for token in tokenizer.model.tokenize(word))
            new_words.append(NewWord(word, count, tokens, unknown in tokens))
    return sorted(new_words, key=lambda new: (-new.tokens_saved, new.word))[:number]


def require_extensible(tokenizer: Tokenizer) -> None:
    """Raises UserError for a vocabulary that is not WordPiece."""
    if (kind := json.loads(tokenizer.to_str())["model"]["type"]) != "WordPiece":
        raise UserError(f"the vocabulary is {kind}, but only WordPiece can be extended: name a BERT vocabulary")


def add_words(tokenizer: Tokenizer, words: list[str]) -> Tokenizer:
    """Returns a copy of a vocabulary with the words as additional tokens.

    They replace the [unused] tokens first, in the order of their ids, so that a published model's embedding keeps its
    size; further words are appended. All other tokens keep their ids.

    Raises:
      UserError: the vocabulary is not WordPiece.
    """
    from tokenizers import Tokenizer

    require_extensible(tokenizer)
    content = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = content["model"]["vocab"]
    taken = {added["content"] for added in content["added_tokens"]}
    slots = [token for token in vocab if UNUSED_TOKEN.fullmatch(token) and token not in taken]
    slots.sort(key=vocab.__getitem__)
    following = max(tokenizer.get_vocab().values()) + 1
    for number, word in enumerate(words):
        vocab[word] = vocab.pop(slots[number]) if number < len(slots) else following + number - len(slots)
    content["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    with library_errors("the vocabulary cannot be extended", "name a BERT vocabulary"):
        return Tokenizer.from_str(json.dumps(content, ensure_ascii=False))


def decompose_new_tokens(old: Tokenizer, new: Tokenizer, old_name: str, new_name: str) -> dict[int, list[int]]:
    """Returns the id of each token that only ``new`` has -> ids of its tokens in ``old``.

    Args:
      old: vocabulary with which a model was trained.
      new: the same vocabulary with more tokens, in place of [unused] tokens or at the end.
      old_name, new_name: sources of the vocabularies, for messages.

    Raises:
      UserError: an old token is missing or has another id in ``new``, or ``new`` normalizes or splits text differently.
    """
    start = f"{new_name} does not extend the vocabulary of {old_name}"
    fix = "extend that one with bert tokenizer --extend, or leave tokenizer.path out"
    steps = [json.loads(tokenizer.to_str()) for tokenizer in (old, new)]
    for step in ("normalizer", "pre_tokenizer"):
        if steps[0][step] != steps[1][step]:
            raise UserError(f"{start}, its {step} differs: {fix}")
    before, after = old.get_vocab(), new.get_vocab()
    moved = sorted(
        (i, token) for token, i in before.items() if after.get(token) != i and not UNUSED_TOKEN.fullmatch(token)
    )
    if moved:
        number, token = moved[0]
        change = f"has number {after[token]}" if token in after else "is missing"
        raise UserError(f"{start}, whose token {number}, {token!r}, {change} ({len(moved):,} such tokens): {fix}")
    added = {token: i for token, i in after.items() if token not in before}
    if added and (kind := steps[0]["model"]["type"]) != "WordPiece":
        raise UserError(f"{new_name} extends a {kind} vocabulary, but only WordPiece can be extended: leave it out")
    read, unknown = _reader(old), special_ids(old).unk
    return {i: read(token) or [unknown] for token, i in sorted(added.items(), key=lambda item: item[1])}


def _reader(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Returns a function from a token to the ids of its text; a continuing token is read as a continuation."""
    from tokenizers import models

    vocab, prefix = tokenizer.get_vocab(), CONTINUATION
    unknown = require(tokenizer.id_to_token(special_ids(tokenizer).unk), "[UNK]")
    continuing = {token.removeprefix(prefix): i for token, i in vocab.items() if token.startswith(prefix)}
    continuing = {unknown: vocab[unknown], **{text: i for text, i in continuing.items() if text}}
    inside = models.WordPiece(continuing, unk_token=unknown, continuing_subword_prefix="")

    def read(token: str) -> list[int]:
        if token.startswith(prefix) and token != prefix:
            return [part.id for part in inside.tokenize(token.removeprefix(prefix))]
        return tokenizer.encode(token, add_special_tokens=False).ids

    return read
