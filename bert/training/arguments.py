"""Keyword arguments of `bert.pretrain` and `bert.finetune`, and the configuration keys that they set."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.validation import PATHS, keys_of, nearest_keys
from bert.config.yaml_io import UserValue, parse_dict
from bert.errors import UserError
from bert.files import path_text

SHARED = {
    "init": "init",
    "output_dir": "output_dir",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "learning_rate": "optimizer.learning_rate",
    "seed": "seed",
    "dtype": "training.dtype",
}

ARGUMENTS: Mapping[type, Mapping[str, str]] = {
    PretrainConfig: {
        "train": "data.train",
        "eval": "data.eval",
        **SHARED,
        "steps": "training.steps",
        "sequence_length": "data.sequence_length",
        "vocab_size": "tokenizer.vocab_size",
    },
    FinetuneConfig: {
        "train": "data.train",
        "dev": "data.dev",
        **SHARED,
        "max_length": "data.max_length",
        "num_seeds": "num_seeds",
        "patience": "patience",
    },
}
"""Configuration class -> argument -> key."""

FUNCTIONS: Mapping[type, str] = {PretrainConfig: "bert.pretrain", FinetuneConfig: "bert.finetune"}


def check_names(config_class: type, names: Iterable[str]) -> None:
    """Raises UserError for the first name that is not an argument, with the most similar argument or key."""
    for name in names:
        if name not in ARGUMENTS[config_class]:
            raise UserError(f"{FUNCTIONS[config_class]} has no argument {name}: {_fix(config_class, name)}")


def _fix(config_class: type, name: str) -> str:
    """Returns the end of the message about an unknown argument.

    A key of the configuration is set by ``overrides`` unless it has its own argument.
    """
    arguments, keys = ARGUMENTS[config_class], keys_of(config_class)
    if name in keys or name in {key.rpartition(".")[2] for key in keys}:
        return _instead(nearest_keys(name, keys)[0], arguments)
    parts = sorted((argument for argument in arguments if argument in name), key=len)  # epochs of num_train_epochs
    if near := [*difflib.get_close_matches(name, arguments, 1), *parts[-1:]]:
        return f"did you mean {near[0]}?"
    if near := nearest_keys(name, keys):
        return _instead(near[0], arguments)
    return f"the arguments are {', '.join(arguments)}; overrides sets all other keys"


def _instead(key: str, arguments: Mapping[str, str]) -> str:
    argument = next((argument for argument, target in arguments.items() if target == key), None)
    return f"use overrides={{{key!r}: ...}}" if argument is None else f"did you mean {argument}?"


def values_of_arguments(config_class: type, arguments: Mapping[str, Any]) -> dict[str, UserValue]:
    """Returns the values of arguments by key; None is an argument that is not given.

    Raises:
        UserError: a name is not an argument, or a value is not a value of a configuration.
    """
    check_names(config_class, arguments)
    values: dict[str, UserValue] = {}
    for name, value in arguments.items():
        key = ARGUMENTS[config_class][name]
        if value is not None:
            value = path_text(value, name) if key in PATHS and not isinstance(value, list | tuple) else value
            values |= parse_dict({key: value}, f"argument {name}", keys_of(config_class))
    return values
