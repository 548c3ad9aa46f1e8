"""Commands that prepare a corpus: `bert tokenizer` and `bert examples`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bert.commands.cli.arguments import COMMAND_LINE, parse, run_command
from bert.commands.cli.cluster import ENGINE_OPTION, parse_engine
from bert.config import PretrainConfig, TokenizerConfig
from bert.config.pretraining import corpus_keys, phase_configs
from bert.errors import LOGGER, UserError
from bert.remote import exists, writable, writable_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from bert.data.corpus.vocabulary import Losses
    from bert.data.pretraining.dataset import PretrainingDataset
    from bert.data.worker_processes import Engine


TOKENIZER_DESCRIPTION = """\
Trains the vocabulary described by the keys under tokenizer on data.train, or adds words of the corpus
to a published vocabulary. The output folder gets tokenizer.json and, for wordpiece, vocab.txt."""

TOKENIZER_OPTIONS = {
    "output DIR": "New folder for the vocabulary.",
    "extend N": "Add the N words of the corpus that save the most tokens to the vocabulary in tokenizer.path, which "
    "may also be a hub name. They fill its [unused] slots first, which need no new weights, then follow at its end.",
    **ENGINE_OPTION,
}
"""Options that are not configuration keys."""


@run_command
def tokenizer_command(argv: list[str]) -> int:
    """Runs `bert tokenizer` and returns its exit status."""
    config, _, options = parse(
        PretrainConfig, argv, "bert tokenizer", TOKENIZER_DESCRIPTION, "quickstart", TOKENIZER_OPTIONS
    )
    output, engine = _free_folder(options.get("output")), parse_engine(options)

    from bert.data.corpus.vocabulary import (
        measure_losses,
        measure_tokens,
        sample_texts,
        train_vocabulary,
        warn_of_losses,
    )
    from bert.tokenizer.vocabulary import embedding_rows, save_tokenizer

    if "extend" in options:
        tokenizer = _extend(config, options["extend"], engine)
    elif config.tokenizer.path is not None:
        raise UserError("tokenizer.path is set, so there is nothing to train: remove it, or pass --extend N")
    else:
        tokenizer = train_vocabulary(config.data, config.tokenizer, print, engine)
    texts = list(sample_texts(config.data))
    warn_of_losses(measure_losses(tokenizer, texts), tokenizer)
    with writable(output) as folder:
        save_tokenizer(tokenizer, folder)
        files = " and ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{output} holds {files} with {embedding_rows(tokenizer):,} tokens; use it with --tokenizer.path {output}")
    size = measure_tokens(tokenizer, texts)
    print(f"a token of data.train has {size.characters:.2f} characters and {size.bytes:.2f} bytes on average")
    return 0


def _extend(config: PretrainConfig, count: str, engine: Engine) -> Tokenizer:
    """Adds words to the vocabulary in ``tokenizer.path``, and prints them."""
    from bert.data.corpus.vocabulary import count_corpus_words
    from bert.tokenizer.extension import add_words, require_extensible, select_new_words
    from bert.tokenizer.wordpiece import WordSteps

    if not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"{COMMAND_LINE}: --extend {count} is not a number of words: pass one, for example --extend 1000"
        )
    if config.tokenizer.path is None:
        raise UserError("tokenizer.path is not set: name the vocabulary that --extend adds words to")
    published = _load_published(config.tokenizer.path, config.tokenizer)
    require_extensible(published)
    steps = WordSteps(published.normalizer, published.pre_tokenizer)
    counts = count_corpus_words(config.data, steps, print, engine)
    new_words = select_new_words(published, counts, int(count), config.tokenizer.min_frequency)
    saved = sum(new.tokens_saved for new in new_words)
    print(f"{len(new_words):,} new words, {saved:,} fewer tokens in the corpus; the first:")
    for new in new_words[:20]:
        print(f"  {new.count:8,} x {new.word}   (was {' '.join(new.tokens)})")
    return add_words(published, [new.word for new in new_words])


def _load_published(path: str, config: TokenizerConfig) -> Tokenizer:
    """Loads the vocabulary of a folder, a file or a hub model."""
    from bert.interchange.hub import is_hub_name
    from bert.tokenizer.vocabulary import load_tokenizer

    if Path(path).exists() or not is_hub_name(path):
        return load_tokenizer(path, config)
    from bert.inference.load import load_vocabulary  # imports JAX

    return load_vocabulary(path, print)


def _free_folder(name: str | None) -> str:
    if name is None:
        raise UserError(f"{COMMAND_LINE}: --output is missing: name the folder for the vocabulary")
    output, folder = writable_path(name, "--output"), Path(name)
    if exists(output) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{output} exists already and is not an empty folder: name another --output")
    return output


EXAMPLES_DESCRIPTION = """\
Builds the examples of a corpus in the cache, in which bert pretrain with the same arguments finds
them."""

EXAMPLES_OPTIONS = {
    "show N": "Print N examples: tokens, masks, labels.",
    "statistics": "Count documents, sentences, tokens, unknown tokens and padding.",
    "shard I/N": "Build every N-th shard, starting with the I-th, so that N processes that share only data.cache_dir "
    "build all of them. The last process to finish assembles the set.",
    **ENGINE_OPTION,
}
"""Options that are not configuration keys."""

MASKED_STYLE = "bold reverse"
"""Style of a predicted token; its colour shows the segment."""


@run_command
def examples_command(argv: list[str]) -> int:
    """Runs `bert examples` and returns its exit status."""
    config, _, options = parse(
        PretrainConfig, argv, "bert examples", EXAMPLES_DESCRIPTION, "quickstart", EXAMPLES_OPTIONS
    )
    shown = options.get("show", "0")
    if not shown.isdecimal():
        raise UserError(f"{COMMAND_LINE}: --show {shown} is not a number of examples: write one, for example --show 5")
    if config.data.streaming:
        raise UserError(
            f"{COMMAND_LINE}: data.streaming is true, and examples of a stream are not built: set it to false, and "
            "data.train to a part of the corpus"
        )
    shard = _parse_shard(options["shard"]) if "shard" in options else None
    engine = parse_engine(options)
    if engine == "ray" and shard is not None:
        raise UserError(f"{COMMAND_LINE}: --engine ray builds all shards: remove --shard")

    from bert.analysis.examples import example_statistics, loss_statistics
    from bert.data.corpus.vocabulary import corpus_vocabulary, measure_losses, sample_texts, warn_of_losses
    from bert.data.pretraining.build import build_examples, build_shard_subset
    from bert.runs.report import log_table, progress_lines
    from bert.tokenizer.vocabulary import load_tokenizer

    if config.tokenizer.path is not None:  # the vocabulary of init, extended
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    elif source := config.init or config.distillation.teacher:
        from bert.inference.load import load_vocabulary  # imports JAX

        tokenizer = load_vocabulary(source, print)
    else:
        tokenizer = corpus_vocabulary(config.data, config.tokenizer, print, engine)
    losses: dict[str, Losses] = {}
    progress, complete, shown_folders = progress_lines(print), True, set[Path]()
    for key, phase in zip(corpus_keys(config), phase_configs(config), strict=True):
        if key not in losses:
            losses[key] = measure_losses(tokenizer, sample_texts(phase.data))
            warn_of_losses(losses[key], tokenizer, text=key)
        if shard is None:
            dataset: PretrainingDataset | None = build_examples(phase.data, tokenizer, progress=progress, engine=engine)
        else:
            dataset = build_shard_subset(phase.data, tokenizer, shard, progress=progress)
        if dataset is None:
            complete = False
            continue
        if dataset.folder in shown_folders:  # another phase with the same examples
            continue
        shown_folders.add(dataset.folder)
        rows, held_out = dataset.counts["train_rows"], dataset.counts["eval_rows"]
        print(f"examples in {dataset.folder}: {rows:,} rows, {held_out:,} held out")
        for warning in dataset.pair_warnings():
            LOGGER.warning(warning)
        if "statistics" in options:
            log_table([*loss_statistics(losses[key]), *example_statistics(dataset, tokenizer)])
        if int(shown):
            _print_examples(dataset, tokenizer, phase, int(shown))
    if not complete:
        later = "; --show and --statistics need all of them" if "statistics" in options or int(shown) else ""
        print(f"shard {options['shard']} is done; the examples are complete when the others are{later}")
    return 0


def _parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"{COMMAND_LINE}: --shard {text} is not I/N with I from 1 to N: write, for example, --shard 3/64"
        )
    return int(match[1]), int(match[2])


def _print_examples(dataset: PretrainingDataset, tokenizer: Tokenizer, config: PretrainConfig, count: int) -> None:
    """Prints masked examples, on a terminal in colour."""
    from rich.console import Console
    from rich.text import Text

    from bert.analysis.examples import masked_examples

    console = Console(highlight=False)
    marked = "token{place in the order}" if config.training.objective == "plm" else "shown{original}"
    console.print(
        Text.assemble("segment A", ("  segment B", "cyan"), (f"  predicted: {marked}", MASKED_STYLE), style="dim")
    )
    for example in masked_examples(dataset, tokenizer, config, count):
        text = Text()
        for token in example.tokens:
            segment = "cyan" if token.is_segment_b else ""
            if token.original is not None:
                text.append(f"{token.text}{{{token.original}}}", f"{MASKED_STYLE} {segment}")
            else:
                text.append(token.text, "dim" if token.is_special else segment)
            text.append(" ")
        position = "" if example.position is None else f", example {example.position + 1}"
        console.print(
            Text(
                f"\nrow {example.row}{position}: {len(example.tokens)} of {dataset.sequence_length} tokens, "
                f"{example.predicted} predicted; {example.label}",
                "bold",
            )
        )
        console.print(text, soft_wrap=not console.is_terminal)
