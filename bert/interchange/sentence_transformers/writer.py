"""Writes `bert.model.pooling.Pooling` as the modules and settings of a sentence-transformers folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bert.config import ModelConfig
from bert.interchange.sentence_transformers.names import NUM_LOG1P, PROMPTS, SPARSE_ENCODER, TEXT_SETTINGS
from bert.interchange.tensor_files import write_tensors
from bert.model.pooling import Pooling

WRITTEN = ("mean", "cls", "max", "mean_sqrt_len")
"""Modes whose keys are always written, even if they are off."""

KEY_OF_MODE = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
"""Keys of 1_Pooling/config.json that do not end in ``_tokens``."""

DEFAULT_PROMPT = "default"
"""Name under which a default prompt is written that is not the one of queries or documents."""


def pooling_config_files(pooling: Pooling, config: ModelConfig) -> dict[str, Any]:
    """Returns the sentence-transformers files for this pooling, as a dict of path and JSON content."""
    package, module_types = "sentence_transformers.models", ["Transformer", "Pooling", *["Dense"] * len(pooling.dense)]
    module_types += ["Normalize"] if pooling.normalize else []
    if pooling.is_lexical:
        package, module_types = "sentence_transformers.sparse_encoder.models", ["MLMTransformer", "SpladePooling"]
    paths = ["", *(f"{number}_{module_type}" for number, module_type in enumerate(module_types) if number)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{module_type}"}
        for i, (path, module_type) in enumerate(zip(paths, module_types, strict=True))
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        f"1_{module_types[1]}/config.json": _declared_pooling(pooling, pooling.pooled_size(config)),
    }
    for number, layer in enumerate(pooling.dense, 2):
        files[f"{number}_Dense/config.json"] = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": layer.activation,
        }
    if pooling.max_length is not None or pooling.lowercase:
        files[TEXT_SETTINGS[0]] = {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lowercase}
    return files | _declared_settings(pooling)


def _declared_pooling(pooling: Pooling, width: int) -> dict[str, Any]:
    """Returns config.json of the module that pools.

    The first versions of text-embeddings-inference require ``pooling_mode_mean_sqrt_len_tokens``.
    """
    if pooling.is_lexical:
        activation = next(name for name, count in NUM_LOG1P.items() if count == pooling.num_log1p)
        return {
            "pooling_strategy": pooling.mode,
            "activation_function": activation,
            "word_embedding_dimension": width,
        }
    modes = pooling.modes
    declared: dict[str, Any] = {"word_embedding_dimension": width // len(modes)}
    for mode in (*WRITTEN, *modes):
        declared[KEY_OF_MODE.get(mode, f"pooling_mode_{mode}_tokens")] = mode in modes
    if len(modes) > 1:  # the keys above cannot express the order
        declared["pooling_mode"] = [f"{mode}_tokens" if mode == "mean_sqrt_len" else mode for mode in modes]
    if not pooling.include_prompt:
        declared["include_prompt"] = False
    return declared


def _declared_settings(pooling: Pooling) -> dict[str, Any]:
    """Returns the file `PROMPTS` and its content; {} if all values are defaults."""
    prompts = {"query": pooling.query_prompt, "document": pooling.document_prompt}
    default = next((name for name, prompt in prompts.items() if prompt == pooling.default_prompt), DEFAULT_PROMPT)
    if pooling.default_prompt:
        prompts[default] = pooling.default_prompt
    has_settings = pooling.truncate_dim is not None or pooling.similarity != Pooling.similarity or pooling.is_lexical
    if not has_settings and not any(prompts.values()):
        return {}
    content: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default if pooling.default_prompt else None,
        "similarity_fn_name": pooling.similarity,
    }
    if pooling.is_lexical:
        content["model_type"] = SPARSE_ENCODER
    if pooling.truncate_dim is not None:
        content["truncate_dim"] = pooling.truncate_dim
    return {PROMPTS: content}


def write_pooling_files(pooling: Pooling, config: ModelConfig, folder: Path) -> None:
    """Writes the files of `pooling_config_files`, and the weights of dense modules."""
    for name, content in pooling_config_files(pooling, config).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for number, layer in enumerate(pooling.dense, 2):
        bias = {} if layer.bias is None else {"linear.bias": layer.bias}
        write_tensors(folder / f"{number}_Dense" / "model.safetensors", {"linear.weight": layer.kernel.T, **bias})
