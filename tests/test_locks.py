"""One process at a time in a run's folder, and no trace of a killed one in its way."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.yaml_io import dump
from bert.errors import UserError
from bert.locks import LOCK, blocking_lock, exclusive_lock
from bert.runs.folder import open_run

HOLDER = """
import sys, pathlib
from bert.locks import exclusive_lock

with exclusive_lock(pathlib.Path(sys.argv[1])):
    print("holds it", flush=True)
    sys.stdin.read()
"""


def start(folder: Path, program: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, str(folder)], env=environment, text=True, **pipes)


def holder(folder: Path) -> subprocess.Popen:
    process = start(folder, HOLDER)
    assert process.stdout.readline() == "holds it\n"
    return process


def config_of(folder: Path) -> PretrainConfig:
    return PretrainConfig(output_dir=str(folder))


def test_a_second_process_is_sent_away_and_a_kill_lets_the_next_one_in(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with holder(folder) as first:
        holding = rf"{folder} is in use by process {first.pid} on .*, since 20"
        with pytest.raises(UserError, match=holding) as caught, open_run(config_of(folder)):
            pytest.fail("two at a time")
        assert "\n" not in str(caught.value)
        assert [path.name for path in folder.iterdir()] == [LOCK]
        first.kill()
        first.wait()
        with open_run(config_of(folder)) as run:
            assert not run.resumed


BUILDER = """
import sys, pathlib
from bert.locks import blocking_lock

with blocking_lock(pathlib.Path(sys.argv[1]), lambda: print("waits", flush=True)):
    print("builds", flush=True)
    sys.stdin.read()
"""


def test_a_builder_waits_until_the_one_before_it_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, BUILDER) as first:
        assert first.stdout.readline() == "builds\n"
        second = start(tmp_path, BUILDER)
        assert second.stdout.readline() == "waits\n"
        first.kill()
    with second:
        assert second.stdout.readline() == "builds\n"
        second.kill()


def test_no_locks_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, blocking: bool = True) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("bert.locks.lock_descriptor", no_locks)
    with exclusive_lock(tmp_path):
        pass
    with pytest.raises(UserError, match="has no locks"), blocking_lock(tmp_path, lambda: None):
        pytest.fail("without a lock")


def test_one_after_the_other_is_as_it_was(tmp_path: Path) -> None:
    for _ in range(2):
        config, holding = config_of(tmp_path / "run"), f"process {os.getpid()} on "
        with open_run(config), pytest.raises(UserError, match=holding), open_run(config):
            pass


def test_the_lock_is_let_go_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive_lock(tmp_path):
        raise ZeroDivisionError
    with exclusive_lock(tmp_path):
        pass


def test_a_stranger_s_folder_is_left_without_a_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no run"), open_run(config_of(tmp_path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]


def test_what_a_kill_at_the_very_start_left_is_not_taken_for_a_stranger_s(tmp_path: Path) -> None:
    """Killed while config.yaml was being written: no config.yaml, half a temporary file, and the lock's file."""
    for name in (LOCK, ".config.yaml.4711.bert-partial", ".metrics.jsonl.12.bert-partial"):
        (tmp_path / name).write_text("half")
    with open_run(config_of(tmp_path)) as run:
        assert not run.resumed
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_hidden_files_of_the_user_stay(tmp_path: Path) -> None:
    names = (".notes.2024", ".config.yaml.4711", ".bert-partial", "notes.12.bert-partial", ".notes.bert-partial")
    (tmp_path / "config.yaml").write_text(dump(config_of(tmp_path)))
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".config.yaml.4711.bert-partial").write_text("half")
    with open_run(config_of(tmp_path)) as run:
        assert run.resumed
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([LOCK, "config.yaml", *names])


def test_seeds_are_locked_one_by_one(tmp_path: Path) -> None:
    seeds = FinetuneConfig(output_dir=str(tmp_path), init="none", num_seeds=2)
    alone = FinetuneConfig(output_dir=str(tmp_path / "seed-0"), init="none")
    with open_run(seeds), open_run(alone), pytest.raises(UserError, match="seed-0 is in use"), open_run(alone):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file system that is read-only: permissions alone would not keep root out."""
    if (
        sys.platform != "linux"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,ro", "none", str(tmp_path)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for folder in (tmp_path, tmp_path / "below" / "run"):
            reason = rf"output_dir {folder} cannot be written \(Read-only file system\)"
            with pytest.raises(UserError, match=reason), open_run(config_of(folder)):
                pass
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
