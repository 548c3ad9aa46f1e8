"""The weights that an encoder-decoder starts from (Rothe et al. 2020): BERT2BERT, BERT2Rnd and BERTShare."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

from bert.config import FinetuneConfig
from bert.errors import UserError
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.training.initialization import Params


class EncoderDecoderInit(NamedTuple):
    """Draws the parameters of an encoder-decoder, which needs a source and a target."""

    model: BertForSequenceToSequence

    def init(self, key: jax.Array, input_ids: jax.Array) -> Any:
        """Parameters; the ids are those of both sides."""
        return self.model.init(key, input_ids, input_ids % self.model.config.decoder.known_vocab_size)


def decoder_source(config: FinetuneConfig, params: Params, name: str) -> Params:
    """The parameters of an encoder-decoder, as far as ``init`` gives them.

    Those of an encoder-decoder are taken as they are. An encoder also becomes the decoder, and its MLM head the
    decoder's head, unless ``decoder_init`` is none. Cross-attention is not among them.

    Args:
        config: of the run, whose sizes are known.
        params: of the model to start from.
        name: of that model, for messages.

    Raises:
        UserError: the decoder would have more layers than that model.
    """
    encoder = {part: tree for part, tree in params["bert"].items() if part != "pooler"}
    source = {**params, "bert": encoder}
    share, layers = config.model.share_decoder, config.model.decoder.num_hidden_layers
    if "decoder" in params or any("cross_attention" in layer for layer in encoder["encoder"].values()):
        return source
    if config.decoder_init == "none" and share != "all":
        return {"bert": encoder}
    if layers > config.model.num_hidden_layers:
        raise UserError(
            f"model.decoder_layers is {layers}, but {name} has {config.model.num_hidden_layers} layers: use no more, "
            "or set decoder_init to none"
        )
    stack = {part: tree for part, tree in encoder["encoder"].items() if _layer(part) < layers}
    own = {"none": {**encoder, "encoder": stack}, "embeddings": {"encoder": stack}}
    return {**source, "decoder": own[share]} if share in own else source


def _layer(part: str) -> int:
    """The number of a layer; -1 for what is no layer."""
    match = re.fullmatch(r"layer_(\d+)", part)
    return int(match[1]) if match else -1
