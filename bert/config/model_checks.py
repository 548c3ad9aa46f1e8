"""Checks that the keys of ``model`` fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bert.config.validation import conflict
from bert.errors import UserError, shorten

if TYPE_CHECKING:
    from bert.config.model import ModelConfig

MAX_BUCKETS = 256
"""Maximum of relative_attention_buckets: one for each distance below 64 in each direction, and as many up to 128."""

MAX_SIZE = 2**24
"""Upper limit of every size, so that no shape or number of elements overflows."""


def check_model(model: ModelConfig) -> None:
    """Raises UserError if no model can have these sizes. The values of single keys are checked before."""
    for name, value in vars(model).items():
        if isinstance(value, int) and value > MAX_SIZE:
            raise UserError(f"model.{name} is {shorten(value)}: it must be at most {MAX_SIZE:,}")
    _check_heads(model)
    if not model.prediction_transform and model.embedding_width != model.hidden_size:
        fix = f"remove one of the two, since the decoder would read hidden states of width {model.hidden_size}"
        raise conflict(model, "model.prediction_transform", "model.embedding_size", fix)
    _check_positions(model)
    _check_norms(model)
    _check_groups(model, "num_hidden_layers", model.num_hidden_layers)
    _check_decoder(model)


def _check_heads(model: ModelConfig) -> None:
    if model.attention_head_size is None and model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"model.hidden_size ({model.hidden_size}) is not divisible by model.num_attention_heads "
            f"({model.num_attention_heads}): change one of them, or set model.attention_head_size"
        )
    if model.num_attention_heads % model.key_value_heads:
        raise UserError(
            f"model.num_attention_heads ({model.num_attention_heads}) is not divisible by "
            f"model.num_key_value_heads ({model.num_key_value_heads}): change one of them"
        )
    for name in ("num_attention_heads", "key_value_heads"):
        if (width := getattr(model, name) * model.head_size) > MAX_SIZE:
            raise UserError(f"the heads have {width:,} features: use smaller model.attention_head_size")


def _check_rotary(model: ModelConfig) -> None:
    if model.rotated_size % 2 or not model.rotated_size:
        part = "" if model.rotary_fraction == 1 else f", of which model.rotary_fraction selects {model.rotated_size}"
        raise UserError(
            f"model.position_embedding_type is rotary, but a head has {model.head_size} features{part} "
            "(model.hidden_size / model.num_attention_heads): change one of them to make the number even"
        )
    if model.rotary_scaling == "ntk" and model.rotated_size == 2:
        raise UserError("model.rotary_scaling is ntk, but a head rotates only 2 features: use linear")
    if model.rotary_scaling == "yarn" and model.rotary_base <= 1:
        raise UserError(f"model.rotary_base is {model.rotary_base}, but yarn needs a base above 1: use linear")


def _check_positions(model: ModelConfig) -> None:
    kind, buckets = "model.position_embedding_type", model.relative_attention_buckets
    max_buckets = MAX_BUCKETS
    if model.position_embedding_type == "rotary":
        _check_rotary(model)
    if model.position_embedding_type == "disentangled":
        if buckets is None:
            raise conflict(model, kind, "model.relative_attention_buckets", "set it, for example to 512")
        keys = ("attention_window", "num_key_value_heads", "query_key_norm", "attention_softcap")
        for key in (*keys, "query_pre_attn_scalar"):
            if getattr(model, key):
                raise conflict(model, kind, f"model.{key}", "remove one of the two")
        max_buckets = 4 * model.max_position_embeddings  # a bucket for each distance in each direction
    if model.position_embedding_type == "transformer_xl":
        if model.hidden_size % 2:
            raise UserError(f"{kind} is transformer_xl, but model.hidden_size is {model.hidden_size}: make it even")
        for key in ("attention_window", "attention_softcap", "query_pre_attn_scalar"):
            if getattr(model, key):
                raise conflict(model, kind, f"model.{key}", "remove one of the two")
    if model.position_embedding_type == "alibi" and buckets is not None:
        raise conflict(model, kind, "model.relative_attention_buckets", "remove one of the two")
    if buckets is not None and (buckets % 4 or buckets > max_buckets):
        raise UserError(
            f"model.relative_attention_buckets is {buckets}: set it to a multiple of 4 of at most {max_buckets}"
        )
    for key in ("global_attention_every", "local_rotary_base"):
        if getattr(model, key) is not None and model.attention_window is None:
            raise conflict(model, f"model.{key}", "model.attention_window", "set a window, or remove the key")
    if model.first_global_layer and model.first_global_layer >= (model.global_attention_every or 0):
        fix = "set it below the interval of global layers"
        raise conflict(model, "model.first_global_layer", "model.global_attention_every", fix)


def _check_norms(model: ModelConfig) -> None:
    if not model.first_layer_norm and not model.pre_layer_norm:
        raise conflict(model, "model.first_layer_norm", "model.pre_layer_norm", "set one of them to true")
    if model.sublayer_output_norm and not model.pre_layer_norm:
        raise conflict(model, "model.sublayer_output_norm", "model.pre_layer_norm", "set both to true")
    if model.token_dropout_id is None:
        return
    if model.causal:
        fix = "remove one of the two, since a token cannot know the masks after it"
        raise conflict(model, "model.token_dropout_id", "model.causal", fix)
    if model.vocab_size is not None and model.token_dropout_id >= model.vocab_size:
        raise conflict(model, "model.token_dropout_id", "model.vocab_size", "set it to the id of a token")


def _check_groups(model: ModelConfig, key: str, layers: int) -> None:
    if model.layer_groups is None:
        return
    if layers % model.layer_groups:
        raise UserError(
            f"model.layer_groups is {model.layer_groups}, which does not divide model.{key} ({layers}): change one "
            "of them"
        )
    if not model.first_layer_norm:
        fix = "remove one of the two, since the first layer could not share its parameters"
        raise conflict(model, "model.layer_groups", "model.first_layer_norm", fix)


def _check_decoder(model: ModelConfig) -> None:
    _check_groups(model, "decoder_layers", model.decoder.num_hidden_layers)
    fix = "remove one of the two, since the decoder uses the layers and embeddings of the encoder"
    if model.share_decoder == "all" and model.decoder_layers not in (None, model.num_hidden_layers):
        raise conflict(model, "model.decoder_layers", "model.share_decoder", fix)
    if model.share_decoder != "none" and model.decoder_vocab_size not in (None, model.vocab_size):
        raise conflict(model, "model.decoder_vocab_size", "model.share_decoder", fix)
