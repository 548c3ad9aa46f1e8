"""Texts and embeddings of models with an embedding per token (`bert.model.late_interaction`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert.data.inputs import Text
from bert.data.late_interaction import ScoredRows, tokenize_scored
from bert.errors import UserError
from bert.model.late_interaction import Role


def rows_of_texts(model: Any, texts: Sequence[Text], role: Role | None = None) -> ScoredRows:
    """Encodes texts as a model (`bert.Pretrained`) reads queries, documents, or texts without a role."""
    interaction = model.pooling_or_default.interaction
    max_length = min(interaction.max_length(role) or model.longest_text, model.config.max_position_embeddings)
    return tokenize_scored(model.tokenizer, texts, max_length, interaction, role)


def require_whole_texts(model: Any, long_texts: str) -> None:
    """Raises UserError if texts with an embedding per token would be read in another way than cut."""
    if long_texts != "cut":
        raise UserError(
            f"long_texts is {long_texts}, but {model.source} has an embedding per token, whose texts are cut: leave it "
            "out, and split long texts"
        )


def token_embeddings(corpus: Any, width: int, source: str) -> list[np.ndarray] | None:
    """Returns a corpus that consists of lists of embeddings [T_i, E]; None for texts.

    Raises:
        UserError: the corpus is an index, a sparse array or a single array, or an array has another width or a value
            that is not finite.
    """
    fix = "pass texts, or the list of arrays that embed returns"
    is_array = isinstance(corpus, np.ndarray) and np.issubdtype(corpus.dtype, np.number) and corpus.ndim < 3
    if is_array or hasattr(corpus, "toarray") or hasattr(corpus, "ntotal"):
        raise UserError(f"{source} has an embedding per token, and the corpus has one per text: {fix}")
    if not isinstance(corpus, Sequence | np.ndarray) or not len(corpus) or not isinstance(corpus[0], np.ndarray):
        return None
    for number, vectors in enumerate(corpus):
        shape: tuple[int, ...] = getattr(vectors, "shape", ())
        if len(shape) != 2 or shape[1] != width:
            raise UserError(
                f"document {number} of the corpus (from 0) has the shape {list(shape)}, but embeddings of {source} "
                f"are [T, {width}]: {fix}"
            )
        if not np.isfinite(vectors).all():
            raise UserError(f"document {number} of the corpus (from 0) holds NaN or infinity: compute it again")
    return list(corpus)
