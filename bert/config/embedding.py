"""How embeddings of texts are pooled and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert.config.validation import Positive, PositiveFloat, check_fields
from bert.errors import UserError


@dataclass(frozen=True)
class EmbeddingConfig:
    """The task embedding: one vector for each text, whose cosines are trained."""

    loss: Literal["in_batch", "triplet", "margin_mse", "cosent", "cosine", "same_label"] = "in_batch"
    """Rows of a query, a positive and negatives: in_batch, in which the documents of all other rows of the batch, on
    all devices, are negatives too (InfoNCE); triplet, the margin between the positive and the row's own negatives; or
    margin_mse, the differences of the scores that a teacher gives these (Hofstätter et al. 2020). Pairs with a score:
    cosent, the order of the cosines (CoSENT), or cosine, the squared error of the cosine from the score, whose range
    is mapped to 0 to 1. Texts with a label: same_label, in which the texts of the batch with the same label are
    positives, and all others negatives (SupCon)."""
    temperature: PositiveFloat = 0.05
    """All losses but triplet and cosine: cosines are divided by it."""
    margin: PositiveFloat = 0.2
    """triplet: how far the cosine of a negative should be below that of the positive."""
    num_negatives: Positive | None = None
    """Rows of a query: most negatives of a row, its first ones; null takes all. Each adds a text to every row of a
    batch."""
    matryoshka: list[Positive] | None = None
    """Widths to which embeddings may be cut: the loss is the mean of those of the whole embedding and of its first
    numbers (Kusupati et al. 2022); null trains the whole embedding alone."""
    pooling: Literal["mean", "cls", "max"] | None = None
    """How the hidden states of the tokens become an embedding: their mean, the first one (cls), or the largest value of
    each feature; null takes that which init declares, else mean."""
    normalize: bool | None = None
    """Whether embeddings have length 1; losses and scores are of cosines in any case. null takes what init declares,
    else true."""
    lowercase: bool | None = None
    """Lower-case texts first, whatever the vocabulary does; null takes what init declares, else false."""

    query_prompt: str | None = None
    """What queries, or the first texts of pairs, begin with, such as "query: "; null takes what init declares, else
    nothing. A search puts it before its queries."""
    document_prompt: str | None = None
    """What documents, or the second texts of pairs, begin with; null takes what init declares, else nothing."""

    @property
    def has_scores(self) -> bool:
        """Whether the rows are pairs with a score."""
        return self.loss in ("cosent", "cosine")

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("embedding.", self)
        if (self.has_scores or self.loss == "same_label") and self.num_negatives is not None:
            raise UserError(
                f"embedding.num_negatives is set, but embedding.loss is {self.loss}, which has none: remove it"
            )
        if self.matryoshka is not None and not 0 < len(self.matryoshka) == len(set(self.matryoshka)):
            raise UserError(f"embedding.matryoshka is {self.matryoshka}: list each width once, or remove it")

    def check_width(self, hidden_size: int) -> None:
        """Raises UserError for a width that is not below the model's."""
        if self.matryoshka is not None and max(self.matryoshka) >= hidden_size:
            raise UserError(
                f"embedding.matryoshka has {max(self.matryoshka)}, but embeddings have {hidden_size} numbers, which "
                "are trained in any case: list smaller widths"
            )
