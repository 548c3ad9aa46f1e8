"""The ``--help`` of a command that takes a configuration: every key with its type, meaning and default."""

from __future__ import annotations

import argparse
import functools
import json
import typing
from collections.abc import Mapping

from bert.config.yaml_io import ConfigField, fields_of, help_texts

PLACEHOLDERS = {int: "N", float: "X", bool: "true|false"}


def config_help(
    config_class: type, prog: str, description: str, config_text: str, extra_options: Mapping[str, str]
) -> str:
    """The help text, as `argparse` formats it.

    Args:
        config_class: its fields are the keys.
        prog: name of the command.
        description: what the command does.
        config_text: help of ``--config``.
        extra_options: help of the options that are no keys, by usage such as ``NAME VALUE``.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE ...] [--KEY VALUE ...]",
        description=description,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        add_help=False,
    )
    options = parser.add_argument_group("Options")
    _add(options, "help", None, "Show this text and stop; -h does the same.")
    _add(options, "config", "FILE", config_text)
    _add(options, "print_config", None, "Print the whole configuration as YAML and stop.")
    for usage, text in extra_options.items():
        name, _, placeholder = usage.partition(" ")
        _add(options, name, placeholder or None, text)
    _add_section(parser, config_class, "", "the run")
    return parser.format_help()


def _add(group: argparse._ArgumentGroup, name: str, placeholder: str | None, text: str) -> None:
    text = text.replace("%", "%%")
    if placeholder is None:
        group.add_argument(f"--{name}", action="store_true", help=text)
    else:
        group.add_argument(f"--{name}", metavar=placeholder, help=text)


def _add_section(parser: argparse.ArgumentParser, config_class: type, prefix: str, title: str) -> None:
    """Adds the fields of a dataclass as one group, then its sections."""
    group = parser.add_argument_group(title[0].upper() + title[1:])
    fields, texts = fields_of(config_class), help_texts(config_class)
    for name, field in fields.items():
        if field.section is None:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            _add(group, prefix + name, _placeholder(field), f"{texts[name]} (default: {default})")
    for name, field in fields.items():
        if field.section is not None:
            _add_section(parser, field.section, f"{prefix}{name}.", texts[name])
        elif field.item is not None:
            summary = (field.item.__doc__ or "").partition(";")[0]
            _add_section(parser, field.item, f"{prefix}{name}.K.", f"{summary} (K = 1, 2, ...)")


def _placeholder(field: ConfigField) -> str:
    if field.item is not None:
        return "null"
    member = field.members[0]
    if field.takes_list:
        return f"{PLACEHOLDERS.get(typing.get_args(member)[0], 'TEXT')} ..."
    if typing.get_origin(member) is typing.Literal:
        return "|".join(typing.get_args(member))
    return PLACEHOLDERS.get(member, "TEXT")
