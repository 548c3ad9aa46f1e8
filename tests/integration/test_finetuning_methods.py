"""Ways to fine-tune: several seeds, stopping early, frozen parts, features alone; and GLUE's other kinds of task."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import bert
from bert.commands.benchmark import glue_zip_command as glue_zip
from bert.commands.finetune import main
from bert.commands.predictions import predict_command as predict
from bert.data.rows import TokenRows
from tests.helpers import LAYOUTS, interrupted_at, lines_of, results_of, run
from tests.messages import has_all

FILES_OF_LABELS = ("errors.tsv", "confusion_matrix.png", "reliability.png")


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_early_interrupted_or_not(pretrained, sst2, tmp_path, monkeypatch, capsys):
    # At this rate nothing is learned: the second evaluation of three is as good as the first.
    arguments = (f"--init={pretrained}", "--patience=1", "--optimizer.learning_rate=1e-12")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, sst2, *arguments) == 0
    results = results_of(whole)
    assert (results["steps"], results["best_step"], results["stopped_early"]) == (10, 5, True)
    assert interrupted_at(8, TokenRows, monkeypatch, lambda: run(parts, sst2, *arguments)) == 143
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
    tuned, source = bert.load(tmp_path / "run"), bert.load(pretrained)
    before = flatten_dict(source.params["bert"], sep="/")
    for path, value in flatten_dict(tuned.params["bert"], sep="/").items():
        assert (value.tobytes() == before[path].tobytes()) == path.startswith(frozen), path
    # The head was made for what it reads, and answers as it did in the run; a run that resumes finds its moments.
    sentences = [line.split("\t")[0] for line in (sst2 / "dev.tsv").read_text().splitlines()[1:]]
    written = [line.split("\t") for line in (tmp_path / "run/predictions/dev.tsv").read_text().splitlines()[1:]]
    for answer, (_, _, _, probability) in zip(tuned.predict(sentences), written, strict=True):
        assert answer.probabilities[answer.label] == pytest.approx(float(probability), abs=1e-5)
    assert run(tmp_path / "run", sst2, *arguments) == 0
    assert "resumes at step 5" in capsys.readouterr().out


def test_more_layers_than_there_are(pretrained, sst2, tmp_path, fails) -> None:
    arguments = ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--data.max_length=32"]
    for name in ("num_frozen_layers", "num_feature_layers"):
        error = fails(main, *arguments, f"--output_dir={tmp_path / name}", f"--{name}=2")
        assert has_all(error, f"{name} is 2", "model.num_hidden_layers is 1")
    both = fails(main, *arguments, f"--output_dir={tmp_path}", "--num_frozen_layers=1", "--num_feature_layers=1")
    assert has_all(both, "num_frozen_layers is 1", "num_feature_layers is 1")


@pytest.mark.slow
def test_several_seeds_interrupted_in_the_second(pretrained, sst2, tmp_path, monkeypatch, capsys, fails) -> None:
    folder, arguments = (
        tmp_path / "runs",
        (f"--init={pretrained}", "--num_seeds=2", "--seed=3", "--training.epochs=1"),
    )
    # The 18th batch is one that the second seed trains on: each checks ids in 3, takes shapes from 1 and trains on 5.
    assert interrupted_at(18, TokenRows, monkeypatch, lambda: run(folder, sst2, *arguments)) == 143
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
    assert "2 seeds" in fails(predict, str(folder), str(tmp_path / "texts.txt"))
    again = ["--config=sst2", f"--data.dir={sst2}", f"--init={pretrained}", f"--output_dir={folder}", "--seed=3"]
    again += ["--data.max_length=32", "--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert "its num_seeds is 2, here 1" in fails(main, *again)
    assert "its optimizer.learning_rate is" in fails(main, *again, "--num_seeds=2", "--optimizer.learning_rate=1")


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
    of_dev = {f"{split}{name}" for split in ("", "dev_mismatched_") for name in FILES_OF_LABELS}
    with_probabilities = {"test.tsv", "test_mismatched.tsv", "diagnostic.tsv"}
    official = {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}
    assert names == {"dev.tsv", "dev_mismatched.tsv"} | of_dev | with_probabilities | official
    assert glue_zip([str(tmp_path / "run"), str(tmp_path / "out.zip")]) == 0
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.read("AX.tsv").decode().splitlines()[0] == "index\tprediction"
