"""Shards built by the tasks of a Ray cluster. A task carries the text of its shard, and its files come back."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert.data.corpus.document_store import write_store
from bert.data.corpus.files import Document
from bert.data.pretraining.shards import ShardSpec
from bert.data.pretraining.workers import build_and_record, groups_of, parse_literal_tokenizer
from bert.data.ray_tasks import run_tasks
from bert.files import write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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

    Args:
        most, say: as of `bert.data.ray_tasks.run_tasks`; ``most`` is a number of shards.

    Raises:
        UserError: a shard cannot be built, or as of `run_tasks`.
    """
    groups = groups_of(tasks)
    given = ((group[0].name, text_of(group)) for group in groups)
    for number, files in run_tasks(_build, given, tokenizer.to_str(), most, say):
        _write(files, groups[number], work)
        yield from (task.name for task in groups[number])


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
        tokenizer: as `bert.tokenizer.vocabulary.literal_tokenizer` gives it.
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


def _build(given: ShardText, tokenizer: str) -> dict[str, bytes]:
    """What a task of the cluster does."""
    return build_from_text(given, parse_literal_tokenizer(tokenizer))


def _write(files: dict[str, bytes], group: list[ShardSpec], work: Path) -> None:
    """Writes the files of shards; the summaries last, as a shard without one is built again."""
    folder = group[0].folder
    for name, data in files.items():
        write_atomic((folder if name.endswith(".arrow") else work) / name, data)
