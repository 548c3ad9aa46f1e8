"""A finished set of pretraining examples on disk: opened, verified, counted. Needs NumPy and pyarrow only."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bert.data.corpus.documents import DigestCache, file_signature
from bert.data.pretraining.input_formats import INPUT_FORMATS, NEXT_ID
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.data.pretraining.segments import IS_NEXT
from bert.data.pretraining.shards import COLUMNS, LONGER_DOCUMENTS
from bert.errors import UserError
from bert.files import load_json
from bert.tokenizer.special_tokens import SpecialTokenIds

if TYPE_CHECKING:
    pass

INDEX, COUNTS = "index.json", "unigram_counts.npy"

FEW_CONSECUTIVE_PAIRS = 0.35
"""Share of consecutive next-sentence pairs below which a run logs a warning. It is 50% for long documents, 38% for
documents of three sentences, 33% for two and 0% for one."""

SAMPLED_ROWS = 4096
"""Packed rows whose labels are read to estimate the share of consecutive pairs."""


@dataclass(frozen=True)
class PretrainingDataset:
    """A finished set of examples.

    Attributes:
      folder: its folder.
      train, eval: its shards, for ``open_rows``.
      sequence_length: T.
      vocab_size: V.
      counts: train_rows and eval_rows, their positive_rows and unused_tokens, duplicates included; and documents,
        sentences and tokens of the text behind either; near_duplicates, documents that were left out, if they were
        looked for.
      corpus: fingerprint of the training text and its order.
    """

    folder: Path
    train: tuple[Path, ...]
    eval: tuple[Path, ...]
    sequence_length: int
    vocab_size: int
    counts: dict[str, int]
    corpus: str

    @functools.cached_property
    def unigram_counts(self) -> np.ndarray:
        """Occurrences of each token in the training rows, special ones included, padding not: int64 [V]."""
        return np.load(self.folder / COUNTS)

    def unknown_rate(self, special: SpecialTokenIds) -> float:
        """Share of [UNK] among the training tokens, other special tokens left out.

        Raises:
          UserError: every token is [UNK], so that there is nothing to predict.
        """
        unknown_id = special.find("unk")
        unknown = 0 if unknown_id is None else self.unigram_counts[unknown_id]
        known = np.delete(self.unigram_counts, list(special.all)).sum()
        if not known:
            raise UserError(
                "the vocabulary has no token of data.train: use one of the corpus' language (tokenizer.path, init), "
                "or train one"
            )
        return float(unknown / (known + unknown))

    def consecutive_share(self, split: str) -> float | None:
        """Share of the next-sentence pairs of a split in which B follows A; None for rows without such pairs.

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
        """Warnings about documents that are too short for rows of sentence pairs."""
        warnings = []
        for split in ("train", "eval"):
            documents, sentences, single = (
                self.counts.get(f"{split}_{name}", 0)
                for name in ("documents", "sentences", "single_sentence_documents")
            )
            share = self.consecutive_share(split)
            # Two standard deviations of a fair coin: a few held-out rows may all be random by chance.
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


def verify_checksums(dataset: PretrainingDataset) -> PretrainingDataset:
    """The set, once the bytes of its files are those that were built.

    What was verified is remembered by path, size and time of change, in the folder above the set's: a file is read for
    this once, and again if it has changed or been copied, not at every start.

    Raises:
      UserError: a file with other bytes.
    """
    index = load_json((dataset.folder / INDEX).read_text(encoding="utf-8"))
    cache = DigestCache(dataset.folder.parent)
    for entry in [*index["train"], *index["eval"], index["unigram_counts"]]:
        path = dataset.folder / entry["file"]
        state, modified = file_signature(path)
        if cache.get((f"sha256|{state}", modified), lambda: file_sha256(path)) != entry["sha256"]:
            raise corrupt_shard_error(path, "its checksum is not that of what was built")
    cache.save()
    return dataset


def open_examples(folder: str | Path) -> PretrainingDataset:
    """Opens a finished set and checks the size of its files.

    Raises:
      UserError: not a finished set, or one with a file that is missing or of another size.
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
    )


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardReader:
    """Rows of shards, memory-mapped: pages come in when rows are taken and go when memory is short.

    ``len(rows)`` is their number; ``rows.take`` fetches some by number.
    """

    def __init__(self, paths: Sequence[Path]):
        """Maps the shards. Raises UserError for one that is missing or not a shard."""
        self._views: list[tuple[np.ndarray, ...]] = []
        self._files: list[tuple[Path, tuple[int, ...] | None]] = []  # of each view, with its state
        self._names = COLUMNS
        for path in paths:
            try:
                with pa.memory_map(str(path)) as source:
                    table = pa.ipc.open_stream(source).read_all()
                    more = [
                        name
                        for name in table.column_names
                        if name in (EXAMPLE_LENGTH, NEXT_ID) or name.endswith("_label")
                    ]
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
        """Rows by number, in the order asked for.

        Args:
          indices: whole numbers in [0, len(self)), [B].

        Returns:
          int32 ``input_ids`` [B, T]; ``length``, ``segment_a_length`` and, where the input format has one, the label
          (``next_sentence_label``, ``sentence_order_label``) [B]; of blocks ``next_id`` [B]. The token types of a row
          are 1 at positions from segment_a_length up to length. Packed rows have ``example_length`` as well, and it,
          segment_a_length and the label are [B, K], 0 where a row has fewer examples.

        Raises:
          IndexError: a number outside the rows.
          UserError: a shard that has vanished or been changed since it was opened. To read on in the map of a file
            that was cut short would end the process without a word (SIGBUS).
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows are numbered from 0 to {len(self) - 1}")
        shapes = [column.shape[1:] for column in self._views[0]] if self._views else [(0,), (), ()]
        out = [np.empty((len(indices), *shape), np.int32) for shape in shapes]
        shard = np.searchsorted(self._starts, indices, side="right") - 1
        within = indices - self._starts[shard]
        for index in set(shard.tolist()):
            path, state = self._files[index]
            if (now := _state(path)) != state:
                raise corrupt_shard_error(
                    path, "it has vanished" if now is None else "it has been changed during the run"
                )
            here = np.flatnonzero(shard == index)
            chosen = within[here]
            for column, view in zip(out, self._views[index], strict=True):
                column[here] = view[chosen]
        return dict(zip(self._names, out, strict=True))


def _column_view(column: pa.Array) -> np.ndarray:
    """[R] of a plain column, [R, size] of one of lists, without a copy."""
    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=True)
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), column.type.list_size)


def _state(path: Path) -> tuple[int, ...] | None:
    """What tells that a file is still the one that was opened; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_rows(paths: Sequence[Path]) -> ShardReader:
    """Rows of some shards as one sequence, in the order of the paths."""
    return ShardReader(paths)


def corrupt_shard_error(path: Path, reason: str) -> UserError:
    """The error for a shard that is not what was built."""
    return UserError(f"{path} is damaged ({reason}): delete the folder {path.parent}, it will be rebuilt")
