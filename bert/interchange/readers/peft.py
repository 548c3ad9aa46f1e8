"""Reads LoRA adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, and their base models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert.errors import Log, UserError
from bert.files import read_json_object
from bert.interchange.families import Family
from bert.interchange.names import ARCHITECTURES_WITH_LABELS
from bert.interchange.sentence_transformers.reader import encoder_folder
from bert.interchange.tensor_files import read_safetensors
from bert.model import names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

TASK_CONFIG = "task_config.json"
"""Keys of config.json that describe the head, such as id2label, next to adapters that this package wrote."""

TASKS = {
    "SEQ_CLS": "BertForSequenceClassification",
    "TOKEN_CLS": "BertForTokenClassification",
    "QUESTION_ANS": "BertForQuestionAnswering",
    "FEATURE_EXTRACTION": "Bert",
    "CAUSAL_LM": "BertForCausalLM",
}
"""Maps PEFT's task types to architectures. For other tasks, the base model's architecture is used."""

NOT_READ = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "alpha_pattern", "layer_replication", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "megatron_config"),
)
"""Settings that change the weights and are not supported, unless they are off or empty."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that also change the base model's weights."""

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")

SECOND_FACTOR = {"A.weight": "B.weight", "embedding_A": "embedding_B"}
"""Ends of the names of the factors of an adapted dense layer, and of an adapted embedding table."""

BLOCK_ROWS = 4096
"""Number of rows that are computed in float64 at a time."""

LAYER = re.compile(r"\.\d+\.")
"""Number of a layer in the name of a tensor."""


class Product(NamedTuple):
    """Two factors of an adapter, whose product is added to rows of a tensor.

    Attributes:
        name: name of the base model's tensor, [rows, columns].
        rows: rows to which the product is added.
        left: [rows, r].
        right: [r, columns].
    """

    name: str
    rows: slice
    left: np.ndarray
    right: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        settings: content of adapter_config.json.
        tensors: tensors of the adapter, by module name.
    """

    folder: Path
    base: Path
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def config(self, content: dict[str, Any], family: Family) -> dict[str, Any]:
        """Returns the base model's config.json with the class and the number of labels of the adapter's task."""
        architecture = TASKS.get(str(self.settings.get("task_type")))
        if architecture is None or architecture not in family.classes:
            return content
        file = self.folder / TASK_CONFIG
        content = {**content, "architectures": [family.classes[architecture]]}
        content |= read_json_object(file) if file.is_file() else {}
        head = [tensor.name for tensor in family.names.tensors(0, architecture) if tensor.part == names.CLASSIFIER]
        saved = {family.current_name(name): array for name, array in self.tensors.items()}
        outputs = next((len(saved[name]) for name in head if name in saved and saved[name].ndim), None)
        known = content.get("id2label")
        if architecture in ARCHITECTURES_WITH_LABELS and outputs and not (known and len(known) == outputs):
            content["id2label"] = {str(label): f"LABEL_{label}" for label in range(outputs)}
        return content

    def merge(self, stored: dict[str, np.ndarray], family: Family, architecture: str) -> dict[str, np.ndarray]:
        """Returns the base model's tensors with the adapter merged in and the adapter's full modules replaced.

        Replaced word embeddings are a copy in PEFT, so that a decoder that was tied to them keeps the base model's.

        Raises:
            UserError: the base model lacks an adapted module, or its shape differs.
        """
        name_of, merged = {family.current_name(name): name for name in stored}, dict(stored)
        replaced = {family.current_name(name): array for name, array in self.tensors.items() if ".lora_" not in name}
        for name, array in replaced.items():
            merged[name_of.get(name, name)] = array
        paths = {path: tensor.name for tensor in family.names.tensors(0, architecture) for path in tensor.paths}
        word, decoder = paths.get(names.word_embeddings(architecture), ""), paths.get("predictions/decoder", "")
        if decoder and word in replaced and word in name_of and decoder not in {*name_of, *replaced}:
            merged[decoder] = stored[name_of[word]]
        shapes = {name: array.shape for name, array in stored.items()}
        for name, rows, left, right in self.products(shapes, family):
            if merged[name] is stored[name]:
                merged[name] = stored[name].astype(np.float32)  # a copy
            total = merged[name][rows]
            for start in range(0, len(total), BLOCK_ROWS):
                block = slice(start, start + BLOCK_ROWS)
                total[block] = stored[name][rows][block].astype(np.float64) + left[block] @ right
        return merged

    def products(self, shapes: Mapping[str, tuple[int, ...]], family: Family) -> Iterator[Product]:
        """Yields what is added to the base model's tensors, given their shapes. Raises UserError like `merge`."""
        name_of = {family.current_name(name): name for name in shapes}
        inputs_first = _tensors_with_inputs_first(family)
        for name, array in self.tensors.items():
            module, _, kind = name.rpartition(".lora_")
            if not module or kind not in SECOND_FACTOR:
                continue
            module_in_file, part, num_parts = family.locate(module)
            current = family.current_name(f"{module_in_file}.weight")
            left, right = self._factors(module, array, kind)
            # A table is [in, out], as are the weights of a Conv1D.
            if kind == "embedding_A" or LAYER.sub(".0.", current) in inputs_first:
                left, right = right.T, left.T
            stored_name = name_of.get(current, "")
            if shapes.get(stored_name) != (len(left) * num_parts, right.shape[1]):
                raise UserError(
                    f"{self.folder / WEIGHTS}: {module} is {[len(left), right.shape[1]]}, which the base model "
                    f"{self.base} lacks or has in another shape: set base_model_name_or_path to the model that was "
                    "adapted"
                )
            yield Product(stored_name, slice(part * len(left), (part + 1) * len(left)), left, right)

    def _factors(self, module: str, a: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns B [out, r], scaled, and A [r, in], in float64.

        Args:
            a: A, of a dense layer or of a table with in rows.
        """
        b = self.tensors.get(f"{module}.lora_{SECOND_FACTOR[kind]}")  # [out, r]
        if b is None or a.ndim != 2 or b.ndim != 2 or b.shape[1] != a.shape[0]:
            raise UserError(
                f"{self.folder / WEIGHTS}: the shapes of lora_A and lora_B of {module} do not match: copy it again"
            )
        rank = math.sqrt(len(a)) if self.settings.get("use_rslora") else len(a)
        return self.settings["lora_alpha"] / rank * b.astype(np.float64), a.astype(np.float64)


def _tensors_with_inputs_first(family: Family) -> set[str]:
    """Returns the names of layer 0's dense weights that files have as [in, out], such as GPT-2's Conv1D.

    PEFT writes one ``fan_in_fan_out`` for all modules of an adapter, and ignores it when it reads one.
    """
    tensors = [tensor for architecture in family.classes for tensor in family.names.tensors(1, architecture)]
    return {tensor.name for tensor in tensors if tensor.paths[0].endswith("/kernel") and not tensor.transposed}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and not a full model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def tokenizer_folder(folder: Path, base: Path | None = None) -> Path:
    """Returns the folder of a model's tokenizer, which may be the base model's for an adapter. Raises UserError."""
    if not is_adapter(folder) or any((folder / name).is_file() for name in TOKENIZER_FILES):
        return folder
    return base or _base(folder, _settings(folder / CONFIG))


def read_adapter(folder: Path, log: Log, base: Path | None = None) -> Adapter:
    """Reads an adapter and locates its base model.

    Args:
        base: folder of the base model; None for the one that adapter_config.json names.

    Raises:
        UserError: the adapter is not supported, a file is missing or damaged, or the base model is not available.
    """
    file = folder / CONFIG
    settings = _settings(file)
    base = base or _base(folder, settings)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UserError(f"{weights} does not exist: copy it next to {CONFIG}")
    tensors = read_tensors(weights)
    log(f"read {weights}: an adapter of {base}, added to its weights ({len(tensors)} tensors)")
    return Adapter(folder, base, settings, tensors)


def read_tensors(weights: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of an adapter by the name of their module in the base model. Raises UserError."""
    tensors: dict[str, np.ndarray] = {}
    for name, array in read_safetensors(weights).items():
        if ".original_module." in name:  # base weights, saved with bias "all" and replaced by modules_to_save
            continue
        plain = re.sub(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save(\.default)?(?=\.)", "", name)
        if ".lora_" in plain and plain.rpartition(".lora_")[2] not in {*SECOND_FACTOR, *SECOND_FACTOR.values()}:
            raise UserError(
                f"{weights} holds {name}, which is not supported: merge the adapter with PEFT's merge_and_unload"
            )
        tensors[plain] = array
    return tensors


def _settings(file: Path) -> dict[str, Any]:
    settings = read_json_object(file)
    check_settings(settings, file)
    return settings


def check_settings(settings: Mapping[str, Any], file: Path) -> None:
    """Raises UserError if the content of adapter_config.json, or of another file with its keys, is not supported."""
    fix = "merge the adapter with PEFT's merge_and_unload"
    if settings.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type is {str(settings.get('peft_type'))[:40]!r}, and only LORA is supported: {fix}"
        )
    if used := next((key for key in NOT_READ if settings.get(key)), None):
        raise UserError(f"{file}: {used} is {str(settings[used])[:60]}, which is not supported: {fix}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise UserError(f"{file}: init_lora_weights is {start!r}, which changes the base model: {fix}")
    alpha = settings.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise UserError(f"{file}: lora_alpha is {str(alpha)[:40]!r}: set it to the value used in training")


def _base(folder: Path, settings: dict[str, Any]) -> Path:
    """Returns the folder of the base model: the configured path, or a folder next to the adapter."""
    name = settings.get("base_model_name_or_path")
    if isinstance(name, str) and name:
        for place in (Path(name), folder / name):
            try:
                if (place / "config.json").is_file() or (place / "modules.json").is_file():
                    return encoder_folder(place)
            except (OSError, ValueError):  # the path is too long or contains a null character
                break
    raise UserError(
        f"{folder / CONFIG}: base_model_name_or_path is {str(name)[:80]!r}, which is not a local folder of a model: "
        "download the base model, and set base_model_name_or_path to its folder"
    )
