"""Commands that apply a trained model to rows: `bert predict`, `bert embed` and `bert mine`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert.commands.cli.answers import check_output, open_output, read_inputs, write_answers
from bert.commands.cli.arguments import (
    MODEL,
    CommandParser,
    add_adapter_option,
    add_engine_option,
    add_task_option,
    log_to_stderr,
    run_command,
)
from bert.commands.cli.config_help import PLACEHOLDERS
from bert.config import FinetuneConfig
from bert.config.model import LongTextMode
from bert.data.input_files import Input
from bert.data.long_texts import CutTexts, with_long_texts
from bert.data.records import read_texts
from bert.errors import UserError, WarningText
from bert.files import atomic_directory
from bert.model.late_interaction import Role
from bert.remote import fetch, readable_path, writable, writable_path

if TYPE_CHECKING:
    from bert.inference.pretrained import Pretrained
    from bert.tasks.base import Task


PREDICT_DESCRIPTION = """\
Predicts new inputs and prints one JSON object per line: labels with their probabilities, a score,
the answer to a question and its position in the context, the entities of a text, or the most likely choice.
INPUT is one of three. (1) A text file with one input per line, or - for standard input, whose lines are answered as
they arrive. A pair of texts, a question and its context, or a question and its choices are separated by tabs; the
latter two may also be JSON objects ("question", "context" or "choices"). (2) A .parquet file, or a .csv, .tsv or
.jsonl file, also compressed (.gz and others): its columns have the names that the run was trained with, and the
output keeps the id. (3) The name of a split of the run's data, such as dev or test: its prediction file is computed
again and printed. Long inputs are truncated or split as in training. Token classification also reads
{"words": [...]}, and tables with one row per word. An invalid line gives {"line", "text", "error"}, and the exit
status is then 2. If a published model does not declare its inputs, a line with a tab is a pair of texts, and other
lines are single texts."""

OF_ANSWERS = "For question answering:"

ANSWER_OPTIONS: dict[str, tuple[type, str]] = {
    "null_score_diff_threshold": (
        float,
        f"{OF_ANSWERS} the answer is empty if the score of no answer exceeds the best answer's by more than this. "
        "(default: the model's; without one the answer is never empty)",
    ),
    "doc_stride": (int, f"{OF_ANSWERS} tokens between the starts of the windows over a long context. (default: 128)"),
    "max_answer_length": (int, f"{OF_ANSWERS} maximum number of tokens of an answer. (default: 30)"),
    "n_best": (int, f'{OF_ANSWERS} list the N most likely answers under "answers".'),
    "min_confidence": (
        float,
        "For one label per input: the label is null if its probability is lower than this. (default: 0)",
    ),
}


@run_command
def predict_command(argv: list[str]) -> int:
    """Runs `bert predict` and returns its exit status."""
    parser = CommandParser("bert predict", PREDICT_DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=f"{MODEL} It must be fine-tuned.")
    add_adapter_option(parser)
    add_engine_option(parser)
    parser.add_argument(
        "input",
        type=readable_path,
        metavar="INPUT",
        help="A file of inputs, - for standard input, or the name of a split.",
    )
    parser.add_argument(
        "--output",
        type=writable_path,
        metavar="PATH",
        help="Write the answers to this file, or the prediction files of a split to this folder.",
    )
    parser.add_argument("--batch_size", type=int, metavar="N", help="Number of inputs per batch. (default: 32)")
    parser.add_argument(
        "--long_texts",
        choices=get_args(LongTextMode),
        help="For labels and scores: how texts that are too long are read (see data.long_texts). (default: as in "
        "training)",
    )
    for name, (kind, text) in ANSWER_OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=PLACEHOLDERS[kind], help=text)
    arguments = parser.parse_arguments(argv)
    settings = {name: value for name in ANSWER_OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    is_split = re.fullmatch(r"\w[\w-]*", arguments.input) is not None and not Path(arguments.input).is_file()
    of_inputs = ("batch_size", "long_texts", *ANSWER_OPTIONS)
    for_inputs = [name for name in of_inputs if getattr(arguments, name) is not None]
    if is_split and for_inputs:
        raise UserError(f"command line: --{for_inputs[0]} is for inputs, but a split is read as in the run: remove it")
    if not is_split:
        arguments.input = fetch(arguments.input)
    if arguments.input != "-" and not is_split and not Path(arguments.input).is_file():
        raise _no_input(arguments.input, "a split such as dev")
    check_output(arguments.output)

    from bert.inference.load import load

    model = load(arguments.run, log_to_stderr, adapter=arguments.adapter, engine=arguments.engine)
    if is_split:
        _predict_split(model, arguments.input, arguments.output)
    else:
        task = model.with_answer_settings(settings)
        stride = {name: value for name, value in settings.items() if name == "doc_stride"}
        data = with_long_texts(dataclasses.replace(model.data, **stride), arguments.long_texts, task)
        _answer_inputs(model.replace(data=data), task, arguments)
    return 0


def _no_input(name: str, splits: str) -> UserError:
    return UserError(
        f"{name} does not exist or is not a file: name a file of inputs, - for standard input, or {splits}"
    )


def _predict_split(model: Pretrained, name: str, output: str | None) -> None:
    """Prints the prediction file of a split, or writes all its files to the folder ``output``."""
    from bert.config.yaml_io import load_config as load_config
    from bert.training.finetuning.results import predict_split

    task = model.require_task()
    if model.step is None:
        raise _no_input(name, "a split of its data where the model is a run")
    config = load_config(FinetuneConfig, Path(model.source) / "config.yaml")
    there = task.splits(Path(fetch(config.data.dir or ".")))
    splits = ["dev", *(split for split in there if split not in ("train", "dev"))]
    if name not in splits:
        raise _no_input(name, f"a split of the run's data ({', '.join(splits)})")
    if output is not None:
        with writable(output) as path, atomic_directory(path) as draft:
            predict_split(model, config, name, draft, log_to_stderr)
        return
    with tempfile.TemporaryDirectory() as folder, open_output(None) as printed:
        first, *_ = predict_split(model, config, name, Path(folder), log_to_stderr)
        with first.open("rb") as file:
            shutil.copyfileobj(file, printed)


def _answer_inputs(model: Pretrained, task: Task, arguments: Namespace) -> None:
    """Writes one line per input. Raises UserError at the end if inputs were invalid."""
    cut, answered = CutTexts(), [0, 0]

    def answer(inputs: list[Input]) -> list[Any]:
        return model.answers(task, [item.value for item in inputs], arguments.batch_size or 32, cut=cut)

    def lines(item: Input, answer: Any) -> list[dict[str, Any]]:
        answered[0] += getattr(answer, "label", "") is not None
        answered[1] += 1
        return [{**item.id, **task.input_fields(item.value), **_fields(answer)}]

    try:
        write_answers(arguments.input, read_inputs(arguments.input, task), answer, lines, arguments.output)
    finally:
        cut.warn(lambda warning: log_to_stderr(WarningText(warning)))
        if arguments.min_confidence is not None and answered[1]:
            share = answered[0] / answered[1]
            log_to_stderr(
                f"{answered[0]:,} of {answered[1]:,} inputs ({share:.1%}) have a label with a probability of at least "
                f"{arguments.min_confidence:g}; bert evaluate --min_confidence computes their accuracy"
            )


def _fields(answer: Any) -> dict[str, Any]:
    """Returns the fields of an answer, or of a list of answers."""
    return {"answers": [one._asdict() for one in answer]} if isinstance(answer, list) else answer._asdict()


EMBED_DESCRIPTION = """\
Writes the embeddings of texts as a NumPy array of float32, one row per text, for numpy.load, search and FAISS."""


@run_command
def embed_command(argv: list[str]) -> int:
    """Runs `bert embed` and returns its exit status."""
    parser = CommandParser("bert embed", EMBED_DESCRIPTION)
    parser.add_argument("model", type=readable_path, metavar="MODEL", help=MODEL)
    add_adapter_option(parser)
    add_engine_option(parser)
    parser.add_argument(
        "input",
        type=readable_path,
        metavar="INPUT",
        help='A text file with one text per line, or the column "text" of a .jsonl, .parquet, .csv or .tsv file.',
    )
    parser.add_argument("--output", type=writable_path, metavar="FILE.npy", required=True, help="File to write.")
    parser.add_argument("--prompt", choices=get_args(Role), help="Embed queries or documents. (default: neither)")
    add_task_option(parser, "Embed for a task of the model, with its adapter and its prompt")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="Texts per batch. (default: 32)")
    parser.add_argument(
        "--long_texts",
        choices=get_args(LongTextMode),
        help="How texts that are too long are read (see data.long_texts). (default: as in training)",
    )
    arguments = parser.parse_arguments(argv)
    if not arguments.output.endswith(".npy"):
        raise UserError(f"command line: --output {arguments.output} does not end in .npy: name such a file")
    check_output(arguments.output)
    texts = read_texts(Path(fetch(arguments.input)), "text")

    import numpy as np

    from bert.inference.load import load

    model = load(arguments.model, log_to_stderr, adapter=arguments.adapter, engine=arguments.engine)
    if model.pooling_or_default.has_token_vectors:
        raise UserError(f"{model.source} has an embedding per token, which an array does not hold: use embed in Python")
    settings = {name: getattr(arguments, name) for name in ("prompt", "task", "long_texts")}
    vectors = model.embed(texts, arguments.batch_size, **settings)
    with open_output(arguments.output) as written:
        np.save(written, vectors)
    log_to_stderr(f"{arguments.output}: {vectors.shape[0]:,} embeddings of {vectors.shape[1]:,} features")
    return 0


MINE_DESCRIPTION = """\
Finds hard negatives: for each row with a query and a positive, documents that MODEL retrieves for the
query and that are not among its positives. A document whose score is close to the positive's may be a correct answer
without a label. A negative's score is therefore lower by at least --margin plus --relative_margin times the size of
the positive's score. The rows are written as JSONL with "negatives", a list of texts, and "score", the scores of the
positive and of each negative, for the recipes embedding and reranker."""


@run_command
def mine_command(argv: list[str]) -> int:
    """Runs `bert mine` and returns its exit status."""
    parser = CommandParser("bert mine", MINE_DESCRIPTION)
    parser.add_argument("model", type=readable_path, metavar="MODEL", help=f"{MODEL} Its embeddings are compared.")
    add_engine_option(parser)
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
        "--scorer", type=readable_path, metavar="MODEL", help="A cross-encoder whose scores replace the cosines."
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
        load(arguments.model, log_to_stderr, engine=arguments.engine),
        None if arguments.scorer is None else load(arguments.scorer, log_to_stderr, engine=arguments.engine),
    )
    settings |= {"scorer": scorer, "label": arguments.label, "log": log_to_stderr}
    rows = model.mine_negatives(fetch(arguments.rows), corpus, **settings)
    with open_output(arguments.output) as written:
        for row in rows:
            written.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    return 0
