"""The encoder with each fine-tuning head. C choices, L labels; other shapes as in `bert.model.encoder`."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.config.options import LEXICAL_POOLING, TOKEN_POOLING
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.dropout import Dropout, maybe_dropout
from bert.model.encoder import Bert
from bert.model.layers import LayerExecution
from bert.model.linear import dense
from bert.model.names import GLOBAL_TOKENS, PROJECTION, GlobalTokenKind
from bert.model.pretraining import MaskedLMHead
from bert.model.reductions import last_token, normalized, pool

Inputs = tuple[Int[Array, "B T"], Int[Array, "B T"] | None, PaddingMask | None]
"""Token ids, segment ids and attention mask, [B, T] each."""


class TaskModel(nn.Module):
    """Base class of encoders with a head.

    Attributes:
        num_labels: L, the number of outputs of the head.
        classifier_dropout: dropout rate before the head's dense layer. None: use ``hidden_dropout_prob``.
        num_feature_layers: if set, the head reads the outputs of this many last layers, and the encoder is frozen
            (Devlin et al. 2018, section 5.3, with 4 layers). None: the encoder is trained.
    """

    config: ModelConfig
    num_labels: int
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    num_feature_layers: int | None = None
    execution: LayerExecution = LayerExecution()
    global_tokens: ClassVar[GlobalTokenKind | None] = None

    def make_encoder(self, add_pooling_layer: bool) -> Bert:
        """Returns the encoder. Subclasses assign it to ``self.bert``."""
        return Bert(self.config, self.dtype, add_pooling_layer, self.execution, self.global_tokens)

    def token_features(self, inputs: Inputs, dropout: Dropout | None) -> Float[Array, "B T features"]:
        """Returns the inputs of a token-level head, [B, T, D], or [B, T, layers * D] with ``num_feature_layers``.

        A pooler of type transform is applied to every token.
        """
        if self.num_feature_layers is not None:  # no dropout: the features of a text are constant
            hidden_states = self.bert(*inputs, intermediates=True).hidden_states
            return jnp.concatenate(hidden_states[-self.num_feature_layers :], axis=-1)
        hidden = self.bert(*inputs, dropout=dropout).last_hidden_state
        return self.bert.pool(hidden) if self.config.pools_tokens else hidden

    def row_features(self, inputs: Inputs, dropout: Dropout | None) -> Float[Array, "B features"]:
        """Returns the inputs of a row-level head, [B, D], or [B, layers * D] with ``num_feature_layers``.

        This is the pooled output, or the features of the first token. Causal encoders use the last token, because only
        it attends to the whole row (Radford et al. 2018, section 3.2).
        """
        if self.config.causal:
            return last_token(self.token_features(inputs, dropout), inputs[2])
        if self.num_feature_layers is not None:
            return self.token_features(inputs, dropout)[:, 0]
        return self.bert(*inputs, dropout=dropout).pooled_output

    def drop(
        self, x: Float[Array, "*shape"], dropout: Dropout | None, site: str = "classifier"
    ) -> Float[Array, "*shape"]:
        """Applies dropout with rate ``classifier_dropout``."""
        rate = self.config.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout
        return maybe_dropout(x, dropout, rate, site)


class BertForSequenceClassification(TaskModel):
    """Encoder with a dense layer over the pooled output (Devlin et al. 2018, section 4.1); L is 1 for regression.

    With ``pooler_dropout``, dropout is also applied before the pooler, as in RoBERTa and ELECTRA
    (RobertaClassificationHead in transformers, modeling_roberta.py). A causal encoder has no pooler, and its dense
    layer has no bias.
    """

    global_tokens = GLOBAL_TOKENS["BertForSequenceClassification"]

    def setup(self) -> None:
        causal = self.config.causal
        self.bert = self.make_encoder(add_pooling_layer=not causal)
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
            features = self.bert.pool_rows(hidden, attention_mask, None, lambda x: self.drop(x, dropout, "pooler"))
        else:
            features = self.row_features(inputs, dropout)
        return self.classifier(self.drop(features, dropout)).astype(jnp.float32)


class BertForTokenClassification(TaskModel):
    """Encoder without pooler, and a dense layer applied to every token (Devlin et al. 2018, section 5.3)."""

    def setup(self) -> None:
        self.bert = self.make_encoder(add_pooling_layer=self.config.pools_tokens)
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
        features = self.token_features((input_ids, token_type_ids, attention_mask), dropout)
        return self.classifier(self.drop(features, dropout)).astype(jnp.float32)


class BertForQuestionAnswering(TaskModel):
    """Encoder without pooler, and a dense layer that scores every token as the start and end of the answer.

    Follows Devlin et al. 2018, section 4.2. Without ``classifier_dropout`` there is no dropout before the dense layer,
    as in google-research/bert (run_squad.py).
    """

    num_labels: int = 2
    global_tokens = GLOBAL_TOKENS["BertForQuestionAnswering"]

    def setup(self) -> None:
        self.bert = self.make_encoder(add_pooling_layer=self.config.pools_tokens)
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
        features = self.token_features((input_ids, token_type_ids, attention_mask), dropout)
        if self.classifier_dropout is not None:
            features = self.drop(features, dropout)
        return self.qa_outputs(features).astype(jnp.float32)


class BertForMultipleChoice(TaskModel):
    """Encoder applied to each choice as a separate row, with one score per choice (Devlin et al. 2018, section 4.4)."""

    num_labels: int = 1
    global_tokens = GLOBAL_TOKENS["BertForMultipleChoice"]

    def setup(self) -> None:
        causal = self.config.causal
        self.bert = self.make_encoder(add_pooling_layer=not causal)
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

        if dropout is not None:
            dropout = dropout.split_rows(choices)
        inputs = (input_ids.reshape(-1, length), rows(token_type_ids), rows(attention_mask))
        features = self.row_features(inputs, dropout)
        return self.classifier(self.drop(features, dropout)).astype(jnp.float32).reshape(-1, choices)


class BertForReranking(BertForMultipleChoice):
    """Encoder applied to each pair of a query and a document, with the rows of `BertForSequenceClassification`."""

    global_tokens = GLOBAL_TOKENS["BertForSequenceClassification"]


class BertForEmbedding(nn.Module):
    """Encoder without pooler, and an embedding of each row (Reimers and Gurevych 2019, section 3).

    Attributes:
        pooling: mean, cls, max, lasttoken, splade for the weights of the words, with D = V, or tokens for a vector per
            token (`EmbeddingConfig`).
        normalize: whether the embeddings of a long text's windows are scaled to length 1 first.
        dimensions: width E of the vectors of tokens.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    pooling: str = "mean"
    execution: LayerExecution = LayerExecution()
    normalize: bool = False
    dimensions: int = 128

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        if self.pooling == LEXICAL_POOLING:
            self.predictions = MaskedLMHead(self.config, self.dtype)
        if self.pooling == TOKEN_POOLING:
            self.projection = dense(self.config, self.dimensions, self.dtype, PROJECTION, use_bias=False)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        score_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B D"] | Float[Array, "B T E"]:
        """[B, T] -> [B, D] float32, ignoring padding.

        With a vector per token, [B, T, E]: vectors of length 1, and zeros for tokens without a vector.

        Args:
            score_mask: 1 for tokens with a vector; None for ``attention_mask``.
        """
        encoded = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.pooling == TOKEN_POOLING:
            vectors = normalized(self.projection(encoded.last_hidden_state).astype(jnp.float32))
            return jnp.where((mask if score_mask is None else score_mask)[:, :, None] > 0, vectors, 0.0)
        if self.pooling == LEXICAL_POOLING:
            return self.predictions.lexical_weights(encoded.last_hidden_state, self.bert.embedding_table(), mask)
        return pool(encoded.last_hidden_state.astype(jnp.float32), mask, self.pooling)


HEADS: dict[str, type[nn.Module]] = {
    "sequence_classification": BertForSequenceClassification,
    "token_classification": BertForTokenClassification,
    "question_answering": BertForQuestionAnswering,
    "multiple_choice": BertForMultipleChoice,
    "reranker": BertForReranking,
}
"""Model class of each kind of task with a head over the encoder.

All are constructed with (config, num_labels, classifier_dropout, dtype, num_feature_layers), name the encoder ``bert``,
and are called with (input_ids, token_type_ids, attention_mask, dropout=...). Modules with a field ``execution`` also
support training.remat and training.scan_layers.
"""
