"""`bert inspect`: what a run or a model is made of, where it came from and how it was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bert.commands.arguments import MODEL, CommandParser, run_command
from bert.files import local_path

DESCRIPTION = """Tells what a run, or anything else that bert.load takes, is made of: its parts with their parameters
and operations a token, its vocabulary, where its weights came from, and of a run its training and its scores. A run
need not have ended, nor have a checkpoint."""

TITLES = {
    "embeddings/word": "word embeddings",
    "embeddings/position": "position embeddings",
    "embeddings/segment": "segment embeddings",
    "embeddings/norm": "embeddings' LayerNorm",
    "layers/attention": "layers: attention",
    "layers/feed_forward": "layers: feed-forward",
    "layers/norm": "layers: LayerNorm",
    "pooler": "pooler",
    "predictions": "masked-LM head",
    "seq_relationship": "sentence-pair head",
    "classifier": "classifier",
    "qa_outputs": "answer-span head",
}


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert inspect", DESCRIPTION)
    parser.add_argument("source", type=local_path, metavar="RUN_OR_FOLDER", help=MODEL)
    parser.add_argument(
        "--length", type=int, metavar="T", help="Tokens a row to count operations for. (default: the run's)"
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    arguments = parser.parse_args(argv)

    from bert.analysis.inspection import summarize
    from bert.runs.metrics_log import to_jsonable

    facts = summarize(arguments.source, arguments.length)
    if arguments.json:
        print(json.dumps(to_jsonable(facts), indent=2, ensure_ascii=False))
        return 0
    for lines in (_head(facts), _parts(facts), _vocabulary(facts), _origin(facts), _training(facts), _scores(facts)):
        if lines:
            print("\n".join([*lines, ""]))
    return 0


def _head(facts: dict[str, Any]) -> list[str]:
    model = facts["model"]
    task = f" for {facts['task']}" if facts["task"] else ""
    step = "" if facts["step"] is None else f", step {facts['step']:,}"
    return [
        f"{facts['source']}: {facts['kind']}, {facts['architecture']}{task}{step}",
        f"  {model['num_hidden_layers']} layers, {model['hidden_size']} wide, {model['num_attention_heads']} heads of "
        f"{model['hidden_size'] // model['num_attention_heads']}, feed-forward {model['intermediate_size']} "
        f"({model['hidden_act']}), {model['max_position_embeddings']} positions, {model['type_vocab_size']} segment(s)",
    ]


def _parts(facts: dict[str, Any]) -> list[str]:
    total, flops = facts["parameters"], facts["flops_per_token"]
    rows = [("part", "parameters", "share", "forward FLOPs a token")]
    for part in facts["parts"]:
        title = TITLES.get(part["part"], part["part"])
        rows.append(
            (title, f"{part['parameters']:,}", f"{part['parameters'] / total:.1%}", _flops(part["flops_per_token"]))
        )
    rows.append(("in all", f"{total:,}", "", _flops(flops["forward"])))
    lines = _table(rows)
    decoded = f", P = {flops['predictions']} predictions a row" if flops["predictions"] else ""
    lines.append(
        f"  training: {_flops(flops['training'])} FLOPs a token, at T = {flops['sequence_length']} tokens a row"
        f"{decoded}"
    )
    lines += [f"    {TITLES[part]}: {text}" for part, text in flops["formula"].items()]
    lines.append(
        "    a product and its sum are two; backward is twice forward, for what is trained; matrix products alone"
    )
    return lines


def _vocabulary(facts: dict[str, Any]) -> list[str]:
    found = facts["vocabulary"]
    lines = [f"vocabulary: {found['kind']}, {found['pieces']:,} pieces in {found['rows']:,} rows"]
    if found["kind"] == "WordPiece":
        case = {True: "lower-cased", False: "cased", None: "of a normalizer of its own"}[found["lowercase"]]
        accents = ", accents removed" if found["strip_accents"] else ""
        lines.append(
            f"  {case}{accents}; {found['continuing']:,} continue a word, {found['characters']:,} are single "
            f"characters, {found['unused']:,} unused slots"
        )
    lines.append("  " + ", ".join(f"{token} {number}" for token, number in found["special"].items()))
    lines.append(f"  fingerprint {found['fingerprint'][:16]}")
    return lines


def _origin(facts: dict[str, Any]) -> list[str]:
    chain = [f"  from {link}" for link in facts.get("origin", ())]
    return ["weights:", *chain, *(f"  {line}" for line in facts["read"])] if chain or facts["read"] else []


def _training(facts: dict[str, Any]) -> list[str]:
    if "training" not in facts:
        return []
    training, checkpoints = facts["training"], facts["checkpoints"]
    planned = f" of {training['steps']:,}" if training["steps"] else f", {training['epochs']:g} epochs planned"
    head = f"training: step {training['last_step']:,}{planned}"
    if training["tokens_per_second"]:
        head += f", {training['tokens_per_second']:,.0f} tokens a second (median)"
    if training["seconds"] is not None:
        from bert.runs.progress import format_duration

        head += f", {format_duration(training['seconds'])} from its last start to its end"
    steps = ", ".join(f"{step:,}" for step in checkpoints["steps"]) or "none"
    best = "" if checkpoints["kept_as_best"] is None else f" (best: {checkpoints['kept_as_best']:,})"
    lines = [head, f"  checkpoints: {steps}{best}"]
    if training["metrics"]:
        rows = [("metric", "first", "last", "best", "at step")]
        for course in training["metrics"]:
            first, last, best = (course[key] for key in ("first", "last", "best"))
            at = "" if best is None else f"{best['step']:,}"
            rows.append((f"{course['split']} {course['name']}", _value(first), _value(last), _value(best), at))
        lines += _table(rows)
    return lines


def _scores(facts: dict[str, Any]) -> list[str]:
    scores = facts.get("scores")
    if not scores:
        return []
    width = max(map(len, scores))
    return ["scores:"] + [
        f"  {split:{width}}  " + ", ".join(f"{name} {_number(value)}" for name, value in values.items())
        for split, values in scores.items()
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need; the first one to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _value(point: dict[str, Any] | None) -> str:
    return "" if point is None else _number(point["value"])


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "not a number" if value is None else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _flops(value: float) -> str:
    """1,234 as it is; beyond a million in millions, beyond a billion in billions."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.2f} {name}"
    return f"{value:,.0f}" if value else ""
