"""Counts words for the training of vocabularies, trains WordPiece vocabularies, and builds their tokenizers.

Counts of the parts of a corpus add up, so parts may be counted on any machine and in any order.

WordPiece processes text as in google-research/bert ``tokenization.py``: clean, split CJK characters, lower-case and
strip accents if configured, split at white space and punctuation, then match the longest tokens first.
"""

from __future__ import annotations

import collections
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from bert.config import TokenizerConfig
from bert.config.tokenizer import StripAccents
from bert.errors import UserError, require, without_surrogates
from bert.tokenizer.library import ESM_TOKENS, MPNET_TOKENS, SPECIAL_TOKENS, bert_rows, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer
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
    counts: collections.Counter[str] = collections.Counter()
    for character, count in characters.items():
        for part in normalizer.normalize_str(character):
            if not part.isspace():
                counts[part] += count
    return counts


def resolve_strip_accents(config: TokenizerConfig, characters: Mapping[str, int]) -> StripAccents:
    """Returns which marks the vocabulary of a corpus removes; None (BERT's steps) if they lose almost nothing of it.

    Args:
        config: its ``strip_accents`` is returned unless it is "european".
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
        counts: collections.Counter[str] = collections.Counter()
        for word, count in self.words.items():
            for character in word:
                counts[character] += count
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


CONTINUATION = "##"
"""Prefix of a token that continues a word."""

MAX_INPUT_CHARS_PER_WORD = 100
"""Longer words become [UNK], as in transformers and in published tokenizer files."""

UNUSED = "[unused{}]"
"""Name of an unused token, numbered from 0. No text becomes such a token, because brackets are separate words."""

_MIN_VOCAB_SIZE = 32
_UNICODE_SIZE = 0x110000


def train_wordpiece(texts: Iterable[str] | WordCounts, config: TokenizerConfig) -> Tokenizer:
    """Trains a WordPiece vocabulary of at most ``config.vocab_size`` tokens.

    The vocabulary and its ids are deterministic. The library alone is not deterministic: it numbers continuing
    characters in the order of a hash table and breaks ties by these numbers. Therefore the alphabet is counted first
    and passed in a fixed order; meanwhile the texts are copied to a temporary file. Only distinct words are in memory.

    Args:
      texts: lines or paragraphs, or the counts of their words.
      config: vocab_size, lowercase, strip_accents, min_frequency, num_unused_tokens, limit_alphabet.

    Raises:
      UserError: no text, or a vocab_size too small for any vocabulary.
    """
    from tokenizers import Tokenizer, models, trainers

    if config.vocab_size < _MIN_VOCAB_SIZE:
        raise UserError(f"tokenizer.vocab_size is {config.vocab_size}: it must be at least {_MIN_VOCAB_SIZE}")
    draft = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as copy:
        lines: Iterable[str] = copy
        if isinstance(texts, WordCounts):
            characters, lines = texts.characters(), texts.lines()
        else:
            characters = _copy_and_count(texts, copy)
        steps, characters, strip_accents = _resolve_steps(characters, config)
        draft.normalizer = steps.normalizer
        draft.pre_tokenizer = texts.steps().pre_tokenizer if isinstance(texts, WordCounts) else steps.pre_tokenizer
        first, continuing = _alphabet(characters, steps, config)
        if not first:
            raise UserError("the corpus holds no text to train a vocabulary on: name one that does (data.train)")
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.vocab_size,
            min_frequency=config.min_frequency,
            show_progress=False,
            # The trainer numbers special tokens first and in order, which fixes the order of the alphabet.
            special_tokens=[
                *SPECIAL_TOKENS,
                *map(UNUSED.format, range(config.num_unused_tokens)),
                *first,
                *(CONTINUATION + c for c in continuing),
            ],
            initial_alphabet=first,
            limit_alphabet=len(first),
            continuing_subword_prefix=CONTINUATION,
        )
        draft.train_from_iterator(lines, trainer)
    return build_wordpiece(draft.get_vocab(), config.lowercase, strip_accents)


def wordpiece_steps(lowercase: bool, strip_accents: StripAccents) -> WordSteps:
    """Returns the steps that split a text into words: BERT's, unless only European marks are removed."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    european = strip_accents == "european" and lowercase
    strip = False if european else None if strip_accents == "european" else strip_accents
    normalizer: Normalizer = normalizers.BertNormalizer(True, True, strip, lowercase and not european)
    if european:
        marks = [normalizers.NFD(), normalizers.Replace(Regex(EUROPEAN_MARKS), ""), normalizers.NFC()]
        normalizer = normalizers.Sequence([normalizer, *marks, normalizers.Lowercase()])
    return WordSteps(normalizer, pre_tokenizers.BertPreTokenizer())


def has_wordpiece_steps(content: dict[str, Any]) -> bool:
    """Returns whether a tokenizer.json has the steps of `wordpiece_steps`."""
    normalizer, words = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    kinds = [step["type"] for step in normalizer.get("normalizers", [normalizer]) if "type" in step]
    european = ["BertNormalizer", "NFD", "Replace", "NFC", "Lowercase"]
    return words.get("type") == "BertPreTokenizer" and kinds in (["BertNormalizer"], european)


def build_wordpiece(vocab: dict[str, int], lowercase: bool, strip_accents: StripAccents) -> Tokenizer:
    """Returns the tokenizer of a vocabulary, with BERT's rows or, by its special tokens, MPNet's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    model = models.WordPiece(
        vocab,
        unk_token="[UNK]",
        continuing_subword_prefix=CONTINUATION,
        max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = wordpiece_steps(lowercase, strip_accents)
    if (names := special_tokens(vocab)) == MPNET_TOKENS:
        # The space before the mask belongs to it.
        tokenizer.add_special_tokens([AddedToken(name, lstrip=role == "mask") for role, name in names.items()])
        separator, classifier = ((names[role], vocab[names[role]]) for role in ("sep", "cls"))
        tokenizer.post_processor = processors.RobertaProcessing(separator, classifier, add_prefix_space=False)
    else:
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.post_processor = bert_rows("[CLS]", "[SEP]", vocab)
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return tokenizer


def build_residues(vocab: dict[str, int]) -> Tokenizer:
    """Returns the tokenizer of a vocabulary of amino acids, which finds tokens anywhere in a text, as ESM's does.

    Each word of the text between tokens is one unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    names = ESM_TOKENS
    model = models.WordPiece(
        vocab,
        unk_token=names["unk"],
        continuing_subword_prefix=CONTINUATION,
        max_input_chars_per_word=MAX_INPUT_CHARS_PER_WORD,
    )
    tokenizer = Tokenizer(model)
    tokens = "|".join(map(re.escape, sorted(vocab, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokens), "isolated"),
            pre_tokenizers.Split(Regex("[\x1c-\x1f]"), "removed"),  # spaces in Python, but not in the library
            pre_tokenizers.WhitespaceSplit(),
        ]
    )
    tokenizer.add_special_tokens(list(dict.fromkeys(names.values())))
    cls, end = names["cls"], names["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{cls} $A {end}", f"{cls} $A {end} $B {end}", [(name, vocab[name]) for name in (cls, end)]
    )
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    return tokenizer


def _copy_and_count(texts: Iterable[str], copy: TextIO) -> dict[str, int]:
    """Writes texts into a file and rewinds it. Returns the counts of their characters."""
    counts = np.zeros(_UNICODE_SIZE, np.int64)
    for block in blocks(texts, characters=1 << 20):  # NumPy then counts 100 MB per second
        codes = np.frombuffer(block.encode("utf-32-le"), np.uint32)
        counts += np.bincount(codes, minlength=_UNICODE_SIZE)
        copy.write(block)
    copy.seek(0)
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}


def _resolve_steps(
    characters: Mapping[str, int], config: TokenizerConfig
) -> tuple[WordSteps, dict[str, int], StripAccents]:
    """Returns the steps for a text, the counts of its normalized characters, and the resolved ``strip_accents``."""
    steps = wordpiece_steps(config.lowercase, config.strip_accents)
    normalized = normalize_counts(characters, require(steps.normalizer, "the normalizer"))
    strip_accents = resolve_strip_accents(config, normalized)
    if strip_accents != config.strip_accents:
        steps = wordpiece_steps(config.lowercase, strip_accents)
        normalized = normalize_counts(characters, require(steps.normalizer, "the normalizer"))
    return steps, normalized, strip_accents


def _alphabet(characters: Mapping[str, int], steps: WordSteps, config: TokenizerConfig) -> tuple[list[str], list[str]]:
    """Returns the characters that start words and the characters that continue them, each sorted.

    A character costs up to two tokens. Characters rarer than min_frequency, and the rarest ones beyond a quarter of the
    vocabulary, are left out; words with them become [UNK]. Characters as common as the last one within the quarter may
    take up to a tenth more. Chinese characters cost one token, because the normalizer puts spaces around them: a
    quarter of 21128 tokens holds the 5000 most common ones.
    """
    normalizer = require(steps.normalizer, "the normalizer")
    size = config.vocab_size - config.num_unused_tokens
    room = max(size // 4, min(size - len(SPECIAL_TOKENS), 256))
    room_for_ties = room // 10
    last_count = 0
    first: list[str] = []
    continuing: list[str] = []
    for character, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        continues = len(steps.pre_tokenizer.pre_tokenize_str(normalizer.normalize_str("a" + character))) == 1
        room -= 1 + continues
        is_full = room < (-room_for_ties if count == last_count else 0) or len(first) == config.limit_alphabet
        if is_full or (count < config.min_frequency and first):
            break
        first.append(character)
        last_count = count
        if continues:
            continuing.append(character)
    return sorted(first), sorted(continuing)
