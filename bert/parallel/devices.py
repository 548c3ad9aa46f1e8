"""Devices by name, for plans, and what cuDNN's attention takes. Imports no JAX."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert.errors import UserError

TPU_MEMORY_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.0, "v6e": 31.25}
"""GiB of a TPU chip that a program can use: the published size less what the runtime keeps for itself; not measured."""


@dataclass(frozen=True)
class DeviceSpec:
    """Named devices, which need not be present: their kind, and how many (None if the name does not say)."""

    kind: str
    count: int | None


def parse_device_spec(text: str) -> DeviceSpec:
    """Devices from h100, h100:8 (so many of them) or v5e:2x4 (a slice, by its sides).

    Raises:
        UserError: the text has another form.
    """
    match = re.fullmatch(r"([a-z][\w.-]*)(?::([1-9]\d*(?:x[1-9]\d*){0,2}))?", text.lower())
    if match is None:
        raise UserError(
            f"command line: --device {text} is not KIND or KIND:COUNT: pass, for example, h100:8, or a slice such as "
            "v5e:2x4"
        )
    kind, sides = match.groups()
    return DeviceSpec(kind, math.prod(map(int, sides.split("x"))) if sides else None)


def local_devices() -> list[Any]:
    """The devices of this process: all that JAX has, or the first ``BERT_NUM_DEVICES``.

    Raises:
        UserError: the variable is no number of devices that this process has.
    """
    import jax

    devices = jax.local_devices()
    wanted = os.environ.get("BERT_NUM_DEVICES", "")
    if not wanted:
        return devices
    if not wanted.isdecimal() or not 1 <= int(wanted) <= len(devices):
        raise UserError(f"BERT_NUM_DEVICES is {wanted!r}: set it to a number from 1 to {len(devices)}, or remove it")
    return devices[: int(wanted)]


def max_cudnn_head_dim(devices: Iterable[Any]) -> int:
    """The largest head size that cuDNN's attention takes on all these devices, as JAX has it; 0 if one has none.

    JAX calls AMD's GPUs "gpu", too, and asks for compute capability 8.0 (Ampere), for heads over 128 for 9.0 (Hopper).
    """

    def largest(device: Any) -> int:
        if device.platform not in ("gpu", "cuda") or "cuda" not in device.client.platform_version:
            return 0
        capability = tuple(map(int, device.compute_capability.split(".")))
        return 256 if capability >= (9, 0) else 128 if capability >= (8, 0) else 0

    return min(map(largest, devices))
