"""NeoBERT (Le Breton et al. 2025): pre-LN with RMSNorm, rotary positions, gates, and no biases inside the layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.config.model import BIASES
from bert.errors import UserError
from bert.interchange.families import llama
from bert.interchange.families.base import Family, Limit, ParametersByPath
from bert.interchange.names import Names
from bert.model.names import LAYER

BLOCK = "model.transformer_encoder.{}"
PARTS = ("query", "key", "value")


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    if str(content["activation"]).lower() != "swiglu":
        raise UserError(f"hidden_act is {content['activation']!r}, and only 'SwiGLU' is supported: use another model")
    gated = int(2 * content["intermediate_size"] / 3)
    return {
        "intermediate_size": -(-gated // 8) * 8,  # as in the published code: rounded up to a multiple of 8
    }


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    renamed = {**content, "activation": content.get("hidden_act", "SwiGLU"), "hidden_act": "silu"}
    return {"tie_word_embeddings": False, **renamed}


def _share(config: ModelConfig, params: ParametersByPath) -> tuple[ModelConfig, ParametersByPath]:
    """Separates queries, keys and values, which files store head by head, and moves rotated features apart.

    In files, features that are rotated together are neighbours; here they are half a head apart.
    """
    changed = dict(params)
    for number in range(config.num_hidden_layers):
        paths = [f"{LAYER.format(number)}/attention/{part}/kernel" for part in PARTS]
        packed = np.concatenate([np.asarray(params[path]) for path in paths], axis=-1)
        by_head = packed.reshape(len(packed), config.num_attention_heads, 3, config.head_size)
        for part, path in enumerate(paths):
            kernel = by_head[:, :, part]
            if PARTS[part] != "value":
                kernel = kernel.reshape(*kernel.shape[:2], -1, 2).swapaxes(-1, -2)
            changed[path] = np.ascontiguousarray(kernel.reshape(len(packed), -1))
    return config, changed


NEOBERT = Family(
    model_type="neobert",
    title="NeoBERT",
    prefix="model",
    classes={"Bert": "NeoBERT", "BertForMaskedLM": "NeoBERTLMHead"},
    restrictions="The published files, whose code is not executed. The encoder is exported as EuroBERT.",
    names=Names(
        {
            "bert/embeddings/word": "model.encoder",
            f"{LAYER}/attention_norm": f"{BLOCK}.attention_norm",
            **{f"{LAYER}/attention/{part}": f"{BLOCK}.qkv" for part in PARTS},
            f"{LAYER}/attention/output": f"{BLOCK}.wo",
            f"{LAYER}/output_norm": f"{BLOCK}.ffn_norm",
            f"{LAYER}/intermediate": f"{BLOCK}.ffn.w12",  # the first half of the matrix
            f"{LAYER}/gate": f"{BLOCK}.ffn.w12",
            f"{LAYER}/output": f"{BLOCK}.ffn.w3",
            "bert/encoder/norm": "model.layer_norm",
            "predictions/decoder": "decoder.weight",
            "predictions/bias": "decoder.bias",
        }
    ),
    keys={
        **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        **{name: name for name in ("intermediate_size", "hidden_act")},
        "max_position_embeddings": "max_length",
        "layer_norm_eps": "norm_eps",
    },
    defaults=llama.DEFAULTS,
    limits={
        **llama.LAYER_LIMITS,
        **{key: Limit(None, "its layers have no biases") for key in BIASES},
        "causal": Limit(False, "its tokens attend to the whole row"),
        "use_bias": Limit(False, "its layers have no biases"),
        "prediction_bias": Limit(True, "its decoder has a bias"),
    },
    fixed={"rms_norm": True, "rope": True, "ngpt": False},
    constants=r"freqs_cis$",
    has_form=lambda config, architecture: False,
    read_config=_read_config,
    flatten=_flatten,
    share=_share,
)
