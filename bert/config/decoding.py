"""How text is generated from a model's probabilities. The text under each field is its ``--help``."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from bert.config.validation import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Range, Seed, check_fields
from bert.errors import UserError

TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}
"""What a value may be in Python, NumPy's numbers among them, and its name in messages."""


@dataclass(frozen=True)
class Decoding:
    """Greedy decoding (the default), sampling if ``temperature`` is set, or beam search if ``beams`` is over 1."""

    max_tokens: Positive = 64
    """Longest continuation, in tokens, the end token included."""
    beams: Positive = 1
    """Hypotheses that beam search keeps of each text."""
    length_penalty: Annotated[float, Range()] = 1.0
    """Exponent of the length by which beam search divides a sum of log-probabilities; 0 compares the sums."""
    length_norm: Literal["length", "gnmt"] = "length"
    """That length: the generated tokens (length), or (5 + tokens) / 6 (gnmt; Wu et al. 2016, section 7)."""
    early_stopping: bool = False
    """Beam search ends at as many finished hypotheses as beams, not when no better one is possible."""
    temperature: NonNegativeFloat = 0.0
    """Divisor of the logits that tokens are sampled from; 0 takes the most likely token."""
    top_k: Positive | None = None
    """Sample from so many of the most likely tokens; without it, from all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample from the fewest tokens that have this probability together (Holtzman et al. 2019)."""
    repetition_penalty: PositiveFloat = 1.0
    """Divisor of the logits above 0, and factor of those below, of tokens that a text already has, prompt included
    (Keskar et al. 2019); beam search applies it to log-probabilities."""
    no_repeat_ngram_size: NonNegative = 0
    """Length of the token sequences that may not occur twice in a text, prompt included; 0 allows all repetitions."""
    min_tokens: NonNegative = 0
    """Fewest tokens in front of the end token."""
    stop: list[str] | None = None
    """Texts that end a continuation, which is cut in front of them. On the command line it may be repeated."""
    num_samples: Positive = 1
    """Continuations of each text: samples, or the best of beam search."""
    seed: Seed = 0
    """Seed of the samples: a token depends on it, the numbers of the text and of the sample, and the position alone."""

    def check(self, prefix: str = "") -> None:
        """Raises UserError for values that cannot work.

        Args:
            prefix: of the fields' names in messages, such as ``--``.
        """
        for field in fields(self):
            if field.name != "stop":
                _check_type(f"{prefix}{field.name}", getattr(self, field.name), field.default)
        if self.stop is not None and not (
            isinstance(self.stop, list | tuple) and all(isinstance(text, str) and text for text in self.stop)
        ):
            raise UserError(f"{prefix}stop is {self.stop!r}: pass a list of texts that are not empty")
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"{prefix}min_tokens is {self.min_tokens}, over {prefix}max_tokens {self.max_tokens}: lower it"
            )
        check_fields(prefix, self)
        if self.beams > 1 and self.temperature > 0:
            raise UserError(
                f"{prefix}beams is {self.beams} and {prefix}temperature {self.temperature}: remove one of them, as "
                "beam search does not sample"
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            name, value = ("top_p", self.top_p) if self.top_k is None else ("top_k", self.top_k)
            raise UserError(
                f"{prefix}{name} is {value}, but {prefix}temperature is 0, which takes the most likely token: set "
                f"{prefix}temperature, for example to 1"
            )
        if self.temperature == 0 and self.num_samples > self.beams:
            raise UserError(
                f"{prefix}num_samples is {self.num_samples}, but there are no more continuations than beams "
                f"({self.beams}) without sampling: set {prefix}temperature or {prefix}beams"
            )


def _check_type(name: str, value: object, default: object) -> None:
    """Raises UserError for a value of another type than the field's, which its default tells; None is a whole number
    that may be left out."""
    if default is None and value is None:
        return
    kind, words = TYPES[int if default is None else type(default)]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{name} is {value!r}: pass {words}")
