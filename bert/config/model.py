"""The encoder and its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from bert.config.validation import (
    MAX_LENGTH,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    check_fields,
    check_unused,
    fields_that_differ,
)
from bert.errors import UserError, require, shorten

VocabularyKind = Literal["wordpiece", "byte_level", "unigram"]
StripAccents = bool | Literal["european"] | None
PairTruncation = Literal["google", "longest_first"]

LEAST_BYTE_LEVEL_SIZE = 256 + 5
"""Tokens of a byte-level vocabulary without merges: the bytes and the special tokens."""

LEAST_BLOCK = 32
"""Fewest positions of a block of local attention: products of smaller ones are slow."""

MAX_BUCKETS = 256
"""Of relative positions: a bucket for each distance below 64 to either side, and as many for those up to 128."""

DECODER_KEYS = ("decoder_layers", "share_decoder", "decoder_vocab_size")
"""Keys of ``model`` that describe a decoder, which an encoder-decoder alone has."""

MAX_SIZE = 2**24
"""Largest size of any kind, far above those of all models, so that no shape or count of elements overflows."""

MODEL_KEYS_KEPT_WITH_INIT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "position_embedding_init",
    *DECODER_KEYS,
)
"""`model` fields that a run may override when it is initialized from another model."""

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "elu", "tanh"]


@dataclass(frozen=True)
class ModelConfig:
    """The encoder."""

    vocab_size: int | None = None
    """Rows V of the word embedding; null takes the size of the vocabulary."""
    hidden_size: Positive = 128
    """Width D of the hidden states."""
    num_hidden_layers: Positive = 2
    """Number of encoder layers."""
    num_attention_heads: Positive = 2
    """Attention heads N a layer; must divide hidden_size."""
    intermediate_size: Positive = 512
    """Width F of the feed-forward layer; 4 x hidden_size in the paper."""
    hidden_act: Activation = "gelu"
    """Activation: gelu (the erf form), gelu_tanh (as Google's code computes it), relu, silu, elu, tanh."""
    pooler_act: Literal["tanh", "gelu", "relu"] = "tanh"
    """Activation of the pooled output: tanh (the paper's), gelu as the classifiers of ELECTRA have it, or relu as those
    of DistilBERT."""
    pooler_type: Literal["dense", "transform"] = "dense"
    """The pooled output is a dense layer and pooler_act (dense), or a dense layer, hidden_act and LayerNorm, as the MLM
    head's transform (transform). Heads over every token read it, too, in this form, as in ModernBERT."""
    pooler_input: Literal["first", "mean"] = "first"
    """Hidden state that the pooled output is made of: that of the first token (first), or the mean over all tokens of
    the row (mean)."""
    pooler_dropout: bool | None = None
    """Dropout before the pooler of a classifier, besides the one after it, as in RoBERTa and ELECTRA. Defaults to true
    if position_offset is set or pooler_act is gelu, except with disentangled positions, and to false otherwise."""
    hidden_dropout_prob: Fraction = 0.1
    """Dropout after embeddings, attention output and feed-forward output."""
    attention_probs_dropout_prob: Fraction = 0.1
    """Dropout on the attention weights."""
    max_position_embeddings: Positive = 512
    """The longest sequence the model can read: rows of the position table, if there is one, less position_offset."""
    position_offset: NonNegative = 0
    """Row of the position table that the first token takes: 0 in BERT, one after the padding id in RoBERTa."""
    type_vocab_size: NonNegative = 2
    """Number of segments; 0 for a model without segment embeddings, as GPT-2."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of the truncated-normal initialisation."""
    position_embedding_init: Literal["normal", "sinusoidal"] = "normal"
    """How the learned position table starts: as random numbers (normal), or as sinusoids of the same deviation."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Epsilon of LayerNorm."""
    norm_type: Literal["layer", "rms"] = "layer"
    """Normalization in all places of LayerNorm: LayerNorm itself (layer), or RMSNorm (rms), which subtracts no mean."""
    norm_bias: bool = True
    """A bias in each LayerNorm; false has none, as ModernBERT."""
    use_bias: bool = True
    """A bias in each dense layer but the last of a head; false has none, as ModernBERT."""
    tie_word_embeddings: bool = True
    """The MLM head decodes with the word embeddings, as published; false gives it its own matrix."""
    embedding_size: Positive | None = None
    """Width E of the embeddings and of the MLM head's decoder, with a projection to hidden_size (ALBERT); null makes
    it hidden_size, without one."""
    position_embedding_type: Literal["learned", "sinusoidal", "rotary", "disentangled", "none"] = "learned"
    """Positions by a learned table (learned), by fixed sinusoids that are no parameters (sinusoidal), by rotations of
    queries and keys, so that attention sees distances alone (rotary; Su et al. 2021), by a vector for each bucket of
    distances, which has queries and keys as tokens have (disentangled; He et al. 2021), or not at all (none)."""
    rotary_base: PositiveFloat = 10_000.0
    """Base of rotary positions: the slowest rotation takes 2 pi times this many positions."""
    local_rotary_base: PositiveFloat | None = None
    """Base of rotary positions in local layers, which attention_window makes; null takes rotary_base."""
    attention_window: Positive | None = None
    """Farthest position to each side that a token of a local layer attends to, itself included at distance 0; null has
    no local layers (Beltagy et al. 2020). ModernBERT's windows of 128 tokens are 64 here."""
    global_attention_every: Annotated[int, Range(least=2)] | None = None
    """With attention_window: every so-many-th layer, from the first on, attends to the whole row, 3 in ModernBERT; null
    makes all layers local."""
    relative_attention_buckets: Positive | None = None
    """Buckets of distances between two tokens, one bias of the attention scores for each bucket and head, which all
    layers share (Raffel et al. 2020, section 2.1): near distances have buckets of their own, far ones share them, and
    the last is from 128 tokens on. MPNet has 32, next to a position table; null has none. With disentangled positions
    each bucket has a vector in place of the biases, and the last is the longest distance: DeBERTa-v3 has 512."""
    gated_feed_forward: bool = False
    """The activated feed-forward layer is multiplied by a second one of the same width, elementwise (Shazeer 2020):
    GeGLU with hidden_act gelu, SwiGLU with silu."""
    layer_groups: Positive | None = None
    """Groups of consecutive layers that share their parameters; must divide num_hidden_layers. 1 applies one layer over
    and over, as ALBERT (Lan et al. 2019); null gives each layer its own."""
    step_embedding: bool = False
    """Sinusoids of a layer's number are added to its input, so that layers that share parameters differ (Universal
    Transformer; Dehghani et al. 2018)."""
    pre_layer_norm: bool = False
    """LayerNorm before attention and feed-forward, and one after the last layer; false has it after each (the paper's),
    which needs a longer warm-up."""
    first_layer_norm: bool = True
    """With pre_layer_norm: LayerNorm before the attention of the first layer; false has none, as ModernBERT, whose
    embeddings have one."""
    scale_embeddings: bool = False
    """Word embeddings times the root of their width, and fixed sinusoids of amplitude 1, as in the Transformer (Vaswani
    et al. 2017); a tied decoder reads the table as it is."""
    embedding_norm: bool = True
    """LayerNorm after the sum of the embeddings; false has none, as GPT-2."""
    prediction_transform: bool = True
    """A dense layer, its activation and LayerNorm in the MLM head before the decoder; false decodes the hidden states
    themselves, as GPT-2."""
    residual_init: Literal["plain", "scaled"] = "plain"
    """Kernels whose output is added to the residual start as all others (plain), or with a standard deviation divided
    by the root of their number, 2 x num_hidden_layers (scaled), as in GPT-2."""
    causal: bool = False
    """A token attends to itself and those before it, as in GPT; false lets it attend to all of the row."""
    prediction_bias: bool = True
    """A bias for each token of the vocabulary in the MLM head's decoder; false has none, as GPT-2."""
    decoder_layers: Positive | None = None
    """Layers of the decoder, which tasks from sequence to sequence have; null takes num_hidden_layers."""
    share_decoder: Literal["none", "embeddings", "all"] = "none"
    """Parameters that the decoder has in common with the encoder: none; those of the embeddings (embeddings), as in
    Vaswani et al. 2017; all but cross-attention (all; BERTShare of Rothe et al. 2020)."""
    decoder_vocab_size: Positive | None = None
    """Rows of the decoder's word embedding, if target_tokenizer gives the target a vocabulary of its own; null takes
    the size of that vocabulary, or vocab_size without one."""

    @property
    def known_vocab_size(self) -> int:
        """V, as a number: once the vocabulary has been read."""
        return require(self.vocab_size, "model.vocab_size")

    @property
    def decoder(self) -> ModelConfig:
        """The sizes of the decoder of an encoder-decoder."""
        return replace(
            self.without_decoder,
            vocab_size=self.decoder_vocab_size or self.vocab_size,
            num_hidden_layers=self.decoder_layers or self.num_hidden_layers,
        )

    @property
    def without_decoder(self) -> ModelConfig:
        """The sizes of the encoder alone."""
        return replace(self, **{key: getattr(ModelConfig, key) for key in DECODER_KEYS})

    @property
    def resolved(self) -> ModelConfig:
        """The same model with a value for ``pooler_dropout``; a causal model has no pooler, and false."""
        has_dropout = self.pooler_dropout
        if has_dropout is None:
            like_roberta = self.position_offset > 0 or self.pooler_act == "gelu"
            has_dropout = like_roberta and self.position_embedding_type != "disentangled"
        return replace(self, pooler_dropout=has_dropout and not self.causal)

    @property
    def head_size(self) -> int:
        """H."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_distinct_layers(self) -> int:
        """Layers that have parameters: as many as groups, or all."""
        return self.layer_groups or self.num_hidden_layers

    @property
    def layers_per_group(self) -> int:
        """Uses of the same parameters, one after the other."""
        return self.num_hidden_layers // self.num_distinct_layers

    def group_of(self, layer: int) -> int:
        """The number of the parameters of a layer, both counted from 0."""
        return layer // self.layers_per_group

    def is_local(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends to a window instead of the whole row."""
        every = self.global_attention_every
        return self.attention_window is not None and (every is None or layer % every != 0)

    def local_block(self, length: int) -> int | None:
        """Positions of the blocks in which local layers attend to themselves and their neighbours; None if rows of
        ``length`` tokens are no longer than these, and at once."""
        if self.attention_window is None:
            return None
        size = max(self.attention_window, LEAST_BLOCK)
        return size if length > 3 * size else None

    def keys_per_query(self, layer: int, length: int) -> int:
        """Keys that each query of a layer is multiplied with, in rows of ``length`` tokens."""
        block = self.local_block(length) if self.is_local(layer) else None
        return length if block is None else (2 if self.causal else 3) * block

    @property
    def pools_tokens(self) -> bool:
        """Whether heads over every token read the pooler's output; a causal model has no pooler."""
        return self.pooler_type == "transform" and not self.causal

    @property
    def embedding_width(self) -> int:
        """E, as a number."""
        return self.embedding_size or self.hidden_size

    def check_length(self, name: str, length: int) -> None:
        """Raises UserError for rows with more positions than masks and dropout's 32-bit counter can distinguish."""
        if length > MAX_LENGTH:
            raise UserError(f"{name} is {length}: it must be at most {MAX_LENGTH:,}")
        weights = self.num_attention_heads * length**2
        if self.attention_probs_dropout_prob > 0 and weights > 2**32:
            raise UserError(
                f"{name} is {length}: the heads ({self.num_attention_heads}) have {weights:,} attention weights a row, "
                "and dropout has places for 2**32: use shorter rows, or set model.attention_probs_dropout_prob to 0"
            )

    def check_depths(self, layerwise_lr_decay: float, num_frozen_layers: int = 0) -> None:
        """Raises UserError for what treats layers by their number, if layers share parameters."""
        if self.layers_per_group == 1:
            return
        given = {"optimizer.layerwise_lr_decay": layerwise_lr_decay != 1, "num_frozen_layers": num_frozen_layers > 0}
        if keys := [key for key, differs in given.items() if differs]:
            raise UserError(
                f"{keys[0]} is set, and the model's layers share parameters (model.layer_groups is "
                f"{self.layer_groups}): remove it"
            )

    def check(self) -> None:
        """Raises UserError if the sizes cannot be built."""
        check_fields("model.", self)
        for name, value in vars(self).items():
            if isinstance(value, int) and value > MAX_SIZE:
                raise UserError(f"model.{name} is {shorten(value)}: it must be at most {MAX_SIZE:,}")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.hidden_size ({self.hidden_size}) is not divisible by model.num_attention_heads "
                f"({self.num_attention_heads}): change one of them"
            )
        if not self.prediction_transform and self.embedding_width != self.hidden_size:
            raise UserError(
                f"model.prediction_transform is false, and without it hidden states of model.hidden_size "
                f"({self.hidden_size}) do not fit the decoder's model.embedding_size ({self.embedding_size}): set "
                "model.prediction_transform to true, or remove model.embedding_size"
            )
        self._check_positions()
        self._check_groups("num_hidden_layers", self.num_hidden_layers)
        self._check_decoder()

    def _check_positions(self) -> None:
        if self.position_embedding_type == "rotary" and self.head_size % 2:
            raise UserError(
                f"model.position_embedding_type is rotary, which turns pairs of features, and a head has "
                f"{self.head_size} (model.hidden_size / model.num_attention_heads): change one of them"
            )
        most = MAX_BUCKETS
        if self.position_embedding_type == "disentangled":
            self._check_disentangled()
            most = 4 * self.max_position_embeddings  # a bucket for each distance to either side
        if (buckets := self.relative_attention_buckets) is not None and (buckets % 4 or buckets > most):
            raise UserError(
                f"model.relative_attention_buckets is {buckets}: set it to a multiple of 4 of at most {most}"
            )
        for key in ("global_attention_every", "local_rotary_base"):
            if getattr(self, key) is not None and self.attention_window is None:
                raise UserError(
                    f"model.{key} is {getattr(self, key)}, and without model.attention_window there are no local "
                    "layers: set model.attention_window, or remove it"
                )
        if not self.first_layer_norm and not self.pre_layer_norm:
            raise UserError(
                "model.first_layer_norm is false, and only pre-LN has LayerNorm before its first layer: set "
                "model.pre_layer_norm to true, or remove it"
            )

    def _check_disentangled(self) -> None:
        if self.relative_attention_buckets is None:
            raise UserError(
                "model.position_embedding_type is disentangled, which needs model.relative_attention_buckets: set it "
                "to 512, say"
            )
        if self.attention_window is not None:
            raise UserError(
                "model.position_embedding_type disentangled and model.attention_window are both set, and disentangled "
                "attention reads whole rows alone: remove one of them"
            )

    def _check_groups(self, key: str, layers: int) -> None:
        if self.layer_groups is None:
            return
        if layers % self.layer_groups:
            raise UserError(
                f"model.layer_groups is {self.layer_groups}, which does not divide model.{key} ({layers}): change one "
                "of them"
            )
        if not self.first_layer_norm:
            raise UserError(
                "model.layer_groups and model.first_layer_norm false are both set, and a first layer without LayerNorm "
                "shares no parameters: remove one of them"
            )

    def _check_decoder(self) -> None:
        self._check_groups("decoder_layers", self.decoder.num_hidden_layers)
        if self.share_decoder == "all" and self.decoder_layers not in (None, self.num_hidden_layers):
            raise UserError(
                f"model.decoder_layers is {self.decoder_layers}, but model.share_decoder is all, which uses the "
                f"{self.num_hidden_layers} layers of the encoder: remove one of the two"
            )
        if self.share_decoder != "none" and self.decoder_vocab_size not in (None, self.vocab_size):
            raise UserError(
                f"model.decoder_vocab_size is {self.decoder_vocab_size}, but model.share_decoder is "
                f"{self.share_decoder}, which uses the embeddings of the encoder: remove one of the two"
            )


@dataclass(frozen=True)
class TokenizerConfig:
    """The vocabulary."""

    kind: VocabularyKind = "wordpiece"
    """Kind of a trained vocabulary: wordpiece (BERT's), or byte_level, whose tokens are bytes and merges of them, as in
    GPT-2 and RoBERTa: it reads every text without loss, with case and accents, and needs no [UNK]; or unigram, which
    reads words as their most probable tokens, as in ALBERT and XLM-RoBERTa."""
    path: str | None = None
    """vocab.txt, tokenizer.json, a SentencePiece file, or a folder that holds one (a run, say); null trains one on the
    corpus. With init, the source's vocabulary extended by new words, whose rows start as the mean of their old tokens;
    null takes it as it is."""
    vocab_size: Annotated[int, Range(least=32, below=2**24)] = 30522
    """Number of tokens to train, special ones included; the result is smaller where the corpus has fewer."""
    lowercase: bool = True
    """Lower-case all text; of kind wordpiece and unigram."""
    strip_accents: StripAccents = "european"
    """Remove combining marks. european: those of Latin, Greek and Cyrillic letters when lower-casing; the same as null
    for a corpus almost all in these scripts, and with a vocab.txt of tokenizer.path. null: those of all scripts when
    lower-casing, as BERT's own vocabularies do, which removes vowels of Thai, Hindi and Arabic."""
    min_frequency: Positive = 2
    """Rarest pair of tokens that is still merged, and rarest character that is kept, when a vocabulary is trained."""
    num_unused_tokens: NonNegative = 0
    """Slots [unused0], [unused1], ... of a trained vocabulary, for words that are added later without new weights."""
    limit_alphabet: Positive | None = None
    """Most characters that a trained vocabulary knows, the most common; null takes what fits a quarter of it. Of kind
    wordpiece and unigram."""

    @property
    def is_unset(self) -> bool:
        """Whether all values are defaults, of this version or of an earlier one."""
        return not any(fields_that_differ(self))

    def check(self, section: str = "tokenizer") -> None:
        """Raises UserError for a vocabulary that cannot be trained."""
        check_fields(f"{section}.", self)
        if self.kind == "byte_level":
            self._check_byte_level(section)
        if self.kind == "unigram" and self.num_unused_tokens:
            raise UserError(
                f"{section}.num_unused_tokens is {self.num_unused_tokens}, and {section}.kind unigram has no such "
                f"slots: remove it, or set {section}.kind to wordpiece"
            )
        if self.num_unused_tokens > self.vocab_size - 32:
            raise UserError(
                f"{section}.num_unused_tokens is {self.num_unused_tokens}: {section}.vocab_size ({self.vocab_size}) "
                "leaves no room for tokens, use a smaller number"
            )

    def _check_byte_level(self, section: str) -> None:
        if self.vocab_size < LEAST_BYTE_LEVEL_SIZE and self.path is None:
            raise UserError(
                f"{section}.vocab_size is {self.vocab_size}, and a byte_level vocabulary has 256 bytes and 5 special "
                f"tokens: set it to at least {LEAST_BYTE_LEVEL_SIZE}"
            )
        reason = f"and {section}.kind byte_level reads text as it is: remove it, or set {section}.kind to wordpiece"
        check_unused(f"{section}.", self, reason, ("strip_accents", "num_unused_tokens", "limit_alphabet"))
