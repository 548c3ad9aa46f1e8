"""Command line and YAML file -> configuration, and every mistake in them -> one sentence.

`bert.config.yaml_io` knows where each value was written and what it means; the help is jsonargparse's.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import typing
from argparse import Action
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from bert.commands.overrides import rescaled, without_other_ways
from bert.config import apply_preset, recipe_folder, recipe_names
from bert.config.yaml_io import (
    NULLS,
    ConfigField,
    UserValue,
    build_config,
    convert_values,
    dump,
    help_texts,
    key_of,
    keys_of,
    read_yaml,
    sibling_keys,
    unknown_key,
)
from bert.errors import ScientificInt, UserError, require
from bert.files import local_path
from bert.runs.folder import MODEL_KEYS_KEPT_WITH_INIT
from bert.runtime.compilation_cache import use_compilation_cache
from bert.runtime.malloc import limit_malloc_arenas


class Checked(Protocol):
    """A configuration."""

    def check(self) -> None: ...


Config = TypeVar("Config", bound=Checked)


class Command(Protocol):
    """What `run_command` makes: arguments, or None for those of the process -> exit status."""

    def __call__(self, argv: list[str] | None = None) -> int: ...


COMMAND_LINE = "command line"
FLAGS = ("help", "print_config")

MODEL = "A run, a Hugging Face folder, a folder of google-research/bert, or a hub name."
"""What `bert.load` takes, for the help of the commands that load a model."""

OUT_OF_MEMORY = (
    "the memory of a device is used up: raise --training.gradient_accumulation_steps (the same result), set "
    "--training.remat dots or full, or deal the model out with --training.mesh; for "
    "pretraining, bert plan with the same arguments tells what fits"
)


def parse(
    config_class: type[Config],
    argv: list[str],
    *,
    prog: str,
    description: str,
    default_recipe: str | None,
    own: Mapping[str, str] | None = None,
    not_needed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Config, str | None]:
    """The checked configuration, and the recipe's name: the stem of its file, None where there is no file.

    ``own`` has the options that the command has taken out of ``argv`` itself, as ``NAME VALUE``, with their help.
    ``not_needed`` has values for keys that a command checks with the others and does not look at; what is given goes
    before it. ``--help`` and ``--print_config`` print and leave through SystemExit(0).
    Raises UserError with one sentence for anything wrong in the file, on the command line, or between values.
    """
    keys = keys_of(config_class)
    options = _options(argv, keys)
    if "help" in options:
        print(_parser(keys, config_class, prog, description, default_recipe, own).format_help(), end="")
        raise SystemExit(0)
    print_config = options.pop("print_config", None) is not None
    name = options.pop("config", [default_recipe])[0]
    path = None if name is None else find_config(name)
    given = {
        key: _from_command_line(key, [value], require(key_of(key, keys), key)) for key, value in not_needed.items()
    }
    of_file = {} if name is None or path is None else _read(name, path, keys)
    asked = {key: _from_command_line(key, values, require(key_of(key, keys), key)) for key, values in options.items()}
    given |= without_other_ways(of_file, asked) | asked
    if name in recipe_names():
        given = _without_sizes_beside_init(given)
    values = rescaled(convert_values(given, keys), of_file, asked, keys)
    config = apply_preset(build_config(config_class, values), _keys_overriding_preset(given))
    if print_config:
        print(dump(config), end="")
        raise SystemExit(0)
    try:
        config.check()
    except UserError as error:
        raise UserError(_with_location(str(error), given)) from None
    return config, None if path is None else path.stem


def _read(name: str, path: Path, keys: dict[str, ConfigField]) -> dict[str, UserValue]:
    """What a file gives; a recipe of another command is said to be one."""
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
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()  # here, so that a closed pipe shows before the interpreter shuts down
        except UserError as error:
            print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
            return 2
        except BrokenPipeError:
            # Python flushes stdout once more at exit and would complain again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return run


class CommandParser(argparse.ArgumentParser):
    """The arguments of a command that has no configuration: what is wrong with them is one sentence as well."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="help", help="Show this text and stop.")

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{COMMAND_LINE}: {message}: {self.prog} --help explains the arguments")


def split_options(argv: list[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The arguments without a command's own options, which are no keys of a configuration; and the values of these.

    Raises:
        UserError: one has no value, or is given twice.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in names:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value or value.startswith("--"):
            raise UserError(f"{COMMAND_LINE}: --{name} needs a value: write --{name} VALUE")
        if name in given:
            raise UserError(f"{COMMAND_LINE}: --{name} is given twice: leave one out")
        given[name] = value
    return rest, given


def command_name(command: str) -> str:
    """How this process was called, for sentences that say what to type: by a script of the clone, or as `bert`."""
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


def _options(argv: list[str], keys: dict[str, ConfigField]) -> dict[str, list[str]]:
    """The options of the command line with their values; where one is given again, the last one counts.

    Only a key that takes a list has several values: so a glob works quoted and expanded by the shell.
    """
    options: dict[str, list[str]] = {}
    name = None
    for word in argv:
        if word.startswith("--") or word == "-h":
            name, equals, value = ("help", "", "") if word == "-h" else word[2:].partition("=")
            if key_of(name, keys) is None and name not in ("config", *FLAGS):
                raise UserError(f"{COMMAND_LINE}: {unknown_key(name, sibling_keys(name, keys), prefix='--')}")
            if name == "config" and name in options:
                raise UserError(f"{COMMAND_LINE}: --config is given twice: name one file or recipe")
            if name in FLAGS and equals:
                raise UserError(f"{COMMAND_LINE}: --{name} takes no value: leave out ={value}")
            options[name] = [value] if equals else []
        elif name is None or name in FLAGS:
            raise UserError(f"{COMMAND_LINE}: {word} belongs to no key: write --KEY VALUE (--help lists all keys)")
        elif options[name] and not ((key := key_of(name, keys)) and key.takes_list):
            raise UserError(
                f"{COMMAND_LINE}: --{name} takes one value, but {word} follows {options[name][0]}: "
                "quote a value that has spaces"
            )
        else:
            options[name].append(word)
    for name, values in options.items():
        if name not in FLAGS and not values:
            raise UserError(f"{COMMAND_LINE}: --{name} needs a value: write --{name} VALUE")
    return options


def _from_command_line(name: str, values: list[str], key: ConfigField) -> UserValue:
    # --data.buckets 64 is a list of one; --data.train a.txt stays a text, --data.train '[a.txt]' is YAML.
    alone_in_list = key.takes_list and key.item is None and str not in key.members and not values[0].startswith("[")
    is_list = len(values) > 1 or alone_in_list
    return UserValue(values if is_list else values[0], COMMAND_LINE, None, f"--{name} {' '.join(values)}")


def _without_sizes_beside_init(given: dict[str, UserValue]) -> dict[str, UserValue]:
    """A recipe's sizes are those of a model made again: where ``init`` names one, it brings its own."""
    if "init" not in given or given["init"].value in (*NULLS, "none"):
        return given

    def counts(key: str, item: UserValue) -> bool:
        section, _, name = key.rpartition(".")
        return section != "model" or name in MODEL_KEYS_KEPT_WITH_INIT or item.source == COMMAND_LINE

    return {key: item for key, item in given.items() if counts(key, item)}


def _keys_overriding_preset(given: dict[str, UserValue]) -> set[str]:
    """The keys that win over the preset: those of the command line, and those of a file that names the preset itself,
    as a run's config.yaml does."""
    preset = given.get("training.preset")
    places = {COMMAND_LINE} if preset is None else {COMMAND_LINE, preset.source}
    return {key for key, item in given.items() if item.source in places}


def _with_location(sentence: str, given: dict[str, UserValue]) -> str:
    """The sentence of a check, after the places that the values it speaks of came from."""
    words = re.findall(r"[\w.]*\w", sentence)
    # Names without a section, such as seed and like, are words too: they count as the first word only.
    named = [given[word] for i, word in enumerate(words) if word in given and ("." in word or i == 0)]
    places = " and ".join(dict.fromkeys(item.where for item in named))
    return f"{places}: {sentence}" if places else sentence


class _Help(DefaultHelpFormatter):
    """Help that shows the type by a placeholder and the default as YAML."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: Action) -> str:
        option = action.option_strings[0]  # without jsonargparse's --data.train+, which we do not take
        return f"{option} {action.metavar}" if action.metavar else option

    def _get_help_string(self, action: Action) -> str:
        return action.help or ""


def _parser(
    keys: dict[str, ConfigField],
    config_class: type | None = None,
    prog: str = "bert",
    description: str = "",
    default_recipe: str | None = None,
    own: Mapping[str, str] | None = None,
) -> ArgumentParser:
    """jsonargparse's parser of these keys; all arguments after the first are for its help."""
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        description=description,
        formatter_class=_Help,
        exit_on_error=False,
        add_help=False,
    )
    recipes = ", ".join(recipe_names()) or "none"
    general = parser.add_argument_group("Options")
    general.add_argument("--help", action="help", help="Show this text and stop; -h does the same.")
    general.add_argument(
        "--config",
        metavar="FILE",
        help=f"A YAML file or the name of a recipe; the keys below override it. Recipes: {recipes}."
        + ("" if default_recipe is None else f" (default: {default_recipe})"),
    )
    general.add_argument("--print_config", action="store_true", help="Print the whole configuration as YAML and stop.")
    for usage, text in (own or {}).items():
        name, _, value = usage.partition(" ")
        if value:
            general.add_argument(f"--{name}", help=text, metavar=value)
        else:
            general.add_argument(f"--{name}", help=text, action="store_true")
    titles = _titles(config_class) if config_class else {}
    groups: dict[str, Any] = {}
    for name, key in keys.items():
        section = name.rpartition(".")[0]
        if section not in groups:
            title = titles.get(section) or section or "the run"
            groups[section] = parser.add_argument_group(title[0].upper() + title[1:])
        _explain(groups[section], name, key)
        if key.item is not None:
            of_item = parser.add_argument_group(f"{_first_line(key.item)} (K = 1, 2, ...)")
            for inside, one in keys_of(key.item, f"{name}.K.").items():
                _explain(of_item, inside, one)
    return parser


def _explain(group: Any, name: str, key: ConfigField) -> None:
    default = key.default if isinstance(key.default, str) else json.dumps(key.default)
    group.add_argument(
        f"--{name}",
        type=str if key.item else key.type,
        default=key.default,
        metavar=_placeholder(key),
        help=f"{key.help} (default: {default})",
    )


def _first_line(described: type) -> str:
    return (described.__doc__ or "").partition(";")[0].partition(".")[0]


def _titles(config_class: type, prefix: str = "") -> dict[str, str]:
    """What the dataclasses say of each section, by its dotted name."""
    titles: dict[str, str] = {}
    hints, texts = typing.get_type_hints(config_class), help_texts(config_class)
    for name, hint in hints.items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            titles |= {prefix + name: texts.get(name, ""), **_titles(hint, f"{prefix}{name}.")}
    return titles


def _placeholder(key: ConfigField) -> str:
    if key.item is not None:
        return "null"
    kind = next(member for member in key.members if member is not type(None))
    if key.takes_list:
        return "N ..." if typing.get_args(kind) == (int,) else "TEXT ..."
    return {int: "N", ScientificInt: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
