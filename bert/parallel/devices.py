"""Local devices, published figures of named devices, and limits of cuDNN's attention. Does not import JAX."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert.errors import UserError


@dataclass(frozen=True)
class DeviceFigures:
    """Published figures of a device kind, for estimates. None of them is measured.

    Attributes:
        peak_tflops: dense bfloat16 TFLOP/s.
        link: GB/s that a device sends over all links of its slice or host, in one direction.
        linked: maximum number of devices connected by such links.
        per_host: devices per host.
        network: GB/s of the host's network per device, in one direction; None if links connect hosts.
        memory_gib: GiB available to programs, which is the published size minus the runtime's share; None if there are
            several sizes.
    """

    peak_tflops: float
    link: float
    linked: int
    per_host: int
    network: float | None = None
    memory_gib: float | None = None


FIGURES = {
    "v4": DeviceFigures(275, 300, 4096, 4, memory_gib=30.75),
    "v5e": DeviceFigures(197, 200, 256, 4, memory_gib=15.75),
    "v5p": DeviceFigures(459, 600, 6144, 4, memory_gib=95.0),
    "v6e": DeviceFigures(918, 400, 256, 4, memory_gib=31.25),
    "a100": DeviceFigures(312, 300, 8, 8, network=25),
    "h100": DeviceFigures(989, 450, 8, 8, network=50),
    "h200": DeviceFigures(989, 450, 8, 8, network=50),
}
"""Published figures by device kind.

Sources for TPUs: cloud.google.com/tpu/docs, which gives the sum of both directions of a chip's links. Sources for GPUs:
NVIDIA's data sheets of the SXM modules (NVLink, 600 and 900 GB/s in both directions together) and of DGX A100, H100 and
H200 (a network adapter of 200 or 400 Gb/s per GPU).
"""


@dataclass(frozen=True)
class DeviceSpec:
    """Devices specified by name. They need not be present.

    Attributes:
        kind: a key of `FIGURES`, or any other name.
        count: number of devices; None if not specified.
        is_slice: whether they are a TPU slice, specified by its dimensions.
    """

    kind: str
    count: int | None
    is_slice: bool = False

    @property
    def figures(self) -> DeviceFigures | None:
        return FIGURES.get(self.kind)


def parse_device_spec(text: str) -> DeviceSpec:
    """Parses h100, h100:8 (8 devices) or v5e:2x4 (a slice with these dimensions).

    Raises:
        UserError: the text has another form, or the slice is too large.
    """
    match = re.fullmatch(r"([a-z][\w.-]*)(?::([1-9]\d*(?:x[1-9]\d*){0,2}))?", text.lower())
    if match is None:
        raise UserError(
            f"command line: --device {text} is not KIND or KIND:COUNT: pass, for example, h100:8, or a slice such as "
            "v5e:2x4"
        )
    kind, sides = match.groups()
    if sides is None:
        return DeviceSpec(kind, None)
    count, figures = math.prod(map(int, sides.split("x"))), FIGURES.get(kind)
    if figures and figures.network is None and count > figures.linked:
        raise UserError(
            f"command line: --device {text} is larger than any slice of {kind}: use at most {figures.linked:,}"
        )
    return DeviceSpec(kind, count, figures is not None and figures.network is None and "x" in sides)


def local_devices() -> list[Any]:
    """Returns the devices of this process: all JAX devices, or the first ``BERT_NUM_DEVICES``.

    Raises:
        UserError: JAX finds no device, or the variable is not a number from 1 to the number of devices.
    """
    import jax

    require_no_fork()
    try:
        devices = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no backend"])[0].rstrip(".")
        platforms = os.environ.get("JAX_PLATFORMS")
        fix = f"unset JAX_PLATFORMS, which is {platforms!r}, or install" if platforms else "install"
        raise UserError(f"JAX finds no device ({reason}): {fix} JAX for the accelerator (docs/install.md)") from None
    requested = os.environ.get("BERT_NUM_DEVICES", "")
    if not requested:
        return devices
    if not requested.isdecimal() or not 1 <= int(requested) <= len(devices):
        raise UserError(f"BERT_NUM_DEVICES is {requested!r}: set it to a number from 1 to {len(devices)}, or remove it")
    return devices[: int(requested)]


def max_cudnn_head_dim(devices: Iterable[Any]) -> int:
    """Returns the largest head size that JAX's cuDNN attention supports on all devices; 0 if it is not supported.

    JAX requires compute capability 8.0 (Ampere), or 9.0 (Hopper) for heads over 128. Its platform "gpu" includes AMD.
    """

    def largest(device: Any) -> int:
        if device.platform not in ("gpu", "cuda") or "cuda" not in device.client.platform_version:
            return 0
        capability = tuple(map(int, device.compute_capability.split(".")))
        return 256 if capability >= (9, 0) else 128 if capability >= (8, 0) else 0

    return min(map(largest, devices))


def are_tpus(devices: Iterable[Any]) -> bool:
    """Whether all devices are TPUs."""
    return all(device.platform == "tpu" for device in devices)


_forked_after_start = False


def require_no_fork() -> None:
    """Raises UserError in a process forked after JAX started its threads, where all computations would hang."""
    if _forked_after_start:
        raise UserError(
            "this process was forked after JAX had started, but JAX hangs in forked processes: start it with "
            'multiprocessing.get_context("spawn"), or load the model only in the child'
        )


def _note_fork() -> None:
    global _forked_after_start
    # JAX has no public function for this that does not initialize the backends.
    started = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)
    _forked_after_start = _forked_after_start or bool(started)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


KINDS_OF_DEVICES = (
    (r"TPU v4", "v4"),
    (r"TPU v5 ?lite|TPU v5e", "v5e"),
    (r"TPU v5p?", "v5p"),
    (r"TPU v6 ?lite|TPU v6e", "v6e"),
    (r"NVIDIA A100-.*", "a100"),
    (r"NVIDIA H100 80GB HBM3", "h100"),
    (r"NVIDIA H200", "h200"),
)
"""Names of devices, as JAX reports them, and their keys of `FIGURES`. Other forms of these chips are slower."""


def figures_of_device(device_kind: str) -> DeviceFigures | None:
    """Returns the published figures of a device by the name that JAX reports, or None if unknown."""
    kind = next((kind for pattern, kind in KINDS_OF_DEVICES if re.fullmatch(pattern, device_kind)), None)
    return None if kind is None else FIGURES[kind]
