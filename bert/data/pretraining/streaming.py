"""Rows of a corpus that is read while training: readers in processes of their own, and a shuffle buffer in each.

    files -> documents of a reader -> chunks of text -> rows (as of a shard) -> blocks of mixed rows -> batches

A reader cuts its documents into chunks of as much text as a shard has, and makes the rows of each as those of a shard
are made. Each row of chunk c goes, by chance, into one of the blocks c ... c + W - 1; a block is complete, and its rows
are put into a random order, when all chunks before its end have been read. So W chunks are mixed, no more than these
are in memory, and the first block is there after the first chunk.

All of this is a function of (files, seed, reader, chunk). Row n of a reader is therefore always the same one. To have
it again, a reader begins W - 1 chunks before the block with this row: a `Start` says where that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bert.config import DataConfig
from bert.data.corpus.files import Document, Skipped
from bert.data.corpus.streaming import DocumentReader, Position, StreamedDocument, StreamFile
from bert.data.pretraining.objectives import OBJECTIVES, Columns
from bert.data.pretraining.packing import pack_rows
from bert.data.pretraining.shards import draw_rows, row_settings, tokenize
from bert.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Streams of randomness that must not meet those of `bert.data.pretraining.loader`.
_BLOCK_OF_ROW, _ORDER_IN_BLOCK = 5 << 40, 6 << 40

CHUNKS_WITHOUT_ROWS = 16
"""Chunks in a row without a row, after which a corpus counts as one that gives none."""


@dataclass(frozen=True)
class Start:
    """Where a reader begins so that its first block is a certain one.

    Attributes:
        chunk: number of the first chunk that is read.
        block: number of the first block that is given.
        first_row: number of that block's first row.
        position: the place of the chunk in the corpus; empty at the beginning.
    """

    chunk: int = 0
    block: int = 0
    first_row: int = 0
    position: Position = ()


@dataclass(frozen=True)
class Block:
    """Rows of a reader, one after the other.

    Attributes:
        start: from where they can be made again.
        columns: of the rows, as in a shard.
        size: characters that the reader had read by the end of the last chunk.
        passes: how often it had read the corpus before that chunk.
        skipped: documents without text that it has read since it started.
    """

    start: Start
    columns: Columns
    size: int
    passes: int
    skipped: int = 0

    @property
    def end_row(self) -> int:
        return self.start.first_row + len(self.columns["length"])


@dataclass(frozen=True)
class StreamSpec:
    """All that decides the rows of a reader, besides the tokenizer.

    Attributes:
        files: of the corpus.
        config: of its rows.
        reader: number of the reader, of ``config.stream_readers``.
        chunk_size: characters of a chunk.
        window: chunks W that are mixed.
    """

    files: tuple[StreamFile, ...]
    config: DataConfig
    reader: int
    chunk_size: int
    window: int

    def chunks(
        self, position: Position, skipped: Skipped | None = None
    ) -> Iterator[tuple[Position, list[StreamedDocument]]]:
        """Where each chunk begins, and its documents: at least as many as the objective needs. It ends with a pass,
        unless the corpus is mixed by weights. ``skipped`` counts documents without text."""
        config = self.config
        reader = DocumentReader(self.files, config, (self.reader, config.stream_readers), position or None, skipped)
        minimum, begin, size = OBJECTIVES[config.objective].documents, reader.position, 0
        documents: list[StreamedDocument] = []
        while True:
            end, document = reader.position, next(reader)
            if len(documents) >= minimum:
                is_new_pass = config.mixture_weights is None and document.passes > documents[0].passes
                if size >= self.chunk_size or is_new_pass:
                    yield begin, documents
                    begin, documents, size = end, [], 0
            documents.append(document)
            size += document.size


def buffer_chunks(config: DataConfig, chunk_size: int) -> int:
    """Chunks of a size that each reader mixes."""
    return max(1, round(config.shuffle_buffer * 1e6 / config.stream_readers / chunk_size))


def read_blocks(spec: StreamSpec, tokenizer: Tokenizer, start: Start) -> Iterator[Block]:
    """The blocks of a reader from one on, without an end.

    Args:
      tokenizer: as ``bert.tokenizer.vocabulary.literal_tokenizer`` gives it.

    Raises:
      UserError: the corpus cannot be read, or has too few documents for the objective.
    """
    window, row, without_rows, skipped = spec.window, start.first_row, 0, Skipped()
    waiting: deque[list[Columns]] = deque([] for _ in range(window))
    positions: deque[Position] = deque(maxlen=window)
    for chunk, (position, documents) in enumerate(spec.chunks(start.position, skipped), start.chunk):
        positions.append(position)
        columns = chunk_rows(spec, chunk, documents, tokenizer)
        without_rows = 0 if len(columns["length"]) else without_rows + 1
        if without_rows == CHUNKS_WITHOUT_ROWS:
            raise UserError(
                f"the documents of data.train give reader {spec.reader + 1} of {spec.config.stream_readers} no row of "
                f"data.objective {spec.config.objective}: use longer documents, more of them, or a smaller "
                "data.stream_readers"
            )
        if not without_rows:
            target = _random_words(_BLOCK_OF_ROW, spec, chunk, len(columns["length"])) % np.uint64(window)
            for ahead, rows in enumerate(waiting):
                rows.append(_chosen(columns, np.flatnonzero(target == ahead)))
        parts = waiting.popleft()
        waiting.append([])
        if chunk < start.block or not any(len(part["length"]) for part in parts):
            continue  # the first blocks lack the rows of earlier chunks
        block = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(_random_words(_ORDER_IN_BLOCK, spec, chunk, len(block["length"])), kind="stable")
        again = Start(max(0, chunk - window + 1), chunk, row, positions[0])
        row += len(order)
        size = sum(size for *_, size in position) + sum(document.size for document in documents)
        yield Block(again, _chosen(block, order), size, documents[0].passes, skipped.count)


def _random_words(stream: int, spec: StreamSpec, chunk: int, count: int) -> np.ndarray:
    key = np.array([stream + spec.config.seed, (spec.reader << 40) + chunk], np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def _chosen(columns: Columns, rows: np.ndarray) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def chunk_rows(spec: StreamSpec, chunk: int, documents: list[StreamedDocument], tokenizer: Tokenizer) -> Columns:
    """The rows of a chunk; none where the documents are too few for the objective."""
    from bert.tokenizer.special_tokens import special_ids
    from bert.tokenizer.vocabulary import embedding_rows

    settings = row_settings(spec.config, packing=True)
    numbers: dict[tuple[int, int, int], int] = {}
    identities = np.array([numbers.setdefault(document.identity, len(numbers)) for document in documents])
    store = _Documents({number: documents[index] for index, number in enumerate(identities.tolist())})
    text, template = tokenize(settings, store, identities, tokenizer)
    pad, vocab_size = special_ids(tokenizer).padding, embedding_rows(tokenizer)
    if len(set(text.indices)) < OBJECTIVES[settings.objective].documents:
        text = text._replace(sentences=text.sentences[:1], documents=text.documents[:1], indices=[])
    name = f"stream-{spec.reader}-{chunk}"
    _, columns = draw_rows(settings, name, text, template, pad, vocab_size)
    if settings.max_sequences_per_pack is not None and len(columns["length"]):
        columns = pack_rows(columns, settings.max_sequences_per_pack, pad)
    return columns


@dataclass(frozen=True)
class _Documents:
    """Documents in memory by their numbers."""

    documents: Mapping[int, StreamedDocument]

    def sources(self) -> np.ndarray:
        return np.array([self.documents[number].entry for number in range(len(self.documents))])

    def read(self, indices: np.ndarray) -> Iterator[Document]:
        return (self.documents[index].document for index in indices.tolist())
