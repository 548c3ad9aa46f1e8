"""Corpus -> examples of an input format on disk, built once and found again.

    documents -> store -> random order -> held-out share | shards -> one worker a shard -> index.json

A set of examples is a folder named by the hash of all that decides its content. Until ``index.json`` stands
in it, it is not a set: a build that was killed resumes with the missing shards. Memory holds one
shard a worker, whatever the size of the corpus; the bytes do not depend on the number of workers, or on how
often it was killed.
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bert.config import DataConfig
from bert.data.cache import WORK, CacheCopy, cache_copy, cache_folder
from bert.data.corpus import document_store
from bert.data.corpus.document_store import DocumentStore, NearDuplicateFilter
from bert.data.corpus.document_stream import (
    HEAD_CHARACTERS,
    HEAD_VERSION,
    head_documents,
    stream_files,
    stream_fingerprint,
)
from bert.data.corpus.documents import corpus_fingerprint, numbered_documents, resolve_sources
from bert.data.corpus.files import Document, reading
from bert.data.encoding import RowTemplate, row_template
from bert.data.pretraining import workers
from bert.data.pretraining.dataset import (
    COUNTS,
    INDEX,
    PretrainingDataset,
    file_sha256,
    open_examples,
    verify_checksums,
)
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.data.pretraining.shards import ShardSpec, ShardSummary, row_settings
from bert.data.worker_processes import available_cores
from bert.errors import LOGGER, UserError, require
from bert.files import blocking_lock, load_json, write_array, write_atomic
from bert.tokenizer.library import keeps_spaces
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import tokenizer_fingerprint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[str, int, int | None], None]
"""Called as (what is being done, how many are done, of how many where that is known)."""

Engine = Literal["local", "ray"]

CACHE_VERSION = 2
"""Part of the key: raise it where the same text would give other rows."""

SHARD_BYTES = 4 << 20
"""Text of a shard: about 9,000 rows of 128 tokens, some 60 MB of memory while it is built."""

COUNTED_ONCE = ("documents", "sentences", "tokens", "single_sentence_documents")
"""Counts of the text, which all duplicates of a shard share."""

COUNTED = (*COUNTED_ONCE, "rows", "unused_tokens", "positive_rows")
"""Counts of a shard that are summed for a split."""

WAITING = "waiting for another process that builds the same examples"


def build_examples(
    config: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    engine: Engine = "local",
) -> PretrainingDataset:
    """The examples of a corpus: from the cache where they were built before. Of a stream, those of its head alone, for
    the counts, next to the held-out ones.

    Args:
      config: corpus, lengths, seed, workers; its ``cache_dir`` is used where the argument is None, and
        without either the folder bert-jax/examples in the user's cache folder. A URL there is that of its copy.
      tokenizer: special tokens spelled out in the corpus are ordinary text to it
        (`bert.tokenizer.vocabulary.literal_tokenizer`).
      progress: called with how much is done.
      engine: what builds the shards: processes of this machine (local), or the tasks of a Ray cluster (ray). The set is
        the same.

    Raises:
      UserError: an unreadable or empty corpus, too few documents, a damaged set, a cache that cannot be
        written, no cluster.
    """
    progress = progress or _silent
    folder, settings = _dataset_folder(config, tokenizer, cache_dir, progress)
    copy = None if cache_dir else cache_copy(config, folder, INDEX)
    if not (folder / INDEX).exists():
        with _write_errors(folder), blocking_lock(folder, lambda: progress(WAITING, 0, None)):
            if not (folder / INDEX).exists() and not (copy and copy.download()):
                tasks = _shard_tasks(folder, config, progress)
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
    """Builds every n-th shard of a set, so that n processes that share only the cache folder, or its copy, build all of
    it.

    They may start at any time and on any machine. The first stores the text while the others wait; which of them ends
    last puts the set together.

    Args:
      config, tokenizer, cache_dir, progress: as of ``build_examples``, the same for all.
      subset: (i, n), i from 1 to n.

    Returns:
      The set, or None while shards of others are missing. ``build_examples`` then builds those.
    """
    progress = progress or _silent
    folder, settings = _dataset_folder(config, tokenizer, cache_dir, progress)
    shard, shard_count = subset
    index, copy = folder / INDEX, None if cache_dir else cache_copy(config, folder, INDEX)
    if not index.exists() and not (copy and copy.download()):
        with _write_errors(folder):
            with blocking_lock(folder, lambda: progress(WAITING, 0, None)):
                tasks = [] if index.exists() else _shard_tasks(folder, config, progress)
            # Duplicates of a shard have its number: their text is tokenised once.
            own_tasks = [task for task in tasks if int(task.name[-5:]) % shard_count == shard - 1]
            try:
                _build(own_tasks, tasks, folder, config, tokenizer, progress)
            except FileNotFoundError:
                if not index.exists():  # else another process has built everything, and cleared its work away
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
    """Opens a finished set, and copies it where others find it."""
    dataset = verify_checksums(open_examples(folder))
    if copy:
        copy.upload()
    return dataset


def _dataset_folder(
    config: DataConfig, tokenizer: Tokenizer, cache_dir: Path | None, progress: Progress
) -> tuple[Path, dict[str, Any]]:
    """The folder of the set, which may not exist yet, and the settings that name it."""
    config.check()
    cache = cache_folder(config, cache_dir)
    progress("fingerprinting the corpus", 0, None)
    settings = _settings(config, cache, tokenizer_fingerprint(tokenizer)) | _layout(config, tokenizer)
    return cache / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32], settings


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Makes the folder; what the system refuses there becomes a UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"the examples cannot be written to {folder} ({error.strerror or error}): "
            "make room there, or name another folder with data.cache_dir"
        ) from None


def _settings(config: DataConfig, cache: Path, tokenizer: str) -> dict[str, Any]:
    """All that decides the rows, and nothing else: masking, workers and names of files do not.

    Later settings are in it only if they are set, so that sets built before them are still found.
    """
    settings = {
        "format": CACHE_VERSION,
        "corpus": training_fingerprint(config, cache),
        "eval_corpus": None if config.eval is None else corpus_fingerprint(config.eval, cache),
        "held_out": config.eval_fraction if config.eval is None else None,
        "tokenizer": tokenizer,
        "sequence_length": config.sequence_length,
        "short_seq_prob": config.short_seq_prob if INPUT_FORMATS[config.input_format].uses_short_sequences else None,
        "one_sentence_per_line": config.one_sentence_per_line,
        "language": None if config.one_sentence_per_line else config.language,
        "seed": config.seed,
        "shard_bytes": SHARD_BYTES,
    }
    if config.input_format != "nsp":
        settings["objective"] = config.input_format
    if config.near_duplicates is not None:
        settings["near_duplicates"] = config.near_duplicates
    if config.verbatim:
        settings["verbatim"] = True
    if config.document_per_line:
        settings["document_per_line"] = True
    if config.text_field != "text":
        settings["text_field"] = config.text_field
    if config.streaming:
        settings["stream"] = [HEAD_VERSION, HEAD_CHARACTERS, config.stream_readers, config.mixture_weights]
    elif config.mixture_weights is not None or (isinstance(config.language, list) and not config.one_sentence_per_line):
        settings["weights"] = config.mixture_weights
        settings["files"] = [len(places) for places in resolve_sources(config.train)]
        settings["eval_files"] = None if config.eval is None else [len(paths) for paths in resolve_sources(config.eval)]
    if config.dupe_factor > 1:
        settings["duplicates"] = config.dupe_factor
    if config.packing:
        settings["max_examples_per_row"] = config.max_sequences_per_pack
    return settings


def training_fingerprint(config: DataConfig, cache: Path) -> str:
    """Hash of the content and order of data.train; of a stream, of the names and sizes of its files."""
    if config.streaming:
        return stream_fingerprint(stream_files(config.train))
    return corpus_fingerprint(config.train, cache)


def _layout(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The special tokens of a row and the spaces of its text, where they differ from those of BERT's own rows."""
    if INPUT_FORMATS[config.input_format].whole_documents:
        return {}
    pair = INPUT_FORMATS[config.input_format].pair
    template = row_template(tokenizer, pair)
    if keeps_spaces(tokenizer):
        return {"row_template": asdict(template), "spaces": True}
    special = special_ids(tokenizer)
    separator = (special.sep,)
    of_bert = RowTemplate((special.cls,), separator, separator, (0, 0, 1), 1)
    of_bert = of_bert if pair else RowTemplate((special.cls,), (), separator, (0, 0))
    return {} if template == of_bert else {"row_template": asdict(template), "spaces": False}


def _build(
    tasks: list[ShardSpec],
    every: list[ShardSpec],
    folder: Path,
    config: DataConfig,
    tokenizer: Tokenizer,
    progress: Progress,
    engine: Engine = "local",
) -> None:
    """Builds those of some shards, out of all, that are missing."""
    work = folder / WORK
    missing = [task for task in tasks if _read_finished(task, work) is None]
    done = len(tasks) - len(missing)
    progress("building examples", done, len(tasks))
    if engine == "ray":
        names = workers.build_shards_on_ray(
            missing, tokenizer, work, config.num_workers, lambda line: progress(line, 0, None)
        )
    else:
        # A process takes a second to start: worth it for a shard of text each, not for less.
        text = sum({task.store.folder: task.store.number_of_bytes for task in missing}.values())
        own_text = text * len(tasks) / max(1, len(every))
        cores = config.num_workers or available_cores()
        number_of_workers = min(cores, len(missing), round(own_text / SHARD_BYTES))
        names = workers.build_shards(missing, tokenizer, work, number_of_workers)
    for _ in names:
        done += 1
        progress("building examples", done, len(tasks))


def _merge(tasks: list[ShardSpec], folder: Path, config: DataConfig, settings: dict[str, Any]) -> None:
    """Makes a set of finished shards. The caller holds its lock."""
    work = folder / WORK
    summaries = {task.name: require(_read_finished(task, work), task.name) for task in tasks}
    splits = {
        split: [asdict(summary) for name, summary in summaries.items() if name.startswith(split)]
        for split in ("train", "eval")
    }
    _warn_of_empty_documents(tasks, summaries)
    counts = sum(np.load(work / f"{name}.npy") for name in summaries if name.startswith("train"))
    write_array(folder / COUNTS, counts)
    index = {
        "settings": settings,
        "vocab_size": len(counts),
        "counts": _counts(splits, config.dupe_factor) | _left_out(tasks, config),
        "unigram_counts": {
            "file": COUNTS,
            "size": (folder / COUNTS).stat().st_size,
            "sha256": file_sha256(folder / COUNTS),
        },
        **splits,
    }
    write_atomic(folder / INDEX, json.dumps(index, indent=1).encode())
    shutil.rmtree(work, ignore_errors=True)
    for leftover in folder.glob(".*"):  # of a worker that was killed while it wrote
        leftover.unlink(missing_ok=True)


def _warn_of_empty_documents(tasks: list[ShardSpec], summaries: dict[str, ShardSummary]) -> None:
    """Logs a warning about documents of which the tokenizer leaves nothing, such as lone accents."""
    if empty := sum(
        task.last - task.first - summaries[task.name].documents
        for task in (group[0] for group in workers.groups_of(tasks))
    ):
        are = "document has" if empty == 1 else "documents have"
        LOGGER.warning(f"warning: {empty:,} {are} no token and no row: only characters that the vocabulary removes")


def _shard_tasks(folder: Path, config: DataConfig, progress: Progress) -> list[ShardSpec]:
    """The shards of a set: they depend on corpus, seed and held-out share only. The caller holds the set's lock."""
    work, minimum = folder / WORK, INPUT_FORMATS[config.input_format].documents
    tasks = []
    for split, (store, order) in _split_documents(work, config, minimum, progress).items():
        if split == "train" and config.mixture_weights is not None and not config.streaming:
            order = store.mixture_order(order, config.mixture_weights, config.seed)
        if len(order) < minimum:
            raise _too_few_documents(f"data.{split}", store.number_of_documents, config)
        order_file = work / f"{split}-order.npy"
        if not order_file.exists():  # it is the same for every process, and another one may be reading it
            write_array(order_file, order)
        ranges = list(enumerate(store.shard_ranges(order, SHARD_BYTES)))
        duplicates = range(config.dupe_factor if split == "train" else 1)
        # Held-out rows stay as they are: with the same masks for all, packed and unpacked runs compare.
        settings = row_settings(config, packing=split == "train")
        for duplicate, (shard, (first, last)) in itertools.product(duplicates, ranges):
            name = f"{split}-{duplicate}-{shard:05d}" if duplicate else f"{split}-{shard:05d}"
            tasks.append(ShardSpec(name, folder, store, order_file, first, last, settings))
    return tasks


def _split_documents(
    work: Path, config: DataConfig, minimum: int, progress: Progress
) -> dict[str, tuple[DocumentStore, np.ndarray]]:
    """The documents of each split, the held-out ones first, and their random order, without repetitions.

    Raises:
      UserError: fewer than ``minimum`` documents for one of the splits.
    """
    new_only = None if config.near_duplicates is None else NearDuplicateFilter(config.near_duplicates)
    if config.streaming:
        documents = head_documents(stream_files(config.train), config, HEAD_CHARACTERS)
    else:
        documents = numbered_documents(config.train, **reading(config))
    train = _open_or_write_store(work / "documents", documents, "data.train", progress, new_only)
    order = train.order(config.seed)
    if config.eval is not None:
        documents = numbered_documents(config.eval, **reading(config))
        held_out = _open_or_write_store(work / "documents-eval", documents, "data.eval", progress)
        return {"eval": (held_out, held_out.order(config.seed)), "train": (train, order)}
    count = max(minimum, round(config.eval_fraction * train.number_of_documents))
    if (left := train.number_of_documents - count) < minimum:
        if train.number_of_documents >= 2 * minimum:
            raise UserError(
                f"data.eval_fraction {config.eval_fraction:g} leaves {left} of the "
                f"{_count_of_documents(train.number_of_documents)} of data.train to train on, and {minimum} are "
                "needed: lower it, or set data.eval"
            )
        raise _too_few_documents("data.train", train.number_of_documents, config)
    return {"eval": (train, order[:count]), "train": (train, order[count:])}


def require_documents(config: DataConfig) -> None:
    """Raises UserError if a corpus has too few documents. Reads no more of it than necessary; streams are not read."""
    minimum = INPUT_FORMATS[config.input_format].documents
    sources = [] if config.streaming else [("data.train", config.train, minimum * (1 if config.eval else 2))]
    if config.eval is not None:
        sources.append(("data.eval", config.eval, minimum))
    for key, source, needed in sources:
        count = sum(1 for _ in itertools.islice(numbered_documents(source, **reading(config)), needed))
        if count < needed:
            raise _too_few_documents(key, count, config)


def _too_few_documents(key: str, count: int, config: DataConfig) -> UserError:
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
    return UserError(f"{key} holds {_count_of_documents(count)}: at least {needed} are needed{reason}; {fix}")


def _open_or_write_store(
    folder: Path,
    documents: Iterable[tuple[int, Document]],
    key: str,
    progress: Progress,
    new_only: NearDuplicateFilter | None = None,
) -> DocumentStore:
    if store := document_store.open_store(folder):
        return store
    return document_store.write_store(
        documents, folder, lambda count: progress(f"reading {key}", count, None), new_only
    )


def _counts(splits: dict[str, list[dict[str, Any]]], dupe_factor: int) -> dict[str, int]:
    counts = {}
    for split, shards in splits.items():
        for name in COUNTED:
            counts[f"{split}_{name}"] = sum(shard[name] for shard in shards)
    for name in COUNTED_ONCE:
        counts[f"train_{name}"] //= dupe_factor
    return counts


def _left_out(tasks: list[ShardSpec], config: DataConfig) -> dict[str, int]:
    """The number of near-duplicates, if they were looked for."""
    if config.near_duplicates is None:
        return {}
    return {"near_duplicates": next(task.store.near_duplicates for task in tasks if task.name.startswith("train"))}


def _count_of_documents(count: int) -> str:
    return f"{count} document{'s' * (count != 1)}"


def _read_finished(task: ShardSpec, work: Path) -> ShardSummary | None:
    """The summary of a shard that is complete on disk, or None."""
    try:
        summary = ShardSummary(**load_json((work / f"{task.name}.json").read_text(encoding="utf-8")))
        is_whole = file_sha256(task.file) == summary.sha256
    except (OSError, ValueError, TypeError):
        return None
    return summary if is_whole else None


def _silent(stage: str, done: int, total: int | None) -> None:
    pass
