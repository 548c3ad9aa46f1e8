"""config.json as Hugging Face transformers writes it."""

from __future__ import annotations

from typing import Any

from bert.interchange.bundle import ModelBundle
from bert.interchange.dense import CROSS_ENCODER
from bert.interchange.families import family_of
from bert.interchange.readers import hf
from bert.tokenizer.special_tokens import special_ids

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", **{name: name for name in ("relu", "silu", "tanh")}}
"""transformers' names; it has no elu, which keeps its own in the config.json of a graph."""


def published_config(model: ModelBundle) -> dict[str, Any]:
    """The content of config.json."""
    config, special = model.config, special_ids(model.tokenizer)
    family = family_of(model)
    content: dict[str, Any] = {
        "architectures": [family.class_of(model.architecture)],
        "model_type": family.model_type,
        **{key: getattr(config, name) for name, key in family.keys.items()},
        family.keys["hidden_act"]: ACTIVATIONS.get(config.hidden_act, config.hidden_act),
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": special.find("pad"),
        "dtype": "float32",
        **family.write_config(config, special),
    }
    content = family.nest(content, config, special_ids(model.target_tokenizer or model.tokenizer))
    if model.labels:
        content["id2label"] = {str(index): label for index, label in enumerate(model.labels)}
        content["label2id"] = {label: index for index, label in enumerate(model.labels)}
    if model.problem_type is not None:
        content["problem_type"] = model.problem_type
    if model.null_score_diff_threshold is not None:
        content[hf.NULL_THRESHOLD] = model.null_score_diff_threshold
    if model.label_thresholds:
        content[hf.LABEL_THRESHOLDS] = list(model.label_thresholds)
    if model.score_activation is not None:
        content[CROSS_ENCODER] = {"activation_fn": model.score_activation}
    if model.texts_per_input is not None:
        content[hf.TEXTS_PER_INPUT] = model.texts_per_input
    reads_pairs = model.architecture in hf.PAIR_CLASSIFIERS and model.texts_per_input != 1
    if model.pair_truncation == "google" and model.step is not None and reads_pairs:
        content[hf.PAIR_TRUNCATION] = model.pair_truncation
    if model.clitics is not None:
        content[hf.CLITICS] = list(model.clitics)
    if model.classifier_dropout is not None:
        content["classifier_dropout"] = model.classifier_dropout
    return content
