"""config.yaml of a run, and config.digest next to it, by which damage to it and to the vocabulary is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bert.config.finetuning import FinetuneConfig
from bert.config.pretraining import PretrainConfig
from bert.config.validation import PATHS, RENAMED
from bert.config.yaml_io import (
    UserValue,
    build_config,
    display_path,
    dump,
    keys_of,
    parse_yaml,
    read_text,
    top_level_keys,
)
from bert.errors import UserError, redact
from bert.files import load_json, write_atomic

CONFIG_FILE, DIGEST_FILE = "config.yaml", "config.digest"

VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "target_tokenizer/tokenizer.json", "target_tokenizer/vocab.txt")
"""Files of a run's vocabularies, whose digests are kept too."""

FREE_KEYS = {*PATHS, "lora.checksum", "distillation.checksum"}
"""Keys without a digest: data and models may be moved, and a checksum is compared with the weights themselves."""

LAST_KEYS = ("training.max_consecutive_nonfinite_steps", "decoding.seed")
"""Keys at the end of config.yaml, which tell whether that of an older version, without config.digest, is whole."""

Digests: TypeAlias = dict[str, str]
"""Digests of values by dotted key, and of files by name."""


def save_run_config(config: Any, run: Path, vocabulary: bool = True) -> None:
    """Writes config.yaml and config.digest into a run's folder.

    A process may die between the two. config.digest is written first, and also has the digests of the config.yaml that
    is there already.

    Args:
        config: everything resolved.
        run: the folder.
        vocabulary: whether the vocabulary that is in the folder is final, and gets digests too.
    """
    known = [_digests(_parse(run), run, vocabulary)] if (run / CONFIG_FILE).is_file() else []
    digests = _digests(config, run, vocabulary)
    write_atomic(run / DIGEST_FILE, json.dumps([*(one for one in known if one != digests), digests], indent=0) + "\n")
    write_atomic(run / CONFIG_FILE, dump(redact_paths(config)))


def redact_paths(config: Any) -> Any:
    """Returns a configuration without the credentials of URLs, as it is stored and sent."""
    return _map_paths(config, lambda value, key: redact(value))


def with_credentials(stored: Any, requested: Any) -> Any:
    """Returns a stored configuration with the requested URLs where these only add credentials."""
    values = flatten(dataclasses.asdict(requested))
    return _map_paths(stored, lambda value, key: values[key] if redact(values.get(key)) == redact(value) else value)


def load_run_config(run: Path) -> PretrainConfig | FinetuneConfig:
    """Returns the configuration of the run in a folder.

    Raises:
        UserError: config.yaml is no configuration, was cut off, or differs from what the run wrote.
    """
    config = _parse(run)
    values = _digests(config, run, vocabulary=False)
    different = [_first_difference(values, digests) for digests in _read_digests(run / DIGEST_FILE)]
    if different and None not in different:
        raise UserError(f"{run / CONFIG_FILE}: {different[-1]} is not what the run wrote: {_fix(run)}")
    return config


def check_vocabulary(run: Path) -> None:
    """Compares the vocabulary in a run's folder with config.digest. Raises UserError if it is another one."""
    known = _read_digests(run / DIGEST_FILE)
    for name in VOCABULARY_FILES:
        of_file = {digests[name] for digests in known if name in digests}
        if of_file and (run / name).is_file() and _digest_of_file(run / name) not in of_file:
            raise UserError(f"{run / name} is not what the run wrote: {_fix(run)}")


def _fix(run: Path) -> str:
    return f"put back a copy, or remove {run / DIGEST_FILE} if you changed it"


def config_class_of_run(run: Path) -> type[PretrainConfig] | type[FinetuneConfig]:
    """Returns the configuration class of the run in a folder, by the keys of its config.yaml. Raises UserError."""
    file = run / CONFIG_FILE
    try:
        keys = top_level_keys(read_text(file), display_path(file))
    except UserError as error:
        raise UserError(f"{file} cannot be read: it is not the config.yaml of a run ({error})") from None
    return FinetuneConfig if "task" in keys else PretrainConfig


def check_run_file(path: Path) -> None:
    """Checks a configuration file if it is the config.yaml of a run. Raises UserError."""
    if path.name == CONFIG_FILE and path.with_name(DIGEST_FILE).is_file():
        load_run_config(path.parent)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values under dotted keys; the dictionaries of a list are counted from 1."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value, 1)}
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _map_paths(config: Any, change: Callable[[Any, str], Any]) -> Any:
    """Returns a configuration with ``change(value, key)`` for each of `PATHS` that it has."""
    for key in PATHS:
        section, _, name = key.rpartition(".")
        part: Any = getattr(config, section, None) if section else config
        if hasattr(part, name):
            part = dataclasses.replace(part, **{name: change(getattr(part, name), key)})
            config = dataclasses.replace(config, **{section: part}) if section else part
    return config


def _parse(run: Path) -> PretrainConfig | FinetuneConfig:
    file = run / CONFIG_FILE
    config_class = config_class_of_run(run)
    given = parse_yaml(read_text(file), display_path(file), keys_of(config_class))
    if not (run / DIGEST_FILE).is_file():
        _require_last_key(given, file)
    if config_class is FinetuneConfig:
        return build_config(FinetuneConfig, given)
    return build_config(PretrainConfig, given)


def _require_last_key(given: Mapping[str, UserValue], file: Path) -> None:
    """Raises UserError for a configuration whose end is missing."""
    sections = {key.partition(".")[0] for key in given}
    for key in LAST_KEYS:
        if key not in given and (key == LAST_KEYS[0] or key.partition(".")[0] in sections):
            raise UserError(f"{file} was cut off (it has no {key}): put back a copy")


def _digests(config: Any, run: Path, vocabulary: bool) -> Digests:
    values = flatten(dataclasses.asdict(config))
    digests = {key: _digest_of_value(value) for key, value in values.items() if key not in FREE_KEYS}
    files = [name for name in VOCABULARY_FILES if vocabulary and (run / name).is_file()]
    return digests | {name: _digest_of_file(run / name) for name in files}


def _first_difference(values: Digests, known: Digests) -> str | None:
    """Returns the first key with another value. Keys that only one of the two has are from another version."""
    known = _with_current_keys(known)
    return next((key for key, digest in values.items() if known.get(key, digest) != digest), None)


def _with_current_keys(known: Digests) -> Digests:
    """Returns digests with current keys and values in place of `RENAMED` ones."""
    current = dict(known)
    for name, (key, values) in RENAMED.items():
        if name in known:
            renamed = {_digest_of_value(value): _digest_of_value(new) for value, new in values.items()}
            current[key] = renamed.get(known[name], known[name])
    return current


def _read_digests(file: Path) -> list[Digests]:
    """Returns the digests of the config.yaml before the last one and of the last one; none if there is no file."""
    if not file.is_file():
        return []
    try:
        known = load_json(file.read_bytes().decode())
    except (OSError, ValueError):
        known = None
    if not isinstance(known, list) or not known or not all(isinstance(one, dict) and one for one in known):
        raise UserError(f"{file} is damaged: put back a copy, or remove it if {CONFIG_FILE} is whole")
    return known


def _digest_of_file(file: Path) -> str:
    try:
        return _digest(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): put back a copy") from None


def _digest_of_value(value: Any) -> str:
    return _digest(json.dumps(value).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
