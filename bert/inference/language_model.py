"""What `bert.load` returns, as far as it is a left-to-right language model: it continues texts and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import Decoding
from bert.data.inputs import as_list, as_texts, check_count
from bert.errors import UserError
from bert.inference.generate import SequenceGenerator, TextGenerator, make_decoding
from bert.inference.scoring import TextScorer
from bert.interchange.bundle import ModelBundle
from bert.parallel.devices import require_no_fork

ENCODER_DECODER = "BertForSequenceToSequence"


@dataclass(frozen=True, kw_only=True, repr=False)
class LanguageModel(ModelBundle):
    """A model that gives probabilities to texts; of another kind, it refuses."""

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        details: bool = False,
        batch_size: int = 16,
        numbers: Sequence[int] | None = None,
        **settings: Any,
    ) -> Any:
        """Continues texts, of which the answers have only what is new; an encoder-decoder writes the target of each.

        The default is greedy decoding, or the settings that an encoder-decoder was evaluated with; ``temperature``
        samples, and ``beams`` searches. A prompt and its continuation are at most as long as the position table, and so
        are a source and a target. A sample depends on the seed, the number of its text, its own number and the position
        alone, whatever the other texts and the batch size.

        Args:
            prompts: texts; the empty one is the start of a text. Of an encoder-decoder, sources. A string is one text,
                and its answer is not in a list.
            details: answers are `Continuation`, with scores and token ids, instead of strings.
            batch_size: samples at once, or texts with all their beams.
            numbers: of the texts, on which samples depend; 0, 1, ... if None.
            **settings: fields of `bert.config.Decoding`: max_tokens, beams, temperature, top_k, top_p, num_samples,
                seed, length_penalty, length_norm, early_stopping, repetition_penalty, no_repeat_ngram_size, min_tokens,
                stop.

        Returns:
            An answer for each prompt in their order; if ``num_samples`` is over 1, the list of its answers, those of
            beam search with the best first.

        Raises:
            UserError: the model is neither a left-to-right language model nor an encoder-decoder, a prompt is not a
                text or is too long for the position table, or a setting cannot work.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], details=details, batch_size=batch_size, numbers=numbers, **settings)[0]
        decoding = make_decoding(self.complete_decoding(settings))
        check_count("batch_size", batch_size)
        self.require_generation()
        texts = self._as_texts(prompts)
        numbers = list(range(len(texts)) if numbers is None else numbers)
        if any(not isinstance(number, (int, np.integer)) or not 0 <= number < 2**31 for number in numbers):
            raise UserError("numbers has an entry that is not a whole number from 0 to 2,147,483,647: pass another")
        if len(numbers) != len(texts):
            raise UserError(f"numbers has {len(numbers)} entries for {len(texts)} prompts: pass one for each")
        found = self._text_generator(texts, decoding, batch_size, numbers)
        answers = [[answer if details else answer.text for answer in of_text] for of_text in found]
        return answers if decoding.num_samples > 1 else [answer for [answer] in answers]

    def complete_decoding(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of `generate`, completed by those that an encoder-decoder was evaluated with.

        Its beams give way to a temperature that is given, and its temperature to beams.
        """
        if self.architecture != ENCODER_DECODER or self.decoding is None:
            return settings
        own, plain = vars(self.decoding), vars(Decoding())
        if settings.get("temperature") and "beams" not in settings:
            own = {**own, "beams": plain["beams"], "num_samples": plain["num_samples"]}
        elif isinstance(beams := settings.get("beams"), int) and beams > 1 and "temperature" not in settings:
            own = {**own, **{name: plain[name] for name in ("temperature", "top_k", "top_p")}}
        return {**own, **settings}

    def score(self, texts: str | Sequence[str], *, stride: int | None = None, batch_size: int = 8) -> Any:
        """The log-probability of texts under a left-to-right language model, and their tokens: a `TextScore` each.

        Every token is predicted once, the first one after the end token. Texts longer than the position table are read
        in windows.

        Args:
            texts: texts. A string is one text, and its score is not in a list.
            stride: tokens by which a window begins after the one before: the fewer, the more context and the more
                computation. None is half of the position table.
            batch_size: windows at once.

        Raises:
            UserError: the model is not a left-to-right language model, an input is not a text, or ``stride`` is not
                between 1 and the length of the position table.
        """
        if isinstance(texts, str):
            return self.score([texts], stride=stride, batch_size=batch_size)[0]
        longest = self.config.max_position_embeddings
        stride = max(1, longest // 2) if stride is None else stride
        for name, value in (("batch_size", batch_size), ("stride", stride)):
            check_count(name, value)
        if stride > longest:
            raise UserError(f"stride is {stride}, and {self.source} reads {longest} tokens: pass at most as many")
        self.require_language_model()
        return self._text_scorer(self._as_texts(texts), stride, batch_size)

    def require_generation(self) -> None:
        """Raises UserError if the model is neither a left-to-right language model nor an encoder-decoder."""
        if self.architecture != ENCODER_DECODER:
            self.require_language_model()

    def require_language_model(self) -> None:
        """Raises UserError if the model is not a left-to-right language model."""
        if self.architecture != "BertForCausalLM":
            raise UserError(
                f"{self.source} is not a left-to-right language model ({self.architecture}): use a run with "
                "data.prediction next, or a GPT-2 model"
            )

    def _as_texts(self, texts: Sequence[str]) -> list[str]:
        """The inputs as texts. Raises UserError."""
        wanted = "a text is needed: pass a string"
        return [as_texts(given, index, wanted)[0] for index, given in enumerate(as_list(texts), 1)]

    @cached_property
    def _text_generator(self) -> TextGenerator | SequenceGenerator:
        if self.architecture == ENCODER_DECODER:
            return self._sequence_generator
        return TextGenerator(self.config, self._device_params, self.tokenizer, self.source, jnp.dtype(self.dtype))

    @cached_property
    def _sequence_generator(self) -> SequenceGenerator:
        tokenizers = (self.tokenizer, self.target_tokenizer or self.tokenizer)
        return SequenceGenerator(self.config, self._device_params, tokenizers, self.source, jnp.dtype(self.dtype))

    @cached_property
    def _text_scorer(self) -> TextScorer:
        return TextScorer(self.config, self._device_params, self.tokenizer, jnp.dtype(self.dtype))

    @cached_property
    def _device_params(self) -> dict[str, Any]:
        require_no_fork()
        return jax.device_put(self.params)
