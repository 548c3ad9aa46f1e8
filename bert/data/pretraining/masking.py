"""80/10/10 masking: a pure, vectorised function of tokens and random words. NumPy only.

Devlin et al. 2018, section 3.1 and appendix A.1: 15% of the tokens are chosen for prediction; of these 80% become
[MASK], 10% a random token and 10% stay. The random words come from a counter-based generator addressed by
(seed, step, row), so that any process can draw any row without drawing those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer, UInt32, UInt64

from bert.data.pretraining.input_formats import NEXT_ID
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.errors import UserError

_PHILOX_WORDS = 4  # 64-bit words that one step of Philox's counter yields


class Predictions(Protocol):
    """Which tokens of rows are predicted, and what the model reads in their place.

    A row takes a fixed number of random words, so that any process can draw any row.
    """

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """64-bit random words that a row of T tokens, of so many packed examples, takes."""
        ...

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        """``input_ids`` [B, T] as the model reads them, and the arrays that say what is predicted.

        Args:
            rows: columns of `bert.data.pretraining.dataset.ShardReader.take`.
            words: [B, uint64s_per_row(T, K)] uint64, uniformly distributed.
        """
        ...


@dataclass(frozen=True)
class NextTokens:
    """Every token is predicted from those before it in its row, or in its example of a packed row.

    The first token of a row is predicted by the row before it, if there is one, as in blocks.
    """

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """None: nothing is drawn."""
        del sequence_length, examples
        return 0

    def batch_arrays(
        self, rows: dict[str, np.ndarray], words: UInt64[np.ndarray, "B 0"]
    ) -> dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]]:
        """Labels are the tokens, shifted by one.

        Returns:
            ``input_ids`` [B, T] int32; ``next_token_ids`` [B, T] int32, 0 where there is no next token;
            ``next_token_weights`` [B, T] float32, 1 where there is one and 0 elsewhere.
        """
        del words
        ids = rows["input_ids"].astype(np.int32)
        following = rows[NEXT_ID] if NEXT_ID in rows else np.full(len(ids), -1, np.int32)
        ends = np.cumsum(rows.get(EXAMPLE_LENGTH, rows["length"][:, None]), axis=1)
        places = np.arange(ids.shape[1])
        is_last = (places[:-1] == ends[:, :, None] - 1).any(axis=1)
        labels = np.concatenate([np.where(is_last, -1, ids[:, 1:]), following[:, None]], axis=1)
        weights = (places < rows["length"][:, None]) & (labels >= 0)
        return {
            "input_ids": ids,
            "next_token_ids": np.where(weights, labels, 0).astype(np.int32),
            "next_token_weights": weights.astype(np.float32),
        }


@dataclass(frozen=True)
class Masking:
    """What masking needs to know of the vocabulary, and its rates.

    Attributes:
        vocab_size: number of tokens V.
        mask_id: id of [MASK].
        special_ids: ids that are never chosen and never put in (all special tokens, padding among them).
        max_predictions: P, most predictions a row; in packed rows, an example.
        prob: share of a row's (an example's) maskable tokens that is predicted.
        mask_share: share of these that become [MASK].
        random_share: share of these that become a random token; the rest stay.
        continuing_ids: ids of tokens that continue a word. Where there are any, words are masked whole or not at all;
            where there are none, tokens are chosen one by one.
        maskable: [V] booleans, tokens that may be chosen.
        continuing: [V] booleans, tokens that continue a word.
        ordinary_ids: int32 ids that may be put in.
        predictions_of: maskable tokens of a row (an example) -> how many of them are predicted.
        predictions_per_row: `_predictions_per_row`, remembered.

    Raises:
        UserError: nothing in the vocabulary can be predicted.
    """

    vocab_size: int
    mask_id: int
    special_ids: Sequence[int]
    max_predictions: int
    prob: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    continuing_ids: Sequence[int] = ()
    maskable: np.ndarray = field(init=False, repr=False, compare=False)
    continuing: np.ndarray = field(init=False, repr=False, compare=False)
    ordinary_ids: np.ndarray = field(init=False, repr=False, compare=False)
    predictions_of: np.ndarray = field(init=False, repr=False, compare=False)
    predictions_per_row: Callable[..., int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        maskable = np.ones(self.vocab_size, dtype=bool)
        maskable[list(self.special_ids)] = False
        if not maskable.any():
            raise UserError("the vocabulary holds special tokens only: give one with tokens to predict")
        continuing = np.zeros(self.vocab_size, dtype=bool)
        continuing[list(self.continuing_ids)] = True
        object.__setattr__(self, "maskable", maskable)
        object.__setattr__(self, "continuing", continuing)
        object.__setattr__(self, "ordinary_ids", np.flatnonzero(maskable).astype(np.int32))
        lengths = np.arange(2**16 + 1)
        num_predictions = np.floor(lengths * self.prob + 0.5).astype(np.int64)  # half up: never NumPy's half to even
        num_predictions[1:] = np.clip(num_predictions[1:], 1, self.max_predictions)
        object.__setattr__(self, "predictions_of", num_predictions)
        object.__setattr__(self, "predictions_per_row", lru_cache(self._predictions_per_row))

    def _predictions_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """P of rows of T tokens: ``max_predictions``, or, in packed rows, the most that so many examples come to.

        No packed row can want more, so that none loses a prediction. An example has two special tokens at least.
        """
        if examples == 1:
            return self.max_predictions
        alone = self.predictions_of[np.maximum(np.arange(sequence_length + 1) - 2, 0)]
        together = alone
        for _ in range(examples - 1):  # one example more, of every length that the others leave
            sums = (together[: room + 1] + alone[room::-1] for room in range(sequence_length + 1))
            together = np.array([predictions.max() for predictions in sums])
        return int(together[-1])

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """64-bit random words a row of T tokens takes: fixed, and a multiple of Philox's block."""
        halves = sequence_length + 2 * self.predictions_per_row(sequence_length, examples)
        return -(-halves // (2 * _PHILOX_WORDS)) * _PHILOX_WORDS

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        """The same of rows, as `bert.data.pretraining.masking.Predictions` has it."""
        return self(rows["input_ids"], words, rows.get(EXAMPLE_LENGTH))

    def __call__(
        self,
        input_ids: Integer[np.ndarray, "B T"],
        words: UInt64[np.ndarray, "B words"],
        example_length: Integer[np.ndarray, "B K"] | None = None,
    ) -> dict[str, Int32[np.ndarray, "B T"] | Int32[np.ndarray, "B P"] | Float32[np.ndarray, "B P"]]:
        """Chooses and corrupts tokens.

        Args:
            input_ids: [B, T] integers; positions that hold a special id are never chosen.
            words: [B, uint64s_per_row(T, K)] uint64, uniformly distributed.
            example_length: [B, K] tokens of each example of packed rows, one after the other: each is masked as a row
                of its own, by the draws at its own places.

        Returns:
            ``input_ids`` [B, T] int32 after corruption; ``masked_lm_positions`` [B, P] int32, ascending, 0 where
            unused; ``masked_lm_ids`` [B, P] int32, the original tokens; ``masked_lm_weights`` [B, P] float32, 1 for
            a prediction and 0 for an unused place.
        """
        length = input_ids.shape[1]
        width = self.predictions_per_row(length, 1 if example_length is None else example_length.shape[1])
        count = min(width, length)
        draws = words.view(np.uint32)
        if example_length is None:
            positions, used = self._choose_positions(input_ids, draws[:, :length])
        else:
            positions, used = self._choose_in_examples(input_ids, draws[:, :length], example_length, count)
        flat_positions = positions + np.arange(len(input_ids), dtype=np.int32)[:, None] * np.int32(length)
        original = input_ids.take(flat_positions).astype(np.int32)

        fate = draws[:, length : length + count]
        corrupted = np.where(fate < _share(self.mask_share), np.int32(self.mask_id), original)
        if self.random_share:
            choice = draws[:, length + width : length + width + count].astype(np.uint64)
            random_ids = self.ordinary_ids.take((choice * np.uint64(len(self.ordinary_ids))) >> np.uint64(32))
            corrupted = np.where(fate >= _share(1 - self.random_share), random_ids, corrupted)
        output = input_ids.astype(np.int32, order="C")
        output.reshape(-1)[flat_positions[used]] = corrupted[used]

        predicted = {
            "masked_lm_positions": positions,
            "masked_lm_ids": np.where(used, original, 0).astype(np.int32),
            "masked_lm_weights": used.astype(np.float32),
        }
        if count < width:
            predicted = {name: np.pad(value, ((0, 0), (0, width - count))) for name, value in predicted.items()}
        return {
            "input_ids": output,
            **predicted,
            **self._draw_more(draws[:, length + width : length + 2 * width]),
        }

    def _draw_more(self, draws: UInt32[np.ndarray, "B P"]) -> dict[str, Float32[np.ndarray, "B P"]]:
        """Arrays of the batch besides those of ``__call__``, by the second draw of each predicted token."""
        return {}

    def _choose_positions(
        self, input_ids: Integer[np.ndarray, "B T"], draws: UInt32[np.ndarray, "B T"]
    ) -> tuple[Int32[np.ndarray, "B count"], Bool[np.ndarray, "B count"]]:
        """Positions [B, min(P, T)], ascending and 0 where unused, and which of them are used, by draws [B, T]."""
        count = min(self.max_predictions, input_ids.shape[1])
        maskable = self.maskable.take(input_ids)
        num_predictions = self.predictions_of[np.count_nonzero(maskable, axis=1)]
        if len(self.continuing_ids):
            return self._whole_words(input_ids, maskable, num_predictions, draws, count)
        return self._single_tokens(maskable, num_predictions, draws, count)

    def _choose_in_examples(
        self,
        input_ids: Integer[np.ndarray, "B T"],
        draws: UInt32[np.ndarray, "B T"],
        example_length: Integer[np.ndarray, "B K"],
        count: int,
    ) -> tuple[Int32[np.ndarray, "B {count}"], Bool[np.ndarray, "B {count}"]]:
        """As ``_choose_positions``, [B, count], of packed rows: each example is laid out as a row, and put back."""
        row, index = np.nonzero(example_length)
        start = (np.cumsum(example_length, axis=1) - example_length)[row, index, None]
        length = example_length[row, index, None]
        within = np.arange(length.max(initial=1))
        here = within < length
        columns = np.where(here, start + within, 0)
        apart = np.where(here, input_ids[row[:, None], columns], self.special_ids[0])
        positions, used = self._choose_positions(apart, draws[row[:, None], columns])
        example = np.nonzero(used)[0]
        counts = np.bincount(row[example], minlength=len(input_ids))
        together = np.zeros((len(input_ids), count), np.int32)
        filled = np.arange(count) < counts[:, None]
        together[filled] = (positions + start)[used]  # examples ascend in a row, and their positions in them
        return together, filled

    @staticmethod
    def _single_tokens(
        maskable: Bool[np.ndarray, "B T"],
        num_predictions: Integer[np.ndarray, " B"],
        draws: UInt32[np.ndarray, "B T"],
        count: int,
    ) -> tuple[Int32[np.ndarray, "B {count}"], Bool[np.ndarray, "B {count}"]]:
        """Positions [B, count], ascending and 0 where unused, and which are used: ``num_predictions`` [B] per row."""
        length = maskable.shape[1]
        # One sortable key a token: 32 random bits above its position, so keys never tie. Tokens that may not be
        # chosen get the largest keys; the `wanted` smallest of a row are its choice.
        keys = draws.astype(np.uint64)
        keys <<= np.uint64(16)
        keys |= np.arange(length, dtype=np.uint64)
        keys[~maskable] = np.uint64(2**64 - 1)
        smallest = np.partition(keys, count - 1, axis=1)[:, :count] if count < length else keys
        smallest = np.sort(smallest, axis=1)
        used = np.arange(count) < num_predictions[:, None]
        positions = np.where(used, smallest & np.uint64(0xFFFF), np.uint64(0xFFFF)).astype(np.int32)
        positions.sort(axis=1)
        positions[~used] = 0
        return positions, used

    def _whole_words(
        self,
        input_ids: Integer[np.ndarray, "B T"],
        maskable: Bool[np.ndarray, "B T"],
        num_predictions: Integer[np.ndarray, " B"],
        draws: UInt32[np.ndarray, "B T"],
        count: int,
    ) -> tuple[Int32[np.ndarray, "B {count}"], Bool[np.ndarray, "B {count}"]]:
        """Like ``_single_tokens``, but takes whole words in random order, at most ``num_predictions`` tokens in all.

        A word is a token and those that continue it; one that truncation left without its beginning starts where the
        row has it. As in google-research/bert ``create_masked_lm_predictions`` a word that is too long is passed over,
        and each token of a chosen word is replaced by its own draw.
        """
        rows, length = input_ids.shape
        starts = ~(maskable & self.continuing.take(input_ids))
        starts[:, 1:] |= ~maskable[:, :-1]
        starts[:, 0] = True
        flat = np.flatnonzero(starts)
        keys = np.empty(rows * length, np.uint64)
        keys[flat] = np.diff(flat, append=rows * length).view(np.uint64)
        # One sortable key a word, at its start: 32 random bits, its position, its size.
        keys = keys.reshape(rows, length)
        keys |= np.arange(length, dtype=np.uint64) << np.uint64(16)
        keys |= draws.astype(np.uint64) << np.uint64(32)
        starts &= maskable
        keys = np.where(starts, keys, np.uint64(2**64 - 1))
        max_words = int(np.count_nonzero(starts, axis=1).max(initial=0))
        keys = np.sort(keys, axis=1)[:, :max_words].T
        sizes = (keys & np.uint64(0xFFFF)).astype(np.int32)  # 65535 where a row has no more words
        left, taken, turns = num_predictions.astype(np.int32), np.empty((max_words, rows), bool), 0
        while turns < max_words and (turns % 8 or left.any()):
            np.less_equal(sizes[turns], left, out=taken[turns])
            left -= sizes[turns] * taken[turns]
            turns += 1
        turn, row = np.nonzero(taken[:turns])
        size = sizes[turn, row]
        first = row * length + (keys[turn, row] >> np.uint64(16) & np.uint64(0xFFFF)).astype(np.int64)
        tokens = (np.repeat(first - np.cumsum(size) + size, size) + np.arange(size.sum())).astype(np.int32)
        used = np.arange(count) < (num_predictions - left)[:, None]
        positions = np.zeros((rows, count), np.int32)
        positions[used] = np.sort(tokens) % np.int32(length)
        return positions, used


@dataclass(frozen=True)
class SamplingMasking(Masking):
    """Masking for a generator whose samples take the place of the predicted tokens.

    85% of these become [MASK], none a random token (google-research/electra pretrain/pretrain_helpers.py, mask). The
    batch has one array more: ``sample_uniforms`` [B, P] float32 in [0, 1), the random numbers of the samples.
    """

    mask_share: float = 0.85
    random_share: float = 0.0

    def _draw_more(self, draws: UInt32[np.ndarray, "B P"]) -> dict[str, Float32[np.ndarray, "B P"]]:
        return {"sample_uniforms": (draws >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)}


@dataclass(frozen=True)
class PermutedMasking(Masking):
    """Masking for tokens that are predicted one after the other, in a random order.

    ``input_ids`` are the tokens as they are, and the places [B, P] of the predicted ones stand in the order of their
    prediction. The batch has one array more: ``query_ids`` [B, P] int32, [MASK].
    """

    mask_share: float = 0.0
    random_share: float = 0.0

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        batch = super().batch_arrays(rows, words)
        length, count = rows["input_ids"].shape[1], batch["masked_lm_ids"].shape[1]
        draws = words.view(np.uint32)[:, length : length + count].astype(np.uint64)
        draws[batch["masked_lm_weights"] == 0] = np.uint64(2**32)  # behind all predictions
        order = np.argsort(draws, axis=1, kind="stable")
        predicted = {name: x for name, x in batch.items() if name.startswith("masked_lm_")}
        return {
            **batch,
            **{name: np.take_along_axis(x, order, axis=1) for name, x in predicted.items()},
            "query_ids": np.full(order.shape, self.mask_id, np.int32),
        }


MASKINGS: dict[str, type[Masking]] = {"mlm": Masking, "rtd": SamplingMasking, "plm": PermutedMasking}
"""Maskings by training.objective; clm masks nothing."""


def philox_uint64(
    key: tuple[int, int], first_row: int, rows: int, words_per_row: int
) -> UInt64[np.ndarray, "{rows} {words_per_row}"]:
    """[rows, words_per_row] uint64 from the Philox stream of ``key`` = (seed, step), starting at ``first_row``.

    Rows first_row .. first_row + rows - 1 get the same words in any process and after any other rows.
    """
    stream = np.random.Philox(key=np.array(key, dtype=np.uint64))
    stream.advance(first_row * words_per_row // _PHILOX_WORDS)
    return stream.random_raw(rows * words_per_row).reshape(rows, words_per_row)


def philox_uint64_of_rows(
    key: tuple[int, int], rows: Integer[np.ndarray, " B"], words_per_row: int
) -> UInt64[np.ndarray, "B {words_per_row}"]:
    """[B, words_per_row] uint64: the words that `philox_uint64` has for these rows [B], in any order."""
    stream = np.random.Philox(key=np.array(key, dtype=np.uint64))
    words = np.empty((len(rows), words_per_row), np.uint64)
    after = 0
    for index, row in enumerate(rows.tolist()):
        stream.advance((row - after) * words_per_row // _PHILOX_WORDS)  # from behind the row before; also backwards
        words[index] = stream.random_raw(words_per_row)
        after = row + 1
    return words


def _share(fraction: float) -> np.uint32:
    return np.uint32(round(fraction * 2**32))
