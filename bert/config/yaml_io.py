"""Configurations as YAML files: every value with the line it stands on, every mistake as one sentence.

What a text means for a field's type is jsonargparse's business, in one way for the file and for the command line
(`bert.commands.arguments`): both hand over the text that the user wrote. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import docstring_parser
import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from bert.config import to_dict
from bert.errors import UTF8_HINT, ScientificInt, UserError, require

Config = TypeVar("Config")

NULLS = (None, "null", "~")


class ConfigField(NamedTuple):
    """One field of the configuration."""

    type: Any
    default: Any
    help: str

    @property
    def members(self) -> tuple[Any, ...]:
        """The types that the field takes: (list[str], str, NoneType) of ``list[str] | str | None``."""
        is_union = typing.get_origin(self.type) in (types.UnionType, typing.Union)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def takes_list(self) -> bool:
        return any(typing.get_origin(member) is list for member in self.members)

    @property
    def item(self) -> type | None:
        """The dataclass of which the field takes a list: PhaseConfig of ``list[PhaseConfig] | None``."""
        inside = (argument for member in self.members for argument in typing.get_args(member))
        return next((argument for argument in inside if dataclasses.is_dataclass(argument)), None)


class UserValue(NamedTuple):
    """A value as the user wrote it; line is None on the command line."""

    value: Any
    source: str
    line: int | None
    shown: str

    @property
    def where(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"


def keys_of(config_class: type, prefix: str = "") -> dict[str, ConfigField]:
    """Every field under its dotted name, in the order of the dataclasses."""
    hints = typing.get_type_hints(config_class)
    texts = help_texts(config_class)
    keys: dict[str, ConfigField] = {}
    for field in dataclasses.fields(config_class):
        hint, name = hints[field.name], prefix + field.name
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys |= keys_of(hint, f"{name}.")
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        keys[name] = ConfigField(hint, default, texts.get(field.name, ""))
    return keys


def key_of(name: str, keys: dict[str, ConfigField]) -> ConfigField | None:
    """The key of a dotted name, also inside a list, whose items are counted from 1: ``phases.2.steps``."""
    return keys.get(name) or sibling_keys(name, keys).get(name)


def sibling_keys(name: str, keys: dict[str, ConfigField]) -> dict[str, ConfigField]:
    """The keys among which a name belongs: those of one item where it points into a list, else all."""
    match = re.fullmatch(r"(.+)\.([1-9]\d?)(\..*)?", name)
    if match is None or match[1] not in keys or (item := keys[match[1]].item) is None:
        return keys
    return keys_of(item, f"{match[1]}.{match[2]}.")


@functools.cache
def help_texts(config_class: type) -> Mapping[str, str]:
    """The text under each field of a dataclass, on one line."""
    fields = docstring_parser.parse_from_object(config_class).params
    return {field.arg_name: " ".join((field.description or "").split()) for field in fields}


def read_yaml(path: Path, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """What a YAML file gives, by dotted key. Raises UserError for anything but known keys, each once."""
    source = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    text, root = _compose(path, source)
    if root is None:  # nothing but comments
        return {}
    if not isinstance(root, yaml.MappingNode):
        where = f"{source}, line {root.start_mark.line + 1}"
        raise UserError(f"{where}: {_snippet(root, text)!r} is not a mapping: write lines of KEY: VALUE")

    sections = {key.rpartition(".")[0] for key in keys} - {""}
    lists = {name for name, key in keys.items() if key.item is not None}
    given: dict[str, UserValue] = {}
    lines: dict[str, int] = {}
    for name, line, node in _entries(root, sections, lists, text):
        where, snippet, value = f"{source}, line {line}", _snippet(node, text), _value(node)
        known, near = key_of(name, keys), sibling_keys(name, keys)
        is_section = name in sections or (near is not keys and all(key.startswith(f"{name}.") for key in near))
        if known is None and not is_section:
            raise UserError(f"{where}: {unknown_key(name, near)}")
        if name in lines:
            raise UserError(f"{where}: {name} stands on line {lines[name]} already: keep one of the two")
        lines[name] = line
        if known is not None:
            given[name] = UserValue(value, source, line, f"{name}: {snippet or 'null'}")
        elif not isinstance(node, yaml.MappingNode) and value is not None:  # null: a section all commented out
            example = next(key for key in near if key.startswith(f"{name}.")).removeprefix(f"{name}.")
            raise UserError(
                f"{where}: {name} is {snippet}, but it is a section: indent its keys below it, for example {example}"
            )
    return given


def unknown_key(name: str, keys: Iterable[str], prefix: str = "") -> str:
    """The end of the sentence on a key that does not exist, with the nearest one that does."""
    of_section = next((key for key in keys if key.startswith(f"{name}.")), None)
    if of_section is not None:
        return f"{prefix}{name} is a section: set its keys one by one, for example {prefix}{of_section}"
    leaf_names = {key.rpartition(".")[2]: key for key in reversed(list(keys))}  # the first of equals stays
    leaf = name.rpartition(".")[2]
    if leaf in leaf_names:  # the right name in the wrong section, or in none, is nearer than any spelling
        nearest = leaf_names[leaf]
    elif near := difflib.get_close_matches(name, keys, 1):
        nearest = near[0]
    elif near := difflib.get_close_matches(leaf, leaf_names, 1):
        nearest = leaf_names[near[0]]
    else:
        return f"unknown key {prefix}{name}: --help lists all keys"
    return f"unknown key {prefix}{name}: did you mean {prefix}{nearest}?"


def _compose(path: Path, source: str) -> tuple[str, yaml.Node | None]:
    """The file's text and its YAML nodes, which know their lines, where plain dicts do not."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return text, yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): name a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{source}: not UTF-8: {UTF8_HINT}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        fix = "check indentation, colons and quotes there and above"
        raise UserError(f"{where}: not valid YAML ({problem}): {fix}") from None


def _entries(
    mapping: yaml.MappingNode, sections: set[str], lists: set[str], text: str, prefix: str = ""
) -> Iterator[tuple[str, int, yaml.Node]]:
    """(dotted key, line, value) of every line of a mapping, of the sections and of the lists of sections in it."""
    for key, value in mapping.value:
        name = prefix + (key.value if isinstance(key, yaml.ScalarNode) else _snippet(key, text))
        yield name, key.start_mark.line + 1, value
        if name in sections and isinstance(value, yaml.MappingNode):
            yield from _entries(value, sections, lists, text, f"{name}.")
        if name in lists and isinstance(value, yaml.SequenceNode):
            for number, item in enumerate(value.value, 1):
                yield f"{name}.{number}", item.start_mark.line + 1, item
                if isinstance(item, yaml.MappingNode):
                    yield from _entries(item, sections, lists, text, f"{name}.{number}.")


def _value(node: yaml.Node) -> str | list[str] | list[dict[str, Any]] | dict[str, Any] | None:
    """A leaf as jsonargparse takes it: the text itself, so `no` stays a language and 1e-4 is a number."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.MappingNode) for item in node.value):
        sections: list[dict[str, Any]] = [{} for _ in node.value]  # what is in them are entries of their own
        return sections
    return {}  # a mapping or a nested list: no field takes one, and the error shows the file's own text


def _snippet(node: yaml.Node, text: str) -> str:
    """The node as the file has it, on one line and not too long."""
    snippet = " ".join(text[node.start_mark.index : node.end_mark.index].split())
    return snippet if len(snippet) <= 60 else f"{snippet[:57]}..."


def dump(config: Any) -> str:
    """The configuration as YAML; ``load_config`` reads it back into an equal object."""
    return yaml.dump(to_dict(config), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True, width=110)


def load_config(config_class: type[Config], path: Path | str) -> Config:
    """The configuration in a YAML file, defaults filled in, ``check`` not called. Raises UserError."""
    keys = keys_of(config_class)
    return build_config(config_class, convert_values(read_yaml(Path(path), keys), keys))


def convert_values(given: dict[str, UserValue], keys: dict[str, ConfigField]) -> dict[str, Any]:
    """The value of every key, as its type demands. Raises UserError at a text that is not of that type."""
    lists = {name: key for name, key in keys.items() if key.item is not None}
    for name in lists:
        given = _without_cleared(name, given)
    leaves = {name: key for name, key in keys.items() if name not in lists}
    leaves |= {name: require(key_of(name, keys), name) for name in given if name not in keys}
    values = _leaves({name: item for name, item in given.items() if name in leaves}, leaves)
    values |= {name: _items(name, key, given, values) for name, key in lists.items()}
    return {name: values[name] for name in keys}


def _leaves(given: dict[str, UserValue], keys: dict[str, ConfigField]) -> dict[str, Any]:
    """The values of keys that take no list of sections."""
    texts = {name: None if item.value in NULLS else item.value for name, item in given.items()}
    try:
        values = _parser(keys).parse_object(texts)
    except ArgumentError as error:
        match = re.search(r'key "([^"]+)"', str(error))
        if match is None or match[1] not in given:
            raise UserError(str(error)) from None
        raise _wrong_type(given[match[1]], keys[match[1]]) from None
    for name, item in given.items():
        # jsonargparse takes null for anything, and a text that YAML reads as a mere comment for null.
        if values[name] is None and (item.value not in NULLS or type(None) not in keys[name].members):
            raise _wrong_type(item, keys[name])
    return {name: values[name] for name in keys}


def _without_cleared(name: str, given: dict[str, UserValue]) -> dict[str, UserValue]:
    """What is given without the items of a list that the command line has set to null."""
    if name not in given or given[name].value not in NULLS:
        return given
    inside = [key for key in given if key.startswith(f"{name}.")]
    for key in inside:
        if given[key].source == given[name].source:
            raise UserError(f"{given[key].where}: {key} is set, but {name} is null: leave one of the two out")
    return {key: item for key, item in given.items() if key not in inside}


def _items(name: str, key: ConfigField, given: dict[str, UserValue], values: dict[str, Any]) -> list[Any] | None:
    """The dataclasses of a list, each from what the file and the command line say of it; its default without either."""
    numbers = [int(other.removeprefix(f"{name}.").partition(".")[0]) for other in given if other.startswith(f"{name}.")]
    whole = given.get(name)
    if whole is None and not numbers:
        return key.default
    if whole is not None:
        if whole.value in NULLS and type(None) in key.members:
            return None
        if not isinstance(whole.value, list) or any(item != {} for item in whole.value):
            raise _wrong_type(whole, key)
        numbers.append(len(whole.value))
    items, item_class = [], require(key.item, name)
    for number in range(1, max(numbers) + 1):
        prefix = f"{name}.{number}."
        of_item = {full: values.get(full, one.default) for full, one in keys_of(item_class, prefix).items()}
        items.append(build_config(item_class, of_item, prefix))
    return items


def _wrong_type(item: UserValue, key: ConfigField) -> UserError:
    names: dict[Any, str] = {
        types.GenericAlias(list, (key.item,)): "a list of sections in a file",
        int: "a whole number",
        ScientificInt: "a whole number (1000 or 1e3)",
        float: "a number (0.01 or 1e-2)",
        bool: "true or false",
        str: "a text",
        list[str]: "a list of texts",
        list[int]: "a list of whole numbers",
        list[float]: "a list of numbers",
        type(None): "null",
    }
    expected = " or ".join(names.get(member, str(member)) for member in key.members)
    return UserError(f"{item.where}: {item.shown}: {expected} is expected")


def build_config(config_class: type[Config], values: dict[str, Any], prefix: str = "") -> Config:
    """The dataclass and its sections from values by dotted key."""
    fields = {}
    for name, hint in typing.get_type_hints(config_class).items():
        is_section = dataclasses.is_dataclass(hint)
        fields[name] = build_config(hint, values, f"{prefix}{name}.") if is_section else values[prefix + name]
    return config_class(**fields)


def _parser(keys: dict[str, ConfigField]) -> ArgumentParser:
    """jsonargparse's parser of these keys, for the types alone."""
    parser = ArgumentParser(exit_on_error=False, add_help=False)
    for name, key in keys.items():
        parser.add_argument(f"--{name}", type=key.type, default=key.default)
    return parser


def _count(value: Any) -> ScientificInt:
    """1000, 1_000 or 1e3 as a Count; ValueError for anything that is not whole."""
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return ScientificInt(number)


register_type(ScientificInt, serializer=int, deserializer=_count)
