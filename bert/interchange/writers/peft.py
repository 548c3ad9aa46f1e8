"""Writes the adapters of a run (LoRA) in PEFT's format, and verifies them by reading them back."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from bert.errors import Log, UserError
from bert.files import atomic_directory
from bert.interchange import ExportError
from bert.interchange.bundle import ModelBundle, task_settings
from bert.interchange.families import Family, family_of
from bert.interchange.names import Tensor
from bert.interchange.readers import peft as reader
from bert.interchange.sentence_transformers.writer import write_pooling_files
from bert.interchange.tensor_files import write_tensors
from bert.interchange.writers.hf import published_tensors, to_transformers_compatible
from bert.interchange.writers.hf_files import describe_labels, published_tokenizers, save_published_tokenizer
from bert.model.linear import LORA_A, LORA_B, FrozenWeights

PREFIX = "base_model.model."
"""Start of the names of tensors in PEFT's files."""

TASK_TYPES = {architecture: task for task, architecture in reader.TASKS.items()}

ADAPTED_KERNEL = r"bert/encoder/layer_(\d+)/attention/(query|key|value|output)/kernel"
"""Path of the weights that an adapter changes."""

TOLERANCE = 1e-6
"""Maximum difference between the run's weights and the base model's with the adapters that were read back."""


@dataclass(frozen=True)
class Adapters:
    """The weights of a run that trains adapters.

    Attributes:
        frozen: the weights that the run began with, and the scale of the adapters.
        trained: adapters, and the modules that are trained in full.
        rank, alpha: the settings of the run.
        base: folder or hub name of the base model.
    """

    frozen: FrozenWeights
    trained: dict[str, Any]
    rank: int
    alpha: float
    base: str


def export(model: ModelBundle, out: Path, log: Log, adapters: Adapters) -> None:
    """Writes ``out`` atomically: adapter_config.json, adapter_model.safetensors, tokenizer files and a README.

    Raises:
        UserError: ``out`` exists and is not an empty folder, or a trained part has no name in Hugging Face's models.
        ExportError: the weights that were read back differ from the run's.
    """
    family = family_of(model)
    if model.architecture not in family.classes:
        raise UserError(f"{model.source} is a {model.architecture}, which transformers' {family.title} does not have")
    settings, tensors = _settings_and_tensors(model, family, adapters)
    with atomic_directory(out) as draft:
        weights = draft / reader.WEIGHTS
        write_tensors(weights, tensors)
        _write_json(draft / reader.CONFIG, settings)
        _write_json(draft / reader.TASK_CONFIG, _task_config(model))
        if model.pooling is not None:
            write_pooling_files(model.pooling, model.config, draft)
        for tokenizer, place in published_tokenizers(model, draft):
            segments = model.config.type_vocab_size > 1
            save_published_tokenizer(tokenizer, place, model.row_length, segments)
        (draft / "README.md").write_text(_card(model, family, adapters, settings), encoding="utf-8")
        shutil.copymode(draft / "README.md", weights)
        log(_verify(model, family, adapters, settings, draft))
    log(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")


def _settings_and_tensors(
    model: ModelBundle, family: Family, adapters: Adapters
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the contents of adapter_config.json and of the file of weights."""
    trained = traverse_util.flatten_dict(adapters.trained, sep="/")
    arrays = traverse_util.flatten_dict(model.params, sep="/")
    layers = (model.config.num_distinct_layers, model.config.decoder.num_distinct_layers)
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    full: list[str] = []
    written: set[str] = set()
    transposed: set[bool] = set()
    stored = published_tensors(to_transformers_compatible(model)).keys()
    for tensor in family.names.tensors(layers[0], model.architecture, layers[1]):
        prefix = f"{family.prefix}." if model.architecture == "Bert" else ""
        name = tensor.name.removeprefix(prefix)
        lora = [f"{path.removesuffix('kernel')}{LORA_A}" in trained for path in tensor.paths]
        if any(lora) and name not in stored:
            raise UserError(
                f"{model.source}: {family.title}'s files have no separate {name.removesuffix('.weight')}, so PEFT "
                "cannot adapt it: export it as hf"
            )
        if any(lora):
            for module, part in _modules_of_class(tensor, family, trained):
                module, (down, up) = module.removeprefix(prefix), _factors(part, trained, arrays, adapters)
                tensors |= {f"{PREFIX}{module}.lora_A.weight": down, f"{PREFIX}{module}.lora_B.weight": up}
                ranks[re.sub(r"^.*?\.\d+\.", "", module)] = len(down)
            transposed.add(tensor.transposed)
            written |= {f"{path.removesuffix('kernel')}{side}" for path in tensor.paths for side in (LORA_A, LORA_B)}
        elif any(path in trained for path in tensor.paths):
            tensors[f"{PREFIX}{name}"] = np.ascontiguousarray(tensor.join(arrays))
            full.append(name.rpartition(".")[0])
            written |= set(tensor.paths)
    if nameless := sorted(set(trained) - written):
        raise UserError(
            f"{model.source}: {', '.join(nameless[:4])} have no name in Hugging Face's models: export it as hf"
        )
    rank = adapters.rank if adapters.rank in ranks.values() else max(ranks.values())
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(model.architecture),
        "base_model_name_or_path": adapters.base,
        "r": rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": {module: size for module, size in sorted(ranks.items()) if size != rank},
        "modules_to_save": sorted({_saved_module(module, family) for module in full}) or None,
        "fan_in_fan_out": transposed == {False},
        "inference_mode": True,
    }, tensors


def _modules_of_class(
    tensor: Tensor, family: Family, trained: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapted modules of transformers' class that a tensor of the file holds, and their part of it."""
    if family.attention_modules is None:
        yield tensor.name.removesuffix(".weight"), tensor
        return
    for path in tensor.paths:
        layer, projection = re.fullmatch(ADAPTED_KERNEL, path).groups()  # type: ignore[union-attr]  # all adapters are there
        if f"{path.removesuffix('kernel')}{LORA_A}" in trained:
            module = f"{family.attention_modules.format(layer)}.{projection[0]}_proj"
            yield module, tensor._replace(paths=(path,))


def _factors(
    tensor: Tensor, trained: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], adapters: Adapters
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [R, in] and B [out, R] of a module of the file, whose product PEFT scales by alpha / R.

    If the module of the file holds several projections, R is the sum of the ranks of the adapted ones.
    """
    downs, ups, row = [], [], 0
    widths = [np.shape(arrays[path])[-1] for path in tensor.paths]
    for path, width in zip(tensor.paths, widths, strict=True):
        stem = path.removesuffix("kernel")
        if f"{stem}{LORA_A}" in trained:
            up = np.zeros((sum(widths), np.shape(trained[f"{stem}{LORA_A}"])[1]), np.float32)
            up[row : row + width] = np.asarray(trained[f"{stem}{LORA_B}"]).T
            downs.append(np.asarray(trained[f"{stem}{LORA_A}"]).T)
            ups.append(up)
        row += width
    down, up = np.concatenate(downs), np.concatenate(ups, axis=1)
    factor = adapters.frozen.scale * len(down) / adapters.alpha  # 1 for a module with one adapter
    return np.ascontiguousarray(down, np.float32), np.ascontiguousarray(up * np.float32(factor))


def _saved_module(module: str, family: Family) -> str:
    """Returns the entry of ``modules_to_save`` for a module: a whole head, or one module of the encoder."""
    first = module.partition(".")[0]
    return module if first == family.prefix else first


def _task_config(model: ModelBundle) -> dict[str, Any]:
    """Returns the keys of config.json that describe the head, which adapter_config.json has no place for."""
    labels = {str(index): label for index, label in enumerate(model.labels)}
    return {**({"id2label": labels} if labels else {}), **task_settings(model)}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(model: ModelBundle, family: Family, adapters: Adapters, settings: Mapping[str, Any]) -> str:
    architecture = family.classes[model.architecture]
    heads = f", num_labels={len(model.labels)}" if model.labels else ""
    sections = [
        "---\nlibrary_name: peft\ntags:\n- lora\n- bert-jax\n---",
        f"# {model.title}",
        f"Adapters (LoRA) of rank {settings['r']} for {adapters.base}, and its head. Exported by bert-jax.",
        "```python\n"
        f"from peft import PeftModel\nfrom transformers import {architecture}\n\n"
        f"base = {architecture}.from_pretrained({adapters.base!r}{heads})\n"
        'model = PeftModel.from_pretrained(base, "PATH")\n'
        "```",
    ]
    if model.labels:
        sections += ["## Labels", describe_labels(model)]
    return "\n\n".join(sections) + "\n"


def _verify(model: ModelBundle, family: Family, adapters: Adapters, settings: Mapping[str, Any], folder: Path) -> str:
    """Adds the written adapters to the frozen weights, and compares the result with the run's weights.

    Raises:
        ExportError: they differ.
    """
    base = dataclasses.replace(model, params=adapters.frozen.params)
    stored, expected = (published_tensors(to_transformers_compatible(bundle)) for bundle in (base, model))
    tensors = reader.read_tensors(folder / reader.WEIGHTS)
    merged = reader.Adapter(folder, Path(adapters.base), dict(settings), tensors).merge(
        stored, family, model.architecture
    )
    if merged.keys() != expected.keys():
        wrong = ", ".join(sorted(merged.keys() ^ expected.keys())[:4])
        raise ExportError(f"{model.source}: {wrong} are not in both models: export it as hf")
    difference = max(float(np.abs(merged[name] - expected[name]).max(initial=0)) for name in expected)
    if not difference <= TOLERANCE:  # also catches NaN
        raise ExportError(f"{model.source}: the adapters give weights that differ by {difference:.2g}: export it as hf")
    return f"verified: {len(tensors)} tensors read back; with the base model, the weights are within {difference:.1g}"
