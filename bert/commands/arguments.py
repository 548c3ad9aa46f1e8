"""Command line and YAML files -> configuration, and every mistake in them -> one sentence."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeVar

from bert.commands.config_help import config_help
from bert.commands.overrides import override
from bert.config import FinetuneConfig, PretrainConfig, apply_preset, recipe_folder, recipe_names
from bert.config.yaml_io import (
    NULLS,
    ConfigField,
    UserValue,
    build_config,
    display_path,
    dump,
    key_of,
    keys_of,
    parse_list,
    read_yaml,
    sibling_keys,
    unknown_key,
)
from bert.errors import UserError, require
from bert.files import local_path
from bert.runs.folder import MODEL_KEYS_KEPT_WITH_INIT
from bert.runtime.compilation_cache import use_compilation_cache
from bert.runtime.ctrl_c import INTERRUPTED, STATUS, CtrlC
from bert.runtime.malloc import limit_malloc_arenas

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)
Command = Callable[..., int]
"""A wrapped command: its arguments, or nothing for those of the process -> exit status."""

COMMAND_LINE = "command line"
FLAGS = ("help", "print_config")
SHORT_FORMS = {"teacher": "distillation.teacher"}
"""Options that are short for a key."""

MODEL = "A run, a Hugging Face folder, a folder of google-research/bert, or a hub name."
"""What `bert.load` takes, for the help of the commands that load a model."""

OUT_OF_MEMORY = (
    "the memory of a device is used up: raise --training.gradient_accumulation_steps (the same result), set "
    "--training.remat dots or full, or shard the model with --training.mesh; for pretraining, bert plan with the same "
    "arguments reports what fits"
)


def parse(
    config_class: type[Config],
    argv: list[str],
    prog: str,
    description: str,
    default_recipe: str | None,
    extra_options: Mapping[str, str] = MappingProxyType({}),
    defaults_for_check: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Config, str | None, dict[str, str]]:
    """The checked configuration, the recipe's name (the stem of the last file), and the options that are no keys.

    ``extra_options`` has the help of these options by usage: ``NAME VALUE``, or ``NAME`` for a flag, whose value is "".
    ``defaults_for_check`` has values for keys that a command checks with the others but does not use; files and the
    command line override them. ``say`` is called with what is left out of a recipe. ``--help`` and ``--print_config``
    print and exit through SystemExit(0).
    Raises UserError with one sentence for anything wrong in the files, on the command line, or between values.
    """
    keys = keys_of(config_class)
    takes_value = {name: bool(value) for name, _, value in (usage.partition(" ") for usage in extra_options)}
    options = _options(argv, keys, takes_value)
    extra = {name: " ".join(options.pop(name)) for name in takes_value if name in options}
    if "help" in options:
        print(config_help(config_class, prog, description, _config_text(default_recipe), extra_options), end="")
        raise SystemExit(0)
    print_config = options.pop("print_config", None) is not None
    names = options.pop("config", [] if default_recipe is None else [default_recipe])
    files: list[tuple[str, Path]] = [(name, find_config(name)) for name in names]
    given = _values_on_command_line({key: [value] for key, value in defaults_for_check.items()}, keys)
    for name, path in files:
        given = override(given, _read(name, path, keys), keys)
    given = override(given, _values_on_command_line(options, keys), keys)
    recipes = {display_path(path): name for name, path in files if name in recipe_names()}
    given = _without_recipe_sizes_if_init(given, recipes)
    given = _without_transfer_if_other_corpus(given, recipes, say)
    sources = [*(display_path(path) for _, path in files), COMMAND_LINE]
    config = apply_preset(build_config(config_class, given), _keys_overriding_preset(given, sources))
    if print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    try:
        config.check()
    except UserError as error:
        raise UserError(_with_location(str(error), given)) from None
    return config, files[-1][1].stem if files else None, extra


def _config_text(default_recipe: str | None) -> str:
    default = "" if default_recipe is None else f" (default: {default_recipe})"
    return (
        "A YAML file or the name of a recipe; it may be repeated: later files override earlier ones, and the keys "
        f"below override all. Recipes: {', '.join(recipe_names()) or 'none'}.{default}"
    )


def _read(name: str, path: Path, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """The values of a file; the error for a recipe of another command names that command."""
    try:
        return read_yaml(path, keys)
    except UserError as error:
        of_task = re.search(r"^task:", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE) is not None
        if name in recipe_names() and of_task != ("task" in keys):
            raise UserError(f"{error} ({name} is a recipe of bert {'finetune' if of_task else 'pretrain'})") from None
        raise


def run_command(main: Callable[[list[str]], int]) -> Command:
    """Wraps a command, to be called from Python or by `run_program`. Its compiled programs are kept for the next one.

    The wrapped function takes the arguments, or None for those of the process, and returns the exit status.

    Raises:
        UserError: wrong arguments or data; also for an error of the operating system (a full disk, a missing
            permission) and for exhausted device memory.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            limit_malloc_arenas()
            use_compilation_cache()
            return main(sys.argv[1:] if argv is None else argv)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.strerror is None:  # not from the operating system
                raise
            where = f"{error.filename}: " if error.filename else ""
            raise UserError(f"{where}{error.strerror}: fix that and run the same command again") from error
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # XLA's word for exhausted device memory
                raise
            raise UserError(OUT_OF_MEMORY) from error

    return run


def run_program(main: Command) -> Command:
    """Wraps a command as a program of the shell: a UserError is printed as ``error: <sentence>`` and gives status 2.

    A closed pipe ends without a message (141), an interrupt with one word (130).
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        with CtrlC():
            try:
                try:
                    return main(argv)
                finally:
                    sys.stdout.flush()  # here, so that a closed pipe shows before the interpreter shuts down
            except UserError as error:
                print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
                return 2
            except BrokenPipeError:
                # Python flushes stdout again at exit and would complain again.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            except KeyboardInterrupt:
                print(INTERRUPTED, file=sys.stderr)
                return STATUS

    return run


class CommandParser(argparse.ArgumentParser):
    """The arguments of a command that has no configuration: what is wrong with them is one sentence as well."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="help", help="Show this text and stop.")

    def parse_arguments(self, argv: Sequence[str]) -> argparse.Namespace:
        """As ``parse_args``, which in Python 3.11 takes a second ``--`` for a positional argument without a value.

        Raises:
            UserError: wrong arguments.
        """
        if argv.count("--") > 1:
            self.error("-- is given more than once")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{COMMAND_LINE}: {message}: {self.prog} --help explains the arguments")


def command_name(command: str) -> str:
    """The name of this program in suggested commands: a script of the clone, or `bert`."""
    return f"python {command}.py" if Path(sys.argv[0]).name in ("pretrain.py", "finetune.py") else f"bert {command}"


def find_config(name: str) -> Path:
    """The file that ``--config NAME`` means, a recipe's name or a path. Raises UserError if there is none."""
    if name in recipe_names():
        return recipe_folder() / f"{name}.yaml"
    path = Path(local_path(name, "--config"))
    if path.is_file():
        return path
    where = f"{COMMAND_LINE}: --config {name}"
    if path.is_dir():
        inside = path / "config.yaml"
        fix = f"did you mean {inside}?" if inside.is_file() else "name a YAML file"
        raise UserError(f"{where}: this is a folder: {fix}")
    near = difflib.get_close_matches(path.stem, recipe_names(), 1)
    fix = f"did you mean {near[0]}?" if near else "give a file or a recipe's name"
    raise UserError(f"{where}: no such file or recipe: {fix} (recipes: {', '.join(recipe_names()) or 'none'})")


def _options(argv: list[str], keys: dict[str, ConfigField], extra: Mapping[str, bool]) -> dict[str, list[str]]:
    """The options of the command line with their values; if one is given again, the last one counts.

    Only a key that takes a list has several values, so that a glob works quoted and expanded by the shell.
    Only ``--config`` may be repeated: its values are all kept. ``extra`` says of each option that is no key whether
    it takes a value.
    """
    takes_value = {"config": True, **dict.fromkeys(FLAGS, False), **extra}
    options: dict[str, list[list[str]]] = {}
    name: str | None = None
    words: list[str] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name, equals, value = ("help", "", "") if word == "-h" else word[2:].partition("=")
            name = SHORT_FORMS[name] if SHORT_FORMS.get(name) in keys else name
            if name not in takes_value and key_of(name, keys) is None:
                raise UserError(f"{COMMAND_LINE}: {unknown_key(name, sibling_keys(name, keys), prefix='--')}")
            if equals and not takes_value.get(name, True):
                raise UserError(f"{COMMAND_LINE}: --{name} takes no value: remove ={value}")
            words = [value] if equals else []
            options[name] = [*options.get(name, ()), words] if name == "config" else [words]
        elif name is None or not takes_value.get(name, True):
            raise UserError(f"{COMMAND_LINE}: {word} belongs to no key: write --KEY VALUE (--help lists all keys)")
        elif words and not ((key := key_of(name, keys)) and key.takes_list):
            raise UserError(
                f"{COMMAND_LINE}: --{name} takes one value, but {word} follows {words[0]}: "
                "quote a value that has spaces"
            )
        else:
            words.append(word)
    for name, occurrences in options.items():
        if takes_value.get(name, True) and not all(occurrences):
            raise UserError(f"{COMMAND_LINE}: --{name} needs a value: write --{name} VALUE")
    return {name: [word for words in occurrences for word in words] for name, occurrences in options.items()}


def _values_on_command_line(options: Mapping[str, list[str]], keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    values = {}
    for name, words in options.items():
        value = words if len(words) > 1 else _text_or_list(words[0], require(key_of(name, keys), name))
        values[name] = UserValue(value, COMMAND_LINE, None, f"--{name} {' '.join(words)}")
    return values


def _text_or_list(text: str, key: ConfigField) -> str | list[str]:
    """'[a.txt]' is a YAML list, --data.buckets 64 is a list of one, and --data.train a.txt stays a text."""
    if not key.takes_list or key.item is not None:
        return text
    if text.startswith("[") and (texts := parse_list(text)) is not None:
        return texts
    return text if str in key.members or text in NULLS else [text]


def _without_recipe_sizes_if_init(given: dict[str, UserValue], recipes: Container[str]) -> dict[str, UserValue]:
    """Drops the model sizes of recipes if ``init`` is set: the initial model brings its own."""
    if "init" not in given or given["init"].value in (*NULLS, "none"):
        return given

    def is_kept(key: str, entry: UserValue) -> bool:
        section, _, name = key.rpartition(".")
        return section != "model" or name in MODEL_KEYS_KEPT_WITH_INIT or entry.source not in recipes

    return {key: entry for key, entry in given.items() if is_kept(key, entry)}


def _without_transfer_if_other_corpus(
    given: dict[str, UserValue], recipes: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, UserValue]:
    """Drops a recipe's ``transfer`` if ``data.train`` is set elsewhere: it measures what the recipe's corpus gives.

    ``recipes`` has the names of recipes by the sources of their values.
    """
    transfer, corpus = given.get("transfer"), given.get("data.train")
    if transfer is None or corpus is None or transfer.source not in recipes or corpus.source == transfer.source:
        return given
    say(
        f"transfer {transfer.value} of the recipe {recipes[transfer.source]} is left out, since data.train is set: "
        f"pass --transfer {transfer.value} to run it"
    )
    return {key: entry for key, entry in given.items() if key != "transfer"}


def _keys_overriding_preset(given: dict[str, UserValue], sources: list[str]) -> set[str]:
    """The keys that win over the preset: those of the source that sets it, as a run's config.yaml does, and of later
    sources."""
    first = sources.index(given["training.preset"].source) if "training.preset" in given else 0
    return {key for key, entry in given.items() if entry.source in sources[first:]}


def _with_location(sentence: str, given: dict[str, UserValue]) -> str:
    """The sentence of a check, after the locations of the values that it names."""
    words = re.findall(r"[\w.]*\w", sentence)
    # Names without a section, such as seed and like, are words too: they count as the first word only.
    named = [given[word] for i, word in enumerate(words) if word in given and ("." in word or i == 0)]
    locations = " and ".join(dict.fromkeys(entry.where for entry in named))
    return f"{locations}: {sentence}" if locations else sentence
