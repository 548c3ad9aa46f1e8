"""Texts as rows of token ids: the special tokens of a row, truncation, and windows over a long input.

BERT's rows are ``[CLS] A [SEP]`` and ``[CLS] A [SEP] B [SEP]`` with token types 0 and 1, RoBERTa's ``<s> A </s>`` and
``<s> A </s></s> B </s>`` with token types 0 alone. Every module that lays out rows takes them from here.
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
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.tokenizer.hf_settings import NO_LIMIT, truncation_side
from bert.tokenizer.library import encode_batch
from bert.tokenizer.special_tokens import ROBERTA_TOKENS, special_ids
from bert.tokenizer.vocabulary import literal_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.processors import PostProcessor

Count = TypeVar("Count", int, np.ndarray)

ROWS_AT_ONCE = 4096
"""Texts tokenized in one call: enough to make calls cheap, few enough to bound memory."""


@dataclass(frozen=True)
class RowTemplate:
    """Special tokens around one text A, or around a pair of texts A and B.

    Attributes:
      prefix: ids before A.
      separator: ids between A and B; () for one text.
      suffix: ids after the last text.
      types_of_special: token type of each of these ids, in order: 0s, then 1s.
      type_of_second: token type of B; that of A is 0.
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

    def room(self, max_length: int) -> int:
        """Tokens of the texts in a row of ``max_length`` tokens."""
        return max_length - self.size

    def segment_a_length(self, first: Count, second: Count) -> Count:
        """Tokens of type 0 in a row whose texts have so many tokens; those of type 1 follow them."""
        return first + second * (1 - self.type_of_second) + self.types_of_special.count(0)

    def row(self, first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray = ()) -> np.ndarray:
        """int32 ids of the row of one text, or of two."""
        parts = (self.prefix, first, self.separator, second, self.suffix)
        return np.concatenate([np.asarray(part, np.int32) for part in parts])


def row_template(tokenizer: Tokenizer, pair: bool = False) -> RowTemplate:
    """The template of a tokenizer's rows of one text, or of a pair.

    Raises:
      UserError: special tokens are missing, or token types other than 0s and then 1s.
    """
    from tokenizers import Tokenizer, models

    # The post-processor holds the ids it adds. Texts of one known token show where it adds them.
    probe = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    probe.post_processor = post_processor(tokenizer)
    encoding = probe.encode("a", "a") if pair else probe.encode("a")
    texts = [column for column, owner in enumerate(encoding.sequence_ids) if owner is not None]
    types = encoding.type_ids
    if types[texts[0]] != 0 or set(types) - {0, 1} or types != sorted(types):
        raise UserError(
            f"the tokenizer's post-processor gives the tokens of a row the types {types}, and a row needs 0s, then 1s: "
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


def post_processor(tokenizer: Tokenizer) -> PostProcessor:
    """The tokenizer's own post-processor; BERT's or RoBERTa's, by its special tokens, if it has none."""
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
    """Texts or pairs -> ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, at most ``max_length`` tokens; of RoBERTa
    ``<s> A </s>`` or ``<s> A </s></s> B </s>``.

    The longer text of a pair is cut first: as by ``longest_first`` of the library `tokenizers`, or with
    ``pair_truncation`` google as by ``_truncate_seq_pair`` of google-research/bert (run_classifier.py). ``tokenizer``
    stays as it is.

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
                segment_a_length = len(row) - sum(encoding.type_ids)
            ids.append(row)
            lengths.append(len(row))
            segment_a_lengths.append(segment_a_length)
    if max(lengths, default=0) > max_length:  # the library never cuts special tokens
        raise UserError(f"max_length is {max_length}, but the special tokens of a row are more: use a larger number")
    return TokenRows(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        segment_a_lengths=np.array(segment_a_lengths, np.int32),
        labels=labels,
        pad_token_id=special_ids(truncating).find("pad") or 0,
    )


def _google_row(
    tokenizer: Tokenizer, template: RowTemplate, pair: tuple[str, str], max_length: int
) -> tuple[np.ndarray, int]:
    """The row of a pair that fills it, and its tokens of type 0."""
    first, second = plain_ids(tokenizer, pair)
    kept = google_pair_lengths(len(first), len(second), template.room(max_length))
    from_end = truncation_side(tokenizer) == "left"
    first, second = (
        text[len(text) - count :] if from_end else text[:count]
        for text, count in zip((first, second), kept, strict=True)
    )
    return template.row(first, second), template.segment_a_length(*kept)


def google_pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that are left of two texts. While both do not fit, the longer loses one, of equals the second."""
    excess = max(first + second - room, 0)
    cut = min(excess, abs(first - second))  # until both are equal
    first, second = (first - cut, second) if first > second else (first, second - cut)
    excess -= cut
    return first - excess // 2, second - (excess + 1) // 2


def plain_ids(tokenizer: Tokenizer, texts: Sequence[str], literal: bool = False) -> list[np.ndarray]:
    """The int32 ids of each text alone, without special tokens around it.

    Args:
        tokenizer: stays as it is.
        texts: of any length.
        literal: whether the name of a special token in a text, such as "[SEP]", is ordinary characters.
    """
    untruncated = (
        prose_tokenizer(tokenizer)
        if literal
        else _truncating_tokenizer(tokenizer, NO_LIMIT, tokenizer.get_vocab_size())
    )
    return [np.array(encoding.ids, np.int32) for encoding in encode_batch(untruncated, texts, add_special_tokens=False)]


@lru_cache(maxsize=8)
def _truncating_tokenizer(tokenizer: Tokenizer, max_length: int, tokens: int) -> Tokenizer:
    """A copy that cuts and does not pad. Kept, since a copy of 30,000 tokens takes longer than a short answer should;
    ``tokens``, their number, is there to notice tokens that were added since."""
    copy = Tokenizer.from_str(tokenizer.to_str())  # truncation and padding are settings of the object itself
    copy.no_padding()
    copy.enable_truncation(max_length, strategy="longest_first", direction=truncation_side(tokenizer))
    copy.post_processor = post_processor(copy)
    return copy


def prose_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that neither cuts nor pads, to which "[SEP]" and its like in a text are ordinary characters; kept, too."""
    return _prose_tokenizer(tokenizer, tokenizer.get_vocab_size())[0]


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids [T] and the first and last characters [T, 2] int32 of each text's tokens, without special tokens.

    The library leaves the space in front of a word out of a byte-level token even if the pre-tokenizer has added that
    space, as RobBERT's does for each word: the token would begin one letter late. Here only spaces of the text are
    left out.
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
    while start < end and text[start] == " ":
        start += 1
    while start < end and text[end - 1] == " ":
        end -= 1
    return start, end


@lru_cache(maxsize=8)
def _prose_tokenizer(tokenizer: Tokenizer, tokens: int) -> tuple[Tokenizer, bool]:
    """The copy, and whether the original leaves spaces out of the characters that a token covers; the copy does not."""
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


def window_starts(tokens: int, room: int) -> np.ndarray:
    """[windows] first token of each: half of ``room`` apart, the last one as far to the right as it goes."""
    last = max(tokens - room, 0)
    return np.array([*range(0, last, max(room // 2, 1)), last])


def widest_windows(starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """[tokens] number of the window in which each token has most context, by run_squad.py's rule.

    That is the lesser of the numbers of tokens left and right of it, plus a hundredth of the window's length; the first
    of several with as much. Every token is in a window; time and memory are in proportion to the windows' tokens.
    """
    best_score = np.full(ends[-1], -1.0)
    widest = np.zeros(ends[-1], np.int64)
    for window, (start, end) in enumerate(zip(starts, ends, strict=True)):
        position = np.arange(end - start)
        score = np.minimum(position, position[::-1]) + 0.01 * (end - start)
        here = np.flatnonzero(score > best_score[start:end]) + start
        best_score[here], widest[here] = score[here - start], window
    return widest
