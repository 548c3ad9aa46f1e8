"""Texts from a left-to-right language model: prompts are batched by length, continued and turned into text again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.features import plain_ids
from bert.data.inputs import shown
from bert.errors import UserError
from bert.inference.forward import BUCKETS, check_finite, check_inputs
from bert.inference.generation import Cache, Decoded, Prompts, beam_search, sample
from bert.inference.sampling import DecodingArrays
from bert.model.array_types import Array
from bert.model.cache import make_cache
from bert.model.language_model import BertForCausalLM
from bert.model.mask import Mask
from bert.tokenizer.library import decode
from bert.tokenizer.special_tokens import special_ids


class Continuation(NamedTuple):
    """What a model writes after a prompt.

    Attributes:
        text: without the prompt and the end token.
        score: the sum of the log-probabilities of its tokens, the end token included; beam search divides it by the
            norm of the length.
        token_ids: of the text; those of a stop text included.
        ended: whether an end token or a stop text follows; otherwise the text was cut at the most tokens.
    """

    text: str
    score: float
    token_ids: tuple[int, ...]
    ended: bool


def make_decoding(settings: Mapping[str, Any]) -> Decoding:
    """The settings of that name. Raises UserError for an unknown name, and for values that cannot work."""
    names = [field.name for field in fields(Decoding)]
    if unknown := [name for name in settings if name not in names]:
        raise UserError(f"{unknown[0]} is no setting of generation: use one of {', '.join(names)}")
    decoding = Decoding(**settings)
    decoding.check()
    return decoding


@dataclass(frozen=True)
class StopTexts:
    """Finds texts in new tokens: a `bert.inference.generation.Stop`.

    Attributes:
        texts: that end a continuation.
        decode: token ids -> text.
    """

    texts: tuple[str, ...]
    decode: Callable[[list[int]], str] = field(compare=False)

    def __call__(self, tokens: Any, count: Any) -> np.ndarray:
        """[B, n, M], new tokens so far -> [B, n] bool."""
        new = np.asarray(tokens)[..., : int(count)]
        found = [self.cut(self.decode(ids)) is not None for ids in new.reshape(-1, new.shape[-1]).tolist()]
        return np.array(found, bool).reshape(new.shape[:2])

    def cut(self, text: str) -> str | None:
        """Returns the part before the first stop text; None if no stop text occurs."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    @classmethod
    def of(cls, decoding: Decoding, decode: Callable[[list[int]], str]) -> StopTexts | None:
        """Returns the stop texts of the settings; None if there are none."""
        return cls(tuple(decoding.stop), decode) if decoding.stop else None


class TextGenerator:
    """The compiled decoding loops of a language model.

    A program is compiled for each length in `BUCKETS` of prompts and of new tokens, number of rows and number of beams.
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
        """``decoding.num_samples`` continuations of each text, in their order.

        Args:
            texts: prompts; the empty one is the start of a text.
            decoding: settings, checked.
            batch_size: samples at once, or texts with all their beams.
            numbers: of the texts, on which samples depend.

        Raises:
            UserError: a text as long as the position table, or longer.
        """
        prompts = [ids if len(ids) else np.array([self._end]) for ids in plain_ids(self._tokenizer, texts)]
        self._check_lengths(texts, prompts)
        samples = decoding.num_samples if decoding.beams == 1 else 1
        found: list[list[Continuation]] = [[] for _ in texts]
        stop = StopTexts.of(decoding, self._text)
        for rows, decoded in self._batches(prompts, decoding, batch_size, numbers, samples, stop):
            for place, row in enumerate(rows):
                prompt = prompts[row // samples]
                for k in range(decoding.num_samples // samples):
                    new = np.asarray(decoded.tokens[place, k, : decoded.lengths[place, k]])
                    if (score := float(decoded.scores[place, k])) > -np.inf:  # there may be fewer than beams
                        found[row // samples].append(self._continuation(prompt, new, score, stop))
        return found

    def _batches(
        self,
        prompts: list[np.ndarray],
        decoding: Decoding,
        batch_size: int,
        numbers: Sequence[int],
        samples: int,
        stop: StopTexts | None,
    ) -> Iterator[tuple[np.ndarray, Decoded]]:
        """(rows, results) of each batch; row r is sample r % ``samples`` of prompt r // ``samples``."""
        lengths = np.repeat([len(prompt) for prompt in prompts], samples)
        size = min(batch_size, 1 << max(len(lengths) - 1, 0).bit_length())
        settings = DecodingArrays.make(decoding, self._end)
        most = self._bucket(min(decoding.max_tokens, self._config.max_position_embeddings))
        for rows in evaluation_batches(lengths, size):
            width = self._bucket(int(lengths[rows].max()))
            tokens, mask = (np.full((size, width), value, np.int32) for value in (self._end, 0))
            limits, keys = np.zeros(size, np.int32), np.zeros((size, 2), np.int32)
            for place, row in enumerate(rows):
                prompt = prompts[row // samples]
                tokens[place, width - len(prompt) :] = prompt
                mask[place, width - len(prompt) :] = 1
                limits[place] = min(decoding.max_tokens, self._config.max_position_embeddings - len(prompt))
                keys[place] = numbers[row // samples], row % samples
            check_inputs(tokens, self._config.known_vocab_size)
            given = Prompts(*map(jnp.asarray, (tokens, mask, limits, keys)))
            decoded = jax.device_get(self._decode(self._params, given, settings, most, decoding.beams, stop))
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
        # Rows that have ended are computed on with the others, past the position table.
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
                    f"the prompt {shown(text)} has {len(prompt)} tokens, and {self._source} reads fewer than {longest} "
                    "of a prompt: pass a shorter one"
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
