"""Damaged checkpoints: seen, named, and never restored."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bert.errors import UserError
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import MANIFEST, verify_manifest, write_manifest
from tests.runs.checkpoint_states import bits, files, flip_byte, flip_one, largest, make_state


@pytest.mark.medium
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


@pytest.mark.medium
def test_a_byte_flipped_in_any_file_is_never_restored(copied, messages):
    """Damages each file of a checkpoint in turn. The restored state is always the previous checkpoint."""
    expected = bits(make_state(1))
    paths = files(copied / "2")
    assert len(paths) > 5
    for number, path in enumerate(paths, start=1):
        whole = path.read_bytes()
        flip_byte(path)
        with Checkpointer(copied, 2, messages) as checkpointer:
            step, state = checkpointer.restore(make_state())
        assert (step, bits(state)) == (1, expected), path
        assert len(messages) == number
        assert path.name in messages[-1]
        assert "using the checkpoint of step 1 instead" in messages[-1]
        path.write_bytes(whole)


@pytest.mark.medium
def test_flipped_bytes_of_the_manifest_are_seen(saved, tmp_path):
    """Changed white space and digits of the step as well: whatever is not as written is not believed."""
    shutil.copytree(saved / "2", tmp_path / "2")
    path = tmp_path / "2" / MANIFEST
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):  # every fifth, to be quick: names, sizes, sums, spaces, line ends
        flip_byte(path, place)
        assert verify_manifest(path.parent), f"byte {place} of {whole[place - 9 : place + 9]!r}"
        path.write_bytes(whole)


def cut_short(folder: Path) -> str:
    path = largest(folder)
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def remove_file(folder: Path) -> str:
    (path := largest(folder)).unlink()
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
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(copied, messages, damage):
    named = damage(copied / "2")
    with Checkpointer(copied, 2, messages) as checkpointer:
        step, state = checkpointer.restore(make_state())
        assert (step, bits(state)) == (1, bits(make_state(1)))
        assert len(messages) == 1
        for words in (str(copied / "2"), named, "using the checkpoint of step 1 instead"):
            assert words in messages[0]
        assert checkpointer.restore_params()[0] == 1

        # The damaged one is not in the way when training reaches its step again.
        checkpointer.save(2, make_state(5), wait=True)
        assert bits(checkpointer.restore(make_state())[1]) == bits(make_state(5))


def test_litter_of_the_system_is_no_damage(saved, tmp_path):
    shutil.copytree(saved / "2", tmp_path / "2")
    (tmp_path / "2" / "params" / ".DS_Store").write_text("")
    assert verify_manifest(tmp_path / "2") == []


def test_what_orbax_cannot_read_is_passed_over_as_well(copied, messages):
    folder = copied / "2"
    (folder / "params" / "manifest.ocdbt").write_text("nonsense")
    write_manifest(folder, 2)
    with Checkpointer(copied, 2, messages) as checkpointer:
        assert checkpointer.restore(make_state())[0] == 1
    assert "orbax cannot read it" in messages[0]


def test_no_undamaged_checkpoint_is_an_error(copied, messages):
    for step in ("1", "2"):
        flip_one(copied / step)
    with Checkpointer(copied, 2, messages) as checkpointer:
        with pytest.raises(UserError, match=r"2 is damaged.*1 is damaged.*no other checkpoint"):
            checkpointer.restore()
        with pytest.raises(UserError, match="choose another step"):
            checkpointer.restore(step=1)
        with pytest.raises(UserError, match=r"no checkpoint of step 3: .* 1, 2"):
            checkpointer.restore_params(step=3)
    assert messages == []


def test_damaged_checkpoints_do_not_push_out_good_ones(copied, messages):
    with Checkpointer(copied, 2, messages) as checkpointer:
        flip_one(copied / "2")
        checkpointer.restore()
        checkpointer.save(3, make_state(), wait=True)
        assert checkpointer.steps() == [1, 3]


def test_a_later_checkpoint_of_an_abandoned_line_does_not_push_out_the_new_one(copied, messages):
    os.rename(copied / "2", copied / "20")
    with Checkpointer(copied, 1, messages) as checkpointer:
        assert checkpointer.restore()[0] == 1  # 20 is not the step in its manifest
        checkpointer.save(10, make_state(), wait=True)
        assert checkpointer.steps() == [10, 20]
        checkpointer.save(20, make_state(), wait=True)
        assert checkpointer.steps() == [20]


def test_damage_of_parameters_outlives_the_removal_of_the_rest(copied, saved, messages):
    flip_one(copied / "1" / "params")
    with Checkpointer(copied, 1, messages) as checkpointer:
        checkpointer.set_best(1)
        checkpointer.save(3, make_state(3), wait=True)
        assert not (copied / "1" / "rest").exists()
        assert "wrong checksum" in verify_manifest(copied / "1")[0]
        assert checkpointer.restore_best_params()[0] == 3
    shutil.copytree(saved / "2", copied / "2")
    (copied / "2" / MANIFEST).write_text("{}")
    with Checkpointer(copied, 1, messages) as checkpointer:
        checkpointer.set_best(2)
        checkpointer.thin_out()
        assert sorted(os.listdir(copied)) == ["2", "3", "PROTECTED"], "what no manifest vouches for is left alone"
        assert (copied / "2" / "rest").exists()
