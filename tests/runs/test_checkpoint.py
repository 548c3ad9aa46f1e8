"""Checkpoints: bit exact, kept and deleted as promised, and safe against full disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bert.errors import UserError
from bert.runs import checkpoint, checkpoint_storage, orbax_io
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import CheckpointDirectory, verify_manifest
from tests.runs.checkpoint_states import bits, flip_one, make_state


def test_a_state_comes_back_bit_for_bit_in_its_own_structure(saver, messages):
    state = make_state(7)
    saver.save(100, state)
    saver.wait()
    step, restored = saver.restore(make_state(1))
    assert step == 100
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert restored["step"] == 7
    assert type(restored["step"]) is int
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored["params"]))
    assert messages == []


def test_shapes_and_dtypes_are_enough_to_restore_into(saver):
    state = make_state()
    saver.save(1, state, wait=True)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), state)
    assert bits(saver.restore(like)[1]) == bits(state)


def test_without_a_structure_nested_dicts_come_back(saver):
    state = make_state()
    saver.save(1, state, wait=True)
    _, restored = saver.restore()
    assert bits(restored["params"]) == bits(state["params"])
    assert restored["step"] == 0
    adam = restored["opt_state"]["1"]["0"]  # the chain's second part, whose first part is scale_by_adam
    assert bits(adam["mu"]) == bits(state["opt_state"][1][0].mu)


def test_params_are_read_without_the_optimizer(saver):
    state = make_state()
    saver.save(1, state, wait=True)
    saver.save(2, make_state(2), wait=True)
    step, params = saver.restore_params(step=1)
    assert step == 1
    assert bits(params) == bits(state["params"])
    assert saver.restore_params()[0] == 2


def test_no_checkpoint_is_none(saver):
    assert saver.restore(make_state()) is None
    assert saver.restore_params() is None
    assert saver.steps() == []


def test_a_structure_that_does_not_fit_is_told_leaf_by_leaf(saver):
    saver.save(1, make_state(), wait=True)
    other = make_state()
    other["params"]["encoder"]["kernel"] = np.zeros((4, 9), np.float32)
    other["params"]["encoder"]["bias"] = np.zeros(3, np.float16)
    other["params"]["head"] = other["params"].pop("half")
    other["count"] = 1
    with pytest.raises(UserError) as caught:
        saver.restore(other)
    message = str(caught.value)
    assert "params/encoder/kernel is float32[4,3] instead of float32[4,9]" in message
    assert "params/encoder/bias is float32[3] instead of float16[3]" in message
    assert "params/head is missing" in message
    assert "params/half is not expected" in message


@pytest.mark.medium
def test_the_newest_and_the_protected_are_kept(tmp_path, messages):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, 2, messages) as checkpointer:
        assert CheckpointDirectory(checkpointer.folder).best is None
        for step in (1, 2, 3, 4):
            checkpointer.save(step, make_state(step))
            if step == 1:
                checkpointer.set_best(1)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 4]
        assert CheckpointDirectory(checkpointer.folder).best == 1
    with Checkpointer(folder, 2, messages) as checkpointer:  # a resumed process knows it too
        checkpointer.save(5, make_state(5), wait=True)
        assert checkpointer.steps() == [1, 4, 5]
        checkpointer.set_best(5)
        checkpointer.save(6, make_state(6), wait=True)
        assert checkpointer.steps() == [5, 6]
        assert CheckpointDirectory(checkpointer.folder).best == 5


@pytest.mark.medium
def test_the_protected_one_keeps_its_parameters_alone(tmp_path, messages):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, 1, messages) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), wait=True)
            checkpointer.set_best(1)
        assert checkpointer.steps() == [1, 2]
        assert {path.name for path in (folder / "1").iterdir() if path.is_dir()} == {"params"}
        assert verify_manifest(folder / "1") == []
        for read in (checkpointer.restore_params(1), checkpointer.restore_best_params()):
            assert bits(read[1]) == bits(make_state(1)["params"])
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(2))
        with pytest.raises(UserError, match=r"parameters \(step 1\)"):
            checkpointer.restore(step=1)
        checkpointer.save(3, make_state(3), wait=True)
        assert checkpointer.steps() == [1, 3]
        assert bits(checkpointer.restore_params(1)[1]) == bits(make_state(1)["params"])
        flip_one(folder / "3")
        with pytest.raises(UserError, match=r"3 is damaged.*no other checkpoint"):
            checkpointer.restore()
        assert checkpointer.restore_params()[0] == 1
        shutil.rmtree(folder / "3")
        with pytest.raises(UserError, match=r"from.*step 1.*to start"):
            checkpointer.restore()


def test_parameters_that_are_kept_alone_do_not_count_among_the_newest(tmp_path, messages):
    with Checkpointer(tmp_path / "checkpoints", 2, messages) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, make_state(step))
            checkpointer.set_best(min(step, 2))
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        flip_one(tmp_path / "checkpoints" / "4")
        assert checkpointer.restore()[0] == 3, "an older one that a run can resume from"


def test_a_finished_run_is_thinned_out_after_its_last_protection(copied, saved, tmp_path, messages, monkeypatch):
    (copied / "2.saving").mkdir()
    monkeypatch.setattr(os, "link", fails(OSError(errno.EPERM, "no hard links here")))
    with Checkpointer(copied, None, messages) as checkpointer:
        checkpointer.set_best(1)
        checkpointer.thin_out()
        assert sorted(os.listdir(copied)) == ["1", "2", "PROTECTED"]
        assert (copied / "1" / "PARAMS_ONLY").exists()
        checkpointer.set_best(2)
        checkpointer.thin_out()
        assert sorted(os.listdir(copied)) == ["2", "PROTECTED"]
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(2))
        message = r"checkpoints cannot be cleaned up \(Read-only"
        with monkeypatch.context() as patched, pytest.raises(UserError, match=message):
            checkpointer.save(3, make_state(), wait=True)
            shutil.copytree(saved / "1", copied / "1")
            patched.setattr(os, "replace", fails(OSError(errno.EROFS, "Read-only file system")))
            checkpointer.thin_out()
    Checkpointer(tmp_path / "nothing", None, messages).thin_out()
    assert not (tmp_path / "nothing").exists()


def test_the_same_step_can_be_saved_again(saver):
    saver.save(1, make_state(1))
    saver.save(1, make_state(2), wait=True)
    assert bits(saver.restore(make_state())[1]) == bits(make_state(2))
    assert os.listdir(saver.folder) == ["1"]


def test_readers_change_nothing_and_the_next_save_cleans_up(copied, saved, messages):
    for name in ("3.saving", "3.saving.orbax-checkpoint-tmp", "0.deleted"):
        shutil.copytree(saved / "1", copied / name)
    os.rename(copied / "2", copied / "2.replaced")  # killed between the two renames: it still counts
    (copied / "notes.saving").write_text("the user's own")
    before = sorted(os.listdir(copied))
    with Checkpointer(copied, 5, messages) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore()[0] == 2
        assert sorted(os.listdir(copied)) == before
        checkpointer.save(4, make_state(), wait=True)
    assert sorted(os.listdir(copied)) == ["1", "2", "4", "notes.saving"]


def fails(error: Exception):
    def function(*_args: object, **_kwargs: object) -> None:
        raise error

    return function


@pytest.mark.parametrize("part", ["orbax.checkpoint.Checkpointer.save", "bert.runs.checkpoint_storage.write_manifest"])
def test_a_save_that_fails_is_told_once_and_leaves_the_last_good_one(saver, monkeypatch, part):
    saver.save(1, make_state(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(part, fails(OSError(errno.ENOSPC, "No space left on device", "/some/file")))
        saver.save(2, make_state(2))
        with pytest.raises(UserError, match=r"step 2 could not.*No space left.*step 1 is the last good") as caught:
            saver.save(3, make_state(3))
    assert "\n" not in str(caught.value)
    assert os.listdir(saver.folder) == ["1"]
    saver.wait()
    saver.save(3, make_state(3), wait=True)
    assert saver.steps() == [1, 3]


def test_tensorstore_s_errors_are_told_in_words(saver, monkeypatch):
    """Its ValueErrors in the two forms that orbax 0.11 and 0.12 bring, and one without the system's number."""
    for text, words in (
        ("PERMISSION_DENIED: Failed writing [OS error 13: EACCES Permission denied] [source...]", "Permission denied;"),
        ("RESOURCE_EXHAUSTED: Failed writing: No space [os_error_code='28']", "No space left on device;"),
        ('NOT_FOUND: Error opening "zarr" driver', 'NOT_FOUND: Error opening "zarr" driver;'),
    ):
        monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", fails(ValueError(text)))
        with pytest.raises(UserError) as caught:
            saver.save(1, make_state(), wait=True)
        assert f"{saver.folder}: {words}" in str(caught.value)


def test_a_bug_is_not_dressed_up_as_a_full_disk(saver, monkeypatch):
    monkeypatch.setattr(checkpoint_storage, "write_manifest", fails(ZeroDivisionError()))
    saver.save(1, make_state())
    with pytest.raises(ZeroDivisionError):
        saver.wait()
    assert os.listdir(saver.folder) == []


def test_a_failed_replacement_leaves_what_it_was_to_replace(saver, monkeypatch):
    saver.save(1, make_state(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_storage, "write_manifest", fails(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(UserError, match="Permission denied"):
            saver.save(1, make_state(2), wait=True)
    assert bits(saver.restore(make_state())[1]) == bits(make_state(1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path, messages):
    (tmp_path / "run").write_text("a file where the run's folder should be")
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", 1, messages)
    checkpointer.save(1, make_state())
    with pytest.raises(UserError, match=r"Not a directory.*run.*there is none yet"):
        checkpointer.close()
    with pytest.raises(UserError, match=r"PROTECTED cannot be written \(Not"):
        checkpointer.set_best(1)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if sys.platform != "linux" or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_room(small_disk, messages, caplog, monkeypatch, foreseen):
    random = np.random.default_rng(0)
    if not foreseen:  # a quota, say, or somebody else who writes at the same time
        monkeypatch.setattr(orbax_io, "_check_space", lambda *_: None)
    with Checkpointer(small_disk / "checkpoints", 2, messages) as checkpointer:
        checkpointer.save(1, {"params": {"w": random.random(100_000)}}, wait=True)
        large = {str(number): random.random(20_000) for number in range(24)}
        with pytest.raises(UserError, match=r"step 2 could not be saved.*; step 1 is the last") as caught:
            checkpointer.save(2, {"params": large, "opt_state": large}, wait=True)
        assert ("(7.7 MB needed" in str(caught.value)) == foreseen
        assert os.listdir(checkpointer.folder) == ["1"]
        checkpointer.save(3, {"params": {"w": random.random(10_000)}}, wait=True)
        assert checkpointer.restore()[0] == 3
    assert caplog.records == []


def test_a_reader_finds_the_checkpoint_that_took_the_place_of_the_one_it_reads(saved, tmp_path, messages, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved / "1", folder / "1")
    read = checkpoint.load_items

    def replaced_meanwhile(path: Path, *more):
        if path.name == "1":
            shutil.copytree(saved / "2", folder / "2")
            shutil.rmtree(folder / "1")
        return read(path, *more)

    monkeypatch.setattr(checkpoint, "load_items", replaced_meanwhile)
    with Checkpointer(folder, 1, messages) as checkpointer:
        assert checkpointer.restore_params()[0] == 2


def test_a_checkpoint_is_not_damaged_because_jax_finds_no_device(copied, messages, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'.")

    with Checkpointer(copied, 2, messages) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(jax, "local_devices", fail)
            patch.setenv("JAX_PLATFORMS", "cuda")
            with pytest.raises(UserError, match=r"JAX.*: unset JAX_PLATFORMS, which is 'cuda'"):
                checkpointer.restore_params()
        assert checkpointer.restore_params()[0] == 2
