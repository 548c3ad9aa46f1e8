"""Shards built by the tasks of a Ray cluster: its scheduling, its retries, its progress.

A task carries the text of its shard, and its files come back to the process that started it. So the nodes share no
disk with that process, and need nothing but this package. Which node builds a shard, and how often, changes no byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.data.corpus.document_store import write_store
from bert.data.corpus.files import Document
from bert.data.pretraining.shards import ShardSpec
from bert.data.pretraining.workers import build_and_record, groups_of
from bert.errors import UserError
from bert.files import write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RETRIES = 10
"""How often a shard is built again after its worker died; then the build ends with an error."""

TASKS_A_CORE = 2
"""Tasks that are started for each core: one that runs, one that waits with its text."""


@dataclasses.dataclass(frozen=True)
class ShardText:
    """All that the shards of one range of documents are built from, besides the tokenizer.

    Attributes:
        tasks: duplicates of each other, which read the same documents.
        documents: each different one with the number of its source.
        order: their numbers in the order of the range, where one may occur several times.
    """

    tasks: list[ShardSpec]
    documents: list[tuple[int, Document]]
    order: np.ndarray


def build_shards(
    tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path, most: int | None, say: Callable[[str], None]
) -> Iterator[str]:
    """As `bert.data.pretraining.workers.build_shards`, by the cluster that Ray finds.

    Ray's own rules say which: that of RAY_ADDRESS, else one that runs on this machine, else all cores of this machine.

    Args:
        most: shards that are built at once; None takes all cores of the cluster, also those of nodes that join it.
        say: gets a line at the end if shards had to be built again.

    Raises:
        UserError: Ray is not installed or cannot be reached, a shard cannot be built, or its workers died too often.
    """
    require_ray()
    import ray

    groups = iter(groups_of(tasks))
    built = 0
    with _connection():
        started = ray.remote(_Starts).options(num_cpus=0, scheduling_strategy=_here()).remote()
        build = ray.remote(max_retries=RETRIES)(_build)
        vocabulary = ray.put(tokenizer.to_str())
        pending: dict[Any, list[ShardSpec]] = {}
        with _user_errors():
            while True:
                cores = int(ray.cluster_resources().get("CPU", 1))
                room = (most or TASKS_A_CORE * max(1, cores)) - len(pending)
                for group in itertools.islice(groups, max(0, room)):
                    named = build.options(name=group[0].name)  # in Ray's dashboard, and as the worker's title
                    pending[named.remote(text_of(group), vocabulary, started)] = group
                if not pending:
                    break
                [ready], _ = ray.wait(list(pending), num_returns=1)
                group = pending.pop(ready)
                _write(ray.get(ready), group, work)
                built += 1
                yield from (task.name for task in group)
            if again := ray.get(started.number.remote()) - built:
                say(f"{again} {'tasks were' if again > 1 else 'task was'} run again, since their workers died")


def require_ray() -> None:
    """Raises UserError if Ray is not installed."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of this name, such as Ray's own in /tmp, is no package
        raise UserError("--engine ray needs Ray, which is not installed: use pip install 'bert-jax[ray]'")


def text_of(group: list[ShardSpec]) -> ShardText:
    """The documents of shards that read the same ones, from their store."""
    task = group[0]
    indices = np.load(task.order, mmap_mode="r")[task.first : task.last]
    different, order = np.unique(indices, return_inverse=True)
    sources = task.store.sources()[different].tolist()
    return ShardText(group, list(zip(sources, task.store.read(different), strict=True)), order)


def build_from_text(given: ShardText, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of the shards, by their names.

    Args:
        tokenizer: as `bert.tokenizer.wordpiece.literal_tokenizer` gives it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = write_store(given.documents, folder / "spool", lambda number: None)
        np.save(folder / "order.npy", given.order)
        here = [
            dataclasses.replace(
                task, folder=folder, store=store, order=folder / "order.npy", first=0, last=len(given.order)
            )
            for task in given.tasks
        ]
        build_and_record(here, tokenizer, folder)
        names = [f"{task.name}{ending}" for task in given.tasks for ending in (".arrow", ".npy", ".json")]
        return {name: (folder / name).read_bytes() for name in names}


class _Starts:
    """Counts the tasks that began, those of dead workers included; an actor next to the process that started it."""

    def __init__(self) -> None:
        self._number = 0

    def add(self) -> None:
        self._number += 1

    def number(self) -> int:
        return self._number


def _build(given: ShardText, tokenizer: str, started: Any) -> dict[str, bytes]:
    """What a task of the cluster does."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    ray.get(started.add.remote())
    return build_from_text(given, _parsed(tokenizer))


@functools.lru_cache(maxsize=1)
def _parsed(tokenizer: str) -> Tokenizer:
    """Parsed once a worker process."""
    from tokenizers import Tokenizer

    from bert.tokenizer.wordpiece import literal_tokenizer

    return literal_tokenizer(Tokenizer.from_str(tokenizer))


def _write(files: dict[str, bytes], group: list[ShardSpec], work: Path) -> None:
    """Writes the files of shards; the summaries last, as a shard without one is built again."""
    folder = group[0].folder
    for name, data in files.items():
        write_atomic((folder if name.endswith(".arrow") else work) / name, data)


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
            f"Ray could not build a shard after {RETRIES} retries ({str(error).splitlines()[0]}): run again, what is "
            "done is kept"
        ) from None


def _here() -> Any:
    """The place of an actor that must live as long as this process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
