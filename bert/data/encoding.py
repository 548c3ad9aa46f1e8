"""Encodes texts as rows of token ids: special tokens, truncation, and windows over a long input.

BERT's rows are ``[CLS] A [SEP]`` and ``[CLS] A [SEP] B [SEP]`` with token types 0 and 1. RoBERTa's rows are
``<s> A </s>`` and ``<s> A </s></s> B </s>``, and all token types are 0. XLNet's rows are ``A <sep> <cls>`` and
``A <sep> B <sep> <cls>``, where <cls> has type 2. The layout is read from the tokenizer's post-processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tokenizers import Tokenizer

from bert.config.model import PairTruncation
from bert.data.rows import SourceTargetRows, TokenRows
from bert.errors import UserError
from bert.tokenizer.hf_settings import NO_LIMIT, truncation_side
from bert.tokenizer.library import ROBERTA_TOKENS, are_token_types, encode_batch, special_ids
from bert.tokenizer.vocabulary import literal_tokenizer

if TYPE_CHECKING:
    from tokenizers.processors import PostProcessor

Count = TypeVar("Count", int, np.ndarray)

ROWS_AT_ONCE = 4096
"""Texts per call of the tokenizer: enough to make calls cheap, few enough to bound memory."""


@dataclass(frozen=True)
class RowTemplate:
    """Special tokens around one text A, or around a pair of texts A and B.

    Attributes:
      prefix: ids before A.
      separator: ids between A and B; () for one text.
      suffix: ids after the last text.
      types_of_special: token type of each of these ids, in order: 0s, then 1s, and 2 if the last one is XLNet's <cls>.
      type_of_second: token type of B; A has type 0.
    """

    prefix: tuple[int, ...]
    separator: tuple[int, ...]
    suffix: tuple[int, ...]
    types_of_special: tuple[int, ...]
    type_of_second: int = 0

    @property
    def size(self) -> int:
        """Number of special tokens in a row."""
        return len(self.types_of_special)

    @property
    def has_third_type(self) -> bool:
        """Whether the last token of a row has type 2."""
        return self.types_of_special[-1:] == (2,)

    def room(self, max_length: int) -> int:
        """Returns the number of text tokens that fit a row of ``max_length`` tokens."""
        return max_length - self.size

    def segment_a_length(self, first: Count, second: Count) -> Count:
        """Returns the number of tokens of type 0, from the numbers of tokens of A and B. Type 1 follows type 0."""
        return first + second * (1 - self.type_of_second) + self.types_of_special.count(0)

    def row(self, first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray = ()) -> np.ndarray:
        """Returns the int32 ids of the row of one text, or of two."""
        parts = (self.prefix, first, self.separator, second, self.suffix)
        return np.concatenate([np.asarray(part, np.int32) for part in parts])


def row_template(tokenizer: Tokenizer, pair: bool = False) -> RowTemplate:
    """Returns the template of a tokenizer's rows of one text, or of a pair.

    Raises:
      UserError: special tokens are missing, or token types are not 0s followed by 1s and at most one 2.
    """
    from tokenizers import Tokenizer, models

    # The post-processor holds the ids that it adds. Texts of one known token show where it adds them.
    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = post_processor(tokenizer)
    encoding = probe.encode("a", "a") if pair else probe.encode("a")
    texts = [column for column, owner in enumerate(encoding.sequence_ids) if owner is not None]
    types = encoding.type_ids
    if types[texts[0]] != 0 or types[texts[-1]] == 2 or not are_token_types(types):
        raise UserError(
            f"the tokenizer's post-processor assigns the token types {types}, but a row needs 0s followed by 1s: "
            "use a tokenizer with BERT's or RoBERTa's post-processor"
        )
    ids, first, last = encoding.ids, texts[0], texts[-1]
    return RowTemplate(
        prefix=tuple(ids[:first]),
        separator=tuple(ids[first + 1 : last]),
        suffix=tuple(ids[last + 1 :]),
        types_of_special=tuple(type_id for column, type_id in enumerate(types) if column not in texts),
        type_of_second=types[last],
    )


def language_model_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer of a causal language model puts before a text, such as Llama's BOS.

    The first token of rows that also have a last one, such as [CLS], is not meant for a text that is continued.
    """
    template = row_template(tokenizer)
    return () if template.suffix else template.prefix


def post_processor(tokenizer: Tokenizer) -> PostProcessor:
    """Returns the tokenizer's post-processor, or BERT's or RoBERTa's, depending on its special tokens."""
    from tokenizers.processors import BertProcessing, RobertaProcessing

    if tokenizer.post_processor is not None:
        return tokenizer.post_processor
    special = special_ids(tokenizer)
    separator, classifier = ((str(tokenizer.id_to_token(id)).strip(), id) for id in (special.sep, special.cls))
    if separator[0] == ROBERTA_TOKENS["sep"]:
        return RobertaProcessing(separator, classifier, add_prefix_space=False)
    return BertProcessing(separator, classifier)


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    max_length: int,
    labels: np.ndarray | None = None,
    pair_truncation: PairTruncation | None = None,
) -> TokenRows:
    """Encodes texts or pairs of texts as rows of at most ``max_length`` tokens.

    The longer text of a pair is cut first: like ``longest_first`` of the library `tokenizers`, or with
    ``pair_truncation`` google like ``_truncate_seq_pair`` of google-research/bert (run_classifier.py). ``tokenizer``
    is not changed.

    Raises:
      UserError: ``max_length`` has no room for the special tokens, or the tokenizer fails on a text.
    """
    truncating = _truncating_tokenizer(tokenizer, max_length, tokenizer.get_vocab_size())
    has_pairs = any(isinstance(text, tuple) for text in texts)
    template = row_template(tokenizer, pair=True) if pair_truncation == "google" and has_pairs else None
    ids = [np.zeros(0, np.int32)]
    lengths: list[int] = []
    segment_a_lengths: list[int] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        batch = texts[start : start + ROWS_AT_ONCE]
        for text, encoding in zip(batch, encode_batch(truncating, batch), strict=True):
            if template is not None and isinstance(text, tuple) and len(encoding.ids) == max_length:
                row, segment_a_length = _google_row(tokenizer, template, text, max_length)
            else:
                row = np.array(encoding.ids, np.int32)
                segment_a_length = encoding.type_ids.count(0)
            ids.append(row)
            lengths.append(len(row))
            segment_a_lengths.append(segment_a_length)
    if max(lengths, default=0) > max_length:  # the library never truncates special tokens
        raise UserError(f"max_length is {max_length}, but a row has more special tokens: use a larger number")
    return TokenRows(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        segment_a_lengths=np.array(segment_a_lengths, np.int32),
        labels=labels,
        pad_token_id=special_ids(truncating).find("pad") or 0,
        has_third_type=row_template(tokenizer).has_third_type,
    )


def _google_row(
    tokenizer: Tokenizer, template: RowTemplate, pair: tuple[str, str], max_length: int
) -> tuple[np.ndarray, int]:
    """Returns a truncated pair as a row, and its number of tokens of type 0."""
    first, second = plain_ids(tokenizer, pair)
    kept = google_pair_lengths(len(first), len(second), template.room(max_length))
    from_end = truncation_side(tokenizer) == "left"
    first, second = (
        text[len(text) - count :] if from_end else text[:count]
        for text, count in zip((first, second), kept, strict=True)
    )
    return template.row(first, second), template.segment_a_length(*kept)


def google_pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two truncated texts. The longer one loses tokens first; of equal ones, the second."""
    excess = max(first + second - room, 0)
    cut = min(excess, abs(first - second))  # until both have the same length
    first, second = (first - cut, second) if first > second else (first, second - cut)
    excess -= cut
    return first - excess // 2, second - (excess + 1) // 2


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str], literal: bool = False) -> list[np.ndarray]:
    """Returns the int32 ids of each text, not truncated and without special tokens. ``tokenizer`` is not changed.

    Args:
        literal: read the name of a special token in a text, such as "[SEP]", as ordinary characters.
    """
    if literal:
        tokenizer = prose_tokenizer(tokenizer)
    else:
        tokenizer = _truncating_tokenizer(tokenizer, NO_LIMIT, tokenizer.get_vocab_size())
    return [np.array(encoding.ids, np.int32) for encoding in encode_batch(tokenizer, texts, add_special_tokens=False)]


@lru_cache(maxsize=16)
def _truncating_tokenizer(tokenizer: Tokenizer, max_length: int, tokens: int) -> Tokenizer:
    """Returns a copy that truncates and does not pad.

    Copies are cached because copying a vocabulary takes longer than encoding a few texts. ``tokens``, the size of the
    vocabulary, is part of the cache key: tokens may be added to a tokenizer.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())  # truncation and padding are settings of the tokenizer object
    copy.no_padding()
    copy.enable_truncation(max_length, strategy="longest_first", direction=truncation_side(tokenizer))
    copy.post_processor = post_processor(copy)
    return copy


def prose_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a cached copy that neither truncates nor pads, and reads "[SEP]" in a text as ordinary characters."""
    return _prose_tokenizer(tokenizer, tokenizer.get_vocab_size())[0]


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the ids [T] and the character offsets [T, 2] int32 of each text's tokens, without special tokens.

    The library removes the space in front of a word from the offsets of a byte-level token. It does so even if the
    pre-tokenizer has added that space, like RobBERT's, and the token would start one letter late. Here only spaces of
    the text are removed.
    """
    literal, trims = _prose_tokenizer(tokenizer, tokenizer.get_vocab_size())
    for first in range(0, len(texts), ROWS_AT_ONCE):
        batch = list(texts[first : first + ROWS_AT_ONCE])
        for text, encoding in zip(batch, encode_batch(literal, batch, False, offsets=True), strict=True):
            offsets = encoding.offsets
            if trims:
                offsets = [_without_spaces(text, start, end) for start, end in offsets]
            yield np.array(encoding.ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2)


def _without_spaces(text: str, start: int, end: int) -> tuple[int, int]:
    start = end - len(text[start:end].lstrip(" "))
    return start, start + len(text[start:end].rstrip(" "))


@lru_cache(maxsize=8)
def _prose_tokenizer(tokenizer: Tokenizer, tokens: int) -> tuple[Tokenizer, bool]:
    """Returns the copy, which keeps spaces in the offsets of tokens, and whether the original removes them."""
    copy = literal_tokenizer(tokenizer)
    copy.no_padding()
    copy.no_truncation()
    copy.post_processor = post_processor(copy)
    content = json.loads(copy.to_str())
    ending = json.dumps(content["post_processor"])
    if not (trims := '"trim_offsets": true' in ending):
        return copy, trims
    content["post_processor"] = json.loads(ending.replace('"trim_offsets": true', '"trim_offsets": false'))
    untrimmed = Tokenizer.from_str(json.dumps(content))
    untrimmed.encode_special_tokens = True
    return untrimmed, trims


def window_starts(tokens: int, room: int, stride: int | None = None) -> np.ndarray:
    """Returns the first token of each window of ``room`` tokens. The last window ends with the text.

    Args:
        stride: tokens between the starts of two windows, at most ``room``; None for half of ``room``.
    """
    last = max(tokens - room, 0)
    return np.array([*range(0, last, max(room // 2 if stride is None else min(stride, room), 1)), last])


def widest_windows(starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns, for each token, the index of the window with the most context around it: the rule of run_squad.py.

    The context is the smaller of the numbers of tokens to the left and right, plus 0.01 times the window's length.
    The first of equal windows counts. Every token must be in a window.
    """
    best_score = np.full(ends[-1], -1.0)
    widest = np.zeros(ends[-1], np.int64)
    for window, (start, end) in enumerate(zip(starts, ends, strict=True)):
        position = np.arange(end - start)
        score = np.minimum(position, position[::-1]) + 0.01 * (end - start)
        here = np.flatnonzero(score > best_score[start:end]) + start
        best_score[here], widest[here] = score[here - start], window
    return widest


def tokenize_sources(
    tokenizers: tuple[Tokenizer, Tokenizer],
    sources: Sequence[str],
    targets: Sequence[str] | None,
    max_lengths: tuple[int, int],
) -> SourceTargetRows:
    """Encodes sources and targets as rows.

    Args:
      tokenizers: tokenizer of the sources, and of the targets.
      targets: a text for each source, or None.
      max_lengths: maximum tokens of a source with its special tokens, and of a target with its start or end token.

    Raises:
      UserError: the target vocabulary has no token for the start or the end of a text.
    """
    tokenizer, target_tokenizer = tokenizers
    rows = tokenize(tokenizer, sources, max_lengths[0])
    start, end = target_boundaries(target_tokenizer)
    if targets is None:
        return SourceTargetRows(rows, None, target_tokenizer, max_lengths[1])
    max_tokens = max_lengths[1] - 1
    texts = [
        np.concatenate([[start], ids[:max_tokens], [end]]).astype(np.int32)
        for ids in plain_ids(target_tokenizer, targets, literal=True)
    ]
    lengths = np.array([len(ids) for ids in texts], np.int64)
    target_rows = TokenRows(
        ids=np.concatenate([np.zeros(0, np.int32), *texts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_a_lengths=lengths.astype(np.int32),
        labels=None,
    )
    return SourceTargetRows(rows, target_rows, target_tokenizer, max_lengths[1])


def target_boundaries(tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns the ids of the start and end tokens of a target. Raises UserError for a vocabulary without them."""
    ids = special_ids(tokenizer)
    roles = {"start": ("cls", "bos"), "end": ("eos", "sep")}
    boundaries = {name: next((i for i in map(ids.find, names) if i is not None), None) for name, names in roles.items()}
    for name, number in boundaries.items():
        if number is None:
            names = "[CLS] and [SEP], <s> and </s>, or <|endoftext|>"
            raise UserError(f"the target vocabulary has no {name} token ({names}): use one that has it")
    return int(boundaries["start"] or 0), int(boundaries["end"] or 0)
