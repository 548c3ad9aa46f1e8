"""`bert recipes`: the recipes that ``--config`` takes, and what their headers say."""

from __future__ import annotations

import re

from bert.commands.cli.arguments import COMMAND_LINE, CommandParser, run_command
from bert.config import recipe_folder, recipe_names
from bert.config.yaml_io import display_path
from bert.errors import UserError

DESCRIPTION = """Lists the recipes that --config takes. With names: their commands, hardware, times and scores."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert recipes", DESCRIPTION)
    parser.add_argument("names", metavar="NAME", nargs="*", help="Recipe whose whole header is printed.")
    names = parser.parse_arguments(argv).names
    if unknown := [name for name in names if name not in recipe_names()]:
        raise UserError(f"{COMMAND_LINE}: {unknown[0]} is no recipe: use one of {', '.join(recipe_names())}")
    print("\n\n".join(map(_header, names)) if names else _list())
    return 0


def _list() -> str:
    """The recipes of each command, with the first sentences of their headers."""
    groups: dict[str, list[str]] = {"pretrain": [], "finetune": []}
    for name in recipe_names():
        title, script, *_ = _comments(name)
        groups["finetune" if script.startswith("python finetune.py") else "pretrain"].append(f"  {name:16}{title}")
    parts = [f"bert {command} --config NAME\n" + "\n".join(lines) for command, lines in groups.items()]
    return "\n\n".join([*parts, "bert recipes NAME prints command, hardware, time and score of a recipe."])


def _header(name: str) -> str:
    file = recipe_folder() / f"{name}.yaml"
    return "\n".join([f"{name} ({display_path(file)})", *(f"  {line}".rstrip() for line in _comments(name))])


def _comments(name: str) -> list[str]:
    """The lines of comments that a recipe begins with."""
    text = (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    header = re.match(r"(#.*\n)*", text)
    return re.sub(r"^# ?", "", header[0] if header else "", flags=re.MULTILINE).splitlines()
