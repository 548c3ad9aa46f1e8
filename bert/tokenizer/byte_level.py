"""Trains byte-level vocabularies like GPT-2's and RoBERTa's, and reads vocab.json with merges.txt.

Every byte is a token, so that no text is unknown or altered. Tokens are merged within words, and a word begins with the
space in front of it (Radford et al. 2019, section 2.2).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from bert.config import TokenizerConfig
from bert.errors import UserError, without_surrogates
from bert.tokenizer.library import ROBERTA_TOKENS, special_ids, special_tokens
from bert.tokenizer.wordpiece import WordCounts, WordSteps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINED_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
"""The first tokens of a trained vocabulary; the first four have the ids of RoBERTa."""

SPACES = ("Ġ", "Ċ", "ĉ", "č")
"""Space, line feed, tab and carriage return as spelled in tokens."""


def train_byte_level(texts: Iterable[str] | WordCounts, config: TokenizerConfig) -> Tokenizer:
    """Trains a vocabulary of at most ``config.vocab_size`` tokens.

    The vocabulary and its ids are deterministic: the library breaks ties by token ids, and the ids of the bytes are
    fixed here.

    Args:
        texts: lines or paragraphs, or the counts of their words.
        config: vocab_size and min_frequency are used; texts are not normalized.

    Raises:
        UserError: no text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if isinstance(texts, WordCounts):
        lines, steps = texts.lines(), texts.steps()
    else:
        lines, steps = map(without_surrogates, texts), byte_level_steps()
    if (first := next((line for line in lines if line.strip()), None)) is None:
        raise UserError("the corpus holds no text to train a vocabulary on: name one that does (data.train)")
    draft = Tokenizer(models.BPE())
    draft.normalizer, draft.pre_tokenizer = steps
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        show_progress=False,
        special_tokens=list(TRAINED_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    draft.train_from_iterator(itertools.chain([first], lines), trainer)
    model = json.loads(draft.to_str())["model"]
    return build_byte_level(model["vocab"], [(left, right) for left, right in model["merges"]])


def byte_level_steps() -> WordSteps:
    """Returns the steps that split a text into words."""
    from tokenizers import pre_tokenizers

    return WordSteps(None, pre_tokenizers.ByteLevel(add_prefix_space=False))


def token_byte_counts(tokenizer: Tokenizer) -> np.ndarray | None:
    """Returns the number of bytes of each token [V], 0 for special tokens; None if the vocabulary alters texts."""
    from tokenizers import models, pre_tokenizers

    splitter, vocab = tokenizer.pre_tokenizer, tokenizer.get_vocab()
    by_bytes = isinstance(tokenizer.model, models.BPE) and isinstance(splitter, pre_tokenizers.ByteLevel)
    if not by_bytes or splitter.add_prefix_space or tokenizer.normalizer is not None:
        return None
    if not vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    counts = np.zeros(max(vocab.values()) + 1, np.int64)
    counts[list(vocab.values())] = list(map(len, vocab))  # a character of a token is a byte
    for number, token in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if token.special else len(token.content.encode())
    return counts


def parse_byte_level(vocab: str, merges: str) -> Tokenizer:
    """Returns the tokenizer of the contents of vocab.json and merges.txt.

    Raises:
        Exception: the library rejects them, or some bytes have no token, as in other byte-pair vocabularies.
    """
    from tokenizers import pre_tokenizers

    tokens = json.loads(vocab)
    if lacking := set(pre_tokenizers.ByteLevel.alphabet()) - set(tokens):
        raise ValueError(f"{len(lacking)} bytes have no token")
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    return build_byte_level(tokens, [(left, right) for left, _, right in (x.partition(" ") for x in lines)])


def separate_pairs(tokenizer: Tokenizer) -> None:
    """Separates the texts of a pair by the end token if the vocabulary has no classifier token.

    In GPT-2's rows the second text follows the first directly. The delimiter follows Radford et al. 2018 (section 3.3).
    """
    from tokenizers import processors

    special = special_ids(tokenizer)
    end = special.find("eos")
    plain = tokenizer.post_processor is None or isinstance(tokenizer.post_processor, processors.ByteLevel)
    if not plain or end is None or special.find("cls") is not None:
        return
    name = tokenizer.id_to_token(end)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:0", pair=f"$A:0 {name}:0 $B:1", special_tokens=[(name, end)]
    )


def build_byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Returns the tokenizer of a vocabulary, with RoBERTa's rows ``<s> A </s>`` and ``<s> A </s></s> B </s>``.

    A vocabulary with BERT's special tokens has BERT's rows; one without a classifier or separator has plain text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer, tokenizer.pre_tokenizer = byte_level_steps()
    tokenizer.decoder = decoders.ByteLevel()
    special = special_tokens(vocab)
    for role, token in special.items():  # "a <mask>" has no token for the space
        tokenizer.add_special_tokens([AddedToken(token, lstrip=True) if role == "mask" else token])
    if "cls" not in special or "sep" not in special:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return tokenizer
    classifier, separator = ((special[role], vocab[special[role]]) for role in ("cls", "sep"))
    tokenizer.post_processor = (
        processors.RobertaProcessing(separator, classifier, add_prefix_space=False)
        if special["cls"] == ROBERTA_TOKENS["cls"]
        else processors.BertProcessing(separator, classifier)
    )
    return tokenizer
