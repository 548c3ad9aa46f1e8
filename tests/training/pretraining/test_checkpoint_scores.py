"""Scores of checkpoints on labelled tasks: in the run, in a process that follows it, and the best checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import bert
from bert.commands.pretrain import main
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import save_run_config
from bert.files import exclusive_lock
from bert.runs.checkpoint_directory import CheckpointDirectory, has_params_only, write_manifest
from bert.runs.metrics_log import append_transfer_score, best_transfer_step, read_transfer_scores, write_results
from bert.runs.plots import Subject, make_curves, read_curves
from bert.runtime.interrupts import Interrupted
from bert.training.finetuning.starts import StartComparison
from bert.training.pretraining import checkpoint_scores, transfer
from bert.training.pretraining.checkpoint_scores import CheckpointScores, follow, score_rows
from bert.training.pretraining.transfer import transfer_config
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of

RECIPE = """
task: classification
data: {{dir: {folder}, max_length: 16, buckets: [16]}}
optimizer: {{learning_rate: {rate}}}
training: {{epochs: 1, batch_size: 8}}
"""

EVERY = ["--training.checkpoint_every=2", "--training.eval_every=2"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("task")
    rows = "".join(f"{'ba ri' if row % 3 else 'ko tu'} {'mi ' * (row % 4)},{'ab'[row % 2]}\n" for row in range(24))
    for split in ("train", "dev"):
        (folder / f"{split}.csv").write_text(f"text,label\n{rows}")
    for name, rate in (("slow", 1e-4), ("fast", 3e-2)):
        (folder / f"{name}.yaml").write_text(RECIPE.format(folder=folder, rate=rate))
    return [folder / "slow.yaml", folder / "fast.yaml"]


def options(corpus: Path, run: Path, recipes: list[Path]) -> list[str]:
    """Arguments of a run that scores each of its three checkpoints."""
    transfer = [f"--transfer={','.join(map(str, recipes))}", "--transfer_every=2"] if recipes else []
    return [f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *EVERY, *transfer]


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    assert main(options(corpus, run, [])) == 0
    return run


@pytest.fixture(scope="module")
def scored(corpus: Path, recipes: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is interrupted while its second checkpoint is scored, and resumed."""
    run = tmp_path_factory.mktemp("scored") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StartComparison, "scores", interrupted_at(4))
        assert main(options(corpus, run, recipes)) == 130
    assert [(line["step"], line["task"]) for line in read_transfer_scores(run)] == [
        (2, "slow"), (2, "fast"), (4, "slow"),
    ]  # fmt: skip
    assert main(options(corpus, run, recipes)) == 0
    return run


def interrupted_at(number: int) -> Any:
    """Returns a replacement of `StartComparison.scores` that receives a signal in the call of this number."""
    scores, calls = StartComparison.scores, []

    def interrupted(self: StartComparison, start: str) -> Iterator[float]:
        calls.append(start)
        if len(calls) == number:
            raise Interrupted(1, signal.SIGINT)
        return scores(self, start)

    return interrupted


@pytest.mark.medium
def test_each_checkpoint_is_scored_once_and_the_best_is_named(scored: Path) -> None:
    lines = [json.loads(line) for line in (scored / "transfer.jsonl").read_text().splitlines()]
    assert [(line["step"], line["task"]) for line in lines] == [
        (step, task) for step in (2, 4, 6) for task in ("slow", "fast")
    ]
    means = {step: np.mean([line["mean"] for line in lines if line["step"] == step]) for step in (2, 4, 6)}
    results = json.loads((scored / "results.json").read_text())
    assert results["best_step"] == max(means, key=means.__getitem__)
    assert CheckpointDirectory(scored / "checkpoints").best == results["best_step"]
    assert [task["pretrained"]["scores"] for task in results["transfer"]] == [line["scores"] for line in lines[-2:]]
    assert bert.load(scored, step=results["best_step"]).step == results["best_step"]


@pytest.mark.medium
def test_scores_are_those_of_fine_tuning_from_the_checkpoint_afterwards(scored, recipes, tmp_path) -> None:
    scores = {(line["step"], line["task"]): line["scores"] for line in read_transfer_scores(scored)}
    afterwards = bert.finetune(recipes[1], init=f"{scored}@2", output_dir=tmp_path / "run").results
    assert [afterwards["last"]["accuracy"]] == scores[2, "fast"]


@pytest.mark.medium
def test_training_is_bit_for_bit_unchanged(plain: Path, scored: Path) -> None:
    for step in (4, 6):
        one, other = (flatten_dict(bert.load(run, step=step).params) for run in (plain, scored))
        assert one.keys() == other.keys()
        for path, array in one.items():
            np.testing.assert_array_equal(array, other[path], err_msg=str(path))
    one, other = (
        [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines_of(run)]
        for run in (plain, scored)
    )
    assert one == other


@pytest.mark.medium
def test_following_gives_the_same_lines_also_if_it_is_interrupted(plain, scored, recipes, tmp_path, monkeypatch):
    run = Path(shutil.copytree(plain, tmp_path / "run"))
    configs = {str(recipes[1]): transfer_config(bert.Run(scored).config, str(recipes[1]))}
    monkeypatch.setattr(StartComparison, "scores", interrupted_at(2))
    with pytest.raises(Interrupted):
        follow(run, configs, print)
    with (run / "transfer.jsonl").open("a") as file:
        file.write('{"step": 4, "ta')  # killed while it wrote
    follow(run, configs, print)
    expected = [line for line in read_transfer_scores(scored) if line["task"] == "fast"]
    assert read_transfer_scores(run) == expected
    monkeypatch.setattr(StartComparison, "scores", interrupted_at(1))
    assert follow(run, configs, print) == expected  # nothing is measured again
    best = max(expected, key=lambda line: line["mean"])["step"]
    assert json.loads((run / "results.json").read_text())["best_step"] == best


@pytest.mark.slow
def test_a_process_that_trains_is_followed(plain, scored, recipes, corpus, tmp_path) -> None:
    """Another process trains. It ends with the weights of a run that nobody follows."""
    run, waits = tmp_path / "run", []
    configs = {str(recipes[1]): transfer_config(bert.Run(scored).config, str(recipes[1]))}

    def wait() -> None:
        waits.append(CheckpointDirectory(run / "checkpoints").steps())
        time.sleep(0.02)

    command = [sys.executable, "-m", "bert", "pretrain", *options(corpus, run, [])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as trains:
        while not (run / "config.yaml").is_file():
            assert trains.poll() is None, trains.stderr.read()
            time.sleep(0.02)
        lines = follow(run, configs, print, wait)
        assert trains.wait(60) == 0, trains.stderr.read()
    assert waits[0] == []  # it was followed before it saved anything
    assert lines == [line for line in read_transfer_scores(scored) if line["task"] == "fast"]
    assert json.loads((run / "results.json").read_text())["best_step"] == best_transfer_step(run)
    one, other = (flatten_dict(bert.load(path, step=6).params) for path in (plain, run))
    assert one.keys() == other.keys() and all(np.array_equal(array, other[path]) for path, array in one.items())


@pytest.mark.medium
def test_the_scores_are_in_the_plot(scored: Path) -> None:
    figure = make_curves(read_curves(scored), Subject())
    assert figure is not None
    [panel] = [axes for axes in figure.axes if axes.get_ylabel() == "fine-tuned"]
    assert [list(line.get_xdata()) for line in panel.lines] == [[2, 4, 6]] * 2


class Trainer:
    """Imitates a process that trains: saves small files as checkpoints of steps 1 to 5 and keeps the newest one."""

    def __init__(self, run: Path) -> None:
        self.run, self.directory, self.step = run, CheckpointDirectory(run / "checkpoints", 1), 0
        save_run_config(PretrainConfig(), run)

    def save(self) -> None:
        self.step += 1
        for part in ("params", "rest"):
            (self.directory.draft(self.step) / part).mkdir(parents=True)
            (self.directory.draft(self.step) / part / "values").write_text(str(self.step))
        write_manifest(self.directory.draft(self.step), self.step)
        self.directory.commit(self.step)
        self.directory.apply_retention(self.step)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer that saves two checkpoints while one is scored; step 3 has the highest score."""
    run = tmp_path / "run"
    run.mkdir()
    trainer = Trainer(run)

    def measure(scores: CheckpointScores, step: int) -> None:
        for _ in range(2 if trainer.step < 5 else 0):
            trainer.save()
        folder = trainer.directory.find()[step]
        if (folder / "params" / "values").read_text() != str(step):
            raise bert.UserError("the parameters are damaged")
        append_transfer_score(run, {"step": step, "task": "rte", "metric": "accuracy", "mean": 0.1 * (step == 3),
                                    "recipe": checkpoint_scores._digest(CONFIG)})  # fmt: skip
        scores.protect_best()

    monkeypatch.setattr(CheckpointScores, "measure", measure)
    monkeypatch.setattr(checkpoint_scores, "check_recipe", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint_scores, "final_subject", lambda *_: Subject())
    return trainer


CONFIG = FinetuneConfig(task="rte")


def follow_until_the_end(trainer: Trainer) -> list[dict[str, Any]]:
    """Follows a run that begins to save when it is followed, and ends when the last checkpoint is scored."""
    lock = exclusive_lock(trainer.run)

    def wait() -> None:
        if not trainer.step:
            return trainer.save()
        write_results(trainer.run, {"steps": trainer.step})
        lock.__exit__(None, None, None)
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_scores, "_check_length", lambda *_: None)
        lock.__enter__()
        return follow(trainer.run, {"rte": CONFIG}, print, wait)


def test_a_followed_run_deletes_checkpoints_meanwhile(trainer: Trainer) -> None:
    """Step 2 and 4 are gone when it is their turn, and the held ones are there until they are scored."""
    lines = follow_until_the_end(trainer)
    assert [line["step"] for line in lines] == [1, 3, 5]
    assert json.loads((trainer.run / "results.json").read_text()) == {"steps": 5, "best_step": 3}
    assert trainer.directory.steps() == [3, 5] and trainer.directory.best == 3
    assert has_params_only(trainer.run / "checkpoints" / "3")
    assert not (trainer.run / "checkpoints" / "HELD").exists()
    assert [row[:2] for row in score_rows(lines)] == [("step", "rte"), ("1", "0.0"), ("3", "10.0"), ("5", "0.0")]


def test_a_damaged_checkpoint_is_left_out(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer.save()
    (trainer.run / "checkpoints" / "1" / "params" / "values").write_text("2")
    assert [line["step"] for line in follow_until_the_end(trainer)] == [5]
    assert "checkpoints/1 is damaged: params/values has a wrong checksum; it is not scored" in caplog.text


def test_only_one_process_follows_a_run(trainer: Trainer) -> None:
    trainer.save()
    with exclusive_lock(trainer.directory.path), pytest.raises(bert.UserError, match="checkpoints is in use by"):
        follow_until_the_end(trainer)


def test_an_interrupted_run_ends_the_command(trainer: Trainer, monkeypatch, caplog) -> None:
    monkeypatch.setattr(checkpoint_scores, "_check_length", lambda *_: None)
    trainer.step = 5
    trainer.save()
    assert [line["step"] for line in follow(trainer.run, {"rte": CONFIG}, print)] == [6]
    assert "which has not ended: resume it, then repeat this command" in caplog.text
    assert not (trainer.run / "results.json").exists()


def test_the_best_checkpoint_has_scores_of_all_tasks_by_the_newest_recipes(tmp_path: Path) -> None:
    for step, task, recipe, mean in (
        (1, "a", "old", 0.9), (1, "a", "new", 0.5), (1, "b", "new", 0.5),
        (2, "a", "new", 0.6), (2, "b", "new", 0.5), (3, "a", "new", 0.99), (4, "a", "new", np.nan), (4, "b", "new", 1),
    ):  # fmt: skip
        append_transfer_score(tmp_path, {"step": step, "task": task, "metric": "f1", "mean": mean, "recipe": recipe})
    assert best_transfer_step(tmp_path) == 2
    assert [line["mean"] for line in read_transfer_scores(tmp_path)] == [0.5, 0.5, 0.6, 0.5, 0.99, None, 1]
    assert best_transfer_step(tmp_path / "nowhere") is None


def test_another_choice_of_tasks_selects_the_best_again(tmp_path: Path) -> None:
    """Resumes with another ``transfer``, and other ``--tasks``, also if no score is missing."""

    def scores_of(*tasks: str) -> CheckpointScores:
        return CheckpointScores(tmp_path, dict.fromkeys(tasks, CONFIG), None, print)

    for step, task, mean in ((1, "a", 0.9), (1, "b", 0.1), (2, "a", 0.5), (2, "b", 0.7)):
        scores_of("a", "b")._add(step, task, {"metric": "f1", "mean": mean})
    assert best_transfer_step(tmp_path) == 2
    scores_of("a").protect_best()
    assert best_transfer_step(tmp_path) == 1 and {line["task"] for line in read_transfer_scores(tmp_path)} == {"a"}
    scores_of("c")._add(3, "c", {"metric": "f1", "mean": 0.2})
    assert best_transfer_step(tmp_path) == 3
    scores_of("a", "b").protect_best()
    assert best_transfer_step(tmp_path) == 2
    lines = (tmp_path / "transfer.jsonl").read_text()
    scores_of("a", "b").protect_best()
    assert (tmp_path / "transfer.jsonl").read_text() == lines


def test_scores_belong_to_a_run_by_any_path(tmp_path: Path) -> None:
    """The folder of a task whose labels come from docstrings is inside of the run."""
    for task in ("word_order", "rte"):
        keys = set()
        for path in ("runs/x", "./runs/x", str(tmp_path)):
            config = dataclasses.replace(PretrainConfig(), output_dir=path)
            recipe = transfer_config(config, task) if task == "word_order" else dataclasses.replace(CONFIG, init=path)
            keys.add((checkpoint_scores._digest(recipe), json.dumps(transfer._key_of_scores(3, recipe))))
        assert len(keys) == 1


def test_errors(corpus: Path, recipes: list[Path], tmp_path: Path, fails) -> None:
    arguments = options(corpus, tmp_path / "run", [])
    assert "transfer_every is 2, but transfer is null" in fails(main, *arguments, "--transfer_every=2")
    arguments += [f"--transfer={recipes[0]}"]
    assert "checkpoint_every is 2" in fails(main, *arguments, "--transfer_every=3")
    lora = tmp_path / "lora.yaml"
    lora.write_text(recipes[0].read_text() + "lora: {rank: 2}\n")
    said = fails(main, *arguments[:-1], f"--transfer={lora}", "--transfer_every=2")
    assert f"transfer {lora} trains all weights, but lora.rank is set: set it to null" in said
    save_run_config(CONFIG, tmp_path)
    with pytest.raises(bert.UserError, match="holds a fine-tuning run: name the folder of a pretraining run"):
        follow(tmp_path, {}, print)
