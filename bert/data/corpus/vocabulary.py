"""The vocabulary of a corpus, trained once and found again next to the built examples; and the counts of its words."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bert.config import DataConfig, TokenizerConfig
from bert.data.cache import cache_copy, cache_folder
from bert.data.corpus.documents import documents
from bert.data.corpus.files import Document, reading, reading_settings
from bert.data.corpus.streaming import HEAD_CHARACTERS, HEAD_VERSION, head_documents, stream_files
from bert.data.pretraining.builder import SHARD_BYTES, Engine, require_documents, training_fingerprint
from bert.data.ray_tasks import run_tasks
from bert.errors import UserError
from bert.locks import blocking_lock
from bert.tokenizer.word_counts import WordCounts, WordSteps, blocks, count_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def corpus_vocabulary(
    data: DataConfig, config: TokenizerConfig, say: Callable[[str], None], engine: Engine = "local"
) -> Tokenizer:
    """A vocabulary of ``data.train``, or of a stream's head, kept in the cache: the same corpus and settings train it
    once.

    Args:
      engine: what counts its words; the vocabulary is the same.

    Raises:
      UserError: the corpus cannot be read or has no text, or the cache cannot be written, or no cluster.
    """
    from bert.tokenizer.vocabulary import load_tokenizer, save_tokenizer

    cache = cache_folder(data)
    keys = dataclasses.asdict(config)
    if config.kind == "wordpiece":  # the only kind once, and left out of the names of its folders
        del keys["kind"]
    settings: list[Any] = [training_fingerprint(data, cache), keys, *reading_settings(data)]
    if data.streaming:
        settings += [HEAD_VERSION, HEAD_CHARACTERS, data.stream_readers, data.mixture_weights, data.seed]
    folder = cache / "vocabularies" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    file, copy = folder / "tokenizer.json", cache_copy(data, folder, "tokenizer.json")
    if not file.is_file():
        require_documents(data)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with blocking_lock(folder, lambda: say("waiting for another process that trains the same vocabulary")):
                if not file.is_file() and not (copy and copy.download()):
                    head = f" on the first {HEAD_CHARACTERS:,} characters of the stream" if data.streaming else ""
                    say(f"training a vocabulary of up to {config.vocab_size:,} tokens{head}")
                    tokenizer = train_vocabulary(data, config, say, engine)
                    folder.mkdir(exist_ok=True)
                    save_tokenizer(tokenizer, folder)
        except OSError as error:
            raise UserError(
                f"the vocabulary cannot be written to {folder} ({error.strerror}): name another folder with "
                "data.cache_dir"
            ) from None
    if copy:
        copy.upload()
    return load_tokenizer(folder)


def train_vocabulary(
    data: DataConfig, config: TokenizerConfig, say: Callable[[str], None], engine: Engine = "local"
) -> Tokenizer:
    """A vocabulary of ``data.train``; arguments and errors as of `corpus_vocabulary`."""
    from bert.tokenizer.vocabulary import train_tokenizer, word_steps

    if engine == "ray":
        return train_tokenizer(count_corpus_words(data, word_steps(config), say, engine), config)
    return train_tokenizer(_lines(data), config)


def count_corpus_words(
    data: DataConfig, steps: WordSteps, say: Callable[[str], None], engine: Engine = "local"
) -> WordCounts:
    """Counts the words of ``data.train``, or of a stream's head.

    With ``engine`` ray the tasks of a cluster count those of blocks of text, and the counts are added here.

    Raises:
      UserError: the corpus cannot be read or has no text, or no cluster.
    """
    if engine == "local":
        return count_words(_lines(data), steps)
    counts = WordCounts()
    given = ((f"words-{number:05d}", block) for number, block in enumerate(blocks(_lines(data), SHARD_BYTES)))
    for _, counted in run_tasks(count_block, given, steps, data.num_workers, say):
        counts.words.update(counted.words)
    say(f"{counts.words.total():,} words were counted, {len(counts.words):,} different ones")
    return counts


def count_block(block: str, steps: WordSteps) -> WordCounts:
    """Counts the words of a text with one line after the other."""
    return count_words(block.split("\n"), steps)


def _lines(data: DataConfig) -> Iterator[str]:
    return (line for document in _documents(data) for line in document)


def _documents(data: DataConfig) -> Iterator[Document]:
    """What a vocabulary is trained on: the documents of ``data.train``, or of the head of a stream."""
    if not data.streaming:
        return documents(data.train, **reading(data))
    return (document for _, document in head_documents(stream_files(data.train), data, HEAD_CHARACTERS))
