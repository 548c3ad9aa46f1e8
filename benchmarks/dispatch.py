"""Measures the host's overhead per step: a state of 600 small arrays, under pmap and on a mesh.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/dispatch.py
    python benchmarks/dispatch.py --coordinator=localhost:8476 --num_processes=2 --process_id=0   # and 1

Prints the median milliseconds of a step. The body adds 1 to every array and sums one number over the devices, so nearly
all of the time is dispatch.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from bert.commands.cli.cluster import connect_hosts, parse_hosts
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism, psum_if_axis

LEAVES, STEPS = 600, 50


def milliseconds(parallel: Parallelism) -> float:
    """Returns the median over the steps, except the first ones, which compile."""

    def body(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        return jax.tree.map(lambda leaf: leaf + 1, state), psum_if_axis(jnp.sum(batch["rows"]), parallel.axis)

    step = parallel.compile(body, donate=(0,))
    state = parallel.put_state({f"leaf_{number}": np.zeros(8, np.float32) for number in range(LEAVES)})
    rows = parallel.shard_batch({"rows": np.ones(jax.device_count() // parallel.process[1], np.float32)})
    taken = []
    for _ in range(STEPS + 5):
        start = time.perf_counter()
        state, total = step(state, rows)
        jax.block_until_ready((state, total))
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken[5:])


def main(argv: list[str]) -> None:
    """Measures every layout that the devices support."""
    hosts = parse_hosts({word.partition("=")[0].removeprefix("--"): word.partition("=")[2] for word in argv})
    if hosts is not None:
        connect_hosts(*hosts)
    devices = jax.devices()
    layouts: dict[str, Parallelism] = {}
    if jax.process_count() == 1:
        layouts["pmap, 1 device"] = PmapParallelism(devices[:1])
        layouts[f"pmap, {len(devices)} devices"] = PmapParallelism(devices)
        layouts["mesh, 1 device"] = MeshParallel((1, 1, 1), devices[:1])
    layouts[f"mesh, {len(devices)} devices of {jax.process_count()} processes"] = MeshParallel((len(devices), 1, 1))
    for name, parallel in layouts.items():
        taken = milliseconds(parallel)
        if jax.process_index() == 0:
            print(f"{name:36} {taken:8.2f} ms a step of {LEAVES} leaves", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
