"""Parameters of a model as nested dicts of arrays. Does not import JAX."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Params = dict[str, Any]
"""Nested dicts of arrays."""


def arrays_by_path(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the arrays by path (``bert/encoder/layer_0/...``)."""
    arrays: dict[str, Any] = {}
    for name, value in params.items():
        inside = isinstance(value, Mapping)
        arrays |= arrays_by_path(value, f"{prefix}{name}/") if inside else {f"{prefix}{name}": value}
    return arrays


def num_parameters(params: Mapping[str, Any]) -> int:
    """Returns the total size of the arrays."""
    return sum(array.size for array in arrays_by_path(params).values())


def params_checksum(params: Mapping[str, Any]) -> str:
    """Computes SHA-256 over the names, shapes, types and values of parameters."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays_by_path(params).items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()
