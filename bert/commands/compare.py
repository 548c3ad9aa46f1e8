"""`bert compare`: shows the curves, settings and scores of several runs side by side."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bert.commands.cli.arguments import CommandParser, run_command
from bert.errors import UserError
from bert.files import local_path
from bert.runs.report import align_columns

DESCRIPTION = """Plots the held-out and training curves of several runs in one picture, and prints the settings that
differ and the final scores. All runs are pretraining runs, or all are fine-tuning runs; they may be unfinished. The
seeds of a run share one colour, and their scores are printed as mean and standard deviation."""

DEFAULT_OUTPUT = "compare.png"
WIDTH = 160
"""Maximum width of a table if there is no terminal."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert compare", DESCRIPTION)
    parser.add_argument("runs", type=local_path, metavar="RUN", nargs="+", help="Folder of a run.")
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE.png",
        default=DEFAULT_OUTPUT,
        help="Picture to write; a picture of an earlier comparison is replaced. (default: %(default)s)",
    )
    arguments = parser.parse_arguments(argv)
    output, paths = Path(arguments.output), [Path(run) for run in arguments.runs]
    _check_output(output)

    from bert.analysis import comparison
    from bert.runs.plots import plot_comparison

    runs = comparison.read_runs(paths)
    if len(runs) < len(paths):
        print("a run that is named twice is shown once\n")
    members = list(runs.values())
    for title, rows in (
        ("settings that differ", comparison.setting_rows(members)),
        ("held-out scores", comparison.score_rows(members)),
    ):
        if rows:
            print("\n".join([*_table(title, list(runs), rows), ""]))
    if different := comparison.held_out_differences(members):
        print(f"held-out losses and scores are not on the same rows, because of {', '.join(different)}\n")
    drawn = plot_comparison(output, comparison.curves(runs))
    print(f"{output}: {', '.join(runs)}" if drawn else "no picture: no run has been evaluated yet")
    return 0


def _check_output(output: Path) -> None:
    """Raises UserError if the plot cannot be written, or would replace a file that is not a comparison."""
    from bert.runs.plots import is_comparison

    if output.suffix.lower() != ".png":
        raise UserError(f"command line: --output {output} does not end in .png: pass the path of a picture")
    if output.exists() and not (output.is_file() and is_comparison(output)):
        raise UserError(f"{output} exists already and is not a picture of bert compare: pass another --output")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a folder: pass another --output")


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Builds a table with one column per run or, if the terminal is too narrow, one line per value."""
    lines = align_columns([(title, *names), *rows])
    if max(map(len, lines)) <= shutil.get_terminal_size((WIDTH, 24)).columns:
        return [lines[0].removeprefix("  "), *lines[1:]]
    width = max(map(len, names))
    return [title] + [
        line
        for key, *values in rows
        for line in (f"  {key}", *(f"    {name:{width}}  {value}" for name, value in zip(names, values, strict=True)))
    ]
