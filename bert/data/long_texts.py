"""Rows of texts that are longer than a row: cut, shortened to their head and tail, or read through windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.config.model import LongTextMode, PairTruncation
from bert.data.encoding import (
    ROWS_AT_ONCE,
    RowTemplate,
    google_pair_lengths,
    plain_ids,
    row_template,
    tokenize,
    window_starts,
)
from bert.data.inputs import Text
from bert.data.rows import ChoiceRows, QueryDocumentRows, TokenRows, number_texts
from bert.data.windows import TextWindows, WindowedRows
from bert.errors import UserError

LONG_TEXT_KEYS = ("long_texts", "max_train_windows", "doc_stride")
"""Keys of ``data`` that tasks with texts of any length read."""

UNCUT = 1 << 24
"""A ``max_length`` above the length of any text."""

HEAD, WHOLE = 128, 510
"""Tokens that are kept of the start of a text, and of the whole text, in a row of 512 tokens (Sun et al. 2019)."""


class LongTexts(NamedTuple):
    """How texts become rows of at most ``max_length`` tokens.

    Attributes:
        mode: see ``data.long_texts``.
        stride: tokens between the starts of two windows.
        max_train_windows: maximum number of windows of a text in a training batch.
    """

    max_length: int
    mode: LongTextMode = "cut"
    stride: int = TaskDataConfig.doc_stride
    max_train_windows: int = TaskDataConfig.max_train_windows

    @classmethod
    def from_config(cls, data: TaskDataConfig) -> LongTexts:
        """Returns the settings of a configuration."""
        return cls(data.max_length, data.long_texts, data.doc_stride, data.max_train_windows)


class CutTexts:
    """Counts the texts that are cut to ``data.max_length``.

    Attributes:
        count: number of cut texts.
        longest: length of the longest one in tokens, with special tokens.
    """

    def __init__(self) -> None:
        self.count, self.longest, self._limit = 0, 0, 0
        self._has_warned = False

    def add(self, tokenizer: Tokenizer, texts: Sequence[Text], rows: Any, data: TaskDataConfig) -> None:
        """Counts the cut texts among ``texts``, from which ``rows`` were made."""
        full = np.flatnonzero(np.asarray(rows.lengths) >= data.max_length)
        if data.long_texts != "cut" or not len(full):
            return
        lengths = tokenize(tokenizer, [texts[row] for row in full.tolist()], UNCUT).lengths
        self.count += int((lengths > data.max_length).sum())
        self.longest, self._limit = max(self.longest, int(lengths.max())), data.max_length

    def warn(self, warn: Callable[[str], None]) -> None:
        """Passes a sentence about the cut texts to ``warn``, once, if there are any."""
        if not self.count or self._has_warned:
            return
        self._has_warned = True
        texts = "1 text is" if self.count == 1 else f"{self.count:,} texts are"
        warn(
            f"{texts} cut to data.max_length ({self._limit} tokens), the longest of {self.longest:,} tokens: fine-tune "
            "with a larger data.max_length, or with data.long_texts windows, to read all of a text"
        )


def with_long_texts(data: TaskDataConfig, mode: str | None, task: Any = None) -> TaskDataConfig:
    """Returns the configuration with another way to read long texts; None keeps it.

    Raises:
        UserError: the mode is unknown, or ``task`` (`bert.tasks.base.Task`) does not read ``data.long_texts``.
    """
    if mode is None:
        return data
    if mode not in get_args(LongTextMode):
        raise UserError(f"long_texts is {mode!r}: pass {', '.join(get_args(LongTextMode))}, or None")
    if task is not None and "long_texts" not in task.data_keys:
        raise UserError(f"long_texts is for tasks that classify or score texts, but the task is {task.name}: remove it")
    return dataclasses.replace(data, long_texts=mode)  # type: ignore[arg-type]


class _Row(NamedTuple):
    """The ids of a row, and its number of tokens of type 0."""

    ids: np.ndarray
    segment_a_length: int


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    settings: LongTexts,
    labels: np.ndarray | None = None,
    pair_truncation: PairTruncation | None = None,
) -> TokenRows | WindowedRows:
    """Encodes texts or pairs of texts as rows. Texts that fit a row have the same row in all modes.

    - ``cut``: `bert.data.encoding.tokenize`.
    - ``head_tail``: the same number of tokens of each text as with ``cut``. Of n tokens, n * 128 / 510 (rounded)
      are the first tokens of the text, and the others the last ones.
    - ``windows`` and ``windows_max``: windows that start ``stride`` tokens apart; the last one ends with the text. Of a
      pair, the text with more tokens is read through windows (of equal ones, the second). Each window has the first
      tokens of the other text, at most half a row. Outputs are averaged, or their maximum is used.

    ``tokenizer`` is not changed.

    Raises:
        UserError: the maximum length has no room for the special tokens, or the tokenizer fails on a text.
    """
    rows = tokenize(tokenizer, texts, settings.max_length, labels, pair_truncation)
    full = np.flatnonzero(rows.lengths == settings.max_length)
    if settings.mode == "cut" or not len(full):
        return rows
    if settings.mode == "head_tail":
        ids = rows.ids.copy()
        for row, first, second, template in _whole_texts(tokenizer, texts, full):
            kept = _pair_lengths(len(first), len(second), template.room(settings.max_length), pair_truncation)
            ends = (_head_and_tail(text, count) for text, count in zip((first, second), kept, strict=True))
            ids[rows.offsets[row] : rows.offsets[row + 1]] = template.row(*ends)
        return dataclasses.replace(rows, ids=ids)
    windows = {
        row: list(_windows(first, second, template, settings))
        for row, first, second, template in _whole_texts(tokenizer, texts, full)
    }
    return _with_windows(rows, windows, settings)


def _whole_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], rows: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray, RowTemplate]]:
    """Yields (row, ids of its text or first text, ids of its second text, template) for some rows."""
    none = np.zeros(0, np.int32)
    pairs = {isinstance(texts[row], tuple) for row in rows.tolist()}
    templates = {pair: row_template(tokenizer, pair) for pair in pairs}
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE].tolist()
        sides = [[texts[row]] if isinstance(texts[row], str) else list(texts[row]) for row in some]
        ids = iter(plain_ids(tokenizer, [text for side in sides for text in side]))
        for row, side in zip(some, sides, strict=True):
            first, second = next(ids), next(ids) if len(side) == 2 else none
            yield row, first, second, templates[len(side) == 2]


def _pair_lengths(first: int, second: int, room: int, rule: PairTruncation | None) -> tuple[int, int]:
    """Returns the numbers of tokens that ``cut`` keeps of two texts; of a single text, ``second`` is 0."""
    if first + second <= room:
        return first, second
    if rule == "google":
        return google_pair_lengths(first, second, room)
    shorter = min(first, second, room // 2)
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)


def head_length(count: int) -> int:
    """Returns how many of ``count`` kept tokens are the first ones of a text: 128 of 510, or in that proportion."""
    return (2 * count * HEAD + WHOLE) // (2 * WHOLE)


def _head_and_tail(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns ``count`` tokens of a text: the first ones and the last ones."""
    if len(ids) <= count:
        return ids
    head = head_length(count)
    return np.concatenate([ids[:head], ids[len(ids) - (count - head) :]])


def _windows(first: np.ndarray, second: np.ndarray, template: RowTemplate, settings: LongTexts) -> Iterator[_Row]:
    room = template.room(settings.max_length)
    splits_first = len(first) > len(second)
    long, other = (first, second) if splits_first else (second, first)
    other = other[: room // 2] if len(first) + len(second) > room else other
    size = room - len(other)
    for start in window_starts(len(long), size, settings.stride):
        part = long[start : start + size]
        sides = (part, other) if splits_first else (other, part)
        yield _Row(template.row(*sides), template.segment_a_length(len(sides[0]), len(sides[1])))


def _with_windows(rows: TokenRows, windows: dict[int, list[_Row]], settings: LongTexts) -> TokenRows | WindowedRows:
    """Returns the rows with some of them replaced by windows; unchanged if no text has several windows."""
    counts = np.ones(len(rows), np.int64)
    counts[list(windows)] = [len(parts) for parts in windows.values()]
    if not len(counts) or counts.max() == 1:
        return rows
    ids: list[np.ndarray] = []
    segment_a_lengths: list[int] = []
    for row, (start, end) in enumerate(zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True)):
        parts = windows.get(row) or [_Row(rows.ids[start:end], int(rows.segment_a_lengths[row]))]
        ids += [part.ids for part in parts]
        segment_a_lengths += [part.segment_a_length for part in parts]
    flat = TextWindows(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(list(map(len, ids)), dtype=np.int64)]),
        segment_a_lengths=np.array(segment_a_lengths, np.int32),
        labels=None,
        pad_token_id=rows.pad_token_id,
        has_third_type=rows.has_third_type,
        texts=np.repeat(np.arange(len(rows)), counts),
    )
    ends = np.cumsum(counts)
    maximum = settings.mode == "windows_max"
    return WindowedRows(flat, np.concatenate([[0], ends]), rows.labels, settings.max_train_windows, maximum)


def tokenize_queries(
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[Sequence[str]],
    scores: np.ndarray | None,
    settings: LongTexts,
    has_loss: bool = True,
) -> QueryDocumentRows:
    """Encodes queries and their documents as rows.

    Args:
      documents: one or more documents for each of R queries.
      scores: [R] float32, or None.
    """
    flat = [text for texts in documents for text in texts]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    rows = encode_texts(tokenizer, queries, settings, scores)
    return QueryDocumentRows(
        rows,
        ChoiceRows(encode_texts(tokenizer, flat, settings), offsets, None),
        number_texts(queries),
        number_texts(flat),
        has_loss,
    )
