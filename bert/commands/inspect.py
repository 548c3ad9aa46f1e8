"""`bert inspect`: reports the contents and problems of a run, a model or a data file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bert.commands.cli.arguments import MODEL, CommandParser, run_command
from bert.errors import UserError
from bert.remote import readable_path
from bert.runs.report import align_columns

DESCRIPTION = """Prints the parameters and FLOPs per token of each part of a run or model, its vocabulary, the origin of
its weights, and every file that is damaged, missing, ignored or unsupported, with a fix. The run may be unfinished.
For a data file it prints counts and problems. The exit status is 2 if the source cannot be used."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert inspect", DESCRIPTION)
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
        for section in (*sections, _problems):
            if lines := section(facts):
                print("\n".join([*lines, ""]))
    if error is not None:
        raise error
    return 0


def _facts(path: Path, source: str, length: int | None) -> tuple[dict[str, Any], UserError | None]:
    """Returns the facts to print, and the error if the source cannot be used."""
    from bert.analysis.diagnosis import diagnose, diagnose_data
    from bert.analysis.inspection import summarize

    if path.is_file():
        return diagnose_data(path)
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
    return [
        f"{facts['source']}: {facts['kind']}, {facts['architecture']}{task}{step}",
        f"  {model['num_hidden_layers']} layers{groups}, {model['hidden_size']} wide, {model['num_attention_heads']} "
        f"heads of {model['hidden_size'] // model['num_attention_heads']}, feed-forward {model['intermediate_size']} "
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
