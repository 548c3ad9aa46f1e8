"""Runs on a corpus that is read while they train: resumed anywhere, they end as an uninterrupted one does."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bert.commands import main as command
from bert.commands.pretrain import main
from bert.config import DataConfig, PretrainConfig, TrainingConfig
from bert.data.corpus.documents import corpus_files
from bert.data.pretraining import build
from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.row_stream import RowReader, Start
from bert.errors import UserError
from bert.training.loop import TrainLoop
from bert.training.pretraining.data import _to_integers, _to_start, _warn_of_trained_files
from bert.training.pretraining.setup import check_readers
from tests.conftest import SMALL_RUN, STREAMED
from tests.helpers import lines_of, state_of


@pytest.fixture(scope="module")
def arguments(corpus: Path) -> list[str]:
    return [f"--data.train={corpus}", f"--data.eval={corpus}", *STREAMED, *SMALL_RUN]


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of each reader are mixed."""
    monkeypatch.setattr(build, "SHARD_BYTES", 250_000)


def train(run: Path, arguments: list[str], status: int = 0) -> None:
    assert main([*arguments, f"--output_dir={run}"]) == status


def assert_same(run: Path, whole: Path) -> None:
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


def remove_checkpoints(run: Path, last: int) -> None:
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > last:
            shutil.rmtree(path)


def test_values_that_cannot_work_are_one_sentence() -> None:
    def check(training: dict[str, Any] | None = None, **data: Any) -> None:
        values = {"train": "a.txt", "eval": "b.txt", "streaming": True, **data}
        PretrainConfig(data=DataConfig(**values), training=TrainingConfig(**{"steps": 1, **(training or {})})).check()

    check()
    for changes, message in (
        ({"eval": None}, r"data\.streaming is true, but data\.eval is null: set data\.eval"),
        (
            {"near_duplicates": 0.8},
            r"data\.near_duplicates is 0\.8, but data\.streaming does not know the whole corpus",
        ),
        ({"static_masking": True}, r"data\.static_masking is true, but data\.streaming"),
        ({"dupe_factor": 2}, r"data\.dupe_factor is 2, but data\.streaming"),
        ({"stream_readers": 3}, r"data\.stream_readers is 3, but training\.batch_size is 32: use a divisor"),
        (
            {"training": {"steps": None, "epochs": 1.0}},
            r"epochs is 1\.0, but data\.streaming is true: set training\.steps",
        ),
        ({"streaming": False, "shuffle_buffer": 1}, r"data\.shuffle_buffer is 1, but data\.streaming is false"),
    ):
        with pytest.raises(UserError, match=message):
            check(**changes)
    check_readers(DataConfig(), 3)
    with pytest.raises(UserError, match=r"data\.stream_readers is 4, which 3 hosts cannot share"):
        check_readers(DataConfig(streaming=True), 3)


def test_examples_of_a_stream_are_not_built(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["examples", *arguments]) == 2
    assert "examples of a stream are not built: set it to false" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(arguments: list[str], tmp_path: Path, mixed: None, capsys) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, arguments)
    printed = capsys.readouterr().out
    assert "streamed by 2 readers, 30 documents" not in printed
    assert "streamed by 2 readers for training, 30 documents" in printed
    assert "stream: the first rows are ready" in printed
    results = json.loads((whole / "results.json").read_text())
    assert "train_rows" not in results["corpus"]
    assert results["corpus"]["eval_documents"] == 30
    shutil.copytree(whole, run)
    remove_checkpoints(run, 3)
    train(run, arguments)
    assert_same(run, whole)
    # Without the places all is read from the start, to the same end.
    remove_checkpoints(run, 3)
    (run / "stream.json").unlink()
    train(run, arguments)
    assert_same(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 4, 5])
def test_a_run_stopped_at_any_step_resumes_exactly(
    arguments: list[str], tmp_path: Path, mixed: None, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """SIGTERM while the batch of ``step`` is made, in two phases, the second with longer rows and larger batches."""
    phased = [*arguments, "--phases.1.steps=3", "--phases.1.sequence_length=16", "--phases.2.batch_size=16"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, phased)
    batch, loop = PretrainingLoader.batch, TrainLoop.run
    training: list[bool] = []

    def interrupting(loader: PretrainingLoader, number: int) -> dict[str, np.ndarray]:
        if number == step and training:
            signal.raise_signal(signal.SIGTERM)
        return batch(loader, number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "run", lambda *inputs: (training.append(True), loop(*inputs))[1])
        patch.setattr(PretrainingLoader, "batch", interrupting)
        train(run, phased, 143)
    train(run, phased)
    assert_same(run, whole)


@pytest.mark.slow
def test_another_corpus_is_refused_and_a_lost_file_ends_the_run(
    arguments: list[str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "corpus.txt"
    shutil.copy(corpus, text)
    own = [f"--data.train={text}", *arguments[1:]]
    run = tmp_path / "run"
    train(run, own)
    remove_checkpoints(run, 3)
    with text.open("a") as file:
        file.write("\n\nOne more document.\n")
    assert command(["pretrain", *own, f"--output_dir={run}"]) == 2
    assert "the data is not what the run in" in capsys.readouterr().err


def test_places_survive_json(tmp_path: Path) -> None:
    start = Start(3, 6, 120, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert _to_start(_to_integers(start, 2)) == start
    beginning = _to_start(_to_integers(Start(), 2))
    assert beginning == Start(state=((0,) * 4,) * 2)


@pytest.mark.slow
def test_a_phase_that_shares_a_stream_is_timed_without_reading_ahead(arguments, tmp_path, mixed, monkeypatch) -> None:
    first_rows, take = [], RowReader.take

    def noting(reader: RowReader, rows: np.ndarray) -> Any:
        first_rows.append(int(rows[0]))
        return take(reader, rows)

    monkeypatch.setattr(RowReader, "take", noting)
    train(tmp_path / "run", [*arguments, "--phases.1.steps=3", "--phases.2.learning_rate=1e-4"])
    assert first_rows == sorted(first_rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_held_out_file_that_is_trained_on_is_told(streaming: bool, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "held.txt"):
        (tmp_path / name).write_text("One. Two.\n\nThree. Four.\n")
    said: list[str] = []
    for train, held_out in (("*.txt", "held.txt"), ("a.txt", "held.txt"), ("*.txt", "../*/[ab].txt")):
        data = DataConfig(train=[str(tmp_path / train)], streaming=streaming)
        _warn_of_trained_files(corpus_files(str(tmp_path / held_out)), data, said.append)
    first, second = said
    assert first == (
        f"warning: {tmp_path / 'held.txt'} is in data.train as well: held-out scores are of text that was trained on"
    )
    assert "a.txt and 1 more of data.eval are in data.train" in second
