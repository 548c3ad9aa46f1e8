"""`bert examples`: a corpus' examples as a step of their own, shown and counted."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from bert.commands.arguments import COMMAND_LINE, parse, run_command
from bert.config import PretrainConfig, UserError
from bert.phases import phase_configs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from bert.data.examples import ExampleSet

DESCRIPTION = """Builds the examples that `bert pretrain` with the same arguments will find in its cache. Of its own it
has three options. --show N prints N examples: pieces, masks, labels. --statistics counts documents, sentences,
tokens, unknown pieces, padding. --shard I/N builds every N-th shard from the I-th on: N processes that share only
data.cache_dir build all of them, and the last to end puts the set together."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    own.add_argument("--show", default="0")
    own.add_argument("--statistics", action="store_true")
    own.add_argument("--shard")
    try:
        options, rest = own.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{COMMAND_LINE}: {error}, --help explains the options") from None
    config, _ = parse(PretrainConfig, rest, prog="bert examples", description=DESCRIPTION, default_recipe="quickstart")
    if not options.show.isdecimal():
        raise UserError(f"{COMMAND_LINE}: --show {options.show} is no number of examples, as --show 5")
    part = None if options.shard is None else _part(options.shard)

    from bert.data.examples import build_examples, build_part
    from bert.data.vocabulary import corpus_vocabulary
    from bert.report import progress_lines
    from bert.tokenizer import load_tokenizer

    path = config.tokenizer.path or config.init  # beside init, its vocabulary extended
    tokenizer = (
        load_tokenizer(path, config.tokenizer) if path else corpus_vocabulary(config.data, config.tokenizer, print)
    )
    progress, whole = progress_lines(print), True
    for one in phase_configs(config):
        if part is None:
            found = build_examples(one.data, tokenizer, progress=progress)
        else:
            found = build_part(one.data, tokenizer, part, progress=progress)
        if found is None:
            whole = False
            continue
        rows, held_out = found.counts["train_rows"], found.counts["eval_rows"]
        print(f"examples in {found.folder}: {rows:,} rows, {held_out:,} held out")
        if options.statistics:
            _statistics(found, tokenizer)
        if int(options.show):
            _show(found, tokenizer, one, int(options.show))
    if not whole:
        print(f"shard {options.shard} is done; the examples are whole when the others are")
    return 0


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"{COMMAND_LINE}: --shard {text} is not I/N with I from 1 to N, as --shard 3/64")
    return int(match[1]), int(match[2])


def _statistics(found: ExampleSet, tokenizer: Tokenizer) -> None:
    import numpy as np

    from bert.data.examples import open_rows
    from bert.report import startup_table
    from bert.tokenizer import special_ids

    special, counts = special_ids(tokenizer), found.counts
    ordinary = np.delete(found.unigram_counts, [i for i in special.all if i != special.unk]).sum()
    lines = [("unknown pieces", f"{found.unigram_counts[special.unk] / max(1, ordinary):.3%} of the training pieces")]
    for split, paths in (("train", found.train), ("eval", found.eval)):
        documents, sentences, tokens = (counts[f"{split}_{name}"] for name in ("documents", "sentences", "tokens"))
        rows = open_rows(paths)
        blocks = [np.arange(i, min(i + 4096, len(rows))) for i in range(0, len(rows), 4096)]
        lengths = np.concatenate([rows.take(block)["length"] for block in blocks])
        low, middle, high = np.percentile(lengths, [10, 50, 90])
        padding = 1 - lengths.sum() / (len(rows) * found.sequence_length)
        lines += [
            (f"{split}: documents", f"{documents:,}, of {sentences / documents:,.1f} sentences and "
                                    f"{tokens / documents:,.0f} tokens on average"),
            (f"{split}: sentences", f"{sentences:,}, of {tokens / sentences:,.1f} tokens on average"),
            (f"{split}: tokens", f"{tokens:,}"),
            (f"{split}: rows", f"{len(rows):,} of up to {found.sequence_length} tokens; at the 10th, 50th, 90th "
                               f"percentile {low:.0f}, {middle:.0f}, {high:.0f}"),
            (f"{split}: padding", f"{padding:.1%} of all places"),
        ]  # fmt: skip
    startup_table(lines)


def _show(found: ExampleSet, tokenizer: Tokenizer, config: PretrainConfig, number: int) -> None:
    """Rows spread over the training rows, masked as at a first visit; colours on a terminal only."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from bert.data.examples import open_rows
    from bert.data.loader import masked_batch, masking_of
    from bert.data.masking import random_words
    from bert.data.objectives import OBJECTIVES
    from bert.tokenizer import special_ids

    rows, masking, special = open_rows(found.train), masking_of(config.data, tokenizer), special_ids(tokenizer)
    objective, console = OBJECTIVES[config.data.objective], Console(highlight=False)
    numbers = np.unique(np.linspace(0, len(rows) - 1, number).astype(int))
    words = random_words((config.seed, 0), 0, len(numbers), masking.words_per_row(found.sequence_length))
    batch = masked_batch(rows.take(numbers), masking, words, 0)
    console.print(
        Text.assemble("segment A", ("  segment B", "cyan"), ("  predicted: shown{original}", "bold red"), style="dim")
    )
    for place, row in enumerate(numbers.tolist()):
        used = batch["masked_lm_weights"][place] > 0
        positions, pieces = (batch[name][place, used].tolist() for name in ("masked_lm_positions", "masked_lm_ids"))
        original = dict(zip(positions, pieces, strict=True))
        length = int(batch["attention_mask"][place].sum())
        label = objective.answers[batch[f"{objective.label}_labels"][place]] if objective.label else "no label"
        text = Text()
        for position, piece in enumerate(batch["input_ids"][place, :length].tolist()):
            shown = tokenizer.id_to_token(piece)
            if position in original:
                text.append(f"{shown}{{{tokenizer.id_to_token(original[position])}}} ", "bold red")
            elif piece in special.all:
                text.append(f"{shown} ", "dim")
            else:
                text.append(f"{shown} ", "cyan" if batch["token_type_ids"][place, position] else "")
        heading = f"\nrow {row}: {length} of {found.sequence_length} tokens, {len(original)} predicted; {label}"
        console.print(Text(heading, "bold"))
        console.print(text, soft_wrap=not console.is_terminal)
