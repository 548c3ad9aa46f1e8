"""A finished set of pretraining examples on disk: its settings, files, counts and rows."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bert.config import DataConfig
from bert.data.corpus.document_stream import HEAD_CHARACTERS, HEAD_VERSION, training_fingerprint
from bert.data.corpus.documents import DigestCache, corpus_fingerprint, file_signature, resolve_sources
from bert.data.corpus.filters import filter_settings
from bert.data.encoding import RowTemplate, row_template
from bert.data.pretraining.input_formats import INPUT_FORMATS, IS_NEXT, NEXT_ID
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.data.pretraining.shards import COLUMNS, LONGER_DOCUMENTS
from bert.errors import UserError
from bert.files import load_json
from bert.tokenizer.library import SpecialTokenIds, keeps_spaces, special_ids
from bert.tokenizer.vocabulary import tokenizer_fingerprint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_VERSION = 2
"""Part of the settings of a set. Increase it when the same text results in other rows."""

INDEX, COUNTS = "index.json", "unigram_counts.npy"

FEW_CONSECUTIVE_PAIRS = 0.35
"""Share of consecutive next-sentence pairs below which a run logs a warning. The share is 50% for long documents, 38%
for documents of three sentences, 33% for two and 0% for one."""

SAMPLED_ROWS = 4096
"""Number of packed rows whose labels are read to estimate the share of consecutive pairs."""


@dataclass(frozen=True)
class PretrainingDataset:
    """A finished set of examples.

    Attributes:
      train, eval: shards of each split, for ``open_rows``.
      sequence_length: T.
      vocab_size: V.
      counts: per split, rows, positive_rows and unused_tokens (with duplicates), and documents, sentences and tokens
        of the text.
      corpus: fingerprint of the training text and its order.
      filtered: what each filter of the training text left out, a `FilterReport` as a dictionary.
    """

    folder: Path
    train: tuple[Path, ...]
    eval: tuple[Path, ...]
    sequence_length: int
    vocab_size: int
    counts: dict[str, int]
    corpus: str
    filtered: dict[str, dict[str, Any]] = field(default_factory=dict)

    @functools.cached_property
    def unigram_counts(self) -> np.ndarray:
        """Occurrences of each token in the training rows, with special tokens, without padding: int64 [V]."""
        return np.load(self.folder / COUNTS)

    def unknown_rate(self, special: SpecialTokenIds) -> float:
        """Returns the share of [UNK] among the training tokens, other special tokens left out.

        Raises:
          UserError: all tokens are [UNK].
        """
        unknown_id = special.find("unk")
        unknown = 0 if unknown_id is None else self.unigram_counts[unknown_id]
        known = np.delete(self.unigram_counts, list(special.all)).sum()
        if not known:
            fix = "use one of the corpus' language (tokenizer.path, init), or train one"
            raise UserError(f"the vocabulary has no token of data.train: {fix}")
        return float(unknown / (known + unknown))

    def filter_lines(self, with_samples: bool) -> list[tuple[str, str]]:
        """Returns names and values of what each filter left out; optionally by reason, with a sample of each."""
        lines = []
        for name, report in self.filtered.items():
            left_out = f"{report['documents']:,} documents left out, {report['characters']:,} characters in all"
            lines.append((name.replace("_", " "), left_out))
            reasons = sorted(report["reasons"].items(), key=lambda item: -item[1][0]) if with_samples else []
            lines += [("", f"{count:,} x {reason}: {sample}") for reason, (count, sample) in reasons]
        return lines

    def consecutive_share(self, split: str) -> float | None:
        """Returns the share of a split's next-sentence pairs in which B follows A; None for other input formats.

        Estimated from a sample if rows are packed.
        """
        label = f"{INPUT_FORMATS['nsp'].label}_label"
        rows = open_rows(self.train if split == "train" else self.eval)
        sample = rows.take(np.unique(np.linspace(0, len(rows) - 1, SAMPLED_ROWS).astype(int)))
        if label not in sample:
            return None
        if EXAMPLE_LENGTH not in sample:
            return 1 - self.counts[f"{split}_positive_rows"] / len(rows)
        return float((sample[label][sample[EXAMPLE_LENGTH] > 0] == IS_NEXT).mean())

    def pair_warnings(self) -> list[str]:
        """Returns warnings about documents that are too short for sentence pairs."""
        warnings = []
        for split in ("train", "eval"):
            documents, sentences, single = (
                self.counts.get(f"{split}_{name}", 0)
                for name in ("documents", "sentences", "single_sentence_documents")
            )
            share = self.consecutive_share(split)
            # Within two standard deviations of a fair coin, a few held-out rows may all be random.
            if share is not None and share < FEW_CONSECUTIVE_PAIRS - self.counts[f"{split}_rows"] ** -0.5:
                warnings.append(
                    f"warning: {share:.1%} of the next-sentence pairs of data.{split} are consecutive instead of about "
                    f"50%; its documents have {sentences / documents:.1f} sentences on average: {LONGER_DOCUMENTS}"
                )
            elif share is None and single:
                warnings.append(
                    f"warning: {single:,} of {documents:,} documents of data.{split} have one sentence and give no "
                    f"pair of sentences: {LONGER_DOCUMENTS}"
                )
        return warnings


def dataset_settings(config: DataConfig, cache: Path, tokenizer: Tokenizer, shard_bytes: int) -> dict[str, Any]:
    """Returns everything that determines the rows: not masking, the number of workers or the names of files.

    Settings that were added later are included only if they are set, so that earlier sets are still found.
    """
    settings = {
        "format": CACHE_VERSION,
        "corpus": training_fingerprint(config, cache),
        "eval_corpus": None if config.eval is None else corpus_fingerprint(config.eval, cache),
        "held_out": config.eval_fraction if config.eval is None else None,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "sequence_length": config.sequence_length,
        "short_seq_prob": config.short_seq_prob if INPUT_FORMATS[config.input_format].uses_short_sequences else None,
        "one_sentence_per_line": config.one_sentence_per_line,
        "language": None if config.one_sentence_per_line else config.language,
        "seed": config.seed,
        "shard_bytes": shard_bytes,
    }
    if config.input_format != "nsp":
        settings["objective"] = config.input_format
    for name in ("verbatim", "document_per_line", "text_field"):
        if (value := getattr(config, name)) != getattr(DataConfig, name):
            settings[name] = value
    settings |= filter_settings(config)
    if config.streaming:
        settings["stream"] = [HEAD_VERSION, HEAD_CHARACTERS, config.stream_readers, config.mixture_weights]
    elif config.mixture_weights is not None or (
        isinstance(config.language, list) and (config.filters or not config.one_sentence_per_line)
    ):
        settings["weights"] = config.mixture_weights
        settings["files"] = [len(places) for places in resolve_sources(config.train)]
        settings["eval_files"] = None if config.eval is None else [len(paths) for paths in resolve_sources(config.eval)]
    if config.dupe_factor > 1:
        settings["duplicates"] = config.dupe_factor
    if config.packing:
        settings["max_examples_per_row"] = config.max_sequences_per_pack
    return settings | _layout(config, tokenizer)


def _layout(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the special tokens of a row and whether its text keeps spaces, if they differ from BERT's rows."""
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


def verify_checksums(dataset: PretrainingDataset) -> PretrainingDataset:
    """Verifies the checksums of a set's files, and returns the set. Raises UserError for a changed file.

    Results are cached by path, size and time of change in the parent folder, so that unchanged files are read once.
    """
    index = load_json((dataset.folder / INDEX).read_text(encoding="utf-8"))
    cache = DigestCache(dataset.folder.parent)
    for entry in [*index["train"], *index["eval"], index["unigram_counts"]]:
        path = dataset.folder / entry["file"]
        state, modified = file_signature(path)
        if cache.get((f"sha256|{state}", modified), lambda: file_sha256(path)) != entry["sha256"]:
            raise corrupt_shard_error(path, "its checksum has changed since it was built")
    cache.save()
    return dataset


def open_examples(folder: str | Path) -> PretrainingDataset:
    """Opens a finished set and checks the sizes of its files.

    Raises:
      UserError: the set is not finished, or a file is missing or has another size.
    """
    folder = Path(folder)
    try:
        index = load_json((folder / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no finished examples ({INDEX} is missing): build them first") from None
    except (OSError, ValueError) as error:
        raise corrupt_shard_error(folder / INDEX, str(error)) from None
    for entry in [*index["train"], *index["eval"], index["unigram_counts"]]:
        path = folder / entry["file"]
        size = path.stat().st_size if path.exists() else None
        if size != entry["size"]:
            reason = "it is missing" if size is None else f"{size} bytes instead of {entry['size']}"
            raise corrupt_shard_error(path, reason)
    return PretrainingDataset(
        folder=folder,
        train=tuple(folder / entry["file"] for entry in index["train"]),
        eval=tuple(folder / entry["file"] for entry in index["eval"]),
        sequence_length=index["settings"]["sequence_length"],
        vocab_size=index["vocab_size"],
        counts=index["counts"],
        corpus=index["settings"]["corpus"],
        filtered=index.get("filtered", {}),
    )


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardReader:
    """Rows of memory-mapped shards. ``len(rows)`` is their number, ``rows.take`` reads rows by index."""

    def __init__(self, paths: Sequence[Path]):
        """Maps the shards. Raises UserError for a missing or damaged one."""
        self._views: list[tuple[np.ndarray, ...]] = []
        self._files: list[tuple[Path, tuple[int, ...] | None]] = []  # the file of each view, and the file's state
        self._names = COLUMNS
        for path in paths:
            try:
                with pa.memory_map(str(path)) as source:
                    table = pa.ipc.open_stream(source).read_all()
                    names = table.column_names
                    more = [name for name in names if name in (EXAMPLE_LENGTH, NEXT_ID) or name.endswith("_label")]
                    batches = table.select([*COLUMNS, *more]).to_batches()
            except (OSError, pa.ArrowException, KeyError) as error:
                raise corrupt_shard_error(path, str(error).splitlines()[0]) from None
            self._names = (*COLUMNS, *more)
            self._views += [tuple(map(_column_view, batch.columns)) for batch in batches]
            self._files += [(path, _state(path))] * len(batches)
        self._starts = np.concatenate([[0], np.cumsum([len(view[0]) for view in self._views], dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows in the order of their indices.

        Returns:
          int32 ``input_ids`` [B, T]; ``length`` and ``segment_a_length`` [B]; the label of the input format, if any
          (``next_sentence_label``, ``sentence_order_label``) [B]; for blocks ``next_id`` [B]. Token types are 1 at
          positions from segment_a_length to length - 1. Packed rows also have ``example_length``; it, segment_a_length
          and the label are then [B, K], 0 where a row has fewer examples.

        Raises:
          IndexError: an index is out of range.
          UserError: a shard was removed or changed since it was opened. Reading the map of a truncated file would
            kill the process (SIGBUS).
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"row indices must be between 0 and {len(self) - 1}")
        shapes = [column.shape[1:] for column in self._views[0]] if self._views else [(0,), (), ()]
        out = [np.empty((len(indices), *shape), np.int32) for shape in shapes]
        shard = np.searchsorted(self._starts, indices, side="right") - 1
        within = indices - self._starts[shard]
        for index in set(shard.tolist()):
            path, state = self._files[index]
            if (now := _state(path)) != state:
                reason = "it has vanished" if now is None else "it has been changed during the run"
                raise corrupt_shard_error(path, reason)
            here = np.flatnonzero(shard == index)
            chosen = within[here]
            for column, view in zip(out, self._views[index], strict=True):
                column[here] = view[chosen]
        return dict(zip(self._names, out, strict=True))


def _column_view(column: pa.Array) -> np.ndarray:
    """Returns a view of a column: [R], or [R, size] for lists."""
    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=True)
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)


def _state(path: Path) -> tuple[int, ...] | None:
    """Returns inode, size and modification time of a file, which change when it is replaced; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_rows(paths: Sequence[Path]) -> ShardReader:
    """Opens the rows of some shards as one sequence, in the order of the paths."""
    return ShardReader(paths)


def corrupt_shard_error(path: Path, reason: str) -> UserError:
    """Returns the error for a damaged shard."""
    return UserError(f"{path} is damaged ({reason}): delete the folder {path.parent}, it will be rebuilt")
