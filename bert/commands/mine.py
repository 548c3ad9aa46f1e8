"""`bert mine`: finds hard negatives for queries whose answers are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bert.commands.cli.answers import check_output, open_output
from bert.commands.cli.arguments import MODEL, CommandParser, run_command
from bert.data.records import read_texts
from bert.errors import redact
from bert.remote import fetch, readable_path, writable_path

DESCRIPTION = """Finds hard negatives: for each row with a query and a positive, the documents that MODEL finds for the
query and that are none of its positives. A document whose score is close to that of the positive may be a right answer
that nobody has marked: a negative is one only if its score is lower by --margin and by --relative_margin times the
size of the positive's score. The rows are written as JSONL with "negatives", a list of texts, and "score", a list with
the score of the positive and of each negative, for the recipes embedding and reranker."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert mine", DESCRIPTION)
    parser.add_argument("model", type=readable_path, metavar="MODEL", help=f"{MODEL} Its embeddings are compared.")
    parser.add_argument(
        "rows", type=readable_path, metavar="ROWS", help="A .jsonl, .csv or .tsv file with query and positive."
    )
    parser.add_argument("--output", type=writable_path, metavar="PATH", help="File for what would be printed.")
    parser.add_argument(
        "--corpus",
        type=readable_path,
        metavar="FILE",
        help='Documents: a text file with one a line, or the column "text" of a .jsonl, .csv or .tsv file. (default: '
        "the positives of all rows)",
    )
    parser.add_argument(
        "--scorer",
        type=readable_path,
        metavar="MODEL",
        help="A cross-encoder, whose scores take the place of the cosines.",
    )
    parser.add_argument(
        "--label",
        default="1",
        metavar="LABEL",
        help="Of a scorer that classifies: whose probability is the score. (default: %(default)s)",
    )
    numbers: dict[str, tuple[type, float, str]] = {
        "num_negatives": (int, 4, "Negatives of a row at most, those of the highest score."),
        "top_k": (int, 50, "Documents found for each query, among which negatives are chosen."),
        "margin": (float, 0.0, "How far the score of a negative is below that of the positive at least."),
        "relative_margin": (float, 0.05, "The same as a share of the positive's score."),
        "batch_size": (int, 32, "Texts at once."),
    }
    for name, (kind, default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=kind, default=default, metavar="N" if kind is int else "X",
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip
    arguments = parser.parse_arguments(argv)
    check_output(arguments.output)
    corpus = None if arguments.corpus is None else read_texts(Path(fetch(arguments.corpus)), "document")

    from bert.inference.load import load

    settings: dict[str, Any] = {name: getattr(arguments, name) for name in numbers}
    model, scorer = load(arguments.model, _say), None if arguments.scorer is None else load(arguments.scorer, _say)
    settings |= {"scorer": scorer, "label": arguments.label, "say": _say}
    rows = model.mine_negatives(fetch(arguments.rows), corpus, **settings)
    with open_output(arguments.output) as written:
        for row in rows:
            written.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    return 0


def _say(text: str) -> None:
    print(redact(text), file=sys.stderr)
