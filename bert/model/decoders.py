"""Decoders: the causal language model and the encoder-decoder.

Shapes as in `bert.model.encoder`; S is the length of a source, T the length of its target.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.attention import LayerCache, Memory
from bert.model.copying import CopyAttention, Copying
from bert.model.dropout import Dropout, maybe_dropout
from bert.model.encoder import Bert, EncoderOutput
from bert.model.layers import LayerExecution
from bert.model.linear import dense
from bert.model.mask import Mask, Packing
from bert.model.pretraining import LanguageModel, MaskedLMHead, PretrainingModel
from bert.model.reductions import last_token


class BertForCausalLM(LanguageModel):
    """The left-to-right language model: the MLM head predicts the next token at every position.

    The configuration sets ``causal``. GPT (Radford et al. 2018) and GPT-2 (Radford et al. 2019) are special cases:
    GPT-2 has ``pre_layer_norm``, but no ``embedding_norm``, ``prediction_transform``, ``prediction_bias`` or segments
    (``type_vocab_size`` 0).

    The logits [B, T, V] of all positions are the largest array of a training step. A loss that decodes a few positions
    at a time calls `hidden_states` and `decoder_weights` in one ``apply``::

        def read(model, *inputs, **options):
            return model.hidden_states(*inputs, **options), *model.decoder_weights()

        hidden, table, bias = model.apply({"params": params}, input_ids, dropout=dropout, method=read)

    Such a loss also applies `bert.model.linear.soft_cap` if ``ModelConfig.prediction_softcap`` is set.
    """

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
        """[B, T] -> [B, T, V] float32 logits of the next token. Arguments and errors: see `Bert`."""
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
        """Returns the inputs of the decoder matrix, [B, T, E]. Arguments: see `Bert`."""
        inputs = (input_ids, token_type_ids, attention_mask, position_ids)
        return self.predictions.decoder_input(self.bert(*inputs, packing=packing, dropout=dropout).last_hidden_state)

    def decoder_weights(self) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """Returns the decoder's matrix [padded V, E] and bias [padded V]."""
        return self.predictions.decoder_weights(self.bert.embedding_table())

    def step(
        self,
        input_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        mask: Mask,
        cache: tuple[LayerCache, ...],
    ) -> tuple[Float[Array, "B T padded_V"], tuple[LayerCache, ...]]:
        """Decodes T more tokens: the prompt in one call, then one token per call. Later calls share one program.

        With segment recurrence, each token attends to the ``memory_length`` tokens before it, and at least to as many
        as a row has in training.

        Args:
            input_ids: [B, T] integers.
            position_ids: [B, T] rows of the position table. The first token of a text has ``position_offset``.
                Left-padded prompts therefore have position_offset + max(cumsum(attention mask) - 1, 0).
            mask: a causal mask. Its ``start`` is the cache index of the first of these tokens, as an array. Its
                ``keys`` [B, S] are 0 for padding, and 1 for tokens and for entries not yet written, which the causal
                mask excludes. Padding may be on the left (``right_padded`` false).
            cache: the cache from `make_cache` or from the previous step.

        Returns:
            [B, T, V] float32 logits of the next token, and the cache.
        """
        if (size := self.config.memory_length) is not None:
            mask = mask.replace(window=max(size, self.config.max_position_embeddings - 1))
        encoded = self.bert(input_ids, position_ids=position_ids, mask=mask, cache=cache)
        return self.predictions(encoded.last_hidden_state, self.bert.embedding_table()), encoded.cache


class ClassifierWithLanguageModel(nn.Module):
    """A causal `BertForSequenceClassification` and a language model over the same hidden states.

    Both are trained jointly (Radford et al. 2018, section 3.2). The parameters are the union of both models'
    parameters. For the attributes, see `BertForSequenceClassification`.
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
        """Returns the label logits [B, L] in float32, and the decoder's input [B, T, E], matrix and bias."""
        hidden = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout).last_hidden_state
        rate = self.config.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout
        features = maybe_dropout(last_token(hidden, attention_mask), dropout, rate, "classifier")
        logits = self.classifier(features).astype(jnp.float32)
        weights = self.predictions.decoder_weights(self.bert.embedding_table())
        return logits, self.predictions.decoder_input(hidden), *weights


SourceMask = Num[Array, "B S"] | Bool[Array, "B S"]


class BertForSequenceToSequence(PretrainingModel):
    """An encoder for the source, and a decoder for the target with cross-attention to the source.

    This is the Transformer of Vaswani et al. 2017. The decoder may share parameters with the encoder (Rothe et al.
    2020).

    Attributes:
        config: the configuration of the encoder, with ``decoder_layers``, ``share_decoder``, ``decoder_vocab_size``
            and ``copy_attention`` for the decoder. With the last one, logits are log-probabilities that include copies.
    """

    def setup(self) -> None:
        encoder, decoder = self.config.without_decoder, self.config.decoder
        self.bert = Bert(encoder, self.dtype, add_pooling_layer=False, execution=self.execution)
        if self.config.share_decoder != "all":
            self.decoder = Bert(decoder, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(decoder, self.dtype, self.execution.pad_vocab_to_multiple_of)
        if self.config.copy_attention:
            self.copy_attention = CopyAttention(decoder, self.dtype)

    def __call__(
        self,
        input_ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        attention_mask: SourceMask | None = None,
        target_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T padded_V"]:
        """Predicts the next token at every position of the target, as in training (teacher forcing).

        Args:
            input_ids: source.
            target_ids: target, which begins with the start token.
            attention_mask: 1 for a token of the source and 0 for padding, which is at the end; all 1 if None.
            target_mask: the same for the target.

        Returns:
            Float32 logits of the next token.
        """
        x, copying = self.hidden_states(input_ids, target_ids, attention_mask, target_mask, dropout=dropout)
        logits = self.predictions.decode(x, self.embedding_table())
        return logits if copying is None else copying.mix(logits)

    def hidden_states(
        self,
        input_ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        attention_mask: SourceMask | None = None,
        target_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B T E"], Copying | None]:
        """Returns the inputs of the decoder matrix, [B, T, E], and the copies. Arguments: see `__call__`."""
        memory = self.encode(input_ids, attention_mask, dropout=dropout)
        mask = Mask(keys=target_mask, causal=True, right_padded=True)
        source = None if dropout is None else dropout.fold_in("decoder")
        states = self._decode(target_ids, None, mask, memory, source).last_hidden_state
        return self.predictions.decoder_input(states), self._copying(states, memory)

    def cross_attentions(
        self, input_ids: Int[Array, "B S"], target_ids: Int[Array, "B T"], attention_mask: SourceMask | None = None
    ) -> tuple[Float[Array, "B N T S"], ...]:
        """Returns the cross-attention weights of each layer, [B, N, T, S]. Arguments: see `__call__`."""
        memory = self.encode(input_ids, attention_mask)
        return self._decode(target_ids, None, Mask(causal=True), memory, intermediates=True).cross_attentions

    def encode(
        self, input_ids: Int[Array, "B S"], attention_mask: SourceMask | None = None, *, dropout: Dropout | None = None
    ) -> Memory:
        """Encodes the source for cross-attention."""
        hidden = self.bert(input_ids, None, attention_mask, dropout=dropout).last_hidden_state
        ids = input_ids if self.config.copy_attention else None
        return Memory(hidden, Mask(keys=attention_mask, right_padded=True), ids)

    def step(
        self,
        input_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        mask: Mask,
        cache: tuple[LayerCache, ...],
        memory: Memory,
    ) -> tuple[Float[Array, "B T padded_V"], tuple[LayerCache, ...]]:
        """Decodes T more tokens of the target. The first step caches the keys and values of the source.

        Args:
            input_ids, position_ids, mask, cache: see `BertForCausalLM.step`.
            memory: the output of `encode`. Without ``copy_attention``, later steps read only its mask.
        """
        output = self._decode(input_ids, position_ids, mask, memory, cache=cache)
        logits = self.predictions(output.last_hidden_state, self.embedding_table())
        copying = self._copying(output.last_hidden_state, memory)
        return logits if copying is None else copying.mix(logits), output.cache

    def decoder_weights(self) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """Returns the decoder's matrix [padded V, E] and bias [padded V]."""
        return self.predictions.decoder_weights(self.embedding_table())

    def embedding_table(self) -> Float[Array, "V E"]:
        """Returns the word embeddings of the target, [V, E], which the head shares."""
        return self._target_embedder().embedding_table()

    def _copying(self, states: Float[Array, "B T D"], memory: Memory) -> Copying | None:
        return self.copy_attention(states, memory) if self.config.copy_attention else None

    def _target_embedder(self) -> Bert:
        return self.decoder if self.config.share_decoder == "none" else self.bert

    def _decode(
        self,
        target_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"] | None,
        mask: Mask,
        memory: Memory,
        dropout: Dropout | None = None,
        cache: tuple[LayerCache, ...] | None = None,
        intermediates: bool = False,
    ) -> EncoderOutput:
        """Runs the decoder's layers over the target."""
        stack = self.bert if self.config.share_decoder == "all" else self.decoder
        x = self._target_embedder().embeddings(target_ids, None, position_ids, None, dropout)
        return stack.encoder(x, mask, dropout, intermediates, memory, cache)
