"""The options that connect the hosts of one run, or name a cluster, and how the hosts end. Imports no JAX at first."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from bert.errors import UserError

if TYPE_CHECKING:
    from bert.data.pretraining.build import Engine

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


_FAILURES = "bert/failures"
"""Where hosts that fail leave their errors, in the store that JAX's coordinator keeps."""

_POLL_SECONDS, _GRACE_SECONDS = 2.0, 5.0
"""How often a host looks for failures of others, and how long it then has to fail by itself, as it does if all find the
same mistake."""


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around a run: an error that ends this host is told to the others, and theirs end this process with status 2.

    Without it they would wait for the host that failed, for minutes or for ever.
    """
    import jax
    from jax._src.distributed import global_state

    store = global_state.client
    if store is None:
        yield
        return
    host, ended = jax.process_index(), threading.Event()

    def end_if_another_fails() -> None:
        while not ended.wait(_POLL_SECONDS):
            try:
                failures = store.key_value_dir_get(_FAILURES)
            except RuntimeError:  # the coordinator is gone, for which JAX ends this process
                return
            if not failures:
                continue
            if ended.wait(_GRACE_SECONDS):
                return
            key, error = failures[0]
            print(f"error: host {key.rsplit('/')[-1]} has failed: {error}", file=sys.stderr, flush=True)
            jax.distributed.shutdown()  # which the host that failed waits for
            os._exit(2)

    watch = threading.Thread(target=end_if_another_fails)
    watch.start()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(RuntimeError):  # the coordinator is gone, and what it caused is raised below
            store.key_value_set(f"{_FAILURES}/{host}", " ".join(str(error).split()) or type(error).__name__)
        raise
    finally:
        ended.set()
        watch.join()
