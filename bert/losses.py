"""Losses and counts. Each is a (sum, weight) pair, added up over micro-batches, devices and batches, divided once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bert.dropout import Dropout

Batch = Mapping[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Objective:
    """What a step minimises: the sum over its losses of (sum / weight).

    Attributes:
        forward: (params, batch, dropout or None) -> losses and counts by name, each (sum, weight).
        weights: batch -> weight of each loss by name; of the data alone, so that the losses of a micro-batch on one
            device can be scaled by the weight of the whole batch on all devices before they are differentiated.
        metrics: the names ``forward`` yields; those of losses end in ``_loss``.
    """

    forward: Callable[[Any, Batch, Dropout | None], tuple[Sums, Sums]]
    weights: Callable[[Batch], dict[str, jax.Array]]
    metrics: tuple[str, ...]


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum over places of weight * -log softmax(logits)[label], in nats, and the sum of the weights.

    Args:
        logits: [..., L] float32.
        labels: [...] integers.
        weights: [...] float32.
    """
    negative_log = jax.nn.logsumexp(logits, axis=-1) - _at(logits, labels)
    return jnp.sum(negative_log * weights), jnp.sum(weights)


def correct(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weighted count of places where no logit is above the label's, and the sum of the weights.

    A comparison with the maximum, which the loss needs as well: an argmax over a vocabulary is one of the slowest
    operations XLA has on a CPU.
    """
    right = (_at(logits, labels) >= jnp.max(logits, axis=-1)).astype(jnp.float32)
    return jnp.sum(right * weights), jnp.sum(weights)


def pretraining_objective(
    apply: Callable[..., Any], label: str | None = "next_sentence", metric: str | None = "nsp"
) -> Objective:
    """MLM and the label of the rows, each the mean over its own predictions, added (Devlin et al. 2018, appendix A.2).

    Args:
        apply: the ``apply`` of `bert.heads.BertForPreTraining`; of `bert.heads.BertForMaskedLM` without a label.
        label: the batch's ``<label>_labels`` and ``<label>_weights`` [B]; None for MLM alone.
        metric: start of the names of the label's loss and accuracy.
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[Sums, Sums]:
        output = apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["attention_mask"],
            batch["masked_lm_positions"],
            dropout=dropout,
        )
        mlm = (output.prediction_logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
        targets = {"mlm": mlm}
        if label is not None:
            targets[metric] = (output.seq_relationship_logits, batch[f"{label}_labels"], batch[f"{label}_weights"])
        losses = {f"{name}_loss": cross_entropy(*target) for name, target in targets.items()}
        return losses, {f"{name}_accuracy": correct(*target) for name, target in targets.items()}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        found = {"mlm_loss": jnp.sum(batch["masked_lm_weights"])}
        if label is not None:
            found[f"{metric}_loss"] = jnp.sum(batch[f"{label}_weights"])
        return found

    names = ("mlm",) if label is None else ("mlm", metric)
    return Objective(forward, weights, tuple(f"{name}_{kind}" for kind in ("loss", "accuracy") for name in names))


def classification_objective(apply: Callable[..., Any]) -> Objective:
    """Cross-entropy over the labels.

    Args:
        apply: the ``apply`` of `bert.heads.BertForSequenceClassification`.
    """

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[Sums, Sums]:
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        logits = apply({"params": params}, *inputs, dropout=dropout)
        target = (logits, batch["labels"], batch["weights"])
        return {"classification_loss": cross_entropy(*target)}, {"accuracy": correct(*target)}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        return {"classification_loss": jnp.sum(batch["weights"])}

    return Objective(forward, weights, ("classification_loss", "accuracy"))


def _at(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
