"""Configuration of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bert.config.validation import (
    NonNegative,
    Positive,
    Range,
    check_fields,
    check_unused,
    conflict,
    fields_that_differ,
)
from bert.errors import UserError

VocabularyKind = Literal["wordpiece", "byte_level", "unigram"]
StripAccents = bool | Literal["european"] | None

MIN_BYTE_LEVEL_SIZE = 256 + 5
"""Size of a byte-level vocabulary without merges: 256 bytes and the special tokens."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The vocabulary."""

    kind: VocabularyKind = "wordpiece"
    """Kind of a trained vocabulary: wordpiece (BERT); byte_level, with bytes and merges of them as tokens, which reads
    every text without loss and needs no [UNK] (GPT-2, RoBERTa); or unigram, which splits words into their most
    probable tokens (ALBERT, XLM-RoBERTa)."""
    path: str | None = None
    """vocab.txt, tokenizer.json, a SentencePiece file, or a folder with one of them, such as a run. null: train a
    vocabulary on the corpus. With init: the vocabulary of init extended by new words, whose embeddings start as the
    mean of their old tokens; null: the vocabulary of init."""
    vocab_size: Annotated[int, Range(minimum=32, below=2**24)] = 30522
    """Number of tokens to train, including special tokens. A small corpus gives fewer."""
    lowercase: bool = True
    """Lower-case all text. For kinds wordpiece and unigram."""
    strip_accents: StripAccents = "european"
    """Remove combining marks (accents). european: when lower-casing, from Latin, Greek and Cyrillic letters; like null
    if the corpus is almost entirely in these scripts, or with a vocab.txt in tokenizer.path. null: when lower-casing,
    in all scripts, as in BERT's vocabularies, which removes vowels of Thai, Hindi and Arabic."""
    min_frequency: Positive = 2
    """Minimum frequency of merged token pairs and of characters in a trained vocabulary."""
    num_unused_tokens: NonNegative = 0
    """Number of tokens [unused0], [unused1], ... in a trained vocabulary, for words that are added later."""
    limit_alphabet: Positive | None = None
    """Maximum number of characters in a trained vocabulary. Defaults to a quarter of the vocabulary. For kinds
    wordpiece and unigram."""

    @property
    def is_unset(self) -> bool:
        """Whether all values are defaults of this or an earlier version."""
        return not any(fields_that_differ(self))

    def check(self, section: str = "tokenizer") -> None:
        """Raises UserError for a vocabulary that cannot be trained."""
        check_fields(f"{section}.", self)
        if self.kind == "byte_level":
            if self.vocab_size < MIN_BYTE_LEVEL_SIZE and self.path is None:
                fix = f"set it to at least {MIN_BYTE_LEVEL_SIZE} (256 bytes and 5 special tokens)"
                raise UserError(f"{section}.vocab_size is {self.vocab_size}: {fix}")
            unused = f"but {section}.kind byte_level does not use it: remove it, or set {section}.kind to wordpiece"
            check_unused(f"{section}.", self, unused, ("strip_accents", "num_unused_tokens", "limit_alphabet"))
        if self.kind == "unigram" and self.num_unused_tokens:
            fix = f"remove it, or set {section}.kind to wordpiece"
            raise conflict(self, f"{section}.num_unused_tokens", f"{section}.kind", fix)
        if self.num_unused_tokens > self.vocab_size - 32:
            fix = "use a number that leaves room for at least 32 tokens"
            raise conflict(self, f"{section}.num_unused_tokens", f"{section}.vocab_size", fix)
