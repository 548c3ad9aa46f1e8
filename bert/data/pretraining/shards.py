"""Builds a shard of examples: documents of a store -> tokens -> rows of an input format in an Arrow stream.

The content depends only on (seed, name of the shard), not on the number of processes. ``datasets.Dataset.from_file``
opens the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from bert.config import DataConfig
from bert.data.cache import WORK
from bert.data.corpus.document_store import Documents, DocumentStore
from bert.data.encoding import RowTemplate, row_template
from bert.data.pretraining.input_formats import INPUT_FORMATS, make_rng
from bert.data.pretraining.packing import Columns, pack_rows
from bert.data.pretraining.tokenization import TokenizedDocuments, tokenize_documents, tokenize_sentences
from bert.errors import UserError
from bert.files import write_atomic
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import embedding_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COLUMNS = ("input_ids", "length", "segment_a_length")
"""Columns of every row. Packed rows also have example_length, blocks next_id, input formats with a label NAME_label.
Packed rows have K values of these and of segment_a_length."""

LONGER_DOCUMENTS = "join the texts of a document (an empty line ends one), or use data.input_format full_sentences"
"""Fix for documents with a single sentence, for messages."""


@dataclass(frozen=True)
class RowSettings:
    """Everything that determines the rows of documents, except the tokenizer and the key of the random stream."""

    seed: int
    input_format: str
    sequence_length: int
    short_seq_prob: float
    languages: tuple[str, ...]
    """Language code of each corpus; a single entry applies to all."""
    one_sentence_per_line: bool
    max_sequences_per_pack: int | None = None
    """K if rows are packed, else None."""


def row_settings(config: DataConfig, packing: bool) -> RowSettings:
    """Returns the settings of a configuration; rows are packed if both ``config.packing`` and ``packing``."""
    return RowSettings(
        seed=config.seed,
        input_format=config.input_format,
        sequence_length=config.sequence_length,
        short_seq_prob=config.short_seq_prob,
        languages=(config.language,) if isinstance(config.language, str) else tuple(config.language),
        one_sentence_per_line=config.one_sentence_per_line,
        max_sequences_per_pack=config.max_sequences_per_pack if config.packing and packing else None,
    )


@dataclass(frozen=True)
class ShardSpec:
    """Everything that a worker needs to build a shard, except the tokenizer."""

    name: str
    """For example train-00000 or eval-00000, train-1-00000 in the first duplicate. With the seed, this is the key of
    the random stream."""
    folder: Path
    store: DocumentStore
    order: Path
    """File with the indices of the split's documents in random order, int64 .npy."""
    first: int
    last: int
    """``first`` and ``last`` are a range of ``order``."""
    rows: RowSettings

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.arrow"

    @property
    def files(self) -> tuple[str, str, str]:
        """The shard's files in an incomplete set: rows, counts, and the summary, which is written last."""
        return self.file.name, f"{WORK}/{self.name}.npy", f"{WORK}/{self.name}.json"


@dataclass(frozen=True)
class ShardSummary:
    """The entry of a shard in index.json."""

    file: str
    rows: int
    size: int
    sha256: str
    documents: int
    sentences: int
    tokens: int
    unused_tokens: int
    """Tokens in no row: cut off because two segments were too long together, as in Google's code."""
    positive_rows: int
    """Rows, or examples of packed rows, with label 1: B from another document, or swapped."""
    single_sentence_documents: int = 0
    """Documents with one sentence, counted only for pairs."""


def build_range(tasks: list[ShardSpec], tokenizer: Tokenizer) -> Iterator[tuple[ShardSpec, ShardSummary, np.ndarray]]:
    """Builds the shards of one range of documents, which are duplicates of each other, and writes each atomically.

    Args:
      tasks: the shards; their text is tokenized once.
      tokenizer: a `literal_tokenizer`.

    Yields:
      Each task with its summary and the counts of the tokens in its rows (with special tokens, without padding), int64
      [V].

    Raises:
      UserError: too few documents have a token, or no row can be made.
    """
    task = tasks[0]
    # A copy, not a map: another process may replace the file, and some file systems then invalidate the map.
    indices = np.array(np.load(task.order, mmap_mode="r")[task.first : task.last])
    text, template = tokenize(task.rows, task.store, indices, tokenizer)
    _check_documents(task, text, len(indices))
    pad, vocab_size = special_ids(tokenizer).padding, embedding_rows(tokenizer)
    for task in tasks:
        yield task, *_build_shard(task, text, template, pad, vocab_size)


def tokenize(
    settings: RowSettings, store: Documents, indices: np.ndarray, tokenizer: Tokenizer
) -> tuple[TokenizedDocuments, RowTemplate]:
    """Tokenizes documents for the input format, by a `literal_tokenizer`. Also returns the template of a row."""
    input_format = INPUT_FORMATS[settings.input_format]
    if input_format.whole_documents:
        end = special_ids(tokenizer).end
        return tokenize_documents(store, indices, tokenizer, end), RowTemplate((), (), (), ())
    template = row_template(tokenizer, input_format.pair)
    room, per_line = template.room(settings.sequence_length), settings.one_sentence_per_line
    return tokenize_sentences(store, indices, tokenizer, room, settings.languages, per_line), template


def _check_documents(task: ShardSpec, text: TokenizedDocuments, count: int) -> None:
    """Raises UserError if too few of ``count`` documents have text, or differ, for the input format."""
    minimum, documents = INPUT_FORMATS[task.rows.input_format].documents, len(text.indices)
    if documents < minimum:
        raise UserError(
            f"only {documents} of {count} documents of {task.name} hold more than control characters, but "
            f"data.input_format {task.rows.input_format} needs {minimum}: remove the empty ones from the corpus"
        )
    if len(set(text.indices)) < minimum:
        raise UserError(
            f"{task.name} holds only copies of one document, but data.input_format {task.rows.input_format} needs "
            f"{minimum}: give entry {task.store.sources()[text.indices[0]] + 1} of data.train more documents, or less "
            "of data.mixture_weights"
        )


def _check_sentences(task: ShardSpec, documents: list[int], row_count: int) -> None:
    """Raises UserError if no document has the two sentences that a pair needs.

    Next-sentence rows exist even then, but B is always random and there is nothing to learn. A small held-out split may
    lack such documents by chance.
    """
    held_out, input_format = task.name.startswith("eval"), task.rows.input_format
    if row_count and (held_out or not INPUT_FORMATS[input_format].pair or (np.diff(documents) > 1).any()):
        return
    fix = f"raise data.eval_fraction, set data.eval, or {LONGER_DOCUMENTS}" if held_out else LONGER_DOCUMENTS
    raise UserError(f"no document of {task.name} has two sentences, as data.input_format {input_format} needs: {fix}")


def _build_shard(
    task: ShardSpec, text: TokenizedDocuments, template: RowTemplate, pad: int, vocab_size: int
) -> tuple[ShardSummary, np.ndarray]:
    """Writes a shard. Returns its summary and the counts of its tokens."""
    tokens, sentences, documents, _ = text
    input_format, length = INPUT_FORMATS[task.rows.input_format], task.rows.sequence_length
    ranges, columns = draw_rows(task.rows, task.name, text, template, pad, vocab_size)
    _check_sentences(task, documents, len(ranges))
    present = np.arange(length) < columns["length"][:, None]
    counts = np.bincount(columns["input_ids"][present], minlength=vocab_size).astype(np.int64)
    positive_rows = int(columns[f"{input_format.label}_label"].sum()) if input_format.label else 0
    if task.rows.max_sequences_per_pack is not None:
        columns = pack_rows(columns, task.rows.max_sequences_per_pack, pad)
    size, sha256 = _write(task.file, columns)
    summary = ShardSummary(
        file=task.file.name,
        rows=len(columns["length"]),
        size=size,
        sha256=sha256,
        documents=len(documents) - 1,
        sentences=0 if input_format.whole_documents else len(sentences) - 1,
        tokens=len(tokens),
        unused_tokens=_count_unused(ranges, len(tokens)),
        positive_rows=positive_rows,
        single_sentence_documents=int((np.diff(documents) == 1).sum()) if input_format.pair else 0,
    )
    return summary, counts


def draw_rows(
    settings: RowSettings, name: str, text: TokenizedDocuments, template: RowTemplate, pad: int, vocab_size: int
) -> tuple[np.ndarray, Columns]:
    """Draws rows with the random stream of (seed, name). Returns their ranges [R, ...] and columns before packing."""
    tokens, sentences, documents, indices = text
    input_format, length = INPUT_FORMATS[settings.input_format], settings.sequence_length
    rng = make_rng(settings.seed, name)
    ranges = input_format.sample_rows(sentences, documents, length, template, settings.short_seq_prob, rng, indices)
    padding = np.full((len(ranges), length), pad, np.uint16 if vocab_size <= 1 << 16 else np.int32)
    return ranges, input_format.to_columns(tokens, np.array(sentences)[documents], ranges, template, padding)


def _count_unused(ranges: np.ndarray, token_count: int) -> int:
    """Returns the number of tokens in none of the ranges [R, ...]."""
    steps = np.zeros(token_count + 1, np.int64)
    for start in range(0, ranges.shape[1] - 1, 2):
        np.add.at(steps, ranges[:, start], 1)
        np.add.at(steps, ranges[:, start + 1], -1)
    return int((np.cumsum(steps)[:-1] == 0).sum())


def _write(file: Path, columns: dict[str, np.ndarray]) -> tuple[int, str]:
    """Writes one record batch like `datasets`, atomically. Returns (size, sha256)."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    features, arrays = {}, {}
    for name, values in columns.items():
        dtype = Value(str(values.dtype))
        features[name] = dtype if values.ndim == 1 else List(dtype, length=values.shape[1])
        flat = pa.array(values.reshape(-1))
        arrays[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    sink = pa.BufferOutputStream()
    with ArrowWriter(features=Features(features), stream=sink) as writer:
        writer.write_table(pa.table(arrays), writer_batch_size=len(columns["length"]))
        writer.finalize(close_stream=False)
    data = sink.getvalue()
    if not (file.is_file() and data == file.read_bytes()):  # another process may have built it and be reading it
        write_atomic(file, data)
    return len(data), hashlib.sha256(data).hexdigest()
