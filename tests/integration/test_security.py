"""The guarantees of SECURITY.md, in its order: each has a test here that tries to break it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, models, normalizers

import bert
from bert.commands.export import main as export
from bert.commands.pretrain import main as pretrain
from bert.config import PretrainConfig
from bert.config.run_file import load_run_config, redact_paths
from bert.data.cache import CacheCopy
from bert.data.encoding import tokenize
from bert.errors import UserError, is_redacted, redact
from bert.files import atomic_directory, write_safetensors
from bert.inference.attention_maps import compute_attention_map
from bert.model.heads import HEADS
from bert.remote import ObjectStore, fetch, path_of_key, remote_files
from bert.runs.environment import describe_environment, without_secrets
from bert.runs.mirror import Mirror
from bert.serving.guard import MAX_BODY, RequestGuard, hosts_of
from bert.tokenizer.vocabulary import load_tokenizer
from tests.conftest import SMALL_RUN
from tests.tiny_models import CONFIG, TASKS, model_of

ESCAPES = (
    "../../victim/authorized_keys",
    "sub/../../victim/authorized_keys",
    "..",
    "sub/..",
    "/victim/authorized_keys",
    "sub//victim",
    "./victim",
    "..\\..\\victim",
    "sub\\..\\..\\victim",
    "null\0character",
)
"""Keys of a store, each after the folder and a slash, that are no path inside a local folder."""


def put(bucket: Any, *keys: str) -> None:
    """Writes objects under unchanged keys: `pipe` would normalize them."""
    for key in keys:
        bucket.store[key] = MemoryFile(bucket, key, b"{}\n")


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# A file is written only inside the folder that was named.


@pytest.mark.parametrize("key", ESCAPES)
def test_keys_of_a_store_lead_out_of_no_folder(bucket: Any, tmp_path: Path, monkeypatch: Any, key: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(bucket, "/bucket/run/config.yaml", f"/bucket/run/{key}")
    run = tmp_path / "cache" / "run"
    callers = (
        Mirror(run, "memory://bucket/run").pull,
        CacheCopy(run, "config.yaml", ObjectStore("memory://bucket/run")).download,
        lambda: fetch("memory://bucket/run"),
        lambda: remote_files("memory://bucket/run"),
    )
    for call in callers:
        with pytest.raises(UserError, match="leads out of its folder"):
            call()
    assert files_below(tmp_path) == set()


def test_valid_keys_are_paths() -> None:
    for key in ("a", "sub/a..b", "...", "sub/.hidden", "a b", "a?1", "ü", "~"):
        assert path_of_key(f"bucket/run/{key}", "bucket/run") == key


def test_markers_of_folders_are_no_files(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "/bucket/run/config.yaml", "/bucket/run/checkpoints/")
    assert ObjectStore("memory://bucket/run").files() == ["config.yaml"]


def test_a_link_in_a_run_brings_no_other_file_into_a_store(bucket: Any, tmp_path: Path) -> None:
    run, private = tmp_path / "run", tmp_path / "private"
    run.mkdir()
    private.write_text("private")
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "inside").symlink_to("config.yaml")
    (run / "outside").symlink_to(private)
    (run / "folder").symlink_to(tmp_path)
    Mirror(run, "memory://bucket/run").push()
    (run / "last").write_text("")
    CacheCopy(run, "last", ObjectStore("memory://bucket/set")).upload()
    assert set(bucket.find("/bucket/run")) == {"/bucket/run/config.yaml", "/bucket/run/inside"}
    assert set(bucket.find("/bucket/set")) == {f"/bucket/set/{name}" for name in ("config.yaml", "inside", "last")}


# No code of a folder, a model or a data set runs.


def test_no_program_that_a_folder_names_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, hook = tmp_path / "ran", tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    hook.chmod(0o755)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for key in ("core.fsmonitor", "core.pager", "core.sshCommand", "diff.external"):
        subprocess.run(["git", "-C", str(tmp_path), "config", key, str(hook)], check=True)
    monkeypatch.chdir(tmp_path)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append(command[0]) or popen(command, **how))
    describe_environment()
    assert not mark.exists()
    assert set(started) <= {"uname"}, "which Python's `platform` starts"


def test_a_head_of_git_names_no_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "secret").write_text("a" * 40)
    git = tmp_path / "tree" / ".git"
    git.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "tree")
    for head in ("ref: refs/../../../refs/secret", "ref: /etc/passwd", "secret", "\xff" * 40, ""):
        (git / "HEAD").write_text(head, encoding="latin-1")
        assert describe_environment()["git"] is None, head


# Credentials and personal paths are stored nowhere.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:pass@host/x", "http://REDACTED@host/x"),
        ("https://user:p@ss@host:80/x", "https://REDACTED@host:80/x"),
        ("https://user:pa/ss@host/x", "https://REDACTED@host/x"),
        ("--init=https://ghp_123@host/x", "--init=https://REDACTED@host/x"),
        ("https://h/x?X-Amz-Signature=a&part=1", "https://h/x?X-Amz-Signature=REDACTED&part=1"),
        ("https://h/x?X-Amz-Credential=A/2024/s3&b", "https://h/x?X-Amz-Credential=REDACTED&b"),
        ("https://h/x?X%2DAmz%2DSignature=a", "https://h/x?X%2DAmz%2DSignature=REDACTED"),
        ("gs://b/x?GoogleAccessId=a@b&Expires=1", "gs://b/x?GoogleAccessId=REDACTED&Expires=REDACTED"),
        ("https://h/x?sv=1&se=2&sig=a%3D", "https://h/x?sv=REDACTED&se=REDACTED&sig=REDACTED"),
        ("https://h/x#access_token=a", "https://h/x#access_token=REDACTED"),
        ("https://h/x?apiKey=a&page=2", "https://h/x?apiKey=REDACTED&page=2"),
        ("url='http://u:p@h/x?token=a'", "url='http://REDACTED@h/x?token=REDACTED'"),
        ("http://u:p'\"<>a@h/x", "http://REDACTED@h/x"),
        ("[http://u:a@h,http://u:b@h]", "[http://REDACTED@h,http://REDACTED@h]"),
        ("https://h/?u=http://u:p@h/x", "https://h/?u=http://REDACTED@h/x"),
        ("https://h/?secret_access_key=a&pass=b", "https://h/?secret_access_key=REDACTED&pass=REDACTED"),
        ("https://h/?user[token]=a", "https://h/?user[token]=REDACTED"),
    ],
)
def test_credentials_in_urls_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected
    assert str(UserError(text)) == expected


def test_other_urls_stay_as_they_are() -> None:
    for url in ("s3://b/a@b/c", "https://h:8080/a@b", "hf://datasets/o/n@main/x", "memory://b/x?a=1&monkey=2"):
        assert redact(url) == url
        assert not is_redacted(url)


def test_options_for_secrets_are_not_recorded() -> None:
    arguments = ["x.py", "--hf-token", "abc", "--api_key=abc", "--password=abc", "--tokenizer.path=v", "--top_k", "5"]
    kept = ["x.py", "--hf-token", "REDACTED", "--api_key=REDACTED", "--password=REDACTED", *arguments[5:]]
    assert without_secrets(arguments) == kept


def test_messages_have_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("bert").warning("%s is copied", "https://user:secret@host/x")
    assert capsys.readouterr().err == "https://REDACTED@host/x is copied\n"


@pytest.mark.medium
def test_a_run_stores_no_credentials_and_resumes(
    bucket: Any,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fails,
) -> None:
    run, url = tmp_path / "run", "memory://user:SECRET1@bucket/corpus?token=SECRET2.txt"
    put(bucket, "/user:SECRET1@bucket/corpus?token=SECRET2.txt")
    bucket.store["/user:SECRET1@bucket/corpus?token=SECRET2.txt"].write(corpus.read_bytes())
    arguments = [f"--data.train={url}", f"--output_dir={run}", *SMALL_RUN, "--training.steps=2"]
    monkeypatch.setattr(sys, "argv", ["bert", "pretrain", *arguments])
    assert pretrain(arguments) == 0
    output = "".join(capsys.readouterr())
    assert "SECRET" not in output
    assert [name for name in files_below(run) if b"SECRET" in (run / name).read_bytes()] == []
    assert load_run_config(run).data.train == "memory://REDACTED@bucket/corpus?token=REDACTED"
    assert pretrain(arguments) == 0
    assert "has ended before" in capsys.readouterr().out
    error = fails(pretrain, f"--config={run / 'config.yaml'}")
    assert "data.train" in error
    assert "credentials" in error
    assert pretrain([f"--config={run / 'config.yaml'}", f"--data.train={url}"]) == 0


def test_loggers_get_no_credentials() -> None:
    config = PretrainConfig(init="https://u:p@host/x", output_dir="s3://k:s@bucket/run")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=["https://h/x?sig=a", "b.txt"]))
    sent = redact_paths(config)
    assert (sent.init, sent.output_dir) == ("https://REDACTED@host/x", "s3://REDACTED@bucket/run")
    assert sent.data.train == ["https://h/x?sig=REDACTED", "b.txt"]


@pytest.mark.medium
def test_checkpoints_and_exports_have_no_path_of_this_machine(pretrained: Path, tmp_path: Path) -> None:
    assert export([str(pretrained), str(tmp_path / "hf"), "--format=hf"]) == 0
    for folder in (pretrained / "checkpoints", tmp_path / "hf"):
        for name in files_below(folder):
            content = (folder / name).read_bytes()
            assert str(pretrained.parent).encode() not in content, name
            assert str(Path.home()).encode() + b"/" not in content, name


# No answer comes from numbers that are not finite.


def damaged(folder: Path, value: float) -> bert.Pretrained:
    """A classifier whose weights are all ``value``."""
    model = model_of(folder, HEADS["sequence_classification"](CONFIG, 2), TASKS["classification"])
    return dataclasses.replace(model, params=jax.tree.map(lambda leaf: np.full_like(leaf, value), model.params))


@pytest.mark.medium
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_answer_is_not_finite(tmp_path: Path, value: float) -> None:
    model = damaged(tmp_path, value)
    for call in (model.predict, model.embed, model.encode, lambda texts: compute_attention_map(model, texts[0])):
        with pytest.raises(UserError, match=r"input 1: .*NaN"):
            call(["ba ko"])


# Hostile models cost neither memory nor a stack trace.


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "num_labels"]
)
@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 10**400, -1, 1.5, True, "12", [1]])
def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path, key: str, value: Any) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_act": "gelu"}
    content = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **sizes, key: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"config.json: {key} is"):
        bert.load(tmp_path)


def test_a_panic_of_the_tokenizer_is_one_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4}))
    tokenizer.normalizer = normalizers.Replace(Regex("(a+)+$"), "")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer fails on 'aaa"):
        tokenize(load_tokenizer(tmp_path), ["a" * 60 + "b"], 16)


def test_messages_control_no_terminal() -> None:
    assert str(UserError("\x1b[2J\x9b\u202e")) == r"\x1b[2J\x9b\u202e"


def test_an_export_to_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(UserError, match="No space left"), atomic_directory(tmp_path / "out") as draft:
        write_safetensors(draft / "model.safetensors", {})
    assert files_below(tmp_path) == set()


# The demo serves your browser alone.


@pytest.mark.parametrize(
    ("headers", "path", "body", "status"),
    [
        ([(b"host", b"localhost:7860")], "/config", b"", 200),
        ([(b"host", b"evil.example")], "/config", b"", 421),
        ([], "/config", b"", 421),
        ([(b"host", b"localhost")], "/gradio_api/upload", b"", 403),
        ([(b"host", b"localhost"), (b"content-length", b"200000000")], "/gradio_api/call/predict", b"", 413),
        ([(b"host", b"localhost")], "/gradio_api/call/predict", b" " * (MAX_BODY + 1), 413),
    ],
)
def test_the_demo_rejects_other_hosts_large_bodies_and_uploads(
    headers: list[tuple[bytes, bytes]], path: str, body: bytes, status: int
) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = RequestGuard(app, hosts_of("127.0.0.1"))
    asyncio.run(guard({"type": "http", "path": path, "headers": headers}, receive, send))
    assert sent[0]["status"] == status
