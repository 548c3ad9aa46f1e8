"""Resolution of recipes, YAML files and overrides into one configuration."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from bert.config.finetuning import FinetuneConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.config.phases import PhaseConfig
from bert.config.pretraining import PretrainConfig, phase_configs
from bert.config.run_file import check_run_file
from bert.config.training import TrainingConfig, num_micro_batches
from bert.config.validation import ConfigField, keys_of
from bert.config.yaml_io import NULLS, UserValue, build_config, display_path, read_yaml
from bert.errors import Log, UserError
from bert.remote import fetch

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

ALTERNATIVES = (
    ("training.steps", "training.epochs"),
    ("training.gradient_accumulation_steps", "training.micro_batch_size"),
    ("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    ("phases.N.steps", "phases.N.share"),
    ("phases.N.gradient_accumulation_steps", "phases.N.micro_batch_size"),
    ("phases.N.ramp_steps", "phases.N.ramp_share"),
)
"""Pairs of keys that set the same thing in two ways; N is the number of an item."""

VOCAB_MULTIPLE = 64

SCHEMA_LINE = "# yaml-language-server: "
"""Start of a comment that names the schema of a YAML file for editors."""


@dataclass(frozen=True)
class ResolvedConfig(Generic[Config]):
    """A configuration and the sources of its values.

    Attributes:
        config: the unchecked configuration.
        entries: the values of files and overrides, by dotted key.
        recipe: name of the recipe, or stem of the last file; None without any.
    """

    config: Config
    entries: Mapping[str, UserValue]
    recipe: str | None

    def check(self, complete: bool = True) -> None:
        """Raises UserError for the first invalid value, or pair of values, with the location of each.

        Args:
            complete: whether required keys must be set.
        """
        try:
            (self.config if complete else _fill_missing(self.config)).check()
        except UserError as error:
            raise UserError(_with_location(str(error), self.entries)) from None


def resolve_config(
    config_class: type[Config],
    names: Sequence[str],
    overrides: Mapping[str, UserValue],
    option: str,
    defaults: Mapping[str, UserValue],
    log: Log,
) -> ResolvedConfig[Config]:
    """Combines files and overrides into one configuration.

    Args:
        config_class: kind of the configuration.
        names: recipes, and paths of YAML files; later ones override earlier ones.
        overrides: values that override all files.
        option: the option that names a file, for messages.
        defaults: values that all other sources override.
        log: logs the settings of a recipe that are dropped.

    Raises:
        UserError: a file cannot be read or has an unknown key, or a value does not have its key's type.
    """
    keys = keys_of(config_class)
    files: list[tuple[str, Path]] = [(name, find_config(name, option, "task" in keys)) for name in names]
    entries = dict(defaults)
    for name, path in files:
        entries = override(entries, _read(name, path, keys), keys)
    entries = override(entries, dict(overrides), keys)
    recipes = {display_path(path): name for name, path in files if name in recipe_names()}
    entries = _without_recipe_sizes_if_init(entries, recipes)
    entries = _without_transfer_if_other_corpus(entries, recipes, log)
    sources = [*(display_path(path) for _, path in files), *(entry.source for entry in overrides.values())]
    config = apply_preset(build_config(config_class, entries), _keys_overriding_preset(entries, sources))
    return ResolvedConfig(with_micro_batches(config), entries, files[-1][1].stem if files else None)


def recipe_names(for_task: bool | None = None) -> list[str]:
    """Returns the names of the recipes: of fine-tuning (True), of pretraining (False), or all (None)."""
    return sorted(
        path.stem
        for path in recipe_folder().glob("*.yaml")
        if for_task in (None, re.search(r"^task:", path.read_text(encoding="utf-8"), re.MULTILINE) is not None)
    )


def recipe_header(name: str) -> list[str]:
    """Returns the comment lines at the start of a recipe, without the line for editors that names the schema."""
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [line.removeprefix("#").strip() for line in comments if not line.startswith(SCHEMA_LINE)]


def recipe_folder() -> Path:
    """Returns configs/ of the clone, or its copy inside the installed package."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"


def override(
    base: dict[str, UserValue], changes: dict[str, UserValue], keys: dict[str, ConfigField]
) -> dict[str, UserValue]:
    """Returns the values of ``base`` updated with the values of a later source.

    If the later source sets one of two `ALTERNATIVES`, the other one is removed. A list replaces all items of an
    earlier list.
    """
    replaced = set()
    for key, entry in changes.items():
        number = re.search(r"\d+", key)
        general = re.sub(r"\d+", "N", key)
        for pair in ALTERNATIVES:
            if general in pair and entry.value not in NULLS:
                other = pair[1 - pair.index(general)]
                replaced.add(other.replace("N", number[0]) if number else other)
        if key in keys and keys[key].item is not None:  # the whole list
            replaced |= {item for item in base if item.startswith(f"{key}.")}
        section = key.partition(".")[0]
        if section in base and base[section].value in NULLS:  # items for a list that was null
            replaced.add(section)
    return {key: entry for key, entry in base.items() if key not in replaced} | changes


def apply_preset(config: Config, explicit: Collection[str] = ()) -> Config:
    """Applies the settings of ``training.preset``. The reference preset has none.

    Args:
        explicit: keys such as ``training.dtype`` that override the preset.
    """
    if config.training.preset != "fast":
        return config
    sets: dict[str, Any] = {"dtype": "bfloat16", "pad_vocab_to_multiple_of": VOCAB_MULTIPLE}
    training = replace(
        config.training, **{name: value for name, value in sets.items() if f"training.{name}" not in explicit}
    )
    model = config.model
    if "model.attention_probs_dropout_prob" not in explicit:
        model = replace(model, attention_probs_dropout_prob=0.0)
    # The kernel supports only masks that are defined by row lengths.
    if isinstance(config, PretrainConfig):
        packing = any(phase.data.packing for phase in phase_configs(config))
    else:
        packing = config.data.packing
    no_lengths = packing or config.training.objective == "plm"
    no_kernel = no_lengths or model.attention_probs_dropout_prob > 0 or training.dtype != "bfloat16"
    if training.attention_implementation == "auto" and no_kernel:
        training = replace(training, attention_implementation="xla")
    return replace(config, training=training, model=model)


def with_micro_batches(config: Config) -> Config:
    """Returns a configuration with ``gradient_accumulation_steps`` in place of ``micro_batch_size``.

    Raises:
        UserError: both are set.
    """
    training = config.training
    if isinstance(config, PretrainConfig) and config.phases is not None:
        phases = [_phase_with_micro_batches(number, phase, training) for number, phase in enumerate(config.phases, 1)]
        config = replace(config, phases=phases)
    if training.micro_batch_size is None:
        return config
    if training.gradient_accumulation_steps > 1:
        raise _set_twice("training")
    if training.tokens_per_batch is not None:
        raise UserError(
            f"training.micro_batch_size is {training.micro_batch_size}, but training.tokens_per_batch has batches of "
            "no fixed number of rows: set training.gradient_accumulation_steps instead"
        )
    count = num_micro_batches(training.batch_size, training.micro_batch_size)
    return replace(config, training=replace(training, gradient_accumulation_steps=count, micro_batch_size=None))


def _phase_with_micro_batches(number: int, phase: PhaseConfig, training: TrainingConfig) -> PhaseConfig:
    """Returns a phase with its own number of micro-batches if it sets its rows, or their maximum."""
    size = phase.micro_batch_size
    if size is not None and phase.gradient_accumulation_steps is not None:
        raise _set_twice(f"phases.{number}")
    if size is None and phase.gradient_accumulation_steps is None and phase.batch_size is not None:
        size = training.micro_batch_size
    if size is None:
        return phase
    count = num_micro_batches(phase.batch_size or training.batch_size, size)
    return replace(phase, gradient_accumulation_steps=count, micro_batch_size=None)


def _set_twice(section: str) -> UserError:
    return UserError(
        f"{section}.micro_batch_size and {section}.gradient_accumulation_steps are both set: remove one of them"
    )


def find_config(name: str, option: str, for_task: bool) -> Path:
    """Returns the file of a recipe's name or a path. Raises UserError if it does not exist.

    Args:
        for_task: whether a similar name is looked for among the recipes of fine-tuning, or of pretraining.
    """
    if name in recipe_names():
        return recipe_folder() / f"{name}.yaml"
    path = Path(fetch(name, option))
    if path.is_file():
        return path
    where = f"{option} {name}"
    if path.is_dir():
        inside = path / "config.yaml"
        fix = f"did you mean {inside}?" if inside.is_file() else "name a YAML file"
        raise UserError(f"{where}: this is a folder: {fix}")
    near = difflib.get_close_matches(path.stem, recipe_names(for_task), 1)
    fix = f"did you mean {near[0]}?" if near else "pass a file or the name of a recipe"
    raise UserError(f"{where}: no such file or recipe: {fix} (bert recipes lists all)")


def _read(name: str, path: Path, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """Returns the values of a file. The error for a recipe of another command names that command."""
    try:
        check_run_file(path)
        return read_yaml(path, keys)
    except UserError as error:
        of_task = re.search(r"^task:", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE) is not None
        if name in recipe_names() and of_task != ("task" in keys):
            raise UserError(f"{error} ({name} is a recipe of bert {'finetune' if of_task else 'pretrain'})") from None
        raise


def _without_recipe_sizes_if_init(entries: dict[str, UserValue], recipes: Container[str]) -> dict[str, UserValue]:
    """Drops the model sizes of recipes if ``init`` is set, since sizes come with the initial model."""
    if "init" not in entries or entries["init"].value in (*NULLS, "none"):
        return entries

    def is_kept(key: str, entry: UserValue) -> bool:
        section, _, name = key.rpartition(".")
        return section != "model" or name in MODEL_KEYS_KEPT_WITH_INIT or entry.source not in recipes

    return {key: entry for key, entry in entries.items() if is_kept(key, entry)}


def _without_transfer_if_other_corpus(
    entries: dict[str, UserValue], recipes: Mapping[str, str], log: Log
) -> dict[str, UserValue]:
    """Drops a recipe's ``transfer`` if ``data.train`` is set elsewhere, since it belongs to the recipe's corpus.

    ``recipes`` has the names of recipes by the sources of their values.
    """
    transfer, corpus = entries.get("transfer"), entries.get("data.train")
    if transfer is None or corpus is None or transfer.source not in recipes or corpus.source == transfer.source:
        return entries
    log(
        f"transfer {transfer.value} of the recipe {recipes[transfer.source]} is left out, since data.train is set: "
        f"pass --transfer {transfer.value} to run it"
    )
    return {key: entry for key, entry in entries.items() if key != "transfer"}


def _keys_overriding_preset(entries: dict[str, UserValue], sources: list[str]) -> set[str]:
    """Returns the keys that override the preset.

    These are the keys set by the source of the preset, such as a run's config.yaml, or by later sources.
    """
    source = entries["training.preset"].source if "training.preset" in entries else None
    earlier = sources[: sources.index(source)] if source in sources else []
    return {key for key, entry in entries.items() if entry.source not in earlier}


def _fill_missing(config: Config) -> Config:
    """Returns the configuration with placeholders for required keys, so that all other keys can be checked."""
    training = config.training
    if training.steps is None and training.epochs is None:
        training = replace(training, steps=10**9)
    if isinstance(config, PretrainConfig):
        data = config.data if config.data.train else replace(config.data, train="docstrings:")
        return replace(config, data=data, training=training)
    task_data = config.data if config.data.train else replace(config.data, dir=config.data.dir or os.curdir)
    trains_vocabulary = not config.tokenizer.is_unset  # only a run from random weights does
    init = config.init or ("none" if trains_vocabulary else "MODEL")
    return replace(config, data=task_data, training=training, init=init)


def _with_location(sentence: str, entries: Mapping[str, UserValue]) -> str:
    """Returns the message of a check, preceded by the locations of the values that it names."""
    words = re.findall(r"[\w.]*\w", sentence)
    # Names without a section, such as seed, are also words, so they count only as the first word.
    named = [entries[word] for i, word in enumerate(words) if word in entries and ("." in word or i == 0)]
    locations = " and ".join(dict.fromkeys(entry.where for entry in named))
    return f"{locations}: {sentence}" if locations else sentence
