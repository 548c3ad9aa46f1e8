"""`bert mine`: finds hard negatives for pairs of a query and its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bert.commands.cli.answers import check_output, open_output
from bert.commands.cli.arguments import MODEL, CommandParser, log_to_stderr, run_command
from bert.data.records import read_texts
from bert.remote import fetch, readable_path, writable_path

DESCRIPTION = """Finds hard negatives: for each row with a query and a positive, documents that MODEL retrieves for the
query and that are not among its positives. A document whose score is close to the positive's may be a correct answer
without a label. A negative's score is therefore lower by at least --margin plus --relative_margin times the size of
the positive's score. The rows are written as JSONL with "negatives", a list of texts, and "score", the scores of the
positive and of each negative, for the recipes embedding and reranker."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert mine", DESCRIPTION)
    parser.add_argument("model", type=readable_path, metavar="MODEL", help=f"{MODEL} Its embeddings are compared.")
    parser.add_argument(
        "rows", type=readable_path, metavar="ROWS", help="A .jsonl, .csv or .tsv file with query and positive."
    )
    parser.add_argument(
        "--output", type=writable_path, metavar="PATH", help="Write to this file instead of standard output."
    )
    parser.add_argument(
        "--corpus",
        type=readable_path,
        metavar="FILE",
        help='Documents: a text file with one per line, or the column "text" of a .jsonl, .csv or .tsv file. '
        "(default: the positives of all rows)",
    )
    parser.add_argument(
        "--scorer",
        type=readable_path,
        metavar="MODEL",
        help="A cross-encoder whose scores replace the cosines.",
    )
    parser.add_argument(
        "--label",
        default="1",
        metavar="LABEL",
        help="Label whose probability is the score of a classifier as scorer. (default: %(default)s)",
    )
    numbers: dict[str, tuple[type, float, str]] = {
        "num_negatives": (int, 4, "Maximum number of negatives per row; those with the highest scores are chosen."),
        "top_k": (int, 50, "Number of documents retrieved per query, from which negatives are chosen."),
        "margin": (float, 0.0, "Minimum difference between the scores of the positive and a negative."),
        "relative_margin": (float, 0.05, "Minimum difference as a share of the positive's score."),
        "batch_size": (int, 32, "Number of texts per batch."),
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
    model, scorer = (
        load(arguments.model, log_to_stderr),
        None if arguments.scorer is None else load(arguments.scorer, log_to_stderr),
    )
    settings |= {"scorer": scorer, "label": arguments.label, "say": log_to_stderr}
    rows = model.mine_negatives(fetch(arguments.rows), corpus, **settings)
    with open_output(arguments.output) as written:
        for row in rows:
            written.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    return 0
