"""`bert recipes`: lists the recipes for ``--config`` and prints their headers."""

from __future__ import annotations

import re

from bert.commands.cli.arguments import COMMAND_LINE, CommandParser, run_command
from bert.config import recipe_folder, recipe_names
from bert.config.yaml_io import display_path
from bert.errors import UserError

DESCRIPTION = """Lists the recipes for --config, or prints the command, hardware, time and score of the named ones."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert recipes", DESCRIPTION)
    parser.add_argument("names", metavar="NAME", nargs="*", help="Recipe whose header is printed in full.")
    names = parser.parse_arguments(argv).names
    if unknown := [name for name in names if name not in recipe_names()]:
        raise UserError(f"{COMMAND_LINE}: {unknown[0]} is not a recipe: use one of {', '.join(recipe_names())}")
    print("\n\n".join(map(_header, names)) if names else _list())
    return 0


def _list() -> str:
    """Returns the recipes of each command with the titles of their headers."""
    parts = []
    for command, for_task in (("pretrain", False), ("finetune", True)):
        lines = [f"  {name:16}{_comments(name)[0]}" for name in recipe_names(for_task)]
        parts.append("\n".join([f"bert {command} --config NAME", *lines]))
    return "\n\n".join([*parts, "bert recipes NAME prints command, hardware, time and score of a recipe."])


def _header(name: str) -> str:
    file = recipe_folder() / f"{name}.yaml"
    return "\n".join([f"{name} ({display_path(file)})", *(f"  {line}".rstrip() for line in _comments(name))])


def _comments(name: str) -> list[str]:
    """Returns the comment lines at the start of a recipe."""
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    header = re.match(r"(#.*\n)*", text)
    return re.sub(r"^# ?", "", header[0] if header else "", flags=re.MULTILINE).splitlines()
