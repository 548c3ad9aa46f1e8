"""Decoders: the left-to-right language model, GPT (Radford et al. 2018) and GPT-2 (Radford et al. 2019) by their
settings; and the Transformer of Vaswani et al. 2017, with its forms that begin as one BERT (Rothe et al. 2020).

Shapes as in `bert.model.encoder`; S is the length of a source, T that of its target.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.attention import LayerCache, Memory
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, EncoderStates, Packing
from bert.model.execution import LayerExecution
from bert.model.heads import drop_classifier_input, last_tokens
from bert.model.layers import dense
from bert.model.mask import Mask
from bert.model.pretraining import MaskedLMHead


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


SourceMask = Num[Array, "B S"] | Bool[Array, "B S"]


class BertForSequenceToSequence(nn.Module):
    """Encoder of a source text, and decoder of a target text with cross-attention to the source.

    Attributes:
        config: of the encoder, and of the decoder by ``decoder_layers``, ``share_decoder`` and ``decoder_vocab_size``.
        dtype: of the computation.
        execution: how the layers are run.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        encoder, decoder = self.config.without_decoder, self.config.decoder
        self.bert = Bert(encoder, self.dtype, add_pooling_layer=False, execution=self.execution)
        if self.config.share_decoder != "all":
            self.decoder = Bert(decoder, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.predictions = MaskedLMHead(decoder, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        input_ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        attention_mask: SourceMask | None = None,
        target_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T padded_V"]:
        """Reads the whole target at once, as in training (teacher forcing).

        Args:
            input_ids: [B, S] source.
            target_ids: [B, T] target, from the token that starts a text on.
            attention_mask: [B, S], 1 for a token and 0 for padding, which is at the end; all 1 if None.
            target_mask: [B, T], the same of the target.
            dropout: source of dropout; None for none.

        Returns:
            [B, T, V] float32 logits of the token that follows each of the target.
        """
        x = self.hidden_states(input_ids, target_ids, attention_mask, target_mask, dropout=dropout)
        return self.predictions.decode(x, self.embedding_table())

    def hidden_states(
        self,
        input_ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        attention_mask: SourceMask | None = None,
        target_mask: PaddingMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T E"]:
        """[B, S] and [B, T] -> [B, T, E], which the decoder multiplies by its matrix; arguments as of `__call__`."""
        memory = self.encode(input_ids, attention_mask, dropout=dropout)
        mask = Mask(keys=target_mask, causal=True, right_padded=True)
        source = None if dropout is None else dropout.fold_in("decoder")
        return self.predictions.decoder_input(self._run(target_ids, None, mask, memory, source).last_hidden_state)

    def cross_attentions(
        self,
        input_ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        attention_mask: SourceMask | None = None,
    ) -> tuple[Float[Array, "B N T S"], ...]:
        """The weights of each layer's cross-attention, [B, N, T, S]: the alignment; arguments as of `__call__`."""
        memory = self.encode(input_ids, attention_mask)
        return self._run(target_ids, None, Mask(causal=True), memory, intermediates=True).cross_attentions

    def encode(
        self,
        input_ids: Int[Array, "B S"],
        attention_mask: SourceMask | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Memory:
        """The states of the source, which cross-attention reads."""
        states = self.bert(input_ids, None, attention_mask, dropout=dropout).last_hidden_state
        return Memory(states, Mask(keys=attention_mask, right_padded=True))

    def step(
        self,
        input_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"],
        mask: Mask,
        cache: tuple[LayerCache, ...],
        memory: Memory,
    ) -> tuple[Float[Array, "B T padded_V"], tuple[LayerCache, ...]]:
        """Decodes T more tokens of the target; the first step puts the keys and values of the source into the cache.

        Args:
            input_ids, position_ids, mask, cache: as of `BertForCausalLM.step`.
            memory: of `encode`. Steps after the first one read its mask alone.
        """
        states = self._run(input_ids, position_ids, mask, memory, cache=cache)
        return self.predictions(states.last_hidden_state, self.embedding_table()), states.cache

    def decoder_weights(self) -> tuple[Float[Array, "padded_V E"], Float[Array, "padded_V"]]:
        """The decoder's matrix [V, E] and bias [V], V padded as ``execution`` has it."""
        return self.predictions.decoder_weights(self.embedding_table())

    def embedding_table(self) -> Float[Array, "V E"]:
        """[V, E] of the target, which the head is tied to."""
        return self._embedder().embedding_table()

    def _embedder(self) -> Bert:
        """The module whose embeddings the target has."""
        return self.decoder if self.config.share_decoder == "none" else self.bert

    def _run(
        self,
        target_ids: Int[Array, "B T"],
        position_ids: Int[Array, "#B T"] | None,
        mask: Mask,
        memory: Memory,
        dropout: Dropout | None = None,
        cache: tuple[LayerCache, ...] | None = None,
        intermediates: bool = False,
    ) -> EncoderStates:
        embedder, stack = self._embedder(), self.bert if self.config.share_decoder == "all" else self.decoder
        x = embedder.embeddings.project(embedder.embed(target_ids, None, position_ids, None, dropout))
        return stack.encoder(x, mask, dropout, intermediates, memory, cache)
