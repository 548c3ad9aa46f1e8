"""Replaced-token detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bert.config.model import ModelConfig
from bert.config.validation import PositiveFloat, Range, check_fields, check_unused
from bert.errors import UserError

GENERATOR_HEAD_SIZE = 64
"""Features of a generator's head, as published."""


@dataclass(frozen=True)
class ElectraConfig:
    """Replaced-token detection (Clark et al. 2020); names as in google-research/electra configure_pretraining.py."""

    generator_hidden_size: Annotated[float, Range(above=0, most=1)] = 0.25
    """Width of the generator as a share of model.hidden_size; its feed-forward layer is 4 times as wide, its heads have
    64 features, its number of layers is the model's."""
    disc_weight: PositiveFloat = 50.0
    """Weight of the discriminator's loss next to the generator's."""

    def generator_width(self, model: ModelConfig) -> int:
        """Width of the generator's hidden states."""
        return round(model.hidden_size * self.generator_hidden_size)

    def check(self, model: ModelConfig, objective: str) -> None:
        """Raises UserError for values that leave no generator, or that ``training.objective`` ignores."""
        check_fields("electra.", self)
        if objective != "rtd":
            check_unused(
                "electra.", self, f"but training.objective is {objective}: remove it, or set training.objective rtd"
            )
        elif not model.prediction_transform:
            raise UserError(
                "model.prediction_transform is false, and training.objective rtd always has the transform: remove it"
            )
        width = self.generator_width(model)
        if not width:
            raise UserError(
                f"electra.generator_hidden_size is {self.generator_hidden_size}, which makes a generator of width 0 "
                f"with model.hidden_size {model.hidden_size}: use a larger share"
            )
        head_size = width // generator_heads(width)
        if model.position_embedding_type == "rotary" and objective == "rtd" and head_size % 2:
            raise UserError(
                f"electra.generator_hidden_size is {self.generator_hidden_size}, which makes heads of {head_size} "
                "features in the generator, and rotary positions turn pairs of features: use another share"
            )


def generator_heads(width: int) -> int:
    """Heads of a generator of this width; they have `GENERATOR_HEAD_SIZE` features as far as they divide it
    (google-research/electra run_pretraining.py, get_generator_config)."""
    return next(n for n in range(max(1, width // GENERATOR_HEAD_SIZE), 0, -1) if width % n == 0)
