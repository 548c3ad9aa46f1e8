"""How a reranker, which scores a query together with a document, is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert.config.validation import Positive, check_fields


@dataclass(frozen=True)
class RerankerConfig:
    """The task reranker: one score for a query together with a document (a cross-encoder)."""

    loss: Literal["binary", "ordinal", "listwise"] = "binary"
    """binary: the cross-entropy of each document's relevance, 0 to 1, and the sigmoid of its score. ordinal: that of
    the order of each two documents of a query of which one is more relevant (RankNet). listwise: that of the softmax
    over all documents of a query (ListNet)."""
    num_negatives: Positive | None = None
    """Training rows with a positive: most negatives of a row, its first ones; null takes all. A batch has room for as
    many documents a query as the query with the most of them has. Dev and test are scored with all."""

    def check(self) -> None:
        """Raises UserError for values that cannot work."""
        check_fields("reranker.", self)
