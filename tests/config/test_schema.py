"""The JSON schema: recipes and whole configurations are valid, typing errors and values out of range are not."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from bert.commands.recipes import config_command
from bert.config import FinetuneConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config.schema import config_schema, schema_text
from bert.config.sources import SCHEMA_LINE
from bert.config.validation import RENAMED, fields_of, help_texts, keys_of
from bert.config.yaml_io import dump

SCHEMA = config_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FILE = recipe_folder() / "schema.json"


class Yaml12Loader(yaml.SafeLoader):
    """Reads numbers as editors do: 1e-4 is a number, 1_000 is a text."""


Yaml12Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def property_of(config_class: type, key: str) -> dict[str, Any]:
    """The schema of a key, found through the references from section to section."""
    place = SCHEMA["$defs"][config_class.__name__]
    for name in key.split("."):
        place = place["properties"][name]
        if "$ref" in place:
            place = SCHEMA["$defs"][place["$ref"].removeprefix("#/$defs/")]
    return place


def errors(text: str) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(yaml.load(text, Yaml12Loader))]


@pytest.mark.medium
def test_the_schema_is_valid_and_the_file_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert config_command(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == SCHEMA
    assert FILE.read_text(encoding="utf-8") == printed, "write it again: bert config schema > configs/schema.json"


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_names_the_schema_and_is_valid(name: str) -> None:
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first == f"{SCHEMA_LINE}$schema={FILE.name}"
    assert errors(text) == []
    assert list(VALIDATOR.iter_errors(yaml.safe_load(text))) == []


@pytest.mark.medium
@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_each_key_has_its_default_and_its_help(config_class: type) -> None:
    for key, field in keys_of(config_class).items():
        result = property_of(config_class, key)
        assert result["default"] == field.default
        assert not field.choices or set(field.choices) <= {*result.get("enum", result.get("items", {}).get("enum", ()))}
    for name in fields_of(config_class):
        description = SCHEMA["$defs"][config_class.__name__]["properties"][name]["description"]
        assert description == help_texts(config_class)[name]
    assert errors(dump(config_class())) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "task: sst2\ndata:\n  labels: [0, 1]\n",
        "task: sst2\ndata.dir: GLUE\ntraining.epochs: 1\n",
        "training:\n  steps: 1e3\n  batch_size: 1_024\noptimizer:\n  learning_rate: 1e-4\n",
        "phases:\n- share: 0.9\n- sequence_length: 512\n",
        "phases: null\ndata: null\nloggers: tensorboard,wandb\n",
        "loggers: [wandb]\ntokenizer:\n  strip_accents: european\n",
        "data:\n  train: [a.txt, b.txt]\n  objective: sop\n  prediction: masked\n",
    ],
)
def test_what_the_commands_accept_is_valid(text: str) -> None:
    assert errors(text) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("task: sst2\ntraining:\n  epoch: 3\n", "'epoch'"),
        ("patience: 3\n", "'patience'"),
        ("training:\n  steps: many\n", "'many'"),
        ("training:\n  batch_size: 0\n", "0 is less than the minimum of 1"),
        ("data:\n  masked_lm_prob: 1\n", "1"),
        ("data:\n  input_format: pairs\n", "'pairs'"),
        ("phases:\n- shar: 0.9\n", "'shar'"),
        ("loggers: [sacred]\n", "'sacred'"),
        ("optimizer:\n  bias_correction: 2\n", "2"),
    ],
)
def test_mistakes_are_found(text: str, part: str) -> None:
    result = errors(text)
    assert len(result) == 1 and part in result[0]


def test_earlier_keys_are_deprecated() -> None:
    for name, renaming in RENAMED.items():
        result = property_of(PretrainConfig, name)
        assert result["deprecated"] is True and renaming.key in result["description"]
        assert {*renaming.values, *renaming.values.values()} <= set(result["enum"])
    current = [key for key in keys_of(PretrainConfig) if "deprecated" in property_of(PretrainConfig, key)]
    assert current == []


def test_the_text_ends_in_one_line_break() -> None:
    assert schema_text().endswith("}\n")
