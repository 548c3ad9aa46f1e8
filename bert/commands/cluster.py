"""The options that connect the hosts of one run, or name a cluster. Imports no JAX before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from bert.errors import UserError

if TYPE_CHECKING:
    from bert.data.pretraining.builder import Engine

ENGINE_OPTION = {
    "engine NAME": "What reads the corpus: local, the cores of this machine, or ray, the cluster that Ray finds. The "
    "bytes are the same.",
}

CLUSTER_OPTIONS = {
    "coordinator HOST:PORT": "On several hosts, with the same command on each: name and a free port of the first one. "
    "On Cloud TPU, Slurm, Open MPI and Kubernetes, auto is enough. All hosts must see output_dir: a shared "
    "folder, or a URL.",
    "num_processes N": "How many hosts there are.",
    "process_id I": "Which of them this one is, counted from 0.",
}


def parse_engine(options: Mapping[str, str]) -> Engine:
    """The value of `ENGINE_OPTION`. Raises UserError for another one."""
    engine = options.get("engine", "local")
    if engine not in ("local", "ray"):
        raise UserError(f"command line: --engine {engine} is not known: use local or ray")
    return cast("Engine", engine)


def parse_hosts(given: Mapping[str, str]) -> tuple[str | None, int | None, int | None] | None:
    """Coordinator, number of hosts and index of this one from the values of `CLUSTER_OPTIONS`; None without any.

    All three are None for ``--coordinator auto``: JAX detects them.

    Raises:
        UserError: an option is missing or has a value that it cannot have.
    """
    if not given:
        return None
    if given == {"coordinator": "auto"}:
        return None, None, None
    names = ("coordinator", "num_processes", "process_id")
    if missing := [f"--{name}" for name in names if name not in given]:
        raise UserError(
            f"command line: {', '.join(missing)} not given: several hosts take --coordinator HOST:PORT, "
            "--num_processes N and --process_id I, or --coordinator auto alone"
        )
    for name in names[1:]:
        if not given[name].isdecimal():
            raise UserError(f"command line: --{name} {given[name]} is not a whole number: pass one")
    count, process_id = int(given["num_processes"]), int(given["process_id"])
    if process_id >= count:
        raise UserError(
            f"command line: --process_id {process_id} is not one of --num_processes {count}: "
            f"they count from 0 to {count - 1}"
        )
    host, _, port = given["coordinator"].rpartition(":")
    if not (host and port.isdigit()):
        raise UserError(
            f"command line: --coordinator {given['coordinator']} is not HOST:PORT: pass, for example, 10.0.0.1:8476"
        )
    return given["coordinator"], count, process_id


def connect_hosts(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Connects to the other hosts; must come before any other use of JAX.

    Raises:
        UserError: the connection fails.
    """
    import jax

    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"command line: --coordinator {coordinator or 'auto'}: the hosts did not meet ({reason}): "
            "pass --coordinator HOST:PORT, --num_processes and --process_id"
        ) from None
