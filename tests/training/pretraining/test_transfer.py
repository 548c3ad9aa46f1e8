"""Transfer at the end of pretraining, at a tiny size: runs, controls, results, curves, resume."""

import json
import statistics
from pathlib import Path

import pytest

from bert.commands.pretrain import main
from bert.config import FinetuneConfig, PretrainConfig
from bert.runs.folder import RunFolder, has_ended
from bert.runs.metrics_log import write_results
from bert.runs.plots import Bars, Subject, plot_curves
from bert.training.pretraining.transfer import PRETRAINED, RANDOM
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of

pytestmark = pytest.mark.usefixtures("drawn")

RECIPE = """
task: classification
num_seeds: 2
data: {{dir: {folder}, max_length: 16, buckets: [16]}}
optimizer: {{learning_rate: 1.0e-3}}
training: {{epochs: 1, batch_size: 8}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    for split in ("train", "dev"):
        (folder / f"{split}.csv").write_text("text,label\n" + "ba ri du,a\nko tu mi,b\n" * 8)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def arguments(corpus: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pretraining") / "run"
    return [f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, f"--transfer={recipe}"]


@pytest.fixture(scope="module")
def run(arguments: list[str]) -> Path:
    assert main(arguments) == 0
    return Path(arguments[1].partition("=")[2])


@pytest.mark.medium
def test_results_have_both_encoders_and_the_baselines(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())["transfer"]
    assert results | {"task": "classification", "metric": "accuracy", "train_rows": 16, "dev_rows": 16} == results
    for name in (PRETRAINED, RANDOM):
        row = results[name]
        seeds = [json.loads((run / "transfer" / name / f"seed-{seed}" / "results.json").read_text()) for seed in (0, 1)]
        assert row["scores"] == [one["dev"]["accuracy"] for one in seeds]
        assert row["mean"] == pytest.approx(statistics.fmean(row["scores"]))
        assert row["standard_deviation"] == pytest.approx(statistics.stdev(row["scores"]))
    assert results["tf_idf_logistic_regression"]["scores"] == [1.0]
    assert results["majority_class"] == {"mean": 0.5, "standard_deviation": None, "scores": [0.5]}


@pytest.mark.medium
def test_the_control_differs_in_its_weights_alone(run: Path) -> None:
    texts = [(run / "transfer" / name / "config.yaml").read_text() for name in (PRETRAINED, RANDOM)]
    different = [pair for pair in zip(*(text.splitlines() for text in texts), strict=True) if len(set(pair)) > 1]
    keys = {line.partition(":")[0] for pair in different for line in pair}
    assert keys == {"init", "architecture_from", "output_dir"}


@pytest.mark.medium
def test_run_again_it_repeats_nothing(run: Path, arguments: list[str], capsys) -> None:
    before = json.loads((run / "results.json").read_text())["transfer"]
    times = [path.stat().st_mtime_ns for path in sorted((run / "transfer").rglob("metrics.jsonl"))]
    assert main(arguments) == 0
    assert json.loads((run / "results.json").read_text())["transfer"] == before
    assert [path.stat().st_mtime_ns for path in sorted((run / "transfer").rglob("metrics.jsonl"))] == times
    said = capsys.readouterr().out
    assert "classification (16 labelled rows, 16 held" in said
    assert "random weights" in said and "(2 seeds)" in said
    assert "seed 1" not in said  # in log.txt


def test_a_wrong_recipe_fails_before_training(corpus: Path, recipe: Path, tmp_path: Path, fails) -> None:
    folder = tmp_path / "run"
    arguments = [f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN]
    assert "nowhere.yaml cannot be read" in fails(main, *arguments, "--transfer=nowhere.yaml")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(recipe.read_text().replace("max_length: 16", "max_length: 2"))
    assert "data.max_length is 2" in fails(main, *arguments, f"--transfer={wrong}")
    wrong.write_text(recipe.read_text().replace("max_length: 16", "max_length: 64"))
    assert "max_position_embeddings is 32, and transfer" in fails(main, *arguments, f"--transfer={wrong}")
    wrong.write_text("task: mrpc\ndata: {dir: nothere, max_length: 16, buckets: [16]}\ntraining: {epochs: 1}\n")
    assert "nothere is not a folder" in fails(main, *arguments, f"--transfer={wrong}")
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.medium
def test_bars_are_a_panel_of_the_curves(run: Path) -> None:
    def width_of(subject: Subject) -> int:
        path = plot_curves(run, subject)
        return int.from_bytes(path.read_bytes()[16:20], "big")

    assert lines_of(run)
    bars = Bars("a task", "accuracy", {"pretrained": (0.5, 0.1), "majority_class": (0.3, None)})
    assert width_of(Subject(bars=bars)) > width_of(Subject())


@pytest.mark.parametrize("recipe", ["sst2", "file"])
def test_a_recipe_without_data_is_refused_before_training(recipe, corpus, tmp_path, fails) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("task: sst2\ntraining.epochs: 1\n")
    name = recipe if recipe == "sst2" else str(file)
    said = fails(main, f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, f"--transfer={name}")
    assert f"transfer {name} names no data: copy " in said and "data.dir in it" in said


def test_a_run_has_ended_with_all_its_seeds_and_its_transfer(tmp_path: Path) -> None:
    def ended(results: dict, config: PretrainConfig | FinetuneConfig) -> bool:
        write_results(tmp_path, results)
        return has_ended(RunFolder(tmp_path, config, resumed=True))

    assert ended({"steps": 6}, PretrainConfig())
    assert not ended({"steps": 6}, PretrainConfig(transfer="packages"))
    assert ended({"steps": 6, "transfer": {}}, PretrainConfig(transfer="packages"))
    assert ended({"runs": [{}, {}]}, FinetuneConfig(num_seeds=2))
    assert not ended({"runs": [{}, {}]}, FinetuneConfig(num_seeds=3))
