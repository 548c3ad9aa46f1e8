"""An encoder-decoder of two BERTs (BERT2BERT; Rothe et al. 2020): transformers' EncoderDecoderModel.

transformers does not support shared parameters here: they are written once for each side. When a folder is read, equal
copies become shared again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath, encoder_names
from bert.interchange.families.bert import BERT
from bert.interchange.names import Names
from bert.model.names import CROSS, DECODER, DECODER_LAYER, POOLER
from bert.tokenizer.library import SpecialTokenIds

EMBEDDINGS, LAYERS = "embeddings/", "encoder/"

OWN_SIZES = {"num_hidden_layers": "decoder_layers", "vocab_size": "decoder_vocab_size"}
"""Decoder settings that may differ from the encoder's, and the corresponding fields of `ModelConfig`."""


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    encoder, decoder = (_settings(content, side) for side in ("encoder", "decoder"))
    _check_decoder(encoder, decoder)
    return {
        **encoder,
        **{field: decoder[key] for key, field in OWN_SIZES.items()},
        "architectures": content.get("architectures"),
        "tie_word_embeddings": decoder.get("tie_word_embeddings", True),
    }


def _settings(content: dict[str, Any], side: str) -> dict[str, Any]:
    settings = content.get(side)
    if not isinstance(settings, dict):
        raise UserError(f"{side} is {settings!r}, not the settings of a model: copy the file again")
    if (model_type := settings.get("model_type", BERT.model_type)) != BERT.model_type:
        raise UserError(
            f"{side}.model_type is {model_type!r}, and only {BERT.model_type!r} is supported: use another model"
        )
    return settings


def _check_decoder(encoder: dict[str, Any], decoder: dict[str, Any]) -> None:
    """Raises UserError for decoder settings that are not supported."""
    for key in ("is_decoder", "add_cross_attention"):
        if decoder.get(key) is not True:
            raise UserError(f"decoder.{key} is {decoder.get(key)!r}, and only True is supported: use another model")
    if missing := [key for key in OWN_SIZES if key not in decoder]:
        raise UserError(f"the decoder lacks {missing[0]}: copy the file again from the source of the weights")
    plain = {"position_embedding_type": "absolute", **{name: getattr(ModelConfig, name) for name in base.KEYS}}
    for key in (key for key in plain if key not in (*OWN_SIZES, "initializer_range")):
        in_decoder, in_encoder = (settings.get(key, plain[key]) for settings in (decoder, encoder))
        if in_decoder != in_encoder:
            reason = "a projection between them (enc_to_dec_proj)" if key == "hidden_size" else "different values"
            raise UserError(
                f"decoder.{key} is {in_decoder!r} and encoder.{key} is {in_encoder!r}, and {reason} is not supported: "
                "use another model"
            )


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    return {field: None if content[field] == content[key] else content[field] for key, field in OWN_SIZES.items()}


def _nest(content: dict[str, Any], config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    own = ("architectures", "model_type")
    shared = {key: value for key, value in content.items() if key not in own}
    encoder = {"architectures": [BERT.classes["Bert"]], "model_type": BERT.model_type, **shared}
    return {
        **{key: content[key] for key in (*own, "tie_word_embeddings", "dtype")},
        "is_encoder_decoder": True,
        "pad_token_id": special.padding,
        "decoder_start_token_id": special.cls,
        "eos_token_id": special.end,
        "encoder": encoder,
        "decoder": {
            **encoder,
            "architectures": ["BertLMHeadModel"],
            "vocab_size": config.decoder.vocab_size,
            "num_hidden_layers": config.decoder.num_hidden_layers,
            "pad_token_id": special.padding,
            "is_decoder": True,
            "add_cross_attention": True,
        },
    }


def _separate(config: ModelConfig, params: ParametersByPath, _: int) -> tuple[ModelConfig, ParametersByPath]:
    sizes: dict[str, Any] = {
        "decoder_layers": None if config.decoder_layers == config.num_hidden_layers else config.decoder_layers,
        "decoder_vocab_size": None if config.decoder_vocab_size == config.vocab_size else config.decoder_vocab_size,
    }
    separate = {}
    for path, array in params.items():
        inside = path.removeprefix("bert/")
        to_decoder = config.share_decoder == "all" and inside.startswith(LAYERS)
        to_decoder |= config.share_decoder != "none" and inside.startswith(EMBEDDINGS)
        if path != inside and to_decoder:
            separate[f"{DECODER}/{inside}"] = array
        if path == inside or CROSS not in path:
            separate[path] = array
    for name, shape in {"kernel": (config.hidden_size,) * 2, "bias": (config.hidden_size,)}.items():
        separate.setdefault(f"{POOLER}/{name}", np.zeros(shape, np.float32))
    return dataclasses.replace(config, share_decoder="none", **sizes), separate


def _share(config: ModelConfig, params: ParametersByPath) -> tuple[ModelConfig, ParametersByPath]:
    if not _are_copies(params, EMBEDDINGS):
        return config, params
    if not _are_copies(params, LAYERS):
        parts = {path: array for path, array in params.items() if not path.startswith(f"{DECODER}/{EMBEDDINGS}")}
        return dataclasses.replace(config, share_decoder="embeddings"), parts
    parts = {
        path.replace(f"{DECODER}/", "bert/"): array
        for path, array in params.items()
        if not path.startswith(f"{DECODER}/") or CROSS in path
    }
    return dataclasses.replace(config, share_decoder="all"), parts


def _are_copies(params: ParametersByPath, part: str) -> bool:
    """Whether all parameters of a part of the decoder, except cross-attention, equal the encoder's."""
    encoder, decoder = (
        {
            path.removeprefix(side): x
            for path, x in params.items()
            if path.startswith(f"{side}{part}") and CROSS not in path
        }
        for side in ("bert/", f"{DECODER}/")
    )
    return encoder.keys() == decoder.keys() and all(np.array_equal(encoder[path], decoder[path]) for path in encoder)


CROSS_ATTENTION = "decoder.bert.encoder.layer.{}.crossattention"

NAMES = {
    **{path: name for path, name in encoder_names("encoder").items() if path.startswith("bert/")},
    POOLER: "encoder.pooler.dense",
    **{
        path.replace("bert/", f"{DECODER}/", 1): name
        for path, name in encoder_names("decoder.bert").items()
        if path.startswith("bert/")
    },
    f"{DECODER_LAYER}/{CROSS}attention/query": f"{CROSS_ATTENTION}.self.query",
    f"{DECODER_LAYER}/{CROSS}attention/key": f"{CROSS_ATTENTION}.self.key",
    f"{DECODER_LAYER}/{CROSS}attention/value": f"{CROSS_ATTENTION}.self.value",
    f"{DECODER_LAYER}/{CROSS}attention/output": f"{CROSS_ATTENTION}.output.dense",
    f"{DECODER_LAYER}/{CROSS}norm": f"{CROSS_ATTENTION}.output.LayerNorm",
    **{path: f"{DECODER}.{name}" for path, name in base.BERT_PREDICTIONS.items()},
}
"""BERT's names with the prefix of each side: a bare encoder, and a language model as decoder."""

ENCODER_DECODER = Family(
    model_type="encoder-decoder",
    title="encoder-decoder of two BERTs",
    published_tokenizer="any",
    prefix="",
    classes={"BertForSequenceToSequence": "EncoderDecoderModel"},
    names=Names(NAMES),
    decoder_bias=f"decoder.{BERT.decoder_bias}",
    more_sizes=tuple(OWN_SIZES.values()),
    limits={
        **BERT.limits,
        "position_offset": base.FROM_ROW_0,
        "copy_attention": Limit(False, "its decoder copies no tokens"),
    },
    fixed=base.ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: architecture == "BertForSequenceToSequence",
    read_config=_read_config,
    flatten=_flatten,
    nest=_nest,
    separate=_separate,
    share=_share,
)
"""Encoder and decoder may differ only in their number of layers and vocabulary size."""
