"""Commands for public benchmarks: `bert benchmark` and `bert glue-zip`."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bert.commands.cli.arguments import MODEL, CommandParser, log_to_stderr, parse, run_command
from bert.config import FinetuneConfig, PretrainConfig
from bert.errors import LOGGER, UserError, require
from bert.files import atomic_write, local_path
from bert.remote import is_url, readable_path
from bert.runs.metrics_log import read_results, write_results
from bert.tasks.sequence_classification import SUBMISSIONS

if TYPE_CHECKING:
    from bert.training.runs import Run

DESCRIPTION = """Fine-tunes a model on the tasks of GLUE, each as a run in its own folder of output_dir. It prints
the scores on dev next to the published ones of BERT-base, and writes results.json and, if there are test files,
submission.zip for gluebenchmark.com. The same command continues an interrupted benchmark. The keys below apply to all
tasks; num_seeds is 3 unless it is given."""

OPTIONS = {
    "tasks NAMES": "Tasks to run, separated by commas. Defaults to all tasks with a folder in data.dir.",
    "follow RUN": "Pretraining run whose checkpoints are scored while it trains, in place of init. Scores are in "
    "transfer.jsonl and curves.png in RUN; the best checkpoint is kept, and named in results.json. The command ends "
    "when the run has ended, and continues where it was interrupted.",
}

FOLLOWING_DESCRIPTION = """Fine-tunes the checkpoints of a pretraining run on recipes, as transfer_every does, in
another process."""

SCORING_DESCRIPTION = """Scores the embeddings of a model with the package mteb, which downloads the data of its tasks.
Results are kept in output_dir, and are not measured again. bert benchmark glue fine-tunes on all tasks of GLUE instead,
with --follow RUN from the checkpoints of a run while it trains, and bert benchmark transfer --follow RUN fine-tunes
these on any recipes: pass glue --help or transfer --help."""

NUM_SEEDS = 3
"""Default number of seeds per task."""


class GlueTask(NamedTuple):
    """A task of GLUE.

    Attributes:
        folder: name in GLUE's archive.
        metric: metric of the published score.
        published: BERT-base on the test set, times 100 (Devlin et al. 2019, table 1); None for WNLI, which the paper
            leaves out.
    """

    folder: str
    metric: str
    published: float | None


GLUE = {
    "cola": GlueTask("CoLA", "matthews", 52.1),
    "sst2": GlueTask("SST-2", "accuracy", 93.5),
    "mrpc": GlueTask("MRPC", "f1", 88.9),
    "stsb": GlueTask("STS-B", "spearman", 85.8),
    "qqp": GlueTask("QQP", "f1", 71.2),
    "mnli": GlueTask("MNLI", "accuracy", 84.6),
    "qnli": GlueTask("QNLI", "accuracy", 90.5),
    "rte": GlueTask("RTE", "accuracy", 66.4),
    "wnli": GlueTask("WNLI", "accuracy", None),
}
"""Recipe -> task."""

BENCHMARKS = ("glue", "transfer", "mteb", "nanobeir")


@run_command
def benchmark_command(argv: list[str]) -> int:
    """Runs `bert benchmark` and returns its exit status."""
    if argv and argv[0] == "glue":
        return run_glue(argv[1:])
    if argv and argv[0] == "transfer":
        return run_transfer(argv[1:])
    parser = CommandParser("bert benchmark", SCORING_DESCRIPTION)
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=f"The benchmark: {', '.join(BENCHMARKS)}.")
    parser.add_argument("model", type=readable_path, metavar="MODEL", help=f"{MODEL} Its embeddings are scored.")
    parser.add_argument(
        "--tasks", metavar="NAMES", help="Names of tasks of mteb, separated by commas, or the name of one benchmark."
    )
    parser.add_argument(
        "--output_dir", type=local_path, metavar="FOLDER", help="Folder of the results. (default: runs/NAME)"
    )
    arguments = parser.parse_arguments(argv)
    if arguments.name == "nanobeir" and arguments.tasks:
        raise UserError("command line: --tasks is for mteb: remove it, or write bert benchmark mteb")
    tasks = "NanoBEIR" if arguments.name == "nanobeir" else arguments.tasks
    if tasks is None:
        raise UserError("command line: mteb needs --tasks: pass names such as STSBenchmark,SciFact or NanoBEIR")
    run_mteb(arguments.model, tasks.split(","), Path(arguments.output_dir or f"runs/{arguments.name}"))
    return 0


def run_glue(argv: list[str]) -> int:
    """Fine-tunes on each task, prints the table and writes results.json and submission.zip.

    Raises:
        UserError: an argument is invalid, or the data of no task is there.
    """
    from bert.runtime.interrupts import Interrupted
    from bert.training.launch import RunRequest, start_or_resume

    configs, followed = glue_configs(argv)
    if followed is not None:
        return follow_run(followed, lambda config: configs)
    folder = Path(next(iter(configs.values())).output_dir or "").parent
    runs: dict[str, Run] = {}
    try:
        for number, (name, config) in enumerate(configs.items(), 1):
            LOGGER.info(f"{name}: task {number} of {len(configs)}")
            runs[name] = start_or_resume(RunRequest(config), repeat=False)
    except Interrupted as stop:
        print(f"interrupted and saved at step {stop.step:,} of {name}; the same command continues the benchmark")
        return stop.status
    scores = {name: glue_scores(name, run.results) for name, run in runs.items()}
    published = [row["score"] for row in scores.values() if row["published"] is not None]
    results = {"benchmark": "glue", "init": next(iter(configs.values())).init, "tasks": scores}
    write_results(folder, results | ({"mean": statistics.fmean(published)} if published else {}))
    print("\n".join(glue_table(scores)))
    if finished := [run.path for run in runs.values() if submission_files(run.path)]:
        write_submission(collect(finished), folder / "submission.zip")
    return 0


def run_transfer(argv: list[str]) -> int:
    """Fine-tunes the checkpoints of a run on recipes.

    Raises:
        UserError: an argument is invalid, or a recipe or its data cannot be used.
    """
    parser = CommandParser("bert benchmark transfer", FOLLOWING_DESCRIPTION)
    parser.add_argument("--follow", type=local_path, metavar="RUN", required=True, help=OPTIONS["follow RUN"])
    parser.add_argument(
        "--tasks", metavar="NAMES", help="Recipes or YAML files, separated by commas. Defaults to transfer of the run."
    )
    arguments = parser.parse_arguments(argv)

    def recipes(config: PretrainConfig) -> dict[str, FinetuneConfig]:
        from bert.training.pretraining.transfer import transfer_config, transfer_names

        config = dataclasses.replace(config, transfer=arguments.tasks or config.transfer, output_dir=arguments.follow)
        if config.transfer is None:
            raise UserError(f"command line: {arguments.follow} has no transfer: name recipes with --tasks")
        return {name: transfer_config(config, name) for name in transfer_names(config)}

    return follow_run(arguments.follow, recipes)


def follow_run(run: str, recipes: Callable[[PretrainConfig], Mapping[str, FinetuneConfig]]) -> int:
    """Scores the checkpoints of a run, and prints the scores of each and the table of the best one.

    Args:
        recipes: configuration of the run -> configurations of the tasks by name.
    """
    from bert.runs.report import align_columns
    from bert.runtime.interrupts import Interrupted
    from bert.training.pretraining.checkpoint_scores import follow, read_config, score_rows

    try:
        lines = follow(Path(run), recipes(read_config(Path(run))), LOGGER.info)
    except Interrupted as stop:
        print("interrupted; the same command continues the benchmark")
        return stop.status
    if not lines:
        raise UserError(f"{run} has no checkpoints, and no process trains it: resume the run, then follow it")
    print("\n".join(align_columns(score_rows(lines))))
    return 0


def glue_configs(argv: Sequence[str]) -> tuple[dict[str, FinetuneConfig], str | None]:
    """Returns the configuration of each task's run by its recipe, and the run to follow. ``--help`` prints and exits.

    Raises:
        UserError: a key, a task or the data is wrong.
    """
    seeds = [] if any(word.partition("=")[0] == "--num_seeds" for word in argv) else ["--num_seeds", str(NUM_SEEDS)]

    def parsed(recipe: str, *keys: str) -> tuple[FinetuneConfig, str | None, dict[str, str]]:
        words = ["--config", recipe, *argv, *seeds, *keys]
        return parse(FinetuneConfig, words, "bert benchmark glue", DESCRIPTION, None, OPTIONS)

    if any(word.partition("=")[0] == "--follow" for word in argv):
        for key in ("--init", "--output_dir"):
            if any(word.partition("=")[0] == key for word in argv):
                raise UserError(f"command line: --follow scores the checkpoints of its run: remove {key}")
        seeds += ["--init", "RUN"]  # replaced by each checkpoint
    first, _, options = parsed("cola")
    names = [name.strip() for name in options["tasks"].split(",")] if "tasks" in options else list(GLUE)
    if unknown := [name for name in names if name not in GLUE]:
        raise UserError(f"command line: --tasks {unknown[0]} is not a task of GLUE: choose from {', '.join(GLUE)}")
    data, output = require(first.data.dir, "data.dir"), local_path(first.output_dir or "runs/glue", "output_dir")
    is_hub = data.startswith("hub:") or is_url(data)
    folders = {name: data if is_hub else str(Path(data) / GLUE[name].folder) for name in names}
    missing = {name: path for name, path in folders.items() if not is_hub and not Path(path).is_dir()}
    if missing and ("tasks" in options or len(missing) == len(names)):
        raise UserError(f"{next(iter(missing.values()))} does not exist: pass GLUE's folder as --data.dir")
    if missing:
        LOGGER.info(f"left out, because {data} has no folder for them: {', '.join(missing)}")
    configs = {
        name: parsed(name, "--data.dir", path, "--output_dir", str(Path(output) / name))[0]
        for name, path in folders.items()
        if name not in missing
    }
    return configs, local_path(options["follow"], "--follow") if "follow" in options else None


def glue_scores(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a task's row of the table: scores times 100 on dev, of the checkpoint that is best on dev."""
    task, seeds = GLUE[name], "runs" in results
    dev = results["dev"]["mean"] if seeds else results["dev"]
    sample = results["runs"][0] if seeds else results
    baseline = sample.get(sample.get("baseline") or "", {}).get(task.metric)
    return {
        "metric": task.metric,
        "score": 100 * dev[task.metric],
        "standard_deviation": 100 * results["dev"]["standard_deviation"][task.metric] if seeds else None,
        "baseline": None if baseline is None else 100 * baseline,
        "published": task.published,
    }


def glue_table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Formats the scores of all tasks in columns, with the means over the tasks that the paper has."""
    from bert.runs.report import align_columns

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    columns = ("score", "standard_deviation", "baseline", "published")
    rows = [("task", "metric", "dev", "+-", "majority", "BERT-base, test set (Devlin et al. 2019)")]
    rows += [(name, row["metric"], *(text(row[column]) for column in columns)) for name, row in scores.items()]
    counted = [row for row in scores.values() if row["published"] is not None]
    if len(counted) > 1:
        means = [statistics.fmean(row[column] for row in counted) for column in ("score", "published")]
        rows.append((f"mean of {len(counted)}", "", text(means[0]), "", "", text(means[1])))
    return align_columns(rows)


def run_mteb(model: str, names: Sequence[str], output_dir: Path) -> None:
    """Scores a model's embeddings on tasks of mteb, and prints the main score of each.

    Raises:
        UserError: mteb is not installed, a name is unknown, or the model has no embeddings.
    """
    if importlib.util.find_spec("mteb") is None:
        raise UserError("mteb is not installed: pip install 'mteb>=2'")
    import mteb

    from bert.inference.load import load
    from bert.inference.mteb_encoder import MtebEncoder
    from bert.runs.report import align_columns

    try:
        tasks = mteb.get_tasks(tasks=list(names)) if len(names) > 1 else _one(mteb, names[0])
    except KeyError as error:
        raise UserError(f"command line: --tasks: {error.args[0]}") from None
    encoder = MtebEncoder(load(model, log_to_stderr))
    cache = mteb.ResultCache(output_dir)
    found = mteb.evaluate(encoder, tasks, cache=cache, co2_tracker=False).task_results
    scores = [100 * result.get_score() for result in found]
    rows = [
        ("task", "main score"),
        *((result.task_name, f"{score:.1f}") for result, score in zip(found, scores, strict=True)),
    ]
    if len(scores) > 1:
        rows.append((f"mean of {len(scores)}", f"{statistics.fmean(scores):.1f}"))
    print("\n".join(align_columns(rows)))


def _one(mteb: Any, name: str) -> Any:
    """Returns the tasks of a benchmark, or the task of this name."""
    try:
        return mteb.get_benchmark(name).tasks
    except KeyError:
        return mteb.get_tasks(tasks=[name])


GLUE_ZIP_DESCRIPTION = """\
Collects the test predictions of fine-tuning runs on GLUE in one zip for gluebenchmark.com. For a run
with several seeds, the best seed on dev is used."""

HEADER = "index\tprediction"


@run_command
def glue_zip_command(argv: list[str]) -> int:
    """Runs `bert glue-zip` and returns its exit status."""
    parser = CommandParser("bert glue-zip", GLUE_ZIP_DESCRIPTION)
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
    write_submission(collect([Path(run) for run in arguments.runs]), output)
    return 0


def write_submission(files: Mapping[str, Path], output: Path) -> None:
    """Writes prediction files into a zip and prints their names, and those that a complete submission lacks."""
    with atomic_write(output) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            # A fixed date, so that equal predictions produce equal bytes.
            archive.writestr(zipfile.ZipInfo(name), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    print(f"{output}: {', '.join(sorted(files))}")
    if missing := [name for name in SUBMISSIONS if name not in files]:
        print(f"missing for a complete submission: {', '.join(missing)}")


def collect(runs: list[Path]) -> dict[str, Path]:
    """Returns prediction files by their official names.

    Raises:
        UserError: a run has no predictions for the leaderboard, two runs have the same task, or a file is invalid.
    """
    files: dict[str, Path] = {}
    for run in runs:
        predictions = submission_files(run)
        if not predictions:
            raise UserError(
                f"{_best_seed(run) / 'predictions'} holds none of GLUE's prediction files: name runs that have ended, "
                "on data with a test file"
            )
        for path in predictions:
            if path.name in files:
                raise UserError(
                    f"{path.name} is in {files[path.name].parent} and in {path.parent}: name one run a task"
                )
            with path.open(encoding="utf-8", errors="replace") as file:
                if file.readline().rstrip("\n") != HEADER:
                    raise UserError(f"{path}, line 1: not {HEADER!r}: let the run write it again")
            files[path.name] = path
    return files


def submission_files(run: Path) -> list[Path]:
    """Returns the prediction files for the leaderboard of a run or its best seed."""
    folder = _best_seed(run) / "predictions"
    return [folder / name for name in SUBMISSIONS if (folder / name).is_file()]


def _best_seed(run: Path) -> Path:
    """Returns the run or its best seed. Raises UserError if there is no run."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} holds no run (no config.yaml): name the folder of a fine-tuning run")
    best = (read_results(run) or {}).get("best_seed")
    return run if best is None else run / f"seed-{best}"
