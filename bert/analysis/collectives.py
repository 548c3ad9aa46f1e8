"""Bytes that a compiled program adds over devices, read from its HLO. Imports no JAX."""

from __future__ import annotations

import math
import re
from functools import cache

ALL_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
CALLED = re.compile(r"(?:calls|to_apply|computations?)=\{?(%?[\w.-]+(?:, %[\w.-]+)*)")
LOOP = re.compile(r" while\(.*condition=(%?[\w.-]+), body=(%?[\w.-]+)")
KNOWN_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ARRAY = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")
CONSTANT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")


def all_reduce_bytes(hlo: str) -> int | None:
    """Bytes of all arrays that one run of a program adds over devices, each as often as the loops around it run.

    Args:
        hlo: the text of a compiled program, `jax.stages.Compiled.as_text`.

    Returns:
        The bytes of one device's arrays; None if the rounds of a loop cannot be read.
    """
    computations = _computations(hlo)

    @cache
    def added(name: str) -> int:
        total = 0
        for line in computations[name]:
            if match := ALL_REDUCE.search(line):
                total += _array_bytes(match[1])
            elif match := LOOP.search(line):
                condition, body = (part.lstrip("%") for part in match.groups())
                if each := added(body):
                    known = KNOWN_ROUNDS.search(line)
                    total += each * (int(known[1]) if known else _rounds(computations[condition]))
            else:
                total += sum(added(name) for called in CALLED.findall(line) for name in re.findall(r"[\w.-]+", called))
        return total

    try:
        return added("ENTRY")
    except _UnknownRoundsError:
        return None


class _UnknownRoundsError(Exception):
    """A loop does not end at a constant."""


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation by its name; those of the first one to run by ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            lines = found["ENTRY" if match[1] else match[2]] = []
        elif line.startswith(" "):
            lines.append(line)
    return found


def _rounds(condition: list[str]) -> int:
    """Rounds of a loop over a range: the one constant of its condition."""
    constants = {int(match[1]) for line in condition if (match := CONSTANT.search(line))}
    if len(constants) != 1:
        raise _UnknownRoundsError
    return constants.pop()


def _array_bytes(shapes: str) -> int:
    """Bytes of the arrays of an HLO type, such as (f32[2,3]{1,0}, bf16[]); pred takes a byte."""
    return sum(
        math.prod(int(side) for side in sides.split(",") if side) * int(bits or 8) // 8
        for bits, sides in ARRAY.findall(shapes)
    )
