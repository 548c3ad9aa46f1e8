"""Options of a sweep. Imports no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

from bert.commands.cli.arguments import COMMAND_LINE
from bert.config.sweep import Space, corners, parse_space_options
from bert.config.yaml_io import ConfigField
from bert.errors import UserError

SWEEP_OPTIONS = {
    "sweep KEY=V1,V2,...": "Train once with each value of a key, each in its own folder in output_dir, and print a "
    "table of the scores. Repeat the option to try all combinations of several keys. The same command resumes.",
    "trials N": "Train with N combinations that Optuna suggests, also from ranges --sweep KEY=LOW..HIGH on a "
    "logarithmic scale, and stop unpromising trials early.",
}


PLACEHOLDERS = {f"--{name}": value for name, value in (usage.split() for usage in SWEEP_OPTIONS)}


class SweepOptions(NamedTuple):
    """Values of the options.

    Attributes:
        space: values by key.
        num_trials: number of trials; None for all combinations.
    """

    space: Space
    num_trials: int | None

    @property
    def any_values(self) -> dict[str, Any]:
        """The values of one trial."""
        return corners(self.space)[0]


def take_sweep_options(argv: list[str], keys: dict[str, ConfigField]) -> tuple[list[str], SweepOptions | None]:
    """Returns the other arguments, and the sweep or None.

    Raises:
        UserError: an option is invalid, or one of its keys is also set.
    """
    groups: list[list[str]] = [[]]  # an option with its values
    for word in argv:
        if word.startswith("--") or word == "-h":
            groups.append([])
        groups[-1].append(word)
    rest: list[str] = []
    given: dict[str, list[str]] = {"--sweep": [], "--trials": []}
    for option, *words in filter(None, groups):
        name, equals, value = option.partition("=")
        if name not in given:
            rest += [option, *words]
        elif not (words := [value] * bool(equals) + words):
            raise UserError(f"{COMMAND_LINE}: {name} has no value: use {name} {PLACEHOLDERS[name]}")
        else:
            given[name] += words
    if not given["--sweep"] and not given["--trials"]:
        return rest, None
    if not given["--sweep"]:
        raise UserError(
            f"{COMMAND_LINE}: --trials is given without --sweep: pass --sweep KEY=V1,V2,... too, or remove it"
        )
    space = parse_space_options(given["--sweep"], keys, f"{COMMAND_LINE}: --sweep")
    for name in space:
        if any(word == f"--{name}" or word.startswith(f"--{name}=") for word in rest):
            raise UserError(f"{COMMAND_LINE}: {name} is set and swept: remove one of the two")
    return rest, SweepOptions(space, _num_trials(given["--trials"]))


def _num_trials(texts: list[str]) -> int | None:
    if not texts:
        return None
    if len(texts) > 1 or not texts[0].isdecimal() or int(texts[0]) < 1:
        raise UserError(f"{COMMAND_LINE}: --trials {' '.join(texts)}: use one whole number, 1 or more")
    return int(texts[0])
