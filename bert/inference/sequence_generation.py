"""Target texts of an encoder-decoder: sources are batched by length, read once, and their targets decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int
from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.features import Features, tokenize
from bert.data.inputs import check_count, shown
from bert.data.sequence_pairs import target_boundaries
from bert.errors import UserError
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.generation import Cache, Decoded, Prompts, beam_search, sample
from bert.inference.sampling import DecodingArrays
from bert.inference.text_generation import Continuation, StopTexts
from bert.model.array_types import Array
from bert.model.cache import Memory, make_cache
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.model.mask import Mask
from bert.tokenizer.detokenization import detokenize
from bert.tokenizer.hf_settings import NO_LIMIT


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
    """Targets of sources, by the loops of `bert.inference.generation`.

    Args:
        sources: token ids and mask, 1 for a token and 0 for padding.
        limits: the most tokens of each target; 0 for a row that only fills the batch.
        numbers: on which samples depend: of the text and of its sample.
        decoding: settings.
        start: id of the token that starts a target.
        max_tokens: M, at least the largest limit.
        beams: K; 1 is greedy decoding, or sampling.
        stop: texts that end a target; None for none.
    """
    rows, config = len(limits), model.config
    memory = cast(Memory, model.apply({"params": params}, *sources, method=model.encode))
    tokens = jnp.full((rows, 1), start, jnp.int32)
    longest = config.max_position_embeddings

    def step(tokens: Array, position_ids: Array, mask: Mask, cache: Cache) -> tuple[Array, Cache]:
        # Rows that have ended are computed on with the others, past the position table.
        positions = jnp.minimum(position_ids, longest - 1) + config.position_offset
        found = model.apply({"params": params}, tokens, positions, mask, cache, memory, method=model.step)
        return cast(tuple[Array, Cache], found)

    cache = make_cache(config.decoder, rows, max_tokens, model.dtype)
    _, cache = step(tokens, jnp.zeros((1, 1), jnp.int32), Mask(start=0, causal=True), cache)  # with the source's keys
    prompts = Prompts(tokens, jnp.ones_like(tokens), limits, numbers)
    if beams == 1:
        return sample(step, cache, prompts, decoding, max_tokens, stop)
    return beam_search(step, cache, prompts, decoding, max_tokens, beams, stop)


def most_tokens(decoding: Decoding, config: ModelConfig) -> int:
    """The most tokens of a target: those of the settings, or of the position table where it has fewer rows."""
    return min(decoding.max_tokens, config.max_position_embeddings)


class SequenceGenerator:
    """The compiled decoding loops of an encoder-decoder.

    A program is compiled for each length in `BUCKETS` of sources, number of new tokens, of rows and of beams.
    """

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
            tokenizers: of the sources, and of the targets.
            source: name of the model, for messages.
        """
        self._config, self._params, self._source = config, params, source
        self._tokenizer, self._target_tokenizer = tokenizers
        self._model = BertForSequenceToSequence(config, dtype)
        self._start, self._end = target_boundaries(self._target_tokenizer)

    def __call__(
        self, texts: Sequence[str], decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """``decoding.num_samples`` targets of each text, in their order.

        Args:
            texts: sources.
            decoding: settings, checked.
            batch_size: samples at once, or texts with all their beams.
            numbers: of the texts, on which samples depend.

        Raises:
            UserError: a text longer than the position table.
        """
        rows = tokenize(self._tokenizer, texts, NO_LIMIT)
        self._check_lengths(texts, rows)
        return self.decode(rows, decoding, batch_size, numbers)

    def decode(
        self, rows: Features, decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """As `__call__`, of sources as rows."""
        check_count("batch_size", batch_size)
        samples = decoding.num_samples if decoding.beams == 1 else 1
        found: list[list[Continuation]] = [[] for _ in range(len(rows))]
        stop = StopTexts.of(decoding, self._text)
        for indices, decoded in self._batches(rows, decoding, batch_size, numbers, samples, stop):
            for place, row in enumerate(indices):
                for k in range(decoding.num_samples // samples):
                    ids = np.asarray(decoded.tokens[place, k, : decoded.lengths[place, k]])
                    found[row // samples].append(self._continuation(ids, float(decoded.scores[place, k]), stop))
        return found

    def _batches(
        self,
        sources: Features,
        decoding: Decoding,
        batch_size: int,
        numbers: Sequence[int],
        samples: int,
        stop: StopTexts | None,
    ) -> Iterator[tuple[np.ndarray, Decoded]]:
        """(rows, results) of each batch; row r is sample r % ``samples`` of source r // ``samples``."""
        lengths = np.repeat(sources.lengths, samples)
        size = min(batch_size, 1 << max(len(lengths) - 1, 0).bit_length())
        settings = DecodingArrays.make(decoding, self._end)
        most = most_tokens(decoding, self._config)
        for rows in evaluation_batches(lengths, size):
            width = bucket_length(int(lengths[rows].max()), BUCKETS, self._config.max_position_embeddings)
            batch = sources.batch(rows // samples, width, size)
            keys = np.zeros((size, 2), np.int32)
            keys[: len(rows), 0] = np.asarray(numbers)[rows // samples]
            keys[: len(rows), 1] = rows % samples
            limits = (most * batch["weights"]).astype(np.int32)
            inputs = ((batch["input_ids"], batch["attention_mask"]), limits, keys)
            check_inputs(batch["input_ids"], self._config.known_vocab_size)
            decoded = jax.device_get(self._decode(self._params, *inputs, settings, most, decoding.beams, stop))
            check_finite(rows // samples, decoded.scores[:, 0])
            yield rows, decoded

    @cached_property
    def _decode(self) -> Any:
        def run(
            params: Any, sources: Any, limits: Array, keys: Array, settings: DecodingArrays, *sizes: Any
        ) -> Decoded:
            return decode_targets(self._model, params, sources, limits, keys, settings, self._start, *sizes)

        return jax.jit(run, static_argnums=(5, 6, 7))

    def _check_lengths(self, texts: Sequence[str], rows: Features) -> None:
        longest = self._config.max_position_embeddings
        for text, length in zip(texts, rows.lengths, strict=True):
            if length > longest:
                raise UserError(
                    f"the source {shown(text)} has {length} tokens, and {self._source} reads at most {longest}: pass a "
                    "shorter one"
                )

    def _text(self, ids: list[int]) -> str:
        return detokenize(self._target_tokenizer, ids)

    def _continuation(self, new: np.ndarray, score: float, stop: StopTexts | None) -> Continuation:
        ended = bool(len(new)) and bool(new[-1] == self._end)
        ids = new[: len(new) - ended].tolist()
        text = self._text(ids)
        cut = None if stop is None else stop.cut(text)
        return Continuation(text if cut is None else cut, score, tuple(ids), ended or cut is not None)
