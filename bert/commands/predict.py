"""`bert predict`: a fine-tuned run's answers for new texts, or its predictions for a split of its data."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bert.commands.arguments import MODEL, CommandParser, run_command
from bert.config import FinetuneConfig
from bert.errors import UserError
from bert.files import atomic_directory, atomic_write, local_path
from bert.inference.new_inputs import Input, read_inputs

if TYPE_CHECKING:
    from bert.inference.pretrained import Pretrained

DESCRIPTION = """Answers for new inputs, one JSON object a line: a label and the probability of each, a score, the
answer to a question and its characters in the context, the entities of a text, or the most likely choice. INPUT is
(1) a text file with one input a line: a text; a pair of texts, a question and its context, or a question and its
choices with tabs between; the latter two may also be JSON objects ("question", "context" or "choices"); - is standard
input, whose lines are answered as they come; (2) a .csv, .tsv or .jsonl file, also packed (.gz and so on): its texts
are found by the names of the columns that the run was trained on, and answers keep the id; or (3) the name of a split
of the run's data, such as dev or test: its prediction file is computed again and printed. Long inputs are read as
those of dev were. A line without an answer gives {"line", "text", "error"}, and the exit status is 2 at the end. A
model from elsewhere whose files do not name its inputs takes each line as a single text."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert predict", DESCRIPTION)
    parser.add_argument("run", type=local_path, metavar="RUN", help=f"{MODEL} It must be fine-tuned.")
    parser.add_argument(
        "input",
        type=local_path,
        metavar="INPUT",
        help="File of inputs, - for standard input, or the name of a split.",
    )
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="PATH",
        help="Write the answers to this file, a split's prediction files to this folder.",
    )
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="Inputs at once. (default: 32)")
    arguments = parser.parse_arguments(argv)
    if arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    is_split = arguments.input != "-" and arguments.input.isidentifier() and not Path(arguments.input).exists()
    if arguments.input != "-" and not is_split and not Path(arguments.input).is_file():
        raise _no_input(arguments.input, "a split such as dev")
    if arguments.output and Path(arguments.output).exists():
        raise UserError(f"{arguments.output} exists already: name another --output or remove it")

    from bert.inference.loading import load

    model = load(arguments.run, _say)
    if is_split:
        _predict_split(model, arguments.input, arguments.output)
    else:
        _answer_inputs(model, arguments.input, arguments.output, arguments.batch_size)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _no_input(name: str, splits: str) -> UserError:
    return UserError(
        f"{name} does not exist or is not a file: name a file of inputs, - for standard input, or {splits}"
    )


def _predict_split(model: Pretrained, name: str, output: str | None) -> None:
    """Prints the prediction file of a split, or writes all of its files into the folder ``output``."""
    from bert.config.yaml_io import load_config as load_config
    from bert.training.finetuning import predict_split

    task = model.require_task()
    if model.step is None:
        raise _no_input(name, "a split of its data where the model is a run")
    config = load_config(FinetuneConfig, Path(model.source) / "config.yaml")
    splits = ["dev", *(split for split in task.splits(Path(config.data.dir or ".")) if split not in ("train", "dev"))]
    if name not in splits:
        raise _no_input(name, f"a split of the run's data ({', '.join(splits)})")
    if output is not None:
        with atomic_directory(Path(output)) as draft:
            predict_split(model, config, name, draft, _say)
        return
    with tempfile.TemporaryDirectory() as folder, _output(None) as printed:
        first, *_ = predict_split(model, config, name, Path(folder), _say)
        with first.open("rb") as file:
            shutil.copyfileobj(file, printed)


def _answer_inputs(model: Pretrained, name: str, output: str | None, batch_size: int) -> None:
    """Writes a line for each input. Raises UserError at the end if some have no answer."""
    task = model.require_task()
    count, failed, first = 0, 0, ""
    with _output(output) as written:
        for inputs in read_inputs(name, task):
            for given, answer in zip(inputs, _answers(model, inputs, batch_size), strict=True):
                count += 1
                if isinstance(answer, str):
                    failed, first = failed + 1, first or f"line {given.line}: {answer}"
                    line = given._replace(error=answer).failed()
                else:
                    line = {**given.id, **task.input_fields(given.given), **answer._asdict()}
                written.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            written.flush()
    if failed:
        source = "standard input" if name == "-" else name
        raise UserError(f"{source}: {failed} of {count} inputs have no answer, the first on {first}")


def _answers(model: Pretrained, inputs: list[Input], batch_size: int) -> list[Any]:
    """An answer for each input, or the error message for it."""
    answers: list[Any] = [given.error for given in inputs]
    indices = [i for i, given in enumerate(inputs) if given.error is None]
    try:
        predictions = model.predict([inputs[i].given for i in indices], batch_size)
    except UserError:  # one of them does not fit: each by itself
        predictions = [_answer(model, inputs[i].given) for i in indices]
    for i, prediction in zip(indices, predictions, strict=True):
        answers[i] = prediction
    return answers


def _answer(model: Pretrained, given: Any) -> Any:
    try:
        return model.predict([given], 1)[0]
    except UserError as error:
        return str(error)


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears whole or not at all."""
    if name is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with atomic_write(Path(name)) as partial, partial.open("wb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror}): name another --output") from None
