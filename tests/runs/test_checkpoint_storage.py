"""Arrays sharded over several hosts: their files and how they load. One process simulates all hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bert.errors import UserError
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import MANIFEST, CheckpointDirectory, listed_files, write_manifest
from bert.runs.checkpoint_storage import MultihostStorage
from bert.runs.mirror import Mirror
from bert.runs.orbax_io import PARAMS, keep_whole, load_items, save_items, save_parts

WEIGHTS = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.fixture
def halves() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"), memory_kind="pinned_host")


def test_each_part_has_a_file_and_comes_back_alone_or_in_the_whole(halves: NamedSharding, tmp_path: Path) -> None:
    items = {PARAMS: {"layer": {"kernel": jax.device_put(WEIGHTS, halves), "bias": np.ones(3, np.float32)}}}
    save_parts(tmp_path / "1", items, is_shared=True)
    folder = tmp_path / "1" / PARAMS / "layer.kernel"
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert files == {"zarr.json", "c/0/0", "c/1/0"}
    write_manifest(tmp_path / "1", 1)
    names = {path.relative_to(tmp_path / "1").as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert listed_files(tmp_path / "1") == names - {MANIFEST}
    whole = load_items(tmp_path / "1", (PARAMS,), keep_whole)[PARAMS]["layer"]
    assert isinstance(whole["kernel"], np.ndarray)
    np.testing.assert_array_equal(whole["kernel"], WEIGHTS)
    np.testing.assert_array_equal(whole["bias"], np.ones(3))
    placed = []

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding | None:
        placed.append((path, tuple(shape)))
        return halves if path.endswith("kernel") else None

    parts = load_items(tmp_path / "1", (PARAMS,), place)[PARAMS]["layer"]
    assert sorted(placed) == [("params/layer/bias", (3,)), ("params/layer/kernel", (8, 4))]
    assert parts["kernel"].sharding == halves
    for part in parts["kernel"].addressable_shards:
        np.testing.assert_array_equal(part.data, WEIGHTS[part.index])


def test_a_whole_array_comes_back_in_parts(halves: NamedSharding, tmp_path: Path) -> None:
    """A run on one host may resume on several."""
    save_items(tmp_path / "1", {PARAMS: {"kernel": WEIGHTS}})
    kernel = load_items(tmp_path / "1", (PARAMS,), lambda path, shape: halves)[PARAMS]["kernel"]
    assert [part.data.shape for part in kernel.addressable_shards] == [(4, 4), (4, 4)]
    np.testing.assert_array_equal(kernel, WEIGHTS)


def test_parts_are_not_saved_after_an_error_which_one_host_has_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {PARAMS: {"kernel": WEIGHTS}, "step": 1}
    storage = MultihostStorage(keep_whole, mirror=None, pull=lambda: None)
    with Checkpointer(tmp_path / "checkpoints", 3, print, storage=storage) as checkpoints:

        def save_after_an_error(step: int) -> None:
            try:
                raise UserError("the data cannot be read")
            except UserError:
                checkpoints.save(step, state)

        save_after_an_error(1)
        checkpoints.wait()
        monkeypatch.setattr("bert.runs.checkpoint_storage.is_part", lambda leaf: True)
        save_after_an_error(2)
        checkpoints.save(3, state, wait=True)
        assert checkpoints.steps() == [1, 3]
        np.testing.assert_array_equal(checkpoints.restore_params(3)[1]["kernel"], WEIGHTS)


def test_hosts_without_a_shared_disk_meet_in_the_store(
    bucket: Any, halves: NamedSharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second host uploads its parts, and the main process completes the checkpoint. Both hosts restore it."""
    monkeypatch.setattr("bert.runs.checkpoint_storage.is_part", lambda leaf: True)
    mirrors = [Mirror(tmp_path / name, "memory://bucket/run") for name in ("main", "second")]
    for mirror in mirrors:
        mirror.folder.mkdir()
    main, second = (MultihostStorage(keep_whole, mirror, pull=mirror.pull) for mirror in mirrors)
    second.is_writer = False
    folders = [CheckpointDirectory(mirror.folder / "checkpoints") for mirror in mirrors]
    for directory in folders:
        directory.path.mkdir()
    items = {PARAMS: {"kernel": jax.device_put(WEIGHTS, halves)}}
    second.write(folders[1], 2, items)
    assert not list(folders[1].path.iterdir())
    uploaded = bucket.find("/bucket/run")
    assert uploaded and not any(name.endswith(MANIFEST) for name in uploaded)
    main.write(folders[0], 2, items)
    mirrors[0].push()
    mirrors[1].pull()
    for directory in folders:
        with Checkpointer(directory.path, 1, print) as checkpoints:
            step, params = checkpoints.restore_params()
        assert step == 2
        np.testing.assert_array_equal(params["kernel"], WEIGHTS)
