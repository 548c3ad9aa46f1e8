"""Log-probabilities of texts under a causal language model, with a compiled forward function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.data.batching import bucket_length
from bert.data.encoding import language_model_prefix, plain_ids
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.scoring import TextScore
from bert.model.array_types import Array
from bert.model.decoders import BertForCausalLM
from bert.model.linear import soft_cap, tied_logits
from bert.model.recurrence import COLLECTION, SegmentMemory, kept_memory, memory_variables
from bert.tokenizer.library import special_ids


class _Window(NamedTuple):
    """Tokens [T + 1] of a text. The first T are inputs, and the last ``scored`` tokens are predicted."""

    text: int
    tokens: np.ndarray
    scored: int


_Scored = tuple[_Window, np.ndarray]
"""A window and the log-probabilities of its next tokens."""


class TextScorer:
    """Scores texts in windows with the compiled forward function of a language model.

    A model with segment recurrence reads each window with the memory of the window before.
    """

    def __init__(
        self, config: ModelConfig, params: dict[str, Any], tokenizer: Tokenizer, dtype: DTypeLike = jnp.float32
    ) -> None:
        self._config, self._params, self._tokenizer = config, params, tokenizer
        self._model = BertForCausalLM(config, dtype)

    def __call__(self, texts: Sequence[str], stride: int, batch_size: int) -> list[TextScore]:
        """Returns the score of each text. Every token is predicted once.

        The first one follows the BOS token if the tokenizer adds one (`language_model_prefix`), or the end token.

        Special tokens in texts are read as ordinary characters.

        Args:
            stride: number of tokens between the starts of windows, at most the number of positions. Each token has at
                least positions - ``stride`` tokens of context, if the text is long enough. With segment recurrence,
                windows do not overlap, and each token has at least ``model.memory_length`` tokens of context.
        """
        start = language_model_prefix(self._tokenizer) or (special_ids(self._tokenizer).end,)
        before = np.array(start[-1:], np.int32)
        ids = [np.append(before, text) for text in plain_ids(self._tokenizer, texts, literal=True)]
        sums = np.zeros(len(texts))
        read = self._read_windows if self._config.memory_length is None else self._read_segments
        for window, log_probabilities in read(ids, stride, batch_size):
            length = len(window.tokens) - 1
            sums[window.text] += log_probabilities[length - window.scored : length].sum(dtype=np.float64)
        return [TextScore(float(total), len(text) - 1) for total, text in zip(sums, ids, strict=True)]

    def _read_windows(self, ids: list[np.ndarray], stride: int, batch_size: int) -> Iterator[_Scored]:
        """Yields the windows of all texts with the log-probabilities of their tokens."""
        windows = [window for number, text in enumerate(ids) for window in self._windows(number, text, stride)]
        windows.sort(key=lambda window: len(window.tokens))
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            results, _ = self._batch(batch, min(batch_size, 1 << (len(windows) - 1).bit_length()))
            yield from zip(batch, results, strict=False)

    def _read_segments(self, ids: list[np.ndarray], stride: int, batch_size: int) -> Iterator[_Scored]:
        """Yields consecutive windows of ``stride`` tokens, each read with the memory of the window before."""
        order = sorted((number for number, text in enumerate(ids) if len(text) > 1), key=lambda n: len(ids[n]))
        rows = min(batch_size, 1 << max(len(order) - 1, 0).bit_length())
        for first in range(0, len(order), batch_size):
            texts, memory = order[first : first + batch_size], SegmentMemory.empty(self._config, rows)
            longest = len(ids[texts[-1]]) - 1
            for start in range(0, longest, stride):
                inside = [(number, ids[number][start : start + stride + 1]) for number in texts]
                windows = [_Window(number, tokens, max(len(tokens) - 1, 0)) for number, tokens in inside]
                results, memory = self._batch(windows, rows, memory, stride if longest > stride else None)
                yield from (pair for pair in zip(windows, results, strict=False) if pair[0].scored)

    def _windows(self, number: int, tokens: np.ndarray, stride: int) -> list[_Window]:
        positions, windows, scored = self._config.max_position_embeddings, list[_Window](), 0
        for start in range(0, len(tokens) - 1, stride):
            inside = tokens[start : start + positions + 1]
            last = start + len(inside) - 1
            windows.append(_Window(number, inside, last - scored))
            scored = last
            if last == len(tokens) - 1:
                break
        return windows

    def _batch(
        self, windows: list[_Window], rows: int, memory: SegmentMemory | None = None, length: int | None = None
    ) -> tuple[np.ndarray, Any]:
        """Returns the log-probabilities of the next tokens, [rows, T], and the memory after the windows.

        Args:
            length: T; None for the shortest bucket.
        """
        lengths = [max(len(window.tokens) - 1, 0) for window in windows]
        length = length or bucket_length(max(lengths), BUCKETS, self._config.max_position_embeddings)
        tokens = np.zeros((rows, length + 1), np.int32)
        mask = np.zeros((rows, length), np.int32)
        for row, window in enumerate(windows):
            tokens[row, : len(window.tokens)] = window.tokens
            mask[row, : lengths[row]] = 1
        check_inputs(tokens, self._config.known_vocab_size)
        variables = {"params": self._params, **({} if memory is None else memory_variables(memory))}
        read, kept = self._log_probabilities(variables, tokens[:, :-1], mask, tokens[:, 1:])
        scores = np.asarray(read)
        check_finite([window.text for window in windows], np.where(mask, scores, 0))
        return scores, None if memory is None else kept_memory(kept)

    @cached_property
    def _log_probabilities(self) -> Callable[..., Array]:
        def read(model: BertForCausalLM, tokens: Array, mask: Array) -> tuple[Array, ...]:
            return model.hidden_states(tokens, None, mask), *model.decoder_weights()

        def log_probabilities(
            variables: dict[str, Any], tokens: Array, mask: Array, labels: Array
        ) -> tuple[Array, dict[str, Any]]:
            read_out: Any = self._model.apply(variables, tokens, mask, method=read, mutable=[COLLECTION])
            (hidden, table, bias), kept = read_out

            # Row by row, because logits [B, T, V] may not fit into memory.
            def score_row(row: tuple[Array, Array]) -> Array:
                logits = tied_logits(row[0], table, bias, hidden.dtype)
                logits = soft_cap(logits, self._config.prediction_softcap)
                return jnp.take_along_axis(jax.nn.log_softmax(logits), row[1][:, None], axis=1)[:, 0]

            return jax.lax.map(score_row, (hidden, labels)), kept

        return jax.jit(log_probabilities)
