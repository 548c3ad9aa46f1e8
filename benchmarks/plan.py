"""How far `bert plan`'s estimates are from compilations: for the CPU, or for a TPU slice that libtpu compiles for.

    python benchmarks/plan.py                                          # the CPU
    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan.py --device v5e:2x2    # pip install libtpu; minutes each
    python benchmarks/plan.py --sizes tiny,mini --lengths 128 --remat none,full --types bfloat16
    TPU_SKIP_MDS_QUERY=1 python benchmarks/plan.py --device v5e:4x4 --sizes large --lengths 512 --mesh 1x16x1

One device unless --mesh says otherwise; layers in a loop unless --scan false. Rows are chosen so that the estimated
peak is at most --memory. Prints a line each, and the largest error; with --output, lines of JSON as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax

from bert.analysis.batch_fit import compiled_memory
from bert.analysis.memory_estimate import estimate_step
from bert.analysis.step_memory import tpu_devices
from bert.commands.arguments import parse
from bert.commands.plan import size_of
from bert.config import PretrainConfig
from bert.parallel.backends import MeshParallel


def recipe(size: str, length: int, **training: Any) -> PretrainConfig:
    """A recipe of one phase with rows of ``length`` tokens."""
    predictions = math.ceil(0.15 * length)
    words = ["--config", size, "--phases=null", "--data.train=stdlib:", f"--data.sequence_length={length}"]
    words += [f"--data.max_predictions_per_sequence={predictions}", "--model.vocab_size=30522"]
    config, _ = parse(PretrainConfig, words, prog="", description="", default_recipe=None)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **training))


def main() -> None:
    """Runs the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="TPU slice to compile for")
    parser.add_argument("--sizes", default="tiny,mini,small,medium,base,large")
    parser.add_argument("--lengths", default="128,512")
    parser.add_argument("--remat", default="none,dots,full")
    parser.add_argument("--types", default="bfloat16,float32")
    parser.add_argument("--micro_batches", default="1")
    parser.add_argument("--mesh", default="1x1x1")
    parser.add_argument("--scan", default="true", choices=("true", "false"))
    parser.add_argument("--memory", type=size_of, default="12GiB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    data, fsdp, tensor = map(int, given.mesh.split("x"))
    shape = (data, fsdp, tensor)
    devices = tpu_devices(given.device) if given.device else jax.devices("cpu")
    mesh = MeshParallel(shape, devices[: math.prod(shape)])
    grid = (given.sizes, given.lengths, given.remat, given.types, given.micro_batches)
    worst = 0.0
    for size, length, remat, dtype, micro_batches in itertools.product(*(axis.split(",") for axis in grid)):
        how = {"remat": remat, "dtype": dtype, "gradient_accumulation_steps": int(micro_batches)}
        how |= {"mesh": given.mesh, "scan_layers": given.scan == "true"}
        shares = shape[0] * shape[1] * int(micro_batches)

        def with_rows(rows: int) -> PretrainConfig:
            return recipe(size, int(length), batch_size=rows * shares, **how)

        rows = 1
        while rows < 1024 and estimate_step(with_rows(2 * rows), mesh).peak < given.memory:
            rows *= 2
        config = with_rows(rows)
        told, found = estimate_step(config, mesh), compiled_memory(config, mesh)
        name = f"{size:6} T {length:3} {remat:4} {dtype:8} {micro_batches} x {rows:4} rows"
        if found is None:
            print(f"{name}: the compiler refuses it; estimated {told.peak / 2**30:.2f} GiB", flush=True)
            continue
        error = told.peak / found.peak - 1
        worst = max(worst, abs(error), key=abs)
        print(
            f"{name}: compiled {found.peak / 2**30:.2f} GiB, estimated {told.peak / 2**30:.2f}, {error:+.1%}",
            flush=True,
        )
        if given.output:
            row = {"size": size, "length": int(length), "rows": rows, **how, "device": given.device or "cpu"}
            row |= {"compiled": dataclasses.asdict(found), "estimated": dataclasses.asdict(told)}
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"largest error {worst:.1%}")


if __name__ == "__main__":
    main()
