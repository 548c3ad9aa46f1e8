"""Runs of earlier versions resume with the commands that began them."""

import dataclasses

import pytest

from bert.config import FinetuneConfig, PretrainConfig, TaskDataConfig, TokenizerConfig, TrainingConfig
from bert.errors import UserError
from bert.runs.folder import open_run
from bert.tasks import make_task

OLDER = TokenizerConfig(strip_accents=None)


@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_a_run_with_an_earlier_default_resumes_and_keeps_it(config_class, tmp_path):
    task = {}
    if config_class is FinetuneConfig:
        task = {"task": "sst2", "init": "runs/x", "data": TaskDataConfig(dir="x"), "target_tokenizer": OLDER}
    older = config_class(output_dir=str(tmp_path / "run"), tokenizer=OLDER, **task)
    with open_run(older) as run:
        run.save_config(older)
        (run.checkpoints / "7").mkdir(parents=True)
    today = dataclasses.replace(older, tokenizer=TokenizerConfig())
    if config_class is FinetuneConfig:
        today = dataclasses.replace(today, target_tokenizer=TokenizerConfig())
        assert not older.has_target_tokenizer
        dataclasses.replace(older, training=TrainingConfig(steps=4)).check()
        assert make_task(older).name == "sst2"
    with open_run(today) as run:
        assert run.resumed
        assert run.config == older
    if config_class is FinetuneConfig:
        return
    other = dataclasses.replace(older, tokenizer=TokenizerConfig(strip_accents=True))
    with pytest.raises(UserError, match=r"tokenizer\.strip_accents is None, here True"), open_run(other):
        pass


def test_a_fine_tuning_run_with_the_earlier_default_is_read(tmp_path):
    data, training = TaskDataConfig(dir=str(tmp_path)), TrainingConfig(epochs=1)
    config = FinetuneConfig(task="classification", init="x", data=data, training=training)
    older = dataclasses.replace(config, tokenizer=OLDER, target_tokenizer=OLDER)
    older.check()
    assert make_task(older).name == "classification"
    with pytest.raises(UserError, match=r"target_tokenizer\.strip_accents is true"):
        make_task(dataclasses.replace(config, target_tokenizer=TokenizerConfig(strip_accents=True)))
