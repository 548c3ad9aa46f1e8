"""Text generation: `generate` and its settings. `bert.inference.generators` has the compiled loops.

Does not import JAX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from bert.config import Decoding
from bert.data.inputs import check_count
from bert.errors import UserError
from bert.inference.scoring import plain_texts
from bert.model.names import ENCODER_DECODER


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


def generate(
    model: Any,
    prompts: str | Sequence[str],
    *,
    details: bool = False,
    batch_size: int = 16,
    numbers: Sequence[int] | None = None,
    **settings: Any,
) -> Any:
    """Continues prompts or, with an encoder-decoder, generates the target of each source.

    The default is greedy decoding or, for an encoder-decoder, the settings with which it was evaluated.
    ``temperature`` enables sampling, and ``beams`` enables beam search. The number of positions limits prompt and
    continuation together, and source and target separately. With segment recurrence it limits only the prompt.

    A sample depends only on the seed, the indices of its text and sample, and the position. It does not depend on other
    texts or the batch size.

    Args:
        prompts: texts, or sources for an encoder-decoder. An empty prompt starts a new text. A string is one prompt,
            whose result is returned without a list.
        details: return `Continuation` with scores and token ids instead of strings.
        batch_size: number of samples, or of texts with all their beams, per batch.
        numbers: indices of the texts, on which samples depend; None for 0, 1, ...
        **settings: fields of `bert.config.Decoding`: max_tokens, beams, temperature, top_k, top_p, num_samples, seed,
            length_penalty, length_norm, early_stopping, repetition_penalty, no_repeat_ngram_size, min_tokens, stop.

    Returns:
        The new text of each prompt, without the prompt. With ``num_samples`` above 1, a list of texts per prompt, best
        first with beam search.

    Raises:
        UserError: the model is neither a causal language model nor an encoder-decoder, a prompt is not a text or is too
            long, or a setting is invalid.
    """
    if isinstance(prompts, str):
        return generate(model, [prompts], details=details, batch_size=batch_size, numbers=numbers, **settings)[0]
    decoding = _make_decoding(model.complete_decoding(settings))
    check_count("batch_size", batch_size)
    model.require_generation()
    texts = plain_texts(prompts)
    results = model._text_generator(texts, decoding, batch_size, _check_numbers(numbers, len(texts)))
    answers = [[answer if details else answer.text for answer in of_text] for of_text in results]
    return answers if decoding.num_samples > 1 else [answer for [answer] in answers]


def _make_decoding(settings: Mapping[str, Any]) -> Decoding:
    """Validates settings. Raises UserError for unknown names and invalid values."""
    names = [field.name for field in fields(Decoding)]
    if unknown := [name for name in settings if name not in names]:
        raise UserError(f"{unknown[0]} is not a setting of generation: use one of {', '.join(names)}")
    decoding = Decoding(**settings)
    decoding.check()
    return decoding


def complete_decoding(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Completes settings of `generate` with the settings with which an encoder-decoder was evaluated.

    A temperature in ``settings`` replaces evaluated beams, and beams replace evaluated sampling.
    """
    if model.architecture != ENCODER_DECODER or model.decoding is None:
        return settings
    defaults, plain = vars(model.decoding), vars(Decoding())
    replaced: tuple[str, ...] = ()
    if settings.get("temperature") and "beams" not in settings:
        replaced = ("beams", "num_samples")
    elif isinstance(beams := settings.get("beams"), int) and beams > 1 and "temperature" not in settings:
        replaced = ("temperature", "top_k", "top_p")
    return {**defaults, **{name: plain[name] for name in replaced}, **settings}


def _check_numbers(numbers: Sequence[int] | None, num_texts: int) -> list[int]:
    """Returns the indices of the texts. Raises UserError if they are invalid or their count is wrong."""
    numbers = list(range(num_texts) if numbers is None else numbers)
    if any(not isinstance(number, (int, np.integer)) or not 0 <= number < 2**31 for number in numbers):
        raise UserError("numbers has an entry that is not a whole number from 0 to 2,147,483,647: pass another")
    if len(numbers) != num_texts:
        raise UserError(f"numbers has {len(numbers)} entries for {num_texts} prompts: pass one for each")
    return numbers
