"""Learning from a teacher during pretraining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert.config.validation import NonNegative, NonNegativeFloat, PositiveFloat, check_fields, check_unused
from bert.errors import UserError


@dataclass(frozen=True)
class DistillationConfig:
    """A teacher, and what the model learns of it next to training.objective."""

    teacher: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to learn from, --teacher for short: its
    vocabulary is taken, its weights stay as they are; null trains without a teacher."""
    checksum: str | None = None
    """SHA-256 of the teacher's weights, filled in at the start: a run resumes only with the same weights."""
    initial_weights: Literal["teacher", "random"] = "teacher"
    """Start of the student, if init is null: the teacher's embeddings, of which a narrower model takes the principal
    components, and in a model of the teacher's width and shape of layers as many of its layers (DistilBERT); or random
    numbers. A model that is wider than its teacher starts with random ones."""
    temperature: PositiveFloat = 2.0
    """Temperature that softens both distributions over tokens (Hinton et al. 2015)."""
    token_weight: NonNegativeFloat = 1.0
    """Weight of the KL divergence from the teacher's distribution at the predicted places, times the square of the
    temperature; without effect if the teacher has no MLM head."""
    hidden_weight: NonNegativeFloat = 1.0
    """Weight of the distance between hidden states of real tokens, the mean over the pairs of layers."""
    hidden_loss: Literal["cosine", "mse"] = "cosine"
    """That distance: 1 - cosine (DistilBERT) or the mean of the squared differences (TinyBERT)."""
    sentence_weight: NonNegativeFloat = 1.0
    """Weight of 1 - cosine between the means of the last hidden states over the tokens of a row."""
    student_layers: list[NonNegative] | None = None
    """Layers that learn the hidden states of distillation.teacher_layers, one each; 0 is the embeddings; null is the
    last layer. Where the widths differ, a linear projection of the student's states is learned with them."""
    teacher_layers: list[NonNegative] | None = None
    """The teacher's layers, as many; null is the last one."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("distillation.", self)
        if self.teacher is None:
            check_unused("distillation.", self, "but there is no teacher: remove it, or set distillation.teacher")
            return
        if not (self.token_weight or self.hidden_weight or self.sentence_weight):
            raise UserError(
                "distillation.token_weight, hidden_weight and sentence_weight are 0: set one of them, or remove "
                "distillation.teacher"
            )
        pair = (self.student_layers, self.teacher_layers)
        if (pair[0] is None) != (pair[1] is None) or len(pair[0] or ()) != len(pair[1] or ()):
            raise UserError(
                f"distillation.student_layers is {pair[0]} and distillation.teacher_layers {pair[1]}: set both, with "
                "as many layers"
            )
        if pair[0] is not None and len(set(pair[0])) != max(1, len(pair[0])):
            raise UserError(f"distillation.student_layers is {pair[0]}: list each layer once, and at least one")
