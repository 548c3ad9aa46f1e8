"""Devices by name, and the memory that a program gets of each: for plans where none is at hand. Imports no JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert.errors import UserError

GIB = 2**30

TPUS = {"v4": 30.75, "v5e": 15.75, "v5p": 95.0, "v6e": 31.25}
"""GiB of a chip, roughly: the published size, less what the runtime keeps for itself. None was measured here."""

GPUS = {
    "t4": 14.5,
    "l4": 22.0,
    "a10g": 22.0,
    "l40s": 44.5,
    "rtx3090": 23.5,
    "rtx4090": 23.5,
    "rtx5090": 31.5,
    "v100": 15.5,
    "v100-32gb": 31.5,
    "a100-40gb": 39.5,
    "a100": 79.0,
    "h100": 79.0,
    "h200": 139.0,
    "b200": 178.0,
}
"""GiB of a card, roughly: the published size, less half a GiB to a few for the driver. None was measured here."""

PRE_AMPERE = ("t4", "v100", "v100-32gb")
SINCE_HOPPER = ("h100", "h200", "b200", "rtx5090")

GPU_SHARE = 0.75
"""Of a GPU's memory, what JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


@dataclass(frozen=True)
class DeviceSpec:
    """Devices that are named, and need not be there.

    Attributes:
        kind: a key of `TPUS` or `GPUS`.
        count: how many; None where it is not said.
        memory: bytes of each that a program gets.
    """

    kind: str
    count: int | None
    memory: int

    @property
    def name(self) -> str:
        """As people call it."""
        return f"TPU {self.kind}" if self.kind in TPUS else self.kind.upper()

    @property
    def cudnn_head(self) -> int:
        """As `bert.parallel.devices.max_cudnn_head_dim` would say of them."""
        if self.kind in TPUS or self.kind in PRE_AMPERE:
            return 0
        return 256 if self.kind in SINCE_HOPPER else 128


def parse_device_spec(text: str) -> DeviceSpec:
    """Devices from h100, h100:8 (so many of them) or v5e:2x4 (a slice, by its sides).

    Raises:
        UserError: there is no such kind, or what follows it is no number of devices.
    """
    kind, colon, sides = text.lower().partition(":")
    if kind not in TPUS | GPUS:
        raise UserError(
            f"command line: --device {text} is no kind that is known: choose one of {', '.join(TPUS | GPUS)}, "
            "or a slice or number of them such as v5e:2x4 or h100:8"
        )
    if colon and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", sides):
        raise UserError(f"command line: --device {text}: write {kind}:8 for eight of them, or a slice such as v5e:2x4")
    count = math.prod(map(int, sides.split("x"))) if colon else None
    memory = TPUS[kind] if kind in TPUS else GPUS[kind] * GPU_SHARE
    return DeviceSpec(kind, count, int(memory * GIB))


def max_cudnn_head_dim(devices: Iterable[Any]) -> int:
    """The largest head size that cuDNN's attention takes on all these devices, as JAX has it; 0 where one has none.

    JAX calls AMD's GPUs "gpu", too, and asks for compute capability 8.0 (Ampere), for heads over 128 for 9.0 (Hopper).
    """

    def largest(device: Any) -> int:
        if device.platform not in ("gpu", "cuda") or "cuda" not in device.client.platform_version:
            return 0
        capability = tuple(map(int, device.compute_capability.split(".")))
        return 256 if capability >= (9, 0) else 128 if capability >= (8, 0) else 0

    return min(map(largest, devices))
