"""Compiled text generators: batches prompts or sources by length, decodes them, and converts the tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int
from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.encoding import language_model_prefix, plain_ids, target_boundaries, tokenize
from bert.data.inputs import check_count, shown
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.inference.decoding import Cache, Decoded, Prompts, Step, beam_search, sample
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.generate import Continuation
from bert.inference.sampling import DecodingArrays
from bert.model.array_types import Array
from bert.model.attention import Memory, make_cache
from bert.model.decoders import BertForCausalLM, BertForSequenceToSequence
from bert.model.mask import Mask
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.library import decode, detokenize, special_ids

CONTEXT = 8
"""Number of tokens before a new one that its text depends on: its space, and a character of up to 4 byte tokens."""

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids and mask of the prompts or sources, [B, T] each, and the maximum number of new tokens per row, [B]."""


@dataclass(frozen=True)
class StopTexts:
    """Detects stop texts in new tokens. Implements `bert.inference.decoding.Stop`.

    Attributes:
        new_text: maps the tokens of a prompt and the new ones to the text that the new ones add.
    """

    texts: tuple[str, ...]
    new_text: Callable[[list[int], list[int]], str] = field(compare=False)

    def __call__(self, prompts: Any, mask: Any, tokens: Any, count: Any) -> np.ndarray:
        """Maps prompts [B, T], their mask, new tokens [B, n, M] and their number to [B, n] booleans."""
        new = np.asarray(tokens)[..., : int(count)].tolist()
        befores = [row[kept].tolist() for row, kept in zip(np.asarray(prompts), np.asarray(mask, bool), strict=True)]
        stopped = [
            [self.cut(self.new_text(before, ids)) is not None for ids in hypotheses]
            for before, hypotheses in zip(befores, new, strict=True)
        ]
        return np.array(stopped, bool)

    def cut(self, text: str) -> str | None:
        """Returns the text before the first stop text; None if no stop text occurs."""
        starts = [start for stop in self.texts if (start := text.find(stop)) >= 0]
        return text[: min(starts)] if starts else None


class DecodingLoop:
    """Runs a compiled decoding loop over batches of texts with similar lengths.

    One program is compiled per combination of length bucket, new tokens, number of rows and number of beams.
    """

    def __init__(
        self,
        run: Callable[..., Decoded],
        config: ModelConfig,
        params: dict[str, Any],
        ends: Sequence[int],
        new_text: Callable[[list[int], list[int]], str],
    ) -> None:
        """
        Args:
            run: maps parameters, `Inputs`, keys [B, 2], decoding settings, number of new tokens, number of beams and
                the detector of stop texts to results. The last three are static.
            ends: ids of the tokens that end a text.
            new_text: see `StopTexts`.
        """
        self.compiled = jax.jit(run, static_argnums=(4, 5, 6))
        self._config, self._params, self._ends, self._new_text = config, params, tuple(ends), new_text

    def __call__(
        self,
        lengths: np.ndarray,
        make_inputs: Callable[[np.ndarray, int, int], Inputs],
        decoding: Decoding,
        batch_size: int,
        numbers: Sequence[int],
        max_tokens: int,
        prefixes: Sequence[list[int]],
    ) -> list[list[Continuation]]:
        """Returns ``decoding.num_samples`` continuations of each text, in the order of the texts.

        Args:
            make_inputs: maps the indices of the texts in a batch, the length T and B to its inputs.
            batch_size: number of samples, or of texts with all their beams, per batch.
            max_tokens: M, the number of new tokens that the program can generate.
            prefixes: token ids of each text that the new tokens continue.
        """
        check_count("batch_size", batch_size)
        # Row r is sample r % samples of text r // samples. Beam search finds all samples of a text in one row.
        samples = decoding.num_samples if decoding.beams == 1 else 1
        results: list[list[Continuation]] = [[] for _ in lengths]
        stop = StopTexts(tuple(decoding.stop), self._new_text) if decoding.stop else None
        settings = DecodingArrays.make(decoding, *self._ends)
        row_lengths = np.repeat(lengths, samples)
        size = min(batch_size, 1 << max(len(row_lengths) - 1, 0).bit_length())
        for rows in evaluation_batches(row_lengths, size):
            texts = rows // samples
            keys = np.zeros((size, 2), np.int32)
            keys[: len(rows), 0] = np.asarray(numbers)[texts]
            keys[: len(rows), 1] = rows % samples
            longest = int(row_lengths[rows].max())
            width = bucket_length(longest, BUCKETS, max(longest, self._config.max_position_embeddings))
            inputs = make_inputs(texts, width, size)
            check_inputs(inputs[0], self._config.known_vocab_size)
            results_of_batch = self.compiled(self._params, inputs, keys, settings, max_tokens, decoding.beams, stop)
            decoded: Decoded = jax.device_get(results_of_batch)
            check_finite(texts, decoded.scores[:, 0])
            for index, text in enumerate(texts):
                for k in range(decoding.num_samples // samples):
                    new = np.asarray(decoded.tokens[index, k, : decoded.lengths[index, k]])
                    if (score := float(decoded.scores[index, k])) > -np.inf:  # there may be fewer results than beams
                        results[text].append(self._continuation(prefixes[text], new, score, stop))
        return results

    def _continuation(self, prefix: list[int], new: np.ndarray, score: float, stop: StopTexts | None) -> Continuation:
        ended = bool(len(new)) and int(new[-1]) in self._ends
        ids = new[: len(new) - ended].tolist()
        text = self._new_text(prefix, ids)
        before_stop = None if stop is None else stop.cut(text)
        if before_stop is not None:
            return Continuation(before_stop, score, tuple(ids), ended=True)
        return Continuation(text, score, tuple(ids), ended)


class TextGenerator:
    """Continues prompts with a causal language model."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        tokenizer: Tokenizer,
        source: str,
        dtype: DTypeLike = jnp.float32,
        end_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            end_ids: ids of the tokens that end a text; () for the tokenizer's end token.
        """
        self._config, self._tokenizer, self._source = config, tokenizer, source
        self._model = BertForCausalLM(config, dtype)
        self._end = special_ids(tokenizer).end
        text = partial(decode, tokenizer, skip_special_tokens=False)

        def new_text(before: list[int], ids: list[int]) -> str:
            before = before[-CONTEXT:]
            return text([*before, *ids])[len(text(before)) :]

        self._prefix = language_model_prefix(tokenizer)
        self.loop = DecodingLoop(self._run, config, params, end_ids or (self._end,), new_text)

    def __call__(
        self, texts: Sequence[str], decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Returns the continuations of prompts (see `DecodingLoop`). An empty prompt starts a new text.

        The number of positions limits prompt and continuation together, except with segment recurrence.

        Raises:
            UserError: a prompt leaves no room for a new token.
        """
        plain = (np.array([*self._prefix, *ids], np.int32) for ids in plain_ids(self._tokenizer, texts))
        prompts = [ids if len(ids) else np.array([self._end]) for ids in plain]
        lengths = np.array([len(prompt) for prompt in prompts], int)
        longest = self._config.max_position_embeddings
        if self._config.memory_length is not None:
            longest = int(lengths.max(initial=0)) + decoding.max_tokens
        for text, length in zip(texts, lengths, strict=True):
            if length >= longest:
                raise UserError(
                    f"the prompt {shown(text)} has {length} tokens, but {self._source} reads fewer than "
                    f"{longest} in a prompt: pass a shorter one"
                )

        def make_inputs(indices: np.ndarray, width: int, size: int) -> Inputs:
            tokens, mask = (np.full((size, width), value, np.int32) for value in (self._end, 0))
            limits = np.zeros(size, np.int32)
            for row, index in enumerate(indices):
                prompt = prompts[index]
                tokens[row, width - len(prompt) :] = prompt
                mask[row, width - len(prompt) :] = 1
                limits[row] = min(decoding.max_tokens, longest - len(prompt))
            return tokens, mask, limits

        max_tokens = bucket_length(min(decoding.max_tokens, longest), BUCKETS, longest)
        prefixes = [prompt.tolist() for prompt in prompts]
        return self.loop(lengths, make_inputs, decoding, batch_size, numbers, max_tokens, prefixes)

    def _run(
        self,
        params: dict[str, Any],
        inputs: tuple[Array, Array, Array],
        keys: Array,
        decoding: DecodingArrays,
        max_tokens: int,
        beams: int,
        stop: StopTexts | None,
    ) -> Decoded:
        def step(tokens: Array, position_ids: Array, mask: Mask, cache: Cache) -> tuple[Array, Cache]:
            positions = _limited_positions(position_ids, self._config)
            output = self._model.apply({"params": params}, tokens, positions, mask, cache, method=self._model.step)
            return cast(tuple[Array, Cache], output)

        rows, width = inputs[0].shape
        cache = make_cache(self._config, rows, width + max_tokens - 1, self._model.dtype)
        return _decode(step, cache, Prompts(*inputs, keys), decoding, max_tokens, beams, stop)


def _limited_positions(position_ids: Array, config: ModelConfig) -> Array:
    """Returns position ids within the table. Finished rows are computed with the others, and may exceed it."""
    return jnp.minimum(position_ids, config.max_position_embeddings - 1) + config.position_offset


def _decode(
    step: Step,
    cache: Cache,
    prompts: Prompts,
    decoding: DecodingArrays,
    max_tokens: int,
    beams: int,
    stop: StopTexts | None,
) -> Decoded:
    if beams == 1:
        return sample(step, cache, prompts, decoding, max_tokens, stop)
    return beam_search(step, cache, prompts, decoding, max_tokens, beams, stop)


def decode_targets(
    model: BertForSequenceToSequence,
    params: Any,
    sources: tuple[Int[Array, "B S"], Int[Array, "B S"]],
    limits: Int[Array, "B"],
    numbers: Int[Array, "B 2"],
    decoding: DecodingArrays,
    start: int,
    max_tokens: int,
    beams: int,
    stop: StopTexts | None = None,
) -> Decoded:
    """Decodes the targets of sources with the loops of `bert.inference.decoding`.

    Args:
        sources: token ids, and mask with 1 for tokens and 0 for padding.
        limits: maximum number of tokens of each target; 0 for rows that only fill the batch.
        numbers: indices of the text and of its sample, which seed the sampler.
        max_tokens: M, at least the largest limit.
        beams: K; 1 for greedy decoding or sampling.
        stop: texts that end a target; None for none.
    """
    rows, config = len(limits), model.config
    memory = cast(Memory, model.apply({"params": params}, *sources, method=model.encode))
    tokens = jnp.full((rows, 1), start, jnp.int32)

    def step(tokens: Array, position_ids: Array, mask: Mask, cache: Cache) -> tuple[Array, Cache]:
        positions = _limited_positions(position_ids, config)
        output = model.apply({"params": params}, tokens, positions, mask, cache, memory, method=model.step)
        return cast(tuple[Array, Cache], output)

    cache = make_cache(config.decoder, rows, max_tokens, model.dtype)
    _, cache = step(tokens, jnp.zeros((1, 1), jnp.int32), Mask(start=0, causal=True), cache)  # caches the source's keys
    prompts = Prompts(tokens, jnp.ones_like(tokens), limits, numbers)
    return _decode(step, cache, prompts, decoding, max_tokens, beams, stop)


def max_target_tokens(decoding: Decoding, config: ModelConfig) -> int:
    """Returns the maximum number of new tokens: the setting, limited by the number of positions."""
    return min(decoding.max_tokens, config.max_position_embeddings)


class SequenceGenerator:
    """Generates the targets of sources with an encoder-decoder."""

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        tokenizers: tuple[Tokenizer, Tokenizer],
        source: str,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        """
        Args:
            tokenizers: tokenizers of the sources and of the targets.
        """
        self._config, self._source = config, source
        self._tokenizer, target_tokenizer = tokenizers
        model = BertForSequenceToSequence(config, dtype)
        start, end = target_boundaries(target_tokenizer)

        def run(params: Any, inputs: tuple[Array, Array, Array], keys: Array, *settings: Any) -> Decoded:
            ids, mask, limits = inputs
            arrays, max_tokens, beams, stop = settings
            return decode_targets(model, params, (ids, mask), limits, keys, arrays, start, max_tokens, beams, stop)

        self.loop = DecodingLoop(run, config, params, [end], lambda _, ids: detokenize(target_tokenizer, ids))

    def __call__(
        self, texts: Sequence[str], decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Returns the targets of sources (see `DecodingLoop`).

        Raises:
            UserError: a source has more tokens than the model has positions.
        """
        rows, positions = tokenize(self._tokenizer, texts, NO_LIMIT), self._config.max_position_embeddings
        for text, length in zip(texts, rows.lengths, strict=True):
            if length > positions:
                raise UserError(
                    f"the source {shown(text)} has {length} tokens, but {self._source} reads at most {positions}: pass "
                    "a shorter one"
                )
        return self.decode(rows, decoding, batch_size, numbers)

    def decode(
        self, rows: TokenRows, decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Like `__call__`, for tokenized sources."""
        max_tokens = max_target_tokens(decoding, self._config)

        def make_inputs(indices: np.ndarray, width: int, size: int) -> Inputs:
            batch = rows.batch(indices, width, size)
            limits = (max_tokens * batch["weights"]).astype(np.int32)
            return batch["input_ids"], batch["attention_mask"], limits

        prefixes: list[list[int]] = [[]] * len(rows)
        return self.loop(rows.lengths, make_inputs, decoding, batch_size, numbers, max_tokens, prefixes)
