"""Text generation: batches prompts or sources by length, decodes them, and converts the tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int
from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.encoding import plain_ids, target_boundaries, tokenize
from bert.data.inputs import check_count, shown
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.inference.decoding import Cache, Decoded, Prompts, beam_search, sample
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.sampling import DecodingArrays
from bert.model.array_types import Array
from bert.model.attention import Memory, make_cache
from bert.model.decoders import BertForCausalLM, BertForSequenceToSequence
from bert.model.mask import Mask
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.library import decode, detokenize, special_ids


class Continuation(NamedTuple):
    """A generated text.

    Attributes:
        text: the text, without the prompt and the end token.
        score: sum of the log-probabilities of the tokens, including the end token. Beam search divides it by the length
            norm.
        token_ids: token ids of the text, including a stop text.
        ended: whether an end token or a stop text was generated before the maximum length.
    """

    text: str
    score: float
    token_ids: tuple[int, ...]
    ended: bool


def make_decoding(settings: Mapping[str, Any]) -> Decoding:
    """Validates settings. Raises UserError for unknown names and invalid values."""
    names = [field.name for field in fields(Decoding)]
    if unknown := [name for name in settings if name not in names]:
        raise UserError(f"{unknown[0]} is not a setting of generation: use one of {', '.join(names)}")
    decoding = Decoding(**settings)
    decoding.check()
    return decoding


def complete_decoding(evaluated: Decoding | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Completes settings of `Pretrained.generate` with the settings with which an encoder-decoder was evaluated.

    A temperature in ``settings`` replaces evaluated beams, and beams replace evaluated sampling.
    """
    if evaluated is None:
        return settings
    defaults, plain = vars(evaluated), vars(Decoding())
    replaced: tuple[str, ...] = ()
    if settings.get("temperature") and "beams" not in settings:
        replaced = ("beams", "num_samples")
    elif isinstance(beams := settings.get("beams"), int) and beams > 1 and "temperature" not in settings:
        replaced = ("temperature", "top_k", "top_p")
    return {**defaults, **{name: plain[name] for name in replaced}, **settings}


def generate_texts(
    generator: TextGenerator | SequenceGenerator,
    texts: list[str],
    decoding: Decoding,
    batch_size: int,
    numbers: Sequence[int] | None,
) -> list[list[Continuation]]:
    """Returns the continuations of each text. Raises UserError if ``numbers`` are invalid or their count is wrong."""
    numbers = list(range(len(texts)) if numbers is None else numbers)
    if any(not isinstance(number, (int, np.integer)) or not 0 <= number < 2**31 for number in numbers):
        raise UserError("numbers has an entry that is not a whole number from 0 to 2,147,483,647: pass another")
    if len(numbers) != len(texts):
        raise UserError(f"numbers has {len(numbers)} entries for {len(texts)} prompts: pass one for each")
    return generator(texts, decoding, batch_size, numbers)


@dataclass(frozen=True)
class StopTexts:
    """Detects stop texts in new tokens. Implements `bert.inference.decoding.Stop`.

    Attributes:
        texts: texts that end a continuation.
        decode: converts token ids to text.
    """

    texts: tuple[str, ...]
    decode: Callable[[list[int]], str] = field(compare=False)

    def __call__(self, tokens: Any, count: Any) -> np.ndarray:
        """Maps new tokens [B, n, M] and their number to [B, n] booleans."""
        new = np.asarray(tokens)[..., : int(count)]
        found = [self.cut(self.decode(ids)) is not None for ids in new.reshape(-1, new.shape[-1]).tolist()]
        return np.array(found, bool).reshape(new.shape[:2])

    def cut(self, text: str) -> str | None:
        """Returns the text before the first stop text; None if no stop text occurs."""
        starts = [start for stop in self.texts if (start := text.find(stop)) >= 0]
        return text[: min(starts)] if starts else None

    @classmethod
    def of(cls, decoding: Decoding, decode: Callable[[list[int]], str]) -> StopTexts | None:
        """Creates the detector for the settings; None if they have no stop texts."""
        return cls(tuple(decoding.stop), decode) if decoding.stop else None


class TextGenerator:
    """The compiled decoding loops of a causal language model.

    One program is compiled per combination of length bucket, new tokens, number of rows and number of beams.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        tokenizer: Tokenizer,
        source: str,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        self._config, self._params, self._tokenizer, self._source = config, params, tokenizer, source
        self._model = BertForCausalLM(config, dtype)

    def __call__(
        self, texts: Sequence[str], decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Returns ``decoding.num_samples`` continuations of each text, in the order of the texts.

        Args:
            texts: prompts. An empty prompt starts a new text.
            decoding: validated settings.
            batch_size: number of samples, or of texts with all their beams, per batch.
            numbers: indices of the texts, which seed the sampler.

        Raises:
            UserError: a prompt leaves no room for a new token.
        """
        prompts = [ids if len(ids) else np.array([self._end]) for ids in plain_ids(self._tokenizer, texts)]
        self._check_lengths(texts, prompts)
        samples = decoding.num_samples if decoding.beams == 1 else 1
        results: list[list[Continuation]] = [[] for _ in texts]
        stop = StopTexts.of(decoding, self._text)
        for rows, decoded in self._batches(prompts, decoding, batch_size, numbers, samples, stop):
            for index, row in enumerate(rows):
                prompt = prompts[row // samples]
                for k in range(decoding.num_samples // samples):
                    new = np.asarray(decoded.tokens[index, k, : decoded.lengths[index, k]])
                    if (score := float(decoded.scores[index, k])) > -np.inf:  # there may be fewer results than beams
                        results[row // samples].append(self._continuation(prompt, new, score, stop))
        return results

    def _batches(
        self,
        prompts: list[np.ndarray],
        decoding: Decoding,
        batch_size: int,
        numbers: Sequence[int],
        samples: int,
        stop: StopTexts | None,
    ) -> Iterator[tuple[np.ndarray, Decoded]]:
        """Yields (rows, results). Row r is sample r % ``samples`` of prompt r // ``samples``."""
        lengths = np.repeat([len(prompt) for prompt in prompts], samples)
        size = min(batch_size, 1 << max(len(lengths) - 1, 0).bit_length())
        settings = DecodingArrays.make(decoding, self._end)
        max_tokens = self._bucket(min(decoding.max_tokens, self._config.max_position_embeddings))
        for rows in evaluation_batches(lengths, size):
            width = self._bucket(int(lengths[rows].max()))
            tokens, mask = (np.full((size, width), value, np.int32) for value in (self._end, 0))
            limits, keys = np.zeros(size, np.int32), np.zeros((size, 2), np.int32)
            for index, row in enumerate(rows):
                prompt = prompts[row // samples]
                tokens[index, width - len(prompt) :] = prompt
                mask[index, width - len(prompt) :] = 1
                limits[index] = min(decoding.max_tokens, self._config.max_position_embeddings - len(prompt))
                keys[index] = numbers[row // samples], row % samples
            check_inputs(tokens, self._config.known_vocab_size)
            batch = Prompts(*map(jnp.asarray, (tokens, mask, limits, keys)))
            decoded = jax.device_get(self._decode(self._params, batch, settings, max_tokens, decoding.beams, stop))
            check_finite(rows // samples, decoded.scores[:, 0])
            yield rows, decoded

    @cached_property
    def _decode(self) -> Any:
        return jax.jit(self._run, static_argnums=(3, 4, 5))

    def _run(
        self,
        params: dict[str, Any],
        prompts: Prompts,
        decoding: DecodingArrays,
        max_tokens: int,
        beams: int,
        stop: StopTexts | None,
    ) -> Decoded:
        rows, width = prompts.tokens.shape
        cache = make_cache(self._config, rows, width + max_tokens - 1, self._model.dtype)
        step = partial(self._step, params)
        if beams == 1:
            return sample(step, cache, prompts, decoding, max_tokens, stop)
        return beam_search(step, cache, prompts, decoding, max_tokens, beams, stop)

    def _step(
        self, params: dict[str, Any], tokens: Array, position_ids: Array, mask: Mask, cache: Cache
    ) -> tuple[Array, Cache]:
        # Finished rows are computed with the others, so their positions may exceed the maximum.
        position_ids = (
            jnp.minimum(position_ids, self._config.max_position_embeddings - 1) + self._config.position_offset
        )
        inputs = (tokens, position_ids, mask, cache)
        return cast(tuple[Array, Cache], self._model.apply({"params": params}, *inputs, method=self._model.step))

    def _bucket(self, length: int) -> int:
        return bucket_length(length, BUCKETS, self._config.max_position_embeddings)

    def _check_lengths(self, texts: Sequence[str], prompts: list[np.ndarray]) -> None:
        longest = self._config.max_position_embeddings
        for text, prompt in zip(texts, prompts, strict=True):
            if len(prompt) >= longest:
                raise UserError(
                    f"the prompt {shown(text)} has {len(prompt)} tokens, but {self._source} reads fewer than {longest} "
                    "in a prompt: pass a shorter one"
                )

    def _continuation(self, prompt: np.ndarray, new: np.ndarray, score: float, stop: StopTexts | None) -> Continuation:
        ended = bool(len(new)) and new[-1] == self._end
        ids = new[: len(new) - ended].tolist()
        before = self._text(prompt.tolist())
        text = self._text([*prompt.tolist(), *ids])[len(before) :]
        cut = None if stop is None else stop.cut(text)
        return Continuation(text if cut is None else cut, score, tuple(ids), bool(ended) or cut is not None)

    def _text(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=False)

    @cached_property
    def _end(self) -> int:
        return special_ids(self._tokenizer).end


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
        decoding: decoding settings.
        start: id of the start token.
        max_tokens: M, at least the largest limit.
        beams: K; 1 for greedy decoding or sampling.
        stop: texts that end a target; None for none.
    """
    rows, config = len(limits), model.config
    memory = cast(Memory, model.apply({"params": params}, *sources, method=model.encode))
    tokens = jnp.full((rows, 1), start, jnp.int32)
    longest = config.max_position_embeddings

    def step(tokens: Array, position_ids: Array, mask: Mask, cache: Cache) -> tuple[Array, Cache]:
        # Finished rows are computed with the others, so their positions may exceed the maximum.
        positions = jnp.minimum(position_ids, longest - 1) + config.position_offset
        found = model.apply({"params": params}, tokens, positions, mask, cache, memory, method=model.step)
        return cast(tuple[Array, Cache], found)

    cache = make_cache(config.decoder, rows, max_tokens, model.dtype)
    _, cache = step(tokens, jnp.zeros((1, 1), jnp.int32), Mask(start=0, causal=True), cache)  # caches the source's keys
    prompts = Prompts(tokens, jnp.ones_like(tokens), limits, numbers)
    if beams == 1:
        return sample(step, cache, prompts, decoding, max_tokens, stop)
    return beam_search(step, cache, prompts, decoding, max_tokens, beams, stop)


def max_target_tokens(decoding: Decoding, config: ModelConfig) -> int:
    """Returns the maximum number of target tokens: the setting, limited by the number of positions."""
    return min(decoding.max_tokens, config.max_position_embeddings)


class SequenceGenerator:
    """The compiled decoding loops of an encoder-decoder.

    One program is compiled per combination of source length bucket, new tokens, number of rows and number of beams.
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
            tokenizers: tokenizers of the sources and of the targets.
            source: name of the model, for messages.
        """
        self._config, self._params, self._source = config, params, source
        self._tokenizer, self._target_tokenizer = tokenizers
        self._model = BertForSequenceToSequence(config, dtype)
        self._start, self._end = target_boundaries(self._target_tokenizer)

    def __call__(
        self, texts: Sequence[str], decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Returns ``decoding.num_samples`` targets of each text, in the order of the texts (see `TextGenerator`).

        Raises:
            UserError: a source has more tokens than the model has positions.
        """
        rows = tokenize(self._tokenizer, texts, NO_LIMIT)
        self._check_lengths(texts, rows)
        return self.decode(rows, decoding, batch_size, numbers)

    def decode(
        self, rows: TokenRows, decoding: Decoding, batch_size: int, numbers: Sequence[int]
    ) -> list[list[Continuation]]:
        """Like `__call__`, for tokenized sources."""
        check_count("batch_size", batch_size)
        samples = decoding.num_samples if decoding.beams == 1 else 1
        results: list[list[Continuation]] = [[] for _ in range(len(rows))]
        stop = StopTexts.of(decoding, self._text)
        for indices, decoded in self._batches(rows, decoding, batch_size, numbers, samples, stop):
            for index, row in enumerate(indices):
                for k in range(decoding.num_samples // samples):
                    ids = np.asarray(decoded.tokens[index, k, : decoded.lengths[index, k]])
                    results[row // samples].append(self._continuation(ids, float(decoded.scores[index, k]), stop))
        return results

    def _batches(
        self,
        sources: TokenRows,
        decoding: Decoding,
        batch_size: int,
        numbers: Sequence[int],
        samples: int,
        stop: StopTexts | None,
    ) -> Iterator[tuple[np.ndarray, Decoded]]:
        """Yields (rows, results). Row r is sample r % ``samples`` of source r // ``samples``."""
        lengths = np.repeat(sources.lengths, samples)
        size = min(batch_size, 1 << max(len(lengths) - 1, 0).bit_length())
        settings = DecodingArrays.make(decoding, self._end)
        max_tokens = max_target_tokens(decoding, self._config)
        for rows in evaluation_batches(lengths, size):
            width = bucket_length(int(lengths[rows].max()), BUCKETS, self._config.max_position_embeddings)
            batch = sources.batch(rows // samples, width, size)
            keys = np.zeros((size, 2), np.int32)
            keys[: len(rows), 0] = np.asarray(numbers)[rows // samples]
            keys[: len(rows), 1] = rows % samples
            limits = (max_tokens * batch["weights"]).astype(np.int32)
            inputs = ((batch["input_ids"], batch["attention_mask"]), limits, keys)
            check_inputs(batch["input_ids"], self._config.known_vocab_size)
            decoded = jax.device_get(self._decode(self._params, *inputs, settings, max_tokens, decoding.beams, stop))
            check_finite(rows // samples, decoded.scores[:, 0])
            yield rows, decoded

    @cached_property
    def _decode(self) -> Any:
        def run(
            params: Any, sources: Any, limits: Array, keys: Array, settings: DecodingArrays, *sizes: Any
        ) -> Decoded:
            return decode_targets(self._model, params, sources, limits, keys, settings, self._start, *sizes)

        return jax.jit(run, static_argnums=(5, 6, 7))

    def _check_lengths(self, texts: Sequence[str], rows: TokenRows) -> None:
        longest = self._config.max_position_embeddings
        for text, length in zip(texts, rows.lengths, strict=True):
            if length > longest:
                raise UserError(
                    f"the source {shown(text)} has {length} tokens, but {self._source} reads at most {longest}: pass a "
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
