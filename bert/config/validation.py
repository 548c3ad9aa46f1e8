"""Fields of configurations: keys, types, checks that all sections share, and keys and defaults of earlier versions."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from bert.errors import UserError, warn_once
from bert.files import local_path
from bert.remote import readable_path, writable_path

MAX_LENGTH = 2**16 - 1
"""Maximum number of tokens per row: masks have 16-bit positions (`bert.data.pretraining.masking`)."""


PATHS = (
    "output_dir", "init", "architecture_from", "transfer", "tokenizer.path", "target_tokenizer.path", "data.dir",
    "data.train", "data.dev", "data.test", "data.unlabelled", "data.eval", "data.cache_dir",
    "data.decontaminate", "distillation.teacher", "phases.train",
)  # fmt: skip
"""Keys with a path, in pretraining and fine-tuning."""

LOCAL = ("transfer",)
"""Paths that cannot be URLs."""

WRITTEN = ("output_dir", "data.cache_dir")
"""Paths that are written to; URLs must name a writable store."""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


@dataclass(frozen=True)
class Range:
    """Allowed values of a number, as metadata of its type: ``Annotated[int, Range(minimum=1)]``."""

    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    maximum: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            _is_finite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.maximum is None or value <= self.maximum)
        )

    def __str__(self) -> str:
        limits = {"at least": self.minimum, "above": self.above, "below": self.below, "at most": self.maximum}
        return " and ".join(f"{words} {limit:,}" for words, limit in limits.items() if limit is not None) or "finite"


Positive = Annotated[int, Range(minimum=1)]
NonNegative = Annotated[int, Range(minimum=0)]
NonNegativeFloat = Annotated[float, Range(minimum=0)]
PositiveFloat = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(minimum=0, below=1)]
InnerFraction = Annotated[float, Range(above=0, below=1)]
Share = Annotated[float, Range(minimum=0, maximum=1)]
Seed = Annotated[int, Range(minimum=0, below=2**32)]


def check_fields(prefix: str, config: object) -> None:
    """Raises UserError for the first field of a dataclass with a value outside of its Literal or Range.

    Args:
        prefix: prefix of the fields' names in messages, such as ``training.``.
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        takes_null = type(None) in typing.get_args(hint)
        has_lists = any(typing.get_origin(member) is list for member in (hint, *typing.get_args(hint)))
        values = value if has_lists and isinstance(value, list) else [] if value is None and takes_null else [value]
        if (choices := choices_of(hint)) and (wrong := [text for text in values if text not in choices]):
            raise UserError(f"{prefix}{name} is {wrong[0]!r}: use one of {', '.join(choices)}")
        for limits in _ranges(hint):
            if outside := [number for number in values if isinstance(number, int | float) and number not in limits]:
                raise UserError(f"{prefix}{name} is {outside[0]}: it must be {limits}")


def choices_of(hint: Any) -> tuple[str, ...]:
    """Returns the texts of a Literal (alone, in a list or with None); () for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return choices_of(members[0]) if len(members) == 1 else ()


def _ranges(hint: Any) -> Iterator[Range]:
    """Yields the ranges in a type, including its unions and lists."""
    yield from (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range))
    for member in typing.get_args(hint):
        yield from _ranges(member)


class Renaming(NamedTuple):
    """Current name of a key, and current names of its renamed values."""

    key: str
    values: Mapping[str, str] = {}


RENAMED = {
    "data.objective": Renaming("data.input_format"),
    "data.prediction": Renaming(
        "training.objective", {"masked": "mlm", "replaced": "rtd", "permuted": "plm", "next": "clm"}
    ),
}
"""Renamed keys of earlier versions. They are accepted in files, runs, dictionaries and on the command line."""

LEAF_CUTOFF = 0.85
"""Minimum similarity of the last parts of two keys, to suggest the one in addition to a renamed key."""

EARLIER_DEFAULTS: dict[str, Any] = {"strip_accents": None, "max_predictions_per_sequence": 20}
"""Defaults of earlier versions by field name, as recorded in config.yaml of older runs."""


def fields_that_differ(config: object) -> Iterator[str]:
    """Yields the fields of a dataclass whose value differs from the defaults of this and earlier versions."""
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        if value != default and not (name in EARLIER_DEFAULTS and value == EARLIER_DEFAULTS[name]):
            yield name


def conflict(config: object, key: str, other: str, fix: str) -> UserError:
    """Returns the error ``KEY is VALUE, but OTHER is VALUE: FIX``.

    Args:
        config: the whole configuration, or the section of both keys.
    """
    return UserError(f"{key} is {_shown(config, key)}, but {other} is {_shown(config, other)}: {fix}")


def _shown(config: object, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name.removeprefix("--"), value)  # the name of a section itself is skipped
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_unused(prefix: str, config: object, reason: str, names: Collection[str] | None = None) -> None:
    """Raises UserError, with ``reason`` at its end, for the first field that differs from its default.

    Args:
        names: the fields to check; None for all of them.
    """
    for name in fields_that_differ(config):
        if names is None or name in names:
            raise UserError(f"{prefix}{name} is {_shown(config, name)}, {reason}")


def check_paths(config: object) -> None:
    """Raises UserError for the first key of PATHS that contains a URL that is not supported there."""
    for key in PATHS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                check = local_path if key in LOCAL else writable_path if key in WRITTEN else readable_path
                check(path, key)


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


def current_key(name: str, keys: Collection[str]) -> str:
    """Returns the current name of a key of an earlier version (`RENAMED`); other names are returned unchanged."""
    renaming = RENAMED.get(name)
    return renaming.key if renaming is not None and renaming.key in keys else name


def current_value(name: str, value: Any) -> Any:
    """Returns the current names of the values of a key of an earlier version; other values are unchanged."""
    names = RENAMED[name].values if name in RENAMED else {}
    if isinstance(value, list):
        return [current_value(name, item) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def rename(name: str, value: Any, where: str, keys: Collection[str]) -> tuple[str, Any]:
    """Returns the current key and value of a key of an earlier version, and logs a warning; others are unchanged."""
    key = current_key(name, keys)
    if key == name:
        return name, value
    current = current_value(name, value)
    written = ", ".join(map(str, current)) if isinstance(current, list) else current
    warn_once(f"{where}: {name} is now {key}: write {key}: {written}")
    return key, current


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
    elif short := [key for key in keys if initials(key.rpartition(".")[2]) == leaf]:
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


def initials(name: str) -> str:
    """Returns the initials of a name of several words, such as lr of learning_rate; "" for a single word."""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the most similar name, the first in alphabetical order if several are equal; None if none is similar."""
    near = sorted(difflib.get_close_matches(name, names, 3))
    return max(near, key=lambda one: difflib.SequenceMatcher(None, one, name).ratio(), default=None)
