"""Trains and caches the vocabulary of a corpus, counts its words, and measures the losses of a vocabulary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bert.config import DataConfig, TokenizerConfig
from bert.data.cache import cache_copy, cache_folder
from bert.data.corpus import document_stream
from bert.data.corpus.document_stream import HEAD_CHARACTERS, HEAD_VERSION
from bert.data.corpus.documents import corpus_files, documents, numbered_documents
from bert.data.corpus.files import reading, reading_settings
from bert.data.corpus.filters import filter_settings
from bert.data.pretraining.build import SHARD_BYTES, require_documents
from bert.data.worker_processes import Engine, run_tasks
from bert.errors import LOGGER, Log, UserError, without_surrogates
from bert.files import blocking_lock
from bert.tokenizer.wordpiece import WordCounts, WordSteps, blocks, count_words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_CHARACTERS, SAMPLE_FILES = 200_000, 20
"""Maximum number of characters and files of a corpus from which losses are measured."""

_ENOUGH = 0.95
"""Share of ``vocab_size`` below which a trained vocabulary is reported as too small."""

UNKNOWN_WARNING, REMOVED_WARNING = 0.05, 0.01
"""Shares of unknown and removed characters above which a vocabulary is reported as unsuitable for a text. BERT's
vocabulary has less than 0.1% unknown tokens in English."""


def corpus_vocabulary(data: DataConfig, config: TokenizerConfig, log: Log, engine: Engine = "local") -> Tokenizer:
    """Returns the vocabulary of ``data.train``, or of a stream's head, from the cache or by training it.

    Args:
      engine: count its words on this machine or on a Ray cluster; the vocabulary is the same.

    Raises:
      UserError: the corpus cannot be read or has no text, the cache cannot be written, or there is no cluster.
    """
    from bert.tokenizer.vocabulary import load_tokenizer, save_tokenizer

    cache = cache_folder(data)
    keys = dataclasses.asdict(config)
    if config.kind == "wordpiece":  # the original kind: keeps the names of existing folders
        del keys["kind"]
    settings: list[Any] = [document_stream.training_fingerprint(data, cache), keys, *reading_settings(data)]
    if data.streaming:
        settings += [HEAD_VERSION, HEAD_CHARACTERS, data.stream_readers, data.mixture_weights, data.seed]
        settings += filter_settings(data).items()
    folder = cache / "vocabularies" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]
    file, copy = folder / "tokenizer.json", cache_copy(data, folder, "tokenizer.json")
    if not file.is_file():
        require_documents(data)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with blocking_lock(folder, lambda: log("waiting for another process that trains the same vocabulary")):
                if not file.is_file() and not (copy and copy.download()):
                    head = f" on the first {HEAD_CHARACTERS:,} characters of the stream" if data.streaming else ""
                    log(f"training a vocabulary of up to {config.vocab_size:,} tokens{head}")
                    tokenizer = train_vocabulary(data, config, log, engine)
                    folder.mkdir(exist_ok=True)
                    save_tokenizer(tokenizer, folder)
        except OSError as error:
            fix = "name another folder with data.cache_dir"
            raise UserError(f"the vocabulary cannot be written to {folder} ({error.strerror}): {fix}") from None
    if copy:
        copy.upload()
    return load_tokenizer(folder)


def train_vocabulary(data: DataConfig, config: TokenizerConfig, log: Log, engine: Engine = "local") -> Tokenizer:
    """Trains a vocabulary of ``data.train``. See `corpus_vocabulary` for arguments and errors."""
    from bert.tokenizer.vocabulary import train_tokenizer, word_steps

    texts = count_corpus_words(data, word_steps(config), log, engine) if engine == "ray" else _lines(data)
    tokenizer = train_tokenizer(texts, config)
    report_size(tokenizer, config, "data.train")
    return tokenizer


def report_size(tokenizer: Tokenizer, config: TokenizerConfig, text: str, section: str = "tokenizer") -> None:
    """Logs a warning if a trained vocabulary has far fewer tokens than configured."""
    if (size := tokenizer.get_vocab_size()) < _ENOUGH * config.vocab_size:
        LOGGER.warning(
            f"warning: {text} gives only {size:,} tokens, but {section}.vocab_size is {config.vocab_size:,}: no "
            f"more tokens occur {section}.min_frequency times, so use more text or a smaller vocabulary"
        )


def count_corpus_words(data: DataConfig, steps: WordSteps, log: Log, engine: Engine = "local") -> WordCounts:
    """Counts the words of ``data.train``, or of a stream's head.

    With ``engine`` ray, the tasks of a cluster count the words of blocks of text.

    Raises:
      UserError: the corpus cannot be read or has no text, or there is no cluster.
    """
    if engine == "local":
        return count_words(_lines(data), steps)
    counts = WordCounts()
    named_blocks = ((f"words-{number:05d}", block) for number, block in enumerate(blocks(_lines(data), SHARD_BYTES)))
    for _, counted in run_tasks(count_block, named_blocks, steps, data.num_workers, log):
        counts.words.update(counted.words)
    log(f"counted {counts.words.total():,} words, {len(counts.words):,} of them distinct")
    return counts


def count_block(block: str, steps: WordSteps) -> WordCounts:
    """Counts the words of the lines of a text."""
    return count_words(block.split("\n"), steps)


def _lines(data: DataConfig) -> Iterator[str]:
    """Yields the lines on which a vocabulary is trained: ``data.train``, or the head of a stream."""
    if data.streaming:
        files = document_stream.stream_files(data.train)
        numbered = document_stream.head_documents(files, data, HEAD_CHARACTERS)
    else:
        numbered = numbered_documents(data.train, **reading(data))
    return (line for _, document in numbered for line in document)


class Losses(NamedTuple):
    """Losses of a text in a vocabulary, as shares of its characters without white space."""

    unknown: float
    """Share of characters in unknown tokens."""
    too_long: float
    """Share of characters in unknown words that are too long for WordPiece."""
    removed: float
    """Share of characters removed by the normalizer, including accents of letters."""
    removed_characters: str
    """The characters that are removed most often."""

    def warnings(self, unknown_token: str, text: str = "data.train") -> list[str]:
        """Returns a message for each large loss."""
        warnings = []
        if self.unknown > UNKNOWN_WARNING:
            train = (
                "most are in words of over 100 characters, so train one of tokenizer.kind unigram or byte_level"
                if self.too_long > self.unknown / 2
                else "use a vocabulary of the corpus' language and script, or train one"
            )
            share = f"{self.unknown:.1%} of the characters of {text}"
            warnings.append(f"{share} become {unknown_token} and are lost: {train}")
        if self.removed > REMOVED_WARNING:
            marks = all(unicodedata.category(character)[0] == "M" for character in self.removed_characters)
            fix = "train one with --tokenizer.strip_accents false" if marks else "train another one"
            shown = ", ".join(f"U+{ord(c):04X} {unicodedata.name(c, '')}".strip() for c in self.removed_characters)
            warnings.append(
                f"the vocabulary's normalizer removes {self.removed:.1%} of the characters of {text} ({shown}): use a "
                f"vocabulary that keeps them, or {fix}"
            )
        return warnings


def measure_losses(tokenizer: Tokenizer, texts: Iterable[str]) -> Losses:
    """Measures the losses of texts in a vocabulary. Case and compatibility forms are ignored."""
    from tokenizers import models

    from bert.tokenizer.library import special_ids
    from bert.tokenizer.vocabulary import literal_tokenizer
    from bert.tokenizer.wordpiece import MAX_INPUT_CHARS_PER_WORD

    texts = [text for text in map(without_surrogates, texts) if text.strip()]
    characters: collections.Counter[str] = collections.Counter()
    kept: collections.Counter[str] = collections.Counter()
    for text in texts:
        characters.update(_comparable(text))
        kept.update(_comparable(tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text))
    removed = characters - kept
    total = max(sum(len("".join(unicodedata.normalize("NFC", text).split())) for text in texts), 1)
    unknown, too_long = 0, 0
    if (unk := special_ids(tokenizer).find("unk")) is not None:
        is_wordpiece = isinstance(tokenizer.model, models.WordPiece)
        for text, encoding in zip(texts, literal_tokenizer(tokenizer).encode_batch(texts), strict=True):
            for start, end in (encoding.offsets[i] for i, id in enumerate(encoding.ids) if id == unk):
                size = len("".join(text[start:end].split()))
                unknown += size
                too_long += size if is_wordpiece and size > MAX_INPUT_CHARS_PER_WORD else 0
    removed_characters = "".join(character for character, _ in removed.most_common(3))
    shares = [min(count / total, 1.0) for count in (unknown, too_long, removed.total())]
    return Losses(shares[0], shares[1], shares[2], removed_characters)


class TokenSize(NamedTuple):
    """Mean size of the tokens of a text; white space between words counts."""

    characters: float
    bytes: float


def measure_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> TokenSize:
    """Returns the mean characters and bytes (UTF-8) of text per token, without special tokens."""
    from bert.tokenizer.vocabulary import literal_tokenizer

    texts = [text for text in map(without_surrogates, texts) if text.strip()]
    encodings = literal_tokenizer(tokenizer).encode_batch(texts, add_special_tokens=False)
    count = max(1, sum(len(encoding.ids) for encoding in encodings))
    return TokenSize(sum(map(len, texts)) / count, sum(len(text.encode()) for text in texts) / count)


def warn_of_losses(
    losses: Losses, tokenizer: Tokenizer, warn: Callable[[str], None] = LOGGER.warning, text: str = "data.train"
) -> None:
    """Logs a warning for each large loss of a text."""
    from bert.tokenizer.library import special_ids

    unknown = special_ids(tokenizer).find("unk")
    for warning in losses.warnings(str(tokenizer.id_to_token(unknown or 0)), text):
        warn(f"warning: {warning}")


def sample_texts(data: DataConfig) -> Iterator[str]:
    """Yields lines from up to `SAMPLE_FILES` files of ``data.train``, about `SAMPLE_CHARACTERS` characters in total."""
    if data.streaming:
        yield from first_texts(_lines(data), SAMPLE_CHARACTERS)
        return
    files = corpus_files(data.train)
    chosen = files[:: -(-len(files) // SAMPLE_FILES)]
    for file in chosen:
        with contextlib.suppress(UserError):  # a file without text; damaged files are reported when all files are read
            lines = (line for document in documents(file, **reading(data)) for line in document)
            yield from first_texts(lines, SAMPLE_CHARACTERS // len(chosen))


def first_texts(texts: Iterable[str], characters: int = SAMPLE_CHARACTERS) -> Iterator[str]:
    """Yields the first texts, up to about this number of characters in total."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _comparable(text: str) -> str:
    """Returns the characters of a text without case and white space, with letters and marks separated."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(folded.replace("\ufffd", "").replace("\ufeff", "").split())
