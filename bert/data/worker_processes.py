"""Worker processes on this machine, and tasks on a Ray cluster.

A Ray task carries its inputs and returns its result to the process that started it. The nodes therefore share no disk
with that process and need only this package. Results do not depend on which node runs a task, or how often.
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
from typing import Any, Literal, Self

from bert.errors import Log, UserError, require

Engine = Literal["local", "ray"]
"""Processes of this machine, or tasks of a Ray cluster."""

_SWAPPING = threading.Lock()
"""Held while __main__ is replaced by an empty module."""

RETRIES = 10
"""Maximum number of retries of a task whose worker died."""

TASKS_A_CORE = 2
"""Tasks submitted per core: one that runs and one that waits with its inputs."""


def available_cores() -> int:
    """Returns the number of cores that this process may use; all cores where the system does not report it (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool(ProcessPoolExecutor):
    """A pool of spawned processes, because forking a process with threads may hang.

    In a ``with`` statement, SIGTERM ends the workers before this process. Otherwise workers that are still starting
    would print a traceback.

    Args:
        initializer: called in each process with ``initargs``; it must call `start_worker`.
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
        """Submits a call, and starts missing processes."""
        # A spawned process first runs the file of __main__, the user's script. Without `if __name__ == "__main__"` it
        # would train a second time.
        with _SWAPPING:
            script = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                sys.modules["__main__"] = script


def _terminate(*_: object) -> None:
    """Ends the workers, then this process."""
    if _SWAPPING.locked():  # a worker that is starting is not listed yet: try again soon
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def start_worker() -> None:
    """Prepares a worker process; to be called by the ``initializer`` of a pool."""
    # Ctrl-C reaches the whole process group. The parent handles it and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker with its parent. The pipe would stay open, because the worker holds both of its ends."""
    multiprocessing.connection.wait([require(multiprocessing.parent_process(), "the parent").sentinel])
    os._exit(1)


def run_tasks(
    function: Callable[[Any, Any], Any],
    named_values: Iterable[tuple[str, Any]],
    shared: Any,
    max_tasks: int | None,
    log: Log,
) -> Iterator[tuple[int, Any]]:
    """Calls a function for each of some values on a Ray cluster.

    Ray selects the cluster: RAY_ADDRESS, else one that runs on this machine, else all cores of this machine.

    Args:
        function: called as ``function(value, shared)``.
        named_values: (name, value) pairs; a value is computed when its task can be submitted.
        shared: sent once to each node.
        max_tasks: maximum number of concurrent calls. None: use all cores of the cluster, including nodes that join.
        log: receives a line at the end if tasks were retried.

    Yields:
        The index of a value and the function's result, in order of completion.

    Raises:
        UserError: Ray is not installed or cannot be reached, a call raised a UserError, or its workers died too often.
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
                    named = task.options(name=name)  # shown in Ray's dashboard, and as the worker's title
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
    if spec is None or spec.origin is None:  # a folder of this name, such as Ray's in /tmp, is not a package
        raise UserError("--engine ray needs Ray, which is not installed: use pip install 'bert-jax[ray]'")


class _Starts:
    """Actor that counts the started tasks, including tasks whose worker died."""

    def __init__(self) -> None:
        self._number = 0

    def add(self) -> None:
        self._number += 1

    def number(self) -> int:
        return self._number


def _call(function: Callable[[Any, Any], Any], value: Any, shared: Any, started: Any) -> Any:
    """Runs as a Ray task: calls a function."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    ray.get(started.add.remote())
    return function(value, shared)


@contextlib.contextmanager
def _connection() -> Iterator[None]:
    """Connects to the cluster; an existing connection is used and stays open."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if named := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):  # fails immediately; Ray would wait for minutes
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
    """Converts errors of Ray and UserErrors of tasks into UserError."""
    from ray.exceptions import RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        if isinstance(error.cause, ImportError):
            fix = "install one version of bert-jax on all nodes"
            raise UserError(f"a node of the Ray cluster lacks a package ({error.cause}): {fix}") from None
        raise
    except RayError as error:
        raise UserError(
            f"Ray could not complete a task after {RETRIES} retries ({str(error).splitlines()[0]}): run again, "
            "finished shards are kept"
        ) from None


def _here() -> Any:
    """Returns the scheduling strategy of an actor that must live on the node of this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
