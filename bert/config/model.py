"""Configuration of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from bert.config.validation import (
    MAX_LENGTH,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    check_fields,
    conflict,
)
from bert.errors import UserError, require, shorten

PairTruncation = Literal["google", "longest_first"]
LongTextMode = Literal["cut", "head_tail", "windows", "windows_max"]
WINDOW_MODES = ("windows", "windows_max")

MIN_BLOCK = 32
"""Minimum number of positions in a block of local attention: products of smaller blocks are slow."""

MAX_BUCKETS = 256
"""Maximum of relative_attention_buckets. Each direction has 64 for distances below 64, and 64 that share those up to
128."""

DECODER_KEYS = ("decoder_layers", "share_decoder", "decoder_vocab_size", "copy_attention")
"""Keys of ``model`` that only an encoder-decoder uses."""

DISENTANGLED = ("disentangled", "deberta_v1")
"""Values of position_embedding_type with vectors for distances."""

IN_ATTENTION = ("rotary", *DISENTANGLED, "alibi", "transformer_xl")
"""Values of position_embedding_type inside attention. All others are equivalent to a position table."""

MAX_SIZE = 2**24
"""Upper limit of every size, so that no shape or number of elements overflows."""

BIASES = ("query_key_value_bias", "attention_output_bias", "intermediate_bias", "output_bias")
"""Keys of ``model`` for the biases of the dense layers of each layer."""

MODEL_KEYS_KEPT_WITH_INIT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "position_embedding_init",
    *DECODER_KEYS,
)
"""Fields of ``model`` that may be set when a run is initialized from another model."""

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "elu", "tanh"]


@dataclass(frozen=True)
class ModelConfig:
    """The encoder."""

    vocab_size: int | None = None
    """Rows V of the word embedding. Defaults to the size of the vocabulary."""
    hidden_size: Positive = 128
    """Width D of the hidden states."""
    num_hidden_layers: Positive = 2
    """Number of encoder layers."""
    num_attention_heads: Positive = 2
    """Number of attention heads N per layer; must divide hidden_size unless attention_head_size is set."""
    intermediate_size: Positive = 512
    """Width F of the feed-forward layer; 4 x hidden_size in BERT."""
    num_key_value_heads: Positive | None = None
    """Number of heads of keys and values, each of which serves num_attention_heads / num_key_value_heads heads of
    queries; 1 is multi-query attention (Ainslie et al. 2023). Defaults to num_attention_heads."""
    attention_head_size: Positive | None = None
    """Features H of a head. Defaults to hidden_size / num_attention_heads."""
    query_key_norm: bool = False
    """Normalization of the queries and keys of each head, with the type and bias of the other normalization layers,
    before rotary positions; true in Qwen3."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Number by whose square root attention scores are divided, as in Gemma. Defaults to attention_head_size."""
    attention_softcap: PositiveFloat | None = None
    """Limit c of the attention scores, which become c x tanh(score / c); 50 in Gemma 2. null: no limit."""
    hidden_act: Activation = "gelu"
    """Activation: gelu (the exact erf form), gelu_tanh (the tanh approximation of Google's BERT), relu, silu, elu or
    tanh."""
    pooler_act: Literal["tanh", "gelu", "relu"] = "tanh"
    """Activation of the pooler: tanh (BERT), gelu (ELECTRA's classifiers) or relu (DistilBERT's classifiers)."""
    pooler_type: Literal["dense", "transform", "norm"] = "dense"
    """Pooler: a dense layer with pooler_act (dense); a dense layer with hidden_act and LayerNorm, like the transform of
    the MLM head (transform), which token-level heads apply to every token, as in ModernBERT; or only LayerNorm without
    parameters (norm).
    """
    pooler_input: Literal["first", "last", "mean", "each"] = "first"
    """Input of the pooler: the hidden state of the first token (first), or of the last one (last), as in XLNet; the
    mean over all tokens (mean); or each token, whose outputs are averaged (each)."""
    pooler_dropout: bool | None = None
    """Dropout before the pooler of a classifier, besides the one after it, as in RoBERTa and ELECTRA. Defaults to true
    if position_offset is set or pooler_act is gelu, except with disentangled positions or pooler_input each, and to
    false otherwise."""
    hidden_dropout_prob: Fraction = 0.1
    """Dropout rate after the embeddings, the attention output and the feed-forward output."""
    attention_probs_dropout_prob: Fraction = 0.1
    """Dropout rate of the attention weights."""
    max_position_embeddings: Positive = 512
    """Maximum number of tokens per row: the rows of the position table, if there is one, minus position_offset."""
    position_offset: NonNegative = 0
    """Row of the position table for the first token: 0 in BERT, the padding id + 1 in RoBERTa."""
    type_vocab_size: NonNegative = 2
    """Number of segments; 0: no segment embeddings, as in GPT-2."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of the truncated normal distribution of initial weights."""
    position_embedding_init: Literal["normal", "sinusoidal"] = "normal"
    """Initial values of the learned position table: random (normal), or sinusoids of the same standard deviation."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Epsilon of LayerNorm."""
    norm_type: Literal["layer", "rms", "rms_plus_one"] = "layer"
    """Type of all normalization layers: LayerNorm (layer); RMSNorm, which does not subtract the mean (rms); or RMSNorm
    with the scale 1 + parameter, as in Gemma (rms_plus_one)."""
    norm_bias: bool = True
    """LayerNorm layers have a bias; false in ModernBERT."""
    use_bias: bool = True
    """Dense layers have a bias; false in ModernBERT. The last layer of a head always has one."""
    query_key_value_bias: bool | None = None
    """Queries, keys and values have a bias. Defaults to use_bias."""
    attention_output_bias: bool | None = None
    """The dense layer after attention has a bias. Defaults to use_bias."""
    intermediate_bias: bool | None = None
    """The first layer of the feed-forward network and its gate have a bias. Defaults to use_bias."""
    output_bias: bool | None = None
    """The last layer of the feed-forward network has a bias. Defaults to use_bias."""
    tie_word_embeddings: bool = True
    """The decoder of the MLM head shares the word embeddings, as in BERT; false: it has its own matrix."""
    embedding_size: Positive | None = None
    """Width E of the embeddings and of the MLM head's decoder, with a projection to hidden_size, as in ALBERT.
    Defaults to hidden_size, without a projection."""
    position_embedding_type: Literal[
        "learned", "sinusoidal", "rotary", "disentangled", "deberta_v1", "alibi", "transformer_xl", "none"
    ] = "learned"
    """Position encoding: a learned table (learned); fixed sinusoids (sinusoidal); rotations of queries and keys, so
    that attention depends on distances only (rotary; Su et al. 2021); a vector for each bucket of distances, with its
    own queries and keys (disentangled; He et al. 2021); the same with a vector for each distance, separate projections
    in each layer, and keys without bias (deberta_v1); a penalty of the scores that grows with the distance, with a
    slope per head (alibi; Press et al. 2022); sinusoids of distances and two vectors for equal and different segments
    in the scores, in place of tables (transformer_xl; Dai et al. 2019, Yang et al. 2019); or none."""
    rotary_base: PositiveFloat = 10_000.0
    """Base of rotary positions: the slowest rotation has a period of 2 pi x rotary_base positions."""
    local_rotary_base: PositiveFloat | None = None
    """Base of rotary positions in local layers (see attention_window). Defaults to rotary_base."""
    rotary_fraction: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Share of the features of a head that rotary positions rotate, the first ones; rounded down."""
    rotary_scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    """Slower rotations for rows longer than in pretraining: all by rotary_scaling_factor (linear; Chen et al. 2023);
    through a larger base, which keeps the fastest rotation and slows the slowest one by the factor (ntk); or only those
    with long periods, with larger scores (yarn; Peng et al. 2023). Not in local layers with local_rotary_base."""
    rotary_scaling_factor: Annotated[float, Range(minimum=1)] = 1.0
    """Factor by which rotary_scaling extends the positions."""
    rotary_original_length: Positive | None = None
    """Positions of the model before rotary_scaling yarn. Defaults to max_position_embeddings divided by
    rotary_scaling_factor."""
    memory_length: Positive | None = None
    """Segment recurrence (Dai et al. 2019) for position_embedding_type transformer_xl: in pretraining with clm or plm,
    and when a language model scores texts, each row continues the row before. It also attends to the hidden states of
    the last memory_length tokens before it, without gradients. null: rows are read alone."""
    attention_window: Positive | None = None
    """Maximum distance, to each side, at which a token of a local layer attends (Beltagy et al. 2020). null: all layers
    are global. The value is one-sided: ModernBERT's window of 128 is 64 here."""
    global_attention_every: Annotated[int, Range(minimum=2)] | None = None
    """Interval of global layers, with attention_window: every n-th layer, starting with first_global_layer, is
    global; 3 in ModernBERT. null: all layers are local."""
    first_global_layer: NonNegative = 0
    """Number of the first global layer, counted from 0, with global_attention_every; 5 in Gemma 3."""
    global_attention_sep_id: NonNegative | None = None
    """Id of the separator token, with attention_window, for global tokens: these attend to the whole row with separate
    queries, keys and values, and all tokens attend to them (Beltagy et al. 2020, section 3.1). Global are, as in
    transformers' Longformer, the first token in sequence classification, the question in question answering, the
    second text in multiple choice, and no token otherwise. null: no global tokens."""
    relative_attention_buckets: Positive | None = None
    """Number of buckets of distances between two tokens. Each bucket has a bias of the attention scores per head,
    shared by all layers (Raffel et al. 2020, section 2.1). Small distances have their own buckets, large ones share
    them, and the last bucket starts at 128 tokens; 32 in MPNet. null: no biases. With disentangled positions, each
    bucket has a vector instead, and the last one is the longest distance; 512 in DeBERTa-v3. With deberta_v1, the
    number is twice the maximum distance, and longer distances share its vector."""
    disentangled_products: Literal["both", "content_to_position", "position_to_content"] = "both"
    """Products of a content and a distance in the scores of disentangled attention: the query and the distance
    (content_to_position), the key and the distance (position_to_content), or both."""
    position_table: bool = False
    """Add a learned position table to the word embeddings of a model with disentangled attention, as with DeBERTa's
    position_biased_input."""
    gated_feed_forward: bool = False
    """Multiply the activated feed-forward layer elementwise by a second one of the same width (Shazeer 2020): GeGLU
    with hidden_act gelu, SwiGLU with silu."""
    conv_kernel_size: Positive | None = None
    """Number of tokens, odd, in the kernel of a convolution over the embeddings. Its output, after hidden_act, is added
    to the output of the first layer; 3 in DeBERTa-v2's larger models. null: no convolution."""
    layer_groups: Positive | None = None
    """Number of groups of consecutive layers that share parameters; must divide num_hidden_layers. 1: all layers share
    one set, as in ALBERT (Lan et al. 2019). null: each layer has its own."""
    step_embedding: bool = False
    """Add sinusoids of the layer number to the input of each layer, so that layers with shared parameters differ
    (Universal Transformer; Dehghani et al. 2018)."""
    halting: NonNegativeFloat | None = None
    """Adaptive computation time (Graves 2016): each position halts after a different number of layers, at most
    num_hidden_layers. The value is the cost of a step in pretraining with mlm and clm, such as 0.01. With layer_groups
    1 and step_embedding, this is the Universal Transformer. null: all positions have all layers."""
    pre_layer_norm: bool = False
    """LayerNorm before attention and feed-forward, and after the last layer (pre-LN). false: after each of them, as in
    BERT (post-LN), which needs a longer warm-up."""
    first_layer_norm: bool = True
    """LayerNorm before the attention of the first layer, with pre_layer_norm; false in ModernBERT, whose embeddings
    have one.
    """
    sublayer_output_norm: bool = False
    """LayerNorm also after attention and feed-forward, before their output is added, with pre_layer_norm; true in
    Gemma 2 and 3."""
    scale_embeddings: bool = False
    """Multiply word embeddings by the square root of their width, and use sinusoids of amplitude 1, as in the
    Transformer (Vaswani et al. 2017). A tied decoder uses the unscaled table."""
    token_dropout_id: NonNegative | None = None
    """Id of the mask token, if its word embedding is replaced by zeros, and the others are scaled by 0.88 / (1 - share
    of mask tokens in the row), as in ESM-2. null: mask tokens have an embedding."""
    embedding_norm: bool = True
    """LayerNorm after the sum of the embeddings; false in GPT-2."""
    prediction_transform: bool = True
    """The MLM head has a dense layer, an activation and LayerNorm before the decoder. false: it decodes the hidden
    states directly, as in GPT-2."""
    residual_init: Literal["plain", "scaled"] = "plain"
    """Initial standard deviation of kernels whose output is added to the residual: initializer_range (plain), or
    initializer_range divided by the square root of 2 x num_hidden_layers, as in GPT-2 (scaled)."""
    causal: bool = False
    """Tokens attend to themselves and earlier tokens, as in GPT; false: to the whole row."""
    prediction_bias: bool = True
    """The decoder of the MLM head has a bias for each token of the vocabulary; false in GPT-2."""
    prediction_softcap: PositiveFloat | None = None
    """Limit c of the logits of the tokens, which become c x tanh(logit / c); 30 in Gemma 2. null: no limit."""
    decoder_layers: Positive | None = None
    """Number of decoder layers in sequence-to-sequence tasks. Defaults to num_hidden_layers."""
    share_decoder: Literal["none", "embeddings", "all"] = "none"
    """Parameters that the decoder shares with the encoder: none; the embeddings, as in Vaswani et al. 2017
    (embeddings); or all except cross-attention (all; BERTShare of Rothe et al. 2020)."""
    decoder_vocab_size: Positive | None = None
    """Rows of the decoder's word embedding. Defaults to the size of target_tokenizer's vocabulary, or to vocab_size if
    there is none."""
    copy_attention: bool = False
    """Copy tokens of the source into the target with a further attention, for summaries that contain the names of their
    source (See et al. 2017). Both sides have one vocabulary."""

    @property
    def known_vocab_size(self) -> int:
        """V, known once the vocabulary has been read."""
        return require(self.vocab_size, "model.vocab_size")

    @property
    def is_static(self) -> bool:
        """Whether the model is a table of vectors per token, without layers. Such models are read, and not trained."""
        return self.num_hidden_layers == 0

    @property
    def decoder(self) -> ModelConfig:
        """The sizes of the decoder of an encoder-decoder."""
        return replace(
            self.without_decoder,
            vocab_size=self.decoder_vocab_size or self.vocab_size,
            token_dropout_id=None,
            conv_kernel_size=None,
            global_attention_sep_id=None,
            num_hidden_layers=self.decoder_layers or self.num_hidden_layers,
        )

    @property
    def without_decoder(self) -> ModelConfig:
        """The sizes of the encoder alone."""
        return replace(self, **{key: getattr(ModelConfig, key) for key in DECODER_KEYS})

    @property
    def resolved(self) -> ModelConfig:
        """The same model with a value for ``pooler_dropout``; false for a causal model, which has no pooler."""
        has_dropout = self.pooler_dropout
        if has_dropout is None:
            like_roberta = self.position_offset > 0 or self.pooler_act == "gelu"
            has_dropout = like_roberta and not self.is_disentangled and self.pooler_input != "each"
        return replace(self, pooler_dropout=has_dropout and not self.causal)

    @property
    def head_size(self) -> int:
        """H."""
        return self.attention_head_size or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """M, the number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotated_size(self) -> int:
        """Number of features of a head that rotary positions rotate."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def without_aliases(self) -> ModelConfig:
        """The same model, with null for values that equal the default of a key."""
        defaults: dict[str, Any] = {
            "num_key_value_heads": self.num_attention_heads,
            "attention_head_size": self.hidden_size / self.num_attention_heads,
            **dict.fromkeys(BIASES, self.use_bias),
        }
        unset: dict[str, Any] = {key: None for key, value in defaults.items() if getattr(self, key) == value}
        return replace(self, **unset)

    def has_bias(self, key: str) -> bool:
        """Returns whether the dense layers of a key of `BIASES` have a bias."""
        value: bool | None = getattr(self, key)
        return self.use_bias if value is None else value

    @property
    def num_distinct_layers(self) -> int:
        """Number of layers with their own parameters."""
        return self.layer_groups or self.num_hidden_layers

    @property
    def layers_per_group(self) -> int:
        """Number of consecutive layers that share parameters."""
        return self.num_hidden_layers // self.num_distinct_layers

    def group_of(self, layer: int) -> int:
        """Returns the index of the parameters of a layer, both counted from 0."""
        return layer // self.layers_per_group

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, attends to a window instead of the whole row."""
        every = self.global_attention_every
        return self.attention_window is not None and (every is None or layer % every != self.first_global_layer)

    def local_block(self, length: int) -> int | None:
        """Returns the block size of local attention, in which each block attends to itself and its neighbours.

        Returns None if rows of ``length`` tokens are at most three blocks long, and are computed at once.
        """
        if self.attention_window is None:
            return None
        size = max(self.attention_window, MIN_BLOCK)
        return size if length > 3 * size else None

    def keys_per_query(self, layer: int, length: int) -> int:
        """Returns the number of keys per query of a layer in rows of ``length`` tokens."""
        block = self.local_block(length) if self.is_local(layer) else None
        return length if block is None else (2 if self.causal else 3) * block

    @property
    def pools_tokens(self) -> bool:
        """Whether heads over every token read the pooler's output; a causal model has no pooler."""
        return self.pooler_type == "transform" and not self.causal

    @property
    def is_disentangled(self) -> bool:
        """Whether attention has products of contents and distances."""
        return self.position_embedding_type in DISENTANGLED

    @property
    def num_products(self) -> int:
        """Number of products in a score of disentangled attention (He et al. 2021, section 3.1)."""
        return 3 if self.disentangled_products == "both" else 2

    @property
    def has_position_table(self) -> bool:
        """Whether the embeddings have a learned vector for each position."""
        return self.position_embedding_type == "learned" or self.position_table

    @property
    def has_relative_segments(self) -> bool:
        """Whether attention compares the segments of two tokens, in place of a table of segments."""
        return self.position_embedding_type == "transformer_xl" and self.type_vocab_size > 0

    @property
    def has_segment_table(self) -> bool:
        """Whether the embeddings have a vector for each segment."""
        return self.position_embedding_type != "transformer_xl" and self.type_vocab_size > 0

    @property
    def has_query_embedding(self) -> bool:
        """Whether the queries of permuted language modelling have a learned embedding, as in XLNet."""
        return self.position_embedding_type == "transformer_xl" and not self.causal

    @property
    def embedding_width(self) -> int:
        """E, as a number."""
        return self.embedding_size or self.hidden_size

    def check_length(self, name: str, length: int) -> None:
        """Raises UserError for rows with more positions than masks and dropout's 32-bit counter can distinguish."""
        if length > MAX_LENGTH:
            raise UserError(f"{name} is {length}: it must be at most {MAX_LENGTH:,}")
        weights = self.num_attention_heads * length * (length + (self.memory_length or 0))
        if self.attention_probs_dropout_prob > 0 and weights > 2**32:
            raise UserError(
                f"{name} is {length}, which makes {weights:,} attention weights per row, but dropout supports at most "
                "2**32: use shorter rows, or set model.attention_probs_dropout_prob to 0"
            )

    def check_depths(self, layerwise_lr_decay: float, num_frozen_layers: int = 0) -> None:
        """Raises UserError for settings that depend on the layer number if layers share parameters."""
        shared = (
            f"but model.layer_groups is {self.layer_groups}, so that layers share parameters: remove one of the two"
        )
        if self.layers_per_group > 1 and layerwise_lr_decay != 1:
            raise UserError(f"optimizer.layerwise_lr_decay is {layerwise_lr_decay}, {shared}")
        if self.layers_per_group > 1 and num_frozen_layers > 0:
            raise UserError(f"num_frozen_layers is {num_frozen_layers}, {shared}")

    def check(self) -> None:
        """Raises UserError if no model can have these sizes."""
        check_fields("model.", self)
        for name, value in vars(self).items():
            if isinstance(value, int) and value > MAX_SIZE:
                raise UserError(f"model.{name} is {shorten(value)}: it must be at most {MAX_SIZE:,}")
        self._check_heads()
        if not self.prediction_transform and self.embedding_width != self.hidden_size:
            fix = f"remove one of the two, since the decoder would read hidden states of width {self.hidden_size}"
            raise conflict(self, "model.prediction_transform", "model.embedding_size", fix)
        self._check_positions()
        self._check_global_tokens()
        self._check_norms()
        self._check_convolution()
        self._check_groups("num_hidden_layers", self.num_hidden_layers)
        self._check_decoder()

    def _check_heads(self) -> None:
        if self.attention_head_size is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.hidden_size ({self.hidden_size}) is not divisible by model.num_attention_heads "
                f"({self.num_attention_heads}): change one of them, or set model.attention_head_size"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise UserError(
                f"model.num_attention_heads ({self.num_attention_heads}) is not divisible by "
                f"model.num_key_value_heads ({self.num_key_value_heads}): change one of them"
            )
        for name in ("num_attention_heads", "key_value_heads"):
            if (width := getattr(self, name) * self.head_size) > MAX_SIZE:
                raise UserError(f"the heads have {width:,} features: use smaller model.attention_head_size")

    def _check_rotary(self) -> None:
        if self.rotated_size % 2 or not self.rotated_size:
            part = "" if self.rotary_fraction == 1 else f", of which model.rotary_fraction selects {self.rotated_size}"
            raise UserError(
                f"model.position_embedding_type is rotary, but a head has {self.head_size} features{part} "
                "(model.hidden_size / model.num_attention_heads): change one of them to make the number even"
            )
        if self.rotary_scaling == "ntk" and self.rotated_size == 2:
            raise UserError("model.rotary_scaling is ntk, but a head rotates only 2 features: use linear")
        if self.rotary_scaling == "yarn" and self.rotary_base <= 1:
            raise UserError(f"model.rotary_base is {self.rotary_base}, but yarn needs a base above 1: use linear")

    def _check_positions(self) -> None:
        kind, buckets = "model.position_embedding_type", self.relative_attention_buckets
        if self.position_embedding_type == "rotary":
            self._check_rotary()
        self._check_disentangled()
        if self.position_embedding_type == "transformer_xl":
            if self.hidden_size % 2:
                raise UserError(f"{kind} is transformer_xl, but model.hidden_size is {self.hidden_size}: make it even")
            for key in ("attention_window", "attention_softcap", "query_pre_attn_scalar"):
                if getattr(self, key):
                    raise conflict(self, kind, f"model.{key}", "remove one of the two")
        elif self.memory_length is not None:
            raise conflict(
                self, "model.memory_length", kind, "set the positions to transformer_xl, or remove the memory"
            )
        if self.position_embedding_type == "alibi" and buckets is not None:
            raise conflict(self, kind, "model.relative_attention_buckets", "remove one of the two")
        self._check_buckets()
        for key in ("global_attention_every", "local_rotary_base"):
            if getattr(self, key) is not None and self.attention_window is None:
                raise conflict(self, f"model.{key}", "model.attention_window", "set a window, or remove the key")
        if self.first_global_layer and self.first_global_layer >= (self.global_attention_every or 0):
            fix = "set it below the interval of global layers"
            raise conflict(self, "model.first_global_layer", "model.global_attention_every", fix)

    def _check_disentangled(self) -> None:
        kind = "model.position_embedding_type"
        if not self.is_disentangled:
            for key in ("disentangled_products", "position_table"):
                if getattr(self, key) != getattr(ModelConfig, key):
                    raise conflict(self, f"model.{key}", kind, "set the positions to disentangled, or remove the key")
            return
        if self.relative_attention_buckets is None:
            raise conflict(self, kind, "model.relative_attention_buckets", "set it, for example to 512")
        keys = ("attention_window", "num_key_value_heads", "query_key_norm", "attention_softcap")
        for key in (*keys, "query_pre_attn_scalar"):
            if getattr(self, key):
                raise conflict(self, kind, f"model.{key}", "remove one of the two")

    def _check_buckets(self) -> None:
        buckets = self.relative_attention_buckets
        if buckets is None:
            return
        if self.position_embedding_type == "deberta_v1":
            if buckets % 2:
                raise UserError(f"model.relative_attention_buckets is {buckets}: set it to twice the maximum distance")
            return
        is_biased = self.position_embedding_type != "disentangled"
        limit = MAX_BUCKETS if is_biased else 4 * self.max_position_embeddings  # both directions of each distance
        if buckets % 4 or buckets > limit:
            raise UserError(
                f"model.relative_attention_buckets is {buckets}: set it to a multiple of 4 of at most {limit}"
            )

    def _check_norms(self) -> None:
        if not self.first_layer_norm and not self.pre_layer_norm:
            raise conflict(self, "model.first_layer_norm", "model.pre_layer_norm", "set one of them to true")
        if self.sublayer_output_norm and not self.pre_layer_norm:
            raise conflict(self, "model.sublayer_output_norm", "model.pre_layer_norm", "set both to true")
        if self.token_dropout_id is None:
            return
        if self.causal:
            fix = "remove one of the two, since a token cannot know the masks after it"
            raise conflict(self, "model.token_dropout_id", "model.causal", fix)
        self._check_token_id("token_dropout_id", self.token_dropout_id)

    def _check_token_id(self, key: str, token_id: int) -> None:
        if self.vocab_size is not None and token_id >= self.vocab_size:
            raise conflict(self, f"model.{key}", "model.vocab_size", "set it to the id of a token")

    def _check_global_tokens(self) -> None:
        key = "model.global_attention_sep_id"
        if self.global_attention_sep_id is None:
            return
        if self.attention_window is None:
            raise conflict(self, key, "model.attention_window", "set a window, or remove the key")
        if self.position_embedding_type in IN_ATTENTION:
            raise conflict(self, key, "model.position_embedding_type", "set the positions to learned or sinusoidal")
        for other in ("global_attention_every", "relative_attention_buckets", "query_key_norm", "causal"):
            if getattr(self, other):
                raise conflict(self, key, f"model.{other}", "remove one of the two")
        if self.share_decoder == "all":
            raise conflict(self, key, "model.share_decoder", "share the embeddings only, or remove the key")
        self._check_token_id("global_attention_sep_id", self.global_attention_sep_id)

    def _check_convolution(self) -> None:
        size, limit = self.conv_kernel_size, 2 * self.max_position_embeddings - 1
        if size is None:
            return
        if size % 2 == 0 or size > limit:
            raise UserError(f"model.conv_kernel_size is {size}: set it to an odd number of at most {limit}")
        others = {key: getattr(self, key) for key in ("causal", "memory_length")}
        others["share_decoder"] = self.share_decoder == "all"
        if other := next((key for key, is_set in others.items() if is_set), None):
            fix = "remove one of the two, since a convolution reads the tokens on both sides, in the same row"
            raise conflict(self, "model.conv_kernel_size", f"model.{other}", fix)

    def _check_groups(self, key: str, layers: int) -> None:
        if self.layer_groups is None:
            return
        if layers % self.layer_groups:
            raise UserError(
                f"model.layer_groups is {self.layer_groups}, which does not divide model.{key} ({layers}): change one "
                "of them"
            )
        if not self.first_layer_norm:
            fix = "remove one of the two, since the first layer could not share its parameters"
            raise conflict(self, "model.layer_groups", "model.first_layer_norm", fix)

    def _check_decoder(self) -> None:
        self._check_groups("decoder_layers", self.decoder.num_hidden_layers)
        fix = "remove one of the two, since the decoder uses the layers and embeddings of the encoder"
        if self.share_decoder == "all" and self.decoder_layers not in (None, self.num_hidden_layers):
            raise conflict(self, "model.decoder_layers", "model.share_decoder", fix)
        if self.share_decoder != "none" and self.decoder_vocab_size not in (None, self.vocab_size):
            raise conflict(self, "model.decoder_vocab_size", "model.share_decoder", fix)
        if self.copy_attention and self.decoder_vocab_size not in (None, self.vocab_size):
            fix = "remove one of the two, since only tokens of the same vocabulary are copied"
            raise conflict(self, "model.copy_attention", "model.decoder_vocab_size", fix)
