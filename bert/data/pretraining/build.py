"""Builds the examples of a corpus on disk: plans the shards, has workers build them, and writes the index.

    documents -> store -> random order -> held-out share | shards -> one worker per shard -> index.json

The folder of a set is named by the hash of everything that determines its content. A set is complete when
``index.json`` exists; an interrupted build resumes with the missing shards. Each worker holds one shard in memory. The
bytes depend neither on the number of workers nor on interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.config import DataConfig
from bert.data.cache import WORK, CacheCopy, cache_copy, cache_folder
from bert.data.corpus import document_store
from bert.data.corpus.document_store import DocumentStore
from bert.data.corpus.document_stream import HEAD_CHARACTERS, head_documents, stream_files
from bert.data.corpus.documents import numbered_documents
from bert.data.corpus.files import Document, reading
from bert.data.corpus.filters import Filters, make_filters
from bert.data.pretraining import workers
from bert.data.pretraining.dataset import (
    COUNTS,
    INDEX,
    PretrainingDataset,
    dataset_settings,
    file_sha256,
    open_examples,
    verify_checksums,
)
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.data.pretraining.shards import ShardSpec, ShardSummary, row_settings
from bert.data.worker_processes import Engine, available_cores
from bert.errors import LOGGER, UserError, require
from bert.files import blocking_lock, load_json, write_array, write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[str, int, int | None], None]
"""Called with the current stage, the number of finished units, and their total if known."""

SHARD_BYTES = 4 << 20
"""Bytes of text per shard: about 9,000 rows of 128 tokens, and 60 MB of memory while it is built."""

COUNTED_ONCE = ("documents", "sentences", "tokens", "single_sentence_documents")
"""Counts of the text, which are equal for all duplicates of a shard."""

COUNTED = (*COUNTED_ONCE, "rows", "unused_tokens", "positive_rows")
"""Counts of shards that are summed for a split."""

WAITING = "waiting for another process that builds the same examples"


def build_examples(
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    engine: Engine = "local",
) -> PretrainingDataset:
    """Returns the examples of a corpus, from the cache if they have been built before.

    For a stream, only the examples of its head (for counts) and the held-out ones are built.

    Args:
      tokenizer: special tokens spelled out in the corpus are read as ordinary text.
      cache_dir: default: ``config.cache_dir``, and without it bert-jax/examples in the user's cache folder. If
        ``config.cache_dir`` is a URL, sets are also copied there.
      engine: build the shards by processes of this machine (local) or tasks of a Ray cluster (ray).

    Raises:
      UserError: an unreadable or empty corpus, too few documents, a damaged set, a cache that cannot be written, or no
        cluster.
    """
    progress = progress or (lambda stage, done, total: None)
    folder, settings = _dataset_folder(config, tokenizer, cache_dir, progress)
    copy = None if cache_dir else cache_copy(config, folder, INDEX)
    if not (folder / INDEX).exists():
        with _write_errors(folder), blocking_lock(folder, lambda: progress(WAITING, 0, None)):
            if not (folder / INDEX).exists() and not (copy and copy.download()):
                tasks = _shard_tasks(folder, config, progress, engine)
                _build(tasks, tasks, folder, config, tokenizer, progress, engine)
                _merge(tasks, folder, config, settings)
    return _open(folder, copy)


def build_shard_subset(
    config: DataConfig,
    tokenizer: Tokenizer,
    subset: tuple[int, int],
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> PretrainingDataset | None:
    """Builds every n-th shard of a set, so that n processes that share only the cache folder, or its copy, build a set.

    They may start at any time and on any machine. The first one stores the text while the others wait; the last one
    writes the index.

    Args:
      config, tokenizer, cache_dir, progress: see ``build_examples``; equal in all processes.
      subset: (i, n), i from 1 to n.

    Returns:
      The set, or None while shards of other processes are missing. ``build_examples`` would build the missing shards.
    """
    progress = progress or (lambda stage, done, total: None)
    folder, settings = _dataset_folder(config, tokenizer, cache_dir, progress)
    shard, shard_count = subset
    index, copy = folder / INDEX, None if cache_dir else cache_copy(config, folder, INDEX)
    if not index.exists() and not (copy and copy.download()):
        with _write_errors(folder):
            with blocking_lock(folder, lambda: progress(WAITING, 0, None)):
                tasks = [] if index.exists() else _shard_tasks(folder, config, progress)
            # Duplicates of a shard have the same number, so that their text is tokenized once.
            own_tasks = [task for task in tasks if int(task.name[-5:]) % shard_count == shard - 1]
            try:
                _build(own_tasks, tasks, folder, config, tokenizer, progress)
            except FileNotFoundError:
                if not index.exists():  # otherwise another process has built everything and removed its work folder
                    raise
            if copy:
                files, own = ([name for task in some for name in task.files] for some in (tasks, own_tasks))
                copy.exchange(own, files)
            with blocking_lock(folder, lambda: progress(WAITING, 0, None)):
                if not index.exists():
                    if any(_read_finished(task, folder / WORK) is None for task in tasks):
                        return None
                    _merge(tasks, folder, config, settings)
    return _open(folder, copy)


def _open(folder: Path, copy: CacheCopy | None) -> PretrainingDataset:
    """Opens and verifies a finished set, and uploads it to its copy."""
    dataset = verify_checksums(open_examples(folder))
    if copy:
        copy.upload()
    return dataset


def _dataset_folder(
    config: DataConfig, tokenizer: Tokenizer, cache_dir: Path | None, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of the set, which may not exist yet, and the settings that determine its name."""
    config.check()
    cache = cache_folder(config, cache_dir)
    progress("fingerprinting the corpus", 0, None)
    settings = dataset_settings(config, cache, tokenizer, SHARD_BYTES)
    return cache / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32], settings


def examples_name(config: DataConfig, tokenizer: Tokenizer, progress: Progress) -> str:
    """Returns the name of the set's folder, a hash of everything that determines the examples, and builds nothing.

    Raises:
      UserError: the corpus is unreadable.
    """
    return _dataset_folder(config, tokenizer, None, progress)[0].name


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Creates the folder, and converts an OSError inside the block into UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        fix = "make room there, or name another folder with data.cache_dir"
        raise UserError(f"the examples cannot be written to {folder} ({error.strerror or error}): {fix}") from None


def _build(
    tasks: list[ShardSpec],
    every: list[ShardSpec],
    folder: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress,
    engine: Engine = "local",
) -> None:
    """Builds the missing shards of ``tasks``, a subset of ``every``."""
    work = folder / WORK
    missing = [task for task in tasks if _read_finished(task, work) is None]
    done = len(tasks) - len(missing)
    progress("building examples", done, len(tasks))
    if engine == "ray":
        names = workers.build_shards_on_ray(
            missing, tokenizer, work, config.num_workers, lambda line: progress(line, 0, None)
        )
    else:
        # A process takes a second to start, which pays off for a shard of text or more.
        text = sum({task.store.folder: task.store.number_of_bytes for task in missing}.values())
        own_text = text * len(tasks) / max(1, len(every))
        cores = config.num_workers or available_cores()
        number_of_workers = min(cores, len(missing), round(own_text / SHARD_BYTES))
        names = workers.build_shards(missing, tokenizer, work, number_of_workers)
    for _ in names:
        done += 1
        progress("building examples", done, len(tasks))


def _merge(tasks: list[ShardSpec], folder: Path, config: DataConfig, settings: dict[str, Any]) -> None:
    """Writes the index of a set whose shards are finished. The caller must hold the set's lock."""
    work = folder / WORK
    summaries = {task.name: require(_read_finished(task, work), task.name) for task in tasks}
    splits = {
        split: [asdict(summary) for name, summary in summaries.items() if name.startswith(split)]
        for split in ("train", "eval")
    }
    _warn_of_empty_documents(tasks, summaries)
    counts = sum(np.load(work / f"{name}.npy") for name in summaries if name.startswith("train"))
    write_array(folder / COUNTS, counts)
    counted = _counts(splits, config.dupe_factor)
    index = {
        "settings": settings,
        "vocab_size": len(counts),
        "counts": counted,
        "unigram_counts": {
            "file": COUNTS,
            "size": (folder / COUNTS).stat().st_size,
            "sha256": file_sha256(folder / COUNTS),
        },
        **splits,
    }
    if filtered := next(task for task in tasks if task.name.startswith("train")).store.filtered:
        index["filtered"] = filtered
    write_atomic(folder / INDEX, json.dumps(index, indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    for leftover in folder.glob(".*"):  # temporary files of killed workers
        leftover.unlink(missing_ok=True)


def _warn_of_empty_documents(tasks: list[ShardSpec], summaries: dict[str, ShardSummary]) -> None:
    """Logs a warning about documents without tokens, such as lone accents."""
    if empty := sum(
        task.last - task.first - summaries[task.name].documents
        for task in (group[0] for group in workers.groups_of(tasks))
    ):
        are = "document has" if empty == 1 else "documents have"
        LOGGER.warning(f"warning: {empty:,} {are} no token and no row: only characters that the vocabulary removes")


def _shard_tasks(folder: Path, config: DataConfig, progress: Progress, engine: Engine = "local") -> list[ShardSpec]:
    """Returns the shards of a set, a function of corpus, seed and held-out share. The caller must hold the lock."""
    work, minimum = folder / WORK, INPUT_FORMATS[config.input_format].documents
    tasks = []
    for split, (store, order) in _split_documents(work, config, minimum, progress, engine).items():
        if split == "train" and config.mixture_weights is not None and not config.streaming:
            order = store.mixture_order(order, config.mixture_weights, config.seed)
        if len(order) < minimum:
            raise _too_few_documents(f"data.{split}", store.number_of_documents, config, store.num_filtered)
        order_file = work / f"{split}-order.npy"
        if not order_file.exists():  # identical in all processes, and another one may be reading it
            write_array(order_file, order)
        ranges = list(enumerate(store.shard_ranges(order, SHARD_BYTES)))
        duplicates = range(config.dupe_factor if split == "train" else 1)
        # Held-out rows are never packed, so that packed and unpacked runs can be compared.
        settings = row_settings(config, packing=split == "train")
        for duplicate, (shard, (first, last)) in itertools.product(duplicates, ranges):
            name = f"{split}-{duplicate}-{shard:05d}" if duplicate else f"{split}-{shard:05d}"
            tasks.append(ShardSpec(name, folder, store, order_file, first, last, settings))
    return tasks


def _split_documents(
    work: Path, config: DataConfig, minimum: int, progress: Progress, engine: Engine
) -> dict[str, tuple[DocumentStore, np.ndarray]]:
    """Returns the documents of each split (held-out first) and their random order, without repetitions.

    Raises:
      UserError: a split has fewer than ``minimum`` documents.
    """
    filters = None if config.streaming else make_filters(config)
    if config.streaming:
        documents = head_documents(stream_files(config.train), config, HEAD_CHARACTERS)
    else:
        documents = numbered_documents(config.train, **reading(config))
    train = _open_or_write_store(work / "documents", documents, "data.train", progress, filters, engine)
    order = train.order(config.seed)
    if config.eval is not None:
        documents = numbered_documents(config.eval, **reading(config))
        held_out = _open_or_write_store(work / "documents-eval", documents, "data.eval", progress)
        return {"eval": (held_out, held_out.order(config.seed)), "train": (train, order)}
    count = max(minimum, round(config.eval_fraction * train.number_of_documents))
    if (left := train.number_of_documents - count) < minimum:
        if train.number_of_documents >= 2 * minimum:
            raise UserError(
                f"data.eval_fraction is {config.eval_fraction:g}, which leaves {left} of the "
                f"{train.number_of_documents} documents of data.train to train on, but {minimum} are needed: lower it, "
                "or set data.eval"
            )
        raise _too_few_documents("data.train", train.number_of_documents, config, train.num_filtered)
    return {"eval": (train, order[:count]), "train": (train, order[count:])}


def require_documents(config: DataConfig) -> None:
    """Raises UserError if a corpus has too few documents. Reads only as many as needed; streams are not read."""
    minimum = INPUT_FORMATS[config.input_format].documents
    sources = [] if config.streaming else [("data.train", config.train, minimum * (1 if config.eval else 2))]
    if config.eval is not None:
        sources.append(("data.eval", config.eval, minimum))
    for key, source, needed in sources:
        count = sum(1 for _ in itertools.islice(numbered_documents(source, **reading(config)), needed))
        if count < needed:
            raise _too_few_documents(key, count, config)


def _too_few_documents(key: str, count: int, config: DataConfig, num_filtered: int = 0) -> UserError:
    needed, reason = INPUT_FORMATS[config.input_format].documents, ""
    if key == "data.train" and config.eval is None:
        parts = "two to train on and two to hold out" if needed == 2 else "one to train on and one to hold out"
        reason = f", {parts}{' (next-sentence pairs draw from another document)' if needed == 2 else ''}"
        needed *= 2
    elif needed == 2:
        reason = ", since next-sentence pairs draw from another document"
    fix = "an empty line separates documents, or set data.document_per_line if each line is one"
    if config.verbatim:
        fix = "with data.verbatim each text file is one document: add files, or set data.eval"
    elif config.document_per_line:
        fix = "with data.document_per_line each line is one: add lines"
    documents = f"{count} document{'s' * (count != 1)}"
    if num_filtered:
        documents += f" after its filters left out {num_filtered:,}"
        fix = "use other data.filters or more text"
    return UserError(f"{key} holds {documents}: at least {needed} are needed{reason}; {fix}")


def _open_or_write_store(
    folder: Path,
    documents: Iterable[tuple[int, Document]],
    key: str,
    progress: Progress,
    filters: Filters | None = None,
    engine: Engine = "local",
) -> DocumentStore:
    if store := document_store.open_store(folder):
        return store
    return document_store.write_store(
        documents, folder, lambda count: progress(f"reading {key}", count, None), filters, engine
    )


def _counts(splits: dict[str, list[dict[str, Any]]], dupe_factor: int) -> dict[str, int]:
    counts = {f"{split}_{name}": sum(x[name] for x in shards) for split, shards in splits.items() for name in COUNTED}
    for name in COUNTED_ONCE:
        counts[f"train_{name}"] //= dupe_factor
    return counts


def _read_finished(task: ShardSpec, work: Path) -> ShardSummary | None:
    """Returns the summary of a shard if it is complete on disk, else None."""
    try:
        summary = ShardSummary(**load_json((work / f"{task.name}.json").read_text(encoding="utf-8")))
        is_whole = file_sha256(task.file) == summary.sha256
    except (OSError, ValueError, TypeError):
        return None
    return summary if is_whole else None
