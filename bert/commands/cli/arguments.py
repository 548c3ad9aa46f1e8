"""Parses command lines and YAML files into configurations, and reports every mistake as one sentence."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeVar

from bert.commands.cli.config_help import config_help
from bert.config import FinetuneConfig, PretrainConfig, recipe_names
from bert.config.run_file import redact_paths
from bert.config.sources import resolve_config
from bert.config.validation import ConfigField, current_key, key_of, keys_of, sibling_keys, unknown_key
from bert.config.yaml_io import NULLS, UserValue, add_value, dump, parse_list
from bert.errors import Log, UserError, redact, require, system_errors_as_user_errors
from bert.remote import readable_path
from bert.runtime.compilation_cache import use_compilation_cache
from bert.runtime.interrupts import INTERRUPTED, STATUS, CtrlC
from bert.runtime.process import limit_malloc_arenas

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)
Command = Callable[..., int]
"""A wrapped command: arguments, or nothing for the arguments of the process -> exit status."""

COMMAND_LINE = "command line"
FLAGS = ("help", "print_config")
SHORT_FORMS = {"teacher": "distillation.teacher"}
"""Abbreviations of keys."""

MODEL = "A run, a Hugging Face folder, a google-research/bert folder, or a hub name."
"""Help of the arguments that `bert.load` reads."""


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for an adapter of the model."""
    parser.add_argument(
        "--adapter",
        type=readable_path,
        metavar="FOLDER",
        help="A LoRA adapter in PEFT's format, which is added to the model. (default: none)",
    )


def add_engine_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for what runs the model."""
    parser.add_argument(
        "--engine",
        choices=("jax", "onnxruntime"),
        default="jax",
        help="What runs the model. onnxruntime is for CPUs (pip install 'bert-jax[onnx]'). (default: jax)",
    )


def add_task_option(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds the option for a task of a model with an adapter for each task."""
    parser.add_argument(
        "--task", metavar="NAME", help=f"{text}, such as retrieval.query of Jina embeddings v3. (default: none)"
    )


def add_server_options(parser: argparse.ArgumentParser, port: int) -> None:
    """Adds the options for the address of a server."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 is every address of this machine. (default: 127.0.0.1, only this machine)",
    )
    parser.add_argument("--port", type=int, default=port, metavar="N", help=f"Port to listen on. (default: {port})")
    parser.add_argument(
        "--allowed_host",
        action="append",
        default=[],
        metavar="NAME",
        help="Another host name, for example a proxy's, that requests may name; may be repeated. Allowed without this "
        "option are localhost, --host and, if --host is open to other machines, IP addresses and this machine's name.",
    )


def parse(
    config_class: type[Config],
    argv: list[str],
    prog: str,
    description: str,
    default_recipe: str | None,
    extra_options: Mapping[str, str] = MappingProxyType({}),
    defaults_for_check: Mapping[str, str] = MappingProxyType({}),
    log: Log = lambda text: None,
) -> tuple[Config, str | None, dict[str, str]]:
    """Parses a command line into a checked configuration. ``--help`` and ``--print_config`` print and exit.

    Args:
        default_recipe: recipe without ``--config``; None if there is none.
        extra_options: help of the options that are not keys, by usage: ``NAME VALUE``, or ``NAME`` for a flag.
        defaults_for_check: values of keys that the command checks but does not use; files and the command line override
            them.
        log: called with the settings of a recipe that do not apply.

    Returns:
        The configuration, the recipe's name (the stem of the last file), and the values of the extra options, "" for
        flags.

    Raises:
        UserError: a mistake in the files, on the command line, or between values.
        SystemExit: after ``--help`` and ``--print_config``, with status 0.
    """
    keys = keys_of(config_class)
    takes_value = {name: bool(value) for name, _, value in (usage.partition(" ") for usage in extra_options)}
    options = _options(argv, keys, takes_value)
    extra = {name: " ".join(options.pop(name)) for name in takes_value if name in options}
    names = options.pop("config", [] if default_recipe is None else [default_recipe])
    if "help" in options:
        recipe = resolve_config(config_class, names, {}, f"{COMMAND_LINE}: --config", {}, log).config
        label, config_text = ", ".join(Path(name).stem for name in names), _config_text(config_class, default_recipe)
        has_all_keys = options["help"] == ["all"]
        print(config_help(recipe, label, prog, description, config_text, extra_options, has_all_keys), end="")
        raise SystemExit(0)
    print_config = options.pop("print_config", None) is not None
    defaults = _values_on_command_line({key: [value] for key, value in defaults_for_check.items()}, keys)
    values = _values_on_command_line(options, keys)
    resolved = resolve_config(config_class, names, values, f"{COMMAND_LINE}: --config", defaults, log)
    resolved.check(complete=not print_config)
    if print_config:
        print(dump(redact_paths(resolved.config)), end="")
        raise SystemExit(0)
    return resolved.config, resolved.recipe, extra


def _config_text(config_class: type[PretrainConfig | FinetuneConfig], default_recipe: str | None) -> str:
    default = "" if default_recipe is None else f" (default: {default_recipe})"
    return (
        "A YAML file or the name of a recipe. May be repeated: later files override earlier ones, and the keys below "
        f"override all. Recipes: {', '.join(recipe_names(config_class is FinetuneConfig)) or 'none'}.{default}"
    )


def log_to_stderr(text: str) -> None:
    """Prints a message to standard error, with credentials removed."""
    print(redact(text), file=sys.stderr)


def run_command(main: Callable[[list[str]], int]) -> Command:
    """Wraps the main function of a command, so that it can be called from Python or by `run_program`.

    The wrapped function accepts the arguments, or None for the arguments of the process, and returns the exit status.
    It enables the compilation cache.

    Raises:
        UserError: wrong arguments or data, or an error that `system_errors_as_user_errors` converts.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        with system_errors_as_user_errors():
            limit_malloc_arenas()
            use_compilation_cache()
            return main(sys.argv[1:] if argv is None else argv)

    return run


def run_program(main: Command) -> Command:
    """Wraps a command as a program: a UserError is printed as ``error: <sentence>`` and sets status 2.

    A closed pipe ends without a message (status 141), an interrupt with one word (130).
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
                # Python flushes stdout again at exit, and would print another error.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            except KeyboardInterrupt:
                print(INTERRUPTED, file=sys.stderr)
                return STATUS

    return run


class CommandParser(argparse.ArgumentParser):
    """A parser for commands without a configuration; invalid arguments raise UserError."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def parse_arguments(self, argv: Sequence[str]) -> argparse.Namespace:
        """Calls ``parse_args``, but rejects a second ``--``, which Python 3.11 reads as a positional argument.

        Raises:
            UserError: wrong arguments.
        """
        if argv.count("--") > 1:
            self.error("-- is given more than once")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{COMMAND_LINE}: {message}: see {self.prog} --help")


def command_name(command: str) -> str:
    """Returns the name of this program for suggested commands: a script of the clone, or `bert`."""
    return f"python {command}.py" if Path(sys.argv[0]).name in ("pretrain.py", "finetune.py") else f"bert {command}"


def _options(argv: list[str], keys: dict[str, ConfigField], extra: Mapping[str, bool]) -> dict[str, list[str]]:
    """Returns the options of the command line with their values; the last occurrence of an option counts.

    Only list keys accept several values, so that globs work quoted or expanded by the shell. Only ``--config`` keeps
    the values of all occurrences. ``extra`` maps each option that is not a key to whether it needs a value.
    """
    takes_value = {"config": True, **dict.fromkeys(FLAGS, False), **extra}
    options: dict[str, list[list[str]]] = {}
    name: str | None = None
    words: list[str] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            name, equals, value = ("help", "", "") if word == "-h" else word[2:].partition("=")
            name = SHORT_FORMS[name] if SHORT_FORMS.get(name) in keys else name
            if name not in takes_value and key_of(current_key(name, keys), keys) is None:
                raise UserError(f"{COMMAND_LINE}: {unknown_key(name, sibling_keys(name, keys), prefix='--')}")
            if equals and not takes_value.get(name, True) and (name, value) != ("help", "all"):
                raise UserError(f"{COMMAND_LINE}: --{name} takes no value: remove ={value}")
            words = [value] if equals else []
            options[name] = [*options.get(name, ()), words] if name == "config" else [words]
        elif name is None or not takes_value.get(name, True):
            raise UserError(
                f"{COMMAND_LINE}: {word} does not follow a key: write --KEY VALUE (--help=all lists all keys)"
            )
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
    values: dict[str, UserValue] = {}
    for name, words in options.items():
        field = require(key_of(current_key(name, keys), keys), name)
        value = words if len(words) > 1 else _text_or_list(words[0], field)
        add_value(values, name, UserValue(value, COMMAND_LINE, None, f"--{name} {' '.join(words)}"), keys)
    return values


def _text_or_list(text: str, key: ConfigField) -> str | list[str]:
    """Returns a YAML list for '[a.txt]', a list of one for --data.buckets 64, and a text for --data.train a.txt."""
    if not key.takes_list or key.item is not None:
        return text
    if text.startswith("[") and (texts := parse_list(text)) is not None:
        return texts
    return text if str in key.members or text in NULLS else [text]
