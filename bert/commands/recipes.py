"""Commands about configurations: `bert recipes` and `bert config`."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator

from bert.commands.cli.arguments import COMMAND_LINE, CommandParser, run_command
from bert.commands.cli.config_help import without_paths
from bert.config import recipe_folder, recipe_header, recipe_names
from bert.config.schema import schema_text
from bert.config.yaml_io import display_path
from bert.errors import UserError

RECIPES_DESCRIPTION = (
    """Lists the recipes for --config, or prints the command, hardware, time and score of the named ones."""
)

CONFIG_DESCRIPTION = """Prints the JSON schema of configuration files (draft 2020-12). An editor completes and checks
the keys of a YAML file whose first line is: # yaml-language-server: $schema=PATH, with the path of the printed
schema."""

GROUPS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "pretrain": (
        (
            "minutes to hours of a CPU",
            (
                "quickstart",
                "paper",
                "hours",
                "student",
                "roberta_mini",
                "modern_mini",
                "falling_masks",
                "better_decay",
                "electra_mini",
                "gpt_tiny",
                "gpt_mini",
            ),
        ),
        ("sizes of BERT", ("tiny", "mini", "small", "medium", "base", "large", "budget24h")),
        (
            "other architectures",
            ("roberta", "albert_base", "electra_small", "mpnet_base", "modern_base", "modern_long", "gpt2"),
        ),
        ("from a published model", ("domain",)),
    ),
    "finetune": (
        (
            "your own data",
            (
                *("classification", "multilabel", "regression", "tagging", "span", "embedding", "reranker"),
                *("few_shot", "summarization", "translation"),
            ),
        ),
        ("published embedding models", ("nomic_embed", "qwen3_embed")),
        ("GLUE", ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")),
        (
            "other benchmarks",
            ("squad", "squad2", "swag", "commonsenseqa", "conll2003", "wnut17", "aeslc", "multi30k"),
        ),
        ("labels from installed packages", ("word_order", "parameters", "which_parameter", "packages")),
    ),
}
"""Command -> title and recipes of each group. Other recipes are listed in a last group."""

OTHERS = "others"
INDENT = " " * 20


@run_command
def config_command(argv: list[str]) -> int:
    """Runs `bert config` and returns its exit status."""
    parser = CommandParser("bert config", CONFIG_DESCRIPTION)
    parser.add_argument("what", metavar="schema", choices=["schema"], help="Print the JSON schema.")
    parser.parse_arguments(argv)
    print(schema_text(), end="")
    return 0


@run_command
def recipes_command(argv: list[str]) -> int:
    """Runs `bert recipes` and returns its exit status."""
    parser = CommandParser("bert recipes", RECIPES_DESCRIPTION)
    parser.add_argument("names", metavar="NAME", nargs="*", help="Recipe whose header is printed in full.")
    names = parser.parse_arguments(argv).names
    if unknown := [name for name in names if name not in recipe_names()]:
        near = difflib.get_close_matches(unknown[0], recipe_names(), 1)
        fix = f"did you mean {near[0]}?" if near else "bert recipes lists all"
        raise UserError(f"{COMMAND_LINE}: {unknown[0]} is not a recipe: {fix}")
    print("\n\n".join(map(_header, names)) if names else "\n".join(_list()))
    return 0


def _list() -> Iterator[str]:
    """Yields the lines of the list: the groups of each command, and the title of each recipe."""
    for command, groups in GROUPS.items():
        yield f"bert {command} --config NAME"
        remaining = recipe_names(command == "finetune")
        for title, names in groups:
            yield from _group(title, [name for name in names if name in remaining])
            remaining = [name for name in remaining if name not in names]
        yield from _group(OTHERS, remaining)
        yield ""
    yield "bert recipes NAME prints command, hardware, time and score of a recipe."


def _group(title: str, names: list[str]) -> Iterator[str]:
    """Yields a title and the recipes below it; lines are wrapped on a terminal. Nothing if there are no recipes."""
    width = shutil.get_terminal_size((10_000, 24)).columns
    if names:
        yield f"\n  {title}:"
    for name in names:
        text = f"    {name:{len(INDENT) - 4}}{without_paths(recipe_header(name)[0])}"
        yield textwrap.fill(text, width, subsequent_indent=INDENT, break_on_hyphens=False)


def _header(name: str) -> str:
    file = recipe_folder() / f"{name}.yaml"
    lines = without_paths("\n".join(recipe_header(name))).splitlines()
    return "\n".join([f"{name} ({display_path(file)})", *(f"  {line}".rstrip() for line in lines)])
