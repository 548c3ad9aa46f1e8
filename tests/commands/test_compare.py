"""`bert compare`: curves, settings and scores of several runs, in any state."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bert.analysis.comparison import ComparedRun, score_rows
from bert.commands.reports import compare_command as main
from bert.config import FinetuneConfig, PretrainConfig
from bert.runs.metrics_log import MetricsLog, append_transfer_score, write_results

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _work_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # the tables are wide


def make_run(source: Path, name: str, changes: dict[str, object], lines: list[tuple[str, int, dict]]) -> Path:
    """A run with the configuration of another one, in which some lines differ, and with these metrics."""
    folder = Path(name)
    folder.mkdir(parents=True)
    text = (source / "config.yaml").read_text()
    for key, value in changes.items():
        text, count = re.subn(rf"(?m)^( *{key}:) .*$", rf"\1 {value}", text, count=1)
        assert count, key
    (folder / "config.yaml").write_text(text)
    if (source / "tokenizer.json").is_file():
        shutil.copy(source / "tokenizer.json", folder)
    with MetricsLog(folder, 0) as log:
        for split, step, metrics in lines:
            log.write(split, step, metrics)
    return folder


def pretraining_lines(every: int, loss: float) -> list[tuple[str, int, dict]]:
    return [
        (split, step, {"loss": loss + 1 / step, "mlm_loss": loss + 1 / step, "mlm_accuracy": 0.5})
        for step in range(every, 61, every)
        for split in ("train", "eval")
    ]


@pytest.fixture
def runs(pretrained: Path) -> list[str]:
    """An ended run, and two that have not ended: other logging, other rows, and names that collide."""
    shutil.copytree(pretrained, "a/run")
    make_run(pretrained, "b/run", {"eval_every": 7, "learning_rate": 0.5}, pretraining_lines(7, 2.0))
    make_run(pretrained, "c", {"sequence_length": 16, "input_format": "full_sentences"}, pretraining_lines(10, 1.0))
    return ["a/run", "b/run", "c"]


def table_of(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, capsys.readouterr().out.splitlines()) if words}


def drawn(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Figure, dict]:
    """The picture, and its panels by what is on the vertical axis."""
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (seen.append(figure), path.touch()))
    assert main([*arguments, "--output", "drawn.png"]) == 0
    return seen[0], {axes.get_ylabel(): axes for axes in seen[0].axes}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_it_prints_what_differs_and_the_scores(runs, capsys) -> None:
    assert main(runs) == 0
    text = capsys.readouterr().out
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["settings that differ", *runs] in lines
    assert ["data.sequence_length", "32", "32", "16"] in lines
    assert ["optimizer.learning_rate", "0.003", "0.5", "0.003"] in lines
    assert "hidden_size" not in text
    assert "output_dir" not in text
    assert ["steps", "6", "unfinished (step 56)", "unfinished (step 60)"] in lines
    results = json.loads(Path("a/run/results.json").read_text())
    assert ["mlm_loss", f"{results['eval']['mlm_loss']:.4f}", "2.0179", "1.0167"] in lines
    assert ["perplexity", f"{results['eval']['perplexity']:,.1f}", "-", "-"] in lines
    assert "are not on the same rows, because of data.input_format, sequence_length" in text
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_each_loss_and_a_colour_for_each_run(runs, monkeypatch) -> None:
    figure, panels = drawn(monkeypatch, *runs)
    assert list(panels) == ["mlm loss", "nsp loss", "mlm accuracy"]
    assert figure.get_suptitle() == "pretraining: 3 runs"
    assert legend(figure) == [*runs, "training", "evaluation", "word frequencies, majority class"]
    mlm = panels["mlm loss"].lines
    assert len({line.get_color() for line in mlm if line.get_linestyle() != "--"}) == 3
    assert len([line for line in mlm if line.get_linestyle() == "--"]) == 1
    solid = [line for line in mlm if line.get_linestyle() == "-"]
    assert [len(line.get_xdata()) for line in solid] == [3, 2, 8, 8, 6, 6]
    assert [line.get_marker() != "" for line in solid] == [False, True] * 3
    assert len({line.get_color() for line in panels["nsp loss"].lines}) == 1


def test_transfer_is_a_score_of_each_start(pretrained, capsys) -> None:
    shutil.copytree(pretrained, "a")
    shutil.copytree(pretrained, "b")
    starts = {
        "pretrained": {"scores": [0.4, 0.5]},
        "random_weights": {"scores": [0.2, 0.3]},
        "TF-IDF": {"scores": [0.6]},
    }
    results = json.loads(Path("b/results.json").read_text())
    write_results("b", {**results, "transfer": {"task": "packages", "metric": "accuracy", "dev_rows": 9, **starts}})
    assert main(["a", "b"]) == 0
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["transfer to packages, accuracy, pretrained", "-", "0.4500 ± 0.0707"] in lines
    assert ["transfer to packages, accuracy, random weights", "-", "0.2500 ± 0.0707"] in lines
    assert ["transfer to packages, accuracy, TF-IDF", "-", "0.6000"] in lines


def test_scores_of_checkpoints_are_next_to_the_loss(pretrained, capsys, monkeypatch) -> None:
    """The table has the checkpoint with the best mean over the tasks, the picture a panel for each task."""
    for name in ("a", "b"):
        shutil.copytree(pretrained, name)
    for step, task, scores in ((3, "rte", [0.6, 0.8]), (3, "cola", [0.2]), (6, "rte", [0.5]), (6, "cola", [0.1])):
        mean = sum(scores) / len(scores)
        line = {"step": step, "task": task, "metric": "accuracy", "scores": scores, "mean": mean, "recipe": "x"}
        append_transfer_score("b", line)
    assert main(["a", "b"]) == 0
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["best checkpoint, step", "-", "3"] in lines
    assert ["rte accuracy, best checkpoint", "-", "0.7000 ± 0.1414"] in lines
    assert ["cola accuracy, best checkpoint", "-", "0.2000"] in lines
    _, panels = drawn(monkeypatch, "a", "b")
    assert list(panels) == ["mlm loss", "nsp loss", "mlm accuracy", "rte accuracy", "cola accuracy"]
    [line] = panels["rte accuracy"].lines
    assert line.get_xydata().tolist() == [[3, 0.7], [6, 0.5]]
    assert line.get_color() == panels["mlm loss"].lines[-2].get_color(), "the colour of the second run"


def test_a_baseline_of_several_runs_is_drawn_once(pretrained, monkeypatch) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(pretrained, name)
    results = json.loads(Path("c/results.json").read_text())
    results["baselines"]["unigram"]["loss"] += 1
    write_results("c", results)
    _, panels = drawn(monkeypatch, "a", "b", "c")
    dashed = [line for line in panels["mlm loss"].lines if line.get_linestyle() == "--"]
    assert len(dashed) == 2
    assert dashed[0].get_color() == "#666666"
    assert dashed[1].get_color() == panels["mlm loss"].lines[-3].get_color()


def test_runs_of_several_seeds_have_mean_and_deviation(finetuned, capsys, monkeypatch) -> None:
    one = json.loads((finetuned / "results.json").read_text())
    for name, seeds in (("three", (0, 1, 2)), ("two", (0, 1))):
        make_run(finetuned, name, {"num_seeds": 3}, [])
        for seed in seeds:
            shutil.copytree(finetuned, f"{name}/seed-{seed}")
            write_results(f"{name}/seed-{seed}", {**one, "dev": {**one["dev"], "accuracy": 0.5 + seed / 10}})
    figure, panels = drawn(monkeypatch, "three", "two", str(finetuned))
    text = capsys.readouterr().out
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    alone = f"{one['dev']['accuracy']:.4f}"
    assert ["dev accuracy", "0.6000 ± 0.1000", "0.5500 ± 0.0707", alone] in lines
    last = max(line["step"] for line in map(json.loads, (finetuned / "metrics.jsonl").open()))
    assert ["steps", str(last), f"unfinished (step {last}, 2 of 3 seeds)", str(last)] in lines
    assert ["num_seeds", "3", "3", "1"] in lines
    assert "are not on the same rows" not in text
    assert not any(line[0] == "model.vocab_size" for line in lines)
    assert list(panels) == ["loss", "accuracy"]
    assert figure.get_suptitle() == "sst2: 3 runs"
    evaluations = [line for line in panels["loss"].lines if line.get_marker() == "o"]
    assert len(evaluations) == 3 + 2 + 1
    write_results("three", {"runs": [one], "dev": {}})  # the sub-folders may have been removed
    shutil.rmtree("three/seed-1")
    assert main(["three"]) == 0


def test_other_tasks_have_panels_of_their_own(finetuned, monkeypatch, capsys) -> None:
    lines = [("eval", step, {"loss": 2.0, "pearson": 0.5, "spearman": None}) for step in (5, 10)]
    make_run(finetuned, "stsb", {"task": "stsb"}, lines)
    _, panels = drawn(monkeypatch, str(finetuned), "stsb")
    assert list(panels) == ["sst2 loss", "sst2 accuracy", "stsb loss", "stsb pearson"]
    out = capsys.readouterr().out
    assert "are not on the same rows, because of task" in out
    assert re.search(r"dev spearman +- +nan", out)


def test_one_run_and_the_same_run_twice(runs, capsys) -> None:
    assert main(["c"]) == 0
    assert "settings that differ" not in capsys.readouterr().out
    assert main(["c", "a/../c/"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a run that is named twice is shown once\n")
    assert out.endswith("compare.png: c\n")


def test_a_run_that_has_just_begun(pretrained, capsys) -> None:
    make_run(pretrained, "begun", {}, [])
    assert main(["begun"]) == 0
    out = capsys.readouterr().out
    assert "unfinished (no evaluation yet)" in out
    assert out.endswith("no picture: no run has been evaluated yet\n")
    assert not Path("compare.png").exists()
    make_run(pretrained, "damaged", {}, [("eval", 5, {"loss": float("nan")})])
    with Path("damaged/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "spl')
    assert main(["begun", "damaged"]) == 0
    assert Path("compare.png").exists()


def test_a_narrow_terminal_has_a_line_for_each_value(runs, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(runs) == 0
    assert "  data.sequence_length\n    a/run  32\n    b/run  32\n    c      16\n" in capsys.readouterr().out


def test_the_scores_have_tokens_per_second_and_mfu() -> None:
    timing = {"seconds": {"training": 8.0}, "tokens_per_second": 1234.56, "mfu": 0.12344}
    results = {"seconds": 9.0, "timing": timing}
    pretraining = {"eval": {"mlm_loss": 2.0}, **results}
    finetuning = {"main_metric": "accuracy", "dev": {"accuracy": 0.5}, **results}
    for config, one, score in (
        (PretrainConfig(), pretraining, ("mlm_loss", "2.0000")),
        (FinetuneConfig(), finetuning, ("dev accuracy", "0.5000")),
    ):
        _, *rows = score_rows([ComparedRun(Path("run"), config, [[]], [one], 1)])
        assert rows == [score, ("seconds", "9.0"), ("tokens per second", "1,234.6"), ("mfu", "0.1234")]


@pytest.mark.medium
def test_another_vocabulary_is_told(runs, capsys) -> None:
    shutil.copytree("a/run", "other")
    assert main(["a/run", "other"]) == 0
    assert "are not on the same rows" not in capsys.readouterr().out
    Path("other/tokenizer.json").write_text("{}")
    Path("other/config.digest").unlink()  # a vocabulary that was changed later is an error
    assert main(["a/run", "other"]) == 0
    assert "are not on the same rows, because of vocabulary\n" in capsys.readouterr().out


@pytest.mark.medium
def test_more_runs_than_colours(pretrained, monkeypatch) -> None:
    names = [f"run{number}" for number in range(20)]
    for name in names:
        make_run(pretrained, name, {}, pretraining_lines(20, 1.0))
    figure, panels = drawn(monkeypatch, *names)
    looks = {(line.get_color(), line.get_marker()) for line in panels["mlm loss"].lines if line.get_marker() != ""}
    assert len(looks) == 20
    assert legend(figure)[:20] == names


def test_mistakes_are_one_sentence(runs, pretrained, finetuned, fails) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    problems = {"empty": "holds no run (no config.yaml)", "file": "is a file", "missing": "does not exist"}
    for path, problem in problems.items():
        assert f"{path} {problem}: pass folders of runs" in fails(main, "c", path)
    error = fails(main, "c", str(finetuned))
    assert "c is a pretraining run and" in error
    assert error.endswith("is a fine-tuning run: pass runs of one kind\n")
    Path("empty/config.yaml").write_text("[")
    assert "empty/config.yaml cannot be read" in fails(main, "empty")
    Path("a/run/results.json").write_text("{")
    assert "results.json cannot be read" in fails(main, "a/run")
    for scores in ({"mlm_loss": "x"}, {"mlm_loss": []}, ["mlm_loss"], None):
        Path("a/run/results.json").write_text(json.dumps({"eval": scores}))
        assert "results.json is damaged" in fails(main, "a/run"), scores


def test_only_a_picture_of_its_own_is_replaced(runs, fails) -> None:
    assert main(["c", "--output", "x.png"]) == 0
    before = Path("x.png").read_bytes()
    assert main(["b/run", "--output", "x.png"]) == 0
    assert Path("x.png").read_bytes() != before
    Path("other.png").write_bytes(b"\x89PNG")
    Path("folder.png").mkdir()
    for name in ("other.png", "folder.png"):
        assert "is not a picture of bert compare: pass another --output" in fails(main, "c", "--output", name)
    assert "does not end in .png" in fails(main, "c", "--output", "x.pdf")
    assert "none is not a folder" in fails(main, "c", "--output", "none/x.png")
    assert Path("other.png").read_bytes() == b"\x89PNG"


def test_a_seed_without_a_score_leaves_the_others(finetuned, capsys) -> None:
    one = json.loads((finetuned / "results.json").read_text())
    make_run(finetuned, "two", {"num_seeds": 2}, [])
    for seed, loss in ((0, 0.5), (1, None)):
        shutil.copytree(finetuned, f"two/seed-{seed}")
        write_results(f"two/seed-{seed}", {**one, "dev": {**one["dev"], "loss": loss}})
    assert main(["two"]) == 0
    assert "nan ± nan" in capsys.readouterr().out


@pytest.mark.medium
def test_rows_that_a_seed_or_the_training_text_decides_are_told(pretrained, finetuned, capsys) -> None:
    """Dev rows that are drawn from training rows, and held-out text that is a share of the corpus."""
    for name, changes in (
        ("drawn", {"dev_fraction": 0.25}),
        ("other_seed", {"dev_fraction": 0.25, "seed": 7}),
        ("whole", {"seed": 7}),
    ):
        make_run(finetuned, name, changes, [])
    said = "are not on the same rows, because of "
    assert main(["drawn", "other_seed"]) == 0
    assert f"{said}data.sample_seed\n" in capsys.readouterr().out
    assert main([str(finetuned), "whole"]) == 0
    assert said not in capsys.readouterr().out
    make_run(pretrained, "held_out", {"eval": "held.txt"}, [])
    for name, changes in (
        ("trained", {"eval": "held.txt", "train": "other.txt"}),
        ("near", {"near_duplicates": 0.5}),
        ("masked", {"eval": "held.txt", "max_predictions_per_sequence": 4}),
    ):
        make_run(pretrained, name, changes, [])
    for one, other, names in (
        ("held_out", "trained", None),
        (str(pretrained), "near", "data.near_duplicates"),
        ("held_out", "masked", "max_predictions_per_sequence"),
    ):
        assert main([one, other]) == 0
        text = capsys.readouterr().out
        assert said not in text if names is None else f"{said}{names}\n" in text
