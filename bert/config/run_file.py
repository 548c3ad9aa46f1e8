"""config.yaml of a run: reading, writing, damage (config.digest), and the keys that may change when the run resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from bert.config.finetuning import FinetuneConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.config.options import LateInteractionConfig
from bert.config.pretraining import PretrainConfig, phase_configs
from bert.config.validation import EARLIER_DEFAULTS, PATHS, RENAMED, keys_of
from bert.config.yaml_io import UserValue, build_config, display_path, dump, parse_yaml, read_text, top_level_keys
from bert.errors import UserError, redact
from bert.files import load_json, write_atomic

CONFIG_FILE, DIGEST_FILE = "config.yaml", "config.digest"

VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "target_tokenizer/tokenizer.json", "target_tokenizer/vocab.txt")
"""Files of a run's vocabularies, whose digests are stored as well."""

FREE_KEYS = {*PATHS, "lora.checksum", "distillation.checksum"}
"""Keys without a digest: data and models may be moved, and checksums are compared with the weights."""

LAST_KEYS = ("training.max_consecutive_nonfinite_steps", "decoding.seed")
"""Last keys of config.yaml: without config.digest (older versions), a missing one shows that the file was cut off."""

Digests: TypeAlias = dict[str, str]
"""Digests of values by dotted key, and of files by name."""


def save_run_config(config: Any, run: Path, vocabulary: bool = True) -> None:
    """Writes config.yaml and config.digest into a run's folder.

    A process may die between the two writes. Therefore config.digest is written first, and also has the digests of the
    previous config.yaml.

    Args:
        vocabulary: whether the vocabulary in the folder is final, so that it gets digests as well.
    """
    known = [_digests(_parse(run), run, vocabulary)] if (run / CONFIG_FILE).is_file() else []
    digests = _digests(config, run, vocabulary)
    write_atomic(run / DIGEST_FILE, json.dumps([*(one for one in known if one != digests), digests], indent=0) + "\n")
    write_atomic(run / CONFIG_FILE, dump(redact_paths(config)))


def redact_paths(config: Any) -> Any:
    """Returns a configuration without the credentials of URLs, for storage and loggers."""
    return _map_paths(config, lambda value, key: redact(value))


def with_credentials(stored: Any, requested: Any) -> Any:
    """Returns a stored configuration with the requested URLs if these only add credentials."""
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
    """Compares the vocabulary in a run's folder with config.digest. Raises UserError if it differs."""
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
    """Returns values by dotted key; dictionaries in a list are counted from 1."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value, 1)}
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _map_paths(config: Any, change: Callable[[Any, str], Any]) -> Any:
    """Returns a configuration with ``change(value, key)`` for each of `PATHS` that it has; phases are numbered."""
    for key in PATHS:
        section, _, name = key.rpartition(".")
        part: Any = getattr(config, section, None) if section else config
        if isinstance(part, list):
            parts = [(f"{section}.{number}.{name}", item) for number, item in enumerate(part, 1)]
            part = [dataclasses.replace(item, **{name: change(getattr(item, name), key)}) for key, item in parts]
            config = dataclasses.replace(config, **{section: part})
        elif hasattr(part, name):
            part = dataclasses.replace(part, **{name: change(getattr(part, name), key)})
            config = dataclasses.replace(config, **{section: part}) if section else part
    return config


def _parse(run: Path) -> PretrainConfig | FinetuneConfig:
    file = run / CONFIG_FILE
    config_class = config_class_of_run(run)
    entries = parse_yaml(read_text(file), display_path(file), keys_of(config_class))
    if not (run / DIGEST_FILE).is_file():
        _require_last_key(entries, file)
    if config_class is FinetuneConfig:
        return build_config(FinetuneConfig, entries)
    return build_config(PretrainConfig, entries)


def _require_last_key(entries: Mapping[str, UserValue], file: Path) -> None:
    """Raises UserError if the end of a configuration is missing."""
    sections = {key.partition(".")[0] for key in entries}
    for key in LAST_KEYS:
        if key not in entries and (key == LAST_KEYS[0] or key.partition(".")[0] in sections):
            raise UserError(f"{file} was cut off (it has no {key}): put back a copy")


def _digests(config: Any, run: Path, vocabulary: bool) -> Digests:
    values = flatten(dataclasses.asdict(config))
    digests = {key: _digest_of_value(value) for key, value in values.items() if _unnumbered(key) not in FREE_KEYS}
    files = [name for name in VOCABULARY_FILES if vocabulary and (run / name).is_file()]
    return digests | {name: _digest_of_file(run / name) for name in files}


def _unnumbered(key: str) -> str:
    """Returns a key without the number of its phase."""
    return re.sub(r"^phases\.\d+\.", "phases.", key)


def _first_difference(values: Digests, known: Digests) -> str | None:
    """Returns the first key whose value differs. Keys that only one of the two has belong to another version."""
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
    """Returns the digests of the previous and of the last config.yaml; empty if there is no file."""
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


Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

SCHEDULE_CONDITION = "the learning rate and the phase of every step done so far stay the same"


@dataclass(frozen=True)
class ResumableKey:
    """A key that may change when a run resumes.

    Attributes:
        key: the key; keys of phases have no number.
        effect: ``exact`` if the result is bit-identical to a run that started with the new value; ``rounding`` if it is
            identical except for the rounding of sums; ``later`` if steps are exact, but later log lines or evaluations
            are at other steps.
        condition: when it may change; empty for always.
        reason: why the result does not depend on it.
    """

    key: str
    effect: Literal["exact", "rounding", "later"]
    reason: str
    condition: str = ""

    @property
    def of_schedule(self) -> bool:
        """Whether the key may change only if the schedule of the completed steps stays the same."""
        return self.condition == SCHEDULE_CONDITION


def _of_schedule(key: str, reason: str) -> ResumableKey:
    return ResumableKey(key, "exact", reason, SCHEDULE_CONDITION)


RESUMABLE = (
    ResumableKey("output_dir", "exact", "the folder may have moved"),
    ResumableKey("profile", "exact", "it writes a trace and does not change the training"),
    ResumableKey("loggers", "exact", "they receive copies of the metrics"),
    ResumableKey("transfer", "exact", "it does not change the state"),
    ResumableKey("transfer_every", "exact", "it does not change the state"),
    ResumableKey("num_seeds", "exact", "each seed is a run by itself", "the run has several seeds before and after"),
    ResumableKey(
        "data.calibration",
        "exact",
        "it is fitted after the last step, and changes no prediction",
        "data.label_thresholds is null",
    ),
    ResumableKey("data.num_workers", "exact", "examples do not depend on the processes that build them"),
    ResumableKey("data.cache_dir", "exact", "the digest of the examples is compared"),
    ResumableKey("training.log_every", "later", "log lines are means since the line before"),
    ResumableKey("training.eval_every", "later", "fine-tuning chooses its best checkpoint among the evaluations"),
    ResumableKey("training.checkpoint_every", "exact", "a checkpoint does not change the state"),
    ResumableKey("training.max_to_keep", "exact", "the newest checkpoint always stays"),
    ResumableKey("training.max_consecutive_nonfinite_steps", "exact", "it only ends a run"),
    ResumableKey("training.eval_batch_size", "rounding", "scores of evaluations are sums over rows"),
    ResumableKey("training.gradient_accumulation_steps", "rounding", "gradients of micro-batches are added"),
    ResumableKey("training.mesh", "rounding", "gradients of devices are added; so for any other number of devices"),
    ResumableKey("training.remat", "rounding", "activations are computed again"),
    ResumableKey("training.scan_layers", "rounding", "layers are compiled as one"),
    ResumableKey("training.pad_vocab_to_multiple_of", "rounding", "tokens beyond the vocabulary have no probability"),
    ResumableKey("phases.gradient_accumulation_steps", "rounding", "gradients of micro-batches are added"),
    _of_schedule("training.steps", "batches, masks and dropout depend on the number of a step alone"),
    _of_schedule("training.epochs", "as training.steps"),
    _of_schedule("training.max_minutes", "it ends or decays a run whose rate has not fallen"),
    _of_schedule("optimizer.schedule", "steps done so far had the same rates"),
    _of_schedule("optimizer.warmup_steps", "steps done so far had the same rates"),
    _of_schedule("optimizer.warmup_ratio", "steps done so far had the same rates"),
    _of_schedule("optimizer.decay_ratio", "steps done so far had the same rates"),
    _of_schedule("optimizer.final_rate", "steps done so far had the same rates"),
)
"""Keys that may change on resume, including every remedy of `bert.errors.OUT_OF_MEMORY`."""

RESUMABLE_KEYS = tuple(entry.key for entry in RESUMABLE)

INCIDENTAL_KEYS = tuple(entry.key for entry in RESUMABLE if not entry.of_schedule)
"""Keys that do not change the result beyond rounding."""

SCHEDULE_KEYS = tuple(entry.key for entry in RESUMABLE if entry.of_schedule)

DERIVED_KEYS = (
    "model.vocab_size",
    "model.decoder_vocab_size",
    "model.decoder_layers",
    "data.labels",
    "data.clitics",
    "data.pair_truncation",
    "data.dev_fraction",
    "data.stratify_dev",
    "distillation.checksum",
    "embedding.pooling",
    "embedding.normalize",
    "embedding.lowercase",
    "embedding.query_prompt",
    "embedding.document_prompt",
    "embedding.dimensions",
    "embedding.temperature",
    *(f"embedding.late_interaction.{field.name}" for field in dataclasses.fields(LateInteractionConfig)),
    "lora.checksum",
)
"""Keys that default to null and are determined by the data or the initial model; config.yaml records the value."""


RESUMABLE_SHOWN = ("training.steps", "training.epochs", "training.log_every", "training.eval_every", "loggers")
"""Keys of `RESUMABLE_KEYS` that users change most."""


def describe_resumable_keys(requested: Config, stored: Config) -> str:
    """Lists a few of `RESUMABLE_KEYS`, first the ones that differ, and counts the others."""
    before, after = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    known: list[str] = [key for key in RESUMABLE_KEYS if key in after]
    changed: list[str] = [key for key in known if key != "output_dir" and before.get(key) != after[key]]
    shown = list(dict.fromkeys([*changed, *(key for key in RESUMABLE_SHOWN if key in known)]))[: len(RESUMABLE_SHOWN)]
    return f"{', '.join(shown)} and {len(RESUMABLE_KEYS) - len(shown)} others"


def first_difference(requested: Config, stored: Config) -> tuple[str, Any, Any] | None:
    """Returns the first key that differs and may not change on resume, with its stored and its requested value."""
    # A run that starts from another run has its sizes, regardless of the recipe.
    source = requested.init not in (None, "none") or getattr(requested, "architecture_from", None) is not None
    stored_values, values = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    stored_resolved, resolved = flatten(_with_computed_defaults(stored)), flatten(_with_computed_defaults(requested))
    defaults = {key: field.default for key, field in keys_of(type(requested)).items()}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        comes_along = section in ("model", "tokenizer") and name not in MODEL_KEYS_KEPT_WITH_INIT
        if key == "tokenizer.path" and isinstance(requested, PretrainConfig):
            comes_along = False  # the source's vocabulary may be extended
        may_change = (source and comes_along) or _unnumbered(key) in RESUMABLE_KEYS
        if key == "num_seeds":  # more seeds may be added, but one run and several runs have different folders
            may_change = (value > 1) == (stored_values[key] > 1)
        is_derived = key in DERIVED_KEYS and value is None
        earlier = (defaults.get(key), EARLIER_DEFAULTS.get(name))
        is_earlier_default = name in EARLIER_DEFAULTS and (value, stored_values.get(key)) == earlier
        is_equal = resolved[key] == stored_resolved.get(key) or redact(value) == redact(stored_values.get(key))
        if not (may_change or is_derived or is_earlier_default or is_equal):
            return key, stored_values.get(key), value
    return next(((key, value, None) for key, value in stored_values.items() if key not in values), None)


def _with_computed_defaults(config: PretrainConfig | FinetuneConfig) -> dict[str, Any]:
    """Returns the values of a configuration, with null replaced in keys that are computed from others."""
    values = dataclasses.asdict(dataclasses.replace(config, model=config.model.resolved))
    if isinstance(config, PretrainConfig):
        values["data"]["max_predictions_per_sequence"] = config.data.predictions_per_row
        for phase, phase_config in zip(values["phases"] or [], phase_configs(config), strict=False):
            phase["max_predictions_per_sequence"] = phase_config.data.predictions_per_row
    elif config.data.dev_fraction is not None:
        values["data"]["stratify_dev"] = bool(config.data.stratify_dev)  # null in older runs
    return values


def has_other_schedule(requested: Config, stored: Config) -> bool:
    """Returns whether a key differs that may change only if the schedule of the completed steps stays the same."""
    before, after = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    return any(before.get(key) != after.get(key) for key in SCHEDULE_KEYS)


def apply_resumable_keys(stored: Config, requested: Config) -> Config:
    """Returns the stored configuration with the requested values of `RESUMABLE_KEYS`."""
    for key in RESUMABLE_KEYS:
        section, _, name = key.rpartition(".")
        if not section:
            stored = _with_value(stored, requested, name)
        elif getattr(stored, section, None) and getattr(requested, section, None):
            changed = _with_value(getattr(stored, section), getattr(requested, section), name)
            stored = dataclasses.replace(stored, **{section: changed})
    return with_credentials(stored, requested)


def _with_value(stored: Any, requested: Any, name: str) -> Any:
    """Returns a section, or each section of a list, with one value replaced, if it has such a key."""
    if isinstance(stored, list):
        return [_with_value(*pair, name) for pair in zip(stored, requested, strict=True)]
    return dataclasses.replace(stored, **{name: getattr(requested, name)}) if hasattr(requested, name) else stored
