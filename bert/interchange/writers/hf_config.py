"""config.json as Hugging Face transformers writes it."""

from __future__ import annotations

from typing import Any

from bert.interchange import electra, names
from bert.interchange.bundle import ModelBundle
from bert.interchange.readers import hf
from bert.tokenizer.wordpiece import special_ids

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu", "tanh": "tanh"}


def model_family(model: ModelBundle) -> str:
    """RoBERTa's positions begin after its padding id, BERT's at 0; ELECTRA's as `electra.is_electra` tells."""
    if model.config.position_offset:
        return names.ROBERTA
    if model.architecture in names.ONLY_FAMILY:
        return names.ONLY_FAMILY[model.architecture]
    return names.ELECTRA if electra.is_electra(model.config) else names.BERT


def published_config(model: ModelBundle) -> dict[str, Any]:
    """The content of config.json."""
    config, family = model.config, model_family(model)
    special = special_ids(model.tokenizer)
    content: dict[str, Any] = {
        "architectures": [names.hf_class_name(model.architecture, family)],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": ACTIVATIONS[config.hidden_act],
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
        "max_position_embeddings": config.max_position_embeddings + config.position_offset,
        "type_vocab_size": config.type_vocab_size,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": special.pad,
        "dtype": "float32",
    }
    if family == names.ROBERTA:
        content |= {
            "pad_token_id": config.position_offset - 1,
            "bos_token_id": special.cls,
            "eos_token_id": special.sep,
        }
    if family == names.ELECTRA:
        content |= electra.from_config(config)
    if model.labels:
        content["id2label"] = {str(index): label for index, label in enumerate(model.labels)}
        content["label2id"] = {label: index for index, label in enumerate(model.labels)}
    if model.problem_type is not None:
        content["problem_type"] = model.problem_type
    if model.null_score_diff_threshold is not None:
        content[hf.NULL_THRESHOLD] = model.null_score_diff_threshold
    if model.classifier_dropout is not None:
        content["classifier_dropout"] = model.classifier_dropout
    return content
