"""Options and connection of several hosts, and the end of all hosts if one fails. Imports JAX only when needed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from bert.errors import UserError

if TYPE_CHECKING:
    from bert.data.worker_processes import Engine

ENGINE_OPTION = {
    "engine NAME": "Where the corpus is processed: local, on the cores of this machine, or ray, on the cluster that "
    "Ray finds. The results are identical. (default: local)"
}

CLUSTER_OPTIONS = {
    "coordinator HOST:PORT": "For several hosts, which all run the same command: name and a free port of the first "
    "host. auto suffices on Cloud TPU, Slurm, Open MPI and Kubernetes. All hosts need access to output_dir: a shared "
    "folder, or a URL.",
    "num_processes N": "Number of hosts.",
    "process_id I": "Number of this host, from 0.",
}


def parse_engine(options: Mapping[str, str]) -> Engine:
    """Returns the value of `ENGINE_OPTION`. Raises UserError for an unknown engine."""
    engine = options.get("engine", "local")
    if engine not in ("local", "ray"):
        raise UserError(f"command line: --engine {engine} is not known: use local or ray")
    return cast("Engine", engine)


def parse_hosts(options: Mapping[str, str]) -> tuple[str | None, int | None, int | None] | None:
    """Returns coordinator, number of hosts and index of this host from `CLUSTER_OPTIONS`; None without any option.

    All three are None for ``--coordinator auto``, with which JAX detects them.

    Raises:
        UserError: an option is missing or has an invalid value.
    """
    if not options:
        return None
    if options == {"coordinator": "auto"}:
        return None, None, None
    names = ("coordinator", "num_processes", "process_id")
    if missing := [f"--{name}" for name in names if name not in options]:
        raise UserError(
            f"command line: {', '.join(missing)} missing: several hosts need --coordinator HOST:PORT, "
            "--num_processes N and --process_id I, or --coordinator auto alone"
        )
    for name in names[1:]:
        if not options[name].isdecimal():
            raise UserError(f"command line: --{name} {options[name]} is not a whole number: pass one")
    count, process_id = int(options["num_processes"]), int(options["process_id"])
    if process_id >= count:
        raise UserError(
            f"command line: --process_id {process_id} is not one of --num_processes {count}: "
            f"they count from 0 to {count - 1}"
        )
    host, _, port = options["coordinator"].rpartition(":")
    if not (host and port.isdigit()):
        raise UserError(
            f"command line: --coordinator {options['coordinator']} is not HOST:PORT: pass, for example, 10.0.0.1:8476"
        )
    return options["coordinator"], count, process_id


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
"""Key in the store of JAX's coordinator under which failed hosts write their errors."""

_POLL_SECONDS, _GRACE_SECONDS = 2.0, 5.0
"""Interval between checks for failures of other hosts, and grace period before this host exits.

In the grace period, this host may fail with its own error, as it does if all hosts find the same mistake.
"""


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Reports an error of this host to the other hosts, and ends this process with status 2 if another host fails.

    Without it, the other hosts would wait for the failed one for minutes, or forever.
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
            except RuntimeError:  # the coordinator is gone; JAX ends this process
                return
            if not failures:
                continue
            if ended.wait(_GRACE_SECONDS):
                return
            key, error = failures[0]
            print(f"error: host {key.rsplit('/')[-1]} has failed: {error}", file=sys.stderr, flush=True)
            jax.distributed.shutdown()  # the failed host waits for it
            os._exit(2)

    watch = threading.Thread(target=end_if_another_fails)
    watch.start()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(RuntimeError):  # the coordinator is gone; the cause is raised below
            store.key_value_set(f"{_FAILURES}/{host}", " ".join(str(error).split()) or type(error).__name__)
        raise
    finally:
        ended.set()
        watch.join()
