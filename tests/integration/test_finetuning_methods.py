"""Ways to fine-tune: several seeds, stopping early, frozen parts, features alone; and GLUE's other kinds of task."""

from __future__ import annotations

import json
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import bert
from bert.commands.finetune import _show, main
from bert.commands.predictions import glue_zip_command as glue_zip
from bert.commands.predictions import predict_command as predict
from bert.config import FinetuneConfig, TaskDataConfig
from bert.data.rows import TokenRows
from bert.runs.folder import RunFolder, open_run
from bert.training.finetuning.run import aggregate_seeds, finetune_seeds
from bert.training.means import should_stop_early
from tests.helpers import LAYOUTS, lines_of, run


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def interrupted_at(batches: int, monkeypatch: pytest.MonkeyPatch, *arguments, **options) -> int:
    """The status of a run that gets a SIGTERM before its batch of that number."""
    batch, calls = TokenRows.batch, []

    def interrupt(self, *arguments):
        calls.append(1)
        if len(calls) == batches:
            signal.raise_signal(signal.SIGTERM)
        return batch(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TokenRows, "batch", interrupt)
        return run(*arguments, **options)


def test_patience() -> None:
    assert not should_stop_early([], 2)
    assert not should_stop_early([0.5, 0.4], 2)
    assert should_stop_early([0.5, 0.4, 0.5], 2)
    assert not should_stop_early([0.5, 0.4, 0.6], 2)
    assert should_stop_early([0.5, 0.6, 0.4], 1)
    assert should_stop_early([0.5, 0.6, 0.7], 2, higher=False)
    assert not should_stop_early([0.5, 0.6, 0.4], 2, higher=False)
    assert not should_stop_early([None, 0.1], 1)


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_early_interrupted_or_not(pretrained, sst2, tmp_path, monkeypatch, capsys):
    # At this rate nothing is learned: the second evaluation of three is as good as the first.
    arguments = (f"--init={pretrained}", "--patience=1", "--optimizer.learning_rate=1e-12")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, sst2, *arguments) == 0
    results = results_of(whole)
    assert (results["steps"], results["best_step"], results["stopped_early"]) == (10, 5, True)
    assert interrupted_at(8, monkeypatch, parts, sst2, *arguments) == 143
    assert run(parts, sst2, *arguments) == 0
    assert lines_of(parts) == lines_of(whole)
    capsys.readouterr()
    assert run(parts, sst2, *arguments) == 0
    assert "resumes at step 10" in capsys.readouterr().out
    assert lines_of(parts) == lines_of(whole)
    assert results_of(parts)["dev"] == results["dev"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("argument", "frozen"), [("--num_frozen_layers=1", ("embeddings", "encoder")), ("--num_feature_layers=1", ("",))]
)
def test_what_is_frozen_stays_bit_for_bit(pretrained, sst2, tmp_path, capsys, argument, frozen) -> None:
    arguments = (f"--init={pretrained}", argument, "--training.epochs=1")
    assert run(tmp_path / "run", sst2, *arguments) == 0
    assert " are trained" in capsys.readouterr().out
    ours, theirs = bert.load(tmp_path / "run"), bert.load(pretrained)
    before = flatten_dict(theirs.params["bert"], sep="/")
    for path, value in flatten_dict(ours.params["bert"], sep="/").items():
        assert (value.tobytes() == before[path].tobytes()) == path.startswith(frozen), path
    # The head was made for what it reads, and answers as it did in the run; a run that resumes finds its moments.
    sentences = [line.split("\t")[0] for line in (sst2 / "dev.tsv").read_text().splitlines()[1:]]
    written = [line.split("\t") for line in (tmp_path / "run/predictions/dev.tsv").read_text().splitlines()[1:]]
    for answer, (_, _, _, probability) in zip(ours.predict(sentences), written, strict=True):
        assert answer.probabilities[answer.label] == pytest.approx(float(probability), abs=1e-5)
    assert run(tmp_path / "run", sst2, *arguments) == 0
    assert "resumes at step 5" in capsys.readouterr().out


def test_more_layers_than_there_are(pretrained, sst2, tmp_path, fails) -> None:
    arguments = ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--data.max_length=32"]
    for name in ("num_frozen_layers", "num_feature_layers"):
        error = fails(main, *arguments, f"--output_dir={tmp_path / name}", f"--{name}=2")
        assert f"{name} is 2, but the model has 1 layers" in error
    both = fails(main, *arguments, f"--output_dir={tmp_path}", "--num_frozen_layers=1", "--num_feature_layers=1")
    assert "both set" in both


@pytest.mark.slow
def test_several_seeds_interrupted_in_the_second(pretrained, sst2, tmp_path, monkeypatch, capsys, fails) -> None:
    folder, arguments = (
        tmp_path / "runs",
        (f"--init={pretrained}", "--num_seeds=2", "--seed=3", "--training.epochs=1"),
    )
    # The 18th batch is one that the second seed trains on: each checks ids in 3, takes shapes from 1 and trains on 5.
    assert interrupted_at(18, monkeypatch, folder, sst2, *arguments) == 143
    assert f"--config {folder / 'config.yaml'}" in capsys.readouterr().out
    assert not (folder / "results.json").exists()
    assert main([f"--config={folder / 'config.yaml'}"]) == 0
    text = capsys.readouterr().out
    assert "seed 3 has ended before" in text
    assert "sst2 dev, 2 seeds" in text
    results, runs = results_of(folder), [results_of(folder / f"seed-{seed}") for seed in (3, 4)]
    assert results["runs"] == [{key: value for key, value in one.items() if key != "details"} for one in runs]
    assert results["seeds"] == [one["seed"] for one in runs] == [3, 4]
    for one in runs:
        assert list(one["details"]) == ["dev"]
        assert (folder / f"seed-{one['seed']}" / "predictions" / "errors.tsv").is_file()
    losses = [one["dev"]["loss"] for one in runs]
    assert losses[0] != losses[1]
    assert results["dev"]["mean"]["loss"] == pytest.approx(np.mean(losses))
    assert results["dev"]["standard_deviation"]["loss"] == pytest.approx(abs(losses[0] - losses[1]) / np.sqrt(2))
    assert run(tmp_path / "one", sst2, f"--init={pretrained}", "--seed=4", "--training.epochs=1") == 0
    assert lines_of(tmp_path / "one") == lines_of(folder / "seed-4")

    (tmp_path / "texts.txt").write_text("ba\n")
    assert "holds the runs of 2 seeds: name one of them" in fails(predict, str(folder), str(tmp_path / "texts.txt"))
    again = ["--config=sst2", f"--data.dir={sst2}", f"--init={pretrained}", f"--output_dir={folder}", "--seed=3"]
    again += ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert "its num_seeds is 2, here 1" in fails(main, *again)
    assert "its optimizer.learning_rate is" in fails(main, *again, "--num_seeds=2", "--optimizer.learning_rate=1")


def test_several_seeds_are_scored_on_the_same_dev_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[FinetuneConfig] = []

    def finetune(run: RunFolder[FinetuneConfig], say: Callable[[str], None], callbacks: object) -> dict:
        configs.append(run.config)
        return one_result(run.config.seed, 0.5)

    monkeypatch.setattr("bert.training.finetuning.run.finetune", finetune)
    for name, seed in (("a", None), ("b", 9)):
        data = TaskDataConfig(dir="x", dev_fraction=0.5, sample_seed=seed)
        config = FinetuneConfig(init="none", output_dir=str(tmp_path / name), seed=3, num_seeds=2, data=data)
        with open_run(config) as run:
            finetune_seeds(run)
    assert [(config.seed, config.data.sample_seed) for config in configs] == [(3, 3), (4, 3), (3, 9), (4, 9)]


def one_result(seed: int, score: float | None, collapsed: bool = False) -> dict:
    dev = {"loss": 0.5, "f1": score}
    baseline = {"baseline": "majority_class", "majority_class": {"f1": 0.8}}
    rest = {"main_metric": "f1", "collapsed": collapsed, "best_step": 7, **baseline}
    others = {split: {"f1": score} for split in ("dev_other", "test_2016_flickr")}
    return {"task": "mrpc", "init": "runs/X", "seed": seed, "dev": dev, **others, **rest}


def test_collapsed_seeds_are_named_and_left_out_of_a_second_mean(capsys) -> None:
    results = aggregate_seeds([one_result(0, 0.9), one_result(1, 0.8, collapsed=True), one_result(2, 0.86)])
    assert results["dev"]["mean"]["f1"] == pytest.approx(2.56 / 3)
    assert results["dev"]["standard_deviation"]["f1"] == pytest.approx(np.std([0.9, 0.8, 0.86], ddof=1))
    assert results["dev_other"]["mean"] == {"f1": pytest.approx(2.56 / 3)}
    assert results["test_2016_flickr"]["mean"] == {"f1": pytest.approx(2.56 / 3)}
    assert results["collapsed"] == [1]
    assert results["without_collapsed"]["dev"]["mean"]["f1"] == pytest.approx(0.88)
    assert results["best_seed"] == 0
    _show({**results, "seconds": 3.0}, "runs/mrpc")
    lines = capsys.readouterr().out.splitlines()
    assert "dev_other:" in lines
    [collapsed] = [line for line in lines if "collapsed" in line]
    assert collapsed.startswith("  seed 1: f1 0.8000 at step 7   collapsed: ")
    assert lines[-1] == "  bert inspect runs/mrpc/seed-0"
    _show({**results, "runs": [{**results["runs"][0], "sample_input": ["a%s's", "b"]}], "seconds": 3.0}, "r x")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == """  printf '%s\\t%s\\n' 'a%s'"'"'s' b | bert predict 'r x/seed-0' -"""


def test_one_seed_has_no_deviation_and_a_diverged_one_is_not_the_best() -> None:
    alone = aggregate_seeds([one_result(0, 0.9)])
    assert alone["dev"]["standard_deviation"] == {"loss": None, "f1": None}
    assert "without_collapsed" not in alone
    assert aggregate_seeds([one_result(0, None), one_result(1, 0.1)])["best_seed"] == 1
    less = [{**one_result(seed, score), "higher_is_better": False} for seed, score in enumerate((None, 0.2, 0.1))]
    assert aggregate_seeds(less)["best_seed"] == 2
    assert np.isnan(aggregate_seeds([one_result(0, None), one_result(1, 0.1)])["dev"]["mean"]["f1"])


@pytest.mark.medium
def test_scores_are_learned_and_predicted(pretrained, tmp_path, capsys) -> None:
    data = tmp_path / "STS-B"
    data.mkdir()
    for split, rows in (("train", 24), ("dev", 9), ("test", 3)):
        header, row = LAYOUTS["stsb"][f"{split}.tsv"][0].splitlines()
        cells = [row.split("\t") for _ in range(rows)]
        for number, line in enumerate(cells):
            line[0] = str(number)
            line[7] = "ba ko " * (1 + number % 3)
            if split != "test":
                line[-1] = str(number % 3 * 2)
        (data / f"{split}.tsv").write_text("\n".join(["\t".join(line) for line in [[header], *cells]]) + "\n")
    assert run(tmp_path / "run", data, f"--init={pretrained}", "--training.epochs=1", config="stsb") == 0
    assert "(mean 0.0000)" in capsys.readouterr().out
    results = results_of(tmp_path / "run")
    assert set(results["dev"]) == {"loss", "pearson", "spearman"}
    written = [line.split("\t") for line in (tmp_path / "run/predictions/dev.tsv").read_text().splitlines()[1:]]
    errors = [(float(predicted) - float(score)) ** 2 for _, predicted, score in written]
    assert results["dev"]["loss"] == pytest.approx(np.mean(errors), rel=1e-2)
    submitted = (tmp_path / "run/predictions/STS-B.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in submitted] == ["index", "0", "1", "2"]
    (tmp_path / "pairs.txt").write_text("ba ko\tko\n")
    capsys.readouterr()
    assert predict([str(tmp_path / "run"), str(tmp_path / "pairs.txt")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text_a"], answer["text_b"]) == ("ba ko", "ko")
    assert 0 <= answer["score"] <= 5


@pytest.mark.medium
def test_both_dev_sets_and_the_diagnostic_one_of_mnli(pretrained, tmp_path, capsys) -> None:
    data = tmp_path / "MNLI"
    data.mkdir()
    for file, (content, *_) in LAYOUTS["mnli"].items():
        header, row = content.splitlines()
        rows = [f"{number}{row[1:]}" for number in range(8 if file == "train.tsv" else 2)]
        (data / file).write_text("\n".join([header, *rows]) + "\n")
    assert run(tmp_path / "run", data, f"--init={pretrained}", "--training.epochs=1", config="mnli") == 0
    results = results_of(tmp_path / "run")
    assert set(results["dev"]) == set(results["dev_mismatched"]) == {"loss", "accuracy"}
    names = {path.name for path in (tmp_path / "run" / "predictions").iterdir()}
    of_dev = {f"{split}{name}" for split in ("", "dev_mismatched_") for name in ("errors.tsv", "confusion_matrix.png")}
    with_probabilities = {"test.tsv", "test_mismatched.tsv", "diagnostic.tsv"}
    official = {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}
    assert names == {"dev.tsv", "dev_mismatched.tsv"} | of_dev | with_probabilities | official
    assert glue_zip([str(tmp_path / "run"), str(tmp_path / "out.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.read("AX.tsv").decode().splitlines()[0] == "index\tprediction"
