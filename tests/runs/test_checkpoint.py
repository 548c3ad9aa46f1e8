"""Checkpoints: bit exact, verified, kept and deleted as promised, and safe against full disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from bert.errors import UserError
from bert.runs import checkpoint, orbax_io
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.manifest import MANIFEST, verify_manifest, write_manifest


def make_state(seed: int = 0) -> dict:
    """A small training state with every kind of leaf, moments of optax included."""
    random = np.random.default_rng(seed)
    params = {
        "encoder": {
            "kernel": random.standard_normal((4, 3)).astype(np.float32),
            "bias": np.zeros(3, np.float32),
        },
        "half": random.standard_normal(5).astype(ml_dtypes.bfloat16),
        "special": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9)))
    opt_state = jax.tree.map(np.asarray, optimizer.init(params))
    return {
        "params": params,
        "opt_state": opt_state,
        "step": seed,
        "count": np.array(2**63 + seed, np.uint64),
    }


def bits(tree: object) -> list[tuple]:
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(tree))]


class Lines(list):
    """A ``say`` that remembers."""

    __call__ = list.append


@pytest.fixture
def said() -> Lines:
    return Lines()


@pytest.fixture
def saver(tmp_path: Path, said: Lines):
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        yield checkpointer


def flip_byte(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_state_comes_back_bit_for_bit_in_its_own_structure(saver, said):
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
    assert said == []


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
    assert "params/half has no place" in message


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoints folder with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(folder, 5, print) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
    return folder


def test_a_byte_flipped_in_any_file_is_seen(saved, tmp_path):
    folder = tmp_path / "2"
    shutil.copytree(saved / "2", folder)
    assert verify_manifest(folder) == []
    for path in files(folder):
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1}:
            flip_byte(path, place)
            problems = verify_manifest(folder)
            assert len(problems) == 1
            assert path.name in problems[0]
            path.write_bytes(whole)
    assert verify_manifest(folder) == []


def test_a_byte_flipped_in_any_file_is_never_restored(saved, tmp_path, said):
    """Each file of a checkpoint in turn: the state that comes back is always that of the one before."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    expected = bits(make_state(1))
    paths = files(folder / "2")
    assert len(paths) > 5
    for number, path in enumerate(paths, start=1):
        whole = path.read_bytes()
        flip_byte(path)
        with Checkpointer(folder, 2, said) as checkpointer:
            step, state = checkpointer.restore(make_state())
        assert (step, bits(state)) == (1, expected), path
        assert len(said) == number
        assert path.name in said[-1]
        assert "using the checkpoint of step 1 instead" in said[-1]
        path.write_bytes(whole)


def test_flipped_bytes_of_the_manifest_are_seen(saved, tmp_path):
    """Changed white space and digits of the step as well: whatever is not as written is not believed."""
    shutil.copytree(saved / "2", tmp_path / "2")
    path = tmp_path / "2" / MANIFEST
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):  # every fifth, to be quick: names, sizes, sums, spaces, line ends
        flip_byte(path, place)
        assert verify_manifest(path.parent), f"byte {place} of {whole[place - 9 : place + 9]!r}"
        path.write_bytes(whole)


def largest(folder: Path) -> Path:
    return max(files(folder), key=lambda path: path.stat().st_size)


def cut_short(folder: Path) -> str:
    path = largest(folder)
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def remove_file(folder: Path) -> str:
    (path := largest(folder)).unlink()
    return path.name


def flip_one(folder: Path) -> str:
    flip_byte(path := largest(folder))
    return path.name


def remove_manifest(folder: Path) -> str:
    (folder / MANIFEST).unlink()
    return f"{MANIFEST} is missing"


def add_file(folder: Path) -> str:
    (folder / "params" / "stranger").write_text("?")
    return "params/stranger is not listed"


def copy_over(folder: Path) -> str:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "1", folder)
    return f"{MANIFEST} belongs to step 1"


def empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return f"{MANIFEST} is missing"


DAMAGES = [cut_short, remove_file, flip_one, remove_manifest, add_file, copy_over, empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(saved, tmp_path, said, damage):
    shutil.copytree(saved, tmp_path / "checkpoints")
    named = damage(tmp_path / "checkpoints" / "2")
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        step, state = checkpointer.restore(make_state())
        assert (step, bits(state)) == (1, bits(make_state(1)))
        assert len(said) == 1
        for words in (str(tmp_path / "checkpoints" / "2"), named, "using the checkpoint of step 1 instead"):
            assert words in said[0]
        assert checkpointer.restore_params()[0] == 1

        # The damaged one is not in the way when training reaches its step again.
        checkpointer.save(2, make_state(5), wait=True)
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(5))


def test_litter_of_the_system_is_no_damage(saved, tmp_path):
    shutil.copytree(saved / "2", tmp_path / "2")
    (tmp_path / "2" / "params" / ".DS_Store").write_text("")
    assert verify_manifest(tmp_path / "2") == []


def test_what_orbax_cannot_read_is_passed_over_as_well(saved, tmp_path, said):
    shutil.copytree(saved, tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "2"
    (folder / "params" / "manifest.ocdbt").write_text("nonsense")
    write_manifest(folder, 2)
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        assert checkpointer.restore(make_state())[0] == 1
    assert "orbax cannot read it" in said[0]


def test_no_undamaged_checkpoint_is_an_error(saved, tmp_path, said):
    shutil.copytree(saved, tmp_path / "checkpoints")
    for step in ("1", "2"):
        flip_one(tmp_path / "checkpoints" / step)
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        with pytest.raises(UserError, match=r"2 is damaged.*1 is damaged.*no other checkpoint is left"):
            checkpointer.restore()
        with pytest.raises(UserError, match="choose another step"):
            checkpointer.restore(step=1)
        with pytest.raises(UserError, match=r"no checkpoint of step 3: choose one that is there \(1, 2\)"):
            checkpointer.restore_params(step=3)
    assert said == []


def test_damaged_checkpoints_do_not_push_out_good_ones(saved, tmp_path, said):
    shutil.copytree(saved, tmp_path / "checkpoints")
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        flip_one(tmp_path / "checkpoints" / "2")
        checkpointer.restore()
        checkpointer.save(3, make_state(), wait=True)
        assert checkpointer.steps() == [1, 3]


def test_a_later_checkpoint_of_an_abandoned_line_does_not_push_out_the_new_one(saved, tmp_path, said):
    shutil.copytree(saved, tmp_path / "checkpoints")
    os.rename(tmp_path / "checkpoints" / "2", tmp_path / "checkpoints" / "20")
    with Checkpointer(tmp_path / "checkpoints", 1, said) as checkpointer:
        assert checkpointer.restore()[0] == 1  # 20 is not the step in its manifest
        checkpointer.save(10, make_state(), wait=True)
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(20, make_state(), wait=True)
        assert checkpointer.steps() == [20]


def test_the_newest_and_the_protected_are_kept(tmp_path, said):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, 2, said) as checkpointer:
        assert CheckpointDirectory(checkpointer.folder).best is None
        for step in (1, 2, 3, 4):
            checkpointer.save(step, make_state(step))
            if step == 1:
                checkpointer.set_best(1)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 4]
        assert CheckpointDirectory(checkpointer.folder).best == 1
    with Checkpointer(folder, 2, said) as checkpointer:  # a resumed process knows it too
        checkpointer.save(5, make_state(5), wait=True)
        assert checkpointer.steps() == [1, 4, 5]
        checkpointer.set_best(5)
        checkpointer.save(6, make_state(6), wait=True)
        assert checkpointer.steps() == [5, 6]
        assert CheckpointDirectory(checkpointer.folder).best == 5


def test_the_protected_one_keeps_its_parameters_alone(tmp_path, said):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, 1, said) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step), wait=True)
            checkpointer.set_best(1)
        assert checkpointer.steps() == [1, 2]
        assert {path.name for path in (folder / "1").iterdir() if path.is_dir()} == {"params"}
        assert verify_manifest(folder / "1") == []
        for read in (checkpointer.restore_params(1), checkpointer.restore_best_params()):
            assert bits(read[1]) == bits(make_state(1)["params"])
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(2))
        with pytest.raises(UserError, match=r"no state to resume from, only the best parameters \(step 1\)"):
            checkpointer.restore(step=1)
        checkpointer.save(3, make_state(3), wait=True)
        assert checkpointer.steps() == [1, 3]
        assert bits(checkpointer.restore_params(1)[1]) == bits(make_state(1)["params"])
        flip_one(folder / "3")
        with pytest.raises(UserError, match=r"3 is damaged.*no other checkpoint is left"):
            checkpointer.restore()
        assert checkpointer.restore_params()[0] == 1
        shutil.rmtree(folder / "3")
        with pytest.raises(UserError, match=r"no state to resume from.*step 1.*to start again"):
            checkpointer.restore()


def test_parameters_that_are_kept_alone_do_not_count_among_the_newest(tmp_path, said):
    with Checkpointer(tmp_path / "checkpoints", 2, said) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, make_state(step))
            checkpointer.set_best(min(step, 2))
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        flip_one(tmp_path / "checkpoints" / "4")
        assert checkpointer.restore()[0] == 3, "an older one that a run can resume from"


def test_damage_of_parameters_outlives_the_removal_of_the_rest(saved, tmp_path, said):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    flip_one(folder / "1" / "params")
    with Checkpointer(folder, 1, said) as checkpointer:
        checkpointer.set_best(1)
        checkpointer.save(3, make_state(3), wait=True)
        assert not (folder / "1" / "rest").exists()
        assert "wrong checksum" in verify_manifest(folder / "1")[0]
        assert checkpointer.restore_best_params()[0] == 3
    shutil.copytree(saved / "2", folder / "2")
    (folder / "2" / MANIFEST).write_text("{}")
    with Checkpointer(folder, 1, said) as checkpointer:
        checkpointer.set_best(2)
        checkpointer.thin_out()
        assert sorted(os.listdir(folder)) == ["2", "3", "PROTECTED"], "what no manifest vouches for is left alone"
        assert (folder / "2" / "rest").exists()


def test_a_finished_run_is_thinned_out_after_its_last_protection(saved, tmp_path, said, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    (folder / "2.saving").mkdir()
    monkeypatch.setattr(os, "link", fails(OSError(errno.EPERM, "no hard links here")))
    with Checkpointer(folder, None, said) as checkpointer:
        checkpointer.set_best(1)
        checkpointer.thin_out()
        assert sorted(os.listdir(folder)) == ["1", "2", "PROTECTED"]
        assert (folder / "1" / "PARAMS_ONLY").exists()
        checkpointer.set_best(2)
        checkpointer.thin_out()
        assert sorted(os.listdir(folder)) == ["2", "PROTECTED"]
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(2))
        with monkeypatch.context() as patched, pytest.raises(UserError, match=r"cannot be thinned out \(Read-only"):
            checkpointer.save(3, make_state(), wait=True)
            shutil.copytree(saved / "1", folder / "1")
            patched.setattr(os, "replace", fails(OSError(errno.EROFS, "Read-only file system")))
            checkpointer.thin_out()
    Checkpointer(tmp_path / "nothing", None, said).thin_out()
    assert not (tmp_path / "nothing").exists()


def test_the_same_step_can_be_saved_again(saver):
    saver.save(1, make_state(1))
    saver.save(1, make_state(2), wait=True)
    assert bits(saver.restore(make_state())[1]) == bits(make_state(2))
    assert os.listdir(saver.folder) == ["1"]


def test_readers_change_nothing_and_the_next_save_cleans_up(saved, tmp_path, said):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    for name in ("3.saving", "3.saving.orbax-checkpoint-tmp", "0.deleted"):
        shutil.copytree(saved / "1", folder / name)
    os.rename(folder / "2", folder / "2.replaced")  # killed between the two renames: it still counts
    (folder / "notes.saving").write_text("the user's own")
    before = sorted(os.listdir(folder))
    with Checkpointer(folder, 5, said) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore()[0] == 2
        assert sorted(os.listdir(folder)) == before
        checkpointer.save(4, make_state(), wait=True)
    assert sorted(os.listdir(folder)) == ["1", "2", "4", "notes.saving"]


def fails(error: Exception):
    def function(*_args: object, **_kwargs: object) -> None:
        raise error

    return function


@pytest.mark.parametrize("part", ["orbax.checkpoint.Checkpointer.save", "bert.runs.checkpoint.write_manifest"])
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
    monkeypatch.setattr(checkpoint, "write_manifest", fails(ZeroDivisionError()))
    saver.save(1, make_state())
    with pytest.raises(ZeroDivisionError):
        saver.wait()
    assert os.listdir(saver.folder) == []


def test_a_failed_replacement_leaves_what_it_was_to_replace(saver, monkeypatch):
    saver.save(1, make_state(1), wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_manifest", fails(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(UserError, match="Permission denied"):
            saver.save(1, make_state(2), wait=True)
    assert bits(saver.restore(make_state())[1]) == bits(make_state(1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path, said):
    (tmp_path / "run").write_text("a file where the run's folder should be")
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", 1, said)
    checkpointer.save(1, make_state())
    with pytest.raises(UserError, match=r"Not a directory.*run.*there is none yet"):
        checkpointer.close()
    with pytest.raises(UserError, match=r"PROTECTED cannot be written \(Not a directory"):
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
def test_a_full_disk_leaves_the_last_good_checkpoint_and_room(small_disk, said, caplog, monkeypatch, foreseen):
    random = np.random.default_rng(0)
    if not foreseen:  # a quota, say, or somebody else who writes at the same time
        monkeypatch.setattr(orbax_io, "_check_space", lambda *_: None)
    with Checkpointer(small_disk / "checkpoints", 2, said) as checkpointer:
        checkpointer.save(1, {"params": {"w": random.random(100_000)}}, wait=True)
        large = {str(number): random.random(20_000) for number in range(24)}
        with pytest.raises(UserError, match=r"step 2 could not be saved.*; step 1 is the last good one") as caught:
            checkpointer.save(2, {"params": large, "opt_state": large}, wait=True)
        assert ("No space left on device (7.7 MB needed, " in str(caught.value)) == foreseen
        assert os.listdir(checkpointer.folder) == ["1"]
        checkpointer.save(3, {"params": {"w": random.random(10_000)}}, wait=True)
        assert checkpointer.restore()[0] == 3
    assert caplog.records == []
