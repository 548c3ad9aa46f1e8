"""A finished set of pretraining examples on disk: opened, verified, counted. Needs NumPy and pyarrow only."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert.data.corpus.documents import DigestCache, file_signature
from bert.data.pretraining.objectives import OBJECTIVES
from bert.data.pretraining.packing import EXAMPLE_LENGTH
from bert.data.pretraining.segments import IS_NEXT
from bert.data.pretraining.shards import LONGER_DOCUMENTS, corrupt_shard_error, open_rows
from bert.errors import UserError
from bert.files import load_json
from bert.tokenizer.special_tokens import SpecialTokenIds

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
        label = f"{OBJECTIVES['nsp'].label}_label"
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
