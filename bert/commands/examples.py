"""`bert examples`: a corpus' examples as a step of their own, shown and counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bert.commands.arguments import COMMAND_LINE, parse, run_command, split_options
from bert.config import PretrainConfig
from bert.config.pretraining import phase_configs
from bert.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from bert.data.pretraining.builder import PretrainingDataset

DESCRIPTION = """Builds the examples that `bert pretrain` with the same arguments will find in its cache."""

EXTRA_OPTIONS = {
    "show N": "Print N examples: pieces, masks, labels.",
    "statistics": "Count documents, sentences, tokens, unknown pieces, padding.",
    "shard I/N": "Build every N-th shard from the I-th on: N processes that share only data.cache_dir build all of "
    "them, and the last to end puts the set together.",
}
"""The options that are not configuration keys."""

MASKED_STYLE = "bold reverse"
"""How a predicted piece is set off, in the colour of its segment."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    argv, options = split_options(argv, EXTRA_OPTIONS)
    config, _ = parse(
        PretrainConfig,
        argv,
        prog="bert examples",
        description=DESCRIPTION,
        default_recipe="quickstart",
        extra_options=EXTRA_OPTIONS,
    )
    shown = options.get("show", "0")
    if not shown.isdecimal():
        raise UserError(f"{COMMAND_LINE}: --show {shown} is not a number of examples: write one, for example --show 5")
    part = _part(options["shard"]) if "shard" in options else None

    from bert.data.corpus.vocabulary import corpus_vocabulary
    from bert.data.pretraining.builder import build_examples, build_shard_subset
    from bert.runs.progress import progress_lines
    from bert.tokenizer.wordpiece import load_tokenizer

    if config.tokenizer.path is not None:  # beside init, its vocabulary extended
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    elif config.init is not None:
        from bert.inference.loading import load_vocabulary  # which imports JAX

        tokenizer = load_vocabulary(config.init, print)
    else:
        tokenizer = corpus_vocabulary(config.data, config.tokenizer, print)
    progress, whole = progress_lines(print), True
    for one in phase_configs(config):
        if part is None:
            found: PretrainingDataset | None = build_examples(one.data, tokenizer, progress=progress)
        else:
            found = build_shard_subset(one.data, tokenizer, part, progress=progress)
        if found is None:
            whole = False
            continue
        rows, held_out = found.counts["train_rows"], found.counts["eval_rows"]
        print(f"examples in {found.folder}: {rows:,} rows, {held_out:,} held out")
        if "statistics" in options:
            _statistics(found, tokenizer)
        if int(shown):
            _show(found, tokenizer, one, int(shown))
    if not whole:
        later = "; --show and --statistics need all of them" if "statistics" in options or int(shown) else ""
        print(f"shard {options['shard']} is done; the examples are whole when the others are{later}")
    return 0


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"{COMMAND_LINE}: --shard {text} is not I/N with I from 1 to N: write, for example, --shard 3/64"
        )
    return int(match[1]), int(match[2])


def _statistics(found: PretrainingDataset, tokenizer: Tokenizer) -> None:
    import numpy as np

    from bert.data.pretraining.builder import open_rows
    from bert.data.pretraining.packing import EXAMPLE_LENGTH
    from bert.runs.progress import print_table
    from bert.tokenizer.wordpiece import special_ids

    counts = found.counts
    unknown = found.unknown_rate(special_ids(tokenizer))
    lines = [("unknown pieces", f"{unknown:.3%} of the training pieces")]
    for split, paths in (("train", found.train), ("eval", found.eval)):
        documents, sentences, tokens = (counts[f"{split}_{name}"] for name in ("documents", "sentences", "tokens"))
        rows = open_rows(paths)
        blocks = (rows.take(np.arange(i, min(i + 4096, len(rows)))) for i in range(0, len(rows), 4096))
        columns = [(block["length"], block.get(EXAMPLE_LENGTH)) for block in blocks]
        lengths = np.concatenate([length for length, _ in columns])
        low, middle, high = np.percentile(lengths, [10, 50, 90])
        padding, packing = f"{_padding(lengths, found.sequence_length):.1%} of all places", ""
        if columns[0][1] is not None:
            examples = np.concatenate([example_length for _, example_length in columns])
            alone = examples[examples > 0]
            packing = f" and {np.count_nonzero(examples, axis=1).max()} examples, {len(alone):,} in all"
            padding += f"; with an example a row {_padding(alone, found.sequence_length):.1%}"
        lines += [
            (f"{split}: documents", f"{documents:,}, of {sentences / documents:,.1f} sentences and "
                                    f"{tokens / documents:,.0f} tokens on average"),
            (f"{split}: sentences", f"{sentences:,}, of {tokens / sentences:,.1f} tokens on average"),
            (f"{split}: tokens", f"{tokens:,}"),
            (f"{split}: rows", f"{len(rows):,} of up to {found.sequence_length} tokens{packing}; at the 10th, 50th, "
                               f"90th percentile {low:.0f}, {middle:.0f}, {high:.0f}"),
            (f"{split}: padding", padding),
        ]  # fmt: skip
    print_table(lines)


def _padding(lengths: np.ndarray, sequence_length: int) -> float:
    return 1 - lengths.sum() / (len(lengths) * sequence_length)


def _show(found: PretrainingDataset, tokenizer: Tokenizer, config: PretrainConfig, count: int) -> None:
    """Rows spread over the training rows, masked as at a first visit; colours on a terminal only."""
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from bert.data.pretraining.builder import open_rows
    from bert.data.pretraining.loader import make_masking, masked_batch, random_uint64s_per_row
    from bert.data.pretraining.masking import philox_uint64
    from bert.data.pretraining.objectives import OBJECTIVES
    from bert.tokenizer.wordpiece import special_ids

    rows, masking, special = open_rows(found.train), make_masking(config.data, tokenizer), special_ids(tokenizer)
    objective, console = OBJECTIVES[config.data.objective], Console(highlight=False)
    numbers = np.unique(np.linspace(0, len(rows) - 1, count).astype(int))
    examples = rows.take(numbers)
    words = philox_uint64((config.seed, 0), 0, len(numbers), random_uint64s_per_row(masking, examples))
    batch = masked_batch(examples, masking, words, 0)
    console.print(
        Text.assemble("segment A", ("  segment B", "cyan"), ("  predicted: shown{original}", MASKED_STYLE), style="dim")
    )
    for place, number, start, end in _examples_of(batch):
        used = batch["masked_lm_weights"][place] > 0
        positions, pieces = (batch[name][place, used].tolist() for name in ("masked_lm_positions", "masked_lm_ids"))
        original = {at: piece for at, piece in zip(positions, pieces, strict=True) if start <= at < end}
        label = "no label"
        if objective.label:
            labels = batch[f"{objective.label}_labels"][place]
            label = objective.answers[labels if number is None else labels[number]]
        text = Text()
        for position, piece in enumerate(batch["input_ids"][place, start:end].tolist(), start):
            shown = tokenizer.id_to_token(piece)
            segment = "cyan" if batch["token_type_ids"][place, position] else ""
            if position in original:
                text.append(f"{shown}{{{tokenizer.id_to_token(original[position])}}}", f"{MASKED_STYLE} {segment}")
            else:
                text.append(shown or "", "dim" if piece in special.all else segment)
            text.append(" ")
        of_row = "" if number is None else f", example {number + 1}"
        heading = f"\nrow {numbers[place]}{of_row}: {end - start} of {found.sequence_length} tokens, "
        heading += f"{len(original)} predicted; {label}"
        console.print(Text(heading, "bold"))
        console.print(text, soft_wrap=not console.is_terminal)


def _examples_of(batch: dict[str, np.ndarray]) -> Iterator[tuple[int, int | None, int, int]]:
    """Place in the batch, number within its row where rows are packed, first position and end of every example."""
    for place, length in enumerate(batch["attention_mask"].sum(axis=1).tolist()):
        if "example_ids" not in batch:
            yield place, None, 0, length
            continue
        owners = batch["example_ids"][place, :length]
        for number in range(int(owners.max())):
            start, end = owners.searchsorted([number + 1, number + 2]).tolist()
            yield place, number, start, end
