"""Transfer at the end of pretraining, at a tiny size: scores, controls, table, curves, export, resume."""

import json
import shutil
import signal
import statistics
from pathlib import Path

import pytest

import bert
from bert.commands.pretrain import main
from bert.config import FinetuneConfig, PretrainConfig
from bert.data.corpus.docstrings import installed_modules
from bert.runs import report
from bert.runs.folder import RunFolder, has_ended
from bert.runs.metrics_log import write_results
from bert.runs.plots import Bars, Subject, make_curves
from bert.runtime.interrupts import Interrupted
from bert.tasks import docstring_tasks
from bert.training.finetuning.starts import PRETRAINED, RANDOM, StartComparison
from bert.training.pretraining import results, transfer
from bert.training.pretraining import run as pretraining
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
    [task] = json.loads((run / "results.json").read_text())["transfer"]
    facts = {"task": "recipe", "kind": "sequence_classification", "metric": "accuracy"}
    assert task | facts | {"train_rows": 16, "dev_rows": 16} == task
    for name in (PRETRAINED, RANDOM):
        assert len(task[name]["scores"]) == 2
        assert task[name]["mean"] == pytest.approx(statistics.fmean(task[name]["scores"]))
        assert task[name]["standard_deviation"] == pytest.approx(statistics.stdev(task[name]["scores"]))
    assert task["bag_of_words"]["scores"] == [1.0]
    assert task["bag_of_words"]["model"] == "tf_idf_logistic_regression"
    assert task["majority_class"] == {"mean": 0.5, "standard_deviation": None, "scores": [0.5]}


@pytest.mark.medium
def test_scores_are_those_of_ordinary_fine_tuning(run: Path, recipe: Path, tmp_path: Path) -> None:
    [task] = json.loads((run / "results.json").read_text())["transfer"]
    ordinary = bert.finetune(recipe, init=run, output_dir=tmp_path / "run", overrides={"data.sample_seed": 0}).results
    assert [one["last"]["accuracy"] for one in ordinary["runs"]] == task[PRETRAINED]["scores"]


def fail(*_: object) -> None:
    raise AssertionError("the run has ended")


@pytest.mark.medium
def test_run_again_prints_the_same_table_and_does_no_work(run, arguments, monkeypatch, capsys) -> None:
    for module, name in ((pretraining, "_train"), (transfer, "StartComparison"), (results, "plot_curves")):
        monkeypatch.setattr(module, name, fail)
    before = (run / "results.json").read_bytes()
    assert main(arguments) == 0
    assert (run / "results.json").read_bytes() == before
    said = capsys.readouterr().out
    assert all(column in said for column in ("pretrained", "random weights", "bag of words"))
    assert "recipe (16 labels), accuracy" in said


@pytest.mark.medium
def test_a_finished_run_is_not_repeated_with_other_data(run, corpus, arguments, tmp_path, fails) -> None:
    shutil.copytree(run, tmp_path / "run")
    text = corpus.read_text()
    other = tmp_path / "other.txt"
    other.write_text(text)
    same = [f"--data.train={other}", f"--output_dir={tmp_path / 'run'}", *arguments[2:]]
    assert "data.train" in fails(main, *same)
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace(str(corpus), str(other)))
    assert main(same) == 0
    other.write_text(text + "\none more document\n")
    assert "the data is not what the run" in fails(main, *same)


@pytest.mark.medium
def test_a_run_killed_in_transfer_only_measures_the_rest(run, arguments, tmp_path, monkeypatch, capsys) -> None:
    finished = json.loads((run / "results.json").read_text())
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.json", "export"))
    pretrained = {name: value for name, value in finished.items() if name != "transfer"} | {"seconds": 1000.0}
    write_results(tmp_path / "run", pretrained)
    arguments = [arguments[0], f"--output_dir={tmp_path / 'run'}", *arguments[2:]]
    shutil.copytree(run / "export", tmp_path / "run" / "export")
    monkeypatch.setattr(pretraining, "_train", fail)
    monkeypatch.setattr(report, "QUIET_SECONDS", 0)
    assert main(arguments) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["transfer"] == finished["transfer"] and 1000 < results["seconds"] < 1300
    lines = [line for line in capsys.readouterr().out.splitlines() if " left" in line]
    assert any(line.startswith("recipe, pretrained  model 0/4 (12%)") for line in lines)
    assert any(line.startswith("recipe, random weights  model 3/4 ") for line in lines)


@pytest.mark.medium
def test_a_signal_during_transfer_names_the_step_of_pretraining(run, arguments, tmp_path, monkeypatch, capsys) -> None:
    def interrupt(self: StartComparison, start: str) -> None:
        raise Interrupted(1, signal.SIGINT)

    monkeypatch.setattr(StartComparison, "scores", interrupt)
    steps = json.loads((run / "results.json").read_text())["steps"]
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.json"))
    assert main([arguments[0], f"--output_dir={tmp_path / 'run'}", *arguments[2:]]) == 130
    assert f"saved at step {steps};" in capsys.readouterr().out


@pytest.mark.medium
def test_the_export_has_the_weights_of_the_run(run: Path) -> None:
    text = "ba ri [MASK] du ko"
    exported, ours = (bert.load(folder).fill_mask(text, top_k=3) for folder in (run / "export", run))
    assert [guess.token for guess in exported[0]] == [guess.token for guess in ours[0]]


@pytest.mark.slow
def test_a_model_without_an_export_is_scored(corpus: Path, recipe: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    options = ["--model.position_embedding_type=rotary", "--model.pre_layer_norm=true"]
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *options, f"--transfer={recipe}"]) == 0
    assert "export is not written" in capsys.readouterr().out
    assert json.loads((run / "results.json").read_text())["transfer"]


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
    said = fails(main, *arguments, "--transfer=a/task.yaml, b/task.yaml")
    assert "transfer names a/task.yaml and b/task.yaml, whose scores have the same name" in said
    for setting, said in (
        ("training: {average_checkpoints: 2, ", "training.average_checkpoints is 2"),
        ("patience: 2\ntraining: {", "patience is 2"),
    ):
        wrong.write_text(recipe.read_text().replace("training: {", setting))
        last = f"{said}, but transfer {wrong} scores the weights of the last step: remove it"
        assert last in fails(main, *arguments, f"--transfer={wrong}")
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.medium
def test_bars_replace_the_learning_rate(run: Path) -> None:
    lines = lines_of(run)
    bars = Bars("tasks", {"a task": {"pretrained": (0.5, 0.1), "bag_of_words": (0.3, None)}, "another": {}})
    panels = [[axes.get_ylabel() for axes in make_curves(lines, Subject(bars=given)).axes] for given in (None, bars)]
    assert "learning rate" in panels[0]
    assert "learning rate" not in panels[1]
    assert len(panels[1]) == len(panels[0])


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


QUICK = [
    *("--training.steps=8", "--training.batch_size=8", "--training.eval_every=4", "--training.checkpoint_every=8"),
    *("--training.log_every=4", "--tokenizer.vocab_size=300", "--data.num_workers=1"),
    *("--model.hidden_size=16", "--model.num_attention_heads=2", "--model.intermediate_size=32"),
    *("--model.max_position_embeddings=64",),
]


@pytest.mark.slow
def test_the_quickstart_fine_tunes_on_three_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The default recipe with tiny budgets, on the docstrings of a few packages."""
    monkeypatch.setattr(docstring_tasks, "TRAIN_ROWS", 32)
    monkeypatch.setattr(docstring_tasks, "DEV_ROWS", 8)
    monkeypatch.setattr(docstring_tasks, "installed_modules", lambda: installed_modules(frozenset({"numpy", "jax"})))
    run = tmp_path / "run"
    tasks = "--transfer=word_order,parameters,which_parameter"
    assert main([f"--output_dir={run}", "--data.train=docstrings:json,email:train", tasks, *QUICK]) == 0
    results = json.loads((run / "results.json").read_text())
    assert [task["task"] for task in results["transfer"]] == ["word_order", "parameters", "which_parameter"]
    for task in results["transfer"]:
        for name in ("pretrained", "random_weights", "bag_of_words"):
            assert 0 <= task[name]["mean"] <= 1
        assert len(task["pretrained"]["scores"]) == 3
        assert (run / "transfer" / task["task"] / "train.jsonl").is_file()
    said = capsys.readouterr().out
    assert "random weights" in said and "bert finetune --config parameters" in said
    assert len(results["filled_masks"]) == 3
    assert len(said[: said.index("held-out text after")].splitlines()) <= 25
