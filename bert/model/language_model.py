"""The left-to-right language model: GPT (Radford et al. 2018) and GPT-2 (Radford et al. 2019), by their settings.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.cache import LayerCache
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Packing
from bert.model.execution import LayerExecution
from bert.model.heads import MaskedLMHead, PaddingMask, drop_classifier_input, last_tokens
from bert.model.layers import Dtype, dense
from bert.model.mask import Mask


class BertForCausalLM(nn.Module):
    """Encoder without pooler, and the MLM head over every position, whose logits are of the next token.

    The config has ``causal`` true. GPT-2 has ``pre_layer_norm`` and neither ``embedding_norm``,
    ``prediction_transform``, ``prediction_bias`` nor segments (``type_vocab_size`` 0).

    The logits [B, T, V] of all positions are the largest array of a training step. A loss that decodes a few positions
    at a time reads `hidden_states` and `decoder_weights` in one ``apply`` instead::

        def read(model, *inputs, **options):
            return model.hidden_states(*inputs, **options), *model.decoder_weights()

        hidden, table, bias = model.apply({"params": params}, input_ids, dropout=dropout, method=read)
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T padded_V"]:
        """[B, T] -> [B, T, V] float32 logits of the token that follows each; arguments and errors as of `Bert`."""
        inputs = (input_ids, token_type_ids, attention_mask, position_ids)
        x = self.hidden_states(*inputs, packing=packing, dropout=dropout)
        return self.predictions.decode(x, self.bert.embedding_table())

    def hidden_states(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        position_ids: Int[Array, "#B T"] | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T E"]:
        """[B, T] -> [B, T, E], which the decoder multiplies by its matrix; arguments and errors as of `Bert`."""
        inputs = (input_ids, token_type_ids, attention_mask, position_ids)
        return self.predictions.decoder_input(self.bert(*inputs, packing=packing, dropout=dropout).last_hidden_state)

    def decoder_weights(self) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """The decoder's matrix [V, E] and bias [V], V padded as ``execution`` has it."""
        return self.predictions.decoder_weights(self.bert.embedding_table())

    def step(
        self,
        input_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        mask: Mask,
        cache: tuple[LayerCache, ...],
        last_only: bool = False,
    ) -> tuple[Float[Array, "B P padded_V"], tuple[LayerCache, ...]]:
        """Decodes T more tokens: the prompt in one call, then a token a call, all of these by one compiled program.

        Args:
            input_ids: [B, T] integers.
            position_ids: [B, T] rows of the position table; the first token of a text has ``position_offset``, so
                that those of left-padded prompts are position_offset + cumsum(attention mask) - 1, at least 0.
            mask: causal, with ``start``, the place of the first of these tokens in the cache, as an array. ``keys``
                [B, S] has a value for each place of the cache: 0 for padding, 1 for tokens and for places that are
                still to be written, which causality leaves out. Padding may be on the left (``right_padded`` false).
            cache: of `make_cache`, or of the step before.
            last_only: decode the last of the T positions alone.

        Returns:
            [B, T, V] float32 logits of the token that follows each ([B, 1, V] with ``last_only``), and the cache.
        """
        encoded = self.bert(input_ids, position_ids=position_ids, mask=mask, cache=cache)
        hidden = encoded.last_hidden_state[:, -1:] if last_only else encoded.last_hidden_state
        return self.predictions(hidden, self.bert.embedding_table()), encoded.cache


class ClassifierWithLanguageModel(nn.Module):
    """`BertForSequenceClassification` of a causal encoder, and the language model over the same hidden states, for
    training both at once (Radford et al. 2018, section 3.2).

    Its parameters are those of the two models. Attributes are those of the classifier.
    """

    config: ModelConfig
    num_labels: int
    classifier_dropout: float | None = None
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.classifier = dense(self.config, self.num_labels, self.dtype, "classifier", use_bias=False)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B L"], Float[Array, "B T E"], Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """[B, T] -> [B, L] float32 logits of the labels; what the decoder reads [B, T, E], its matrix and its bias."""
        hidden = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout).last_hidden_state
        read = drop_classifier_input(self, last_tokens(hidden, attention_mask), dropout)
        logits = self.classifier(read).astype(jnp.float32)
        weights = self.predictions.decoder_weights(self.bert.embedding_table())
        return logits, self.predictions.decoder_input(hidden), *weights
