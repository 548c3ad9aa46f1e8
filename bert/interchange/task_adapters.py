"""LoRA adapters of the tasks of one model, which its config.json declares, as in Jina embeddings v3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import Log, UserError, WarningText, shorten
from bert.interchange.families import Family
from bert.interchange.names import TASKS, Tensor
from bert.interchange.readers import peft
from bert.interchange.tensor_files import write_tensors
from bert.model.parameters import Params, arrays_by_path

PROMPTS = "task_instructions"
"""Key of config.json: the prompt of each of the tasks in `TASKS`."""

TASK_OF_PROMPT = {"query": "retrieval.query", "document": "retrieval.passage"}
"""Tasks whose adapters are used for queries and documents."""

SIMILARITY_TASK = "text-matching"
"""Task whose adapter is used for similarities."""

NAME = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)
"""A name of a task, which is also the name of a folder."""

PARAMETRIZED = re.compile(r"\.parametrizations\.weight\.(original|0\.lora_([AB]))$")
"""Ends of names in Jina's first files: the weights, and the factors of all tasks [tasks, ...]."""

FUSED = "mixer.Wqkv"
"""Module of these files with three projections."""


@dataclass(frozen=True)
class TaskAdapter:
    """The adapter of one task.

    Attributes:
        prompt: prefix of the task's texts.
        family: family whose names its tensors have.
    """

    adapter: peft.Adapter
    prompt: str
    family: Family

    def merge(self, params: Params, config: ModelConfig, put: Callable[[Any], Any] = np.asarray) -> Params:
        """Returns the parameters of an encoder with the adapter added.

        Args:
            put: converts an array before the adapter is added, for example to an array on the device.

        Raises:
            UserError: the adapter does not fit the parameters.
        """
        from flax import traverse_util  # imported here because it imports JAX

        arrays = arrays_by_path(params)
        table = self.family.names.tensors(config.num_distinct_layers, "Bert")
        tensor_of = {tensor.name: tensor for tensor in table if arrays.keys() >= set(tensor.paths)}
        shapes = {name: _stored_shape(tensor, arrays) for name, tensor in tensor_of.items()}
        for name, rows, left, right in self.adapter.products(shapes, self.family):
            tensor, start = tensor_of[name], 0
            down, up, first = (right.T, left.T, rows.start) if tensor.transposed else (left, right, 0)
            for path in tensor.paths:  # parts along the last axis
                stop = start + arrays[path].shape[-1]
                if first <= start and stop <= first + up.shape[1]:
                    arrays[path] = _add_product(put(arrays[path]), down, up[:, start - first : stop - first])
                start = stop
        return traverse_util.unflatten_dict(arrays, sep="/")


def _stored_shape(tensor: Tensor, arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of a tensor in the file."""
    width = sum(arrays[path].shape[-1] for path in tensor.paths)
    shape = (*arrays[tensor.paths[0]].shape[:-1], width)
    return shape[::-1] if tensor.transposed else shape


def _add_product(array: Any, down: np.ndarray, up: np.ndarray) -> Any:
    """Adds down [in, r] up [r, out] to an array [in, out] of NumPy or JAX."""
    down, up = down.astype(np.float32), up.astype(np.float32)
    if isinstance(array, np.ndarray):
        return array + down @ up
    import jax.numpy as jnp  # imported here because the engine onnxruntime does not need it

    return array + jnp.matmul(down, up, precision="highest")


def folder_name(task: str) -> str:
    """Returns the name of a task's folder, which has no dots and hyphens."""
    return re.sub(r"[.-]", "_", task)


def find_task(adapters: Mapping[str, TaskAdapter], task: Any, source: str) -> str:
    """Returns a task as declared. It may be written like its folder. Raises UserError if there is no such adapter."""
    if not adapters:
        raise UserError(f"task is {shorten(task)}, but {source} has no adapters of tasks: remove task")
    found = next((name for name in adapters if str(task) in (name, folder_name(name))), None)
    if found is None:
        raise UserError(f"task is {shorten(task)}: pass one of {', '.join(adapters)}, or leave it out")
    return found


def read_task_adapters(
    folder: Path,
    content: Mapping[str, Any],
    family: Family,
    stored: dict[str, np.ndarray],
    log: Log,
) -> tuple[dict[str, np.ndarray], dict[str, TaskAdapter]]:
    """Reads the adapters that config.json declares: from subfolders in PEFT's format, or from the model's tensors.

    Returns:
        The tensors of the model without adapters, and the adapters by task.

    Raises:
        UserError: a declaration is invalid, or an adapter is damaged or does not fit the model.
    """
    file = folder / "config.json"
    tasks, prompts = content.get(TASKS) or [], content.get(PROMPTS) or {}
    is_list = isinstance(tasks, list) and all(isinstance(name, str) and NAME.fullmatch(name) for name in tasks)
    if not is_list or len({folder_name(name) for name in tasks}) < len(tasks):
        raise UserError(f"{file}: {TASKS} is {shorten(tasks)}: set it to a list of different names, or remove it")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise UserError(f"{file}: {PROMPTS} is {shorten(prompts)}: set it to an object of tasks and texts")
    plain, factors = _split_parametrized(stored)
    adapters = _adapters_of_subfolders(folder, tasks)
    if factors:
        adapters = _adapters_of_tensors(folder, tasks, content, factors)
    shapes = {name: array.shape for name, array in plain.items()}
    for task, adapter in adapters.items():
        tensors = {name: array.astype(np.float32) for name, array in adapter.tensors.items()}
        adapters[task] = replace(adapter, tensors=tensors)
        for _ in adapters[task].products(shapes, family):
            pass  # raises UserError for the first product that does not fit
    if missing := [task for task in tasks if task not in adapters]:
        log(WarningText(f"{folder} lacks the adapters of {', '.join(missing)}, which {file.name} declares"))
    if adapters:
        log(f"read {folder}: the adapters of {', '.join(adapters)}")
    return plain, {task: TaskAdapter(adapter, prompts.get(task, ""), family) for task, adapter in adapters.items()}


def _adapters_of_subfolders(folder: Path, tasks: list[str]) -> dict[str, peft.Adapter]:
    places = {task: folder / folder_name(task) for task in tasks}
    return {
        task: peft.read_adapter(place, lambda text: None, folder)
        for task, place in places.items()
        if peft.is_adapter(place)
    }


def _split_parametrized(stored: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the model's tensors with plain names, and the factors of adapters by ``MODULE.A`` and ``MODULE.B``."""
    plain: dict[str, np.ndarray] = {}
    factors: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        match = PARAMETRIZED.search(name)
        module = name if match is None else name[: match.start()]
        if match is not None and match[2]:
            factors[f"{module}.{match[2]}"] = array
        else:
            plain[name if match is None else f"{module}.weight"] = array
    return plain, factors


def _adapters_of_tensors(
    folder: Path, tasks: list[str], content: Mapping[str, Any], factors: Mapping[str, np.ndarray]
) -> dict[str, peft.Adapter]:
    """Returns PEFT's form of the factors: of tables [tasks, rows, r] and [tasks, r, width], else A and B of PEFT."""
    wrong = next((name for name, array in factors.items() if array.ndim != 3 or len(array) != len(tasks)), None)
    if wrong is not None:
        raise UserError(
            f"{folder}: the adapters of {wrong[:-2]} are {list(factors[wrong].shape)}, but the number of {TASKS} in "
            f"config.json is {len(tasks)}: copy both again"
        )
    modules = list(dict.fromkeys(name[:-2] for name in factors))
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": content.get("lora_rank"),
        "lora_alpha": content.get("lora_alpha"),
        "lora_dropout": 0.0,
        "target_modules": sorted({target for module in modules for target in _targets(module)}),
    }
    peft.check_settings(settings, folder / "config.json")
    adapters = {}
    for number, task in enumerate(tasks):
        tensors: dict[str, np.ndarray] = {}
        for name, array in factors.items():
            module, side = name[:-2], name[-1]
            if "embeddings." in module:
                tensors[f"{module}.lora_embedding_{side}"] = np.ascontiguousarray(array[number].T)
            elif module.endswith(FUSED):
                parts = [array[number]] * 3 if side == "A" else np.array_split(array[number], 3)
                for letter, part in zip("qkv", parts, strict=True):
                    tensors[f"{module.replace(FUSED, f'self_attn.{letter}_proj')}.lora_{side}.weight"] = part
            else:
                tensors[f"{module}.lora_{side}.weight"] = array[number]
        adapters[task] = peft.Adapter(folder, folder, settings, tensors)
    return adapters


def _targets(module: str) -> tuple[str, ...]:
    """Returns the names of a module in transformers' class, for ``target_modules``."""
    if module.endswith(FUSED):
        return ("q_proj", "k_proj", "v_proj")
    return (module.rpartition(".")[2].replace("out_proj", "o_proj"),)


def declared_tasks(adapters: Mapping[str, TaskAdapter]) -> dict[str, Any]:
    """Returns the keys of config.json for adapters; {} for none."""
    prompts = {task: adapter.prompt for task, adapter in adapters.items()}
    return {TASKS: list(adapters), PROMPTS: prompts} if adapters else {}


def write_task_adapters(adapters: Mapping[str, TaskAdapter], folder: Path) -> None:
    """Writes each adapter to a subfolder in PEFT's format, which transformers loads as well."""
    for task, each in adapters.items():
        place = folder / folder_name(task)
        place.mkdir()
        (place / peft.CONFIG).write_text(json.dumps(each.adapter.settings, indent=2) + "\n", encoding="utf-8")
        write_tensors(place / peft.WEIGHTS, each.adapter.tensors)
