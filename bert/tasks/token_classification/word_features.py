"""Splits texts into words, makes rows of tokens from words, and tags of words from labels of tokens."""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert.data.encoding import ROWS_AT_ONCE, prose_tokenizer, row_template, widest_windows, window_starts
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.errors import UserError, listed
from bert.metrics.tagging_schemes import extract_entities
from bert.tasks.token_classification.conll import Sentences
from bert.tokenizer.library import encode_batch, keeps_spaces, special_ids
from bert.tokenizer.vocabulary import after_space


@dataclass(frozen=True, kw_only=True)
class WordFeatures(TokenRows):
    """R rows of sentences. A long sentence has several rows, and each word has a label in exactly one of them.

    The labels of tokens are IGNORE_INDEX except where ``words`` has a word; None without tags.
    """

    words: np.ndarray
    """[tokens of all rows] int32: index of the word, counted over all sentences, at its labelled token (its first token
    in the row with the most context); -1 elsewhere."""
    sentences: np.ndarray
    """[R] int32: index of the sentence of each row."""

    @property
    def input_numbers(self) -> np.ndarray:
        return self.sentences


class Entity(NamedTuple):
    """An entity of a text."""

    type: str
    text: str
    start: int
    """First character."""
    end: int
    """One past the last."""
    probability: float | None = None
    """Mean probability of the tags of its words."""


def tokenize(tokenizer: Tokenizer, sentences: Sentences, labels: Sequence[str], max_length: int = 128) -> WordFeatures:
    """Returns the sentences as rows of at most ``max_length`` tokens; each word is labelled at one token.

    A longer sentence is split into windows that overlap by half. A word without tokens (such as a control character)
    becomes [UNK], so that it has a label. ``tokenizer`` does not change.

    Args:
      labels: the tags, in the order of the label indices.

    Raises:
      UserError: a tag is not among ``labels``, or ``max_length`` is below 4.
    """
    special, template = special_ids(tokenizer), row_template(tokenizer)
    room = template.room(max_length)
    if room < 2:
        raise UserError(f"data.max_length is {max_length}: [CLS], [SEP] and words need at least {template.size + 2}")
    tokens_of = _tokens_of_words(tokenizer, sentences.words, room)
    ids, word_of_token = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    words_before, sentence_of_row = 0, list[int]()
    for number, words in enumerate(sentences.words):
        if not words:
            continue
        word_ids = [tokens_of[word] for word in words]
        sentence_ids = np.concatenate(word_ids)
        first_tokens = np.cumsum([0, *map(len, word_ids[:-1])])
        starts = window_starts(len(sentence_ids), room)
        ends = np.minimum(starts + room, len(sentence_ids))
        widest = widest_windows(starts, ends)[first_tokens]  # ascending, like the words
        bounds = np.searchsorted(widest, np.arange(len(starts) + 1))
        for start, end, (first, last) in zip(starts, ends, itertools.pairwise(bounds), strict=True):
            if first == last:
                continue
            ids.append(template.row(sentence_ids[start:end]))
            sentence_of_row.append(number)
            word_of_token.append(np.full(len(ids[-1]), -1, np.int32))
            columns = first_tokens[first:last] - start + len(template.prefix)
            word_of_token[-1][columns] = np.arange(first, last) + words_before
        words_before += len(words)
    lengths = np.array([len(row) for row in ids[1:]], np.int64)
    word_indices, word_labels = np.concatenate(word_of_token), _encode_tags(sentences, labels)
    return WordFeatures(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_a_lengths=lengths.astype(np.int32),
        labels=None if word_labels is None else np.append(word_labels, IGNORE_INDEX)[word_indices].astype(np.int32),
        pad_token_id=special.padding,
        token_labels=True,
        has_third_type=template.has_third_type,
        words=word_indices,
        sentences=np.array(sentence_of_row, np.int32),
    )


def decode_tags(
    sentences: Sentences, features: WordFeatures, predictions: np.ndarray, labels: Sequence[str]
) -> list[list[str]]:
    """Returns a tag for each word of each sentence.

    Args:
      predictions: [R, T] label index predicted for each token of ``features``, T at least the length of the longest
        row. Tokens without a label are ignored.
    """
    max_length = features.lengths.max(initial=0)
    if np.shape(predictions)[0] != len(features) or max_length > np.shape(predictions)[1]:
        raise ValueError(f"predictions {np.shape(predictions)} for {len(features)} rows of up to {max_length} tokens")
    tags = iter(gather_word_values(features, np.asarray(predictions)).tolist())
    return [[labels[next(tags)] for _ in words] for words in sentences.words]


def gather_word_values(features: WordFeatures, values: np.ndarray) -> np.ndarray:
    """Returns the values [words] at the labelled token of each word, from values of all tokens [R, T]."""
    flat = values[np.arange(values.shape[1]) < features.lengths[:, None]]
    has_word = features.words >= 0
    word_values = np.empty(int(features.words.max(initial=-1)) + 1, values.dtype)
    word_values[features.words[has_word]] = flat[has_word]
    return word_values


def entities(
    text: str, spans: Sequence[tuple[int, int]], tags: Sequence[str], probabilities: Sequence[float] | None = None
) -> list[Entity]:
    """Returns the entities of a text from the tags, character spans and probabilities of its words."""
    text_entities = []
    for type, first, end in extract_entities(tags):
        start, stop = spans[first][0], spans[end - 1][1]
        probability = None if probabilities is None else sum(probabilities[first:end]) / (end - first)
        text_entities.append(Entity(type, text[start:stop], start, stop, probability))
    return text_entities


def _encode_tags(sentences: Sentences, labels: Sequence[str]) -> np.ndarray | None:
    """Returns the label index of each word's tag, [words] int32; None without tags."""
    if sentences.tags is None:
        return None
    label_of = {label: index for index, label in enumerate(labels)}
    for sentence, tags in enumerate(sentences.tags):
        for word, tag in enumerate(tags):
            if tag not in label_of:
                line = f", {sentences.unit} {sentences.line(sentence, word)}" if sentences.lines else ""
                raise UserError(
                    f"{sentences.path or 'the sentences'}{line}: the tag {tag} does not occur in the training "
                    f"data, whose labels are {listed(labels)}: fix the tag, or name all labels in data.labels"
                )
    return np.array([label_of[tag] for tags in sentences.tags for tag in tags], np.int32)


def _tokens_of_words(tokenizer: Tokenizer, sentences: list[list[str]], room: int) -> dict[str, np.ndarray]:
    """Returns at most ``room`` token ids of each distinct word: the tokens of a word do not depend on its context.

    If the tokens include the space before a word, all words have a space, also the first one, as in transformers'
    run_ner.py (is_split_into_words with add_prefix_space).
    """
    literal, spaced = prose_tokenizer(tokenizer), keeps_spaces(tokenizer)
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence))
    ids: dict[str, np.ndarray] = {}
    for first in range(0, len(words), ROWS_AT_ONCE):
        batch = words[first : first + ROWS_AT_ONCE]
        texts = [after_space(word) for word in batch] if spaced else batch
        for word, encoding in zip(batch, encode_batch(literal, texts, False), strict=True):
            ids[word] = np.array(encoding.ids[:room] or [special_ids(tokenizer).unk], np.int32)
    return ids


_CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f"
"""Characters that google-research/bert's ``tokenization.py`` treats as Chinese."""

_RUN = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
_ABBREVIATION = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
"""Abbreviations such as U.N, e.g or Ph.D (but not example.com), whose final dot is part of the word."""

CLITICS = ("'s", "n't", "'re", "'ve", "'ll", "'d", "'m")
"""Endings of English words that are separate words in the Penn Treebank, CoNLL-2003 and WNUT-17."""


def separate_clitics(counts: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the CLITICS that are more often separate words than the end of a longer word."""
    separate = Counter[str]()
    for word, count in counts.items():
        word = plain_apostrophes(word.lower())
        if ending := next((clitic for clitic in CLITICS if word.endswith(clitic)), None):
            separate[ending] += count if word == ending else -count
    return tuple(clitic for clitic in CLITICS if separate[clitic] > 0)


def plain_apostrophes(text: str) -> str:
    return text.replace("\u2019", "'")


def split_text(text: str, clitics: Sequence[str] = ()) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the words of a text as files in columns have them, and their spans.

    Words are separated by white space. Each punctuation character before or after a word is a separate word, except the
    last dot of an abbreviation with dots. Punctuation within a word (U.N., AL-AIN, O'Neill) and the signs of tweets
    (@name, #topic) stay. Each Chinese character is a word. An ending among ``clitics`` is a separate word.
    """
    lower = "".join(small if len(small := character.lower()) == 1 else character for character in text)
    plain = plain_apostrophes(lower) if clitics else ""
    spans: list[tuple[int, int]] = []
    for run in _RUN.finditer(text):
        start, end = first, last = run.span()
        while first < end and _is_punctuation(text[first]):
            first += 1
        if start < first < end and text[first - 1] in "@#":
            first -= 1
        while last > first and _is_punctuation(text[last - 1]):
            last -= 1
        if text.startswith(".", last, end) and _ABBREVIATION.fullmatch(text, first, last):
            last += 1
        if first > start and plain[first - 1 : last] in clitics:  # 's that is separate in the text
            first -= 1
        spans += [(position, position + 1) for position in range(start, first)]
        ends = [last]
        while ending := next((one for one in clitics if plain.endswith(one, first, ends[0])), ""):
            if ends[0] - len(ending) <= first:
                break
            ends.insert(0, ends[0] - len(ending))
        spans += itertools.pairwise([first, *ends]) if first < last else []
        spans += [(position, position + 1) for position in range(last, end)]
    return [text[start:end] for start, end in spans], spans


def _is_punctuation(character: str) -> bool:
    """Returns whether BERT's tokenizer treats a character as punctuation: also all ASCII symbols."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")
