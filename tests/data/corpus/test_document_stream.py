"""Corpora that are read while they come: every document once a pass, from any place on, from stores too."""

from __future__ import annotations

import bz2
import gzip
import http.server
import itertools
import json
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert.config import DataConfig
from bert.data.corpus.document_stream import (
    DocumentReader,
    StreamFile,
    head_documents,
    stream_files,
    stream_fingerprint,
)
from bert.data.corpus.files import Skipped
from bert.errors import UserError

FILES, DOCUMENTS = 5, 7
TEXTS = [[f"file {file} document {number}" for number in range(DOCUMENTS)] for file in range(FILES)]
ALL = {text for texts in TEXTS for text in texts}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files of different kinds, with documents without text between the others."""
    texts = [("\n\n".join([*texts[:3], "\u200b", *texts[3:]]) + "\n").encode() for texts in TEXTS]
    lines = "\n".join(json.dumps({"text": text}) for text in [*TEXTS[2], " \n"])
    (tmp_path / "a.txt").write_bytes(texts[0])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(texts[1]))
    (tmp_path / "c.jsonl").write_text(lines)
    (tmp_path / "d.txt.bz2").write_bytes(bz2.compress(texts[3]))
    pq.write_table(pa.table({"text": [*TEXTS[4], None]}), tmp_path / "e.parquet")
    return tmp_path


def config_of(*train: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(train=[str(path) for path in train], eval="held-out.txt", streaming=True, **changes)


def read(config: DataConfig, count: int, reader: tuple[int, int] = (0, 1)) -> list[str]:
    documents = DocumentReader(stream_files(config.train), config, reader)
    return ["\n".join(document.document) for document in itertools.islice(documents, count)]


@pytest.mark.parametrize("readers", [1, 2, 5, 8])
def test_every_document_is_read_once_a_pass(folder: Path, readers: int) -> None:
    """Eight readers share five files document by document, fewer have files of their own."""
    config, files = config_of(folder), stream_files([str(folder)])
    result: Counter[tuple[int, str]] = Counter()
    for index in range(readers):
        for document in DocumentReader(files, config, (index, readers)):
            if document.passes == 3:
                break
            result[document.passes, document.document[0]] += 1
    assert result == Counter(itertools.product(range(3), ALL))


@pytest.mark.parametrize("readers", [1, 8])
def test_documents_without_text_are_counted_once_a_pass(folder: Path, readers: int) -> None:
    skipped = Skipped()
    for index in range(readers):
        reader = DocumentReader(stream_files([str(folder)]), config_of(folder), (index, readers), skipped=skipped)
        next(document for document in reader if document.passes == 1)
    assert 5 <= skipped.count <= 10, "five in the first pass, and those before the first text of the second one"


def test_the_head_of_a_stream_logs_what_it_skips(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(head_documents(stream_files([str(folder)]), config_of(folder), 10**7))
    assert "documents without text are skipped" in capsys.readouterr().err


def test_each_pass_takes_the_files_in_another_order(folder: Path) -> None:
    texts = read(config_of(folder), 4 * len(ALL))
    passes = [tuple(texts[start : start + len(ALL)]) for start in range(0, len(texts), len(ALL))]
    assert len(set(passes)) == 4
    assert passes != [tuple(read(config_of(folder, seed=1), 4 * len(ALL))[: len(ALL)])] * 4


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
@pytest.mark.parametrize("reader", [(0, 1), (1, 3)])
def test_a_reader_continues_from_every_place(
    folder: Path, weights: list[float] | None, reader: tuple[int, int]
) -> None:
    config = config_of(folder / "a.txt", folder / "[b-e]*", mixture_weights=weights)
    files = stream_files(config.train)
    first = DocumentReader(files, config, reader)
    places, documents = [], []
    for _ in range(90):
        places.append(first.state)
        documents.append(next(first))
    for number, place in enumerate(places):
        again = DocumentReader(files, config, reader, json.loads(json.dumps(place)))
        assert list(itertools.islice(again, 90 - number)) == documents[number:]


def test_weights_give_each_entry_its_share(folder: Path) -> None:
    config = config_of(folder / "a.txt", folder / "[b-e]*", mixture_weights=[3.0, 1.0])
    documents = list(itertools.islice(DocumentReader(stream_files(config.train), config), 400))
    assert Counter(document.entry for document in documents) == {0: 300, 1: 100}
    assert documents[-1].identity in {document.identity for document in documents[:-1]}


def test_the_head_is_what_the_readers_read_first(folder: Path) -> None:
    config = config_of(folder, stream_readers=2)
    files = stream_files(config.train)
    first = [next(DocumentReader(files, config, (index, 2))).document for index in range(2)]
    assert [document for _, document in head_documents(files, config, 10)] == first
    assert len(list(head_documents(files, config, 60))) == 4
    whole = [document[0] for _, document in head_documents(files, config, 10**9)]
    assert sorted(whole) == sorted(ALL)


@pytest.mark.medium
@pytest.mark.parametrize("weights", [None, [9.0, 1.0], [1.0, 100.0]])
@pytest.mark.parametrize("readers", [1, 2])
def test_a_small_file_does_not_end_the_head(tmp_path: Path, weights: list[float] | None, readers: int) -> None:
    large, small = ([f"{name}{number:03} {'x' * 20}" for number in range(size)] for name, size in (("a", 90), ("b", 2)))
    for name, documents in (("large", large), ("small", small)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents), encoding="utf-8")
    paths = [tmp_path / f"{name}.txt" for name in ("large", "small")]
    config = config_of(*paths, mixture_weights=weights, stream_readers=readers)
    files = stream_files(config.train)
    head = [document[0] for _, document in head_documents(files, config, 10**7)]
    assert sorted(head) == [*large, *small]
    # What is repeated counts, so that a large weight of a small entry does not keep the head from ending.
    some = list(head_documents(files, config, 1000))
    assert 2 <= len(some) < 50


def test_urls_are_read_and_not_copied(folder: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.iterdir():
        bucket.pipe(f"/corpus/{path.name}", path.read_bytes())
    bucket.pipe("/corpus/notes.pdf", b"no corpus")
    monkeypatch.setattr(type(bucket), "get_file", None)
    config = config_of("memory://corpus")
    files = stream_files(config.train)
    urls = [(f"memory:///corpus/{path.name}", path.stat().st_size) for path in sorted(folder.iterdir())]
    assert [(file.source, file.size) for file in files] == urls
    assert read(config, 100) == read(config_of(folder), 100)
    assert stream_fingerprint(files) == stream_fingerprint(stream_files(str(folder)))
    with pytest.raises(UserError, match="memory://none does not exist"):
        stream_files("memory://none")


def test_sets_of_one_name_and_files_of_unknown_size_are_told_apart_by_where_they_are() -> None:
    def fingerprint(source: str, size: int | None = None, number: int | None = None) -> str:
        return stream_fingerprint([StreamFile(0, source, size, number)])

    assert fingerprint("hub:alice/corpus", number=0) != fingerprint("hub:bob/corpus", number=0)
    assert fingerprint("https://a/text.txt") != fingerprint("https://b/text.txt")
    assert fingerprint("https://a/text.txt", 9) == fingerprint("https://b/text.txt", 9)


def test_reads_that_fail_are_repeated(folder: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.iterdir():
        bucket.pipe(f"/corpus/{path.name}", path.read_bytes())
    monkeypatch.setattr("bert.remote.time.sleep", lambda seconds: None)
    file_class, failures = type(bucket.open("/corpus/a.txt")), itertools.count()
    read_file = file_class.read

    def failing(self: Any, *arguments: Any) -> bytes:
        if next(failures) % 2:
            raise ConnectionError("reset by peer")
        return bytes(read_file(self, *arguments))

    expected = read(config_of(folder), 50)
    monkeypatch.setattr(file_class, "read", failing, raising=False)
    assert read(config_of("memory://corpus"), 50) == expected
    assert next(failures) > 10


@pytest.mark.medium
def test_a_web_server_is_read(folder: Path) -> None:
    pytest.importorskip("aiohttp", reason="the extra https is not installed")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://localhost:{server.server_port}"
        names = ["a.txt", "b.txt.gz?key=1", "c.jsonl", "d.txt.bz2"]
        assert set(read(config_of(*(f"{address}/{name}" for name in names)), 28)) == ALL - set(TEXTS[4])
        server.shutdown()


def test_a_set_of_the_hub_is_read_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    paths = [tmp_path / f"{file}.jsonl" for file in range(FILES)]
    for path, texts in zip(paths, TEXTS, strict=True):
        path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    load, asked = datasets.load_dataset, []

    def load_dataset(*name: Any, split: str, streaming: bool) -> Any:
        asked.append((*name, split, streaming))
        return load("json", data_files=list(map(str, paths)), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = config_of("hub:org/name:en")
    assert [file.number for file in stream_files(config.train)] == list(range(FILES))
    assert set(read(config, len(ALL))) == ALL
    assert set(read(config, DOCUMENTS * 2, (1, 3))) == {*TEXTS[1], *TEXTS[4]}
    assert set(asked) == {("org/name", "en", "train", True)}
    for path in paths:
        path.write_text('{"title": "no text"}\n')
    with pytest.raises(UserError, match='has no column "text" but title'):
        read(config_of("hub:org/other"), len(ALL))


def test_errors_name_what_to_change(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.streaming to false"):
        stream_files("docstrings:json")
    (folder / "one.txt").write_text("alone")
    with pytest.raises(UserError, match=r"4 readers.*data\.stream_readers"):
        read(config_of(folder / "one.txt"), 1, (3, 4))
    (folder / "b.txt.gz").write_bytes((folder / "b.txt.gz").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"b\.txt\.gz is cut short or damaged"):
        read(config_of(folder), len(ALL))
