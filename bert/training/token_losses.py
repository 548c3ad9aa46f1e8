"""Loss over every token of a row, decoded a few positions at a time. Shapes as in `bert.model.encoder`.

The float32 logits [B, T, V] of a row of 1,024 tokens over GPT-2's vocabulary occupy 206 MB, and so does their gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from bert.model.array_types import Array
from bert.model.copying import Copying
from bert.model.decoders import BertForCausalLM
from bert.model.dropout import Dropout
from bert.model.linear import soft_cap, tied_logits
from bert.parallel.sharding import constrain_activation, num_row_shards
from bert.training.losses import (
    Batch,
    CollectingModel,
    Loss,
    TaskLoss,
    WeightedSum,
    WeightedSums,
    cross_entropy,
    get_packing,
    label_logits,
    make_task_loss,
    weighted_accuracy_sum,
)

TOKENS_AT_A_TIME = 1024
"""Number of tokens that a device decodes at a time unless ``stretch`` is set; enough for full speed of the products."""


def make_next_token_loss(model: BertForCausalLM | CollectingModel, label_smoothing: float = 0.0) -> Loss:
    """Returns the next-token loss: the mean over a batch's tokens (Radford et al. 2018, section 3.1).

    With ``label_smoothing``, ``smoothed_loss`` is minimized and ``lm_loss`` is logged in addition.
    """

    def read(model: BertForCausalLM, batch: Batch, dropout: Dropout | None) -> tuple[Array, Array, Array]:
        hidden = model.hidden_states(
            batch["input_ids"], attention_mask=batch["attention_mask"], packing=get_packing(batch), dropout=dropout
        )
        return hidden, *model.decoder_weights()

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        hidden, table, bias = cast(tuple[Array, ...], model.apply({"params": params}, batch, dropout, method=read))
        sums = decoded_loss(
            hidden,
            table,
            bias,
            batch["next_token_ids"],
            batch["next_token_weights"],
            label_smoothing=label_smoothing,
            vocab_size=model.config.known_vocab_size,
            softcap=model.config.prediction_softcap,
        )
        losses = {"smoothed_loss": sums.loss} if label_smoothing else {}
        return {**losses, "lm_loss": sums.nll if label_smoothing else sums.loss}, {"lm_accuracy": sums.accuracy}

    names = ("smoothed_loss", "lm_loss") if label_smoothing else ("lm_loss",)

    def weights(batch: Batch) -> dict[str, Array]:
        return dict.fromkeys(names, jnp.sum(batch["next_token_weights"]))

    return Loss(forward, weights, (*names, "lm_accuracy"), {"lm_loss": 0.0} if label_smoothing else {})


def make_classifier_loss(
    loss: TaskLoss, apply: Callable[..., Any], factor: float, vocab_size: int, softcap: float | None = None
) -> Loss:
    """Returns the loss of a task plus ``factor`` times the next-token loss of its rows.

    See Radford et al. 2018, section 3.2. The next-token loss is logged as ``lm_loss``.

    Args:
        apply: (params, batch, dropout or None) -> the outputs of `bert.model.decoders.ClassifierWithLanguageModel`.
        vocab_size, softcap: see `decoded_loss`.
    """
    task = make_task_loss(loss, lambda outputs, batch, dropout: outputs)

    def forward(params: Any, batch: Batch, dropout: Dropout | None) -> tuple[WeightedSums, WeightedSums]:
        outputs, hidden, table, bias = apply(params, batch, dropout)
        losses, counts = task.forward(outputs, batch, None)
        labels, real = (jnp.pad(batch[name][:, 1:], ((0, 0), (0, 1))) for name in ("input_ids", "attention_mask"))
        weights = real.astype(jnp.float32)
        sums = decoded_loss(hidden, table, bias, labels, weights, vocab_size=vocab_size, softcap=softcap)
        return {**losses, "lm_loss": sums.loss}, counts

    def weights(batch: Batch) -> dict[str, Array]:
        tokens = jnp.sum(batch["attention_mask"][..., 1:]).astype(jnp.float32)
        return {**task.weights(batch), "lm_loss": tokens}

    return Loss(forward, weights, (*task.metrics, "lm_loss"), {"lm_loss": factor})


def sequence_loss(label_smoothing: float, vocab_size: int, softcap: float | None = None) -> TaskLoss:
    """Returns the loss of the tokens of a target.

    Its outputs are the decoder's hidden states [B, T, E], the matrix and the bias of the output layer, and the copies
    or None. Its labels [B, T] are IGNORE_INDEX in padding.

    Args:
        label_smoothing: see `decoded_loss`; ``nll`` is the loss without it.
        vocab_size, softcap: see `decoded_loss`.
    """

    def sums(outputs: Any, batch: Batch) -> tuple[WeightedSum, ...]:
        real = (batch["labels"] >= 0).astype(jnp.float32)
        labels = jnp.maximum(batch["labels"], 0)
        hidden, table, bias, copying = outputs
        return decoded_loss(
            hidden,
            table,
            bias,
            labels,
            real,
            label_smoothing=label_smoothing,
            vocab_size=vocab_size,
            softcap=softcap,
            copying=copying,
        )

    def weight(batch: Batch) -> Float[Array, ""]:
        return jnp.sum(batch["labels"] >= 0).astype(jnp.float32)

    return TaskLoss(sums, weight, ("sequence_loss", "nll", "accuracy"), by_length=False)


class TokenSums(NamedTuple):
    """Result of `decoded_loss` and `token_sums`: (sum, weight) pairs in nats.

    Attributes:
        loss: cross-entropy with the smoothed labels, which a step minimizes.
        nll: cross-entropy with the labels; the exponential of its mean is the perplexity. Equal to ``loss`` without
            smoothing.
        accuracy: number of labels whose logit no other token exceeds.
    """

    loss: WeightedSum
    nll: WeightedSum
    accuracy: WeightedSum


def token_sums(
    logits: Float[Array, "*places padded_V"],
    labels: Int[Array, "*places"],
    weights: Float[Array, "*places"],
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> TokenSums:
    """Returns the sums over positions of the losses of logits; same arguments and result as `decoded_loss`."""
    nll, weight = cross_entropy(logits, labels, weights)
    loss = nll
    if label_smoothing:  # a share of the label's probability is spread evenly over the vocabulary, the label included
        mean = jnp.mean(logits[..., :vocab_size], axis=-1)
        loss = nll + label_smoothing * jnp.sum((label_logits(logits, labels) - mean) * weights)
    return TokenSums((loss, weight), (nll, weight), weighted_accuracy_sum(logits, labels, weights))


def decoded_loss(
    hidden_states: Float[Array, "B T E"],
    table: Float[Array, "padded_V E"],
    bias: Float[Array, "padded_V"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    copying: Copying | None = None,
    stretch: int | None = None,
) -> TokenSums:
    """Computes the loss of every position, and its gradient, with the logits of ``stretch`` positions in memory.

    A language model's ``method`` returns the first three arguments (`bert.model.decoders.BertForCausalLM`)::

        options = {"vocab_size": config.known_vocab_size, "softcap": config.prediction_softcap}
        sums = decoded_loss(hidden, table, bias, labels, weights, **options)
        losses = {"lm_loss": sums.loss}

    The gradient is computed together with the loss, stretch by stretch, so that nothing is decoded twice. Only ``loss``
    has a gradient; the gradients of ``nll``, ``accuracy`` and ``weights`` are 0. There is no forward mode (`jax.jvp`).

    Args:
        hidden_states: [B, T, E], multiplied by the decoder's matrix in their own type.
        table: [V, E] float32, the decoder's matrix.
        bias: [V] float32, its bias.
        labels: [B, T], the token that follows each position.
        weights: [B, T] float32, 0 for a position without a label.
        label_smoothing: share of a label's probability that is spread over the vocabulary (Szegedy et al. 2016, section
            7; Vaswani et al. 2017, section 5.4).
        vocab_size: number of tokens V if ``table`` is padded; padding is excluded from the smoothed mean.
        softcap: limit of the logits (`bert.model.linear.soft_cap`); None for none.
        copying: copies at each position; None for none.
        stretch: positions of each row to decode at a time; None decodes `TOKENS_AT_A_TIME` tokens per device.
    """
    rows, length = labels.shape
    stretch = min(length, stretch or max(1, TOKENS_AT_A_TIME * num_row_shards() // rows))

    def split(x: Array) -> Array:
        """[B, T, ...] -> [stretches, B, T of a stretch, ...]."""
        filled = jnp.pad(x, ((0, 0), (0, -length % stretch), *((0, 0) for _ in x.shape[2:])))
        return jnp.stack(jnp.split(filled, filled.shape[1] // stretch, axis=1))

    copies = None if copying is None else (split(copying.generate), split(copying.copy))
    ids = None if copying is None else copying.source_ids
    targets = (split(labels), split(weights))
    settings = (label_smoothing, vocab_size, softcap)
    loss, nll, accuracy = _sums((split(hidden_states), copies), table, bias, (targets, ids), settings)
    weight = jnp.sum(weights)
    return TokenSums((loss, weight), (nll, weight), (accuracy, weight))


States = tuple[Array, tuple[Array, Array] | None]
"""Hidden states, and the log-probabilities of `Copying`; None without copies."""
Targets = tuple[tuple[Array, Array], Array | None]
"""Labels and weights, and the source's token ids; None without copies."""
Sums = tuple[Array, Array, Array]
"""Sums of the loss, the unsmoothed loss, and correct tokens."""
Settings = tuple[float, int | None, float | None]
"""Label smoothing, number of tokens and limit of the logits; see `decoded_loss`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(states: States, table: Array, bias: Array, targets: Targets, settings: Settings) -> Sums:
    """Computes the sums over hidden states [stretches, B, T, E] with labels and weights [stretches, B, T]."""
    of_positions, ids = targets

    def add(sums: Sums, stretch: tuple[States, Any]) -> tuple[Sums, None]:
        loss, others = _stretch_sums(stretch[0], table, bias, (stretch[1], ids), settings)
        return _add(sums, (loss, *others)), None

    return jax.lax.scan(add, _zeros(), (states, of_positions))[0]


def _sums_forward(states: States, table: Array, bias: Array, targets: Targets, settings: Settings) -> tuple[Sums, Any]:
    """Computes the sums, and the gradients of the loss with respect to hidden states, table and bias."""
    value_and_grad = jax.value_and_grad(_stretch_sums, argnums=(0, 1, 2), has_aux=True)

    of_positions, ids = targets

    def add(carry: tuple[Sums, Any], stretch: tuple[States, Any]) -> tuple[tuple[Sums, Any], States]:
        sums, of_decoder = carry
        (loss, others), (of_states, *grads) = value_and_grad(stretch[0], table, bias, (stretch[1], ids), settings)
        return (_add(sums, (loss, *others)), _add(of_decoder, tuple(grads))), of_states

    start = (_zeros(), (jnp.zeros_like(table), jnp.zeros_like(bias)))
    (sums, of_decoder), of_states = jax.lax.scan(add, start, (states, of_positions))
    return sums, (of_states, *of_decoder, targets)


def _sums_backward(settings: Settings, residuals: Any, slopes: Sums) -> tuple[Any, ...]:
    *grads, ((_, weights), _) = residuals
    scaled = jax.tree.map(lambda grad: (slopes[0] * grad).astype(grad.dtype), grads)
    return (*scaled, ((None, jnp.zeros_like(weights)), None))


_sums.defvjp(_sums_forward, _sums_backward)


def _stretch_sums(
    states: States, table: Array, bias: Array, targets: Targets, settings: Settings
) -> tuple[Array, tuple[Array, Array]]:
    """Computes the sums of the loss, the unsmoothed loss and the correct tokens for hidden states [B, T, E]."""
    (hidden, copies), ((labels, weights), ids) = states, targets
    label_smoothing, vocab_size, softcap = settings
    logits = soft_cap(tied_logits(hidden, table, bias, hidden.dtype), softcap)
    logits = constrain_activation(logits, None, "tensor")
    if copies is not None and ids is not None:
        logits = Copying(*copies, ids).mix(logits)
    sums = token_sums(logits, labels, weights, label_smoothing, vocab_size)
    return sums.loss[0], (sums.nll[0], sums.accuracy[0])


def _zeros() -> Sums:
    return (jnp.zeros(()),) * 3


def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)
