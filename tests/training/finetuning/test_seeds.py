"""Several seeds of one task: which rows they are scored on, and how their results are aggregated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bert.commands.finetune import _show
from bert.config import FinetuneConfig, TaskDataConfig
from bert.runs.folder import RunFolder, open_run
from bert.training.finetuning.run import aggregate_seeds, finetune_seeds


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
