"""Commands that describe runs and models: `bert inspect`, `bert compare` and `bert attention`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert.commands.cli.answers import check_output
from bert.commands.cli.arguments import MODEL, CommandParser, log_to_stderr, run_command
from bert.errors import UserError, without_surrogates
from bert.files import local_path
from bert.remote import readable_path
from bert.runs.report import align_columns

INSPECT_DESCRIPTION = """\
Prints the parameters and FLOPs per token of each part of a run or model, its vocabulary, the origin of
its weights, and every file that is damaged, missing, ignored or unsupported, with a fix. The run may be unfinished.
A model on the hub is described by its config.json before its weights are downloaded. For a data file it
prints counts and problems. The exit status is 2 if the source cannot be used."""


@run_command
def inspect_command(argv: list[str]) -> int:
    """Runs `bert inspect` and returns its exit status."""
    parser = CommandParser("bert inspect", INSPECT_DESCRIPTION)
    parser.add_argument("source", type=readable_path, metavar="SOURCE", help=f"{MODEL} Or a corpus or labelled file.")
    parser.add_argument("--length", type=int, metavar="T", help="Tokens per row for FLOPs. (default: the run's)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    arguments = parser.parse_arguments(argv)

    from bert.inference.load import fetch_model
    from bert.runs.metrics_log import to_jsonable

    path, _ = fetch_model(arguments.source)
    facts, error = _facts(path, arguments.source, arguments.length)
    if arguments.json:
        shown = {**facts, "problems": [problem._asdict() for problem in facts["problems"]]}
        print(json.dumps(to_jsonable(shown), indent=2, ensure_ascii=False))
    else:
        sections = (_head, _parts, _vocabulary, _provenance, _sessions) if "model" in facts else (_data,)
        show_problems = (_problems,) if error is None or facts["problems"] else ()
        for section in (*sections, *show_problems):
            if lines := section(facts):
                print("\n".join([*lines, ""]))
    if error is not None:
        raise error
    return 0


def _facts(path: Path, source: str, length: int | None) -> tuple[dict[str, Any], UserError | None]:
    """Returns the facts to print, and the error if the source cannot be used."""
    from bert.analysis.diagnosis import diagnose, diagnose_data
    from bert.analysis.inspection import summarize
    from bert.data.records import SUFFIXES

    if path.is_file():
        return diagnose_data(path)
    if not path.exists() and path.suffix in SUFFIXES:
        raise UserError(f"{path} does not exist: name a file or a folder of data, a run or a model")
    problems = diagnose(path) if path.is_dir() else []
    try:
        return {**summarize(source, length), "problems": problems}, None
    except UserError as error:
        if not problems:
            raise
        return {"source": str(source), "problems": problems}, error


def _data(facts: dict[str, Any]) -> list[str]:
    """Returns counts of a data file; empty for a model that cannot be loaded."""
    if "kind" not in facts:
        return []
    counts = [f"{name} {value:,}" for name, value in facts.items() if isinstance(value, int)]
    lines = [f"{facts['source']}: {facts['kind']}, {', '.join(counts) or 'nothing was read'}"]
    for name, column in facts.get("columns", {}).items():
        lines.append(f"  {name}: {_values(column['values'])}, {column['empty']:,} empty")
    return [*lines, f"  tags: {_values(facts['tags'])}"] if facts.get("tags") else lines


def _values(values: dict[str, int] | None) -> str:
    if values is None:
        return "many values"
    return ", ".join(f"{value[:40]!r} {count:,}" for value, count in values.items())


def _problems(facts: dict[str, Any]) -> list[str]:
    lines = [f"  {state:<12} {problem}" for state, problem in facts["problems"]]
    return ["problems:", *lines] if lines else ["problems: none found"]


def _head(facts: dict[str, Any]) -> list[str]:
    model = facts["model"]
    task = f" for {facts['task']}" if facts["task"] else ""
    step = "" if facts["step"] is None else f", step {facts['step']:,}"
    groups = "" if model["layer_groups"] is None else f" that share the parameters of {model['layer_groups']}"
    title = f"{facts['source']}: {facts['kind']}, {facts['architecture']}{task}{step}"
    if not model["num_hidden_layers"]:
        return [title, f"  a table without layers, {model['hidden_size']} wide"]
    head_size = model["attention_head_size"] or model["hidden_size"] // model["num_attention_heads"]
    return [
        title,
        f"  {model['num_hidden_layers']} layers{groups}, {model['hidden_size']} wide, {model['num_attention_heads']} "
        f"heads of {head_size}, feed-forward {model['intermediate_size']} "
        f"({model['hidden_act']}), {model['max_position_embeddings']} positions, {model['type_vocab_size']} segment(s)",
    ]


def _parts(facts: dict[str, Any]) -> list[str]:
    total, flops = facts["parameters"], facts["flops_per_token"]
    rows = [("part", "parameters", "share", "forward FLOPs per token")]
    for part in facts["parts"]:
        count = part["parameters"]
        rows.append((part["part"], f"{count:,}", f"{count / total:.1%}", _flops(part["flops_per_token"])))
    rows.append(("in all", f"{total:,}", "", _flops(flops["forward"])))
    lines = align_columns(rows)
    if not flops["formula"]:  # a table without products
        return lines
    decoded = f", P = {flops['predictions']} predictions a row" if flops["predictions"] else ""
    lines.append(
        f"  training: {_flops(flops['training'])} FLOPs per token, at T = {flops['sequence_length']} tokens per row"
        f"{decoded}"
    )
    lines += [f"    {part}: {text}" for part, text in flops["formula"].items()]
    lines.append(
        "    multiply-adds count as two; only matrix products count; backward costs twice forward for trained parts"
    )
    return lines


def _vocabulary(facts: dict[str, Any]) -> list[str]:
    vocabulary = facts["vocabulary"]
    lines = [f"vocabulary: {vocabulary['kind']}, {vocabulary['tokens']:,} tokens in {vocabulary['rows']:,} rows"]
    if vocabulary["kind"] == "WordPiece":
        case = {True: "lower-cased", False: "cased", None: "with a custom normalizer"}[vocabulary["lowercase"]]
        marks = {True: ", accents removed", "european": ", Latin, Greek and Cyrillic accents removed"}
        accents = marks.get(vocabulary["strip_accents"], "")
        lines.append(f"  {case}{accents}")
    lines.append("  " + ", ".join(f"{token} {id}" for token, id in vocabulary["special"].items()))
    lines.append(f"  fingerprint {vocabulary['fingerprint'][:16]}")
    return lines


def _provenance(facts: dict[str, Any]) -> list[str]:
    lines = [f"  from {facts['initial_weights']}"] if "initial_weights" in facts else []
    lines += [f"  {line}" for line in facts["read"]]
    return ["weights:", *lines] if lines else []


def _sessions(facts: dict[str, Any]) -> list[str]:
    """Returns one line per start of a run; the files may be from other versions."""
    lines = []
    for session in facts.get("sessions", ()):
        versions, devices, git = (session.get(name) or {} for name in ("versions", "devices", "git"))
        software = ", ".join(f"{name} {versions.get(name)}" for name in ("bert-jax", "jax"))
        commit = f", commit {git.get('commit', '')[:12]}{' with changes' if git.get('changed') else ''}" if git else ""
        lines.append(
            f"  {session.get('started')}  {software}, Python {session.get('python')}, "
            f"{devices.get('count')} x {devices.get('kind')}{commit}"
        )
    return ["sessions:", *lines] if lines else []


def _flops(value: float) -> str:
    """Formats a count with k, M or G; 0 is empty."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value:,.0f}" if value else ""


COMPARE_DESCRIPTION = """\
Plots the held-out and training curves of several runs in one picture, and prints the settings that
differ and the final scores. All runs are pretraining runs, or all are fine-tuning runs; they may be unfinished. The
seeds of a run share one colour, and their scores are printed as mean and standard deviation."""

DEFAULT_OUTPUT = "compare.png"

WIDTH = 160
"""Maximum width of a table if there is no terminal."""


@run_command
def compare_command(argv: list[str]) -> int:
    """Runs `bert compare` and returns its exit status."""
    parser = CommandParser("bert compare", COMPARE_DESCRIPTION)
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


ATTENTION_DESCRIPTION = """\
Shows the attention weights of every layer and head over the tokens of a text or a pair of texts, or,
with --target, the cross-attention from a target to its source. A .html file is a self-contained interactive page, a
.png file a picture of all heads."""

SUFFIXES = (".html", ".png")

GENERATED = "generated"
"""The value of ``--target`` for a target that the model generates."""


@run_command
def attention_command(argv: list[str]) -> int:
    """Runs `bert attention` and returns its exit status."""
    parser = CommandParser("bert attention", ATTENTION_DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=MODEL)
    parser.add_argument("text", metavar="TEXT", help="The text, in quotation marks.")
    parser.add_argument("pair", metavar="PAIR", nargs="?", help="A second text, for models that read pairs.")
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="For an encoder-decoder: show the cross-attention from this target to TEXT; "
        f"{GENERATED}: from the target that the model generates.",
    )
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        required=True,
        help="The page (.html) or the picture (.png) to write.",
    )
    arguments = parser.parse_arguments(argv)
    texts = (arguments.text, arguments.pair or "", arguments.target or "")
    if any(text != without_surrogates(text) for text in texts):
        raise UserError("command line: the text is not UTF-8: pass it as UTF-8")
    output = Path(arguments.output)
    if output.suffix.lower() not in SUFFIXES:
        raise UserError(f"command line: --output {output} ends in neither .html nor .png: name a page or a picture")
    check_output(arguments.output)

    from bert.inference.attention_maps import compute_attention_map, write_html, write_png
    from bert.inference.load import load
    from bert.model.names import has_decoder

    model = load(arguments.run, log_to_stderr)
    text = arguments.text if arguments.pair is None else (arguments.text, arguments.pair)
    target = arguments.target
    if target == GENERATED and has_decoder(model.architecture):
        target = model.generate(arguments.text, details=True, num_samples=1)
    attention = compute_attention_map(model, text, target)
    for name, side in attention.sides.items():
        if side.num_truncated:
            print(f"{side.num_truncated} {name} beyond the model's {len(side)} are cut", file=sys.stderr)
    (write_html if output.suffix.lower() == ".html" else write_png)(attention, output)
    layers, heads, _, _ = attention.weights.shape
    lengths = " and ".join(f"{len(side)} {name}" for name, side in attention.sides.items())
    print(f"{output}: {layers} layers x {heads} heads over {lengths}")
    return 0
