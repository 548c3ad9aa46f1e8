"""Reads and writes tensor files: safetensors, sharded or not, and PyTorch pickles with a loader that runs no code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from bert.errors import UserError
from bert.files import read_json, require_content, write_safetensors

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types of parameters that are converted to float32."""

SAFE_PYTORCH = (2, 6)
"""First PyTorch version whose ``weights_only`` loader runs no code."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that `read_tensors` reads; [] if there are none or if their index is damaged."""
    for name in (SAFETENSORS, PICKLE):
        file, index = folder / name, folder / f"{name}{INDEX}"
        if file.is_file():
            return [file]
        if index.is_file():
            try:
                return [index, *(folder / shard for shard in sorted(set(_weight_map(index).values())))]
            except UserError:
                return []
    return []


def read_tensors(folder: Path) -> tuple[dict[str, np.ndarray], Path]:
    """Reads all tensors of a model folder as stored. Returns them and the file that lists them.

    Raises:
        UserError: there are no weights, files are damaged or of another format, or the index does not match them.
    """
    for name, read in ((SAFETENSORS, read_safetensors), (PICKLE, _read_pickle)):
        file, index = folder / name, folder / f"{name}{INDEX}"
        if file.is_file():
            return read(file), file
        if index.is_file():
            return _read_shards(index, read), index
    raise UserError(f"{folder} holds no weights: put model.safetensors there")


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file as transformers expects it."""
    write_safetensors(file, tensors, {"format": "pt"})


def read_safetensors(file: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file. Raises UserError."""
    require_content(file)
    try:
        with safetensors.safe_open(file, "numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, TypeError, AttributeError, ValueError) as error:
        with file.open("rb") as raw:
            start = raw.read(4)
        if start.startswith((b"\x80", b"PK\x03\x04")):
            reason = "it is a pickle, which can run code when read"
        else:
            reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{file} is not a whole safetensors file ({reason}): copy it again or convert it") from None


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the name of each tensor's file. Raises UserError."""
    content = read_json(index)
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
        raise UserError(f"{index} has no weight_map from tensors to files: copy it again")
    return file_of


def _read_shards(index: Path, read: Any) -> dict[str, np.ndarray]:
    file_of = _weight_map(index)
    arrays: dict[str, np.ndarray] = {}
    for name in sorted(set(file_of.values())):
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise UserError(f"{index} lists {name!r}, which may be outside of the folder: use a file next to it")
        shard = index.parent / name
        if not shard.is_file():
            raise UserError(f"{index} lists {name}, which does not exist: copy it as well")
        tensors = read(shard)
        if twice := sorted(set(tensors) & set(arrays)):
            raise UserError(f"{shard} holds {twice[0]}, which is also in another file: copy the folder again")
        if missing := sorted(
            tensor for tensor, file_name in file_of.items() if file_name == name and tensor not in tensors
        ):
            raise UserError(f"{shard} lacks {missing[0]}, which {index.name} lists: copy the folder again")
        arrays |= tensors
    return arrays


def _read_pickle(file: Path) -> dict[str, np.ndarray]:
    require_content(file)
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{file} is a pickle, which can run code when read: install PyTorch to read it safely "
            "(pip install 'bert-jax[torch]'), or save the model as model.safetensors "
            "(transformers: from_pretrained, then save_pretrained)"
        ) from None
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < SAFE_PYTORCH:
        raise UserError(
            f"{file} is a pickle, and reading one with PyTorch {torch.__version__} can run code (CVE-2025-32434): use "
            "PyTorch 2.6 or later"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the loader raises UnpicklingError, RuntimeError, EOFError and others
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{file} contains more than tensors ({reason[0][:120]}): use another model") from None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{file} is not a dictionary of named tensors: use another model")
    arrays = {}
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or str(tensor.dtype).startswith("torch.float8"):
            raise UserError(
                f"{file}: {name} is {tensor.dtype}, {tensor.layout}, which is not supported: convert it to float32"
            )
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        arrays[name] = (tensor.float() if half else tensor).detach().numpy()
    return arrays
