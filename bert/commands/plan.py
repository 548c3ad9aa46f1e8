"""`bert plan`: what a pretraining run takes of a device's memory, and how its batch is best split."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from bert.commands.arguments import parse, run_command
from bert.config import PretrainConfig
from bert.config.pretraining import phase_configs
from bert.config.training import Remat
from bert.errors import UserError
from bert.parallel.devices import TPU_MEMORY_GIB, DeviceSpec, local_devices, parse_device_spec

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import AbstractMesh, Mesh

    from bert.analysis.batch_fit import BatchFit
    from bert.parallel.backends import MeshParallel

DESCRIPTION = """Reports how much memory of each device a pretraining run takes: its train step is compiled, without
weights or data, for the local devices or, with libtpu installed, for a TPU slice that need not be present. For other
devices it prints the exact size of the state and a rough formula for activations. The keys are those of bert
pretrain."""

EXTRA_OPTIONS = {
    "memory SIZE": "Memory of one device, for example 16GiB. (default: what the local device reports, or that of the "
    "TPU chip)",
    "device KIND": "Devices that are not present: a TPU slice such as v5e:2x4, or any other kind and how many, h100:8. "
    "(default: the local devices)",
}
"""The options that are not configuration keys."""

UNITS = {
    "": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
MIN_EFFICIENT_ROWS = 8
"""Rows of a device at once from which on recomputation costs more time than larger products save."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    not_needed = {"data.train": "docstrings:"}
    config, _, options = parse(PretrainConfig, argv, "bert plan", DESCRIPTION, "quickstart", EXTRA_OPTIONS, not_needed)
    memory = None if "memory" not in options else parse_size(options["memory"])
    if config.model.vocab_size is None:
        model = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
        config = dataclasses.replace(config, model=model)

    spec = None if "device" not in options else parse_device_spec(options["device"])
    is_slice = spec is not None and spec.kind in TPU_MEMORY_GIB and spec.count is not None
    if spec is not None and not (is_slice and importlib.util.find_spec("libtpu")):
        _print_estimate(config, spec, memory)
        return 0

    from bert.analysis.step_memory import tpu_devices

    devices = local_devices() if spec is None else tpu_devices(options["device"].lower())
    if memory is None:
        memory = _device_memory(devices[0]) if spec is None else int(TPU_MEMORY_GIB[spec.kind] * 2**30)
    _print_compiled(config, devices, memory)
    return 0


def _print_compiled(config: PretrainConfig, devices: Sequence[Device], memory: int) -> None:
    from bert.analysis.batch_fit import fit_rows
    from bert.parallel.backends import MeshParallel

    mesh = MeshParallel(config.training.mesh_shape or (len(devices), 1, 1), devices)
    print(f"{mesh.describe()}, {_size(memory)} each; {config.training.dtype}")
    _print_state(config, mesh.mesh)
    for phase_number, phase in enumerate(phase_configs(config), 1):
        print(_phase_title(config, phase, phase_number))
        print(f"  {'remat':6}{'rows at once':>13}{'micro-batches':>15}{'activations, gradients':>24}{'peak':>12}")
        fits = []
        for remat in get_args(Remat):
            fit = fit_rows(phase, mesh, memory, remat)
            fits.append(fit)
            rows = str(fit.rows) if fit.rows else "1 is over"
            working, peak = ("-", "-") if fit.memory is None else (_size(fit.memory.working), _size(fit.memory.peak))
            print(f"  {remat:6}{rows:>13}{fit.micro_batches:>15}{working:>24}{peak:>12}  a device", flush=True)
        print(suggestion(fits, mesh, f"phases.{phase_number}" if config.phases else "training"))


def _print_estimate(config: PretrainConfig, spec: DeviceSpec, memory: int | None) -> None:
    from jax.sharding import AbstractMesh, AxisType

    from bert.analysis.memory_estimate import activation_bytes
    from bert.parallel.backends import check_mesh
    from bert.parallel.sharding import AXES

    training = config.training
    shape = training.mesh_shape or (spec.count or 1, 1, 1)
    check_mesh(shape, spec.count or math.prod(shape))
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    print(f"{math.prod(shape)} x {spec.kind}, mesh {axes}; {training.dtype}; nothing compiles here for these devices")
    parameters, optimizer = _print_state(config, AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES)))
    itemsize = 2 if training.dtype == "bfloat16" else 4
    stores_scores = training.preset != "fast" or training.attention_implementation == "xla"
    for phase_number, phase in enumerate(phase_configs(config), 1):
        print(_phase_title(config, phase, phase_number))
        for remat in ("none", "full"):
            row = activation_bytes(
                config.model, phase.data.sequence_length, itemsize, remat, stores_scores, tensor=shape[2]
            )
            fit = "" if memory is None else f"; about {max(memory - 2 * parameters - optimizer, 0) // row} rows fit"
            print(f"  activations     {_size(row):>10}  a row at once, remat {remat} (rough){fit}")
    print("gradients take as much as the parameters; the formula is that of Korthikanti et al. 2022, arXiv 2205.05198")


def _print_state(config: PretrainConfig, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    from bert.analysis.step_memory import state_bytes
    from bert.parallel.backends import check_model

    check_model((mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["tensor"]), config.model)
    parameters, optimizer = state_bytes(config, mesh)
    print(f"  parameters      {_size(parameters):>10}  a device (exact)")
    print(f"  optimizer state {_size(optimizer):>10}  a device (exact)")
    if config.distillation.teacher is not None:
        print("  not counted: the parameters and activations of distillation.teacher")
    return parameters, optimizer


def _phase_title(config: PretrainConfig, phase: PretrainConfig, phase_number: int) -> str:
    prefix = f"phase {phase_number}: " if config.phases else ""
    return f"{prefix}batches of {phase.training.batch_size} x {phase.data.sequence_length} tokens"


def suggestion(fits: list[BatchFit], mesh: MeshParallel, section: str = "training") -> str:
    """What to put on the command line: the least recomputation with enough rows at once, else the most rows."""
    possible = [fit for fit in fits if fit.rows]
    if not possible:
        count = mesh.mesh.size
        more = f"--training.mesh 1x{count}x1" if mesh.shape[1] * mesh.shape[2] < count else "more devices"
        return f"it does not fit: try {more}, a shorter sequence, or a smaller model"
    most = max(fit.rows for fit in possible)
    best = next(fit for fit in possible if fit.rows >= min(MIN_EFFICIENT_ROWS, most))
    return f"suggested: --{section}.gradient_accumulation_steps {best.micro_batches} --training.remat {best.remat}"


def parse_size(text: str) -> int:
    """Bytes of a size such as 16GiB or 80GB. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|)", text)
    if match is None or not float(match[1]):
        raise UserError(f"command line: --memory {text} is not a size: write, for example, 16GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def _device_memory(device: Device) -> int:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # a device that is only compiled for has none
        stats = {}
    if "bytes_limit" not in stats:
        raise UserError(
            f"command line: {device.device_kind} does not report its memory: pass it, for example --memory 16GiB"
        )
    return int(stats["bytes_limit"])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
