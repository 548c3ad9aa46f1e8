"""Heads, and the encoder with each set of heads. Shapes as in `bert.model`; P predictions, L labels."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from bert.config import ModelConfig
from bert.dropout import Dropout
from bert.model import ACTIVATIONS, Bert, Dtype, dense, layer_norm


class MaskedLMHead(nn.Module):
    """Transform, LayerNorm, and a decoder tied to the word embeddings, with a bias of its own."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, hidden_states: jax.Array, word_embedding: jax.Array) -> jax.Array:
        """[B, P, D] hidden states, [V, D] embedding -> [B, P, V] float32 logits."""
        config = self.config
        x = dense(config, config.hidden_size, self.dtype, "transform")(hidden_states)
        x = layer_norm(config, self.dtype, "norm")(ACTIVATIONS[config.hidden_act](x))
        bias = self.param("bias", nn.initializers.zeros, (word_embedding.shape[0],), jnp.float32)
        logits = jnp.einsum("BPD,VD->BPV", x, word_embedding.astype(self.dtype))
        return logits.astype(jnp.float32) + bias


class PretrainingOutput(struct.PyTreeNode):
    """Logits of the pretraining heads: ``prediction_logits`` [B, P, V], and ``seq_relationship_logits`` [B, 2], which a
    model without that head does not have."""

    prediction_logits: jax.Array
    seq_relationship_logits: jax.Array | None = None


class BertForMaskedLM(nn.Module):
    """Encoder with the MLM head alone, for objectives without a label (Liu et al. 2019, section 4.2).

    It has no ``seq_relationship``: a head that nothing trains is not kept. The encoder's pooler stays, at its random
    start, for fine-tuning to train.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype)
        self.predictions = MaskedLMHead(self.config, self.dtype)

    def __call__(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        masked_lm_positions: jax.Array | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> PretrainingOutput:
        """As `BertForPreTraining`, without ``seq_relationship_logits``."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return PretrainingOutput(self.predictions(hidden, self.bert.word_embedding()))


class BertForPreTraining(nn.Module):
    """Encoder with the MLM head and that of NSP (Devlin et al. 2018, section 3.1) or sentence order."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype)
        self.predictions = MaskedLMHead(self.config, self.dtype)
        self.seq_relationship = dense(self.config, 2, self.dtype, "seq_relationship")

    def __call__(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        masked_lm_positions: jax.Array | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> PretrainingOutput:
        """Decodes the ``masked_lm_positions`` [B, P] only; every position if None (then P is T)."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout)
        hidden = _at_positions(encoded.last_hidden_state, masked_lm_positions)
        return PretrainingOutput(
            self.predictions(hidden, self.bert.word_embedding()),
            self.seq_relationship(encoded.pooled_output).astype(jnp.float32),
        )


class BertForSequenceClassification(nn.Module):
    """Encoder with dropout and a dense layer over the pooled output (Devlin et al. 2018, section 4.1).

    Attributes:
        num_labels: L.
        classifier_dropout: rate before the dense layer; None takes ``hidden_dropout_prob``.
    """

    config: ModelConfig
    num_labels: int
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype)
        self.classifier = dense(self.config, self.num_labels, self.dtype, "classifier")

    def __call__(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """[B, T] -> [B, L] float32 logits."""
        pooled = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout).pooled_output
        if dropout is not None:
            rate = self.classifier_dropout
            pooled = dropout(pooled, self.config.hidden_dropout_prob if rate is None else rate, "classifier")
        return self.classifier(pooled).astype(jnp.float32)


def _at_positions(hidden_states: jax.Array, positions: jax.Array | None) -> jax.Array:
    """[B, T, D] at [B, P] -> [B, P, D]; all of them where positions is None."""
    if positions is None:
        return hidden_states
    return jnp.take_along_axis(hidden_states, positions[:, :, None], axis=1)
