"""Makes windows over the contexts of questions, and decodes logits into the best answers.

Answers are character spans of the context. The tokenizer returns the characters of each token, so that answers are cut
from the context and not assembled from tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert.data.encoding import RowTemplate, encode_with_offsets, row_template, widest_windows
from bert.data.rows import TokenRows
from bert.errors import UserError, require
from bert.tokenizer.library import special_ids

ROWS_SCORED_AT_ONCE = 256
"""Number of windows whose spans are compared at once. The scores of all their spans occupy a few dozen MB."""


class Answer(NamedTuple):
    """A reference answer."""

    text: str
    start: int | None
    """First character in the context; None if the text is not at the position that the file states."""


@dataclass(frozen=True)
class Example:
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """The reference answers; () for impossible questions, and if the answers are unknown."""
    is_impossible: bool = False

    @property
    def answer(self) -> Answer | None:
        """The first reference answer with a position."""
        return next((answer for answer in self.answers if answer.start is not None), None)


@dataclass(frozen=True, kw_only=True)
class Windows(TokenRows):
    """R rows, each a question paired with a window of its context; the rows of a question are adjacent.

    Labels are [R, 2] int32: the positions in the row of the answer's first and last token, or of [CLS] twice if
    the answer is outside of the window. None if all answers are unknown.
    """

    examples: np.ndarray
    """[R] int32: index of the question of each row, ascending; every question has a row."""
    known: np.ndarray
    """[R] bool: whether the answer has a position, or the question is known to have no answer."""
    char_starts: np.ndarray
    """[tokens of all rows] int32: first character of the token in the context; -1 outside of the context."""
    char_ends: np.ndarray
    """[tokens of all rows] int32: one past the last character."""
    is_max_context: np.ndarray
    """[tokens of all rows] bool: whether this window has the most context around the token."""

    @property
    def input_numbers(self) -> np.ndarray:
        return self.examples

    @property
    def cls_columns(self) -> np.ndarray:
        """[R] int64: position of [CLS] in each row, the first token, or the last one in XLNet's rows."""
        return self.lengths - 1 if self.has_third_type else np.zeros(len(self), np.int64)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of `TokenRows.batch`, with weight 0 in the loss for rows with unknown answers."""
        batch = super().batch(rows, length, batch_size)
        batch["weights"][: len(rows)] = self.known[rows] if self.labels is not None else 1
        return batch


class Candidate(NamedTuple):
    """A candidate answer."""

    text: str
    start: int
    """First character in the context; -1 for no answer."""
    end: int
    """One past the last character."""
    probability: float
    """Softmax over the n-best list of the question."""
    start_logit: float
    end_logit: float


@dataclass(frozen=True)
class Answers:
    """Predicted answers by question id."""

    n_best: dict[str, list[Candidate]]
    """Unique candidates, best first, including the empty answer if questions may be impossible."""
    null_odds: dict[str, float] | None
    """Score of no answer minus the score of the best answer; None if every question has an answer."""
    null_score_diff_threshold: float | None = None
    """No answer is predicted if the odds are above this threshold."""
    null_scores: Mapping[str, float] = field(default_factory=dict)
    """Score of no answer: the minimum score of [CLS] over the windows."""

    def ranked(self, id: str) -> list[Candidate]:
        """Returns the candidates of a question, best first, with probabilities that always include no answer."""
        candidates = self.n_best[id]
        if self.null_odds is not None or id not in self.null_scores:
            return candidates
        scores = [candidate.start_logit + candidate.end_logit for candidate in candidates if candidate.text]
        if not scores:
            return candidates
        total = np.logaddexp.reduce([*scores, self.null_scores[id]])
        shares = np.exp(np.array(scores) - total).tolist()
        return [candidate._replace(probability=share) for candidate, share in zip(candidates, shares, strict=True)]

    @cached_property
    def best(self) -> dict[str, Candidate]:
        """The best answer with a text for each question; the empty answer for contexts without tokens."""
        return {
            id: next((candidate for candidate in candidates if candidate.text), candidates[0])
            for id, candidates in self.n_best.items()
        }

    @cached_property
    def texts(self) -> dict[str, str]:
        """The predicted answer of each question; "" for no answer."""
        texts = {id: candidate.text for id, candidate in self.best.items()}
        if self.null_odds is None:
            return texts
        threshold = require(self.null_score_diff_threshold, "the threshold of no answer")
        return {id: "" if self.null_odds[id] > threshold else text for id, text in texts.items()}


def make_qa_features(
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    max_length: int = 384,
    doc_stride: int = 128,
    max_query_length: int = 64,
) -> Windows:
    """Returns rows of at most ``max_length`` tokens, as in google-research/bert's run_squad.py.

    A longer context is split into windows that start ``doc_stride`` tokens apart. Labels are the tokens that share a
    character with the first reference answer that has a position. ``tokenizer`` does not change; "[SEP]" and other
    special tokens in texts are ordinary characters.

    Raises:
      UserError: a question of ``max_query_length`` tokens would leave no room for a context.
    """
    template = row_template(tokenizer, pair=True)
    if template.room(max_length) - max_query_length < 1:
        raise UserError(
            f"a question of {max_query_length} tokens leaves no room for its context in a row of {max_length}: "
            "raise data.max_length or lower data.max_query_length"
        )
    if doc_stride < 1:
        raise UserError(f"data.doc_stride is {doc_stride}: it must be at least 1")
    texts = list(dict.fromkeys(text for example in examples for text in (example.question, example.context)))
    tokens = dict(zip(texts, _tokenize(tokenizer, texts), strict=True))
    rows = [
        (index, row)
        for index, example in enumerate(examples)
        for row in _rows_of_question(
            tokens[example.question].ids[:max_query_length],
            tokens[example.context],
            example.answer,
            template,
            max_length,
            doc_stride,
        )
    ]
    known = np.array([example.is_impossible or example.answer is not None for example in examples], bool)
    example_of_row = np.array([index for index, _ in rows], np.int32)
    return Windows(
        ids=_join([row.ids for _, row in rows], np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(row.ids) for _, row in rows], dtype=np.int64)]),
        segment_a_lengths=np.array([row.segment_a_length for _, row in rows], np.int32),
        labels=np.array([row.answer for _, row in rows], np.int32).reshape(-1, 2) if known.any() else None,
        pad_token_id=special_ids(tokenizer).padding,
        has_third_type=template.has_third_type,
        examples=example_of_row,
        known=known[example_of_row],
        char_starts=_join([row.char_starts for _, row in rows], np.int32),
        char_ends=_join([row.char_ends for _, row in rows], np.int32),
        is_max_context=_join([row.is_max_context for _, row in rows], bool),
    )


class _Row(NamedTuple):
    """One row of `Windows`."""

    ids: np.ndarray
    char_starts: np.ndarray
    char_ends: np.ndarray
    is_max_context: np.ndarray
    segment_a_length: int
    answer: tuple[int, int]


def _rows_of_question(
    query: np.ndarray, context: _Tokens, answer: Answer | None, template: RowTemplate, max_length: int, doc_stride: int
) -> Iterator[_Row]:
    """Yields a row for each window over the context of a question."""
    before = np.concatenate([template.prefix, query, template.separator]).astype(np.int32)
    after = np.array(template.suffix, np.int32)
    answer_tokens = _answer_tokens(answer, context)
    starts, ends = _spans(len(context.ids), max_length - len(before) - len(after), doc_stride)
    widest = widest_windows(starts, ends)

    def framed(values: np.ndarray, fill: int) -> np.ndarray:
        """Returns the values of the window's tokens, with a fill value for the tokens around the window."""
        first, last = np.full(len(before), fill, values.dtype), np.full(len(after), fill, values.dtype)
        return np.concatenate([first, values, last])

    for window, (start, end) in enumerate(zip(starts, ends, strict=True)):
        cls_column = len(before) + end - start + len(after) - 1 if template.has_third_type else 0
        columns = (cls_column, cls_column)
        if answer_tokens is not None and start <= answer_tokens[0] and answer_tokens[1] < end:
            columns = (answer_tokens[0] - start + len(before), answer_tokens[1] - start + len(before))
        yield _Row(
            np.concatenate([before, context.ids[start:end], after]),
            framed(context.starts[start:end], -1),
            framed(context.ends[start:end], -1),
            framed(widest[start:end] == window, False),
            template.segment_a_length(len(query), end - start),
            columns,
        )


def decode_answers(
    examples: Sequence[Example],
    windows: Windows,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    null_score_diff_threshold: float | None = None,
) -> Answers:
    """Returns the best answers to each question over all of its windows.

    The score of a span is its start logit plus its end logit. It starts at a token for which its window has the most
    context, and has at most ``max_answer_length`` tokens. The candidates are the best spans: run_squad.py combines only
    the n best starts with the n best ends, and may miss the best span. Of spans with the same text, the best counts.

    Args:
      start_logits, end_logits: [R, T] for the rows of ``windows``, T at least the length of the longest row. Values
        beyond the tokens of a row are ignored.
      null_score_diff_threshold: set if questions may be impossible (v2.0): there is no answer if the score of [CLS]
        (start plus end, the minimum over the windows) exceeds the score of the best span by more than the threshold.
    """
    shape = (len(windows), max(int(windows.lengths.max(initial=0)), np.shape(start_logits)[-1]))
    if not np.shape(start_logits) == np.shape(end_logits) == shape:
        raise ValueError(f"logits {np.shape(start_logits)} and {np.shape(end_logits)}, expected {shape}")
    if not examples:
        return Answers({}, None if null_score_diff_threshold is None else {}, null_score_diff_threshold)
    rows, starts, ends, scores = _best_spans(windows, start_logits, end_logits, n_best_size, max_answer_length)
    order = np.lexsort((-scores, windows.examples[rows]))
    rows, starts, ends, scores = rows[order], starts[order], ends[order], scores[order]
    first_spans = np.searchsorted(windows.examples[rows], np.arange(len(examples) + 1)).tolist()
    char_starts = windows.char_starts[windows.offsets[rows] + starts].tolist()
    char_ends = windows.char_ends[windows.offsets[rows] + ends].tolist()
    span_logits = np.stack([start_logits[rows, starts], end_logits[rows, ends]], axis=-1).astype(np.float64).tolist()

    of_cls = np.arange(len(windows)), windows.cls_columns
    cls_logits = np.stack([start_logits[of_cls], end_logits[of_cls]], axis=-1).astype(np.float64)
    first_rows = np.searchsorted(windows.examples, np.arange(len(examples) + 1))
    lists: dict[str, list[Candidate]] = {}
    odds: dict[str, float] = {}
    null_scores: dict[str, float] = {}
    for index, example in enumerate(examples):
        spans_of_text: dict[str, tuple[int, int, float, float]] = {}
        for span in range(first_spans[index], first_spans[index + 1]):
            start, end = char_starts[span], char_ends[span]
            covered = example.context[start:end]
            text = covered.strip()  # in some vocabularies, tokens include the space before a word
            if text and len(spans_of_text) < n_best_size and text not in spans_of_text:
                start += len(covered) - len(covered.lstrip())
                spans_of_text[text] = (start, start + len(text), *span_logits[span])
        null = min(cls_logits[first_rows[index] : first_rows[index + 1]].tolist(), key=sum)
        null_scores[example.id] = sum(null)
        if null_score_diff_threshold is not None:
            odds[example.id] = sum(null) - max(
                (start + end for _, _, start, end in spans_of_text.values()), default=0.0
            )
            spans_of_text = dict(list(spans_of_text.items())[: max(n_best_size - 1, 1)])
            spans_of_text[""] = (-1, -1, *null)
        lists[example.id] = _rank_candidates(spans_of_text or {"": (-1, -1, 0.0, 0.0)})
    null_odds = None if null_score_diff_threshold is None else odds
    return Answers(lists, null_odds, null_score_diff_threshold, null_scores)


COMPOSED = frozenset(map(chr, (*range(0x1160, 0x1200), *range(0xD7B0, 0xD800), 0xFF9E, 0xFF9F)))
"""Vowels and endings of Korean syllables, and half-width marks of Japanese, which combine with the previous letter."""


class _Tokens(NamedTuple):
    """The tokens of a text and their characters, [tokens] int32 each."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def _tokenize(tokenizer: Tokenizer, texts: list[str]) -> Iterator[_Tokens]:
    for text, (ids, offsets) in zip(texts, encode_with_offsets(tokenizer, texts), strict=True):
        ends = offsets[:, 1].copy() if text.isascii() else _with_marks(text, offsets)
        yield _Tokens(ids, offsets[:, 0].copy(), ends)


def _with_marks(text: str, offsets: np.ndarray) -> np.ndarray:
    """Returns the ends of tokens, moved past combining characters that no token covers.

    Some normalizers remove marks. If they compose several characters, the library counts only the first one.
    """
    moved = []
    limits = np.append(offsets[1:, 0], len(text))[: len(offsets)]
    for end, limit in zip(offsets[:, 1].tolist(), limits.tolist(), strict=True):
        while end < limit and (unicodedata.category(text[end])[0] == "M" or text[end] in COMPOSED):
            end += 1
        moved.append(end)
    return np.array(moved, np.int32)


def _answer_tokens(answer: Answer | None, context: _Tokens) -> tuple[int, int] | None:
    """Returns the first and last token that share a character with the answer; None if there is no such token."""
    if answer is None:
        return None
    start = require(answer.start, "the answer's position")
    first = int(np.searchsorted(context.ends, start, side="right"))
    last = int(np.searchsorted(context.starts, start + len(answer.text), side="left")) - 1
    return (first, last) if first <= last else None


def _spans(tokens: int, room: int, stride: int) -> tuple[list[int], list[int]]:
    """Returns starts and ends of the windows over a context; one empty window without tokens."""
    starts = [0]
    while starts[-1] + room < tokens:
        starts.append(starts[-1] + min(room, stride))
    return starts, [min(start + room, tokens) for start in starts]


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _best_spans(
    windows: Windows, start_logits: np.ndarray, end_logits: np.ndarray, n_best_size: int, max_answer_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, first column, last column, score) of the n best spans of each row, or all if a row has fewer.

    The n best spans start at the n columns with the best spans: any other start has n better spans ahead of it.
    """
    blocks = []
    columns = np.arange(start_logits.shape[1])
    offsets, lengths = windows.offsets, windows.lengths
    kept_starts = min(n_best_size, len(columns))
    kept = min(n_best_size, kept_starts * max_answer_length)  # independent of the other rows of a batch
    for first in range(0, len(windows), ROWS_SCORED_AT_ONCE):
        rows = np.arange(first, min(first + ROWS_SCORED_AT_ONCE, len(windows)))
        real = columns < lengths[rows, None]
        tokens = (offsets[rows, None] + columns)[real]
        may_start, may_end = np.zeros(real.shape, bool), np.zeros(real.shape, bool)
        may_start[real], may_end[real] = windows.is_max_context[tokens], windows.char_starts[tokens] >= 0
        start = np.where(may_start, start_logits[rows].astype(np.float32), -np.inf)
        end = np.where(may_end, end_logits[rows].astype(np.float32), -np.inf)
        end = np.pad(end, ((0, 0), (0, max_answer_length - 1)), constant_values=-np.inf)
        ends = np.lib.stride_tricks.sliding_window_view(end, max_answer_length, axis=1)  # [rows, T, last - first]
        best_end = end[:, : len(columns)].copy()
        for later in range(1, max_answer_length):  # several times faster than a maximum over the strided view
            np.maximum(best_end, end[:, later : later + len(columns)], out=best_end)
        starts = np.argpartition(-(start + best_end), kept_starts - 1, axis=1)[:, :kept_starts]
        scores = np.take_along_axis(start, starts, axis=1)[:, :, None] + ends[np.arange(len(rows))[:, None], starts]
        scores = scores.reshape(len(rows), -1)
        best = np.argpartition(-scores, kept - 1, axis=1)[:, :kept]
        first_columns = np.take_along_axis(starts, best // max_answer_length, axis=1)
        scores = np.take_along_axis(scores, best, axis=1)
        spans = np.stack(
            [np.broadcast_to(rows[:, None], best.shape), first_columns, first_columns + best % max_answer_length]
        )
        possible = np.isfinite(scores)
        blocks.append((*spans[:, possible], scores[possible]))
    rows, firsts, lasts, scores = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return rows, firsts, lasts, scores


def _rank_candidates(spans_of_text: Mapping[str, tuple[int, int, float, float]]) -> list[Candidate]:
    """Returns the candidates, best first, with the softmax of their scores."""
    ranked = sorted(spans_of_text.items(), key=lambda item: -(item[1][2] + item[1][3]))
    scores = np.array([values[2] + values[3] for _, values in ranked])
    shares = np.exp(scores - scores.max())
    shares = (shares / shares.sum()).tolist()
    return [
        Candidate(text, start, end, share, start_logit, end_logit)
        for (text, (start, end, start_logit, end_logit)), share in zip(ranked, shares, strict=True)
    ]
