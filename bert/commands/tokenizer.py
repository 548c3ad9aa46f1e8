"""`bert tokenizer`: trains a vocabulary on a corpus, or extends a published one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bert.commands.cli.arguments import COMMAND_LINE, parse, run_command
from bert.commands.cli.cluster import ENGINE_OPTION, parse_engine
from bert.config import PretrainConfig, TokenizerConfig
from bert.errors import UserError
from bert.remote import exists, writable, writable_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from bert.data.worker_processes import Engine

DESCRIPTION = """Trains the vocabulary described by the keys under tokenizer on data.train, or adds words of the corpus
to a published vocabulary. The output folder gets tokenizer.json and, for wordpiece, vocab.txt."""

EXTRA_OPTIONS = {
    "output DIR": "New folder for the vocabulary.",
    "extend N": "Add the N words of the corpus that save the most tokens to the vocabulary in tokenizer.path, which "
    "may also be a hub name. They fill its [unused] slots first, which need no new weights, then follow at its end.",
    **ENGINE_OPTION,
}
"""Options that are not configuration keys."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    config, _, options = parse(PretrainConfig, argv, "bert tokenizer", DESCRIPTION, "quickstart", EXTRA_OPTIONS)
    output, engine = _free_folder(options.get("output")), parse_engine(options)

    from bert.data.corpus.vocabulary import measure_losses, sample_texts, train_vocabulary, warn_of_losses
    from bert.tokenizer.vocabulary import embedding_rows, save_tokenizer

    if "extend" in options:
        tokenizer = _extend(config, options["extend"], engine)
    elif config.tokenizer.path is not None:
        raise UserError("tokenizer.path is set, so there is nothing to train: remove it, or pass --extend N")
    else:
        tokenizer = train_vocabulary(config.data, config.tokenizer, print, engine)
    warn_of_losses(measure_losses(tokenizer, sample_texts(config.data)), tokenizer)
    with writable(output) as folder:
        save_tokenizer(tokenizer, folder)
        files = " and ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{output} holds {files} with {embedding_rows(tokenizer):,} tokens; use it with --tokenizer.path {output}")
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
