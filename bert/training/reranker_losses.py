"""Losses of rerankers, each the mean over queries: logits [B, C] of C documents a query, and their relevance [B, C]
from 0 to 1 as labels. Documents that a query lacks have no share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from bert.config import RerankerConfig
from bert.model.array_types import Array
from bert.training.losses import Batch, TaskLoss, WeightedSum, expected_rows

LEAST = jnp.finfo(jnp.float32).min
"""Logit of what has no share in a softmax."""


def reranker_loss(settings: RerankerConfig) -> TaskLoss:
    """The loss of a run; ``accuracy`` is the share of queries of which a most relevant document has the highest
    score."""
    of_queries = {"binary": binary_losses, "ordinal": ordinal_losses, "listwise": listwise_losses}[settings.loss]

    def sums(logits: Float[Array, "B C"], batch: Batch) -> tuple[WeightedSum, ...]:
        relevance, is_there, weights = batch["labels"], batch["choice_mask"] > 0, batch["weights"]
        losses = of_queries(logits, relevance, is_there)
        best = jnp.argmax(jnp.where(is_there, logits, LEAST), axis=1, keepdims=True)
        most = jnp.max(jnp.where(is_there, relevance, 0), axis=1)
        hits = (jnp.take_along_axis(relevance, best, axis=1)[:, 0] >= most).astype(jnp.float32)
        counted = jnp.sum(weights)
        return (jnp.sum(losses * weights), counted), (jnp.sum(hits * weights), counted)

    return TaskLoss(sums, expected_rows, (f"{settings.loss}_loss", "accuracy"))


def binary_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """The mean over a query's documents of the cross-entropy of its relevance and the sigmoid of its logit."""
    losses = jax.nn.softplus(logits) - relevance * logits
    return _mean(losses, is_there, (1,))


def ordinal_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """The mean of log(1 + exp(s_j - s_i)) over the pairs of a query's documents of which i is more relevant than j
    (RankNet; Burges et al. 2005, section 3)."""
    pairs = is_there[:, :, None] & is_there[:, None, :] & (relevance[:, :, None] > relevance[:, None, :])
    return _mean(jax.nn.softplus(logits[:, None, :] - logits[:, :, None]), pairs, (1, 2))


def listwise_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """The cross-entropy of the softmax over a query's documents, of which each should have the share that its relevance
    has in the sum of all (ListNet with shares of relevance; Cao et al. 2007, section 4.2)."""
    log_shares = jax.nn.log_softmax(jnp.where(is_there, logits, LEAST), axis=1)
    wanted = relevance / jnp.maximum(jnp.sum(relevance, axis=1, keepdims=True), 1e-9)
    return -jnp.sum(jnp.where(is_there, wanted * log_shares, 0), axis=1)


def _mean(values: Array, counted: Array, axes: tuple[int, ...]) -> Array:
    """The mean of those that are counted; 0 of none."""
    return jnp.sum(jnp.where(counted, values, 0), axis=axes) / jnp.maximum(jnp.sum(counted, axis=axes), 1)
