"""Tokenizes the documents of a shard, either sentence by sentence or as whole documents."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert.data.corpus.document_store import Documents
from bert.data.corpus.documents import split_sentences
from bert.tokenizer.library import encode_batch, keeps_spaces
from bert.tokenizer.wordpiece import has_wordpiece_steps

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_OF_SENTENCES = 4096
"""Sentences per call of the tokenizer: enough to make calls cheap, few enough to bound memory."""

STRETCH, BATCH_OF_STRETCHES = 4096, 256
"""Minimum characters of a document per text, and texts per call of the tokenizer."""

MAX_STRETCHES, MAX_STRETCH_LENGTH = 1 << 17, 64
"""Maximum number of cached stretches between spaces, about 30 MB, and their maximum length."""

BEFORE_WORD = re.compile(r"(?<=\S)[ \n](?=\S)")
"""A single space or line feed. No token crosses it, so that a text may be divided here."""


class TokenizedDocuments(NamedTuple):
    """The tokens of a shard's documents. Sentences without tokens and documents without sentences are left out."""

    tokens: np.ndarray
    """All tokens, concatenated."""
    sentences: list[int]
    """Offsets of S sentences in ``tokens``, S + 1 values."""
    documents: list[int]
    """Offsets of D documents in ``sentences``, D + 1 values."""
    indices: list[int]
    """Index of each document in the store."""


def tokenize_sentences(
    store: Documents,
    indices: np.ndarray,
    tokenizer: Tokenizer,
    max_length: int,
    languages: tuple[str, ...],
    one_sentence_per_line: bool,
) -> TokenizedDocuments:
    """Tokenizes documents of a store sentence by sentence.

    A sentence of more than ``max_length`` tokens, which does not fit a row, is cut into even pieces of about half that
    length: without punctuation in a corpus, truncation would discard most of it.

    Args:
      languages: language code of each corpus; a single entry applies to all.
    """

    def sentences() -> Iterator[tuple[str, int]]:
        sources = store.sources() if len(languages) > 1 else None
        keep_space = keeps_spaces(tokenizer)
        for owner, paragraphs in enumerate(store.read(indices)):
            language = languages[0 if sources is None else sources[indices[owner]]]
            for sentence in split_sentences(paragraphs, language, one_sentence_per_line, keep_space):
                yield sentence, owner

    tokens, length, owner = _tokenize(sentences(), tokenizer, BATCH_OF_SENTENCES)
    pieces = np.where(length > max_length, -(-length // (max_length // 2)), np.minimum(length, 1))
    sentence, owner = np.repeat(np.arange(len(pieces)), pieces), np.repeat(owner, pieces)
    piece = np.arange(len(sentence)) - (np.cumsum(pieces) - pieces)[sentence]
    length = length[sentence] // pieces[sentence] + (piece < length[sentence] % pieces[sentence])
    starts = np.flatnonzero(np.diff(owner)) + 1
    documents = [0, *starts.tolist(), len(owner)] if len(owner) else [0]
    return TokenizedDocuments(
        tokens, [0, *np.cumsum(length).tolist()], documents, indices[owner[documents[:-1]]].tolist()
    )


def tokenize_documents(store: Documents, indices: np.ndarray, tokenizer: Tokenizer, end: int) -> TokenizedDocuments:
    """Tokenizes whole documents of a store, each as one sentence. All except the last end with the token ``end``."""

    def stretches() -> Iterator[tuple[str, int]]:
        for owner, lines in enumerate(store.read(indices)):
            for stretch in _stretches("\n".join(lines)):
                yield stretch, owner

    tokens, length, owner = _tokenize(stretches(), tokenizer, BATCH_OF_STRETCHES)
    present = length > 0
    owners, first_stretch = np.unique(owner[present], return_index=True)
    first = (np.cumsum(length) - length)[present][first_stretch]
    tokens = np.insert(tokens, first[1:], end)
    starts = first + np.arange(len(first))
    return TokenizedDocuments(
        tokens, [*starts.tolist(), len(tokens)], list(range(len(owners) + 1)), indices[owners].tolist()
    )


def _tokenize(
    texts: Iterable[tuple[str, int]], tokenizer: Tokenizer, batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokenizes (text, owner) pairs. Returns all tokens int32, and the lengths and owners of the texts, int64."""
    encode = text_encoder(tokenizer)
    tokens, lengths, owners = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], list[int]()
    texts = iter(texts)
    while batch := list(itertools.islice(texts, batch_size)):
        some_tokens, some_lengths = encode([text for text, _ in batch])
        tokens.append(some_tokens)
        lengths.append(some_lengths)
        owners += [owner for _, owner in batch]
    return np.concatenate(tokens), np.concatenate(lengths), np.array(owners, np.int64)


Encode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
"""Function from texts to all tokens, int32, and the number of tokens of each text, int64."""


@functools.lru_cache(maxsize=1)
def text_encoder(tokenizer: Tokenizer) -> Encode:
    """Returns the fastest function that encodes texts without special tokens."""
    return StretchEncoder(tokenizer) if are_words_separate(tokenizer) else functools.partial(encode_texts, tokenizer)


def are_words_separate(tokenizer: Tokenizer) -> bool:
    """Returns whether the stretches between spaces can be tokenized separately.

    They can with the steps of `bert.tokenizer.wordpiece`: these process single characters, except for combining marks,
    which are reordered only up to the next base character, and a space is one. No token crosses a space.
    """
    settings = json.loads(tokenizer.to_str())
    literal = tokenizer.encode_special_tokens and all(token["special"] for token in settings["added_tokens"])
    return literal and settings["model"]["type"] == "WordPiece" and has_wordpiece_steps(settings)


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Encodes each text separately."""
    ids = [encoding.ids for encoding in encode_batch(tokenizer, texts, False)]
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32), np.fromiter(map(len, ids), np.int64)


class StretchEncoder:
    """Caches the tokens of stretches between spaces: few distinct words make up most of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns all tokens, and the number of tokens of each text."""
        known = self._known
        if len(known) > MAX_STRETCHES:
            known.clear()
        stretches = [text.split(" ") for text in texts]
        flat = list(itertools.chain.from_iterable(stretches))
        new = [stretch for stretch in set(flat) if stretch not in known]
        encodings = encode_batch(self._tokenizer, new, False)
        known.update((stretch, tuple(encoding.ids)) for stretch, encoding in zip(new, encodings, strict=True))
        tokens = list(map(known.__getitem__, flat))
        for stretch in new:
            if len(stretch) > MAX_STRETCH_LENGTH:
                del known[stretch]
        counts = np.fromiter(map(len, tokens), np.int64, len(flat))
        ends = np.cumsum(np.fromiter(map(len, stretches), np.int64, len(texts)))
        lengths = np.diff(np.concatenate([[0], np.cumsum(counts)])[np.concatenate([[0], ends])])
        return np.fromiter(itertools.chain.from_iterable(tokens), np.int32, int(counts.sum())), lengths


def _stretches(text: str) -> Iterator[str]:
    """Divides a text at spaces into parts with the same tokens; text without spaces is divided anywhere."""
    start = 0
    while len(text) - start > 2 * STRETCH:
        match = BEFORE_WORD.search(text, start + STRETCH, start + 2 * STRETCH)
        end = start + 2 * STRETCH if match is None else match.start()
        yield text[start:end]
        start = end
    yield text[start:]
