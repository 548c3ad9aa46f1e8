"""Documents of a store -> the tokens of a shard: sentence by sentence, or document by document as they are."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert.data.corpus.document_store import Documents
from bert.data.corpus.documents import split_sentences
from bert.tokenizer.wordpiece import keeps_spaces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_OF_SENTENCES = 4096
"""Sentences tokenised in one call: enough to make calls cheap, few enough to bound memory."""

STRETCH, BATCH_OF_STRETCHES = 4096, 256
"""Characters of a document that are tokenised as one text, up to the next place to cut, and texts in one call."""

BEFORE_WORD = re.compile(r"(?<=\S)[ \n](?=\S)")
"""A single space or line feed: no token begins before it and ends after it, so that a text may be cut here."""


class TokenizedDocuments(NamedTuple):
    """The tokens of a shard's documents. Sentences without a token and documents without a sentence are left out."""

    tokens: np.ndarray
    """All tokens, one after the other."""
    sentences: list[int]
    """Offsets of the sentences in ``tokens``, one more than there are."""
    documents: list[int]
    """Offsets of the documents in the sentences, one more than there are."""
    indices: list[int]
    """Of each document, its index in the store."""


def tokenize_sentences(
    store: Documents,
    indices: np.ndarray,
    tokenizer: Tokenizer,
    longest: int,
    languages: tuple[str, ...],
    one_sentence_per_line: bool,
) -> TokenizedDocuments:
    """Tokenizes the documents of these indices, sentence by sentence.

    A sentence of more than ``longest`` tokens, as many as fit a row, is cut into even pieces of about half that: if a
    corpus has no punctuation, truncation would throw most of it away.

    Args:
      languages: language code of each corpus; a single entry applies to all of them.
      one_sentence_per_line: whether lines are the sentences.
    """

    def sentences() -> Iterator[tuple[str, int]]:
        sources = store.sources() if len(languages) > 1 else None
        keep_space = keeps_spaces(tokenizer)
        for owner, paragraphs in enumerate(store.read(indices)):
            language = languages[0 if sources is None else sources[indices[owner]]]
            for sentence in split_sentences(paragraphs, language, one_sentence_per_line, keep_space):
                yield sentence, owner

    tokens, length, owner = _tokenize(sentences(), tokenizer, BATCH_OF_SENTENCES)
    pieces = np.where(length > longest, -(-length // (longest // 2)), np.minimum(length, 1))
    sentence, owner = np.repeat(np.arange(len(pieces)), pieces), np.repeat(owner, pieces)
    piece = np.arange(len(sentence)) - (np.cumsum(pieces) - pieces)[sentence]
    length = length[sentence] // pieces[sentence] + (piece < length[sentence] % pieces[sentence])
    starts = np.flatnonzero(np.diff(owner)) + 1
    documents = [0, *starts.tolist(), len(owner)] if len(owner) else [0]
    return TokenizedDocuments(
        tokens, [0, *np.cumsum(length).tolist()], documents, indices[owner[documents[:-1]]].tolist()
    )


def tokenize_documents(store: Documents, indices: np.ndarray, tokenizer: Tokenizer, end: int) -> TokenizedDocuments:
    """Tokenizes the documents of these indices as they are, each as one sentence, which but for the last ends with the
    token ``end``."""

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
    """Texts and their owners -> all tokens int32, the number of each text's tokens and its owner, both int64."""
    batches, lengths, owners = [np.zeros(0, np.int32)], list[int](), list[int]()
    texts = iter(texts)
    while batch := list(itertools.islice(texts, batch_size)):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        batches.append(np.fromiter(itertools.chain.from_iterable(ids), np.int32))
        lengths += map(len, ids)
        owners += [owner for _, owner in batch]
    return np.concatenate(batches), np.array(lengths, np.int64), np.array(owners, np.int64)


def _stretches(text: str) -> Iterator[str]:
    """A text in parts that have the tokens of the whole; one without a space between words is cut all the same."""
    start = 0
    while len(text) - start > 2 * STRETCH:
        place = BEFORE_WORD.search(text, start + STRETCH, start + 2 * STRETCH)
        end = start + 2 * STRETCH if place is None else place.start()
        yield text[start:end]
        start = end
    yield text[start:]
