"""Losses of embedding models and rerankers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from bert.config import EmbeddingConfig, RerankerConfig
from bert.config.options import TEACHER_LOSSES
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.late_interaction import EMPTY_SCORE
from bert.model.reductions import normalized
from bert.parallel.backends import gather_rows_if_axis, psum_if_axis
from bert.training.length_groups import SequenceOutputs, apply_to_groups, groups_of
from bert.training.losses import (
    Apply,
    Batch,
    Loss,
    TaskLoss,
    WeightedSum,
    WeightedSums,
    expected_rows,
    softened_divergence,
)

FLOPS = "flops_loss"
"""Name of the FLOPS regularizer."""

LEXICAL_METRICS = (FLOPS, "query_words", "document_words")
"""Names of the results of `lexical_sums`."""

FLOAT_MIN = jnp.finfo(jnp.float32).min
"""Logit of an entry that is excluded from a softmax."""


PRODUCTS_AT_ONCE = 2**24
"""Maximum number of products of MaxSim that are in memory at once, for 64 MiB."""


class Comparison(NamedTuple):
    """How queries and documents are compared. Their embeddings have the shape V: [D], or [T, E] for tokens.

    Attributes:
        own: queries [B, *V] and documents [B, C, *V] of the same rows -> scores [B, C].
        all: queries [B, *V] and all documents [N, *V] -> scores [B, N].
    """

    own: Callable[[Array, Array], Array]
    all: Callable[[Array, Array], Array]


PRODUCTS = Comparison(partial(jnp.einsum, "bd,bcd->bc"), partial(jnp.einsum, "bd,nd->bn"))
"""Inner products: cosines of vectors of length 1."""


def embedding_loss(settings: EmbeddingConfig, axis: str | None, maximum: bool = False) -> TaskLoss:
    """Returns the loss of a run, as a function of `SequenceOutputs`, or of the outputs of rows [B, texts * D].

    With a vector per token, D is T * E.

    Args:
        axis: name of the device axis over which the rows of a batch are sharded; None if an array has all rows.
        maximum: of texts with windows, use the maximum over the windows instead of the mean.
    """
    compare = max_sim_of(settings.late_interaction.query_length) if settings.has_token_vectors else PRODUCTS
    losses: dict[str, Callable[..., tuple[WeightedSum, ...]]] = {
        "in_batch": partial(in_batch_loss, temperature=settings.divisor, axis=axis, compare=compare),
        "triplet": partial(triplet_loss, margin=settings.margin, compare=compare),
        "margin_mse": partial(margin_mse_loss, temperature=settings.divisor, compare=compare),
        "kl_divergence": partial(kl_divergence_loss, temperature=settings.divisor, compare=compare),
        "same_label": partial(same_label_loss, temperature=settings.divisor, axis=axis),
        "cosent": partial(cosent_loss, temperature=settings.divisor, axis=axis, compare=compare),
        "cosine": cosine_loss,
    }
    one, widths = losses[settings.loss], settings.matryoshka or ()
    has_accuracy = settings.loss in ("in_batch", "triplet", "same_label")
    names = (f"{settings.loss}_loss", "accuracy") if has_accuracy else (f"{settings.loss}_loss",)

    def sums(outputs: SequenceOutputs | Array, batch: Batch) -> tuple[WeightedSum, ...]:
        if isinstance(outputs, SequenceOutputs):
            outputs = outputs.of_rows(batch, axis, maximum, bool(settings.normalize))
        texts = 1 + batch["document_numbers"].shape[-1] if "document_numbers" in batch else 1
        if settings.has_token_vectors:
            return one(outputs.reshape(len(outputs), texts, -1, settings.token_dimensions), batch)
        embeddings = outputs.reshape(len(outputs), texts, -1)
        if settings.is_lexical:
            return *one(embeddings, batch), *lexical_sums(embeddings, batch, settings, axis)
        (total, weight), *counts = one(normalized(embeddings), batch)
        cut = [one(normalized(embeddings[..., :width]), batch)[0][0] for width in widths]
        return (sum(cut, total) / (1 + len(cut)), weight), *counts

    return TaskLoss(
        sums,
        lambda batch: jnp.sum(batch["weights"]),
        (*names, *LEXICAL_METRICS) if settings.is_lexical else names,
        # In batches of similar lengths, the negatives would not be a random sample of the documents.
        by_length=settings.loss in ("cosine", "triplet", *TEACHER_LOSSES),
    )


def max_sim_of(query_length: int | None) -> Comparison:
    """Returns MaxSim: the sum over a query's vectors of their maximum product with a document's vectors.

    See Khattab and Zaharia 2020, equation 3, and `bert.model.late_interaction.max_sim`. Zero vectors are no vectors.

    Args:
        query_length: maximum number of tokens of a query; None for the length of the arrays.
    """

    def own(queries: Float[Array, "B T E"], documents: Float[Array, "B C S E"]) -> Float[Array, "B C"]:
        def of_block(block: tuple[Array, Array]) -> Array:
            return _reduce_products(jnp.einsum("bte,bcse->bcts", *block), block[1])

        queries, (_, texts, length, _) = queries[:, :query_length], documents.shape
        return _map_blocks(of_block, (queries, documents), queries.shape[1] * texts * length)

    def every(queries: Float[Array, "B T E"], documents: Float[Array, "N S E"]) -> Float[Array, "B N"]:
        def of_block(block: tuple[Array]) -> Array:
            return _reduce_products(jnp.einsum("bte,nse->bnts", *block, documents), documents)

        queries, (texts, length, _) = queries[:, :query_length], documents.shape
        return _map_blocks(of_block, (queries,), queries.shape[1] * texts * length)

    return Comparison(own, every)


def _reduce_products(products: Float[Array, "*pairs T S"], documents: Float[Array, "*texts S E"]) -> Array:
    """Returns the sum over T of the maximum over the tokens S of a document; `EMPTY_SCORE` without any."""
    is_token = jnp.any(documents != 0, axis=-1)
    best = jnp.max(jnp.where(is_token[..., None, :], products, EMPTY_SCORE), axis=-1)
    return jnp.where(jnp.any(is_token, axis=-1), jnp.sum(best, axis=-1), EMPTY_SCORE)


def _map_blocks(function: Callable[[Any], Array], arrays: tuple[Array, ...], products_per_row: int) -> Array:
    """Applies a function to blocks of rows [B, ...], so that up to `PRODUCTS_AT_ONCE` are in memory.

    Products are computed again for the gradients. A block has rows of all parts of the batch, so that the devices of a
    mesh share each block.
    """
    rows = len(arrays[0])
    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    size = max(n for n in sizes if n == 1 or n * products_per_row <= PRODUCTS_AT_ONCE)
    if size == rows:
        return function(arrays)
    blocks = jax.tree.map(lambda x: x.reshape(size, rows // size, *x.shape[1:]).swapaxes(0, 1), arrays)
    results: Array = jax.lax.map(jax.checkpoint(function, prevent_cse=False), blocks)
    return results.swapaxes(0, 1).reshape(rows, -1)


def lexical_sums(
    embeddings: Float[Array, "B texts V"], batch: Batch, settings: EmbeddingConfig, axis: str | None
) -> tuple[WeightedSum, ...]:
    """Computes the sums of `LEXICAL_METRICS`: the FLOPS regularizer, and the nonzero weights per query and document.

    The regularizer of N texts is the sum over the vocabulary of the squared mean weight (Paria et al. 2020, section 4;
    Formal et al. 2021). Like `cosent_loss`, it is one number per batch, weighted by rows. The texts of a row after the
    first one are documents.

    Args:
        batch: has ``flops_ramp`` [B], the share of the regularizer's weight in this step, in training batches.
    """
    weights = batch["weights"]
    rows, is_query = jnp.sum(weights), (weights > 0)[:, None]
    is_document = is_query & (batch["document_numbers"] >= 0) if "document_numbers" in batch else is_query[:, 1:]
    loss, counts = jnp.zeros(()), []
    for factor, vectors, is_there in (
        (settings.query_flops_weight, embeddings[:, :1], is_query),
        (settings.document_flops_weight, embeddings[:, 1:], is_document),
    ):
        mask = is_there.astype(jnp.float32)
        sums = (jnp.einsum("btv,bt->v", vectors, mask)[None], jnp.sum(mask)[None])
        totals, texts = (jnp.sum(array, axis=0) for array in gather_rows_if_axis(sums, axis))
        loss += factor * jnp.sum(jnp.square(totals / jnp.maximum(texts, 1)))
        counts.append((jnp.sum(jnp.count_nonzero(vectors, axis=-1) * mask), jnp.sum(mask)))
    ramp = batch["flops_ramp"][0] if "flops_ramp" in batch else 1.0
    return (loss * ramp * rows, rows), *counts


def in_batch_loss(
    embeddings: Float[Array, "B texts *V"],
    batch: Batch,
    temperature: float,
    axis: str | None,
    compare: Comparison = PRODUCTS,
) -> tuple[WeightedSum, ...]:
    """Computes the cross-entropy of each query's positive against all other documents of the batch (InfoNCE).

    See van den Oord et al. 2018, equation 4. Also returns the share of queries whose positive is nearest. Documents
    with the same text as the positive, and positives of rows with the same query, are not used as negatives.

    Args:
        embeddings: [B, 1 + C, D], the query, its positive and its negatives: vectors of length 1, so that inner
            products are cosines, or weights of words; [B, 1 + C, T, E] for vectors of tokens.
        batch: has ``query_numbers`` [B], ``document_numbers`` [B, C] (-1 for none), and ``weights`` [B].
    """
    queries = embeddings[:, 0]
    query_numbers, document_numbers = batch["query_numbers"], batch["document_numbers"]
    is_there = (document_numbers >= 0) & (batch["weights"] > 0)[:, None]
    # The number of the query that a document is the positive of.
    answered = jnp.full_like(document_numbers, -1).at[:, 0].set(query_numbers)
    mine = (embeddings[:, 1:], document_numbers, answered, is_there)
    documents, numbers, answered, is_there = gather_rows_if_axis(mine, axis)
    documents = documents.reshape(-1, *documents.shape[2:])
    numbers, answered, is_there = (array.reshape(-1) for array in (numbers, answered, is_there))
    is_negative = is_there & (numbers != document_numbers[:, :1]) & (answered != query_numbers[:, None])
    logits = jnp.where(is_negative, compare.all(queries, documents) / temperature, FLOAT_MIN)
    right = compare.own(queries, embeddings[:, 1:2])[:, 0] / temperature
    losses = jax.nn.logsumexp(jnp.concatenate([right[:, None], logits], axis=1), axis=1) - right
    hits = (right > jnp.max(logits, axis=1)).astype(jnp.float32)
    weights = batch["weights"]
    return (jnp.sum(losses * weights), jnp.sum(weights)), (jnp.sum(hits * weights), jnp.sum(weights))


def triplet_loss(
    embeddings: Float[Array, "B texts *V"], batch: Batch, margin: float, compare: Comparison = PRODUCTS
) -> tuple[WeightedSum, ...]:
    """Computes the mean of max(0, ``margin`` - s_p + s_n) over a row's negatives, where s is the score with the query.

    See Schroff et al. 2015, section 3.1; here with cosines. Also returns the share of rows whose positive is nearest.

    Args:
        embeddings, batch: see `in_batch_loss`.
    """
    scores, is_there = _own_scores(embeddings, batch, compare)
    losses = jax.nn.relu(margin - scores[:, :1] + scores[:, 1:])
    hits = jnp.all(~is_there | (scores[:, 1:] < scores[:, :1]), axis=1).astype(jnp.float32)
    weights = batch["weights"]
    return (_sum_of_rows(losses, is_there, weights), jnp.sum(weights)), (jnp.sum(hits * weights), jnp.sum(weights))


def margin_mse_loss(
    embeddings: Float[Array, "B texts *V"], batch: Batch, temperature: float, compare: Comparison = PRODUCTS
) -> tuple[WeightedSum, ...]:
    """Computes the squared error of the margins (positive score minus negative score) against a teacher's margins.

    The result is the mean over a row's negatives (Hofstätter et al. 2020, section 3.1). Scores are divided by the
    temperature.

    Args:
        embeddings, batch: see `in_batch_loss`; with the teacher's scores of the documents [B, C] as ``labels``.
    """
    own, is_there = _own_scores(embeddings, batch, compare)
    margins, expected = ((scores[:, :1] - scores[:, 1:]) for scores in (own / temperature, batch["labels"]))
    weights = batch["weights"]
    return ((_sum_of_rows(jnp.square(margins - expected), is_there, weights), jnp.sum(weights)),)


def kl_divergence_loss(
    embeddings: Float[Array, "B texts *V"], batch: Batch, temperature: float, compare: Comparison = PRODUCTS
) -> tuple[WeightedSum, ...]:
    """Computes the KL divergence of the distribution over a row's documents from a teacher's distribution.

    Each distribution is the softmax of the scores. The temperature divides the model's scores only (Santhanam et al.
    2022, "ColBERTv2", section 3.2).

    Args:
        embeddings, batch: see `margin_mse_loss`.
    """
    own, is_negative = _own_scores(embeddings, batch, compare)
    is_there = jnp.pad(is_negative, ((0, 0), (1, 0)), constant_values=True)
    logits, targets = (jnp.where(is_there, one, FLOAT_MIN) for one in (own / temperature, batch["labels"]))
    weights = batch["weights"]
    return ((jnp.sum(softened_divergence(logits, targets, 1.0) * weights), jnp.sum(weights)),)


def _own_scores(
    embeddings: Float[Array, "B texts *V"], batch: Batch, compare: Comparison
) -> tuple[Float[Array, "B C"], Bool[Array, "B negatives"]]:
    """Returns the scores of each query with the documents of its row, and a mask of the negatives that exist."""
    return compare.own(embeddings[:, 0], embeddings[:, 1:]), batch["document_numbers"][:, 1:] >= 0


def _sum_of_rows(
    losses: Float[Array, "B negatives"], is_there: Bool[Array, "B negatives"], weights: Float[Array, "B"]
) -> Float[Array, ""]:
    """Returns the weighted sum over rows of the mean over the entries that exist."""
    of_rows = jnp.sum(jnp.where(is_there, losses, 0), axis=1) / jnp.maximum(jnp.sum(is_there, axis=1), 1)
    return jnp.sum(of_rows * weights)


def same_label_loss(
    embeddings: Float[Array, "B texts D"], batch: Batch, temperature: float, axis: str | None
) -> tuple[WeightedSum, ...]:
    """Computes the cross-entropy of each text with the same label among all other texts of the batch (SupCon).

    See Khosla et al. 2020, equation 2. The loss is a mean over the texts with at least one other text of the same
    label. Also returns the share of these texts whose nearest text has the same label. Rows with identical text are not
    compared. Like `cosent_loss`, the loss is weighted by rows.

    Args:
        embeddings: [B, 1, D] vectors of length 1.
        batch: has ``labels`` [B, 2], the numbers of the label and of the text, and ``weights`` [B].
    """
    own, weights = embeddings[:, 0], batch["weights"]
    vectors, labels, is_there = gather_rows_if_axis((own, batch["labels"], weights > 0), axis)
    other = is_there & (batch["labels"][:, None, 1] != labels[:, 1])
    same = other & (batch["labels"][:, None, 0] == labels[:, 0])
    logits = jnp.where(other, own @ vectors.T / temperature, FLOAT_MIN)
    log_shares = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
    positives = jnp.sum(same, axis=1)
    anchors = weights * (positives > 0)
    losses = -jnp.sum(jnp.where(same, log_shares, 0), axis=1) / jnp.maximum(positives, 1)
    rows = jnp.sum(weights)
    all_anchors, all_rows = psum_if_axis((jnp.sum(anchors), rows), axis)
    loss = jnp.sum(losses * anchors) * all_rows / jnp.maximum(all_anchors, 1)
    nearest = jnp.take_along_axis(same, jnp.argmax(logits, axis=1, keepdims=True), axis=1)[:, 0]
    return (loss, rows), (jnp.sum(nearest * anchors), jnp.sum(anchors))


def cosent_loss(
    embeddings: Float[Array, "B texts *V"],
    batch: Batch,
    temperature: float,
    axis: str | None,
    compare: Comparison = PRODUCTS,
) -> tuple[WeightedSum, ...]:
    """Computes log(1 + sum of exp((c_j - c_i) / temperature)) over all pairs of rows where i has the higher score.

    c is the cosine of a row, or its comparison (Su 2022, "CoSENT: a more effective sentence vector scheme than
    Sentence-BERT"). The loss is one number per batch, which each device weights by its share of the rows.
    """
    cosines = compare.own(embeddings[:, 0], embeddings[:, 1:2])[:, 0]
    weights = batch["weights"]
    cosines, scores, is_there = gather_rows_if_axis((cosines, batch["labels"], weights > 0), axis)
    expected = (scores[:, None] > scores[None, :]) & is_there[:, None] & is_there[None, :]
    logits = jnp.where(expected, (cosines[None, :] - cosines[:, None]) / temperature, FLOAT_MIN)
    loss = jax.nn.logsumexp(jnp.append(logits.reshape(-1), 0.0))
    rows = jnp.sum(weights)
    return ((loss * rows, rows),)


def cosine_loss(embeddings: Float[Array, "B texts D"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the squared error between the cosine and the score in [0, 1] (Reimers and Gurevych 2019, section 3)."""
    cosines = jnp.sum(embeddings[:, 0] * embeddings[:, 1], axis=-1)
    weights = batch["weights"]
    return ((jnp.sum(jnp.square(cosines - batch["labels"]) * weights), jnp.sum(weights)),)


def embed(
    model: nn.Module, variables: Any, batch: Batch, dropout: Dropout | None, maximum: bool = False
) -> Float[Array, "M *V"]:
    """Returns the embeddings of rows or of groups (`apply_to_groups`).

    Args:
        maximum: not used, because the loss pools the windows of a text (`SequenceOutputs.of_rows`).
    """
    return apply_to_groups(partial(model.apply, variables), batch, dropout)


def make_embedding_loss(loss: TaskLoss, apply: Apply) -> Loss:
    """Computes the loss over all micro-batches at once, whose sequences are in groups.

    Micro-batches are encoded one after the other, and encoded again when their gradients are computed. The memory use
    is the same as for one micro-batch, and the gradients are exact for the whole batch (GradCache; Gao et al. 2021).
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        def encode(micro: Batch) -> SequenceOutputs:
            numbers = jnp.concatenate([group["sequences"] for group in groups_of(micro, "sequences")])
            return SequenceOutputs(apply(params, micro, dropout), numbers)

        outputs = _map_micro_batches(encode, batch)
        sums = dict(zip(loss.metrics, loss.sums(outputs, _joined(batch)), strict=True))
        return {name: sums.pop(name) for name in losses}, sums

    def weights(batch: Batch) -> dict[str, Array]:
        return dict.fromkeys(losses, loss.weight(batch))

    losses = [name for name in loss.metrics if name.endswith("_loss")]
    return Loss(forward, weights, loss.metrics, over_micro_batches=True)


def _map_micro_batches(encode: Callable[[Batch], SequenceOutputs], batch: Batch) -> SequenceOutputs:
    """Returns the outputs [k * M, L] of k micro-batches; only the outputs are kept in memory."""
    if len(batch["rows"]) == 1:
        return encode(_joined(batch))
    outputs: SequenceOutputs = jax.lax.map(jax.checkpoint(encode, prevent_cse=False), dict(batch))
    return jax.tree.map(_join, outputs)


def _joined(batch: Batch) -> dict[str, Array]:
    return {name: _join(array) for name, array in batch.items()}


def _join(array: Array) -> Array:
    """Reshapes [k, b, ...] to [k * b, ...]."""
    return array.reshape(-1, *array.shape[2:])


def reranker_loss(settings: RerankerConfig) -> TaskLoss:
    """Returns the loss of a run.

    ``accuracy`` is the share of queries for which a most relevant document has the highest score.
    """
    of_queries = {"binary": binary_losses, "ordinal": ordinal_losses, "listwise": listwise_losses}[settings.loss]

    def sums(logits: Float[Array, "B C"], batch: Batch) -> tuple[WeightedSum, ...]:
        relevance, is_there, weights = batch["labels"], batch["choice_mask"] > 0, batch["weights"]
        losses = of_queries(logits, relevance, is_there)
        best = jnp.argmax(jnp.where(is_there, logits, FLOAT_MIN), axis=1, keepdims=True)
        highest = jnp.max(jnp.where(is_there, relevance, 0), axis=1)
        hits = (jnp.take_along_axis(relevance, best, axis=1)[:, 0] >= highest).astype(jnp.float32)
        counted = jnp.sum(weights)
        return (jnp.sum(losses * weights), counted), (jnp.sum(hits * weights), counted)

    return TaskLoss(sums, expected_rows, (f"{settings.loss}_loss", "accuracy"))


def binary_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """Computes the mean cross-entropy of relevance and sigmoid of the logit over a query's documents."""
    losses = jax.nn.softplus(logits) - relevance * logits
    return _mean(losses, is_there, (1,))


def ordinal_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """Computes the mean of log(1 + exp(s_j - s_i)) over pairs of a query's documents where i is more relevant than j.

    See RankNet (Burges et al. 2005, section 3).
    """
    pairs = is_there[:, :, None] & is_there[:, None, :] & (relevance[:, :, None] > relevance[:, None, :])
    return _mean(jax.nn.softplus(logits[:, None, :] - logits[:, :, None]), pairs, (1, 2))


def listwise_losses(
    logits: Float[Array, "B C"], relevance: Float[Array, "B C"], is_there: Bool[Array, "B C"]
) -> Float[Array, "B"]:
    """Computes the cross-entropy of the softmax over a query's documents.

    The target of a document is its share of the summed relevance (ListNet with shares of relevance; Cao et al. 2007,
    section 4.2).
    """
    log_shares = jax.nn.log_softmax(jnp.where(is_there, logits, FLOAT_MIN), axis=1)
    expected = relevance / jnp.maximum(jnp.sum(relevance, axis=1, keepdims=True), 1e-9)
    return -jnp.sum(jnp.where(is_there, expected * log_shares, 0), axis=1)


def _mean(values: Array, counted: Array, axes: tuple[int, ...]) -> Array:
    """Returns the mean of the counted values; 0 if there are none."""
    return jnp.sum(jnp.where(counted, values, 0), axis=axes) / jnp.maximum(jnp.sum(counted, axis=axes), 1)
