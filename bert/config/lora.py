"""Low-rank adaptation of a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass, field

from bert.config.validation import Positive, PositiveFloat, check_fields, check_unused
from bert.errors import UserError

PROJECTIONS = ("query", "key", "value", "output")
"""The projections of an attention layer."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021) next to a frozen encoder."""

    rank: Positive | None = None
    """Rank r of the adapters, 8 in the paper for GLUE: only these, the pooler and the head are trained, and checkpoints
    hold only these; null trains all. Adapters want a higher learning rate: 4e-4 or more."""
    alpha: PositiveFloat = 8.0
    """An adapter is multiplied by alpha / rank, so that another rank needs no other learning rate."""
    projections: list[str] = field(default_factory=lambda: ["query", "value"])
    """Projections of each self-attention that have adapters: query, key, value, output. The paper's experiments adapt
    query and value, the best use of a given number of parameters (its table 5)."""
    checksum: str | None = None
    """SHA-256 of the frozen weights, filled in at the start: a run resumes only with the same weights."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("lora.", self)
        if self.rank is None:
            check_unused("lora.", self, "but lora.rank is null: set lora.rank, or remove it")
        if not self.projections or len(set(self.projections)) < len(self.projections):
            raise UserError(f"lora.projections is {self.projections}: list at least one projection, each once")
        for name in self.projections:
            if name not in PROJECTIONS:
                raise UserError(f"lora.projections has {name!r}: use some of {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices; of a run with adapters."""
        return self.alpha / (self.rank or 1)
