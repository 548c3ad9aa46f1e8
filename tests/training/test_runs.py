"""`bert.Run` in a notebook: its line, its table of scores and its curves."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

import bert
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import load_run_config
from bert.config.yaml_io import dump
from bert.training.pretraining.results import final_subject

PNG = b"\x89PNG"


@pytest.fixture
def two_seeds(finetuned: Path, tmp_path: Path) -> Path:
    """A run of two seeds made of the files of one run; it has not ended."""
    config = load_run_config(finetuned)
    assert isinstance(config, FinetuneConfig)
    for seed in (0, 1):
        shutil.copytree(finetuned, tmp_path / "two" / f"seed-{seed}", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "two" / "config.yaml").write_text(dump(dataclasses.replace(config, seed=0, num_seeds=2)))
    return tmp_path / "two"


@pytest.mark.medium
def test_a_finetuning_run_has_its_scores_and_baseline(finetuned: Path) -> None:
    run = bert.Run(finetuned)
    dev = run.results["dev"]
    table = run.table()
    assert table["dev"].to_dict() == dev
    assert table.loc["accuracy", "majority class"] == run.results["majority_class"]["accuracy"]
    assert math.isnan(table.loc["loss", "majority class"])
    assert f"sst2, 15 steps, dev accuracy {dev['accuracy']:.4f}" in repr(run) and "\n" not in repr(run)
    figure = run.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy", "learning rate"]
    assert figure._repr_png_().startswith(PNG)
    assert "sst2, from " in figure.get_suptitle()


@pytest.mark.medium
def test_a_pretraining_run_has_its_scores_and_baselines(pretrained: Path) -> None:
    run = bert.Run(pretrained)
    table = run.table()
    assert table["held out"].to_dict() == run.results["eval"]
    unigram = run.results["baselines"]["unigram"]
    baselines = table.iloc[:, 1]
    assert [baselines[name] for name in ("mlm_loss", "mlm_accuracy", "perplexity")] == [
        unigram[name] for name in ("loss", "accuracy", "perplexity")
    ]
    assert "pretraining, 6 steps, held out mlm accuracy " in repr(run)
    dashed = [line for axes in run.plot().axes for line in axes.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 3


@pytest.mark.medium
def test_an_unfinished_run_has_its_last_evaluation(pretrained: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(pretrained / name, tmp_path)
    run = bert.Run(tmp_path)
    last = [line for line in run.metrics if line["split"] == "eval"][-1]
    assert run.table()["held out"]["mlm_loss"] == last["mlm_loss"]
    assert "not ended, at step 6" in repr(run)
    (tmp_path / "metrics.jsonl").unlink()
    assert run.table().empty
    with pytest.raises(bert.UserError, match="has no curves"):
        run.plot()
    (tmp_path / "config.yaml").write_text("damaged: [")
    assert repr(run) == f"bert.Run({str(tmp_path)!r})"


@pytest.mark.medium
def test_seeds_are_columns_and_lines(two_seeds: Path) -> None:
    run = bert.Run(two_seeds)
    assert list(run.table()) == ["dev seed-0", "dev seed-1"]
    figure = run.plot()
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["seed-0", "seed-1"]
    one = json.loads((two_seeds / "seed-0" / "results.json").read_text())
    mean = {"mean": {"accuracy": 0.75}, "standard_deviation": {"accuracy": 0.125}}
    results = {"task": "sst2", "main_metric": "accuracy", "dev": mean, "runs": [one, one]}
    results |= {"baseline": "majority_class", "majority_class": {"accuracy": 0.5}}
    (two_seeds / "results.json").write_text(json.dumps(results))
    assert repr(run).endswith("sst2, 2 seeds, dev accuracy 0.7500 ± 0.1250 (baseline 0.5000)>")
    assert run.table().loc["accuracy"].to_dict() == {
        "dev": 0.75,
        "dev standard deviation": 0.125,
        "majority class": 0.5,
    }


def test_the_bars_of_a_transfer_are_in_the_plot(pretrained: Path) -> None:
    task = {"task": "word_order", "metric": "accuracy", "train_rows": 9}
    task["pretrained"] = {"mean": 0.5, "standard_deviation": None, "scores": [0.5]}
    config = load_run_config(pretrained)
    assert isinstance(config, PretrainConfig)
    for transfer in ([task], task):  # earlier versions had one task
        bars = final_subject(config, {"transfer": transfer}).bars
        assert [*bars.groups.values()] == [{"pretrained": (0.5, None)}]
    assert final_subject(config, {}).bars is None
