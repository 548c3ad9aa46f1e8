"""Tagging from CoNLL columns: files -> sentences -> rows of tokens; labels -> tags, entities and columns.

The first column is the word, the last its tag; an empty line ends a sentence and so does a ``-DOCSTART-`` line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert.data.corpus.files import numbered_lines
from bert.data.features import IGNORE_INDEX, ROWS_AT_ONCE, Features, prose_tokenizer
from bert.data.records import kind_of
from bert.data.row_template import row_template
from bert.data.windows import widest_windows, window_starts
from bert.errors import UserError, require
from bert.files import write_atomic
from bert.metrics.tagging_schemes import (
    OUTSIDE,
    SCHEMES,
    convert,
    detect_scheme,
    extract_entities,
    first_invalid_tag,
    is_span_tag,
    join_tag,
    split_tag,
)
from bert.tokenizer.wordpiece import after_space, keeps_spaces, special_ids

DOCUMENT_START = "-DOCSTART-"

SEPARATORS = {"\t": "tabs", " ": "spaces", ",": "commas"}

PLAIN = "plain"
"""The scheme of tags that mark no spans: parts of speech, say."""


@dataclass(frozen=True)
class Sentences:
    """A file's sentences, S of them."""

    words: list[list[str]]
    tags: list[list[str]] | None
    """As `convert` writes them in BIO, or as in the file where the scheme is plain; None where it has no tags."""
    scheme: str = "BIO"
    """The file's own: one of bert.metrics.tagging_schemes.SCHEMES, or PLAIN."""
    columns: list[list[list[str]]] | None = None
    """Every column of every word as it stands in the file."""
    lines: list[int] = field(default_factory=list)
    """[S] line of each sentence's first word, from 1."""
    delimiter: str = " "
    """Tab or space."""
    broken: list[int] = field(default_factory=list)
    """Lines of the first fault of each sentence whose tags break the scheme; they are read as conlleval does."""
    path: Path | None = None
    texts: list[str] | None = None
    """The texts that the sentences are, where these come from no columns."""
    places: list[list[tuple[int, int]]] | None = None
    """First character of every word in its text, and one past the last."""
    labels: tuple[str, ...] = ()
    """The labels that a model of them needs, where `label_names` was asked."""
    unit: str = "line"
    """What the numbers in ``lines`` count: lines, or the rows of a data set."""
    lines_a_word: int = 1
    """1 in columns; 0 where a whole sentence stands on one line."""

    def __len__(self) -> int:
        return len(self.words)

    @property
    def labelled(self) -> bool:
        """Whether the tags are known."""
        return self.tags is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on tags that break the scheme."""
        if not self.broken:
            return ()
        lines = ", ".join(map(str, self.broken[:10])) + (", ..." if len(self.broken) > 10 else "")
        return (
            f"{self.path}: the tags of {len(self.broken)} sentence(s) break the file's scheme, {self.scheme}, and are "
            f"read as conlleval reads them ({self.unit} {lines})",
        )

    def line(self, sentence: int, word: int) -> int:
        """The line of a word."""
        return self.lines[sentence] + word * self.lines_a_word

    def sentences(self) -> Iterator[str]:
        """The words of each sentence with spaces between."""
        return (" ".join(words) for words in self.words)

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """The words: equal sentences stay together."""
        return [tuple(words) for words in self.words]

    def take(self, rows: Sequence[int]) -> Sentences:
        """The sentences of these numbers."""
        taken: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in ("words", "tags", "columns", "lines", "texts", "places")
            if (values := getattr(self, name))
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class Rows:
    """R rows of the pieces of some words, each as of one text: a long sentence has several, each word its label in one
    of them."""

    features: Features
    """The tokens; all of segment A. Labels are those of tokens, IGNORED but where ``words`` has a word; None where
    there are no tags."""
    words: np.ndarray
    """[tokens of all rows] int32: number of the word, counted through all sentences, at the one place in all rows
    where it is labelled: its first piece, in the row that shows most around it; -1 elsewhere."""

    def __len__(self) -> int:
        return len(self.features)

    @property
    def lengths(self) -> np.ndarray:
        """[R] tokens of each row."""
        return self.features.lengths

    @property
    def labels(self) -> np.ndarray | None:
        """[tokens of all rows] int32 or None."""
        return self.features.labels

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """As `Features.batch`, labels [B, T]."""
        return self.features.batch(rows, length, batch_size)

    def digest(self) -> str:
        """Of tokens and labels."""
        return self.features.digest()


class Entity(NamedTuple):
    """An entity of a text."""

    type: str
    text: str
    start: int
    """First character."""
    end: int
    """One past the last."""
    probability: float | None = None
    """Mean of its words' tags'."""


def width(path: Path) -> int:
    """The number of columns, by the first line with a word; 0 where there is none."""
    return len(next((cells for _, cells in split_columns(path)[1] if cells), ()))


def split_columns(path: Path) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """What separates the columns of a file, plain or packed, and (number from 1, cells) of each of its lines.

    Tabs in a ``.tsv``, and where the first line with a word has one; else spaces. A line that ends a sentence has no
    cells.
    """
    first = next((line for _, line in numbered_lines(path, utf_16=True) if _has_word(line)), "")
    delimiter = "\t" if "\t" in first or kind_of(path) == ".tsv" else " "
    return delimiter, ((number, _cells(line, delimiter)) for number, line in numbered_lines(path, utf_16=True))


def read(path: Path, labelled: bool = True, broken: Literal["error", "count"] = "error") -> Sentences:
    """Reads CoNLL columns, the word first and the tag last, as `read_rows` does."""
    path = Path(path)
    delimiter, rows = split_columns(path)
    return read_rows(path, rows, delimiter, labelled, broken)


def read_rows(
    path: Path,
    rows: Iterable[tuple[int, list[str]]],
    delimiter: str,
    labelled: bool = True,
    broken: Literal["error", "count"] = "error",
    word: int = 0,
    tag: int = -1,
    width: int = 0,
) -> Sentences:
    """Makes sentences of a file's rows.

    Tags of the schemes BIO, IOB1 and BIOES are recognised by what they are and become BIO.

    Args:
      rows: (line, cells) of each; one without cells ends a sentence.
      delimiter: a key of SEPARATORS, for sentences of errors.
      labelled: the column ``tag`` is the tag; otherwise there are no tags, and one column will do.
      broken: what a tag that its scheme does not allow there is: an error, or a fault to count (`Sentences.broken`).
      word, tag: the columns.
      width: the number of columns; 0 takes that of the first row.

    Raises:
      UserError: the file and line, what is wrong, and the fix.
    """
    columns: list[list[list[str]]] = []
    lines: list[int] = []
    ended = True
    for number, cells in rows:
        if not cells:
            ended = True
            continue
        width = width or len(cells)
        _check_cells(cells, (word, tag), width, delimiter, labelled, path, number)
        if ended:
            columns.append([])
            lines.append(number)
        ended = False
        columns[-1].append(cells)
    if not columns:
        raise UserError(f"{path} holds no words: it needs a line for each word, with the word first and its tag last")
    words = [[cells[word] for cells in sentence] for sentence in columns]
    untagged = Sentences(words, None, PLAIN, columns, lines, delimiter, path=path)
    return (
        attach_tags(untagged, [[cells[tag] for cells in sentence] for sentence in columns], broken)
        if labelled
        else untagged
    )


def label_names(sentences: Sentences) -> tuple[str, ...]:
    """The labels that a model needs for the training sentences: O, then B- and I- of each type; or every plain tag."""
    tags = {tag for sentence in require(sentences.tags, "the tags") for tag in sentence}
    if sentences.scheme == PLAIN:
        return tuple(sorted(tags))
    types = sorted({split_tag(tag)[1] for tag in tags - {OUTSIDE}})
    return (OUTSIDE, *(join_tag(prefix, type) for type in types for prefix in "BI"))


def tokenize(tokenizer: Tokenizer, sentences: Sentences, labels: Sequence[str], max_length: int = 128) -> Rows:
    """Sentences -> rows of at most ``max_length`` tokens; every word is labelled in exactly one place.

    A sentence that does not fit is read through windows that overlap by half. A word without a piece (a control
    character, say) is [UNK], so that it has a label too. ``tokenizer`` stays as it is.

    Args:
      labels: a tag's number is its place here.

    Raises:
      UserError: file and line of a tag that is not among ``labels``; a ``max_length`` below 4.
    """
    special, template = special_ids(tokenizer), row_template(tokenizer)
    room = template.room(max_length)
    if room < 2:
        raise UserError(f"data.max_length is {max_length}: [CLS], [SEP] and words need at least {template.size + 2}")
    pieces = _pieces(tokenizer, sentences.words, special.unk, room)
    ids, numbers = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    before = 0
    for words in filter(None, sentences.words):
        parts = [pieces[word] for word in words]
        flat = np.concatenate(parts)
        firsts = np.cumsum([0, *map(len, parts[:-1])])
        starts = window_starts(len(flat), room)
        ends = np.minimum(starts + room, len(flat))
        widest = widest_windows(starts, ends)[firsts]  # ascending, as the words are
        bounds = np.searchsorted(widest, np.arange(len(starts) + 1))
        for start, end, (first, last) in zip(starts, ends, itertools.pairwise(bounds), strict=True):
            here = np.arange(first, last)
            if len(here):
                ids.append(template.row(flat[start:end]))
                numbers.append(np.full(len(ids[-1]), -1, np.int32))
                numbers[-1][firsts[here] - start + len(template.prefix)] = here + before
        before += len(words)
    lengths = np.array([len(row) for row in ids[1:]], np.int64)
    of_token, of_word = np.concatenate(numbers), _label_numbers(sentences, labels)
    features = Features(
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        segment_a_lengths=lengths.astype(np.int32),
        labels=None if of_word is None else np.append(of_word, IGNORE_INDEX)[of_token].astype(np.int32),
        pad_token_id=special.pad,
        token_labels=True,
    )
    return Rows(features, of_token)


def answers(sentences: Sentences, rows: Rows, predictions: np.ndarray, labels: Sequence[str]) -> list[list[str]]:
    """Predicted labels -> a tag for every word of every sentence.

    Args:
      predictions: [R, T] number of the label predicted at each token, in the order of ``rows``; T at least its
        longest row. What is predicted where no word is labelled is ignored.
    """
    longest = rows.lengths.max(initial=0)
    if np.shape(predictions)[0] != len(rows) or longest > np.shape(predictions)[1]:
        raise ValueError(f"predictions {np.shape(predictions)} for {len(rows)} rows of up to {longest} tokens")
    tags = iter(gather_word_values(rows, np.asarray(predictions)).tolist())
    return [[labels[next(tags)] for _ in words] for words in sentences.words]


def gather_word_values(rows: Rows, values: np.ndarray) -> np.ndarray:
    """[R, T] values of the tokens -> [words] that of each word, at the place where it is labelled."""
    flat = values[np.arange(values.shape[1]) < rows.lengths[:, None]]
    of_word = np.empty(int(rows.words.max(initial=-1)) + 1, values.dtype)
    of_word[rows.words[rows.words >= 0]] = flat[rows.words >= 0]
    return of_word


def entities(
    text: str, places: Sequence[tuple[int, int]], tags: Sequence[str], probabilities: Sequence[float] | None = None
) -> list[Entity]:
    """The entities of a text, by the tags of its words, the words' places and their shares."""
    found = []
    for type, first, end in extract_entities(tags):
        start, stop = places[first][0], places[end - 1][1]
        share = None if probabilities is None else sum(probabilities[first:end]) / (end - first)
        found.append(Entity(type, text[start:stop], start, stop, share))
    return found


def write_predictions(path: Path, sentences: Sentences, tags: Sequence[Sequence[str]]) -> Path:
    """Writes the file's columns with the predicted tag, in the file's scheme, as one more: what conlleval reads."""
    lines = []
    for number, predicted in enumerate(tags):
        columns = sentences.columns[number] if sentences.columns else [[word] for word in sentences.words[number]]
        predicted = convert(predicted, sentences.scheme) if sentences.scheme in SCHEMES else predicted
        for cells, tag in zip(columns, predicted, strict=True):
            lines.append(sentences.delimiter.join((*cells, tag)) + "\n")
        lines.append("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(lines))
    return path


def _has_word(line: str) -> bool:
    return bool(line.strip(" \t")) and not line.startswith(DOCUMENT_START)


def _cells(line: str, delimiter: str) -> list[str]:
    if not _has_word(line):
        return []
    cells = [cell.strip(" ") for cell in line.split(delimiter)]
    return cells if delimiter == "\t" else [cell for cell in cells if cell]


def _check_cells(
    cells: list[str], wanted: tuple[int, int], width: int, delimiter: str, labelled: bool, path: Path, number: int
) -> None:
    if len(cells) != width:
        raise UserError(
            f"{path}, line {number}: {len(cells)} columns between {SEPARATORS[delimiter]} where the lines above "
            f"have {width}: fix or remove the line"
        )
    if labelled and width < 2:
        raise UserError(f"{path}, line {number}: one column: the word must come first and its tag last")
    for what, column in zip(("word", "tag") if labelled else ("word",), wanted, strict=False):
        if not cells[column]:
            raise UserError(f"{path}, line {number}: the {what} is empty: fix or remove the line")


def attach_tags(untagged: Sentences, tags: list[list[str]], broken: str = "error") -> Sentences:
    """The sentences with their tags, as `read` treats them."""
    marking = [is_span_tag(tag) for sentence in tags for tag in sentence]
    typed = {tag[:2] for sentence in tags for tag in sentence} & {"B-", "I-", "E-", "S-"}
    if not typed and not all(marking):
        return replace(untagged, tags=tags)
    if not all(marking):
        sentence, place = _place(tags, marking.index(False))
        raise UserError(
            f"{untagged.path}, {untagged.unit} {untagged.line(sentence, place)}: the tag {tags[sentence][place]!r} is "
            f"none of {', '.join(SCHEMES)}: write O, or B-, I-, E- or S- and a type"
        )
    scheme = detect_scheme(tags)
    faults = []
    for number, own in enumerate(tags):
        fault = first_invalid_tag(own, scheme)
        if fault is not None:
            faults.append(untagged.line(number, fault))
            if broken == "error":
                last = own[fault - 1] if fault else "the start of the sentence"
                raise UserError(
                    f"{untagged.path}, {untagged.unit} {faults[0]}: the tag {own[fault]} after {last} breaks the "
                    f"file's scheme, {scheme}: fix the tag, or read such faults as conlleval does: "
                    "--data.invalid_tags count"
                )
    return replace(untagged, tags=[convert(sentence, "BIO") for sentence in tags], scheme=scheme, broken=faults)


def _place(sentences: Sequence[Sequence[str]], word: int) -> tuple[int, int]:
    """Sentence, and place in it, of a word counted through all of them."""
    ends = np.cumsum([len(sentence) for sentence in sentences])
    sentence = int(np.searchsorted(ends, word, side="right"))
    return sentence, word - int(ends[sentence]) + len(sentences[sentence])


def _label_numbers(sentences: Sentences, labels: Sequence[str]) -> np.ndarray | None:
    if sentences.tags is None:
        return None
    numbers = {label: number for number, label in enumerate(labels)}
    for sentence, tags in enumerate(sentences.tags):
        for place, tag in enumerate(tags):
            if tag not in numbers:
                line = f", {sentences.unit} {sentences.line(sentence, place)}" if sentences.lines else ""
                raise UserError(
                    f"{sentences.path or 'the sentences'}{line}: the tag {tag} does not occur in the training "
                    f"data, whose labels are {', '.join(labels)[:200]}: fix the tag, or name all labels in data.labels"
                )
    return np.array([numbers[tag] for tags in sentences.tags for tag in tags], np.int32)


def _pieces(tokenizer: Tokenizer, sentences: list[list[str]], unknown: int, room: int) -> dict[str, np.ndarray]:
    """The ids of each distinct word, at most ``room``: a word's pieces do not depend on its neighbours.

    Where tokens hold the space before a word every word has one, also the first, as in transformers' run_ner.py
    (is_split_into_words with add_prefix_space).
    """
    own, spaced = prose_tokenizer(tokenizer), keeps_spaces(tokenizer)
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence))
    pieces: dict[str, np.ndarray] = {}
    for first in range(0, len(words), ROWS_AT_ONCE):
        part = words[first : first + ROWS_AT_ONCE]
        texts = [after_space(word) for word in part] if spaced else part
        for word, encoding in zip(part, own.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            pieces[word] = np.array(encoding.ids[:room] or [unknown], np.int32)
    return pieces
