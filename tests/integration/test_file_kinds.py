"""Every reader names files that a tool left in place of the content, and files of another kind than text."""

import bz2
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert import files
from bert.config import DataConfig
from bert.config.yaml_io import read_yaml
from bert.data.corpus.document_stream import stream_files
from bert.data.corpus.documents import documents
from bert.data.records import open_splits, read_records
from bert.errors import UserError
from bert.interchange.readers.tf_checkpoint import Bundle
from bert.interchange.tensor_files import read_tensors
from bert.runs.checkpoint_directory import verify_manifest, write_manifest
from bert.runs.folder import config_class_of_run
from bert.tasks.question_answering.squad import _questions
from bert.tokenizer.vocabulary import load_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 437955512\n"


def read_corpus(path: Path) -> object:
    return list(documents(str(path)))


READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("a.txt", "a.txt.gz", "a.jsonl.zst", "a.parquet", "wiki_00"), read_corpus),
    **dict.fromkeys(("a.tsv", "a.csv.bz2", "b.jsonl"), lambda path: list(read_records(path).rows)),
    "train-v1.1.json": lambda path: list(_questions(path)),
    **dict.fromkeys(("vocab.txt", "tokenizer.json", "spiece.model", "vocab.json"), load_tokenizer),
    **dict.fromkeys(("config.json", "tokenizer_config.json", "modules.json"), files.read_json),
    "model.safetensors": lambda path: read_tensors(path.parent),
    "model.safetensors.index.json": lambda path: read_tensors(path.parent),
    "bert_model.ckpt.index": lambda path: Bundle(path.with_suffix("")),
    "bert.yaml": lambda path: read_yaml(path, {}),
    "config.yaml": lambda path: config_class_of_run(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"{re.escape(name)} is a pointer.*LFS .*git"):
        READERS[name](tmp_path / name)


def test_a_pointer_of_git_annex_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("/annex/objects/SHA256E-s31390--f50d7ac4c6b9031379986bc362fcefb65f1e52621ce1708d\n")
    with pytest.raises(UserError, match=r"a\.txt is a pointer.*git"):
        read_corpus(tmp_path / "a.txt")


@pytest.mark.parametrize("part", ["state.json", "data-00000-of-00001.arrow"])
def test_a_pointer_in_a_saved_data_set_is_named(tmp_path: Path, part: str) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["One."]})).save_to_disk(tmp_path)
    (tmp_path / "train" / part).write_text(POINTER)
    for read in (lambda: read_corpus(tmp_path / "train"), lambda: open_splits(str(tmp_path))):
        with pytest.raises(UserError, match=rf"{part} is a pointer of Git LFS"):
            read()


def test_a_pointer_behind_a_url_is_named() -> None:
    fsspec.filesystem("memory").pipe("/lfs/a.txt.gz", POINTER.encode())
    (file,) = stream_files("memory://lfs/a.txt.gz")
    with pytest.raises(UserError, match=r"a\.txt\.gz is a pointer.*LFS"):
        list(file.documents(DataConfig()))


def test_a_pointer_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "array").write_text("0123")
    write_manifest(tmp_path, 1)
    (tmp_path / "array").write_text(POINTER)
    assert ["git lfs pull" in problem for problem in verify_manifest(tmp_path)] == [True]


def zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        # The time is stored as a line feed in byte 11, which must not end what a reader of lines examines.
        archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 20)), "x")
    return content.getvalue()


def parquet() -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({"text": ["One."]}), content)
    return content.getvalue()


BINARY = {
    "gzip.*\\.gz": gzip.compress(b"One."),
    "bzip2.*\\.bz2": bz2.compress(b"One."),
    "xz.*\\.xz": lzma.compress(b"One."),
    "zstd.*\\.zst": b"\x28\xb5\x2f\xfd\x04\x00\x21\x00\x00",
    "ZIP archive": zipped("a.txt"),
    "Office file.*CSV": zipped("[Content_Types].xml"),
    "Parquet": parquet(),
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "not UTF-8.*GB18030, SHIFT_JIS or WINDOWS-1252": "今天天气很好。".encode("gb18030"),
    "not UTF-8.*SHIFT_JIS": "今日は天気がいい".encode("shift_jis"),
    "UTF-32 -t UTF-8": "One.".encode("utf-32"),
}


@pytest.mark.parametrize("message", BINARY)
@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "a.tsv", "vocab.txt", "bert.yaml"])
def test_content_that_is_no_text_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(BINARY[message])
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*{message}"):
        READERS[name](tmp_path / name)
