"""`bert benchmark`: a run per task of GLUE, one table, a submission, and errors before anything is trained."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from bert.commands import benchmark
from bert.commands.benchmark import benchmark_command as main
from bert.runtime.interrupts import Interrupted
from bert.training import launch
from tests.helpers import LAYOUTS


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """CoLA and RTE with eight training rows and one row to predict."""
    for task in ("cola", "rte"):
        folder = tmp_path / "GLUE" / benchmark.GLUE[task].folder
        folder.mkdir(parents=True)
        for file, (content, *_) in LAYOUTS[task].items():
            *lines, last = content.splitlines()
            copies = range(8 if file == "train.tsv" else 1)
            rows = [last.replace("0\t", f"{number}\t", 1) if task == "rte" else last for number in copies]
            (folder / file).write_text("\n".join([*lines, *rows]) + "\n", encoding="utf-8")
    return tmp_path / "GLUE"


@pytest.mark.medium
def test_a_run_per_task_that_is_there(glue, tmp_path):
    configs, _ = benchmark.glue_configs(
        ["--init=x", f"--data.dir={glue}", "--output_dir", str(tmp_path / "out"), "--seed=3"]
    )
    assert {name: config.data.dir for name, config in configs.items()} == {
        "cola": str(glue / "CoLA"), "rte": str(glue / "RTE"),
    }  # fmt: skip
    assert [config.output_dir for config in configs.values()] == [str(tmp_path / "out" / name) for name in configs]
    assert {(config.init, config.seed, config.num_seeds) for config in configs.values()} == {("x", 3, 3)}
    rte, _ = benchmark.glue_configs(["--init=x", f"--data.dir={glue}", "--tasks=rte", "--num_seeds=1"])
    [only] = rte.values()
    assert (only.task, only.num_seeds, only.output_dir) == ("rte", 1, "runs/glue/rte")
    hub, _ = benchmark.glue_configs(["--init=x", "--data.dir=hub:nyu-mll/glue"])
    assert list(hub) == list(benchmark.GLUE)
    assert {config.data.dir for config in hub.values()} == {"hub:nyu-mll/glue"}


@pytest.mark.medium
def test_errors(glue, tmp_path, fails):
    assert "--data.dir DIR" in fails(main, "glue", "--init=x")
    assert "--tasks squad is not a task of GLUE" in fails(
        main, "glue", "--init=x", f"--data.dir={glue}", "--tasks=squad"
    )
    assert f"{glue / 'MNLI'} does not exist" in fails(
        main, "glue", "--init=x", f"--data.dir={glue}", "--tasks=rte,mnli"
    )
    nothing = fails(main, "glue", "--init=x", f"--data.dir={tmp_path}")
    assert f"{tmp_path / 'CoLA'} does not exist" in nothing
    follow = ["glue", f"--data.dir={glue}", "--follow"]
    for key in ("--init", "--output_dir"):
        assert f"--follow scores the checkpoints of its run: remove {key}" in fails(main, *follow, "x", f"{key}=1")
    assert f"--follow {tmp_path / 'nowhere'} is not a folder" in fails(main, *follow, f"{tmp_path / 'nowhere'}")
    assert "holds no run (no config.yaml): name the folder of a pretraining run" in fails(main, *follow, str(glue))
    assert "gs://x/run, which is not a local path" in fails(main, *follow, "gs://x/run")
    assert "required: --follow" in fails(main, "transfer")
    assert f"--follow {tmp_path / 'nowhere'} is not a folder" in fails(
        main, "transfer", f"--follow={tmp_path / 'nowhere'}"
    )
    assert "argument NAME" in fails(main, "superglue", "model")
    assert "needs --tasks" in fails(main, "mteb", "model")
    assert "--tasks is for mteb" in fails(main, "nanobeir", "model", "--tasks=x")
    assert "pip install 'mteb>=2'" in fails(main, "nanobeir", "model")


def test_the_table_has_the_papers_metrics_and_means():
    one = {"dev": {"matthews": 0.5, "accuracy": 0.8}, "baseline": "majority class", "majority class": {"matthews": 0.0}}
    several = {
        "dev": {"mean": {"accuracy": 0.6}, "standard_deviation": {"accuracy": 0.02}},
        "runs": [{"baseline": "majority class", "majority class": {"accuracy": 0.5}}],
    }
    rows = {
        name: benchmark.glue_scores(name, found)
        for name, found in {"cola": one, "rte": several, "wnli": several}.items()
    }
    lines = [line.split() for line in benchmark.glue_table(rows)]
    assert lines[1:] == [
        ["cola", "matthews", "50.0", "-", "0.0", "52.1"],
        ["rte", "accuracy", "60.0", "2.0", "50.0", "66.4"],
        ["wnli", "accuracy", "60.0", "2.0", "50.0", "-"],
        ["mean", "of", "2", "55.0", "59.2"],
    ]


def test_an_interruption_says_how_to_continue(glue, tmp_path, monkeypatch, capsys):
    def interrupted(request, repeat):
        raise Interrupted(7, 15)

    monkeypatch.setattr(launch, "start_or_resume", interrupted)
    assert main(["glue", "--init=none", f"--data.dir={glue}", f"--output_dir={tmp_path / 'out'}"]) == 143
    assert "saved at step 7 of cola" in capsys.readouterr().out


@pytest.mark.slow
def test_glue_is_scored_submitted_and_not_trained_again(pretrained, glue, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["glue", f"--init={pretrained}", f"--data.dir={glue}", f"--output_dir={out}", "--num_seeds=2"]
    arguments += ["--data.max_length=16", "--data.buckets=16", "--training.batch_size=8", "--training.epochs=1"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "left out" in printed and "sst2" in printed
    results = json.loads((out / "results.json").read_text())
    assert list(results["tasks"]) == ["cola", "rte"]
    for name, row in results["tasks"].items():
        run = json.loads((out / name / "results.json").read_text())
        assert row["score"] == pytest.approx(100 * run["dev"]["mean"][row["metric"]])
    with zipfile.ZipFile(out / "submission.zip") as archive:
        assert archive.namelist() == ["CoLA.tsv", "RTE.tsv"]
    assert main(arguments) == 0
    again = capsys.readouterr().out
    assert again.count("has ended before") == 2
    assert again.splitlines()[-6:] == printed.splitlines()[-6:]


@pytest.mark.slow
def test_the_checkpoints_of_a_run_are_scored(pretrained, glue, tmp_path, capsys, fails):
    run = Path(shutil.copytree(pretrained, tmp_path / "run"))
    arguments = ["glue", f"--follow={run}", f"--data.dir={glue}", "--num_seeds=1", "--tasks=rte,cola"]
    assert "rows of 128 tokens, but the model of" in fails(main, *arguments)
    arguments += ["--data.max_length=16", "--data.buckets=16", "--training.batch_size=8", "--training.epochs=1"]
    assert "lora.rank is set" in fails(main, *arguments, "--lora.rank=2")
    assert main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[-3:]] == ["step", "3", "6"] and printed[-3].split()[1:3] == [
        "rte",
        "cola",
    ]
    best = json.loads((run / "results.json").read_text())["best_step"]
    assert str(best) == next(line for line in printed[-2:] if line.endswith("best")).split()[0]
    lines = (run / "transfer.jsonl").read_text()
    assert main(arguments) == 0
    assert (run / "transfer.jsonl").read_text() == lines and len(lines.splitlines()) == 4


@pytest.mark.medium
def test_the_checkpoints_of_a_run_are_scored_on_other_recipes(pretrained, sst2, tmp_path, capsys, fails):
    """The run is a copy, whose configuration names another folder."""
    run, mine = Path(shutil.copytree(pretrained, tmp_path / "run")), tmp_path / "mine.yaml"
    assert "has no transfer: name recipes with --tasks" in fails(main, "transfer", f"--follow={run}")
    assert "transfer sst2 names no data" in fails(main, "transfer", f"--follow={run}", "--tasks=sst2")
    content = f"task: sst2\ndata: {{dir: {sst2}, max_length: 16, buckets: [16]}}\n"
    mine.write_text(f"{content}training: {{batch_size: 8, epochs: 1}}\n")
    assert main(["transfer", f"--follow={run}", f"--tasks={mine}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[-3:]] == ["step", "3", "6"] and "mine" in printed[-3]
    assert {json.loads(line)["task"] for line in (run / "transfer.jsonl").read_text().splitlines()} == {"mine"}
