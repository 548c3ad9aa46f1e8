"""``--help`` of a command with a configuration: its keys with type, meaning and default.

``--help`` lists the most used keys, ``--help=all`` every key.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.validation import ConfigField, fields_of, help_texts, keys_of

COMMON_KEYS = {
    PretrainConfig: (
        *("output_dir", "init", "seed", "loggers", "data.train", "data.eval", "data.input_format"),
        *("training.objective", "data.sequence_length", "tokenizer.path", "tokenizer.vocab_size", "model.hidden_size"),
        *("model.num_hidden_layers", "model.num_attention_heads", "optimizer.name", "optimizer.learning_rate"),
        *("optimizer.warmup_ratio", "optimizer.schedule", "training.steps", "training.batch_size"),
        *("training.gradient_accumulation_steps", "training.dtype", "training.mesh", "training.checkpoint_every"),
    ),
    FinetuneConfig: (
        *("task", "init", "output_dir", "seed", "num_seeds", "patience", "loggers", "data.dir", "data.train"),
        *("data.dev", "data.test", "data.columns.text_a", "data.columns.label", "data.max_length", "lora.rank"),
        "distillation.teacher",
        *("optimizer.name", "optimizer.learning_rate", "optimizer.schedule", "training.epochs"),
        *("training.batch_size", "training.gradient_accumulation_steps", "training.dtype", "training.eval_every"),
    ),
}
"""Keys that ``--help`` lists."""

PLACEHOLDERS = {int: "N", float: "X", bool: "true|false"}


class _Help(NamedTuple):
    """Attributes of a help text.

    Attributes:
        parser: formats the text.
        keys: keys to list.
        recipe: names of the recipes whose values replace the defaults.
    """

    parser: argparse.ArgumentParser
    keys: Container[str]
    recipe: str


def config_help(
    config: PretrainConfig | FinetuneConfig,
    recipe: str,
    prog: str,
    description: str,
    config_text: str,
    extra_options: Mapping[str, str],
    has_all_keys: bool,
) -> str:
    """Returns the help text, formatted by `argparse`.

    Args:
        config: its fields are the keys and its values the defaults.
        recipe: names of the recipes.
        prog: name of the command.
        description: description of the command.
        config_text: help of ``--config``.
        extra_options: help of the options that are not keys, by usage such as ``NAME VALUE``.
        has_all_keys: list every key instead of `COMMON_KEYS`.
    """
    every_key = keys_of(type(config))
    more = "" if has_all_keys else f"{prog} --help=all lists all {len(every_key)} keys; "
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE ...] [--KEY VALUE ...]",
        description=description,
        epilog=f"{more}bert recipes lists the recipes.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        add_help=False,
    )
    options = parser.add_argument_group("Options")
    _add(options, "help[=all]", None, "Show the most used keys, or with --help=all every key, and exit; -h is --help.")
    _add(options, "config", "FILE", config_text)
    _add(options, "print_config", None, "Print the complete configuration as YAML and exit.")
    for usage, text in extra_options.items():
        name, _, placeholder = usage.partition(" ")
        _add(options, name, placeholder or None, text)
    _add_section(_Help(parser, every_key if has_all_keys else COMMON_KEYS[type(config)], recipe), config, "", "the run")
    return parser.format_help()


def without_paths(text: str) -> str:
    """Replaces paths of guides and measurements, which an installed package does not have, by their names."""
    text = re.sub(r"\bdocs/(\w+)\.md", lambda match: f"the guide {match[1].replace('_', ' ')}", text)
    named = r"\bbenchmarks/RESULTS\.md#([\w-]+)"
    text = re.sub(named, lambda match: f'see "{match[1].replace("-", " ")}" in the results', text)
    return text.replace("benchmarks/RESULTS.md", "the results")


def _add(group: argparse._ArgumentGroup, name: str, placeholder: str | None, text: str) -> None:
    text = without_paths(text).replace("%", "%%")
    if placeholder is None:
        group.add_argument(f"--{name}", action="store_true", help=text)
    else:
        group.add_argument(f"--{name}", metavar=placeholder, help=text)


def _add_section(text: _Help, config: Any, prefix: str, title: str) -> None:
    """Adds the fields of a dataclass as one group, which argparse omits if it is empty, then its sections."""
    group = text.parser.add_argument_group(title[0].upper() + title[1:])
    fields, texts = fields_of(type(config)), help_texts(type(config))
    for name, field in fields.items():
        if field.section is None and (prefix + name in text.keys or ".K." in prefix):
            value = getattr(config, name)
            source = "default" if value == field.default else text.recipe
            _add(group, prefix + name, _placeholder(field), f"{texts[name]} ({source}: {_shown(value)})")
    for name, field in fields.items():
        if field.section is not None:
            _add_section(text, getattr(config, name), f"{prefix}{name}.", texts[name])
        elif field.item is not None and prefix + name in text.keys:
            summary = (field.item.__doc__ or "").partition(";")[0]
            _add_section(text, field.item(), f"{prefix}{name}.K.", f"{summary} (K = 1, 2, ...)")


def _shown(value: Any) -> str:
    """Formats a value as YAML on one line; a list of sections as their number."""
    if isinstance(value, list) and any(map(dataclasses.is_dataclass, value)):
        return f"{len(value)} of them"
    return value if isinstance(value, str) else json.dumps(value)


def _placeholder(field: ConfigField) -> str:
    if field.item is not None:
        return "null"
    member = field.members[0]
    if field.choices:
        return "|".join(field.choices) + (",..." if field.takes_list else "")
    if field.takes_list:
        return f"{PLACEHOLDERS.get(typing.get_args(member)[0], 'TEXT')} ..."
    return PLACEHOLDERS.get(member, "TEXT")
