"""`bert plan`: reports the device memory and time of a pretraining run, and suggests micro-batches."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from bert.commands.cli.arguments import log_to_stderr, parse, run_command
from bert.config import ModelConfig, PretrainConfig
from bert.config.phases import OVERRIDES
from bert.config.pretraining import Phase, resolve_phases
from bert.config.training import Remat, check_mesh_sizes, check_shares
from bert.errors import UserError
from bert.parallel.devices import FIGURES, DeviceFigures, DeviceSpec, local_devices, parse_device_spec
from bert.training.flops import UTILIZATION, all_reduce_terms, compute_term, num_hosts, step_lines

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import AbstractMesh, Mesh

    from bert.analysis.memory import BatchFit
    from bert.parallel.backends import MeshParallel

DESCRIPTION = """Reports the memory that a pretraining run needs on each device. The train step is compiled, without
weights or data, for the local devices or, if libtpu is installed, for any TPU slice. For other devices, the size of
the state is exact and activations are estimated by a formula. For devices with known published speeds, it also prints
the time of a step and of the run with the calculation. The keys are the same as for bert pretrain."""

EXTRA_OPTIONS = {
    "memory SIZE": "Memory of one device, for example 16GiB. (default: the local device's or the TPU chip's)",
    "device KIND": "Other devices than the local ones: a TPU slice such as v5e:2x4, or a kind and a number, such as "
    f"v5e:64 or h100:8. Speeds are known for {', '.join(FIGURES)}.",
    "utilization SHARE": "Assumed share of the devices' peak speed. (default: 0.19, published for BERT-base on A100)",
}
"""Options that are not configuration keys."""

UNITS = {**{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}, **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}}
MIN_EFFICIENT_ROWS = 8
"""Rows per device above which larger products save less time than recomputation costs."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    not_needed = {"data.train": "docstrings:"}
    config, _, options = parse(PretrainConfig, argv, "bert plan", DESCRIPTION, "quickstart", EXTRA_OPTIONS, not_needed)
    memory = None if "memory" not in options else parse_size(options["memory"])
    config = dataclasses.replace(config, model=_known_sizes(config))
    config.check()
    config.check_model()
    spec = None if "device" not in options else parse_device_spec(options["device"])
    utilization = parse_share(options.get("utilization", str(UTILIZATION)))
    if memory is None and spec is not None and spec.figures is not None and spec.figures.memory_gib is not None:
        memory = int(spec.figures.memory_gib * 2**30)
    if spec is not None and not (spec.is_slice and importlib.util.find_spec("libtpu")):
        _print_estimate(config, spec, memory, utilization)
        return 0

    from bert.analysis.memory import tpu_devices

    devices = local_devices() if spec is None else tpu_devices(options["device"].lower())
    _print_compiled(config, devices, _device_memory(devices[0]) if memory is None else memory, spec, utilization)
    return 0


def _known_sizes(config: PretrainConfig) -> ModelConfig:
    """Returns the sizes of the run's model, from ``init`` if set, with the size of its vocabulary.

    A vocabulary that is not trained yet has its maximum size.
    """
    path, teacher = config.tokenizer.path, config.distillation.teacher
    if config.model.vocab_size is not None and config.init is None:
        return config.model
    if config.init is None and path is None and teacher is None:
        return dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size)
    from bert.inference.load import load_for_training, load_vocabulary
    from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
    from bert.training.initialization import model_config_from_source

    rows = 0 if path is None else embedding_rows(load_tokenizer(path, config.tokenizer))
    if config.init is not None:
        source = load_for_training(config.init, log_to_stderr)
        sizes = dataclasses.replace(source.config, vocab_size=max(rows, source.config.known_vocab_size))
        return model_config_from_source(config.model, sizes, source.source, OVERRIDES["model"])
    return dataclasses.replace(config.model, vocab_size=rows or embedding_rows(load_vocabulary(str(teacher))))


def _print_compiled(
    config: PretrainConfig, devices: Sequence[Device], memory: int, spec: DeviceSpec | None, utilization: float
) -> None:
    from bert.analysis.memory import fit_rows
    from bert.parallel.backends import MeshParallel

    mesh = MeshParallel(config.training.mesh_shape or (len(devices), 1, 1), devices)
    print(f"{mesh.describe()}, {_size(memory)} each; {config.training.dtype}", flush=True)
    _print_state(config, mesh.mesh)
    steps = _paper_steps(config, spec, mesh.shape, utilization)
    if spec is not None:
        print(f"  without compiling: --device {spec.kind}:{mesh.mesh.size}", file=sys.stderr, flush=True)
    progress = CompilationProgress()
    for planned in _whole_phases(config):
        phase = planned.config
        print(_phase_title(config, planned))
        columns = f"  {'remat':6}{'rows at once':>13}{'micro-batches':>15}{'activations, gradients':>24}{'peak':>12}"
        print(columns, flush=True)
        fits = []
        for remat in get_args(Remat):
            fit = fit_rows(phase, mesh, memory, remat, progress)
            fits.append(fit)
            rows = str(fit.rows) if fit.rows else "1 is over"
            working, peak = ("-", "-") if fit.memory is None else (_size(fit.memory.working), _size(fit.memory.peak))
            print(f"  {remat:6}{rows:>13}{fit.micro_batches:>15}{working:>24}{peak:>12}  a device", flush=True)
        print(suggestion(fits, mesh, f"phases.{planned.number}" if config.phases else "training"))
        if steps is not None:
            steps.print(planned, best_fit(fits))


def _print_estimate(config: PretrainConfig, spec: DeviceSpec, memory: int | None, utilization: float) -> None:
    from jax.sharding import AbstractMesh, AxisType

    from bert.analysis.memory import activation_bytes
    from bert.parallel.backends import check_mesh
    from bert.parallel.sharding import AXES

    training = config.training
    shape = training.mesh_shape or (spec.count or 1, 1, 1)
    check_mesh(shape, spec.count or math.prod(shape))
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
    count = math.prod(shape)
    hosts = 1 if spec.figures is None else num_hosts(count, spec.figures)
    name = f"{count} x {spec.kind}" + (f" on {hosts} hosts" if hosts > 1 else "")
    print(f"{name}, mesh {axes}; {training.dtype}; nothing is compiled for these devices")
    parameters, optimizer = _print_state(config, AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES)))
    total = _size(2 * parameters + optimizer)
    print(f"  gradients       {_size(parameters):>10}  a device, as the parameters; {total} in all")
    steps = _paper_steps(config, spec, shape, utilization)
    itemsize = 2 if training.dtype == "bfloat16" else 4
    implementation = training.attention_implementation
    stores_scores = implementation == "xla" or (implementation == "auto" and training.preset != "fast")
    for planned in _whole_phases(config):
        phase = planned.config
        print(_phase_title(config, planned))
        for remat in ("none", "full"):
            row = activation_bytes(
                phase.model, phase.data.sequence_length, itemsize, remat, stores_scores, tensor=shape[2]
            )
            fit = "" if memory is None else f"; about {max(memory - 2 * parameters - optimizer, 0) // row} rows fit"
            print(f"  activations     {_size(row):>10}  a row at once, remat {remat} (rough){fit}")
        if steps is not None:
            steps.print(planned)
    print("activations by the formula of Korthikanti et al. 2022, arXiv 2205.05198")


class CompilationProgress:
    """Prints a line to stderr before each compilation, with the seconds of the previous one."""

    def __init__(self) -> None:
        self._started: float | None = None

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        took = "" if self._started is None else f"; the last took {now - self._started:.0f} s"
        print(f"{line}{took}", file=sys.stderr, flush=True)
        self._started = now


@dataclass(frozen=True)
class PaperSteps:
    """Estimates the time of steps on devices with known published speeds.

    Attributes:
        flops: FLOPs per token, by phase.
    """

    figures: DeviceFigures
    shape: tuple[int, int, int]
    utilization: float
    parameters: int
    flops: list[float]

    def print(self, phase: Phase, fit: BatchFit | None = None) -> None:
        """Prints the time of a step and a phase, with the all-reduced bytes of the compiled step if known."""
        training, count = phase.config.training, math.prod(self.shape)
        check_shares("training.batch_size", training.batch_size, self.shape[0] * self.shape[1])
        tokens = training.batch_size * phase.config.data.sequence_length
        compute = compute_term(tokens, self.flops[phase.number - 1], count, self.figures, self.utilization)
        all_reduce = []
        if self.shape[0] < count:
            print("  on paper, without the communication of the axes fsdp and tensor:")
        elif fit is not None and fit.memory is not None and fit.memory.all_reduced is not None:
            all_reduce = all_reduce_terms(fit.memory.all_reduced, count, self.figures)
            print(f"  on paper, with the all-reduce as compiled, of {fit.micro_batches} micro-batches:")
        else:
            all_reduce = all_reduce_terms(4 * self.parameters, count, self.figures)
            print(f"  on paper, with 4 bytes for each of {self.parameters:,} gradients, of one micro-batch:")
        steps = None if training.steps is None else phase.end - phase.first
        print("\n".join(step_lines(compute, all_reduce, tokens, steps)))
        if training.dtype != "bfloat16":
            print(f"  the peak is for bfloat16, but training.dtype is {training.dtype}: it takes longer")


def _paper_steps(
    config: PretrainConfig, spec: DeviceSpec | None, shape: tuple[int, int, int], utilization: float
) -> PaperSteps | None:
    """Returns None for devices without known speeds."""
    if spec is None or spec.figures is None:
        return None
    from bert.analysis.inspection import pretraining_costs

    return PaperSteps(spec.figures, shape, utilization, *pretraining_costs(config))


def _print_state(config: PretrainConfig, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
    from bert.analysis.memory import state_bytes

    check_mesh_sizes((mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["tensor"]), config.model)
    parameters, optimizer = state_bytes(config, mesh)
    print(f"  parameters      {_size(parameters):>10}  a device (exact)")
    print(f"  optimizer state {_size(optimizer):>10}  a device (exact)")
    if config.distillation.teacher is not None:
        print("  not counted: the parameters and activations of distillation.teacher")
    return parameters, optimizer


def _whole_phases(config: PretrainConfig) -> list[Phase]:
    """Returns the phases of a run. Steps of a ramp, with smaller batches, count as fewer steps of whole batches."""
    phases: dict[int, list[Phase]] = {}
    for phase in resolve_phases(config, config.training.steps or 0):
        phases.setdefault(phase.number, []).append(phase)
    whole = []
    for *ramp, last in phases.values():
        saved = sum(
            (1 - one.config.training.batch_size / last.config.training.batch_size) * (one.end - one.first)
            for one in ramp
        )
        whole.append(dataclasses.replace(last, first=[*ramp, last][0].first + round(saved)))
    return whole


def _phase_title(config: PretrainConfig, phase: Phase) -> str:
    rows, length = phase.config.training.batch_size, phase.config.data.sequence_length
    title = f"batches of {rows} x {length} tokens"
    if not config.phases:
        return title
    tokens = (phase.end - phase.first) * rows * length
    settings = config.phases[phase.number - 1].describe()
    return f"phase {phase.number}: {title} up to step {phase.end:,}, {tokens:.4g} tokens" + (
        f"\n  {settings}" if settings else ""
    )


def suggestion(fits: list[BatchFit], mesh: MeshParallel, section: str = "training") -> str:
    """Suggests options for the command line."""
    best = best_fit(fits)
    if best is None:
        count = mesh.mesh.size
        more = f"--training.mesh 1x{count}x1" if mesh.shape[1] * mesh.shape[2] < count else "more devices"
        return f"it does not fit: try {more}, a shorter sequence, or a smaller model"
    return f"suggested: --{section}.gradient_accumulation_steps {best.micro_batches} --training.remat {best.remat}"


def best_fit(fits: list[BatchFit]) -> BatchFit | None:
    """Returns the fit with the least recomputation and enough rows, else with the most rows; None if nothing fits."""
    max_rows = max(fit.rows for fit in fits)
    return next((fit for fit in fits if fit.rows and fit.rows >= min(MIN_EFFICIENT_ROWS, max_rows)), None)


def parse_share(text: str) -> float:
    """Parses a share of the peak. Raises UserError."""
    if re.fullmatch(r"\d*\.?\d+", text) and 0 < float(text) <= 1:
        return float(text)
    raise UserError(f"command line: --utilization {text} is not a share: write a number from 0 to 1, such as 0.4")


def parse_size(text: str) -> int:
    """Parses a size such as 16GiB or 80GB to bytes. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text)
    if match is None or not float(match[1]):
        raise UserError(f"command line: --memory {text} is not a size: write, for example, 16GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def _device_memory(device: Device) -> int:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # a device that exists only for the compiler has no statistics
        stats = {}
    if "bytes_limit" not in stats:
        raise UserError(
            f"command line: {device.device_kind} does not report its memory: pass it, for example --memory 16GiB"
        )
    return int(stats["bytes_limit"])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
