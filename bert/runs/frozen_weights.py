"""The weights that a run with adapters does not train: one file in its folder, which checkpoints leave out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from bert.errors import UserError
from bert.files import atomic_write, write_safetensors
from bert.runs.folder import FROZEN_WEIGHTS

Params = dict[str, Any]


def params_checksum(params: Params) -> str:
    """SHA-256 of the names, shapes, types and values of parameters."""
    digest = hashlib.sha256()
    for name, array in sorted(traverse_util.flatten_dict(params, sep="/").items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def write_frozen_weights(run: Path, params: Params) -> None:
    """Writes the file into a run's folder. Raises OSError."""
    flat = traverse_util.flatten_dict(params, sep="/")
    with atomic_write(run / FROZEN_WEIGHTS) as temporary:
        write_safetensors(temporary, flat)
        temporary.chmod((run / "config.yaml").stat().st_mode)  # the library gives its file to the owner alone


def read_frozen_weights(run: Path, checksum: str | None) -> Params:
    """The parameters in the file.

    Args:
        run: the run's folder.
        checksum: of the parameters that the run began with.

    Raises:
        UserError: the file is missing or damaged, or holds others.
    """
    file = run / FROZEN_WEIGHTS
    try:
        params = traverse_util.unflatten_dict(load_file(file), sep="/")
    except FileNotFoundError:
        raise UserError(
            f"{file} is missing, which the run's adapters belong to: copy it from the original run"
        ) from None
    except (OSError, TypeError, AttributeError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy it from the original run") from None
    if params_checksum(params) != checksum:
        raise UserError(
            f"{file} does not hold the weights that the run's adapters belong to (lora.checksum in config.yaml): copy "
            "it from the original run"
        )
    return params
