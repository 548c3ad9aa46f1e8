"""The time of a training step on many devices, on paper, from published speeds. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from bert.parallel.devices import DeviceFigures

UTILIZATION = 0.19
"""Share of the devices' peak that a step reaches: that of a plain BERT-base on A100, 60 of 312 TFLOP/s, by the
111,000 tokens per second that mosaicml/examples publishes."""


@dataclass(frozen=True)
class Term:
    """A part of a step: its seconds, and the arithmetic that gives them."""

    name: str
    seconds: float
    arithmetic: str


def num_hosts(count: int, figures: DeviceFigures) -> int:
    """Hosts of so many devices."""
    return -(-count // figures.per_host)


def compute_term(tokens: int, flops: float, count: int, figures: DeviceFigures, utilization: float) -> Term:
    """The products of matrices of a step.

    Args:
        tokens: of the global batch.
        flops: operations for each token, as `bert.analysis.flops.training_flops` counts them.
        count: devices.
        figures: of one of them.
        utilization: share of the peak that they reach.
    """
    seconds = tokens * flops / (count * figures.peak_tflops * 1e12 * utilization)
    peak = f"{count} x {figures.peak_tflops:g} TFLOP/s x {utilization:g}"
    return Term("compute", seconds, f"{tokens:,} tokens x {flops / 1e6:,.1f} MFLOP / ({peak})")


def all_reduce_terms(gradients: float, count: int, figures: DeviceFigures) -> list[Term]:
    """The sum of so many bytes of gradients over the devices of a ring, none of which waits.

    Each device of N sends 2 (N - 1) / N times the bytes. Devices whose links end at their host sum in two levels: over
    the n devices of a host, then each device its n-th part over the hosts.
    """
    if figures.network is None:
        return [_ring("all-reduce", gradients, count, figures.link)]
    local, hosts = min(count, figures.per_host), num_hosts(count, figures)
    terms = [_ring("all-reduce in a host", gradients, local, figures.link)]
    return [*terms, _ring("all-reduce of hosts", gradients / local, hosts, figures.network)]


def _ring(name: str, array_bytes: float, count: int, speed: float) -> Term:
    sent = 2 * (count - 1) / count * array_bytes
    arithmetic = f"2 x {count - 1}/{count} x {array_bytes / 1e6:,.1f} MB = {sent / 1e6:,.1f} MB at {speed:g} GB/s"
    return Term(name, sent / (speed * 1e9), arithmetic)


def step_lines(compute: Term, all_reduce: list[Term], tokens: int, steps: int | None) -> list[str]:
    """A step of these terms, none of which overlaps with another, and the time of so many steps, as lines."""
    adding = sum(term.seconds for term in all_reduce)
    step = compute.seconds + adding
    lines = [f"  {term.name:20} {_time(term.seconds):>10} = {term.arithmetic}" for term in (compute, *all_reduce)]
    share = f", {adding / step:.1%} of it all-reduce if none overlaps" if all_reduce else ""
    lines.append(f"  {'step':20} {_time(step):>10}{share}; {tokens / step:,.0f} tokens per second")
    if steps is not None:
        lines.append(f"  {f'{steps:,} steps':20} {steps * step / 3600:>8.1f} h")
    return lines


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms"
