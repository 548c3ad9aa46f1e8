"""Log-probabilities of texts under a causal language model, with a compiled forward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.data.batching import bucket_length
from bert.data.encoding import plain_ids
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.scoring import TextScore
from bert.model.array_types import Array
from bert.model.decoders import BertForCausalLM
from bert.model.linear import tied_logits
from bert.tokenizer.library import special_ids


class _Window(NamedTuple):
    """Tokens [T + 1] of a text. The first T are inputs, and the last ``scored`` tokens are predicted."""

    text: int
    tokens: np.ndarray
    scored: int


class TextScorer:
    """Scores texts in windows with the compiled forward function of a language model."""

    def __init__(
        self, config: ModelConfig, params: dict[str, Any], tokenizer: Tokenizer, dtype: DTypeLike = jnp.float32
    ) -> None:
        self._config, self._params, self._tokenizer = config, params, tokenizer
        self._model = BertForCausalLM(config, dtype)

    def __call__(self, texts: Sequence[str], stride: int, batch_size: int) -> list[TextScore]:
        """Returns the score of each text. Every token is predicted once, the first one after the end token.

        Special tokens in texts are read as ordinary characters.

        Args:
            stride: number of tokens between the starts of windows, at most the number of positions. Each token has at
                least positions - ``stride`` tokens of context, if the text is long enough.
        """
        end = special_ids(self._tokenizer).end
        ids = [np.append(np.int32(end), text) for text in plain_ids(self._tokenizer, texts, literal=True)]
        windows = [window for number, text in enumerate(ids) for window in self._windows(number, text, stride)]
        windows.sort(key=lambda window: len(window.tokens))
        sums = np.zeros(len(texts))
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            results = self._batch(batch, min(batch_size, 1 << (len(windows) - 1).bit_length()))
            for window, log_probabilities in zip(batch, results, strict=False):
                length = len(window.tokens) - 1
                sums[window.text] += log_probabilities[length - window.scored : length].sum(dtype=np.float64)
        return [TextScore(float(total), len(text) - 1) for total, text in zip(sums, ids, strict=True)]

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

    def _batch(self, windows: list[_Window], rows: int) -> np.ndarray:
        """Returns the log-probabilities of the next tokens, [rows, T]."""
        lengths = [len(window.tokens) - 1 for window in windows]
        length = bucket_length(max(lengths), BUCKETS, self._config.max_position_embeddings)
        tokens = np.zeros((rows, length + 1), np.int32)
        mask = np.zeros((rows, length), np.int32)
        for row, window in enumerate(windows):
            tokens[row, : len(window.tokens)] = window.tokens
            mask[row, : lengths[row]] = 1
        check_inputs(tokens, self._config.known_vocab_size)
        scores = np.asarray(self._log_probabilities(self._params, tokens[:, :-1], mask, tokens[:, 1:]))
        check_finite([window.text for window in windows], np.where(mask, scores, 0))
        return scores

    @cached_property
    def _log_probabilities(self) -> Callable[..., Array]:
        def read(model: BertForCausalLM, tokens: Array, mask: Array) -> tuple[Array, ...]:
            return model.hidden_states(tokens, None, mask), *model.decoder_weights()

        def log_probabilities(params: dict[str, Any], tokens: Array, mask: Array, labels: Array) -> Array:
            read_out: Any = self._model.apply({"params": params}, tokens, mask, method=read)
            hidden, table, bias = read_out

            # Row by row, because logits [B, T, V] may not fit into memory.
            def score_row(row: tuple[Array, Array]) -> Array:
                logits = tied_logits(row[0], table, bias, hidden.dtype)
                return jnp.take_along_axis(jax.nn.log_softmax(logits), row[1][:, None], axis=1)[:, 0]

            return jax.lax.map(score_row, (hidden, labels))

        return jax.jit(log_probabilities)
