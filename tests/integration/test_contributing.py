"""The steps of CONTRIBUTING.md that add a part, followed; test_task_interface.py does so for a task and its head."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import bert.config.data
from bert.data.pretraining import input_formats
from bert.data.pretraining.input_formats import sentence_order_pairs
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of, results_of

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_what_it_names_is_there() -> None:
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:bert|tests|configs)/[\w/.]+)`", CONTRIBUTING):
        if "NAME" not in name:
            assert (root / name).exists(), name
    import bert.config.run_file
    import bert.interchange.families
    import bert.interchange.names
    import bert.interchange.writers.signature
    import bert.model.heads
    import bert.model.names
    import bert.tasks.base
    import bert.tasks.registry
    import bert.training.losses
    import bert.training.optimizer
    import bert.training.pretraining.objectives

    for module, names in {
        bert.tasks.registry: ("MODULES", "TASKS"),
        bert.tasks.base.Task: ("fit", "to_config", "from_config"),
        bert.config.run_file: ("DERIVED_KEYS",),
        bert.model.heads: ("HEADS",),
        bert.training.losses: ("LOSSES", "TaskLoss", "make_pretraining_loss"),
        bert.interchange.names: ("MODULES", "ARCHITECTURES_WITH_LABELS"),
        bert.interchange.families: ("FAMILIES", "Family"),
        bert.model.names: ("ARCHITECTURES",),
        bert.interchange.writers.signature: ("signature",),
        input_formats: ("INPUT_FORMATS",),
        bert.config: ("INPUT_FORMATS", "UserError"),
        bert.training.pretraining.objectives: ("OBJECTIVES",),
        bert.training.optimizer: ("make_direction", "make_optimizer", "scale_by_bert_adam"),
    }.items():
        for name in names:
            assert hasattr(module, name), name
            assert name in CONTRIBUTING


@pytest.mark.slow
def test_an_input_format(corpus, tmp_path, monkeypatch) -> None:
    """Which of two segments is longer: two classes over the pooled output, from a line in each of two tables."""

    def longer_pairs(*arguments):
        for pair in sentence_order_pairs(*arguments):
            yield pair._replace(label=int(pair.b_end - pair.b_start > pair.a_end - pair.a_start))

    line = input_formats._paired_format(longer_pairs, "longer", "longer", 1, ("A is longer", "B is longer"))
    monkeypatch.setitem(input_formats.INPUT_FORMATS, "longer", line)
    monkeypatch.setattr(bert.config.data, "InputFormatName", Literal[(*bert.config.INPUT_FORMATS, "longer")])
    from bert.commands.pretrain import main

    folder = tmp_path / "run"
    arguments = [f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, "--data.input_format=longer"]
    assert main(arguments) == 0
    lines = lines_of(folder)
    assert all(np.isfinite(line["longer_loss"]) and 0 <= line["longer_accuracy"] <= 1 for line in lines)
    assert "longer_majority_accuracy" in results_of(folder)["baselines"]
    assert dataclasses.asdict(bert.load(folder).config)["num_hidden_layers"] == 1
