"""Writes `bert.model.pooling.Pooling` as the modules and settings of a sentence-transformers folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.interchange.bundle import ModelBundle
from bert.interchange.names import TOKEN_EMBEDDINGS
from bert.interchange.sentence_transformers.late_interaction import length_settings, mask_settings
from bert.interchange.sentence_transformers.names import (
    MULTI_VECTOR_ENCODER,
    MULTI_VECTOR_MASK,
    NUM_LOG1P,
    PROMPTS,
    SPARSE_ENCODER,
    STATIC_EMBEDDING,
    TEXT_SETTINGS,
    TOKEN_TABLE,
)
from bert.interchange.sentence_transformers.static import VECTORS, WEIGHTS
from bert.interchange.tensor_files import write_tensors
from bert.interchange.writers.hf_files import save_published_tokenizer
from bert.model.pooling import TOKEN_WEIGHTS, Pooling
from bert.tokenizer.hf_settings import truncation_side

WRITTEN = ("mean", "cls", "max", "mean_sqrt_len")
"""Modes whose keys are always written, even if they are off."""

KEY_OF_MODE = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
"""Keys of 1_Pooling/config.json that do not end in ``_tokens``."""

PACKAGE = "sentence_transformers.models"
PACKAGES = {
    **dict.fromkeys(("MLMTransformer", "SpladePooling", TOKEN_TABLE), "sentence_transformers.sparse_encoder.models"),
    MULTI_VECTOR_MASK: "sentence_transformers.multi_vector_encoder.modules",
}
"""Packages of modules outside of `PACKAGE`."""

DEFAULT_PROMPT = "default"
"""Name under which a default prompt is written that is not the one of queries or documents."""


def pooling_config_files(pooling: Pooling, config: ModelConfig) -> dict[str, Any]:
    """Returns the sentence-transformers files for this pooling, as a dict of path and JSON content."""
    modules = _modules(pooling, config)
    files: dict[str, Any] = {}
    files["modules.json"] = [
        {"idx": i, "name": str(i), "path": path, "type": f"{PACKAGES.get(name, PACKAGE)}.{name}"}
        for i, (path, name, _) in enumerate(modules)
    ]
    files |= {f"{path}/config.json": content for path, _, content in modules if content}
    texts: dict[str, Any] = {}
    if not config.is_static and (pooling.max_length is not None or pooling.lowercase):
        texts = {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lowercase}
    if pooling.has_token_vectors:
        texts |= length_settings(pooling.interaction)
    if texts:
        files[TEXT_SETTINGS[0]] = texts
    return files | _declared_settings(pooling)


def _modules(pooling: Pooling, config: ModelConfig) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns the path, the class and config.json ({} for none) of each module."""
    feature = {"module_input_name": TOKEN_EMBEDDINGS} if pooling.has_token_vectors else {}
    has_pooling = not pooling.has_token_vectors and not config.is_static
    pools = _declared_pooling(pooling, pooling.pooled_size(config)) if has_pooling else {}
    dense = [
        (
            "Dense",
            {
                "in_features": layer.in_features,
                "out_features": layer.out_features,
                "bias": layer.bias is not None,
                "activation_function": layer.activation,
                **feature,
            },
        )
        for layer in pooling.dense
    ]
    scaling = [("Normalize", feature)] if pooling.normalize else []
    modules: list[tuple[str, dict[str, Any]]]
    if config.is_static:
        modules = [(TOKEN_TABLE if pooling.mode == TOKEN_WEIGHTS else STATIC_EMBEDDING, {}), *dense, *scaling]
    elif pooling.is_lexical:
        modules = [("MLMTransformer", {}), ("SpladePooling", pools)]
    elif pooling.has_token_vectors:
        modules = [("Transformer", {}), *dense, (MULTI_VECTOR_MASK, mask_settings(pooling.interaction)), *scaling]
    else:
        modules = [("Transformer", {}), ("Pooling", pools), *dense, *scaling]
    return [(f"{number}_{name}" if number else "", name, content) for number, (name, content) in enumerate(modules)]


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
    has_type = pooling.has_word_weights or pooling.has_token_vectors
    has_settings = pooling.truncate_dim is not None or pooling.similarity != Pooling.similarity or has_type
    if not has_settings and not any(prompts.values()):
        return {}
    content: dict[str, Any] = {
        "prompts": prompts,
        "default_prompt_name": default if pooling.default_prompt else None,
        "similarity_fn_name": pooling.similarity,
    }
    if has_type:
        content["model_type"] = SPARSE_ENCODER if pooling.has_word_weights else MULTI_VECTOR_ENCODER
    if pooling.truncate_dim is not None:
        content["truncate_dim"] = pooling.truncate_dim
    return {PROMPTS: content}


def write_static(model: ModelBundle, folder: Path) -> None:
    """Writes a model without layers as a table with its tokenizer, modules and a model card."""
    pooling, config = model.pooling_or_default, model.config
    table = model.params["bert"]["embeddings"]["word"]["embedding"]
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    if pooling.mode == TOKEN_WEIGHTS:
        kind, tensors = "SparseEncoder", {WEIGHTS: table[:, 0]}
        (folder / "config.json").write_text('{"frozen": false}\n', encoding="utf-8")
    else:
        kind, tensors = "SentenceTransformer", {VECTORS: table}
        if pooling.max_length is not None:
            tokenizer.enable_truncation(pooling.max_length, direction=truncation_side(tokenizer))
    write_tensors(folder / "model.safetensors", tensors)
    write_pooling_files(pooling, config, folder)
    save_published_tokenizer(tokenizer, folder, model.longest_text)
    sections = [
        "---\nlibrary_name: sentence-transformers\ntags: [static-embeddings, bert-jax]\n---",
        f"# {model.title}",
        f"Embeddings of width {model.embedding_size}, from a table of {config.vocab_size:,} tokens. Exported by "
        "bert-jax.",
        f'```python\nfrom sentence_transformers import {kind}\n\nmodel = {kind}("PATH")\n```',
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def write_pooling_files(pooling: Pooling, config: ModelConfig, folder: Path) -> None:
    """Writes the files of `pooling_config_files`, and the weights of dense modules."""
    for name, content in pooling_config_files(pooling, config).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    folders = [path for path, name, _ in _modules(pooling, config) if name == "Dense"]
    for path, layer in zip(folders, pooling.dense, strict=True):
        bias = {} if layer.bias is None else {"linear.bias": layer.bias}
        write_tensors(folder / path / "model.safetensors", {"linear.weight": layer.kernel.T, **bias})
