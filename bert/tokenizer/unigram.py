"""Trains Unigram vocabularies like ALBERT's and XLM-RoBERTa's.

A word begins with a mark for the space in front of it. It is split into the most probable sequence of tokens (Kudo
2018, section 3.2) instead of the longest tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from bert.config import TokenizerConfig
from bert.config.tokenizer import StripAccents
from bert.errors import UserError, without_surrogates
from bert.tokenizer.library import ALBERT_TOKENS, HIDDEN, bert_rows
from bert.tokenizer.wordpiece import EUROPEAN_MARKS, WordCounts, WordSteps, normalize_counts, resolve_strip_accents

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

WORD_START = "▁"
"""The space in front of a word, as part of a token."""

TRAINED_SPECIAL_TOKENS = tuple(ALBERT_TOKENS.values())
"""The first tokens of a trained vocabulary, in ALBERT's order."""

_DIGITS = 6
"""Decimal digits of a logarithmic probability; further digits depend on the order in which threads add."""

_STEP = 1e-4
"""Difference between consecutive scores that the library assigns to characters that are kept only to be known."""


def train_unigram(texts: Iterable[str] | WordCounts, config: TokenizerConfig) -> Tokenizer:
    """Trains a vocabulary of at most ``config.vocab_size`` tokens, including all characters that are kept.

    The vocabulary and its ids are deterministic: the tokens, whose order in the library differs between runs, are
    sorted by probability and name.

    Args:
        texts: lines or paragraphs, which are copied to a temporary file, or the counts of their words.
        config: vocab_size, lowercase, strip_accents, min_frequency, limit_alphabet.

    Raises:
        UserError: no text, or a vocab_size too small for any vocabulary.
    """
    from tokenizers import Tokenizer, models, trainers

    draft = Tokenizer(models.Unigram())
    draft.pre_tokenizer = _make_pre_tokenizer()
    trainer = trainers.UnigramTrainer(
        vocab_size=config.vocab_size,
        show_progress=False,
        special_tokens=list(TRAINED_SPECIAL_TOKENS),
        unk_token=ALBERT_TOKENS["unk"],
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as copy:
        lines: Iterable[str] = copy
        if isinstance(texts, WordCounts):
            counts, lines = texts.characters(), texts.lines()
        else:
            counts = _copy_and_count(texts, copy, config)
        strip_accents = resolve_strip_accents(config, counts)
        if strip_accents != config.strip_accents:
            normalizer = _make_normalizer(config.lowercase, strip_accents)
            counts, lines = normalize_counts(counts, normalizer), map(normalizer.normalize_str, lines)
            config = dataclasses.replace(config, strip_accents=strip_accents)
        left_out = _left_out(counts, config)
        if len(left_out) == len(counts):
            raise UserError("the corpus holds no text to train a vocabulary on: name one that does (data.train)")
        table = dict.fromkeys(map(ord, left_out), " ")
        draft.train_from_iterator((line.translate(table) for line in lines), trainer)
    pieces = json.loads(draft.to_str())["model"]["vocab"]
    pieces = [(token, score) for token, score in pieces if token not in TRAINED_SPECIAL_TOKENS]
    return build_unigram(_with_equal_rest(pieces), config)


def build_unigram(pieces: Iterable[tuple[str, float]], config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer of tokens and their logarithmic probabilities, with the rows and token types of BERT.

    Args:
        pieces: tokens without special tokens.
        config: lowercase, strip_accents.
    """
    from tokenizers import Tokenizer, decoders, models

    ordered = sorted(((token, round(score, _DIGITS)) for token, score in pieces), key=lambda piece: (-piece[1], piece))
    special = [(token, 0.0) for token in TRAINED_SPECIAL_TOKENS]
    unknown = TRAINED_SPECIAL_TOKENS.index(ALBERT_TOKENS["unk"])
    tokenizer = Tokenizer(models.Unigram([*special, *ordered], unk_id=unknown))
    tokenizer.normalizer = _make_normalizer(config.lowercase, config.strip_accents)
    tokenizer.pre_tokenizer = _make_pre_tokenizer()
    tokenizer.add_special_tokens(list(TRAINED_SPECIAL_TOKENS))
    tokenizer.decoder = decoders.Metaspace(replacement=WORD_START, prepend_scheme="always")
    ids = {token: number for number, token in enumerate(TRAINED_SPECIAL_TOKENS)}
    tokenizer.post_processor = bert_rows(ALBERT_TOKENS["cls"], ALBERT_TOKENS["sep"], ids)
    return tokenizer


def without_special_pieces(tokenizer: str) -> str:
    """Returns the tokenizer.json of a Unigram vocabulary with hidden special tokens, so that no text becomes one.

    Ids do not change. Special tokens after the model's pieces, such as the mask of DeBERTa-v3, become hidden pieces.
    """
    content = json.loads(tokenizer)
    special = {token["content"]: token["id"] for token in content["added_tokens"] if token["special"]}
    pieces = content["model"]["vocab"]
    for token, number in sorted(special.items(), key=lambda item: item[1]):
        if number == len(pieces):
            pieces.append((token, 0.0))
    content["model"]["vocab"] = [(HIDDEN + token if token in special else token, score) for token, score in pieces]
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    return json.dumps(content, ensure_ascii=False)


def unigram_word_steps(lowercase: bool, strip_accents: StripAccents) -> WordSteps:
    """Returns the steps that split a text into words, without marks: characters that are left out may divide words."""
    from tokenizers import pre_tokenizers

    return WordSteps(_make_normalizer(lowercase, strip_accents), pre_tokenizers.WhitespaceSplit())


def _make_normalizer(lowercase: bool, strip_accents: StripAccents) -> Normalizer:
    """Returns SentencePiece's nmt_nfkc, followed by the configured removal of marks and lower-casing."""
    from tokenizers import Regex, normalizers

    steps = [normalizers.Nmt(), normalizers.NFKC()]
    if strip_accents == "european" and lowercase:
        steps += [normalizers.NFKD(), normalizers.Replace(Regex(EUROPEAN_MARKS), ""), normalizers.NFKC()]
    elif strip_accents is True or (strip_accents is None and lowercase):
        steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.NFKC()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)


def _make_pre_tokenizer() -> PreTokenizer:
    """Returns the pre-tokenizer that splits a text at white space and marks the beginning of each word."""
    from tokenizers import pre_tokenizers

    marked = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marked])


def _with_equal_rest(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Assigns the lowest score to all characters that were kept only to be known.

    The library assigns them increasing scores from the lowest one on, in the order of a hash table.
    """
    lowest = min(score for _, score in pieces)

    def is_rest(token: str, score: float) -> bool:
        number = (score - lowest) / _STEP
        return len(token) == 1 and number < len(pieces) and abs(number - round(number)) < _STEP

    return [(token, lowest if is_rest(token, score) else score) for token, score in pieces]


def _copy_and_count(texts: Iterable[str], copy: TextIO, config: TokenizerConfig) -> dict[str, int]:
    """Writes normalized texts into a file and rewinds it. Returns the counts of their characters."""
    normalizer = _make_normalizer(config.lowercase, config.strip_accents)
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        line = normalizer.normalize_str(without_surrogates(text))
        counts.update(line)
        copy.write(line + "\n")
    copy.seek(0)
    return counts


def _left_out(counts: Mapping[str, int], config: TokenizerConfig) -> set[str]:
    """Returns the characters that the vocabulary does not include.

    These are white space, characters rarer than min_frequency, and the rarest ones beyond limit_alphabet or, by
    default, a quarter of the vocabulary.
    """
    num_reserved = len(TRAINED_SPECIAL_TOKENS) + 1
    limit = config.limit_alphabet or max(config.vocab_size // 4, min(config.vocab_size - num_reserved, 256))
    common = sorted((token for token in counts if not token.isspace()), key=lambda token: (-counts[token], token))
    kept = [token for token in common[:limit] if counts[token] >= config.min_frequency] or common[:1]
    return counts.keys() - kept
