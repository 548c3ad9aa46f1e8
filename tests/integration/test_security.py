"""The guarantees of SECURITY.md, in its order: each has a test here that tries to break it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile

from bert.data.cache import CacheCopy
from bert.errors import UserError
from bert.object_store import ObjectStore, path_of_key
from bert.runs.environment import describe_environment
from bert.runs.mirror import Mirror
from bert.urls import fetch, remote_files

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
    """Writes objects whose keys stay as they are: `pipe` would normalize them."""
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
