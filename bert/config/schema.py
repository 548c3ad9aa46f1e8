"""JSON schema of configuration files, with which editors complete and check keys."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Annotated, Any, Literal

from bert.config.finetuning import FinetuneConfig
from bert.config.pretraining import PretrainConfig
from bert.config.validation import RENAMED, Range, Renaming, fields_of, help_texts, key_of, keys_of

Schema = dict[str, Any]

NUMBER = r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?$"
"""Numbers that YAML reads as text: 1_000 in YAML 1.2, 1e3 in YAML 1.1."""

LEAVES: dict[Any, Schema] = {
    int: {"type": ["integer", "string"], "pattern": NUMBER},
    float: {"type": ["number", "string"], "pattern": NUMBER},
    bool: {"type": ["boolean"]},
    str: {"type": ["string", "number", "boolean"]},
    type(None): {"type": ["null"]},
}
LIMITS = {"minimum": "minimum", "above": "exclusiveMinimum", "below": "exclusiveMaximum", "maximum": "maximum"}


def schema_text() -> str:
    """Returns the schema as the text of a JSON file."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"


def config_schema() -> Schema:
    """Returns the schema (draft 2020-12) of the files of both commands: a file with ``task`` is one of fine-tuning."""
    definitions: dict[str, Schema] = {}
    for config_class in (PretrainConfig, FinetuneConfig):
        _add_definition(config_class, definitions)
        for old, renaming in RENAMED.items():
            if renaming.key in keys_of(config_class):
                _add_earlier_key(config_class, old, renaming, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of bert-jax",
        "description": "Settings of bert pretrain, or of bert finetune if the key task is set.",
        "type": ["object", "null"],
        "properties": {"task": {"description": help_texts(FinetuneConfig)["task"]}},
        "if": {"required": ["task"]},
        "then": {"$ref": _ref(FinetuneConfig)},
        "else": {"$ref": _ref(PretrainConfig)},
        "$defs": definitions,
    }


def _ref(section: type) -> str:
    return f"#/$defs/{section.__name__}"


def _add_definition(section: Any, definitions: dict[str, Schema]) -> None:
    """Adds the schema of a section and of the sections in it. Dotted keys such as ``data.train`` are not checked."""
    fields, texts = fields_of(section), help_texts(section)
    hints = typing.get_type_hints(section, include_extras=True)
    properties: Schema = {}
    for name, field in fields.items():
        inner = field.section or field.item
        if inner is not None and inner.__name__ not in definitions:
            _add_definition(inner, definitions)
        if field.section is not None:
            properties[name] = {"$ref": _ref(field.section), "description": texts[name]}
            continue
        kind = _schema_of(hints[name])
        properties[name] = {**kind, "description": texts[name], "default": field.default}
    definitions[section.__name__] = {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": {r"\.": True},
        "additionalProperties": False,
    }


def _add_earlier_key(config_class: type, old: str, renaming: Renaming, definitions: dict[str, Schema]) -> None:
    """Adds a key of earlier versions, marked as deprecated, to its section; its values are the old and new ones."""
    section_name, _, leaf = old.rpartition(".")
    section, field = fields_of(config_class)[section_name].section, key_of(renaming.key, keys_of(config_class))
    if section is not None and field is not None:
        definitions[section.__name__]["properties"][leaf] = {
            "enum": [*renaming.values, *field.choices],
            "deprecated": True,
            "description": f"Earlier name of {renaming.key}.",
        }


def _schema_of(hint: Any) -> Schema:
    """Returns the schema of a type, with the range or the choices of its values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        ranges = [item for item in arguments[1:] if isinstance(item, Range)]
        return {**_schema_of(arguments[0]), **{name: limit for item in ranges for name, limit in _limits(item)}}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        if dataclasses.is_dataclass(arguments[0]):
            return {"type": ["array"], "items": {"$ref": _ref(typing.cast(type, arguments[0]))}}
        items = _schema_of(arguments[0])  # choices may also be a text with commas
        return {"type": ["array", *(["string"] if "enum" in items else [])], "items": items}
    if origin in (types.UnionType, typing.Union):
        return _merged([_schema_of(argument) for argument in arguments])
    return LEAVES[hint]


def _limits(limits: Range) -> list[tuple[str, float]]:
    return [(name, value) for field, name in LIMITS.items() if (value := getattr(limits, field)) is not None]


def _merged(members: list[Schema]) -> Schema:
    """Returns the schema of a union; its members have different types, so that their limits do not interfere."""
    if any("enum" in member for member in members):
        if any("number" in member.get("type", ()) for member in members):
            return {"anyOf": members}
        values: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
        return {"enum": [value for one in members for value in one.get("enum") or values[one["type"][0]]]}
    kinds = dict.fromkeys(kind for member in members for kind in member["type"])
    return {name: value for member in members for name, value in member.items()} | {"type": list(kinds)}
