"""Universal Transformers in training: the cost of steps is part of the loss, on any devices, and runs resume."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from bert.commands.pretrain import main
from bert.model.pretraining import BertForPreTraining
from bert.training.losses import make_pretraining_loss, with_ponder_loss
from tests.conftest import SMALL_RUN
from tests.helpers import assert_resumes, lines_of
from tests.tiny_training import CONFIG, assert_same_gradients, batch_of, sharded_gradients

HALTING = ["--model.layer_groups=1", "--model.step_embedding=true", "--model.halting=0.5"]


@pytest.mark.medium
def test_a_run_logs_its_steps_and_resumes_exactly(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, *HALTING]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert main([*arguments, f"--output_dir={whole}"]) == 0
    for line in lines_of(whole):
        assert 1 <= line["ponder_steps"] <= line["ponder_loss"] <= 3
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"] + 0.5 * line["ponder_loss"], rel=1e-4)
    assert_resumes(main, arguments, whole, again)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_batches", "mesh"), [(8, 1, None), (2, 4, None), (8, 2, (2, 2, 2))])
def test_devices_and_micro_batches_do_not_matter(
    devices: int, micro_batches: int, mesh: tuple[int, int, int] | None
) -> None:
    model = BertForPreTraining(dataclasses.replace(CONFIG, layer_groups=1, halting=0.5))
    objective = with_ponder_loss(lambda model: make_pretraining_loss(model.apply), model, 0.5)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    expected, expected_sums = sharded_gradients(objective, params, batch_of(0), 1, 1)
    grads, sums = sharded_gradients(objective, params, batch_of(0), devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)
