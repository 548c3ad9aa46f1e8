"""The vocabulary of a corpus, trained once and found again next to the built examples."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bert.config import DataConfig, TokenizerConfig
from bert.data.corpus.documents import documents
from bert.data.corpus.files import Document
from bert.data.corpus.streaming import head_documents, stream_files
from bert.data.pretraining.builder import cache_folder, training_fingerprint
from bert.errors import UserError
from bert.locks import blocking_lock

if TYPE_CHECKING:
    from tokenizers import Tokenizer


HEAD_CHARACTERS = 64 << 20
"""Characters of a stream, read first, that a vocabulary is trained on."""


def corpus_vocabulary(data: DataConfig, config: TokenizerConfig, say: Callable[[str], None]) -> Tokenizer:
    """A vocabulary of ``data.train``, or of a stream's head, kept in the cache: the same corpus and settings train it
    once.

    Raises:
      UserError: the corpus cannot be read or has no text, or the cache cannot be written.
    """
    from bert.tokenizer.wordpiece import load_tokenizer, save_tokenizer, train_tokenizer

    cache = cache_folder(data)
    keys = dataclasses.asdict(config)
    if config.kind == "wordpiece":  # the only kind once, and left out of the names of its folders
        del keys["kind"]
    settings: list[Any] = [training_fingerprint(data, cache), keys, *(["verbatim"] if data.verbatim else [])]
    if data.streaming:
        settings += [HEAD_CHARACTERS, data.stream_readers, data.mixture_weights, data.seed]
    folder = cache / "vocabularies" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    if (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with blocking_lock(folder, lambda: say("waiting for another process that trains the same vocabulary")):
            if not (folder / "tokenizer.json").is_file():
                head = f" on the first {HEAD_CHARACTERS:,} characters of the stream" if data.streaming else ""
                say(f"training a vocabulary of up to {config.vocab_size:,} tokens{head}")
                lines = (line for document in vocabulary_documents(data) for line in document)
                tokenizer = train_tokenizer(lines, config)
                folder.mkdir(exist_ok=True)
                save_tokenizer(tokenizer, folder)
    except OSError as error:
        raise UserError(
            f"the vocabulary cannot be written to {folder} ({error.strerror}): name another folder with data.cache_dir"
        ) from None
    return load_tokenizer(folder)


def vocabulary_documents(data: DataConfig) -> Iterator[Document]:
    """What a vocabulary is trained on: the documents of ``data.train``, or of the head of a stream."""
    if not data.streaming:
        return documents(data.train, data.verbatim)
    return (document for _, document in head_documents(stream_files(data.train), data, HEAD_CHARACTERS))
