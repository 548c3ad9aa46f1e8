"""`bert plan`: what a pretraining run takes of a device's memory, and how its batch is best split."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert.commands.arguments import parse, run_command, split_options
from bert.config import REMAT, PretrainConfig
from bert.config.pretraining import phase_configs
from bert.errors import UserError
from bert.parallel.devices import TPUS, parse_device_spec

if TYPE_CHECKING:
    from jax import Device

    from bert.analysis.batch_fit import BatchFit
    from bert.parallel.backends import MeshParallel

DESCRIPTION = """Tells what a pretraining run takes of each device before it is tried: its train step is compiled,
without weights or data, for the local devices or, with libtpu installed, for a TPU slice that need not be there; for
devices that cannot be compiled for here it is estimated. Each figure says which. The keys are those of bert pretrain:
the config, and what is changed of it."""

OWN = {
    "memory SIZE": "What a device has, for example 16GiB. (default: what the local device says of itself, or what the "
    "kind has; of a GPU three quarters, as JAX takes them)",
    "device KIND": "Other devices than the local ones: h100, h100:8 for eight of them, or a TPU slice such as v5e:2x4. "
    "(default: the local devices)",
}
"""The options that are no keys of a configuration."""

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
    argv, given = split_options(argv, ("memory", "device"))
    memory = None if "memory" not in given else size_of(given["memory"])
    config, _ = parse(
        PretrainConfig,
        argv,
        prog="bert plan",
        description=DESCRIPTION,
        default_recipe="quickstart",
        own=OWN,
        not_needed={"data.train": "stdlib:"},
    )
    if config.model.vocab_size is None:
        model = dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
        config = dataclasses.replace(config, model=model)

    target = _target(config, given.get("device"))

    from bert.analysis.batch_fit import fit_rows
    from bert.analysis.memory_estimate import ESTIMATE_ERROR_PERCENT
    from bert.analysis.step_memory import state_bytes

    mesh = target.mesh
    mesh.check_model(config.model)
    memory = memory or target.memory()
    print(f"{mesh.describe()}, {_size(memory)} each; {config.training.dtype}")
    how = "compiled" if target.compiled else f"estimated, within {ESTIMATE_ERROR_PERCENT}% of compilations for TPU v5e"
    parameters, optimizer = state_bytes(config, mesh)
    print(f"  parameters      {_size(parameters):>10}  a device (counted)")
    print(f"  optimizer state {_size(optimizer):>10}  a device (counted)")
    for number, phase in enumerate(phase_configs(config), 1):
        of_phase = f"phase {number}: " if config.phases else ""
        print(f"{of_phase}batches of {phase.training.batch_size} x {phase.data.sequence_length} tokens")
        print(f"  {'remat':6}{'rows at once':>13}{'micro-batches':>15}{'activations, gradients':>24}{'peak':>12}")
        fits = []
        for remat in REMAT:
            fit = fit_rows(phase, mesh, memory, remat, target.compiled)
            fits.append(fit)
            rows = str(fit.rows) if fit.rows else "1 is over"
            working, peak = ("-", "-") if fit.memory is None else (_size(fit.memory.working), _size(fit.memory.peak))
            print(f"  {remat:6}{rows:>13}{fit.micro_batches:>15}{working:>24}{peak:>12}  a device ({how})", flush=True)
        print(suggestion(fits, mesh, f"phases.{number}" if config.phases else "training"))
    return 0


@dataclass(frozen=True)
class Target:
    """The devices of a plan.

    Attributes:
        mesh: they.
        memory: gives bytes of each; raises UserError where nobody knows.
        compiled: whether they can be compiled for.
    """

    mesh: MeshParallel
    memory: Callable[[], int]
    compiled: bool


def _target(config: PretrainConfig, text: str | None) -> Target:
    """What ``--device`` means: the local devices without it, a slice to compile for, or else devices by name."""
    named = None if text is None else parse_device_spec(text)

    import jax

    from bert.analysis.memory_estimate import AbstractMeshParallel
    from bert.analysis.step_memory import tpu_devices
    from bert.parallel.backends import MeshParallel

    shape = config.training.mesh_shape
    if text is None or named is None:
        devices = jax.local_devices()
    elif named.count and named.kind in TPUS and importlib.util.find_spec("libtpu"):
        devices = tpu_devices(text.lower())
    else:
        count = named.count or math.prod(shape or (1,))
        mesh: MeshParallel = AbstractMeshParallel(shape or (count, 1, 1), named.name, count, named.cudnn_head)
        return Target(mesh, lambda: named.memory, False)
    mesh = MeshParallel(shape or (len(devices), 1, 1), devices)
    return Target(mesh, lambda: _memory_of(devices[0]) if named is None else named.memory, True)


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


def size_of(text: str) -> int:
    """Bytes of a size such as 16GiB or 80GB. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|)", text)
    if match is None or not float(match[1]):
        raise UserError(f"command line: --memory {text} is not a size: write, for example, 16GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def _memory_of(device: Device) -> int:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # a device that is only compiled for has none
        stats = {}
    if "bytes_limit" not in stats:
        raise UserError(
            f"command line: {device.device_kind} does not tell its memory: give it, for example --memory 16GiB"
        )
    return int(stats["bytes_limit"])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
