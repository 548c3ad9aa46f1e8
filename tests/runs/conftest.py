"""Checkpoints for the tests of runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bert.runs.checkpoint import Checkpointer
from tests.runs.checkpoint_states import Lines, make_state


@pytest.fixture
def messages() -> Lines:
    return Lines()


@pytest.fixture
def saver(tmp_path: Path, messages: Lines):
    with Checkpointer(tmp_path / "checkpoints", 2, messages) as checkpointer:
        yield checkpointer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoints folder with steps 1 and 2, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(folder, 5, print) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(step))
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the folder of `saved`."""
    return shutil.copytree(saved, tmp_path / "checkpoints")
