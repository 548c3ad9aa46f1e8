"""The weights that an encoder-decoder starts from (Rothe et al. 2020): BERT2BERT, BERT2Rnd and BERTShare."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

from bert.config import FinetuneConfig, ModelConfig
from bert.errors import UserError
from bert.interchange.names import CROSS
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.training.initialization import Params

SHARES = ("none", "embeddings", "all")
"""Values of ``share_decoder``, from no shared parameters to all."""


class EncoderDecoderInit(NamedTuple):
    """Draws the parameters of an encoder-decoder, which needs a source and a target."""

    model: BertForSequenceToSequence

    def init(self, key: jax.Array, input_ids: jax.Array) -> Any:
        """Parameters; the ids are those of both sides."""
        return self.model.init(key, input_ids, input_ids % self.model.config.decoder.known_vocab_size)


def decoder_source(config: FinetuneConfig, params: Params, name: str) -> Params:
    """The parameters of an encoder-decoder, as far as ``init`` gives them.

    Those of an encoder-decoder are taken as they are; what it shares and the run does not is there twice. An encoder
    also becomes the decoder, and its MLM head the decoder's head, without cross-attention. With ``decoder_init`` none
    the encoder is taken alone.

    Args:
        config: of the run, whose sizes are known.
        params: of the model to start from.
        name: of that model, for messages.

    Raises:
        UserError: the decoder would have more layers than that model, or share what that model does not.
    """
    encoder = {part: tree for part, tree in params["bert"].items() if part != "pooler"}
    source = {**params, "bert": encoder}
    share, layers = config.model.share_decoder, config.model.decoder.num_hidden_layers
    distinct = config.model.decoder.num_distinct_layers
    if (shared := _shared_parts(source)) is not None and config.decoder_init == "encoder":
        return _unshared(config.model, source, shared, name)
    if shared is not None:
        encoder = _without_cross_attention(encoder)
        source = {"bert": encoder, "predictions": source["predictions"]}
    if config.decoder_init == "none" and share != "all":
        return {"bert": encoder}
    if layers > config.model.num_hidden_layers:
        raise UserError(
            f"model.decoder_layers is {layers}, but {name} has {config.model.num_hidden_layers} layers: use no more, "
            "or set decoder_init to none"
        )
    stack = {part: tree for part, tree in encoder["encoder"].items() if _layer(part) < distinct}
    own = {"none": {**encoder, "encoder": stack}, "embeddings": {"encoder": stack}}
    return {**source, "decoder": own[share]} if share in own else source


def _shared_parts(source: Params) -> str | None:
    """``share_decoder`` of the parameters of an encoder-decoder; None for those of an encoder."""
    if "decoder" in source:
        return "none" if "embeddings" in source["decoder"] else "embeddings"
    return "all" if any("cross_attention" in layer for layer in source["bert"]["encoder"].values()) else None


def _unshared(config: ModelConfig, source: Params, shared: str, name: str) -> Params:
    """An encoder-decoder's parameters as the run shares them. Raises UserError where it shares more, or has others."""
    if SHARES.index(config.share_decoder) > SHARES.index(shared):
        raise UserError(
            f"model.share_decoder is {config.share_decoder}, but the two sides of {name} have parameters of their own "
            f"({shared}): set it to {shared}"
        )
    encoder, decoder = source["bert"], source.get("decoder", {})
    layers = decoder.get("encoder", encoder["encoder"])
    tokens = len(decoder.get("embeddings", encoder["embeddings"])["word"]["embedding"])
    given = {
        "model.decoder_layers": (config.decoder.num_distinct_layers, sum(_layer(part) >= 0 for part in layers)),
        "model.decoder_vocab_size": (config.decoder.known_vocab_size, tokens),
    }
    for key, (ours, theirs) in given.items():
        if ours != theirs:
            raise UserError(
                f"{key} is {ours}, but the decoder of {name} has {theirs}: set decoder_init to none, or "
                "init to another model"
            )
    if config.share_decoder == shared:
        return source
    decoder = {"encoder": layers}
    if config.share_decoder == "none":
        decoder["embeddings"] = encoder["embeddings"]
    return {**source, "bert": _without_cross_attention(encoder), "decoder": decoder}


def _without_cross_attention(encoder: Params) -> Params:
    layers = {
        layer: {part: tree for part, tree in parts.items() if not part.startswith(CROSS)}
        for layer, parts in encoder["encoder"].items()
    }
    return {**encoder, "encoder": layers}


def _layer(part: str) -> int:
    """The number of a layer; -1 for what is no layer."""
    match = re.fullmatch(r"layer_(\d+)", part)
    return int(match[1]) if match else -1
