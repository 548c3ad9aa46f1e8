"""`bert glue-zip`: collects the predictions of several runs as one submission to gluebenchmark.com."""

from __future__ import annotations

import zipfile
from pathlib import Path

from bert.commands.cli.arguments import CommandParser, run_command
from bert.errors import UserError
from bert.files import atomic_write, local_path
from bert.runs.metrics_log import read_results
from bert.tasks.sequence_classification import SUBMISSIONS

DESCRIPTION = """Collects the test predictions of fine-tuning runs on GLUE in one zip for gluebenchmark.com. For a run
with several seeds, the best seed on dev is used."""

HEADER = "index\tprediction"


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert glue-zip", DESCRIPTION)
    parser.add_argument(
        "runs", type=local_path, metavar="RUN", nargs="+", help="Folder of a fine-tuning run; one per task."
    )
    parser.add_argument("output", type=local_path, metavar="OUT.zip", help="The zip to write.")
    arguments = parser.parse_arguments(argv)
    output = Path(arguments.output)
    if output.suffix != ".zip":
        raise UserError(f"{output} does not end in .zip: name the zip to write after the runs")
    if output.exists():
        raise UserError(f"{output} exists already: name another one or remove it")
    files = collect([Path(run) for run in arguments.runs])
    with atomic_write(output) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            # A fixed date, so that equal predictions produce equal bytes.
            archive.writestr(zipfile.ZipInfo(name), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    print(f"{output}: {', '.join(sorted(files))}")
    if missing := [name for name in SUBMISSIONS if name not in files]:
        print(f"missing for a complete submission: {', '.join(missing)}")
    return 0


def collect(runs: list[Path]) -> dict[str, Path]:
    """Returns prediction files by their official names.

    Raises:
        UserError: a run has no predictions for the leaderboard, two runs have the same task, or a file is invalid.
    """
    files: dict[str, Path] = {}
    for run in runs:
        folder = _best_seed(run) / "predictions"
        predictions = [folder / name for name in SUBMISSIONS if (folder / name).is_file()]
        if not predictions:
            raise UserError(
                f"{folder} holds none of GLUE's prediction files: name runs that have ended, on data with a test file"
            )
        for path in predictions:
            if path.name in files:
                raise UserError(f"{path.name} is in {files[path.name].parent} and in {folder}: name one run a task")
            with path.open(encoding="utf-8", errors="replace") as file:
                if file.readline().rstrip("\n") != HEADER:
                    raise UserError(f"{path}, line 1: not {HEADER!r}: let the run write it again")
            files[path.name] = path
    return files


def _best_seed(run: Path) -> Path:
    """Returns the run or its best seed. Raises UserError if there is no run."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} holds no run (no config.yaml): name the folder of a fine-tuning run")
    best = (read_results(run) or {}).get("best_seed")
    return run if best is None else run / f"seed-{best}"
