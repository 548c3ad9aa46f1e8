"""Copies of what URLs name: corpora, labelled data, models, inputs."""

import http.server
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

import bert
from bert.commands import main as command
from bert.data.corpus.documents import corpus_fingerprint, documents
from bert.errors import UserError
from bert.remote import exists, fetch, is_url, readable_path, writable, writable_path
from bert.tokenizer.vocabulary import load_tokenizer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr("bert.remote.time.sleep", waited.append)
    return waited


def test_files_folders_and_globs_are_copied(bucket) -> None:
    bucket.pipe({"/b/x/a.txt": b"one", "/b/x/sub/b.txt": b"two", "/b/x/c.json": b"{}"})
    assert Path(fetch("memory://b/x/a.txt")).read_bytes() == b"one"
    for url, names in (
        ("memory://b/x", {"a.txt", "sub/b.txt", "c.json"}),
        ("memory://b/x/", {"a.txt", "sub/b.txt", "c.json"}),
        ("memory://b/x/*.txt", {"a.txt"}),
        ("memory://b/x/**/*.txt", {"a.txt", "sub/b.txt"}),
    ):
        folder = Path(fetch(url))
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == names, url
    bucket.pipe({"/b/y/a?1.txt": b"one", "/b/y/a?2.txt": b"two"})
    assert {path.name for path in Path(fetch("memory://b/y")).iterdir()} == {"a?1.txt", "a?2.txt"}
    assert fetch("a/b.txt") == "a/b.txt"
    assert fetch("docstrings:numpy") == "docstrings:numpy"


def test_a_copy_serves_until_the_file_changes(bucket, monkeypatch) -> None:
    bucket.pipe("/b/a.txt", b"one")
    first = fetch("memory://b/a.txt")
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "get_file", None)
        assert fetch("memory://b/a.txt") == first
    bucket.pipe("/b/a.txt", b"two")
    second = fetch("memory://b/a.txt")
    assert (Path(first).read_bytes(), Path(second).read_bytes()) == (b"one", b"two")


def test_an_interrupted_copy_leaves_nothing(bucket, monkeypatch, no_waiting, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bucket.pipe({"/b/a.txt": b"one", "/b/b.txt": b"two"})
    copy = type(bucket).get_file

    def fail(store: Any, remote: str, local: str) -> None:
        if remote.endswith("b.txt"):
            raise KeyboardInterrupt
        copy(store, remote, local)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(bucket), "get_file", fail)
        fetch("memory://b")
    assert not list((tmp_path / "bert-jax" / "downloads").iterdir())
    assert sorted(path.name for path in Path(fetch("memory://b")).iterdir()) == ["a.txt", "b.txt"]


def test_a_network_that_fails_now_and_then_is_asked_again(bucket, monkeypatch, no_waiting) -> None:
    bucket.pipe({f"/b/{number}.txt": b"text" for number in range(40)})
    copy, calls = type(bucket).get_file, iter(range(1000))

    def fail_sometimes(store: Any, remote: str, local: str) -> None:
        if next(calls) % 10 == 3:
            raise ConnectionResetError("connection reset")
        copy(store, remote, local)

    monkeypatch.setattr(type(bucket), "get_file", fail_sometimes)
    assert len(list(Path(fetch("memory://b")).iterdir())) == 40
    assert no_waiting == [1.0] * 5


@pytest.mark.parametrize(
    ("error", "sentence", "waited"),
    [
        (ConnectionResetError("connection reset"), "cannot be used (connection reset): fix the URL", [1, 2, 4, 8]),
        (PermissionError("Access Denied"), "cannot be used (Access Denied): fix the URL, your credentials", []),
        (ValueError(), "cannot be used (ValueError): fix", []),
    ],
)
def test_what_does_not_pass_is_one_sentence(bucket, monkeypatch, no_waiting, error, sentence, waited) -> None:
    def fail(*_: Any) -> None:
        raise error

    bucket.pipe("/b/a.txt", b"one")
    monkeypatch.setattr(type(bucket), "get_file", fail)
    with pytest.raises(UserError, match="memory://b/a") as raised:
        fetch("memory://b/a.txt")
    assert sentence in str(raised.value)
    assert no_waiting == waited


def test_urls_that_cannot_be_read_are_refused_before_anything_is(monkeypatch) -> None:
    with pytest.raises(UserError, match=r"ftp://h/x is not a local.*URL"):
        fetch("ftp://h/x")
    with pytest.raises(UserError, match=r"memory://b/none does not exist.*URL"):
        fetch("memory://b/none")

    def missing(scheme: str) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs"), ("https", "https")):
        with pytest.raises(UserError) as raised:
            readable_path(f"{scheme}://b/x", "init")
        expected = f"init is {scheme}://b/x, which needs a library that is not installed: install it with pip install "
        assert str(raised.value) == f"{expected}'bert-jax[{extra}]'"
    assert not is_url("C:/x")
    assert not is_url(Path("memory://b/x"))


def test_names_that_lead_out_of_the_folder_are_refused(bucket, monkeypatch) -> None:
    result = {"/b/x/../../a": {"name": "/b/x/../../a", "type": "file"}}
    bucket.pipe("/b/x/a", b"one")
    monkeypatch.setattr(type(bucket), "find", lambda *_, **__: result)
    with pytest.raises(UserError, match="leads out of its folder"):
        fetch("memory://b/x")


def test_a_corpus_in_a_bucket_is_that_of_a_folder(bucket, tmp_path: Path) -> None:
    for name, text in (("a.txt", "One.\n\nTwo.\n"), ("b.txt", "Three.\n")):
        (tmp_path / name).write_text(text)
        bucket.pipe(f"/corpus/{name}", text.encode())
    for url in ("memory://corpus", "memory://corpus/*.txt", ["memory://corpus/a.txt", "memory://corpus/b.txt"]):
        assert list(documents(url)) == list(documents(str(tmp_path)))
        assert corpus_fingerprint(url) == corpus_fingerprint(str(tmp_path))


def test_a_model_in_a_bucket_answers_as_that_of_a_folder(bucket, pretrained: Path, sst2: Path) -> None:
    bucket.put(f"{pretrained}/", "/models/run", recursive=True)
    local, remote = bert.load(pretrained), bert.load("memory://models/run")
    assert (local.embed("one text") == remote.embed("one text")).all()
    step = local.step
    assert bert.load(f"memory://models/run@{step}").step == step


@pytest.mark.medium
def test_what_is_written_to_a_bucket_comes_back(bucket, pretrained: Path, tmp_path: Path, capsys) -> None:
    model = bert.load(pretrained)
    said: list[str] = []
    model.save("memory://out/model", log=said.append)
    assert not any("/tmp" in text or str(tmp_path) in text for text in said)
    assert (bert.load("memory://out/model").embed("one text") == model.embed("one text")).all()
    with pytest.raises(UserError, match="memory://out/model exists already"):
        model.save("memory://out/model")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("One word.\n\nTwo words.\n")
    arguments = ["--data.train", str(corpus), "--tokenizer.min_frequency", "1"]
    assert command(["tokenizer", *arguments, "--output", "memory://out/vocabulary"]) == 0
    assert "use it with --tokenizer.path memory://out/vocabulary" in capsys.readouterr().out
    assert load_tokenizer("memory://out/vocabulary").get_vocab_size() > 5
    assert command(["tokenizer", *arguments, "--output", "memory://out/vocabulary"]) == 2


def test_a_folder_is_no_model_before_all_of_it_is_there(bucket, monkeypatch) -> None:
    names = []
    monkeypatch.setattr(type(bucket), "put_file", lambda store, local, remote: names.append(remote))
    with writable("memory://out/model") as folder:
        for name in ("config.json", "model.safetensors", "sub/config.json", "vocab.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
    assert names[:2] == ["/out/model/model.safetensors", "/out/model/vocab.txt"]
    with pytest.raises(UserError, match=r"out is read-only.*URL of gs:// or s3://"):
        writable_path("https://host/out", "out")


@pytest.mark.slow
def test_fine_tuning_from_buckets_is_that_from_folders(bucket, pretrained: Path, tmp_path: Path) -> None:
    rows = "".join(f"{word} text\t{label}\n" for word, label in [("good", "yes"), ("bad", "no")] * 8)
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text(f"text\tlabel\n{rows}")
    bucket.put(f"{tmp_path}/", "/data", recursive=True)
    bucket.put(f"{pretrained}/", "/models/run", recursive=True)
    overrides = {"training.epochs": 1, "training.batch_size": 4, "data.max_length": 16}
    runs = [
        bert.finetune(
            "classification",
            init=init,
            train=f"{data}/train.tsv",
            dev=f"{data}/dev.tsv",
            output_dir=str(tmp_path / name),
            overrides=overrides,
        )
        for name, init, data in (
            ("local", str(pretrained), str(tmp_path)),
            ("remote", "memory://models/run", "memory://data"),
        )
    ]
    losses = [[line["loss"] for line in run.metrics] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.medium
def test_a_file_of_a_web_server(tmp_path: Path, no_waiting) -> None:
    pytest.importorskip("aiohttp", reason="the extra https is not installed")
    (tmp_path / "a.txt").write_text('One. <a href="b.txt">A link.</a>')
    handler = partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://localhost:{server.server_port}"
        assert Path(fetch(f"{address}/a.txt")).read_text().startswith("One.")
        with pytest.raises(UserError, match=r"/none\.txt does not exist"):
            fetch(f"{address}/none.txt")
        server.shutdown()
    with pytest.raises(UserError, match="cannot be reached"):
        fetch(f"{address}/a.txt")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow
def test_a_real_s3_server(tmp_path: Path, monkeypatch, no_waiting) -> None:
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    command = [sys.executable, "-c", "from moto.server import main; main(['-p', '0'])"]
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "Running on" in line)
            monkeypatch.setenv("AWS_ENDPOINT_URL", line.split()[-1])
            store = s3fs.S3FileSystem()
            store.mkdir("bucket")
            store.pipe({"bucket/corpus/a.txt": b"One.\n", "bucket/corpus/sub/b.txt": b"Two.\n"})
            assert list(documents("s3://bucket/corpus")) == [["One."], ["Two."]]
            assert list(documents("s3://bucket/corpus/*.txt")) == [["One."]]
            with writable("s3://bucket/out/model") as folder:
                folder.mkdir()
                for name, text in (("config.json", "{}"), ("vocab.txt", "a")):
                    (folder / name).write_text(text)
            copied = Path(fetch("s3://bucket/out/model"))
            assert sorted(path.name for path in copied.iterdir()) == ["config.json", "vocab.txt"]
            with writable("s3://bucket/out/answers.jsonl") as file:
                file.write_text("{}")
            assert exists("s3://bucket/out/answers.jsonl")
            with pytest.raises(UserError, match="s3://bucket/none does not exist"):
                fetch("s3://bucket/none")
            with pytest.raises(UserError, match=r"s3://other/a\.txt does not exist"):
                fetch("s3://other/a.txt")
        finally:
            server.kill()
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match="s3://bucket/corpus cannot be used"):
        fetch("s3://bucket/corpus")
