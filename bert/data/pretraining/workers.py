"""Processes that build shards, without JAX."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bert.data.pretraining.shards import ShardSpec, build_range
from bert.data.worker_processes import WorkerPool, start_worker
from bert.errors import UserError
from bert.files import write_array, write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def build_shards(tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path, processes: int) -> Iterator[str]:
    """Builds shards and yields their names as they are done; next to each, in ``work``, its summary and
    counts.

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
    text = tokenizer.to_str()  # sent with each call: a process that starts reads its arguments after a second or more
    with WorkerPool(processes, _start) as pool:
        futures = {pool.submit(_build_in_worker, group, text, work): group for group in groups}
        try:
            for future in as_completed(futures):
                future.result()
                yield from (task.name for task in futures[future])
        except BrokenProcessPool:
            raise UserError(
                "a process that builds examples was killed, most likely for lack of memory: run again with "
                f"a smaller data.num_workers than {processes}, what is done is kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def groups_of(tasks: list[ShardSpec]) -> list[list[ShardSpec]]:
    """Duplicates of a shard, which are built together: their text is tokenised once."""
    in_order = sorted(tasks, key=_source_key)
    return [list(group) for _, group in itertools.groupby(in_order, key=_source_key)]


def build_and_record(tasks: list[ShardSpec], tokenizer: Tokenizer, work: Path) -> None:
    """Builds shards of one range of documents, and writes the counts and the summary of each.

    Args:
      tokenizer: as ``bert.tokenizer.vocabulary.literal_tokenizer`` gives it.
    """
    for task, summary, counts in build_range(tasks, tokenizer):
        write_array(work / f"{task.name}.npy", counts)
        # Last: a shard without its summary is built again.
        write_atomic(work / f"{task.name}.json", json.dumps(asdict(summary)).encode())


def _start() -> None:
    # One core a worker: the workers are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start_worker()


@functools.lru_cache(maxsize=1)
def parse_literal_tokenizer(tokenizer: str) -> Tokenizer:
    """The literal tokenizer of a vocabulary in JSON, parsed once in each process."""
    from tokenizers import Tokenizer

    from bert.tokenizer.vocabulary import literal_tokenizer

    return literal_tokenizer(Tokenizer.from_str(tokenizer))


def _source_key(task: ShardSpec) -> tuple[str, int]:
    """What the task reads: duplicates of each other read the same."""
    return str(task.order), task.first


def _build_in_worker(tasks: list[ShardSpec], tokenizer: str, work: Path) -> None:
    build_and_record(tasks, parse_literal_tokenizer(tokenizer), work)
