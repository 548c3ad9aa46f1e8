"""Runs of the scripts in processes: alone, on several devices, or as the hosts of one run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers import REPOSITORY


def launch(*arguments: str | Path, devices: int = 1, **environment: str) -> subprocess.Popen[str]:
    """Starts Python in the repository with a number of CPU devices; standard error goes to standard output."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "BERT_NUM_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=REPOSITORY, env={**os.environ, **flags, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str], status: int = 0, timeout: float = 900) -> list[str]:
    """Waits for processes, which must end with a status, and returns what they print."""
    texts = [process.communicate(timeout=timeout)[0] for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), "\n".join(texts)[-6000:]
    return texts


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def host_options(count: int) -> list[list[str]]:
    """The options that make several processes the hosts of one run."""
    place = [f"--coordinator=localhost:{free_port()}", f"--num_processes={count}"]
    return [[*place, f"--process_id={number}"] for number in range(count)]


def read_to_step(process: subprocess.Popen[str], step: int) -> str:
    """Reads the output of a process until it logs a step."""
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= step:
            return text
    raise AssertionError(text[-3000:])
