"""Row streams: each row of a chunk once, shuffled within a bounded buffer, and reproducible from any row on."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert.config import DataConfig
from bert.data.corpus.document_stream import stream_files
from bert.data.pretraining import build, dataset, row_stream
from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.masking import Masking
from bert.data.pretraining.row_stream import (
    Block,
    RowReader,
    Start,
    StreamedRows,
    StreamLoader,
    StreamSpec,
    buffer_chunks,
    read_blocks,
)
from bert.errors import UserError
from bert.tokenizer.vocabulary import literal_tokenizer
from tests.data.pretraining.conftest import DOCUMENTS, FIRST, MASK, SENTENCES, WORDS, T
from tests.helpers import config_of

CHUNK, WINDOW = 6000, 4
"""Characters, of about seven documents, and how many of these chunks are mixed."""


def spec_of(place: Path, reader: int = 0, **changes: Any) -> StreamSpec:
    values = {"sequence_length": T, "one_sentence_per_line": True, "stream_readers": 1, **changes}
    config = DataConfig(train=str(place / "corpus.txt"), eval=str(place / "corpus.txt"), streaming=True, **values)
    return StreamSpec(tuple(stream_files(config.train)), config, reader, CHUNK, WINDOW)


def blocks_of(spec: StreamSpec, tokenizer: Any, start: Start = Start()) -> Iterator[Block]:  # noqa: B008
    return read_blocks(spec, literal_tokenizer(tokenizer), start)


def documents_of(columns: dict[str, np.ndarray]) -> Counter[int]:
    """Occurrences of each document in the rows' tokens."""
    ids = columns["input_ids"].astype(int)
    return Counter(((ids[ids >= FIRST] - FIRST) // (SENTENCES * WORDS)).tolist())


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_the_buffer_is_counted_in_megabytes_of_all_readers() -> None:
    counts = [buffer_chunks(DataConfig(**keys), 4 << 20) for keys in ({}, {"stream_readers": 1}, {"shuffle_buffer": 1})]
    assert counts == [4, 15, 1]


@pytest.mark.medium
def test_frequencies_are_those_of_a_bounded_head_of_many_chunks(place, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", CHUNK)
    config = config_of(place, eval=str(place / "corpus.txt"), input_format="full_sentences")
    streamed = dataclasses.replace(config, streaming=True)
    built = build.build_examples(config, tokenizer, tmp_path)
    whole = build.build_examples(streamed, tokenizer, tmp_path)
    assert len(whole.train) > 1
    np.testing.assert_array_equal(whole.unigram_counts[FIRST:], built.unigram_counts[FIRST:])
    for module in (build, dataset):
        monkeypatch.setattr(module, "HEAD_CHARACTERS", 3 * CHUNK)
    head = build.build_examples(streamed, tokenizer, tmp_path)
    assert CHUNK < head.counts["train_documents"] / DOCUMENTS * (place / "corpus.txt").stat().st_size < 4 * CHUNK


@pytest.mark.parametrize("changes", [{}, {"input_format": "full_sentences"}, {"input_format": "blocks"}], ids=str)
def test_every_token_of_a_pass_is_in_one_row(place, tokenizer, changes) -> None:
    """Formats without pairs drop nothing and repeat nothing. Pairs keep nearly all tokens."""
    if changes.get("input_format") == "blocks":
        changes = {**changes, "one_sentence_per_line": False}
    spec = spec_of(place, **changes)
    chunks = [documents for _, documents in itertools.islice(spec.chunks(()), 30)]
    in_pass = [document.passes for documents in chunks for document in documents]
    per_pass = sum(documents[0].passes == 0 for documents in chunks)
    assert in_pass.count(0) == in_pass.count(1) == DOCUMENTS
    assert all({document.passes for document in documents} == {documents[0].passes} for documents in chunks)
    # The rows of the first pass are in its own blocks and in the next W - 1 blocks.
    blocks = list(itertools.islice(blocks_of(spec, tokenizer), per_pass + WINDOW - 1))
    alone = [row_stream.chunk_rows(spec, number, documents, literal_tokenizer(tokenizer))
             for number, documents in enumerate(chunks[: per_pass + WINDOW - 1])]  # fmt: skip
    made = Counter(row.tobytes() for columns in alone[:per_pass] for row in columns["input_ids"])
    counts = Counter(row.tobytes() for block in blocks for row in block.columns["input_ids"])
    assert not made - counts
    result = sum((documents_of(columns) for columns in alone[:per_pass]), Counter())
    if changes:
        assert result == dict.fromkeys(range(DOCUMENTS), SENTENCES * WORDS)
    else:
        assert set(result) == set(range(DOCUMENTS))
        assert {0, 1} == set(np.concatenate([block.columns["next_sentence_label"] for block in blocks]).tolist())


def test_a_block_has_rows_of_the_last_chunks_alone(place, tokenizer) -> None:
    spec = spec_of(place, input_format="full_sentences")
    chunks = [documents for _, documents in itertools.islice(spec.chunks(()), 8)]
    numbers = [{document.identity[2] for document in documents} for documents in chunks]
    for block in itertools.islice(blocks_of(spec, tokenizer), 8):
        last = block.start.block
        assert block.start.chunk == max(0, last - WINDOW + 1)
        result = set(documents_of(block.columns))
        assert result <= set().union(*numbers[block.start.chunk : last + 1])
        if last >= WINDOW - 1:
            assert sum(bool(result & one) for one in numbers[block.start.chunk : last + 1]) >= WINDOW - 1
            order = [min(documents_of({"input_ids": row})) for row in block.columns["input_ids"]]
            assert order != sorted(order)


@pytest.mark.medium
@pytest.mark.parametrize("changes", [{}, {"packing": True, "short_seq_prob": 0.9}], ids=["plain", "packed"])
def test_blocks_are_the_same_again_from_any_start(place, tokenizer, changes) -> None:
    spec = spec_of(place, **changes)
    blocks = list(itertools.islice(blocks_of(spec, tokenizer), 14))
    assert [block.start.first_row for block in blocks[1:]] == [block.end_row for block in blocks[:-1]]
    for number in (1, 3, 4, 9, 11):
        again = list(itertools.islice(blocks_of(spec, tokenizer, blocks[number].start), 3))
        for actual, expected in zip(again, blocks[number:], strict=False):
            assert_equal(actual.columns, expected.columns)
            assert dataclasses.replace(actual, columns={}) == dataclasses.replace(expected, columns={})


@pytest.mark.medium
def test_memory_does_not_grow(place, tokenizer) -> None:
    """The buffer is full after W chunks; five passes later it holds as much."""
    blocks = blocks_of(spec_of(place), tokenizer)
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(3):
            tracemalloc.reset_peak()
            sizes = [len(next(blocks).columns["length"]) for _ in range(15)]
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[2] < 1.1 * peaks[0], peaks
    assert max(sizes) < 2.5 * np.mean(sizes)


def make_rows(place, tokenizer, starts: list[list[Start]] | None = None, only: range = range(2)) -> StreamedRows:
    """Rows of two readers in separate processes, or of only one of them."""
    text = tokenizer.to_str()
    specs = [spec_of(place, number, stream_readers=2) for number in only]
    return StreamedRows(
        [RowReader(spec, text, [one[spec.reader] for one in starts or []]) for spec in specs], lambda text: None
    )


def loader_of(rows: StreamedRows, process: tuple[int, int] = (0, 1)) -> StreamLoader:
    masking = Masking(vocab_size=FIRST + DOCUMENTS * SENTENCES * WORDS, mask_id=MASK, special_ids=range(FIRST),
                      max_predictions=4, prob=0.15)  # fmt: skip
    return StreamLoader(rows, masking, batch_size=8, seed=3, process=process)


@pytest.mark.medium
def test_batches_are_the_same_after_a_resume_at_every_step_and_on_two_hosts(place, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(row_stream, "BATCHES_KEPT", 2)
    whole = make_rows(place, tokenizer)
    loader = loader_of(whole)
    batches, starts = [], []
    for step in range(60):
        batches.append(loader.batch(step))
        starts.append(whole.starts(loader.first_reader_row(step)))
    assert starts[-1] != starts[0]
    assert_equal(loader.batch(58), batches[58])  # of a step that was skipped
    assert_equal(loader.batch(5), batches[5])  # long gone: the readers start again
    whole.close()
    for step in (23, 41):
        resumed = make_rows(place, tokenizer, starts[: step + 1])
        for number in range(step, step + 3):
            assert_equal(loader_of(resumed).batch(number), batches[number])
        assert resumed.starts(loader.first_reader_row(step)) == starts[step]
        resumed.close()
    hosts = [make_rows(place, tokenizer, only=range(index, index + 1)) for index in range(2)]
    for step in range(3):
        shares = [loader_of(rows, (index, 2)).batch(step) for index, rows in enumerate(hosts)]
        together = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
        assert_equal(together, batches[step])
    for host in hosts:
        host.close()


def test_no_row_comes_twice_before_the_corpus_is_read_again(place, tokenizer) -> None:
    rows = make_rows(place, tokenizer)
    loader = loader_of(rows)
    numbers = np.concatenate([loader.row_indices(step) for step in range(40)])
    assert sorted(numbers.tolist()) == list(range(320))
    later = StreamLoader(rows, loader.predictions, 16, 3, first_step=40, first_row=320)
    assert sorted(later.row_indices(40).tolist()) == list(range(320, 336))
    assert isinstance(loader, PretrainingLoader)
    rows.close()


@pytest.mark.medium
def test_a_reader_that_is_killed_or_fails_is_one_sentence(place, tokenizer, tmp_path) -> None:
    rows = make_rows(place, tokenizer)
    loader_of(rows).batch(0)
    [process] = rows._readers[0]._pool._processes
    os.kill(process, signal.SIGTERM)
    for step in range(10):
        loader_of(rows).batch(step)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(UserError, match=r"that reads data\.train was killed"):
        for step in range(1000):
            loader_of(rows).batch(step)
    rows.close()
    (tmp_path / "corpus.txt").write_text("One.\n\nTwo.")
    few = StreamedRows([RowReader(spec_of(tmp_path, input_format="sop"), tokenizer.to_str(), [])], lambda text: None)
    with pytest.raises(UserError, match=r"reader 1 of 1 no.*data\.input_format"):
        few.take(np.arange(4))
    few.close()
