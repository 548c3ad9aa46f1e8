"""Selects the tokens that pretraining predicts: 80/10/10 masking and its variants, or the next token.

Masking is a pure, vectorized function of tokens and random words that uses only NumPy. Devlin et al. 2018, section 3.1
and appendix A.1: 15% of the tokens are chosen for prediction; of these 80% become [MASK], 10% a random token, and 10%
stay. The random words come from a counter-based generator addressed by (seed, step, row), so that any process can draw
any row directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer, UInt32, UInt64

from bert.config.data import REPLACEMENTS
from bert.data.pretraining.input_formats import NEXT_ID
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.errors import UserError

_PHILOX_WORDS = 4  # 64-bit words that one step of Philox's counter yields


class Predictions(Protocol):
    """Selects the predicted tokens of rows and makes the model's input. Every row uses the same number of words.

    Attributes:
        third_type_id: id of a token with type 2, XLNet's <cls>; None if there are only types 0 and 1.
    """

    @property
    def third_type_id(self) -> int | None: ...

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """Returns the 64-bit random words per row of T tokens with up to ``examples`` packed examples."""
        ...

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        """Returns the model's ``input_ids`` [B, T] and the arrays of the predictions.

        Args:
            rows: columns of `bert.data.pretraining.dataset.ShardReader.take`.
            words: [B, uint64s_per_row(T, K)] uint64, uniformly distributed.
        """
        ...


@dataclass(frozen=True)
class NextTokens:
    """Predicts every token from the tokens before it in its row, or in its example of a packed row.

    In blocks, the last token of a row predicts the first token of the next row.
    """

    third_type_id: int | None = None

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """Returns 0: nothing is drawn."""
        del sequence_length, examples
        return 0

    def batch_arrays(
        self, rows: dict[str, np.ndarray], words: UInt64[np.ndarray, "B 0"]
    ) -> dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]]:
        """Returns the tokens, and as labels the tokens shifted by one.

        Returns:
            ``input_ids`` [B, T] int32; ``next_token_ids`` [B, T] int32, 0 where there is no next token;
            ``next_token_weights`` [B, T] float32, 1 where there is one and 0 elsewhere.
        """
        del words
        ids = rows["input_ids"].astype(np.int32)
        following = rows[NEXT_ID] if NEXT_ID in rows else np.full(len(ids), -1, np.int32)
        ends = np.cumsum(rows.get(EXAMPLE_LENGTH, rows["length"][:, None]), axis=1)
        positions = np.arange(ids.shape[1])
        is_last = (positions[:-1] == ends[:, :, None] - 1).any(axis=1)
        labels = np.concatenate([np.where(is_last, -1, ids[:, 1:]), following[:, None]], axis=1)
        weights = (positions < rows["length"][:, None]) & (labels >= 0)
        return {
            "input_ids": ids,
            "next_token_ids": np.where(weights, labels, 0).astype(np.int32),
            "next_token_weights": weights.astype(np.float32),
        }


@dataclass(frozen=True)
class Masking:
    """Masking with the token ids of a vocabulary.

    Attributes:
        vocab_size: number of tokens V.
        mask_id: id of [MASK].
        special_ids: ids that are never chosen or inserted: all special tokens, including padding.
        max_predictions: P, maximum predictions per row, or per example of packed rows.
        prob: share of the maskable tokens of a row (an example) that is predicted.
        mask_share: share of the predicted tokens that become [MASK].
        random_share: share of the predicted tokens that become a random token; the rest stay.
        continuing_ids: ids of tokens that continue a word. If there are any, whole words are masked.
        third_type_id: see `Predictions`.
        maskable: [V] bool, tokens that may be chosen.
        continuing: [V] bool, tokens that continue a word.
        ordinary_ids: int32 ids that may be inserted.
        predictions_of: maskable tokens of a row (an example) -> number of predictions.
        predictions_per_row: `_predictions_per_row`, cached.

    Raises:
        UserError: the vocabulary has only special tokens.
    """

    vocab_size: int
    mask_id: int
    special_ids: Sequence[int]
    max_predictions: int
    prob: float = 0.15
    mask_share: float = REPLACEMENTS["mlm"][0]
    random_share: float = REPLACEMENTS["mlm"][1]
    continuing_ids: Sequence[int] = ()
    third_type_id: int | None = None
    maskable: np.ndarray = field(init=False, repr=False, compare=False)
    continuing: np.ndarray = field(init=False, repr=False, compare=False)
    ordinary_ids: np.ndarray = field(init=False, repr=False, compare=False)
    predictions_of: np.ndarray = field(init=False, repr=False, compare=False)
    predictions_per_row: Callable[..., int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        maskable = np.ones(self.vocab_size, dtype=bool)
        maskable[list(self.special_ids)] = False
        if not maskable.any():
            raise UserError("the vocabulary has only special tokens: use one with tokens to predict")
        continuing = np.zeros(self.vocab_size, dtype=bool)
        continuing[list(self.continuing_ids)] = True
        object.__setattr__(self, "maskable", maskable)
        object.__setattr__(self, "continuing", continuing)
        object.__setattr__(self, "ordinary_ids", np.flatnonzero(maskable).astype(np.int32))
        lengths = np.arange(2**16 + 1)
        num_predictions = np.floor(lengths * self.prob + 0.5).astype(np.int64)  # half up, unlike NumPy's half to even
        num_predictions[1:] = np.clip(num_predictions[1:], 1, self.max_predictions)
        object.__setattr__(self, "predictions_of", num_predictions)
        object.__setattr__(self, "predictions_per_row", lru_cache(self._predictions_per_row))

    def _predictions_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """Returns P of rows of T tokens: ``max_predictions``, or the maximum sum over the examples of a packed row.

        An example has at least two special tokens.
        """
        if examples == 1:
            return self.max_predictions
        alone = self.predictions_of[np.maximum(np.arange(sequence_length + 1) - 2, 0)]
        together = alone
        for _ in range(examples - 1):  # add an example of every length that fits
            sums = (together[: room + 1] + alone[room::-1] for room in range(sequence_length + 1))
            together = np.array([predictions.max() for predictions in sums])
        return int(together[-1])

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """Returns the 64-bit random words per row of T tokens, a multiple of Philox's block."""
        halves = sequence_length + 2 * self.predictions_per_row(sequence_length, examples)
        return -(-halves // (2 * _PHILOX_WORDS)) * _PHILOX_WORDS

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        """Implements `Predictions`."""
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
            example_length: [B, K] tokens of each example of packed rows. Each example is masked like a row, with the
                draws at its positions.

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
        """Returns additional arrays of the batch, from the second draw of each predicted token."""
        return {}

    def _choose_positions(
        self, input_ids: Integer[np.ndarray, "B T"], draws: UInt32[np.ndarray, "B T"]
    ) -> tuple[Int32[np.ndarray, "B count"], Bool[np.ndarray, "B count"]]:
        """Returns positions [B, min(P, T)], ascending and 0 where unused, and a mask of the used ones."""
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
        """Returns ``_choose_positions`` [B, count] of packed rows, by laying out each example as a row."""
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
        together[filled] = (positions + start)[used]  # in ascending order, by example and position
        return together, filled

    @staticmethod
    def _single_tokens(
        maskable: Bool[np.ndarray, "B T"],
        num_predictions: Integer[np.ndarray, " B"],
        draws: UInt32[np.ndarray, "B T"],
        count: int,
    ) -> tuple[Int32[np.ndarray, "B {count}"], Bool[np.ndarray, "B {count}"]]:
        """Returns positions [B, count], ascending and 0 where unused, and a mask of the used ones."""
        length = maskable.shape[1]
        # One sortable key per token: 32 random bits above its position, so that keys never tie. Tokens that may not be
        # chosen get the largest key. The `num_predictions` smallest keys of a row are chosen.
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
        """Returns positions like ``_single_tokens``, but of whole words, chosen in random order while they fit.

        A word is a token and its continuations; a word without its beginning (due to truncation) starts with its first
        token in the row. As in google-research/bert ``create_masked_lm_predictions``, words that are too long are
        skipped, and each token of a chosen word is replaced by its own draw.
        """
        rows, length = input_ids.shape
        starts = ~(maskable & self.continuing.take(input_ids))
        starts[:, 1:] |= ~maskable[:, :-1]
        starts[:, 0] = True
        flat = np.flatnonzero(starts)
        keys = np.empty(rows * length, np.uint64)
        keys[flat] = np.diff(flat, append=rows * length).view(np.uint64)
        # One sortable key per word, at its start: 32 random bits, its position, its size.
        keys = keys.reshape(rows, length)
        keys |= np.arange(length, dtype=np.uint64) << np.uint64(16)
        keys |= draws.astype(np.uint64) << np.uint64(32)
        starts &= maskable
        keys = np.where(starts, keys, np.uint64(2**64 - 1))
        max_words = int(np.count_nonzero(starts, axis=1).max(initial=0))
        keys = np.sort(keys, axis=1)[:, :max_words].T
        sizes = (keys & np.uint64(0xFFFF)).astype(np.int32)  # 65535 if a row has no further words
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
    """Masking for a generator whose samples replace the predicted tokens.

    85% of these become [MASK], none a random token (google-research/electra pretrain/pretrain_helpers.py, mask). The
    batch also has ``sample_uniforms`` [B, P] float32 in [0, 1), the random numbers of the samples.
    """

    mask_share: float = REPLACEMENTS["rtd"][0]
    random_share: float = REPLACEMENTS["rtd"][1]

    def _draw_more(self, draws: UInt32[np.ndarray, "B P"]) -> dict[str, Float32[np.ndarray, "B P"]]:
        return {"sample_uniforms": (draws >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)}


@dataclass(frozen=True)
class PermutedMasking(Masking):
    """Masking for tokens that are predicted one after the other, in a random order.

    ``input_ids`` are not changed, and the positions [B, P] are in the order of prediction. The batch also has
    ``query_ids`` [B, P] int32, all [MASK].
    """

    mask_share: float = 0.0
    random_share: float = 0.0

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        batch = super().batch_arrays(rows, words)
        length, count = rows["input_ids"].shape[1], batch["masked_lm_ids"].shape[1]
        draws = words.view(np.uint32)[:, length : length + count].astype(np.uint64)
        draws[batch["masked_lm_weights"] == 0] = np.uint64(2**32)  # after all predictions
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
    """Returns [rows, words_per_row] uint64 from the Philox stream of ``key`` = (seed, step), from ``first_row`` on.

    The words of a row are the same in any process and after any other rows.
    """
    stream = np.random.Philox(key=np.array(key, dtype=np.uint64))
    stream.advance(first_row * words_per_row // _PHILOX_WORDS)
    return stream.random_raw(rows * words_per_row).reshape(rows, words_per_row)


def philox_uint64_of_rows(
    key: tuple[int, int], rows: Integer[np.ndarray, " B"], words_per_row: int
) -> UInt64[np.ndarray, "B {words_per_row}"]:
    """Returns the words [B, words_per_row] that `philox_uint64` draws for these rows, which may be in any order."""
    stream = np.random.Philox(key=np.array(key, dtype=np.uint64))
    words = np.empty((len(rows), words_per_row), np.uint64)
    after = 0
    for index, row in enumerate(rows.tolist()):
        # Relative to the end of the row before; may be negative.
        stream.advance((row - after) * words_per_row // _PHILOX_WORDS)
        words[index] = stream.random_raw(words_per_row)
        after = row + 1
    return words


def _share(fraction: float) -> np.uint32 | np.uint64:
    threshold = round(fraction * 2**32)
    return np.uint32(threshold) if threshold < 2**32 else np.uint64(threshold)
