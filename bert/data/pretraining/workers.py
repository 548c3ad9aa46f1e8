"""Runs the builds of shards, in processes of this machine or as tasks of a Ray cluster."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.data.corpus.document_store import write_store
from bert.data.corpus.files import Document
from bert.data.pretraining.shards import ShardSpec, build_range
from bert.data.worker_processes import WorkerPool, run_tasks, start_worker
from bert.errors import Log, UserError
from bert.files import write_array, write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def build_shards(tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path, processes: int) -> Iterator[str]:
    """Builds shards, and yields the name of each when it is done. Summaries and counts are written to ``work``.

    Raises:
      UserError: a shard cannot be built, or a worker was killed.
    """
    from bert.tokenizer.vocabulary import literal_tokenizer

    groups = groups_of(tasks)
    if processes <= 1:
        plain = literal_tokenizer(tokenizer)
        for group in groups:
            build_and_record(group, plain, work)
            yield from (task.name for task in group)
        return
    text = tokenizer.to_str()  # sent with each call, so that starting a process does not wait for it
    with WorkerPool(processes, _start) as pool:
        futures = {pool.submit(_build_in_worker, group, text, work): group for group in groups}
        try:
            for future in as_completed(futures):
                future.result()
                yield from (task.name for task in futures[future])
        except BrokenProcessPool:
            raise UserError(
                "a process that builds examples was killed, most likely for lack of memory: run again with "
                f"a smaller data.num_workers than {processes}, finished shards are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def groups_of(tasks: list[ShardSpec]) -> list[list[ShardSpec]]:
    """Groups the duplicates of a shard, so that their text is tokenized once."""
    groups: dict[tuple[str, int], list[ShardSpec]] = {}
    for task in tasks:
        groups.setdefault((str(task.order), task.first), []).append(task)
    return [groups[key] for key in sorted(groups)]


def build_and_record(tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path) -> None:
    """Builds shards of one range of documents by a `literal_tokenizer`, and writes their counts and summaries."""
    for task, summary, counts in build_range(tasks, tokenizer):
        write_array(work / f"{task.name}.npy", counts)
        # Written last: a shard without a summary is built again.
        write_atomic(work / f"{task.name}.json", json.dumps(asdict(summary)).encode())


def _start() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    start_worker()


@functools.lru_cache(maxsize=1)
def parse_literal_tokenizer(tokenizer: str) -> Tokenizer:
    """Returns the literal tokenizer of a tokenizer.json, parsed once per process."""
    from tokenizers import Tokenizer

    from bert.tokenizer.vocabulary import literal_tokenizer

    return literal_tokenizer(Tokenizer.from_str(tokenizer))


def _build_in_worker(tasks: list[ShardSpec], tokenizer: str, work: Path) -> None:
    build_and_record(tasks, parse_literal_tokenizer(tokenizer), work)


@dataclasses.dataclass(frozen=True)
class ShardText:
    """The input of a Ray task: everything from which the shards of one range of documents are built.

    Attributes:
        tasks: shards that are duplicates of each other.
        documents: the distinct documents, each with the index of its source.
        order: indices into ``documents`` in the order of the range; a document may occur several times.
    """

    tasks: list[ShardSpec]
    documents: list[tuple[int, Document]]
    order: np.ndarray


def build_shards_on_ray(
    tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path, max_tasks: int | None, log: Log
) -> Iterator[str]:
    """Builds shards like `build_shards`, on a Ray cluster. See `run_tasks` for ``max_tasks``, ``log`` and errors."""
    groups = groups_of(tasks)
    texts = ((group[0].name, text_of(group)) for group in groups)
    for number, files in run_tasks(_build_on_ray, texts, tokenizer.to_str(), max_tasks, log):
        _write_files(files, groups[number], work)
        yield from (task.name for task in groups[number])


def text_of(group: list[ShardSpec]) -> ShardText:
    """Reads the documents of duplicates of a shard from their store."""
    task = group[0]
    indices = np.load(task.order, mmap_mode="r")[task.first : task.last]
    different, order = np.unique(indices, return_inverse=True)
    sources = task.store.sources()[different].tolist()
    return ShardText(group, list(zip(sources, task.store.read(different), strict=True)), order)


def build_from_text(text: ShardText, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Builds shards by a `literal_tokenizer`. Returns the contents of their files by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = write_store(text.documents, folder / "documents", lambda number: None)
        np.save(folder / "order.npy", text.order)
        span: dict[str, Any] = {"order": folder / "order.npy", "first": 0, "last": len(text.order)}
        here = [dataclasses.replace(task, folder=folder, store=store, **span) for task in text.tasks]
        build_and_record(here, tokenizer, folder)
        names = [f"{task.name}{ending}" for task in text.tasks for ending in (".arrow", ".npy", ".json")]
        return {name: (folder / name).read_bytes() for name in names}


def _build_on_ray(text: ShardText, tokenizer: str) -> dict[str, bytes]:
    return build_from_text(text, parse_literal_tokenizer(tokenizer))


def _write_files(files: dict[str, bytes], group: list[ShardSpec], work: Path) -> None:
    """Writes the files of shards. Summaries come last, because a shard without one is built again."""
    folder = group[0].folder
    for name, data in files.items():
        write_atomic((folder if name.endswith(".arrow") else work) / name, data)
