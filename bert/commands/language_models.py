"""`bert generate` for language models, and `bert evaluate` for language models and fine-tuned models."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert.commands.cli.answers import check_output, open_output, read_standard_input, write_answers
from bert.commands.cli.arguments import (
    COMMAND_LINE,
    MODEL,
    CommandParser,
    add_adapter_option,
    add_engine_option,
    log_to_stderr,
    run_command,
)
from bert.commands.cli.config_help import PLACEHOLDERS
from bert.config import ColumnsConfig, Decoding, FinetuneConfig
from bert.config.validation import check_fields, help_texts
from bert.config.yaml_io import load_config
from bert.data.input_files import Input
from bert.errors import UserError, without_surrogates
from bert.remote import fetch, readable_path, writable, writable_path

if TYPE_CHECKING:
    from bert.inference.evaluation import Evaluation
    from bert.inference.pretrained import Pretrained

GENERATE_DESCRIPTION = """\
Continues a text with a left-to-right language model, or generates the target of a source with an
encoder-decoder. Decoding is greedy, by sampling (--temperature) or by beam search (--beams). The continuation is
printed without the prompt, up to the end token or --max_tokens. For several continuations (--num_samples), or lines of
standard input (PROMPT is -), each continuation is one JSON object: "prompt", "text" and "score", the sum of the
log-probabilities of its tokens, with --beams divided by the length norm (--length_penalty). An empty prompt is the
start of a text. --from_file reads one prompt of several lines, such as a few examples. An invalid line gives {"line",
"text", "error"}, and the exit status is then 2. Samples depend on --seed, not on --batch_size. An encoder-decoder
defaults to the settings that it was evaluated with."""


@run_command
def generate_command(argv: list[str]) -> int:
    """Runs `bert generate` and returns its exit status."""
    parser = CommandParser("bert generate", GENERATE_DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=f"{MODEL} It must be a language model.")
    add_adapter_option(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="A text to continue, or - for the lines of standard input.")
    whole = "PROMPT names a file: continue its whole text, without the line break at its end."
    parser.add_argument("--from_file", action="store_true", help=whole)
    texts, names = help_texts(Decoding), [field.name for field in fields(Decoding)]
    for field in fields(Decoding):
        kind = int if field.default is None else type(field.default)
        value: dict[str, Any] = {"type": kind, "metavar": PLACEHOLDERS.get(kind, "NAME")}
        default = "" if field.default in (None, False) else f" (default: {field.default})"
        value = {"action": "store_true"} if kind is bool else value
        value = {"action": "append", "metavar": "TEXT"} if field.name == "stop" else value
        # Missing options stay unset, because an encoder-decoder has its own defaults.
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=texts[field.name] + default, **value)
    parser.add_argument(
        "--output", type=writable_path, metavar="PATH", help="Write to this file instead of standard output."
    )
    size = "Number of samples, or of texts with all their beams, per batch. (default: 16)"
    parser.add_argument("--batch_size", type=int, default=16, metavar="N", help=size)
    arguments = parser.parse_arguments(argv)
    options = {name: getattr(arguments, name) for name in names if name in arguments}
    check_fields(f"{COMMAND_LINE}: --", Decoding(**options))
    if arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    if arguments.prompt != without_surrogates(arguments.prompt):
        raise UserError("command line: the prompt is not UTF-8: pass it as UTF-8")
    check_output(arguments.output)
    if arguments.from_file:
        arguments.prompt = _read_prompt(arguments.prompt)

    from bert.inference.load import load

    model = load(arguments.run, log_to_stderr, adapter=arguments.adapter)
    model.require_generation()
    settings = model.complete_decoding(options)
    decoding = Decoding(**settings)
    try:
        decoding.check("--")
    except UserError as error:
        raise UserError(f"{COMMAND_LINE}: {error}") from None

    def answer(inputs: list[Input]) -> list[list[Any]]:
        prompts, numbers = [item.value for item in inputs], [item.line - 1 for item in inputs]
        batching = {"batch_size": arguments.batch_size, "numbers": numbers, "details": True}
        continuations = model.generate(prompts, **batching, **settings)
        return continuations if decoding.num_samples > 1 else [[one] for one in continuations]

    if arguments.prompt == "-" and not arguments.from_file:
        write_answers("-", read_standard_input(str), answer, _lines, arguments.output)
        return 0
    prompt = Input(1, arguments.prompt, arguments.prompt)
    if decoding.num_samples > 1:
        write_answers("the prompt", iter([[prompt]]), answer, _lines, arguments.output)
        return 0
    [[continuation]] = answer([prompt])
    with open_output(arguments.output) as written:
        written.write(continuation.text.encode("utf-8", "replace") + b"\n")
    return 0


def _read_prompt(name: str) -> str:
    """Returns the text of a file without the line break at its end. Raises UserError."""
    file = Path(fetch(name))
    try:
        return re.sub(r"\r?\n\Z", "", file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"--from_file: {name} cannot be read ({error.strerror}): name a text file") from None
    except UnicodeDecodeError:
        raise UserError(f"--from_file: {name} is not UTF-8: save it as UTF-8") from None


def _lines(item: Input, continuations: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": item.value, "text": one.text, "score": one.score} for one in continuations]


EVALUATE_DESCRIPTION = """\
Scores a model on data. (1) A fine-tuned model on labelled rows: its metrics with 95% intervals (percentile bootstrap
over the rows), the scores of each label, the confusion matrix, and the expected calibration error of classifiers.
DATA is a labelled file in the formats of fine-tuning, a folder or hub:ORG/NAME[:CONFIG] (of which --split is read),
or the name of a split of the run's data, such as dev, which gives the scores of the run. Columns are found by their
usual names; otherwise name them as in fine-tuning, for example --data.columns.label stars. The labels of a published
model are matched by name. --compare scores a second model on the same rows, with the interval of the difference
(paired bootstrap) and, for accuracies, McNemar's exact p-value. --output_dir receives results.json, errors.tsv and
pictures. --cross_validate K fine-tunes K models, each without one of K folds of the rows, scores their predictions for
their folds, and lists doubtful labels by confident learning (Northcutt et al. 2021). MODEL is a run whose recipe and
initial model are used, or the initial model itself. All doubtful labels are in doubtful_labels.tsv of --output_dir.
(2) A left-to-right language model on a text: the loss per token in nats, the perplexity (its exponential),
and bits per character and per byte. Only the latter two compare models with different vocabularies. They need a
byte-level vocabulary, because others lose case, spaces or characters. DATA is a text, .jsonl or Parquet file. It is
read verbatim, white space included; .jsonl and Parquet files have one text per row (text). Each token is predicted
once, the first one after the end token. A text with more tokens than the model has positions is read in windows that
start --stride tokens apart: a smaller stride gives more context and takes longer. With model.memory_length, windows do
not overlap, and each is read with the memory of the window before."""


@run_command
def evaluate_command(argv: list[str]) -> int:
    """Runs `bert evaluate` and returns its exit status."""
    parser = CommandParser("bert evaluate", EVALUATE_DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=MODEL)
    add_adapter_option(parser)
    add_engine_option(parser)
    parser.add_argument("data", type=readable_path, metavar="DATA", help="Labelled rows, or a text. See above.")
    parser.add_argument(
        "--split", default="dev", metavar="NAME", help="Split of a folder or a data set of the hub. (default: dev)"
    )
    parser.add_argument("--compare", type=readable_path, metavar="MODEL", help="Score a second model on the same rows.")
    parser.add_argument(
        "--output_dir", type=writable_path, metavar="PATH", help="Write results.json, errors.tsv and pictures here."
    )
    parser.add_argument(
        "--cross_validate", type=int, metavar="K", help="Score by K-fold cross-validation, and list doubtful labels."
    )
    parser.add_argument(
        "--min_confidence",
        type=float,
        metavar="X",
        help="For one label per row: print the share of rows with at least this probability, and their accuracy.",
    )
    stride = (
        "Language models: tokens between the starts of windows. (default: half of the model's positions, or all "
        "of them with model.memory_length)"
    )
    parser.add_argument("--stride", type=int, metavar="N", help=stride)
    parser.add_argument("--batch_size", type=int, metavar="N", help="Rows or windows per batch. (default: 32, or 8)")
    for column in fields(ColumnsConfig):
        parser.add_argument(f"--data.columns.{column.name}", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_arguments(argv)
    for name in ("stride", "batch_size"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"command line: --{name} is {value}: it must be at least 1")
    _check_cross_validation(arguments)
    if arguments.output_dir is not None and Path(arguments.output_dir).is_file():
        raise UserError(f"--output_dir {arguments.output_dir} is a file: name a folder")

    from bert.inference.load import load

    messages: list[str] = []
    model = load(arguments.run, messages.append, adapter=arguments.adapter, engine=arguments.engine)
    is_language_model = model.task is None and model.pooling is None
    reads_text = is_language_model and arguments.cross_validate is None
    texts = _read_texts(arguments.data) if reads_text else []  # an unreadable file is the only message
    for message in messages:
        log_to_stderr(message)
    if arguments.cross_validate is not None:
        _cross_validate(model, arguments)
        return 0
    if is_language_model and arguments.min_confidence is not None:
        raise UserError("command line: --min_confidence is for one label per row, not for language models: remove it")
    if is_language_model:
        _print_text_scores(model, arguments, texts)
        return 0
    if arguments.stride is not None:
        raise UserError(f"command line: --stride is for language models, but {arguments.run} is not one: remove it")
    _evaluate_task(model, arguments)
    return 0


def _check_cross_validation(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that do not fit ``--cross_validate``."""
    if arguments.cross_validate is None:
        return
    if arguments.cross_validate < 2:
        raise UserError(f"command line: --cross_validate is {arguments.cross_validate}: it must be at least 2")
    for name in ("compare", "adapter", "stride", "batch_size", "min_confidence"):
        if getattr(arguments, name) is not None:
            raise UserError(f"command line: --{name} has no effect with --cross_validate: remove it")
    if arguments.engine != "jax":
        raise UserError("command line: --engine has no effect with --cross_validate, which trains with JAX: remove it")


def _cross_validate(model: Pretrained, arguments: argparse.Namespace) -> None:
    """Prints the scores of a cross-validation with its doubtful labels, and writes its files."""
    from bert.training.finetuning.cross_validation import cross_validate

    columns = _columns(arguments)
    settings = {"split": arguments.split, "columns": columns}
    with contextlib.redirect_stdout(sys.stderr):  # the logs of the folds
        evaluation = cross_validate(model, arguments.data, arguments.cross_validate, log_to_stderr, **settings)
    _show(evaluation, arguments)


def _columns(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the columns that the command line names, by key of ``data.columns``."""
    columns = {name: value for name, value in vars(arguments).items() if name.startswith("data.columns.") and value}
    return {name.rpartition(".")[2]: value for name, value in columns.items()}


def _show(evaluation: Evaluation, arguments: argparse.Namespace) -> None:
    print(evaluation)
    if arguments.output_dir is not None:
        with writable(arguments.output_dir) as folder:
            evaluation.write(folder)


def _evaluate_task(model: Pretrained, arguments: argparse.Namespace) -> None:
    """Prints the scores of a fine-tuned model, and writes its files."""
    from bert.inference.evaluation import evaluate, is_split_name
    from bert.inference.load import load

    settings: dict[str, Any] = {"columns": _columns(arguments), "min_confidence": arguments.min_confidence}
    if arguments.compare is not None:
        settings["compare"] = load(arguments.compare, log_to_stderr, engine=arguments.engine)
    if is_split_name(model, arguments.data):
        from bert.training.finetuning.evaluation import Split
        from bert.training.finetuning.results import run_outputs

        config = load_config(FinetuneConfig, Path(model.source) / "config.yaml")
        settings["outputs"] = lambda *split: run_outputs(model, config, Split(*split), log_to_stderr)
    evaluation = evaluate(
        model, arguments.data, split=arguments.split, batch_size=arguments.batch_size or 32, **settings
    )
    _show(evaluation, arguments)


def _read_texts(name: str) -> list[str]:
    """Returns the texts of a file for a language model. Raises UserError."""
    from bert.data.corpus.files import Skipped, read_documents, require_readable_kind

    file = fetch(name)
    if not Path(file).is_file():
        raise UserError(f"{file} does not exist or is not a file: name a file of text")
    require_readable_kind(file)
    skipped = Skipped()
    texts = ["\n".join(document) for document in read_documents(file, skipped, verbatim=True)]
    skipped.log()
    if not any(texts):
        raise UserError(f"{name} holds no text: name a file that does")
    return texts


def _print_text_scores(model: Pretrained, arguments: argparse.Namespace, texts: list[str]) -> None:
    """Prints loss, perplexity and bits of texts under a language model."""
    from bert.tokenizer.library import keeps_spaces

    scores = model.score_texts(texts, stride=arguments.stride, batch_size=arguments.batch_size or 8)
    nats, tokens = -sum(score.log_probability for score in scores), sum(score.num_tokens for score in scores)
    if not tokens:
        raise UserError(f"{arguments.data} has no token in the model's vocabulary: name a file that does")
    print(f"tokens: {tokens:,}")
    print(f"loss: {nats / tokens:.6f}")
    print(f"perplexity: {math.exp(nats / tokens):.6g}")
    lossless = keeps_spaces(model.tokenizer)
    for name, count in (("character", sum(map(len, texts))), ("byte", sum(len(text.encode()) for text in texts))):
        bits = f"{nats / math.log(2) / count:.6f}" if lossless else "none, as the vocabulary is not byte-level"
        print(f"bits per {name}: {bits}")
