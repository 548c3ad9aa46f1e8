"""`bert attention`: shows the attention weights of a model over a text."""

from __future__ import annotations

import sys
from pathlib import Path

from bert.commands.cli.answers import check_output
from bert.commands.cli.arguments import MODEL, CommandParser, log_to_stderr, run_command
from bert.errors import UserError, without_surrogates
from bert.files import local_path
from bert.remote import readable_path

DESCRIPTION = """Shows the attention weights of every layer and head over the tokens of a text or a pair of texts, or,
with --target, the cross-attention from a target to its source. A .html file is a self-contained interactive page, a
.png file a picture of all heads."""

SUFFIXES = (".html", ".png")

GENERATED = "generated"
"""The value of ``--target`` for a target that the model generates."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert attention", DESCRIPTION)
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
