"""The encoder with each head of fine-tuning. C choices, L labels; see `bert.model.encoder`."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.dropout import Dropout
from bert.model.encoder import Bert
from bert.model.execution import LayerExecution
from bert.model.layers import dense
from bert.model.pooling import at_positions, pool

Inputs = tuple[Int[Array, "B T"], Int[Array, "B T"] | None, PaddingMask | None]
"""Ids, segments and mask, [B, T] each."""


class BertForSequenceClassification(nn.Module):
    """Encoder with dropout and a dense layer over the pooled output (Devlin et al. 2018, section 4.1).

    With ``model.pooler_dropout`` there is dropout before the pooler as well, as in RoBERTa and ELECTRA (transformers,
    modeling_roberta.py, RobertaClassificationHead). A causal encoder has no pooler: the
    dense layer, without bias, reads the row's last token (Radford et al. 2018, section 3.2).

    Attributes:
        num_labels: L; 1 for a regression.
        classifier_dropout: rate before the dense layer; None takes ``hidden_dropout_prob``.
        num_feature_layers: as `concat_last_layers` takes it; the dense layer then reads the features of the first
            token, of a causal encoder the last.
    """

    config: ModelConfig
    num_labels: int
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    num_feature_layers: int | None = None
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        causal = self.config.causal
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=not causal, execution=self.execution)
        self.classifier = dense(self.config, self.num_labels, self.dtype, "classifier", use_bias=not causal)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B L"]:
        """[B, T] -> [B, L] float32 logits."""
        inputs = (input_ids, token_type_ids, attention_mask)
        config = self.config
        if dropout is not None and config.resolved.pooler_dropout and self.num_feature_layers is None:
            hidden = self.bert(*inputs, dropout=dropout).last_hidden_state
            unpooled = self.bert.pooler_input(hidden, attention_mask)
            read = self.bert.pool(drop_classifier_input(self, unpooled, dropout, "pooler"))
        else:
            read = sentence_features(self, inputs, dropout)
        return self.classifier(drop_classifier_input(self, read, dropout)).astype(jnp.float32)


def concat_last_layers(bert: Bert, inputs: Inputs, layers: int) -> Float[Array, "B T features"]:
    """Features without fine-tuning (Devlin et al. 2018, section 5.3): the last layers' outputs side by side.

    Without dropout: what is not trained is to say the same of a text each time.

    Args:
        bert: the encoder.
        inputs: ids, segments and mask, [B, T] each.
        layers: how many layers; 4 in the paper.

    Returns:
        [B, T, layers * D].
    """
    return jnp.concatenate(bert(*inputs, intermediates=True).hidden_states[-layers:], axis=-1)


def sentence_features(head: nn.Module, inputs: Inputs, dropout: Dropout | None) -> Float[Array, "B features"]:
    """What the head of a whole row reads: the pooled output [B, D], or the first token's features [B, layers * D].

    Of a causal encoder it is the hidden state or the features of the last token, which alone has seen all of the row.
    """
    if head.num_feature_layers is None and not head.config.causal:
        return head.bert(*inputs, dropout=dropout).pooled_output
    features = token_features(head, inputs, dropout)
    return last_tokens(features, inputs[2]) if head.config.causal else features[:, 0]


def last_tokens(hidden_states: Float[Array, "B T D"], attention_mask: PaddingMask | None) -> Float[Array, "B D"]:
    """[B, T, D] -> [B, D] of the last token of each row that is not padding, which is at the rows' ends."""
    if attention_mask is None:
        return hidden_states[:, -1]
    last = jnp.maximum(jnp.sum(attention_mask, axis=1, dtype=jnp.int32) - 1, 0)
    return at_positions(hidden_states, last[:, None])[:, 0]


def token_features(head: nn.Module, inputs: Inputs, dropout: Dropout | None) -> Float[Array, "B T features"]:
    """What the head of every token reads: hidden states [B, T, D], or features [B, T, layers * D].

    With ``pooler_type`` transform, the pooler is between the hidden states and the head.
    """
    if head.num_feature_layers is None:
        hidden = head.bert(*inputs, dropout=dropout).last_hidden_state
        return head.bert.pool(hidden) if head.config.pools_tokens else hidden
    return concat_last_layers(head.bert, inputs, head.num_feature_layers)


def drop_classifier_input(
    head: nn.Module, read: Float[Array, "*shape"], dropout: Dropout | None, site: str = "classifier"
) -> Float[Array, "*shape"]:
    """What a task's dense layer reads, with dropout at ``classifier_dropout``; ``head`` is the task's module."""
    if dropout is None:
        return read
    rate = head.classifier_dropout
    return dropout(read, head.config.hidden_dropout_prob if rate is None else rate, site)


class BertForTokenClassification(nn.Module):
    """Encoder without pooler, dropout and a dense layer over every token (Devlin et al. 2018, section 5.3).

    Attributes:
        num_labels: L.
        classifier_dropout: rate before the dense layer; None takes ``hidden_dropout_prob``.
        num_feature_layers: as `concat_last_layers` takes it.
    """

    config: ModelConfig
    num_labels: int
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    num_feature_layers: int | None = None
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=self.config.pools_tokens, execution=self.execution)
        self.classifier = dense(self.config, self.num_labels, self.dtype, "classifier")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T L"]:
        """[B, T] -> [B, T, L] float32 logits."""
        hidden = token_features(self, (input_ids, token_type_ids, attention_mask), dropout)
        return self.classifier(drop_classifier_input(self, hidden, dropout)).astype(jnp.float32)


class BertForQuestionAnswering(nn.Module):
    """Encoder without pooler, and a dense layer that scores every token as the start and as the end of the answer
    (Devlin et al. 2018, section 4.2).

    Attributes:
        num_labels: 2, the start and the end.
        classifier_dropout: rate before the dense layer; None has none there, as google-research/bert (run_squad.py).
        num_feature_layers: as `concat_last_layers` takes it.
    """

    config: ModelConfig
    num_labels: int = 2
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    num_feature_layers: int | None = None
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=self.config.pools_tokens, execution=self.execution)
        self.qa_outputs = dense(self.config, self.num_labels, self.dtype, "qa_outputs")

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T 2"]:
        """[B, T] -> [B, T, 2] float32 logits of start and end."""
        hidden = token_features(self, (input_ids, token_type_ids, attention_mask), dropout)
        if self.classifier_dropout is not None:
            hidden = drop_classifier_input(self, hidden, dropout)
        return self.qa_outputs(hidden).astype(jnp.float32)


class BertForMultipleChoice(nn.Module):
    """Encoder over every choice as a separate row, and one score each (Devlin et al. 2018, section 4.4).

    Attributes:
        num_labels: 1, the score of a choice.
        classifier_dropout: rate before the dense layer; None takes ``hidden_dropout_prob``.
        num_feature_layers: as in `BertForSequenceClassification`.
    """

    config: ModelConfig
    num_labels: int = 1
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    num_feature_layers: int | None = None
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        causal = self.config.causal
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=not causal, execution=self.execution)
        self.classifier = dense(self.config, self.num_labels, self.dtype, "classifier", use_bias=not causal)

    def __call__(
        self,
        input_ids: Int[Array, "B C T"],
        token_type_ids: Int[Array, "B C T"] | None = None,
        attention_mask: Num[Array, "B C T"] | Bool[Array, "B C T"] | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B C"]:
        """[B, C, T] -> [B, C] float32 logits."""
        choices, length = input_ids.shape[-2:]

        def rows(x: Array | None) -> Array | None:
            return None if x is None else x.reshape(-1, length)

        if dropout is not None:  # each choice is a row, and draws as one
            dropout = dropout.replace(rows=(dropout.rows[:, None] * choices + jnp.arange(choices)).reshape(-1))
        read = sentence_features(
            self, (input_ids.reshape(-1, length), rows(token_type_ids), rows(attention_mask)), dropout
        )
        return self.classifier(drop_classifier_input(self, read, dropout)).astype(jnp.float32).reshape(-1, choices)


class BertForEmbedding(nn.Module):
    """Encoder without pooler, and the embedding of each row (Reimers and Gurevych 2019, section 3).

    Attributes:
        pooling: mean, cls or max, as `bert.model.pooling.Pooling` computes them.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    pooling: str = "mean"
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: Num[Array, "B T"] | Bool[Array, "B T"] | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B D"]:
        """[B, T] -> [B, D] float32; padding is left out."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        return pool(encoded.last_hidden_state.astype(jnp.float32), mask, self.pooling)


HEADS: dict[str, type[nn.Module]] = {
    "sequence_classification": BertForSequenceClassification,
    "token_classification": BertForTokenClassification,
    "question_answering": BertForQuestionAnswering,
    "multiple_choice": BertForMultipleChoice,
    "reranker": BertForMultipleChoice,
}
"""The model of each kind of task that has a head over the encoder.

All are made from (config, num_labels, classifier_dropout, dtype, num_feature_layers), have the encoder as ``bert``, and
are called with (input_ids, token_type_ids, attention_mask, dropout=...). For training.remat and training.scan_layers
they take the field ``execution`` as well, and hand it to the encoder.
"""
