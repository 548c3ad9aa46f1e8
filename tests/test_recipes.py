"""Every recipe loads, passes its checks, and describes a model that can be built."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bert.config import FinetuneConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config_file import load
from bert.data.tasks import TASKS
from bert.heads import BertForPreTraining
from bert.phases import phases_of
from bert.train import count_parameters

FINETUNING = sorted(set(recipe_names()) & set(TASKS))
PRETRAINING = sorted(set(recipe_names()) - set(TASKS))
PARAMETERS = {"tiny": 4_433_468, "mini": 11_267_900, "small": 29_058_876, "medium": 41_668_412, "base": 110_106_428,
              "large": 336_226_108}  # fmt: skip


def test_there_is_a_recipe_for_every_size_and_task() -> None:
    assert set(PRETRAINING) == {"quickstart", *PARAMETERS}
    # Benchmarks and tasks of one's own have recipes, kinds of file have none.
    assert set(FINETUNING) == set(TASKS) - {"ner", "multiple_choice"}


@pytest.mark.parametrize("name", PRETRAINING)
def test_pretraining_recipes(name: str) -> None:
    config = load(PretrainConfig, recipe_folder() / f"{name}.yaml")
    if name in PARAMETERS:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train="corpus.txt"))
    config.check()
    model = BertForPreTraining(dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))
    if name in PARAMETERS:
        assert count_parameters(shapes) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["small", "medium", "base", "large"])
def test_the_papers_two_phases(name: str) -> None:
    config = load(PretrainConfig, recipe_folder() / f"{name}.yaml")
    short, long = phases_of(config, int(config.training.steps))
    assert (short.end, long.end) == (900_000, 1_000_000)
    sizes = [(p.config.data.sequence_length, p.config.data.max_predictions_per_sequence) for p in (short, long)]
    assert sizes == [(128, 20), (512, 77)]
    assert {p.config.training.batch_size for p in (short, long)} == {256}
    assert short.config.optimizer == long.config.optimizer


@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_recipes(name: str) -> None:
    config = load(FinetuneConfig, recipe_folder() / f"{name}.yaml")
    assert config.task == name
    data = dataclasses.replace(config.data, dir="somewhere")
    dataclasses.replace(config, init="runs/X", data=data).check()
