"""Names, completeness and retention of checkpoints, with folders that hold nothing but a manifest."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from bert.runs.checkpoint_directory import MANIFEST, CheckpointDirectory


def make(directory: CheckpointDirectory, *names: object) -> None:
    for name in names:
        (directory.path / str(name)).mkdir(parents=True)
        (directory.path / str(name) / MANIFEST).touch()


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints", max_to_keep=2)


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir())


def test_an_absent_folder_has_no_checkpoints(directory: CheckpointDirectory) -> None:
    assert (directory.find(), directory.steps(), directory.best) == ({}, [], None)
    assert not directory.path.exists()


def test_steps_are_complete_checkpoints_in_order(directory: CheckpointDirectory) -> None:
    make(directory, 10, 9, "11.saving", "12.deleted", "013", "notes")
    (directory.path / "8").mkdir()
    assert directory.steps() == [9, 10]
    assert sorted(directory.find()) == [8, 9, 10]
    directory.damaged.add(10)
    assert directory.good_steps == [9]


def test_a_draft_takes_the_place_of_its_step(directory: CheckpointDirectory) -> None:
    make(directory, 5, "5.saving")
    (directory.path / "5.saving" / "new").touch()
    directory.commit(5)
    assert names(directory) == ["5"]
    assert (directory.path / "5" / "new").exists()


def test_what_a_kill_leaves_is_removed_or_put_back(directory: CheckpointDirectory) -> None:
    make(directory, 1, "1.replaced", "2.replaced", "3.saving", "4.deleted", "3.saving.orbax-checkpoint-tmp")
    directory.remove_incomplete()
    assert names(directory) == ["1", "2"]


def test_the_newest_and_the_best_stay(directory: CheckpointDirectory) -> None:
    make(directory, 1, 2, 3, 4, 5, 9)
    directory.set_best(1)
    directory.damaged.add(4)
    directory.apply_retention(5)
    assert directory.steps() == [1, 3, 5, 9], "9 is from before a return to an older checkpoint"
    assert directory.best == 1


def test_a_full_disk_that_takes_no_copy_of_the_best_is_an_error_of_the_system(directory, monkeypatch) -> None:
    """Where there are no hard links; the draft leaves no trace."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make(directory, 1, 2, 3)
    (directory.path / "1" / "params").touch()
    directory.set_best(1)
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="No space left") as error:
        directory.apply_retention(3)
    assert error.value.errno is not None
    assert names(directory) == ["1", "2", "3", "PROTECTED"]
