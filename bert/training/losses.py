"""Losses and counts, each a (sum, weight) pair that is added up over micro-batches and devices and divided once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.electra import MaskedTokens
from bert.model.halting import sown_halting
from bert.model.mask import Packing
from bert.model.pretraining import PermutedTokens

Batch = Mapping[str, Array]
WeightedSum = tuple[Num[Array, ""], Num[Array, ""]]
"""A sum and its weight."""
WeightedSums = dict[str, WeightedSum]
Apply = Callable[[Any, Batch, Dropout | None], Array]
"""(params, batch, dropout or None) -> the outputs of a task's head."""


@dataclass(frozen=True)
class Loss:
    """Quantity that a step minimizes: the sum of its losses (sum / weight), each multiplied by its factor.

    Attributes:
        forward: (params, batch, dropout or None) -> losses and counts by name, each (sum, weight). The counts also have
            the memory after the rows (`bert.training.recurrence`), if there is one.
        weights: batch [k, b, ...] of k micro-batches -> weight of each loss by name. It depends only on the data, so
            that losses can be divided by the weight of the global batch before they are differentiated.
        metrics: names of the results of ``forward``; names of losses end in ``_loss``.
        factors: factor of a loss in the sum, by name; the default is 1.
        over_micro_batches: whether ``forward`` receives all micro-batches at once, as arrays [k, b, ...], for a loss
            that compares their rows.
    """

    forward: Callable[[Any, Batch, Dropout | None], tuple[WeightedSums, WeightedSums]]
    weights: Callable[[Batch], dict[str, Array]]
    metrics: tuple[str, ...]
    factors: Mapping[str, float] = field(default_factory=dict)
    over_micro_batches: bool = False


class CollectingModel:
    """A model whose ``apply`` also keeps a collection of variables after its last call, as ``kept``.

    Args:
        given: collections that the model reads besides its parameters.
    """

    def __init__(self, model: Any, collection: str, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.model, self.config, self.collection, self.given = model, model.config, collection, given
        self.kept: Any = None

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        output, self.kept = self.model.apply({**variables, **self.given}, *args, **kwargs, mutable=[self.collection])
        return output


def with_ponder_loss(build: Callable[[Any], Loss], model: Any, cost: float) -> Loss:
    """Returns a model's loss plus ``cost`` times the mean ponder cost of its tokens (Graves 2016, section 2.1).

    The cost is logged as ``ponder_loss``, and the mean number of steps as ``ponder_steps``.

    Args:
        build: returns the loss of a model, whose ``apply`` and ``config`` it uses.
    """
    plain = build(model)

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        pondering = CollectingModel(model, "halting")
        losses, counts = build(pondering).forward(params, batch, dropout)
        halting = sown_halting(pondering.kept)
        mask = batch["attention_mask"].astype(jnp.float32)
        ponder, steps = ((jnp.sum(value * mask), jnp.sum(mask)) for value in (halting.ponder, halting.steps))
        return {**losses, "ponder_loss": ponder}, {**counts, "ponder_steps": steps}

    def weights(batch: Batch) -> dict[str, Array]:
        return {**plain.weights(batch), "ponder_loss": jnp.sum(batch["attention_mask"]).astype(jnp.float32)}

    names = (*plain.metrics, "ponder_loss", "ponder_steps")
    return dataclasses.replace(
        plain, forward=forward, weights=weights, metrics=names, factors={**plain.factors, "ponder_loss": cost}
    )


def total_loss(means: Mapping[str, Any], factors: Mapping[str, float]) -> Any:
    """Returns the sum of the losses among the means, each multiplied by its factor."""
    losses = {name: value for name, value in means.items() if name.endswith("_loss")}
    return sum(factors[name] * value if name in factors else value for name, value in losses.items())


def cross_entropy(
    logits: Float[Array, "*places L"], labels: Int[Array, "*places"], weights: Float[Array, "*places"]
) -> WeightedSum:
    """Returns the sum of weight * -log softmax(logits)[label] over positions, in nats, and the sum of the weights."""
    return jnp.sum(_softmax_cross_entropy(logits, labels) * weights), jnp.sum(weights)


@jax.custom_jvp
def _softmax_cross_entropy(logits: Float[Array, "*rows L"], labels: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Returns -log softmax(logits)[label], [...].

    The custom derivative reads the logits once. The backward pass derived by JAX scatters into an array of their size
    and adds it to another one.
    """
    return jax.nn.logsumexp(logits, axis=-1) - label_logits(logits, labels)


@_softmax_cross_entropy.defjvp
def _softmax_cross_entropy_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    logits, labels = primals
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    softmax = jnp.exp(logits - log_sum[..., None])
    ruler = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    slope = softmax - (ruler == labels[..., None])
    return log_sum - label_logits(logits, labels), jnp.sum(tangents[0] * slope, axis=-1)


def weighted_accuracy_sum(
    logits: Float[Array, "*places L"], labels: Int[Array, "*places"], weights: Float[Array, "*places"]
) -> WeightedSum:
    """Returns the weighted count of positions where no logit exceeds the label's, and the sum of the weights.

    Compares with the maximum, which the loss needs as well: an argmax over a vocabulary is one of XLA's slowest
    operations on a CPU.
    """
    right = (label_logits(logits, labels) >= jnp.max(logits, axis=-1)).astype(jnp.float32)
    return jnp.sum(right * weights), jnp.sum(weights)


def apply_to_batch(
    apply: Callable[..., Any], params: Any, batch: Batch, dropout: Dropout | None, **options: Any
) -> Any:
    """Applies a model with an MLM head to a pretraining batch; ``options`` are passed to Flax's ``apply``."""
    return apply(
        {"params": params},
        batch["input_ids"],
        batch["token_type_ids"],
        batch["attention_mask"],
        batch["masked_lm_positions"],
        packing=get_packing(batch),
        dropout=dropout,
        **options,
    )


def pretraining_losses(
    output: Any, batch: Batch, label: str | None, metric: str | None
) -> tuple[WeightedSums, WeightedSums]:
    """Returns losses and accuracies of `apply_to_batch` outputs; see `make_pretraining_loss` for the arguments."""
    logits = output if label is None else output.prediction_logits
    targets = {"mlm": (logits, batch["masked_lm_ids"], batch["masked_lm_weights"])}
    if label is not None and metric is not None:
        targets[metric] = (output.seq_relationship_logits, batch[f"{label}_labels"], batch[f"{label}_weights"])
    losses = {f"{name}_loss": cross_entropy(*target) for name, target in targets.items()}
    return losses, {f"{name}_accuracy": weighted_accuracy_sum(*target) for name, target in targets.items()}


def make_pretraining_loss(
    apply: Callable[..., Any],
    label: str | None = "next_sentence",
    metric: str | None = "nsp",
    z_loss: float = 0.0,
) -> Loss:
    """Returns the sum of the MLM loss and the loss of the rows' labels, each a mean over its own predictions.

    See Devlin et al. 2018, appendix A.2.

    Args:
        apply: the ``apply`` of `BertForPreTraining`, or of `BertForMaskedLM` without a label.
        label: prefix of the batch's ``<label>_labels`` and ``<label>_weights``, [B] or [B, K] for packed rows; None for
            MLM alone.
        metric: prefix of the names of the label's loss and accuracy.
        z_loss: weight of the mean of log(Z)^2 over the predictions (Chowdhery et al. 2022, section 5). Z is the
            denominator of the softmax. The mean is logged as ``z_loss``.
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        output = apply_to_batch(apply, params, batch, dropout)
        losses, counts = pretraining_losses(output, batch, label, metric)
        if not z_loss:
            return losses, counts
        predicted = batch["masked_lm_weights"]
        logits = output if label is None else output.prediction_logits
        log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
        return {**losses, "z_loss": (jnp.sum(predicted * jnp.square(log_z)), jnp.sum(predicted))}, counts

    def weights(batch: Batch) -> dict[str, Array]:
        totals = {"mlm_loss": jnp.sum(batch["masked_lm_weights"])}
        if z_loss:
            totals["z_loss"] = totals["mlm_loss"]
        if label is not None:
            totals[f"{metric}_loss"] = jnp.sum(batch[f"{label}_weights"])
        return totals

    names = ("mlm",) if label is None else ("mlm", metric)
    metrics = tuple(f"{name}_{end}" for end in ("loss", "accuracy") for name in names)
    factors = {"z_loss": z_loss} if z_loss else {}
    return Loss(forward, weights, (*metrics, *factors), factors)


def make_replaced_token_loss(apply: Callable[..., Any], disc_weight: float) -> Loss:
    """Returns the generator's MLM loss plus ``disc_weight`` times the discriminator's cross-entropy.

    The discriminator's loss covers all tokens except padding (Clark et al. 2020, section 2). A token counts as
    predicted replaced if the probability exceeds 0.5. ``disc_recall`` is the accuracy on replaced tokens, and
    ``replaced_share`` is the share of replaced tokens.

    Args:
        apply: the ``apply`` of `bert.model.electra.Electra`.
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        targets = (batch["masked_lm_ids"], batch["masked_lm_weights"])
        output = apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["attention_mask"],
            MaskedTokens(batch["masked_lm_positions"], *targets, batch["sample_uniforms"]),
            packing=get_packing(batch),
            dropout=dropout,
        )
        tokens, replaced = batch["attention_mask"].astype(jnp.float32), output.replaced
        losses = {
            "mlm_loss": cross_entropy(output.prediction_logits, *targets),
            "disc_loss": binary_cross_entropy(output.detection_logits, replaced, tokens),
        }
        hits = ((output.detection_logits > 0) == (replaced > 0)).astype(jnp.float32)
        return losses, {
            "mlm_accuracy": weighted_accuracy_sum(output.prediction_logits, *targets),
            "disc_accuracy": (jnp.sum(hits * tokens), jnp.sum(tokens)),
            "disc_recall": (jnp.sum(hits * replaced), jnp.sum(replaced)),
            "replaced_share": (jnp.sum(replaced), jnp.sum(tokens)),
        }

    def weights(batch: Batch) -> dict[str, Array]:
        return {
            "mlm_loss": jnp.sum(batch["masked_lm_weights"]),
            "disc_loss": jnp.sum(batch["attention_mask"]).astype(jnp.float32),
        }

    names = ("mlm_loss", "disc_loss", "mlm_accuracy", "disc_accuracy", "disc_recall", "replaced_share")
    return Loss(forward, weights, names, {"disc_loss": disc_weight})


def make_permuted_token_loss(apply: Callable[..., Any]) -> Loss:
    """Returns the mean loss over predicted tokens, each predicted from the tokens before it in the permutation.

    See Yang et al. 2019, section 2.2.

    Args:
        apply: the ``apply`` of `bert.model.pretraining.BertForPermutedLM`.
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        logits = apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["attention_mask"],
            PermutedTokens(batch["masked_lm_positions"], batch["query_ids"], batch["masked_lm_weights"]),
            packing=get_packing(batch),
            dropout=dropout,
        )
        target = (logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
        return {"plm_loss": cross_entropy(*target)}, {"plm_accuracy": weighted_accuracy_sum(*target)}

    def weights(batch: Batch) -> dict[str, Array]:
        return {"plm_loss": jnp.sum(batch["masked_lm_weights"])}

    return Loss(forward, weights, ("plm_loss", "plm_accuracy"))


def binary_cross_entropy(
    logits: Float[Array, "*places"], labels: Float[Array, "*places"], weights: Float[Array, "*places"]
) -> WeightedSum:
    """Returns the sum of weight * -log P(label) in nats, with P(1) = sigmoid(logit), and the sum of the weights."""
    losses = jax.nn.softplus(logits) - labels * logits
    return jnp.sum(losses * weights), jnp.sum(weights)


def get_packing(batch: Batch) -> Packing | None:
    """Returns the positions of the examples in packed rows; None for rows of one example."""
    if "example_ids" not in batch:
        return None
    return Packing(batch["example_ids"], batch["position_ids"], batch["cls_positions"])


@dataclass(frozen=True)
class TaskLoss:
    """The loss of a fine-tuning task.

    Attributes:
        sums: (outputs of the head, batch) -> the loss and counts, each (sum, weight), in the order of ``metrics``.
        weight: batch -> weight of the loss, which depends only on the data.
        metrics: names of the results of ``sums``: the loss, whose name ends in ``_loss``, and the counts. Losses of
            embeddings may have further losses, such as regularizers, with the same weight.
        by_length: whether training batches may group rows of similar lengths. For a mean over a batch's tokens this
            must be False: tokens of short rows would weigh more than tokens of long rows, by the ratio of the lengths.
    """

    sums: Callable[[Any, Batch], tuple[WeightedSum, ...]]
    weight: Callable[[Batch], Array]
    metrics: tuple[str, ...]
    by_length: bool = True


def _example_weight(batch: Batch) -> Float[Array, ""]:
    return jnp.sum(batch["weights"])


def expected_rows(batch: Batch) -> Float[Array, ""]:
    """Returns the number of rows by which a loss per row is divided.

    With batches of a fixed number of tokens, it is the number of rows of an average batch. Dividing by the batch's own
    number of rows would give a row among many short ones less weight than a row among a few long ones.
    """
    return jnp.sum(batch.get("mean_rows", batch["weights"]))


def _classification_loss(
    logits: Float[Array, "B L"], batch: Batch, class_weights: Float[Array, "L"] | None = None
) -> tuple[WeightedSum, ...]:
    """Computes the loss for [B, L] logits and [B] labels; a row's loss is multiplied by the weight of its label."""
    target = (logits, batch["labels"], batch["weights"])
    loss = cross_entropy(*target)
    if class_weights is not None:
        total, _ = cross_entropy(*target[:2], batch["weights"] * jnp.take(class_weights, batch["labels"]))
        loss = total, _example_weight(batch)
    return loss, weighted_accuracy_sum(*target)


def _multilabel_loss(
    logits: Float[Array, "B L"], batch: Batch, class_weights: Float[Array, "L"] | None = None
) -> tuple[WeightedSum, ...]:
    """Computes the mean over labels for [B, L] logits and [B, L] labels that are 1 for each label of a row.

    Matches PyTorch's BCEWithLogitsLoss, with the weight of a label as ``pos_weight``. micro_f1 counts labels with a
    probability above 0.5 as predicted.
    """
    labels, weights = batch["labels"].astype(jnp.float32), batch["weights"][:, None]
    places = weights if class_weights is None else weights * jnp.where(labels > 0, class_weights, 1)
    total, _ = binary_cross_entropy(logits, labels, jnp.broadcast_to(places, logits.shape))
    predicted = (logits > 0).astype(jnp.float32)
    f1 = 2 * jnp.sum(predicted * labels * weights), jnp.sum((predicted + labels) * weights)
    return (total / logits.shape[-1], _example_weight(batch)), f1


def _regression_loss(outputs: Float[Array, "B 1"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the loss for [B, 1] predictions and [B] scores."""
    errors = jnp.square(outputs[:, 0] - batch["labels"])
    return ((jnp.sum(errors * batch["weights"]), _example_weight(batch)),)


def _multiple_choice_loss(logits: Float[Array, "B C"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the loss for [B, C] logits and [B] labels; missing choices of a row are excluded from the softmax."""
    logits = jnp.where(batch["choice_mask"] > 0, logits, jnp.finfo(logits.dtype).min)
    return _classification_loss(logits, batch)


def _token_classification_loss(logits: Float[Array, "B T L"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the loss for [B, T, L] logits and [B, T] labels, which are negative for tokens without a label."""
    target = (logits, jnp.maximum(batch["labels"], 0), (batch["labels"] >= 0).astype(jnp.float32))
    return cross_entropy(*target), weighted_accuracy_sum(*target)


def _span_loss(logits: Float[Array, "B T 2"], batch: Batch) -> tuple[WeightedSum, ...]:
    """Computes the loss for [B, T, 2] logits of start and end, and their [B, 2] positions.

    The loss is the mean of two cross-entropies over the row's tokens (Devlin et al. 2018, section 4.2; run_squad.py).
    """
    logits = jnp.where(batch["attention_mask"][:, :, None] > 0, logits, jnp.finfo(logits.dtype).min)
    weights = jnp.repeat(batch["weights"][:, None], 2, axis=1)
    total, _ = cross_entropy(logits.swapaxes(1, 2), batch["labels"], weights)
    hits = jnp.all(label_logits(logits.swapaxes(1, 2), batch["labels"]) >= logits.max(axis=1), axis=1)
    return (total / 2, _example_weight(batch)), (jnp.sum(hits * batch["weights"]), _example_weight(batch))


LOSSES = {
    "sequence_classification": TaskLoss(_classification_loss, expected_rows, ("classification_loss", "accuracy")),
    "multi_label_classification": TaskLoss(_multilabel_loss, expected_rows, ("multilabel_loss", "micro_f1")),
    "regression": TaskLoss(_regression_loss, expected_rows, ("regression_loss",)),
    "multiple_choice": TaskLoss(_multiple_choice_loss, expected_rows, ("choice_loss", "accuracy")),
    "token_classification": TaskLoss(
        _token_classification_loss,
        lambda batch: jnp.sum(batch["labels"] >= 0).astype(jnp.float32),
        ("token_loss", "accuracy"),
        by_length=False,
    ),
    "question_answering": TaskLoss(_span_loss, expected_rows, ("span_loss", "exact_span")),
}
"""The loss of each kind of task; for sequence classification, the loss of each `Task.problem_type`."""


def with_class_weights(loss: TaskLoss, class_weights: Sequence[float]) -> TaskLoss:
    """Returns the loss with a weight for each label; it is still divided by the number of rows.

    Args:
        loss: the loss of sequence_classification or multi_label_classification in `LOSSES`.
    """
    sums: Callable[..., tuple[WeightedSum, ...]] = loss.sums
    return dataclasses.replace(loss, sums=partial(sums, class_weights=np.asarray(class_weights, np.float32)))


def make_task_loss(loss: TaskLoss, apply: Apply) -> Loss:
    """Returns the loss of a task; ``apply`` computes the outputs of its head."""

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        (name, first), *counts = zip(loss.metrics, loss.sums(apply(params, batch, dropout), batch), strict=True)
        return {name: first}, dict(counts)

    return Loss(forward, lambda batch: {loss.metrics[0]: loss.weight(batch)}, loss.metrics)


def softened_divergence(
    logits: Float[Array, "*places L"], targets: Float[Array, "*places L"], temperature: float
) -> Float[Array, "*places"]:
    """Computes temperature² * KL(teacher || student) of softened distributions (Hinton et al. 2015, section 2.1).

    Args:
        targets: the teacher's logits.
    """
    student, teacher = (jax.nn.log_softmax(one / temperature, axis=-1) for one in (logits, targets))
    return temperature**2 * jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def label_logits(logits: Float[Array, "*places L"], labels: Int[Array, "*places"]) -> Float[Array, "*places"]:
    """Returns the logits of labels: [..., L] logits and [...] labels -> [...]."""
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
