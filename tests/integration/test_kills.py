"""Real `kill -9` at random moments: a resumed run equals an uninterrupted one bit for bit."""

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax
import numpy as np
import pytest

from bert.runs.metrics_log import read_metrics
from tests.conftest import NEXT, SMALL_RUN, STREAMED, translation_options
from tests.helpers import lines_of, results_of, state_of

pytestmark = pytest.mark.slow

# A server that has imported everything and forks: processes of their own that do not spend seconds on imports each.
LIVES = multiprocessing.get_context("forkserver")
LIVES.set_forkserver_preload(["bert.training.pretraining.run", "bert.training.finetuning.run"])


def live(command: str, arguments: list[str], log: Path) -> None:
    """The body of a process: the command on one device, with what it says in a file."""
    os.environ["XLA_FLAGS"] = ""  # read when the first array is made
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from bert.commands import main

    sys.exit(main([command, *arguments]))


def start(command: str, run: Path, arguments: list[str]) -> BaseProcess:
    log = run.with_name(f"{run.name}.log")
    process = LIVES.Process(target=live, args=(command, [*arguments, f"--output_dir={run}"], log))
    process.start()
    return process


def logged(run: Path) -> int:
    lines = read_metrics(run)
    return lines[-1]["step"] if lines else 0


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.saving*"))


def wait_for(process: BaseProcess, true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.is_alive() and not true() and time.monotonic() < end:
        time.sleep(0.002)


def kill_again_and_again(command: str, run: Path, arguments: list[str], kills: int, steps: int) -> dict[str, int]:
    """Starts the run and kills it ``kills`` times; returns how many were killed where.

    Every fifth kill comes at any time from the start of the process on, as long as the run has not got further than the
    next kill needs; the others once training has got a little further than before, every second of these while a
    checkpoint is being written.
    """
    draw = random.Random(0)
    counts = {"anywhere": 0, "in training": 0, "in a save": 0}
    for number in range(kills):
        before = logged(run)
        process = start(command, run, arguments)
        if number % 5 == 0:
            latest = max(before, steps * number // (kills + 2)) + 1
            wait_for(process, lambda latest=latest: logged(run) >= latest, draw.uniform(0, 4))
        else:
            target = max(before, steps * (number + draw.random()) // (kills + 2)) + 1
            wait_for(process, lambda target=target: logged(run) >= target, 600)
            saves = bool(number % 2)
            wait_for(process, lambda saves=saves: is_saving(run) == saves, 60)
            time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -9, f"ended with {process.exitcode} before kill {number + 1}"
        place = "anywhere" if number % 5 == 0 else "in a save" if is_saving(run) else "in training"
        counts[place] += 1
        print(f"kill {number + 1} {place}: log at step {logged(run)}, checkpoints {checkpoints_of(run)}")
    return counts


def checkpoints_of(run: Path) -> list[str]:
    folder = run / "checkpoints"
    return (
        sorted((path.name for path in folder.iterdir()), key=lambda name: (len(name), name)) if folder.exists() else []
    )


def complete(run: Path) -> list[str]:
    return [name for name in checkpoints_of(run) if name.isdigit()]


def scalars_of(run: Path) -> set[tuple[str, int, float]]:
    """TensorBoard's scalars as (tag, step, value), without timings. Each tag occurs at most once per step."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith("tokens_per_second")]
    scalars = [(tag, event.step, event.value) for tag in tags for event in events.Scalars(tag)]
    assert len(scalars) == len({(tag, step) for tag, step, _ in scalars})
    return set(scalars)


def assert_alike(killed: Path, whole: Path) -> None:
    assert lines_of(killed) == lines_of(whole)
    assert scalars_of(killed) <= scalars_of(whole), "a kill loses seconds of events"
    assert {**results_of(killed), "seconds": 0, "timing": 0} == {**results_of(whole), "seconds": 0, "timing": 0}
    jax.tree.map(np.testing.assert_array_equal, state_of(killed), state_of(whole))
    assert complete(killed) == complete(whole)
    names = {path.relative_to(whole) for path in (whole / "predictions").rglob("*")}
    assert {path.relative_to(killed) for path in (killed / "predictions").rglob("*")} == names
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}


def finish(command: str, run: Path, arguments: list[str]) -> None:
    process = start(command, run, arguments)
    process.join()
    assert process.exitcode == 0, run.with_name(f"{run.name}.log").read_text()[-3000:]


def pretraining(corpus: Path, steps: int) -> list[str]:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--training.steps={steps}", "--training.log_every=7"]
    return [*arguments, "--training.checkpoint_every=25", "--training.eval_every=50"]


def finetuning(pretrained: Path, sst2: Path, epochs: int) -> list[str]:
    """Epochs of five steps."""
    arguments = ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--data.max_length=32"]
    arguments += ["--data.buckets=32", "--training.batch_size=8", f"--training.epochs={epochs}"]
    return [*arguments, "--training.log_every=4", "--training.checkpoint_every=7", "--training.eval_every=5"]


def embedding(pretrained: Path, folder: Path, epochs: int) -> list[str]:
    """Epochs of five steps, in two micro-batches each."""
    folder.mkdir()
    for split, count in (("train", 40), ("dev", 12)):
        rows = [
            {"query": f"ba {row}", "positive": f"ri {row}", "negatives": ["tu"] * (row % 2)} for row in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *finetuning(pretrained, folder, epochs)[1:],
        "--config=embedding",
        "--training.gradient_accumulation_steps=2",
    ]


def translating(folder: Path, steps: int) -> list[str]:
    folder.mkdir()
    arguments = [*translation_options(folder), "--training.epochs=null", f"--training.steps={steps}"]
    arguments += ["--training.average_checkpoints=2", "--training.log_every=4"]
    return [*arguments, "--training.checkpoint_every=7", "--training.eval_every=15"]


@pytest.fixture
def options(kind: str, steps: int, request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The options of a run of one kind."""
    corpus, pretrained, sst2 = map(request.getfixturevalue, ("corpus", "pretrained", "sst2"))
    average = ["--training.average_checkpoints=3", "--training.tokens_per_batch=256"]
    return {
        "pretraining": lambda: pretraining(corpus, steps),
        "next tokens": lambda: [*pretraining(corpus, steps), *NEXT],
        "a stream": lambda: [*pretraining(corpus, steps), f"--data.eval={corpus}", *STREAMED],
        "a classifier": lambda: finetuning(pretrained, sst2, steps // 5),
        "an average": lambda: [*finetuning(pretrained, sst2, steps // 5), *average],
        "adapters": lambda: [*finetuning(pretrained, sst2, steps // 5), "--lora.rank=2"],
        "an embedding": lambda: embedding(pretrained, tmp_path / "data", steps // 5),
        "a translation": lambda: translating(tmp_path / "data", steps),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "steps", "kills", "predicted"),
    [
        pytest.param("pretraining", 200, 2, None, marks=pytest.mark.slice),
        pytest.param("next tokens", 200, 2, None, marks=pytest.mark.slice),
        pytest.param("a classifier", 200, 2, ("dev.tsv", 18), marks=pytest.mark.slice),
        ("a stream", 200, 5, None),
        ("a classifier", 300, 10, ("dev.tsv", 18)),
        ("an average", 300, 10, ("dev.tsv", 18)),
        ("adapters", 300, 10, ("dev.tsv", 18)),
        ("an embedding", 300, 10, ("dev.tsv", 13)),
        ("a translation", 300, 10, ("test_a.txt", 5)),
    ],
)
def test_a_killed_run_equals_an_uninterrupted_one(
    steps: int, kills: int, predicted: tuple[str, int] | None, options: list[str], tmp_path: Path
) -> None:
    """The kills come at any time, and while a checkpoint is written."""
    command = "finetune" if predicted else "pretrain"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(command, whole, options)
    print(kill_again_and_again(command, killed, options, kills, steps))
    assert logged(killed) < steps
    finish(command, killed, options)
    assert_alike(killed, whole)
    if predicted:
        file, lines = predicted
        assert len((killed / "predictions" / file).read_text().splitlines()) == lines


def test_a_pretraining_run_killed_twenty_times_equals_an_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    steps = 800
    arguments = pretraining(corpus, steps)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish("pretrain", whole, [*arguments, f"--data.cache_dir={tmp_path / 'cache'}"])
    arguments.append(f"--data.cache_dir={tmp_path / 'another'}")  # the building of examples is interrupted as well
    counts = kill_again_and_again("pretrain", killed, arguments, 20, steps)
    print(counts)
    assert counts["in a save"] >= 3
    assert counts["in training"] >= 3
    assert logged(killed) < steps

    # Two at a time: the second one is sent away, and the first does not notice.
    def begun() -> int:
        return (tmp_path / "killed.log").read_text().count("resumes at step")

    lives = begun()
    first = start("pretrain", killed, arguments)
    wait_for(first, lambda: begun() > lives, 600)
    second = LIVES.Process(
        target=live, args=("pretrain", [*arguments, f"--output_dir={killed}"], tmp_path / "second.log")
    )
    second.start()
    second.join()
    assert second.exitcode == 2
    assert f"is in use by process {first.pid} on " in (tmp_path / "second.log").read_text()
    first.join()
    assert first.exitcode == 0
    assert_alike(killed, whole)
