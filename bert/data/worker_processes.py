"""Worker processes of this machine, and tasks of a Ray cluster.

A task carries what its call reads, and its result comes back to the process that started it. So the nodes share no
disk with that process, and need nothing but this package. Which node makes a call, and how often, changes no result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Self

from bert.errors import UserError, require

_SWAPPING = threading.Lock()
"""Held while another module takes the place of __main__."""

RETRIES = 10
"""How often a call is made again after its worker died; then there is an error."""

TASKS_A_CORE = 2
"""Tasks that are started for each core: one that runs, one that waits with what it reads."""


def available_cores() -> int:
    """Cores this process may use; macOS does not report it, and has all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool(ProcessPoolExecutor):
    """Worker processes: spawned, since a fork of a process with threads may hang.

    In a ``with`` statement, a SIGTERM ends the workers before this process: those that are starting would print a
    traceback after its end.

    Args:
        processes: their number.
        initializer: called in each with ``initargs``; it calls `start_worker`.
    """

    def __init__(self, processes: int, initializer: Callable[..., None], initargs: tuple[Any, ...] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(processes, mp_context=context, initializer=initializer, initargs=initargs)

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._handles_sigterm = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, _terminate)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool | None:
        try:
            return super().__exit__(kind, error, trace)
        finally:
            if self._handles_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the processes that are missing, and hands one of them the call."""
        # A spawned process first runs the file of __main__, here the user's script: without `if __name__ ==
        # "__main__"` it would train a second time. Workers need nothing of it.
        with _SWAPPING:
            script = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                sys.modules["__main__"] = script


def _terminate(*_: object) -> None:
    """Ends the workers, and then this process."""
    if _SWAPPING.locked():  # a worker is starting, which is not known yet: try again soon
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def start_worker() -> None:
    """Prepares a worker process; the ``initializer`` of a pool calls it."""
    # Ctrl-C reaches the whole group: the parent answers it, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for its next task on a pipe it holds both ends of: it would never see its parent die."""
    multiprocessing.connection.wait([require(multiprocessing.parent_process(), "the parent").sentinel])
    os._exit(1)


def run_tasks(
    function: Callable[[Any, Any], Any],
    named_values: Iterable[tuple[str, Any]],
    shared: Any,
    max_tasks: int | None,
    log: Callable[[str], None],
) -> Iterator[tuple[int, Any]]:
    """Calls a function on the cluster that Ray finds, once for each of some values.

    Ray's own rules say which: that of RAY_ADDRESS, else one that runs on this machine, else all cores of this machine.

    Args:
        function: of one of the values, and of ``shared``.
        named_values: names and values; a value is made when there is room for its task.
        shared: sent once to each node.
        max_tasks: calls that are made at once; None takes all cores of the cluster, also those of nodes that join it.
        log: gets a line at the end if calls had to be made again.

    Yields:
        The number of a value, from 0, with what the function returned for it, as it is done.

    Raises:
        UserError: Ray is not installed or cannot be reached, a call raised one, or its workers died too often.
    """
    require_ray()
    import ray

    values = enumerate(named_values)
    done = 0
    with _connection():
        started = ray.remote(_Starts).options(num_cpus=0, scheduling_strategy=_here()).remote()
        task = ray.remote(max_retries=RETRIES)(_call)
        once = ray.put(shared)
        pending: dict[Any, int] = {}
        with _user_errors():
            while True:
                cores = int(ray.cluster_resources().get("CPU", 1))
                room = (max_tasks or TASKS_A_CORE * max(1, cores)) - len(pending)
                for number, (name, value) in itertools.islice(values, max(0, room)):
                    named = task.options(name=name)  # in Ray's dashboard, and as the worker's title
                    pending[named.remote(function, value, once, started)] = number
                if not pending:
                    break
                [ready], _ = ray.wait(list(pending), num_returns=1)
                number = pending.pop(ready)
                result = ray.get(ready)
                done += 1
                yield number, result
            if again := ray.get(started.number.remote()) - done:
                log(f"{again} {'tasks were' if again > 1 else 'task was'} run again, since their workers died")


def require_ray() -> None:
    """Raises UserError if Ray is not installed."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of this name, such as Ray's own in /tmp, is no package
        raise UserError("--engine ray needs Ray, which is not installed: use pip install 'bert-jax[ray]'")


class _Starts:
    """Counts the tasks that began, those of dead workers included; an actor next to the process that started it."""

    def __init__(self) -> None:
        self._number = 0

    def add(self) -> None:
        self._number += 1

    def number(self) -> int:
        return self._number


def _call(function: Callable[[Any, Any], Any], value: Any, shared: Any, started: Any) -> Any:
    """What a task of the cluster does."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    ray.get(started.add.remote())
    return function(value, shared)


@contextlib.contextmanager
def _connection() -> Iterator[None]:
    """A connection to the cluster, kept if there was one before."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anyone
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if named := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):  # Ray itself would wait for minutes
            socket.create_connection((named[1], int(named[2])), timeout=10).close()
        ray.init(log_to_driver=False, logging_level="warning")
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the Ray cluster of {address or 'this machine'} cannot be reached ({str(error).splitlines()[0]}): start "
            "it, or set RAY_ADDRESS to another one"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """What went wrong in a task becomes a UserError: that of the task, or one about its workers."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        if isinstance(error.cause, ImportError):
            raise UserError(
                f"a node of the Ray cluster lacks a package ({error.cause}): install one version of bert-jax on all "
                "nodes"
            ) from None
        raise
    except RayError as error:
        raise UserError(
            f"Ray could not complete a task after {RETRIES} retries ({str(error).splitlines()[0]}): run again, "
            "finished shards are kept"
        ) from None


def _here() -> Any:
    """The place of an actor that must live as long as this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
