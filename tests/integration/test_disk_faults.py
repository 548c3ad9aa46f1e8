"""Disks and data that fail under a run: one sentence, nothing lost, and the run resumes and ends in the same state."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bert.commands.cli.arguments import run_program
from bert.commands.pretrain import main
from bert.data.pretraining.dataset import ShardReader
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of, state_of
from tests.messages import has_all


def assert_as_if_nothing_had_been(run: Path, whole: Path) -> None:
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


def vanish(shard: Path) -> str:
    shard.rename(shard.with_suffix(".gone"))
    return "it has vanished"


def cut_short(shard: Path) -> str:
    os.truncate(shard, shard.stat().st_size // 2)
    return "it has been changed during the run"


def overwrite(shard: Path) -> str:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    os.utime(shard, (1.6e9, 1.6e9))  # within the resolution of a time stamp, a change in place may not show
    return "it has been changed during the run"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [vanish, cut_short, overwrite])
def test_a_shard_that_fails_in_the_middle_is_named_and_the_run_goes_on(
    pretrained: Path, corpus: Path, tmp_path: Path, monkeypatch, fails, fault
) -> None:
    cache, run = tmp_path / "cache", tmp_path / "run"
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--data.cache_dir={cache}", f"--output_dir={run}"]
    take, reason = ShardReader.take, []

    def fail_at_step_five(rows: ShardReader, indices: np.ndarray):
        log = run / "metrics.jsonl"
        if not reason and log.exists() and '"step": 4' in log.read_text():
            [shard] = cache.glob("*/train-00000.arrow")
            reason.append((shard, fault(shard)))
        return take(rows, indices)

    with monkeypatch.context() as patch:
        patch.setattr(ShardReader, "take", fail_at_step_five)
        error = fails(main, *arguments)
    [(shard, why)] = reason
    assert has_all(error, f"{shard} is damaged ({why})", f"folder {shard.parent}")
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    assert saved in (4, 5)  # beyond the last regular one
    again = fails(main, *arguments)  # not trained on in the next start either
    assert str(shard) in again
    for path in shard.parent.iterdir():
        path.unlink()
    shard.parent.rmdir()
    assert main(arguments) == 0
    assert_as_if_nothing_had_been(run, pretrained)


@pytest.fixture
def disk(tmp_path: Path):
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_wherever_the_disk_is_full_the_run_stops_with_a_sentence_and_goes_on(
    pretrained: Path, corpus: Path, disk: Path, capsys
) -> None:
    """A little more room at every start, so that one thing after the other is the first that has none."""
    run, filler = disk / "run", disk / "filler"
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--output_dir={run}"]
    failed, reached = 0, 0
    for kilobytes in (0, 8, 60, 180, 340):
        filler.unlink(missing_ok=True)
        stat = os.statvfs(disk)
        filler.write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - kilobytes * 1024)))
        capsys.readouterr()
        status = run_program(main)(arguments)
        error = capsys.readouterr().err
        assert status in (0, 2)
        if status:
            failed += 1
            [message] = [line for line in error.splitlines() if not line.startswith("warning: ")]
            assert message.startswith("error: ")
            assert "space" in error
        good = [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
        assert max(good, default=0) >= reached  # what was saved stays
        reached = max(good, default=0)
    assert failed >= 2
    filler.unlink()
    assert main(arguments) == 0
    assert_as_if_nothing_had_been(run, pretrained)
