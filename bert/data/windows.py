"""Long inputs, read whole: as parts that overlap and fit a row each, with one answer from what is said of the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from bert.data.features import prose_tokenizer, tokenize

if TYPE_CHECKING:
    from bert.data.tasks.task import Rows

UNCUT = 2**30
"""More tokens than any text has."""

Text = str | tuple[str, str]


@dataclass(frozen=True)
class Parts:
    """R rows, some of which are parts of one input; those follow each other. Without labels."""

    rows: Rows
    """The rows, or rows of choices: what has lengths, batches and a digest."""
    inputs: np.ndarray
    """[R] int32: number of the input that the row is a part of; every input has a row."""
    labels: None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return self.rows.lengths

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """As those of ``rows``."""
        return self.rows.batch(rows, length, batch_size)

    def digest(self) -> str:
        """Of the tokens."""
        return self.rows.digest()


def mean_of_parts(outputs: Sequence[np.ndarray], rows: object) -> Sequence[np.ndarray]:
    """The mean output of each input's parts, where ``rows`` are `Parts`; else the outputs as they are."""
    if not isinstance(rows, Parts) or len(rows) == 0:
        return outputs
    firsts = np.flatnonzero(np.diff(rows.inputs, prepend=-1))
    return [np.mean(part, axis=0) for part in np.split(np.stack(outputs), firsts[1:])]


def tokenize_whole(tokenizer: Tokenizer, texts: Sequence[Text], max_length: int) -> Parts:
    """Texts or pairs -> rows as `bert.data.features.tokenize` makes them, several for one that does not fit a row.

    Of a pair the longer text is read in parts, each beside the other text, which takes at most half of the row.
    """
    rows = tokenize(tokenizer, texts, UNCUT)
    if rows.lengths.max(initial=0) <= max_length:
        return Parts(rows, np.arange(len(texts), dtype=np.int32))
    split = parts_of_each(texts, (rows.lengths > max_length).tolist(), partial(_parts, tokenizer, max_length))
    return Parts(tokenize(tokenizer, [part for part, _ in split], max_length), _numbers(split))


def parts_of_each(
    inputs: Sequence[Text], is_long: Sequence[bool], parts: Callable[[Text], Iterable[Text]]
) -> list[tuple[Text, int]]:
    """Every part of every input, with the input's number; one that is not long is its only part."""
    return [
        (part, number)
        for number, (given, long) in enumerate(zip(inputs, is_long, strict=True))
        for part in (parts(given) if long else [given])
    ]


def split_text(tokenizer: Tokenizer, text: str, room: int) -> list[str]:
    """Parts of a text of at most ``room`` tokens each, which overlap by half; cut between words where these fit."""
    encoding = prose_tokenizer(tokenizer).encode(text, add_special_tokens=False)
    tokens = len(encoding.ids)
    if tokens <= room:
        return [text]
    words, places = encoding.word_ids, encoding.offsets
    begins = [0, *(place for place in range(1, tokens) if words[place] != words[place - 1]), tokens]
    found = []
    for start in window_starts(tokens, room).tolist():
        end = start + room
        first = next(place for place in begins if place >= start)
        last = next(place for place in reversed(begins) if place <= end)
        first, last = (first, last) if first < last else (start, end)  # one word alone is longer
        found.append(text[places[first][0] : places[last - 1][1]])
    return found


def window_starts(tokens: int, room: int) -> np.ndarray:
    """[windows] first token of each: half of ``room`` apart, the last one as far to the right as it goes."""
    last = max(tokens - room, 0)
    return np.array([*range(0, last, max(room // 2, 1)), last])


def _parts(tokenizer: Tokenizer, max_length: int, text: Text) -> Iterator[Text]:
    if isinstance(text, str):
        yield from split_text(tokenizer, text, max_length - 2)
        return
    room = max_length - 3
    count = [len(prose_tokenizer(tokenizer).encode(side, add_special_tokens=False).ids) for side in text]
    short = 0 if count[0] <= count[1] else 1
    beside = split_text(tokenizer, text[short], room // 2)[0]
    for part in split_text(tokenizer, text[1 - short], room - min(count[short], room // 2)):
        yield (beside, part) if short == 0 else (part, beside)


def _numbers(split: Sequence[tuple[Text, int]]) -> np.ndarray:
    return np.array([number for _, number in split], np.int32)
