"""Configurations as dictionaries of Python values."""

import dataclasses
from pathlib import Path

import pytest

from bert.config import FinetuneConfig, PretrainConfig, TaskDataConfig, recipe_folder, recipe_names
from bert.config.pretraining import PhaseConfig
from bert.config.sources import resolve_config
from bert.config.validation import keys_of
from bert.config.yaml_io import build_config, dump, load_config, parse_dict
from bert.errors import UserError


def resolved(base, **values):
    keys = keys_of(PretrainConfig)
    overrides = parse_dict(values, "overrides", keys)
    return resolve_config(PretrainConfig, [], overrides, "config", parse_dict(base, "config", keys), print).config


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_the_same_as_a_dictionary(name):
    file = recipe_folder() / f"{name}.yaml"
    config_class = FinetuneConfig if "\ntask:" in file.read_text() else PretrainConfig
    config = load_config(config_class, file)
    values = parse_dict(dataclasses.asdict(config), "config", keys_of(config_class))
    assert build_config(config_class, values) == config
    assert {entry.where for entry in values.values()} == {"config"}


def test_nested_keys_lists_and_paths_are_values():
    phases = ({"share": 0.9}, {"batch_size": 4})
    config = resolved({}, data={"train": [Path("a"), "b"]}, phases=phases, model={"hidden_size": 8}, seed=0)
    assert config.phases == [PhaseConfig(0.9), PhaseConfig(batch_size=4)]
    assert (config.data.train, config.model.hidden_size) == (["a", "b"], 8)


def test_overrides_replace_the_other_way():
    base = {"training": {"epochs": 3, "batch_size": 64, "gradient_accumulation_steps": 8}}
    training = resolved(base, **{"training.steps": 9, "training.micro_batch_size": 16}).training
    assert (training.steps, training.epochs, training.gradient_accumulation_steps) == (9, None, 4)


def test_an_evaluation_has_the_rows_of_a_micro_batch():
    """So that it fits where training does."""
    training = resolved({}, training={"batch_size": 4096, "gradient_accumulation_steps": 64}).training
    assert training.rows_per_evaluation == 64
    assert dataclasses.replace(training, eval_batch_size=256).rows_per_evaluation == 256


def test_the_preset_of_a_configuration_is_not_applied_again():
    base = dataclasses.asdict(PretrainConfig())
    base["training"]["preset"] = "fast"
    assert resolved(base).training.dtype == "float32"
    assert resolved({}, **{"training.preset": "fast"}).training.dtype == "bfloat16"
    assert resolved({}, **{"training.preset": "fast", "training.dtype": "float32"}).training.dtype == "float32"


def test_an_item_of_a_list_has_its_own_keys():
    with pytest.raises(UserError, match=r"^overrides.*phases\.1\.share_.*phases\.1\.share\?$"):
        resolved({}, phases=[{"share_": 1}])


def test_a_line_end_of_old_computers_in_a_label_survives_config_yaml(tmp_path: Path) -> None:
    config = FinetuneConfig(task="classification", data=TaskDataConfig(labels=["a\x85b", "a b", "é\u2028"]))
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    assert load_config(FinetuneConfig, tmp_path / "config.yaml") == config
