"""Atomic writes, paths that are not files, and locks that allow one process per run directory."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import bert
from bert.commands import COMMANDS
from bert.commands import main as command
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.validation import LOCAL
from bert.config.yaml_io import dump
from bert.errors import UserError
from bert.files import LOCK, atomic_directory, blocking_lock, exclusive_lock, write_safetensors
from bert.runs.folder import claim_output_dir, open_run

URL = "ftp://host/place.zip"


def test_an_existing_empty_folder_stays_the_same_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    number = tmp_path.stat().st_ino
    with atomic_directory(Path()) as draft:
        (draft / "1_Pooling").mkdir()
        (draft / "1_Pooling" / "config.json").write_text("{}")
        (draft / "config.json").write_text("{}")
    assert sorted(str(path) for path in Path().rglob("*")) == ["1_Pooling", "1_Pooling/config.json", "config.json"]
    assert tmp_path.stat().st_ino == number
    with pytest.raises(UserError, match="is not an empty folder"), atomic_directory(Path()):
        pass


def test_what_a_killed_export_left_in_a_folder_does_not_block_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".export.4711.bert-partial").mkdir()
    (tmp_path / ".export.4711.bert-partial" / "half").write_text("")
    with atomic_directory(tmp_path) as draft:
        (draft / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.rglob("*")] == ["config.json"]


def test_drafts_of_killed_processes_next_to_a_folder_are_removed(tmp_path: Path) -> None:
    running, killed = (tmp_path / f".out.{number}.bert-partial" for number in (os.getppid(), 2**30))
    other = tmp_path / f".outer.{2**30}.bert-partial"
    for folder in (running, killed, other):
        folder.mkdir()
    with atomic_directory(tmp_path / "out") as draft:
        (draft / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {"out", running.name, other.name}


@pytest.mark.parametrize("reason", ["I/O error: No space left on device (os error 28)", "no reason"])
def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def fail(*_: object) -> None:
        raise safetensors.SafetensorError(reason)

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(UserError, match="out cannot be written"), atomic_directory(tmp_path / "out") as draft:
        write_safetensors(draft / "model.safetensors", {"x": np.zeros(1)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    ["x" * 300, f"a/{'x' * 300}", f"{'x' * 300}@3", b"bytes", 3, None, "a\0b", "\ud800", ["x"], Path("x" * 300)],
)
def test_what_is_no_path_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        bert.load(source)
    with pytest.raises(UserError):
        bert.Run(source)
    with pytest.raises(UserError):
        bert.finetune("sst2", init=str(tmp_path), output_dir=source, overrides={"data.dir": str(tmp_path)})
    with pytest.raises(UserError):
        bert.finetune("sst2", init=source, output_dir="out", overrides={"data.dir": str(tmp_path)})
    assert set(os.listdir(tmp_path)) <= {"out", "runs", "a"}, "no folder of another name"


def test_messages_hold_nothing_that_a_terminal_obeys() -> None:
    error = UserError("a\x1b[31mb\x9b\u202e\ud800\tü😀\n")
    assert str(error) == "a\\x1b[31mb\\x9b\\u202e\\ud800\tü😀\n"
    assert str(UserError(str(error))) == str(error)


def test_an_error_leaves_no_folder_and_an_empty_one_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / name) as draft:
            (draft / "half").write_text("")
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with claim_output_dir("~/runs/x", "run", "config.yaml") as (folder, _):
        assert folder == tmp_path / "runs" / "x"
    with pytest.raises(UserError, match=f"{tmp_path}/runs/y does not exist"):
        bert.load("~/runs/y")
    assert not (tmp_path / "~").exists()


def text_options(config_class: type, prefix: str = "") -> dict[str, object]:
    """The options of a configuration that may be a text, by their dotted names; of lists of sections, their first."""
    result: dict[str, object] = {}
    for name, hint in typing.get_type_hints(config_class).items():
        members = [*typing.get_args(hint), hint]
        if sections := [member for member in members if dataclasses.is_dataclass(member)]:
            result |= text_options(sections[0], f"{prefix}{name}.")
        elif str in members or list[str] in members:
            result[f"{prefix}{name}"] = hint
    return result


NO_PATHS = {
    "mlm_bias_init", "task", "data.language", "data.input_format", "data.invalid_tags", "data.misaligned_answers",
    "data.class_weights", "data.column_names", "data.labels", "data.metrics", "data.source", "data.target",
    "model.hidden_act", "model.position_embedding_init", "model.position_embedding_type", "lora.projections",
    "lora.checksum", "optimizer.name", "training.dtype", "training.preset", "distillation.checksum",
    "distillation.hidden_loss", "embedding.query_prompt", "embedding.document_prompt",
    "embedding.late_interaction.expansion_token", "embedding.late_interaction.skipped_tokens",
    "embedding.late_interaction.skipping_roles",
    "training.attention_implementation", "training.dropout_rng", "training.mesh", "training.remat",
    "data.text_field", "data.clitics", "decoding.stop",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(("name", "config_class"), [("pretrain", PretrainConfig), ("finetune", FinetuneConfig)])
def test_every_option_that_takes_a_path_refuses_one_with_a_scheme(name, config_class, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [key for key in text_options(config_class) if key not in NO_PATHS and ".columns." not in key]
    assert {"output_dir", "init", "data.train", "tokenizer.path"} <= set(options)
    assert "distillation.teacher" in options
    arguments = ["--init=none", "--data.dir=a", "--output_dir=run"] if name == "finetune" else ["--output_dir=run"]
    for key in options:
        more = ("gs://bucket/x", "https://example.org/x") if key in LOCAL else ()  # the others are read from there
        for url in (URL, "file:///tmp/x", *more):
            error = fails(command, name, *arguments, f"--{key}={url}")
            assert f"{key} is {url}" in error
    assert not list(tmp_path.iterdir())


def test_a_path_with_a_null_character_is_refused(fails) -> None:
    assert r"'a\x00b' holds a null" in fails(command, "compare", "a\0b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", URL, "input.txt"],
        ["predict", "run", URL],
        ["predict", "run", "input.txt", "--output", URL],
        ["generate", URL, "text"],
        ["generate", "run", "text", "--output", URL],
        ["evaluate", URL, "input.txt"],
        ["evaluate", "run", URL],
        ["inspect", URL],
        ["demo", URL],
        ["serve", URL],
        ["serve", f"name={URL}"],
        ["compare", URL],
        ["compare", "run", "--output", URL],
        ["attention", URL, "text", "--output", "page.html"],
        ["attention", "run", "text", "--output", "gs://bucket/page.html"],
        ["export", URL, "out"],
        ["export", "run", URL],
        ["benchmark", "nanobeir", URL],
        ["benchmark", "nanobeir", "run", "--output_dir", URL],
        ["glue-zip", URL, "out.zip"],
        ["glue-zip", "run", URL],
        ["embed", URL, "input.txt", "--output", "out.npy"],
        ["embed", "run", URL, "--output", "out.npy"],
        ["embed", "run", "input.txt", "--output", URL],
        ["mine", URL, "input.txt"],
        ["mine", "run", URL],
        ["mine", "run", "input.txt", "--output", URL],
        ["mine", "run", "input.txt", "--corpus", URL],
        ["mine", "run", "input.txt", "--scorer", URL],
        ["tokenizer", "--output", URL],
        ["plan", "--data.train", URL],
        ["examples", "--data.train", URL],
        ["pretrain", "--config", URL],
    ],
    ids=" ".join,
)
def test_every_command_refuses_a_path_with_a_scheme(arguments, tmp_path, fails, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text("a\n")
    assert "is not a local path" in fails(command, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["input.txt"]


def test_no_command_is_left_out() -> None:
    tried = test_every_command_refuses_a_path_with_a_scheme.pytestmark[0].args[1]
    assert {arguments[0] for arguments in tried} | {"finetune", "recipes", "config"} == set(COMMANDS)


def test_from_python_too(tmp_path: Path, monkeypatch, pretrained: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (URL, Path(URL)):
        with pytest.raises(UserError, match="is not a local path"):
            bert.load(path)
        with pytest.raises(UserError, match="is not a local path"):
            bert.load(pretrained).save(path)
    assert not list(tmp_path.iterdir())
    local = tmp_path / "gs:" / "x"
    with pytest.raises(UserError, match="does not exist"):
        bert.load(local)


HOLDER = """
import sys, pathlib
from bert.files import exclusive_lock

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
from bert.files import blocking_lock

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

    monkeypatch.setattr("filelock.lock_descriptor", no_locks)
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
    with pytest.raises(UserError, match="is not empty"), open_run(config_of(tmp_path)):
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
