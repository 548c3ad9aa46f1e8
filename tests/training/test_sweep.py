"""Sweeps: a run for each trial, which is not repeated; the table; what Optuna suggests and ends early."""

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.finetune import main
from bert.commands.pretrain import main as pretrain
from bert.config import DataConfig, FinetuneConfig, PretrainConfig, TaskDataConfig
from bert.config.sweep import Range
from bert.errors import UserError
from bert.runs.folder import open_run
from bert.runs.loggers import RunStart
from bert.runs.metrics_log import read_metrics
from bert.runs.mirror import local_folder
from bert.runs.sweep_folder import open_sweep
from bert.training.launch import RunRequest
from bert.training.sweep import (
    PrunedTrial,
    Pruning,
    find_trial_name,
    incomparable,
    main_metric,
    rank,
    should_prune,
    suggest,
    table,
)
from tests.conftest import SMALL_RUN
from tests.helpers import assert_same_sweep

RATE = "optimizer.learning_rate"
URL = "memory://bucket/sweep"


@pytest.fixture(scope="module")
def sst2_arguments(pretrained, sst2) -> list[str]:
    sizes = ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8"]
    return ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--training.epochs=1", *sizes]


@pytest.mark.slow
def test_a_sweep_has_a_run_for_each_trial_and_repeats_none(sst2_arguments, tmp_path, capsys):
    folder = tmp_path / "sweep"
    arguments = [*sst2_arguments, f"--output_dir={folder}"]
    assert main([*arguments, "--sweep", f"{RATE}=1e-3,3e-3"]) == 0
    names = ["learning_rate=1e-3", "learning_rate=3e-3"]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", *names, "sweep.json"]
    sweep = json.loads((folder / "sweep.json").read_text())
    assert (sweep["metric"], sweep["higher_is_better"]) == ("accuracy", True)
    scores = {name: bert.Run(folder / name).results["dev"]["accuracy"] for name in names}
    assert {trial["name"]: trial["score"] for trial in sweep["trials"]} == scores
    assert scores[sweep["best"]] == max(scores.values())
    printed = capsys.readouterr().out
    assert "trial 1 of 2: learning_rate=1e-3\n" in printed and "trial 2 of 2: learning_rate=3e-3\n" in printed
    assert "2 trials, best" in printed and f"best: {folder / sweep['best']}\n" in printed

    written = [(folder / name / "results.json").stat().st_mtime_ns for name in names]
    assert main([*arguments, f"--sweep={RATE}=3e-3,0.001"]) == 0, "the same values"
    assert [(folder / name / "results.json").stat().st_mtime_ns for name in names] == written
    assert capsys.readouterr().out.count("has ended before") == 2
    for wrong, sentence in (
        (
            [f"--sweep={RATE}=1e-3", "--training.epochs=2"],
            r"trial learning_rate=1e-3: .* is at step 5, and with 10 steps instead of 5",
        ),
        (["--sweep=training.log_every=4"], r"holds another sweep, which sweeps over optimizer\.learning_rate, here"),
        ([f"--sweep={RATE}=1..2", "--trials=1"], "holds another sweep, which was started without a number of trials"),
        ([], r"sweep is not empty and holds no run \(no config\.yaml\)"),
    ):
        if "--trials=1" in wrong and importlib.util.find_spec("optuna") is None:
            continue
        with pytest.raises(UserError, match=sentence):
            main([*arguments, *wrong])


def test_mistakes_are_found_before_the_first_trial(sst2_arguments, tmp_path, monkeypatch):
    folder = tmp_path / "sweep"
    arguments = [*sst2_arguments, f"--output_dir={folder}"]
    for wrong, sentence in (
        (["--sweep=seed=0,1", "--seed=1"], r"^command line: seed is set and swept: remove one of the two$"),
        (["--sweep"], r"^command line: --sweep has no value: use --sweep KEY=V1,V2,\.\.\.$"),
        (["--sweep=seed=0", "x"], "--sweep x is no list of values"),
        (["--trials=2"], "--trials is given without --sweep: pass --sweep"),
        (["--sweep=seed=0,1", "--trials=0"], "--trials 0: use one whole number, 1 or more"),
        ([f"--sweep={RATE}=1e-5..1e-4"], "has the range 1e-5..1e-4, but no number of trials"),
        (["--sweep=training.gradient_accumulation_steps=1,3"], r"training\.gradient_accumulation_steps"),
    ):
        with pytest.raises(UserError, match=sentence):
            main([*arguments, *wrong])
    with pytest.raises(UserError, match="is no function"):
        bert.sweep(print, "sst2", {RATE: [1]})
    with pytest.raises(UserError, match=r"^optimizer\.learning_rate is set.*two$"):
        bert.sweep(bert.finetune, "sst2", {RATE: [1]}, init="none", overrides={RATE: 2, "data.dir": "x"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--trials needs optuna.*'bert-jax\[opt"):
        main([*arguments, f"--sweep={RATE}=1e-5..1e-4", "--trials=2"])
    assert not folder.exists()


def test_every_trial_reads_the_rows_of_a_generator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = []

    def run_sweep(space: Any, num_trials: Any, prepare: Any, callbacks: Any) -> list[Any]:
        requests.extend(prepare({"seed": seed}, str(tmp_path / str(seed))) for seed in (0, 1))
        return []

    monkeypatch.setattr(bert.training.sweep, "run_sweep", run_sweep)
    rows = ({"text": f"row {number}", "label": number % 2} for number in range(8))
    overrides = {"training.steps": 1, "training.epochs": None}
    bert.sweep(bert.finetune, "classification", {"seed": [0, 1]}, train=rows, overrides=overrides, init="none")
    assert [request.config.seed for request in requests] == [0, 1]
    assert len({request.tables["train.jsonl"] for request in requests}) == 1


def test_keys_that_change_the_loss_itself_are_told() -> None:
    space = {RATE: [1], "electra.disc_weight": [1, 50], "data.train": ["a", "b"], "tokenizer.vocab_size": [1, 2]}
    held_out = PretrainConfig(data=DataConfig(train="a", eval="c"))
    assert incomparable(space, held_out) == ["electra.disc_weight", "tokenizer.vocab_size"]
    assert incomparable(space, PretrainConfig()) == ["electra.disc_weight", "data.train", "tokenizer.vocab_size"]
    assert incomparable({"data.max_length": [1, 2]}, FinetuneConfig(data=TaskDataConfig(dir="a"))) == []


@pytest.mark.medium
def test_a_trial_that_fails_names_itself(sst2_arguments, tmp_path):
    rest = [argument for argument in sst2_arguments if not argument.startswith("--init")]
    with pytest.raises(UserError, match=r"^trial init=.*gone-\w{6}: "):
        main([*rest, f"--output_dir={tmp_path / 'sweep'}", f"--sweep=init={tmp_path / 'gone'}"])


def test_a_folder_with_anything_else_is_left_alone(tmp_path):
    plan = {"space": {RATE: [1]}, "num_trials": None, "seed": None}
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="holds no sweep"), open_sweep(str(tmp_path), plan):
        pass
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read: remove it"), open_sweep(str(tmp_path), plan):
        pass


def test_a_store_holds_one_sweep_at_a_time_which_any_machine_finds(bucket, tmp_path, quick_leases, monkeypatch):
    plan = {"space": {RATE: [1.0, 2.0]}, "num_trials": None, "seed": None}
    with open_sweep(f"{URL}/", plan) as folder:
        (folder.path / "a").mkdir()
        (folder.path / "a" / "config.yaml").touch()
        (folder.path / "a" / ".lease.json").touch()
        folder.write({**plan, "trials": [{"name": "a"}, {"name": "gone"}]})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        with pytest.raises(UserError, match=rf"^{URL} is in use"):
            open_sweep(URL, plan).__enter__()
    with open_sweep(URL, plan) as folder:
        assert folder.trials == [{"name": "a"}]
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "a", "sweep.json"]
        assert [path.name for path in (folder.path / "a").iterdir()] == ["config.yaml"]
        assert folder.path.is_relative_to(tmp_path / "second")
        assert folder.place("a") == f"{URL}/a"
    with (
        pytest.raises(UserError, match=rf"^{URL} holds another sweep"),
        open_sweep(URL, {**plan, "space": {"seed": [1]}}),
    ):
        pass
    with (
        pytest.raises(UserError, match=rf"^{URL} is not empty.*\(no config\.yaml\)"),
        open_run(bert.config.PretrainConfig(output_dir=URL)),
    ):
        pass
    bucket.pipe("/bucket/other/notes.txt", b"")
    with (
        pytest.raises(UserError, match=r"other is not empty.*\(no sweep\.json\)"),
        open_sweep("memory://bucket/other", plan),
    ):
        pass


def test_a_grid_takes_other_values_and_a_search_the_same_ones(tmp_path):
    plan = {"space": {RATE: [1.0]}, "num_trials": None, "seed": None}
    for space in ({RATE: [1.0]}, {RATE: [2.0, 3.0]}):
        with open_sweep(str(tmp_path / "grid"), {**plan, "space": space}) as folder:
            assert folder.trials == []
    search = {**plan, "num_trials": 3, "seed": 0}
    for changed in ({}, {"num_trials": 9}):
        with open_sweep(str(tmp_path / "search"), {**search, **changed}):
            pass
    for changed in ({"seed": 1}, {"space": {RATE: [2.0]}}):
        with (
            pytest.raises(UserError, match="searches other values"),
            open_sweep(str(tmp_path / "search"), {**search, **changed}),
        ):
            pass


def test_a_sweep_over_renamed_keys_finds_its_trials(tmp_path: Path) -> None:
    stored = {"name": "objective=sop,prediction=masked", "score": 1.5, "pruned": False}
    stored["values"] = {"data.objective": "sop", "data.prediction": "masked"}
    space = {"data.objective": ["sop"], "data.prediction": ["masked", "next"]}
    (tmp_path / stored["name"]).mkdir()
    plan = {"num_trials": None, "seed": None}
    (tmp_path / "sweep.json").write_text(json.dumps({**plan, "space": space, "trials": [stored]}))
    space = {"data.input_format": ["sop"], "training.objective": ["mlm", "clm"]}
    with open_sweep(str(tmp_path), {**plan, "space": space}) as folder:
        [result] = folder.trials
        assert result["values"] == {"data.input_format": "sop", "training.objective": "mlm"}
        assert find_trial_name(tmp_path, result["values"]) == stored["name"]
        values = {"data.input_format": "sop", "training.objective": "clm"}
        assert find_trial_name(tmp_path, values) == "input_format=sop,objective=clm"


@pytest.mark.slow
def test_a_pretraining_sweep_over_renamed_keys_repeats_no_trial(corpus, tmp_path, capsys):
    small = [argument for argument in SMALL_RUN if "input_format" not in argument]
    arguments = [f"--data.train={corpus}", *small, f"--output_dir={tmp_path / 'sweep'}"]
    assert pretrain([*arguments, "--sweep=data.input_format=nsp,sop"]) == 0
    for value in ("nsp", "sop"):
        (tmp_path / "sweep" / f"input_format={value}").rename(tmp_path / "sweep" / f"objective={value}")
    file = tmp_path / "sweep" / "sweep.json"
    file.write_text(
        file.read_text().replace("data.input_format", "data.objective").replace("input_format=", "objective=")
    )
    capsys.readouterr()
    assert pretrain([*arguments, "--sweep=data.objective=nsp,sop"]) == 0
    assert capsys.readouterr().out.count("has ended before") == 2
    assert {path.name for path in file.parent.iterdir()} == {".lock", "sweep.json", "objective=nsp", "objective=sop"}


def trial(name, score, **more):
    values = {RATE: 1e-3, "training.batch_size": 16}
    rest = {"standard_deviation": None, "loss": 0.5, "pruned": False, "collapsed": False, "seconds": 61.4}
    return {"name": name, "values": values, "score": score, "evaluations": [score], **rest, **more}


def test_the_table_has_the_best_trial_first_and_those_that_were_ended_last(sst2_arguments):
    trials = [
        trial("a", 0.5),
        trial("b", None),
        trial("c", 0.9, pruned=True, seconds=None),
        trial("d", 0.75),
        trial("d", 0.75),
    ]
    ranked = rank(trials, higher_is_better=True)
    assert [one["name"] for one in ranked] == ["d", "a", "b", "c"]
    assert [one["name"] for one in rank(trials, higher_is_better=False)] == ["a", "d", "b", "c"]
    ranked[0] |= {"standard_deviation": 0.02, "collapsed": True}
    config = bert.config.FinetuneConfig(num_seeds=3)
    assert "\n".join(table(ranked, "f1", config)) == (
        "\n4 trials, best first, by f1 on dev, mean of 3 seeds:\n"
        "  learning_rate  batch_size               f1    loss  seconds\n"
        "  1e-3                   16  0.7500 +-0.0200  0.5000       61    collapsed\n"
        "  1e-3                   16           0.5000  0.5000       61\n"
        "  1e-3                   16                -  0.5000       61\n"
        "  1e-3                   16           0.9000  0.5000        -  ended early"
    )


SPACE = {RATE: Range(1e-5, 1e-2), "training.batch_size": Range(4, 64), "patience": [None, 2]}


def finished(values, score, evaluations=(), pruned=False):
    return {"values": values, "score": score, "evaluations": list(evaluations), "pruned": pruned}


def test_suggestions_follow_from_the_trials_before_and_come_near_the_best():
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    history = []
    for _ in range(25):
        values = suggest(SPACE, history, True, seed=3)
        assert values == suggest(SPACE, history, True, seed=3)
        assert 1e-5 <= values[RATE] <= 1e-2 and float(f"{values[RATE]:.4g}") == values[RATE]
        assert 4 <= values["training.batch_size"] <= 64 and values["patience"] in (None, 2)
        history.append(finished(values, None if len(history) == 3 else -abs(np.log10(values[RATE]) + 3)))
    distances = [abs(np.log10(one["values"][RATE]) + 3) for one in history]
    assert np.mean(distances[15:]) < np.mean(distances[:10]) / 2
    assert suggest(SPACE, [], True, seed=3) != suggest(SPACE, [], True, seed=4)


def test_a_trial_below_the_median_of_five_is_ended(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    values = {RATE: 1e-3, "training.batch_size": 8, "patience": None}
    history = [finished(values, 0.9, [0.5 + index / 10, 0.9]) for index in range(5)]
    assert not should_prune(SPACE, history[:4], True, [0.1])
    assert should_prune(SPACE, history, True, [0.6]) and not should_prune(SPACE, history, True, [0.8])
    assert should_prune(SPACE, history, True, [None]) and should_prune(SPACE, history, False, [0.8])

    line = '{"step": %d, "split": "eval", "f1": %f}\n'
    (tmp_path / "metrics.jsonl").write_text(line % (5, 0.8) + line % (10, 0.6))
    pruning = Pruning(lambda scores: scores[-1] < 0.7, "f1")
    pruning.on_start(RunStart(tmp_path, None, 5, 20))
    pruning.on_metrics(10, "train", {})
    with pytest.raises(PrunedTrial):
        pruning.on_metrics(10, "eval", {})
    with pytest.raises(PrunedTrial):  # a kill came before the exception
        pruning.on_start(RunStart(tmp_path, None, 10, 20))
    pruning.on_start(RunStart(tmp_path, None, 10, 10))  # nothing is left to do


def live(arguments: list[str], log: Path) -> None:
    """The body of a separate process."""
    os.environ["XLA_FLAGS"] = ""  # read when the first array is made
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from bert.commands import main

    sys.exit(main(["finetune", *arguments]))


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_interrupted_equals_one_that_is_not(sst2_arguments, tmp_path):
    context = multiprocessing.get_context("spawn")
    arguments = [*sst2_arguments, "--training.epochs=3", "--training.log_every=1", "--training.checkpoint_every=2"]
    arguments += ["--sweep", f"{RATE}=1e-3,3e-3", "--sweep", "optimizer.weight_decay=0,0.1"]

    def start(folder: Path) -> multiprocessing.process.BaseProcess:
        log = folder.with_name(f"{folder.name}.log")
        process = context.Process(target=live, args=([*arguments, f"--output_dir={folder}"], log))
        process.start()
        return process

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(whole)
    process.join()
    assert process.exitcode == 0
    second, third = "learning_rate=1e-3,weight_decay=0.1", "learning_rate=3e-3,weight_decay=0.0"
    for number, status, name, step in ((signal.SIGKILL, -9, second, 4), (signal.SIGINT, 130, third, 3)):
        process = start(broken)
        while process.is_alive() and not any(line["step"] >= step for line in read_metrics(broken / name)):
            time.sleep(0.002)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == status
    process = start(broken)
    process.join()
    assert process.exitcode == 0
    log = broken.with_name("broken.log").read_text()
    assert "the same command resumes the sweep" in log and log.count("has ended before") == 1 + 2
    assert_same_sweep(broken, whole)


def small_run(corpus: Path) -> dict[str, object]:
    options = dict(argument.removeprefix("--").split("=") for argument in SMALL_RUN if RATE not in argument)
    return {**options, "data.train": corpus, "transfer": None}


class Starts(bert.Callback):
    """Remembers the trials that were run, and where they began."""

    def __init__(self):
        self.seen = []

    def on_start(self, start):
        self.seen.append((start.path.name, start.start_step))


@pytest.mark.slow
def test_a_sweep_in_a_store_runs_no_trial_again_on_an_empty_disk(bucket, corpus, tmp_path, monkeypatch, caplog):
    def sweep(rates, *callbacks):
        more = {"output_dir": URL, "overrides": small_run(corpus), "callbacks": callbacks}
        return bert.sweep(bert.pretrain, "quickstart", {RATE: rates}, **more)

    [first] = sweep([1e-3])
    assert not Path("memory:").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    starts = Starts()
    with caplog.at_level("INFO"):
        runs = sweep([1e-3, 3e-3], starts)
    assert starts.seen == [("learning_rate=3e-3", 0)]
    assert f"{URL}/learning_rate=1e-3 has ended before" in caplog.messages
    best = runs[0].path.name
    assert f"\nbest: {URL}/{best}\nall trials: {URL}/sweep.json" in caplog.messages
    assert {run.path.name for run in runs} == {"learning_rate=1e-3", "learning_rate=3e-3"}
    [again] = [run for run in runs if run.path.name == first.path.name]
    assert again.path != first.path and again.results == first.results and again.metrics == first.metrics
    assert (bert.load(f"{URL}/{best}").embed("one text") == runs[0].model.embed("one text")).all()


@pytest.mark.slow
def test_a_search_ends_trials_early_and_resumes(bucket, corpus, tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    space = {RATE: "1e-6..1e-2", "optimizer.weight_decay": [0.0, 0.1]}
    overrides = small_run(corpus)

    class Interrupt(bert.Callback):
        num_metrics = 0

        def on_metrics(self, step, split, metrics):
            self.num_metrics += 1
            if self.num_metrics == 12:  # in the third trial
                signal.raise_signal(signal.SIGINT)

    def search(folder, num_trials, *callbacks):
        more = {"output_dir": folder, "overrides": overrides, "callbacks": callbacks}
        return bert.sweep(bert.pretrain, "quickstart", space, num_trials=num_trials, **more)

    disks = itertools.count()
    runs = search(tmp_path / "whole", 9)
    sweep = json.loads((tmp_path / "whole" / "sweep.json").read_text())
    assert [run.path.name for run in runs] == [one["name"] for one in sweep["trials"]]
    assert len(runs) == 9 and runs[0].results["eval"]["loss"] == sweep["trials"][0]["score"]
    pruned = [one for one in sweep["trials"] if one["pruned"]]
    assert 0 < len(pruned) < 5 and all(len(one["evaluations"]) == 1 for one in pruned)
    assert not (tmp_path / "whole" / pruned[0]["name"] / "results.json").exists()
    for broken in (tmp_path / "broken", URL):
        for number, callbacks in ((8, [Interrupt()]), (8, []), (9, [])):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"disk{next(disks)}"))
            interrupted = pytest.raises(KeyboardInterrupt, match="make the same call again to resume")
            with interrupted if callbacks else contextlib.nullcontext():
                search(broken, number, *callbacks)
        assert_same_sweep(local_folder(URL) if broken == URL else broken, tmp_path / "whole")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"disk{next(disks)}"))
    starts = Starts()
    again = search(URL, 9, starts)
    assert [run.path.name for run in again] == [run.path.name for run in runs] and not starts.seen
    assert again[-1].config.output_dir == f"{URL}/{again[-1].path.name}"


@pytest.mark.slow
def test_pretraining_and_several_seeds_are_swept(corpus, sst2_arguments, tmp_path, capsys):
    arguments = [argument for argument in SMALL_RUN if "learning_rate" not in argument]
    sweep = [f"--output_dir={tmp_path / 'p'}", "--sweep=optimizer.learning_rate=1e-3,1e-2"]
    assert pretrain([f"--data.train={corpus}", *arguments, *sweep]) == 0
    printed = capsys.readouterr().out
    assert "2 trials, best first, by loss on held-out text:\n  learning_rate    loss  seconds\n" in printed
    assert main([*sst2_arguments, f"--output_dir={tmp_path / 'f'}", f"--sweep={RATE}=1e-3,3e-3", "--num_seeds=2"]) == 0
    assert "mean of 2 seeds" in capsys.readouterr().out
    trials = json.loads((tmp_path / "f" / "sweep.json").read_text())["trials"]
    for one in trials:
        dev = bert.Run(tmp_path / "f" / one["name"]).results["dev"]
        assert (one["score"], one["standard_deviation"]) == (
            dev["mean"]["accuracy"],
            dev["standard_deviation"]["accuracy"],
        )


def test_the_score_that_decides_is_that_of_the_task_fitted_to_its_rows(tmp_path: Path) -> None:
    """Tags that are no spans are scored by accuracy, questions without an answer by the best threshold."""
    for name, tags in (("chunks", "B-X O"), ("words", "NOUN VERB")):
        (tmp_path / name).mkdir()
        first, second = tags.split()
        for split in ("train", "dev"):
            (tmp_path / name / f"{split}.conll").write_text(f"ba {first}\nko {second}\n\nri {first}\n")
    (tmp_path / "questions").mkdir()
    answers = ({"answer": "ba", "answer_start": 0}, {"answer": "", "answer_start": None})
    rows = "".join(json.dumps({"question": "ko?", "context": "ba ri", **answer}) + "\n" for answer in answers)
    for split in ("train", "dev"):
        (tmp_path / "questions" / f"{split}.jsonl").write_text(rows)
    expected = {"chunks": ("tagging", "f1"), "words": ("tagging", "accuracy"), "questions": ("span", "best_f1")}
    for name, (task, metric) in expected.items():
        config = FinetuneConfig(task=task, data=TaskDataConfig(dir=str(tmp_path / name)))
        assert main_metric(RunRequest(config)) == (metric, True)
