"""The table of data.prediction."""

import shutil
import typing
from pathlib import Path

import pytest
import yaml

from bert.commands.pretrain import main
from bert.config.data import Prediction
from bert.training.predictions import PREDICTIONS
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of


def test_the_configuration_names_the_entries_of_the_table() -> None:
    assert typing.get_args(Prediction) == tuple(PREDICTIONS)


def test_an_unknown_prediction_is_one_sentence(fails) -> None:
    assert "--data.prediction last: use one of masked" in fails(main, "--data.prediction=last")


@pytest.mark.medium
def test_a_run_begun_before_the_key_was_there_resumes(pretrained: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["data"]["prediction"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN]) == 0
    assert lines_of(run) == lines_of(pretrained)
