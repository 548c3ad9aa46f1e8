"""Rows of texts with a vector per token (`bert.model.late_interaction`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from bert.data.encoding import tokenize
from bert.data.inputs import Text
from bert.data.rows import SCORE_MASK, ChoiceRows, QueryDocumentRows, TokenRows, number_texts
from bert.errors import UserError
from bert.model.late_interaction import LateInteraction, Role
from bert.tokenizer.library import special_ids


@dataclass(frozen=True, kw_only=True)
class ScoredRows(TokenRows):
    """R rows, of which some tokens have a vector."""

    attended_lengths: np.ndarray
    """[R] tokens at the start of each row that are attended to. The others attend to these."""
    scored: np.ndarray
    """[tokens of all rows] bool: whether a token has a vector."""

    @property
    def can_be_packed(self) -> bool:
        return bool((self.attended_lengths == self.lengths).all())

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows (see `TokenRows.batch`), with score_mask [B, T] int32.

        attention_mask is 0 for tokens not attended to.
        """
        batch = super().batch(rows, length, batch_size)
        is_token, rows = batch["attention_mask"] > 0, np.asarray(rows)
        batch[SCORE_MASK] = np.zeros_like(batch["attention_mask"])
        indices = (self.offsets[rows][:, None] + np.arange(length))[is_token[: len(rows)]]
        batch[SCORE_MASK][is_token] = self.scored[indices]
        batch["attention_mask"][: len(rows)] &= np.arange(length) < self.attended_lengths[rows, None]
        return batch

    def vectors_of(self, row: int, vectors: np.ndarray) -> np.ndarray:
        """Returns the vectors [T_i, E] of the scored tokens, from the vectors of all tokens of a row."""
        return vectors[self.scored[self.offsets[row] : self.offsets[row + 1]]]


def tokenize_scored(
    tokenizer: Tokenizer, texts: Sequence[Text], max_length: int, interaction: LateInteraction, role: Role | None
) -> ScoredRows:
    """Encodes texts as rows, and queries with their expansion. ``tokenizer`` is not changed.

    Args:
        max_length: maximum number of tokens of a text without expansion.
        role: role of all texts; None for texts without one.

    Raises:
        UserError: see `bert.data.encoding.tokenize`.
    """
    rows = tokenize(tokenizer, texts, max_length)
    attended = rows.lengths
    if role == "query" and interaction.expanded_length is not None:
        rows = _expanded(rows, expansion_id(tokenizer, interaction), interaction.expanded_length)
        attended = rows.lengths if interaction.attends_to_expansion else attended
    skips = (role or "document") in interaction.skipping_roles
    scored = ~(np.isin(rows.ids, skipped_ids(tokenizer, interaction)) & skips)
    return ScoredRows(
        ids=rows.ids,
        offsets=rows.offsets,
        segment_a_lengths=rows.segment_a_lengths,
        labels=None,
        pad_token_id=rows.pad_token_id,
        has_third_type=rows.has_third_type,
        attended_lengths=attended,
        scored=scored,
    )


def tokenize_scored_queries(
    tokenizer: Tokenizer,
    queries: Sequence[str],
    documents: Sequence[Sequence[str]],
    scores: np.ndarray | None,
    max_length: int,
    interaction: LateInteraction,
    has_loss: bool = True,
) -> QueryDocumentRows:
    """Encodes queries and their documents like `bert.data.long_texts.tokenize_queries`, with a vector per token.

    Args:
        max_length: maximum number of tokens of texts whose role has no other maximum.
    """
    flat = [text for texts in documents for text in texts]
    offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    sides: list[tuple[Role, Sequence[str]]] = [("query", queries), ("document", flat)]
    rows, others = (
        tokenize_scored(tokenizer, texts, interaction.max_length(role) or max_length, interaction, role)
        for role, texts in sides
    )
    return QueryDocumentRows(
        dataclasses.replace(rows, labels=scores),
        ChoiceRows(others, offsets, None),
        number_texts(queries),
        number_texts(flat),
        has_loss,
    )


def skipped_ids(tokenizer: Tokenizer, interaction: LateInteraction) -> list[int]:
    """Returns the ids of the tokens without a vector. Tokens that the vocabulary lacks have none."""
    ids = map(tokenizer.token_to_id, interaction.skipped_tokens)
    return [number for number in ids if number is not None]


def expansion_id(tokenizer: Tokenizer, interaction: LateInteraction) -> int:
    """Returns the id of the token that extends queries: the mask token, or the end token of a vocabulary without one.

    Raises:
        UserError: the vocabulary lacks the token.
    """
    if interaction.expansion_token is None:
        special = special_ids(tokenizer)
        number = special.find("mask")
        return special.end if number is None else number
    number = tokenizer.token_to_id(interaction.expansion_token)
    if number is None:
        raise UserError(
            f"the vocabulary has no token {interaction.expansion_token!r}, by which queries are extended: use the "
            "tokenizer and the settings of one model"
        )
    return number


def _expanded(rows: TokenRows, token_id: int, length: int) -> TokenRows:
    """Returns the rows, of which those with fewer tokens than ``length`` end with ``token_id`` of type 0."""
    lengths = np.maximum(rows.lengths, length)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.full(offsets[-1], token_id, np.int32)
    own = np.arange(len(rows.ids)) + np.repeat(offsets[:-1] - rows.offsets[:-1], rows.lengths)
    ids[own] = rows.ids
    segment_a_lengths = (rows.segment_a_lengths + lengths - rows.lengths).astype(np.int32)
    return TokenRows(ids, offsets, segment_a_lengths, None, rows.pad_token_id, has_third_type=rows.has_third_type)
