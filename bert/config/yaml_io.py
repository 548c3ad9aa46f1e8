"""Configurations as YAML files and dictionaries; error messages name the file and line of a value.

A value remains the text from the file or the command line (`bert.commands.cli.arguments`) until `build_config` converts
it to the type of its field. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import reprlib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from bert.config.validation import (
    ConfigField,
    choices_of,
    current_key,
    fields_of,
    initials,
    key_of,
    keys_of,
    rename,
    sibling_keys,
    unknown_key,
)
from bert.errors import UserError, convert, without_surrogates
from bert.files import require_text

Config = TypeVar("Config")

NULLS = (None, "null", "~")
NULL_TAG = "tag:yaml.org,2002:null"


class UserValue(NamedTuple):
    """A value as the user wrote it; line is None if it is not from a file."""

    value: Any
    source: str
    line: int | None
    shown: str

    @property
    def where(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"


def read_yaml(path: Path, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """Returns the values of a YAML file by dotted key. Raises UserError for unknown and repeated keys."""
    return parse_yaml(read_text(path), display_path(path), keys)


def read_text(path: Path) -> str:
    """Returns the text of a YAML file. Raises UserError."""
    source = display_path(path)
    try:
        data = path.read_bytes()
        require_text(source, data)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): name a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{source}: not UTF-8: {convert(data)}") from None


def top_level_keys(text: str, source: str) -> set[str]:
    """Returns the keys of a YAML mapping. Raises UserError if the text is not a mapping."""
    root = _compose(text, source)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{source} is not a mapping: write lines of KEY: VALUE")
    return {key.value for key, _ in root.value if isinstance(key.value, str)}


def parse_yaml(text: str, source: str, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """Parses a text like `read_yaml`; ``source`` names it in messages."""
    root = _compose(text, source)
    if root is None:  # only comments
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise _fault(source, root, f"{_snippet(root, text)!r} is not a mapping: write lines of KEY: VALUE")
    return _parse_mapping(root, text, source, keys)


def parse_dict(values: Mapping[str, Any], source: str, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """Parses Python values like `read_yaml`: dotted keys, or nested dictionaries; ``source`` names them in messages."""
    if not isinstance(values, Mapping):
        raise UserError(f"{source} is {reprlib.repr(values)}: pass a dictionary of keys and values")
    try:
        root = _Representer(sort_keys=False).represent_data(dict(values))
    except RecursionError:
        raise UserError(f"{source}: lists or dictionaries are nested too deeply: remove some") from None
    _require_tree(root, source)
    return _parse_mapping(root, "", source, keys)


class _Representer(yaml.representer.SafeRepresenter):
    """Represents Python values, paths and NumPy scalars as YAML nodes without lines."""

    def represent_other(self, value: Any) -> yaml.Node:
        if isinstance(value, os.PathLike):
            return self.represent_str(os.fspath(value))
        if getattr(value, "shape", None) == ():
            return self.represent_data(value.item())
        raise UserError(f"{reprlib.repr(value)} is no value of a configuration: pass a number, a text, a list or None")


_Representer.add_multi_representer(object, _Representer.represent_other)


def _parse_mapping(root: yaml.Node, text: str, source: str, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """Returns the values below a mapping; ``text`` is its source."""
    entries: dict[str, UserValue] = {}
    for name, key_node, node in _entries(root, keys):
        if key_of(current_key(name, keys), keys) is None:
            raise _fault(source, key_node, unknown_key(name, sibling_keys(name, keys)))
        entry = UserValue(_value(node), source, _line(key_node), f"{name}: {_snippet(node, text) or 'null'}")
        add_value(entries, name, entry, keys)
    return entries


def add_value(entries: dict[str, UserValue], name: str, entry: UserValue, keys: Mapping[str, ConfigField]) -> None:
    """Adds a value to the values of its source, under its current key (`rename`).

    Raises:
        UserError: the source already has the key.
    """
    key, value = rename(name, entry.value, entry.where, keys)
    entry = entry._replace(value=value)
    if key in entries:
        before = "" if entry.line is None else f" on line {entries[key].line}"
        both = name if name == key else f"{name}, now {key},"
        raise UserError(f"{entry.where}: {both} is already set{before}: remove one of the two")
    entries[key] = entry


def _entries(
    mapping: yaml.Node, keys: dict[str, ConfigField], prefix: str = ""
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yields (dotted key, its node, value) of every key in a mapping, in its sections and in its lists of sections."""
    for key, value in mapping.value:
        name = f"{prefix}{key.value}"
        field = key_of(name, keys)
        is_empty = value.value == [] or value.tag == NULL_TAG
        if field is None and isinstance(value, yaml.MappingNode) and not is_empty:
            yield from _entries(value, keys, f"{name}.")
        elif field is not None or not is_empty or not any(other.startswith(f"{name}.") for other in keys):
            yield name, key, value
        if field is not None and field.item is not None and isinstance(value, yaml.SequenceNode):
            for index, item in enumerate(value.value, 1):
                if isinstance(item, yaml.MappingNode):
                    yield from _entries(item, keys, f"{name}.{index}.")
                else:
                    yield f"{name}.{index}", item, item


def _line(node: yaml.Node) -> int | None:
    return None if node.start_mark is None else node.start_mark.line + 1


def _fault(source: str, node: yaml.Node, problem: str) -> UserError:
    return UserError(f"{UserValue(None, source, _line(node), '').where}: {problem}")


def display_path(path: Path) -> str:
    """Returns a path for messages: relative if it is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _compose(text: str, source: str) -> yaml.Node | None:
    """Returns the YAML nodes of a text, which have line numbers."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _require_tree(root, source)
        return root
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        fix = "check indentation, colons and quotes there and above"
        raise UserError(f"{where}: not valid YAML ({problem}): {fix}") from None
    except RecursionError:
        raise UserError(f"{source}: lists or mappings are nested too deeply: remove brackets or braces") from None
    except (ValueError, OverflowError) as error:  # the code of an escaped character, or a number of a directive
        raise UserError(f"{source}: not valid YAML ({str(error)[:60]}): check escapes and the first line") from None


def _require_tree(root: yaml.Node, source: str) -> None:
    """Raises UserError for a node that contains itself, a key that is not text, or a text that UTF-8 cannot encode."""
    done: set[int] = set()

    def visit(node: yaml.Node, above: tuple[int, ...]) -> None:
        if id(node) in above:
            problem = "a value contains itself, as an alias does in &NAME [*NAME]: write the value out"
            raise _fault(source, node, problem)
        if isinstance(node, yaml.ScalarNode) and without_surrogates(node.value) != node.value:
            raise _fault(source, node, f"{ascii(node.value)[:60]} has half of a surrogate pair: remove it")
        if isinstance(node, yaml.CollectionNode) and id(node) not in done:
            for child in node.value:
                if isinstance(child, tuple) and not isinstance(child[0], yaml.ScalarNode):
                    raise _fault(source, child[0], "a key is a list or a mapping: write lines of KEY: VALUE")
                for part in child if isinstance(child, tuple) else (child,):
                    visit(part, (*above, id(node)))
            done.add(id(node))

    visit(root, ())


def parse_list(text: str) -> list[str] | None:
    """Returns the texts of a one-line YAML list; None for other texts."""
    items = parse_items(text) or []
    value = items[0] if len(items) == 1 else None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


def parse_items(text: str) -> list[Any] | None:
    """Returns the items (texts, lists of texts, None) of a YAML list without brackets; None for other texts."""
    try:
        node = _compose(f"[{text}]", "")
    except UserError:
        return None
    return [_value(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else None


def _value(node: yaml.Node | None) -> Any:
    """Returns a leaf as the user's text, so that `no` stays a language and 1e-4 is a number."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL_TAG else node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.MappingNode) for item in node.value):
        return [{} for _ in node.value]  # their contents are separate entries
    return {}  # a mapping or a nested list: no field accepts one, and the error quotes the file


def _snippet(node: yaml.Node, text: str) -> str:
    """Returns the source text of a node, shortened and on one line."""
    if node.start_mark is None:
        content = yaml.serialize(node, Dumper=yaml.SafeDumper).removesuffix("...\n")
    else:
        content = text[node.start_mark.index : node.end_mark.index]
    snippet = " ".join(content.split())
    return snippet if len(snippet) <= 60 else f"{snippet[:57]}..."


def dump(config: Any) -> str:
    """Returns a configuration as YAML, from which ``load_config`` restores an equal object."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """Writes U+0085 as an escape, because it is otherwise read as the end of a line."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\x85" in text else None)
)


def load_config(config_class: type[Config], path: Path | str) -> Config:
    """Loads a configuration from a YAML file, with defaults, without calling ``check``. Raises UserError."""
    return build_config(config_class, read_yaml(Path(path), keys_of(config_class)))


def build_config(config_class: Callable[..., Config], entries: Mapping[str, UserValue], prefix: str = "") -> Config:
    """Builds a dataclass from the user's values by dotted key, and defaults.

    Raises:
        UserError: a value does not have its field's type.
    """
    values: dict[str, Any] = {}
    for name, field in fields_of(config_class).items():
        key = prefix + name
        if field.section is not None:
            values[name] = build_config(field.section, entries, f"{key}.")
        elif field.item is not None:
            values[name] = _build_items(key, field, field.item, entries)
        elif key in entries:
            values[name] = convert_value(entries[key], field)
    return config_class(**values)


def _build_items(name: str, field: ConfigField, item_class: type, entries: Mapping[str, UserValue]) -> list[Any] | None:
    """Builds the dataclasses of a list from the user's values; returns the field's default if there are none."""
    inside = [key for key in entries if key.startswith(f"{name}.")]
    count = max((int(key.removeprefix(f"{name}.").partition(".")[0]) for key in inside), default=0)
    if name in entries:
        entry = entries[name]
        if entry.value in NULLS and inside:
            raise UserError(
                f"{entries[inside[0]].where}: {inside[0]} is set, but {name} is null: remove one of the two"
            )
        if entry.value in NULLS and type(None) in field.members:
            return None
        if not isinstance(entry.value, list) or any(item != {} for item in entry.value):
            raise _wrong_type(entry, field)
        count = max(count, len(entry.value))
    elif not inside:
        return field.default
    return [build_config(item_class, entries, f"{name}.{index}.") for index in range(1, count + 1)]


def convert_value(entry: UserValue, field: ConfigField) -> Any:
    """Converts a text to the type of a field. Raises UserError if that is impossible."""
    if entry.value in NULLS and type(None) in field.members:
        return None
    if entry.value not in NULLS:
        for member in field.members:
            with contextlib.suppress(ValueError):
                return _convert(entry.value, member)
    raise _wrong_type(entry, field)


def _convert(value: Any, hint: Any) -> Any:
    """Converts a text, or a list of texts, to a type that is not a union. Raises ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and choices_of(hint):  # choices have no commas
        texts = value if isinstance(value, list) else [value]
        value = [text for several in texts for text in several.split(",")]
    if origin is list and isinstance(value, list):
        return [_convert(item, arguments[0]) for item in value]
    if not isinstance(value, str):
        raise ValueError(value)
    if origin is typing.Literal and value in arguments:
        return value
    if hint is str:
        return value
    if hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if hint is int:
        return _to_int(value)
    if hint is float:
        return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", value, flags=re.IGNORECASE))
    raise ValueError(value)


def _to_int(text: str) -> int:
    """Parses 1000, 1_000 or 1e3. Raises ValueError if the number is not whole."""
    with contextlib.suppress(ValueError):
        return int(text)
    if not float(text).is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(float(text))


def _wrong_type(entry: UserValue, field: ConfigField) -> UserError:
    names: dict[Any, str] = {
        int: "a whole number (1000 or 1e3)",
        float: "a number (0.01 or 1e-2)",
        bool: "true or false",
        str: "a text",
        list[str]: "a list of texts",
        list[int]: "a list of whole numbers",
        list[float]: "a list of numbers",
        type(None): "null",
    }
    if field.choices:
        several = "some" if field.takes_list else "one"
        meant = next((choice for choice in field.choices if initials(choice) == entry.value), None)
        near = f"did you mean {meant}? Use" if meant else "use"
        return UserError(f"{entry.where}: {entry.shown}: {near} {several} of {', '.join(field.choices)}")
    names |= {member: " or ".join(choices_of(member)) for member in field.members if choices_of(member)}
    expected = (names.get(member, "a list of sections in a file") for member in field.members)
    return UserError(f"{entry.where}: {entry.shown}: {' or '.join(expected)} is expected")
