"""`bert predict`: a fine-tuned run's answers for new texts, or its predictions for a split of its data."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert.commands.cli.answers import check_output, open_output, read_inputs, write_answers
from bert.commands.cli.arguments import MODEL, CommandParser, run_command
from bert.commands.cli.config_help import PLACEHOLDERS
from bert.config import FinetuneConfig
from bert.errors import UserError, redact
from bert.files import atomic_directory
from bert.remote import fetch, readable_path, writable, writable_path

if TYPE_CHECKING:
    from bert.inference.pretrained import Pretrained

DESCRIPTION = """Answers for new inputs, one JSON object a line: a label, or labels, and the probability of each, a
score, the answer to a question and its characters in the context, the entities of a text, or the most likely choice.
INPUT is (1) a text file with one input a line: a text; a pair of texts, a question and its context, or a question and
its choices with tabs between; the latter two may also be JSON objects ("question", "context" or "choices"); - is
standard input, whose lines are answered as they come; (2) a .csv, .tsv or .jsonl file, also packed (.gz and so on):
its texts are found by the names of the columns that the run was trained on, and answers keep the id; or (3) the name
of a split of the run's data, such as dev or test: its prediction file is computed again and printed. Long inputs are
read as those of dev were. A tagger also reads objects with a list of words, {"words": [...]}, and columns with a row
for each word. A line without an answer gives {"line", "text", "error"}, and the exit status is 2 at the end. A model
from elsewhere whose files do not name its inputs takes a line as a single text, with a tab as a pair."""


ANSWER_OPTIONS: dict[str, tuple[type, str]] = {
    "null_score_diff_threshold": (
        float,
        "the answer is empty if no answer scores higher than the best answer by more than this. (default: that of the "
        "model; without one there is always an answer)",
    ),
    "doc_stride": (int, "tokens between the starts of the windows over a long context. (default: 128)"),
    "max_answer_length": (int, "longest answer in tokens. (default: 30)"),
    "n_best": (int, 'list this number of the most likely answers under "answers".'),
}


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert predict", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=f"{MODEL} It must be fine-tuned.")
    parser.add_argument(
        "input",
        type=readable_path,
        metavar="INPUT",
        help="File of inputs, - for standard input, or the name of a split.",
    )
    parser.add_argument(
        "--output",
        type=writable_path,
        metavar="PATH",
        help="Write the answers to this file, a split's prediction files to this folder.",
    )
    parser.add_argument("--batch_size", type=int, metavar="N", help="Inputs at once. (default: 32)")
    for name, (kind, text) in ANSWER_OPTIONS.items():
        help_text = f"Of a model that answers questions: {text}"
        parser.add_argument(f"--{name}", type=kind, metavar=PLACEHOLDERS[kind], help=help_text)
    arguments = parser.parse_arguments(argv)
    settings = {name: value for name in ANSWER_OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    is_split = re.fullmatch(r"\w[\w-]*", arguments.input) is not None and not Path(arguments.input).is_file()
    given = [name for name in ("batch_size", *ANSWER_OPTIONS) if getattr(arguments, name) is not None]
    if is_split and given:
        raise UserError(f"command line: --{given[0]} is for inputs; {arguments.input} is read as by the run: remove it")
    if not is_split:
        arguments.input = fetch(arguments.input)
    if arguments.input != "-" and not is_split and not Path(arguments.input).is_file():
        raise _no_input(arguments.input, "a split such as dev")
    check_output(arguments.output)

    from bert.inference.load import load

    model = load(arguments.run, _say)
    if is_split:
        _predict_split(model, arguments.input, arguments.output)
    else:
        _answer_inputs(model, arguments.input, arguments.output, arguments.batch_size or 32, settings)
    return 0


def _say(text: str) -> None:
    print(redact(text), file=sys.stderr)


def _no_input(name: str, splits: str) -> UserError:
    return UserError(
        f"{name} does not exist or is not a file: name a file of inputs, - for standard input, or {splits}"
    )


def _predict_split(model: Pretrained, name: str, output: str | None) -> None:
    """Prints the prediction file of a split, or writes all of its files into the folder ``output``."""
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
            predict_split(model, config, name, draft, _say)
        return
    with tempfile.TemporaryDirectory() as folder, open_output(None) as printed:
        first, *_ = predict_split(model, config, name, Path(folder), _say)
        with first.open("rb") as file:
            shutil.copyfileobj(file, printed)


def _answer_inputs(model: Pretrained, name: str, output: str | None, batch_size: int, settings: dict[str, Any]) -> None:
    """Writes a line for each input. Raises UserError at the end if some have no answer, or for bad settings."""
    task = model.with_answer_settings(settings)
    write_answers(
        name,
        read_inputs(name, task),
        lambda inputs: model.predict([given.given for given in inputs], batch_size, **settings),
        lambda given, answer: [{**given.id, **task.input_fields(given.given), **_fields(answer)}],
        output,
    )


def _fields(answer: Any) -> dict[str, Any]:
    """The fields of an answer, or of the list of its most likely ones."""
    return {"answers": [one._asdict() for one in answer]} if isinstance(answer, list) else answer._asdict()
