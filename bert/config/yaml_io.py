"""Configurations as YAML files and dictionaries; error messages name the file and line of a value.

A value remains the text from the file or the command line (`bert.commands.cli.arguments`) until `build_config` converts
it to the type of its field. Imports no JAX.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import os
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from bert.config.validation import RENAMED, choices_of
from bert.errors import UserError, convert, warn_once, without_surrogates
from bert.files import require_text

Config = TypeVar("Config")

NULLS = (None, "null", "~")
NULL_TAG = "tag:yaml.org,2002:null"

LEAF_CUTOFF = 0.85
"""Minimum similarity of the last parts of two keys, to suggest the one in addition to a renamed key."""


class ConfigField(NamedTuple):
    """One field of the configuration."""

    type: Any
    default: Any

    @property
    def members(self) -> tuple[Any, ...]:
        """Types that the field accepts: (list[str], str, NoneType) of ``list[str] | str | None``."""
        is_union = typing.get_origin(self.type) in (types.UnionType, typing.Union)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def takes_list(self) -> bool:
        return any(typing.get_origin(member) is list for member in self.members)

    @property
    def choices(self) -> tuple[str, ...]:
        """Texts that the field accepts, alone or in a list; () if it also accepts others."""
        return choices_of(self.type)

    @property
    def section(self) -> type | None:
        """The dataclass of a section."""
        return self.type if isinstance(self.type, type) and dataclasses.is_dataclass(self.type) else None

    @property
    def item(self) -> type | None:
        """The dataclass of the field's list items: PhaseConfig of ``list[PhaseConfig] | None``."""
        arguments = (argument for member in self.members for argument in typing.get_args(member))
        return next((argument for argument in arguments if dataclasses.is_dataclass(argument)), None)


class UserValue(NamedTuple):
    """A value as the user wrote it; line is None if it is not from a file."""

    value: Any
    source: str
    line: int | None
    shown: str

    @property
    def where(self) -> str:
        return _where(self.source, self.line)


def _where(source: str, line: int | None) -> str:
    return source if line is None else f"{source}, line {line}"


def fields_of(config_class: Any) -> Mapping[str, ConfigField]:
    """Returns the fields of a dataclass; the type of a section is its dataclass."""
    hints, fields = typing.get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        fields[field.name] = ConfigField(hints[field.name], default)
    return fields


def keys_of(config_class: type, prefix: str = "") -> dict[str, ConfigField]:
    """Returns all fields of a dataclass and its sections by dotted name, in order."""
    keys: dict[str, ConfigField] = {}
    for name, field in fields_of(config_class).items():
        keys |= keys_of(field.section, f"{prefix}{name}.") if field.section else {prefix + name: field}
    return keys


def key_of(name: str, keys: dict[str, ConfigField]) -> ConfigField | None:
    """Returns the field of a dotted name, also inside a list, whose items are counted from 1: ``phases.2.steps``."""
    return keys.get(name) or sibling_keys(name, keys).get(name)


def sibling_keys(name: str, keys: dict[str, ConfigField]) -> dict[str, ConfigField]:
    """Returns the keys of the list item that a name points to, or all keys."""
    match = re.fullmatch(r"(.+)\.([1-9]\d?)(\..*)?", name)
    if match is None or match[1] not in keys or (item := keys[match[1]].item) is None:
        return keys
    return keys_of(item, f"{match[1]}.{match[2]}.")


def help_texts(config_class: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass, on one line."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    texts = {}
    for field, text in itertools.pairwise(ast.iter_child_nodes(definition)):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return texts


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
        where = f"{source}, line {root.start_mark.line + 1}"
        raise UserError(f"{where}: {_snippet(root, text)!r} is not a mapping: write lines of KEY: VALUE")
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
    given: dict[str, UserValue] = {}
    for name, line, node in _entries(root, keys):
        where = _where(source, line)
        if key_of(current_key(name, keys), keys) is None:
            raise UserError(f"{where}: {unknown_key(name, sibling_keys(name, keys))}")
        entry = UserValue(_value(node), source, line, f"{name}: {_snippet(node, text) or 'null'}")
        add_value(given, name, entry, keys)
    return given


def current_key(name: str, keys: Mapping[str, ConfigField]) -> str:
    """Returns the current name of a key of an earlier version (`RENAMED`); other names are returned unchanged."""
    renaming = RENAMED.get(name)
    return renaming.key if renaming is not None and renaming.key in keys else name


def current_value(name: str, value: Any) -> Any:
    """Returns the current names of the values of a key of an earlier version; other values are unchanged."""
    names = RENAMED[name].values if name in RENAMED else {}
    if isinstance(value, list):
        return [current_value(name, item) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def rename(name: str, value: Any, where: str, keys: Mapping[str, ConfigField]) -> tuple[str, Any]:
    """Returns the current key and value of a key of an earlier version, and logs a warning; others are unchanged.

    Args:
        name: dotted key.
        value: a text, or a list of texts.
        where: source and line, for the warning.
        keys: all current keys.
    """
    key = current_key(name, keys)
    if key == name:
        return name, value
    current = current_value(name, value)
    written = ", ".join(map(str, current)) if isinstance(current, list) else current
    warn_once(f"{where}: {name} is now {key}: write {key}: {written}")
    return key, current


def add_value(given: dict[str, UserValue], name: str, entry: UserValue, keys: Mapping[str, ConfigField]) -> None:
    """Adds a value to the values of its source, under its current key (`rename`).

    Raises:
        UserError: the source already has the key.
    """
    key, value = rename(name, entry.value, entry.where, keys)
    entry = entry._replace(value=value)
    if key in given:
        before = "" if entry.line is None else f" on line {given[key].line}"
        both = name if name == key else f"{name}, now {key},"
        raise UserError(f"{entry.where}: {both} is already set{before}: remove one of the two")
    given[key] = entry


def _entries(
    mapping: yaml.Node, keys: dict[str, ConfigField], prefix: str = ""
) -> Iterator[tuple[str, int | None, yaml.Node]]:
    """Yields (dotted key, line, value) of every key in a mapping, in its sections and in its lists of sections."""
    for key, value in mapping.value:
        name, line = f"{prefix}{key.value}", _line(key)
        field = key_of(name, keys)
        is_empty = value.value == [] or value.tag == NULL_TAG
        if field is None and isinstance(value, yaml.MappingNode) and not is_empty:
            yield from _entries(value, keys, f"{name}.")
        elif field is not None or not is_empty or not any(other.startswith(f"{name}.") for other in keys):
            yield name, line, value
        if field is not None and field.item is not None and isinstance(value, yaml.SequenceNode):
            for index, item in enumerate(value.value, 1):
                if isinstance(item, yaml.MappingNode):
                    yield from _entries(item, keys, f"{name}.{index}.")
                else:
                    yield f"{name}.{index}", _line(item), item


def _line(node: yaml.Node) -> int | None:
    return None if node.start_mark is None else node.start_mark.line + 1


def display_path(path: Path) -> str:
    """Returns a path for messages: relative if it is below the working directory."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def unknown_key(name: str, keys: Iterable[str], prefix: str = "") -> str:
    """Returns the end of an error message about an unknown key, with the most similar keys."""
    keys = list(keys)
    of_section = next((key for key in keys if key.startswith(f"{name}.")), None)
    if of_section is not None:
        return f"{prefix}{name} is a section: set its keys one by one, for example {prefix}{of_section}"
    if not (near := nearest_keys(name, keys)):
        return f"unknown key {prefix}{name}: --help=all lists all keys"
    return f"unknown key {prefix}{name}: did you mean {' or '.join(f'{prefix}{key}' for key in near)}?"


def nearest_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Returns the key that a user probably meant; two keys if the name resembles one and a key of earlier versions.

    Args:
        name: an unknown key, or the last part of a key.
        keys: all current keys. Keys of earlier versions (`RENAMED`) are compared as well.
    """
    keys = list(keys)
    earlier = {old: renaming.key for old, renaming in RENAMED.items() if renaming.key in keys}
    leaf_names = {key.rpartition(".")[2]: key for key in [*earlier, *reversed(keys)]}  # the first of equal keys
    section, _, leaf = name.rpartition(".")
    if leaf in leaf_names:  # the same name in another section is more similar than any other spelling
        nearest = leaf_names[leaf]
    elif short := [key for key in keys if _initials(key.rpartition(".")[2]) == leaf]:
        nearest = next((key for key in short if key.rpartition(".")[0] == section), short[0])
    elif near := _nearest(name, [*keys, *earlier]):
        nearest = near
    elif near := _nearest(leaf, leaf_names):
        nearest = leaf_names[near]
    else:
        return []
    if nearest not in earlier:
        return [nearest]
    others = difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in keys], 1, LEAF_CUTOFF)
    return list(dict.fromkeys([earlier[nearest], *(leaf_names[other] for other in others)]))


def _initials(name: str) -> str:
    """Returns the initials of a name of several words, such as lr of learning_rate; "" for a single word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the most similar name, the first in alphabetical order if several are equal; None if none is similar."""
    near = sorted(difflib.get_close_matches(name, names, 3))
    return max(near, key=lambda one: difflib.SequenceMatcher(None, one, name).ratio(), default=None)


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
            where = _where(source, _line(node))
            raise UserError(f"{where}: a value contains itself, as an alias does in &NAME [*NAME]: write the value out")
        if isinstance(node, yaml.ScalarNode) and without_surrogates(node.value) != node.value:
            where = _where(source, _line(node))
            raise UserError(f"{where}: {ascii(node.value)[:60]} has half of a surrogate pair: remove it")
        if isinstance(node, yaml.CollectionNode) and id(node) not in done:
            for child in node.value:
                if isinstance(child, tuple) and not isinstance(child[0], yaml.ScalarNode):
                    where = _where(source, _line(child[0]))
                    raise UserError(f"{where}: a key is a list or a mapping: write lines of KEY: VALUE")
                for part in child if isinstance(child, tuple) else (child,):
                    visit(part, (*above, id(node)))
            done.add(id(node))

    visit(root, ())


def parse_list(text: str) -> list[str] | None:
    """Returns the texts of a one-line YAML list; None for other texts."""
    try:
        value = _value(_compose(text, ""))
    except UserError:
        return None
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


def build_config(config_class: Callable[..., Config], given: Mapping[str, UserValue], prefix: str = "") -> Config:
    """Builds a dataclass from the user's values by dotted key, and defaults.

    Raises:
        UserError: a value does not have its field's type.
    """
    values: dict[str, Any] = {}
    for name, field in fields_of(config_class).items():
        key = prefix + name
        if field.section is not None:
            values[name] = build_config(field.section, given, f"{key}.")
        elif field.item is not None:
            values[name] = _build_items(key, field, field.item, given)
        elif key in given:
            values[name] = convert_value(given[key], field)
    return config_class(**values)


def _build_items(name: str, field: ConfigField, item_class: type, given: Mapping[str, UserValue]) -> list[Any] | None:
    """Builds the dataclasses of a list from the user's values; returns the field's default if there are none."""
    inside = [key for key in given if key.startswith(f"{name}.")]
    count = max((int(key.removeprefix(f"{name}.").partition(".")[0]) for key in inside), default=0)
    if name in given:
        entry = given[name]
        if entry.value in NULLS and inside:
            raise UserError(f"{given[inside[0]].where}: {inside[0]} is set, but {name} is null: remove one of the two")
        if entry.value in NULLS and type(None) in field.members:
            return None
        if not isinstance(entry.value, list) or any(item != {} for item in entry.value):
            raise _wrong_type(entry, field)
        count = max(count, len(entry.value))
    elif not inside:
        return field.default
    return [build_config(item_class, given, f"{name}.{index}.") for index in range(1, count + 1)]


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
    value = float(text)
    if not value.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(value)


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
        meant = next((choice for choice in field.choices if _initials(choice) == entry.value), None)
        near = f"did you mean {meant}? Use" if meant else "use"
        return UserError(f"{entry.where}: {entry.shown}: {near} {several} of {', '.join(field.choices)}")
    names |= {member: " or ".join(choices_of(member)) for member in field.members if choices_of(member)}
    expected = (names.get(member, "a list of sections in a file") for member in field.members)
    return UserError(f"{entry.where}: {entry.shown}: {' or '.join(expected)} is expected")
