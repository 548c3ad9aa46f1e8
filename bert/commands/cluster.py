"""The options that connect the hosts of one run. Imports no JAX before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bert.errors import UserError

CLUSTER_OPTIONS = {
    "coordinator HOST:PORT": "On several hosts, with the same command on each: name and a free port of the first one. "
    "On Cloud TPU, Slurm, Open MPI and Kubernetes, auto is enough. All hosts must see output_dir.",
    "num_processes N": "How many hosts there are.",
    "process_id I": "Which of them this one is, counted from 0.",
}


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run, and which of them this process is.

    Attributes:
        coordinator: HOST:PORT of the first one; None lets JAX detect everything.
        num_processes: number of hosts.
        process_id: index of this one.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def initialize(self) -> None:
        """Connects to the other hosts; must come before any other use of JAX.

        Raises:
            UserError: the connection fails.
        """
        import jax

        try:
            jax.distributed.initialize(self.coordinator, self.num_processes, self.process_id)
        except (RuntimeError, ValueError) as error:
            where = self.coordinator or "auto"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"command line: --coordinator {where}: the hosts did not meet ({reason}): "
                "give --coordinator HOST:PORT, --num_processes and --process_id"
            ) from None


def make_cluster(given: Mapping[str, str]) -> Cluster | None:
    """The hosts by the values of `CLUSTER_OPTIONS`; None if none is given.

    Raises:
        UserError: an option is missing or has a value that it cannot have.
    """
    if not given:
        return None
    if given == {"coordinator": "auto"}:
        return Cluster()
    names = ("coordinator", "num_processes", "process_id")
    if missing := [f"--{name}" for name in names if name not in given]:
        raise UserError(
            f"command line: {', '.join(missing)} not given: several hosts take --coordinator HOST:PORT, "
            "--num_processes N and --process_id I, or --coordinator auto alone"
        )
    count, process_id = (_to_int(name, given[name]) for name in ("num_processes", "process_id"))
    if not 0 <= process_id < count:
        raise UserError(
            f"command line: --process_id {process_id} is not one of --num_processes {count}: "
            f"they count from 0 to {count - 1}"
        )
    host, colon, port = given["coordinator"].rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UserError(
            f"command line: --coordinator {given['coordinator']} is not HOST:PORT: write, for example, 10.0.0.1:8476"
        )
    return Cluster(given["coordinator"], count, process_id)


def _to_int(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"command line: --{name} {text} is not a whole number: write one")
    return int(text)
