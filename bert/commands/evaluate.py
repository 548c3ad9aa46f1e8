"""`bert evaluate`: measures the perplexity of a text under a left-to-right language model."""

from __future__ import annotations

import math
from pathlib import Path

from bert.commands.cli.arguments import MODEL, CommandParser, log_to_stderr, run_command
from bert.errors import UserError
from bert.remote import fetch, readable_path

DESCRIPTION = """Measures how well a left-to-right language model predicts a text: the loss per token in nats, the
perplexity (its exponential), and bits per character and per byte. Only the latter two compare models with different
vocabularies. They need a byte-level vocabulary, because others lose case, spaces or characters. FILE is read verbatim,
white space included; .jsonl and Parquet files have one text per row (text). Each token is predicted once, the first
one after the end token. A text with more tokens than the model has positions is read in windows that start --stride
tokens apart: a smaller stride gives more context and takes longer."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert evaluate", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=f"{MODEL} It must be a language model.")
    parser.add_argument(
        "file",
        type=readable_path,
        metavar="FILE",
        help="A text, .jsonl or Parquet file, also compressed (.gz and others).",
    )
    stride = "Tokens between the starts of windows. (default: half of the model's positions)"
    parser.add_argument("--stride", type=int, metavar="N", help=stride)
    parser.add_argument(
        "--batch_size", type=int, default=8, metavar="N", help="Number of windows per batch. (default: 8)"
    )
    arguments = parser.parse_arguments(argv)
    for name in ("stride", "batch_size"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"command line: --{name} is {value}: it must be at least 1")
    file = fetch(arguments.file)
    if not Path(file).is_file():
        raise UserError(f"{file} does not exist or is not a file: name a file of text")

    from bert.data.corpus.files import Skipped, read_documents, require_readable_kind
    from bert.inference.load import load
    from bert.tokenizer.library import keeps_spaces

    require_readable_kind(file)
    skipped = Skipped()
    texts = ["\n".join(document) for document in read_documents(file, skipped, verbatim=True)]
    skipped.log()
    if not any(texts):
        raise UserError(f"{arguments.file} holds no text: name a file that does")
    model = load(arguments.run, log_to_stderr)
    scores = model.score_texts(texts, stride=arguments.stride, batch_size=arguments.batch_size)
    nats, tokens = -sum(score.log_probability for score in scores), sum(score.num_tokens for score in scores)
    if not tokens:
        raise UserError(f"{arguments.file} has no token in the model's vocabulary: name a file that does")
    print(f"tokens: {tokens:,}")
    print(f"loss: {nats / tokens:.6f}")
    print(f"perplexity: {math.exp(nats / tokens):.6g}")
    lossless = keeps_spaces(model.tokenizer)
    for name, count in (("character", sum(map(len, texts))), ("byte", sum(len(text.encode()) for text in texts))):
        bits = f"{nats / math.log(2) / count:.6f}" if lossless else "none, as the vocabulary is not byte-level"
        print(f"bits per {name}: {bits}")
    return 0
