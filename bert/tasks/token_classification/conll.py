"""Reads and writes CoNLL columns: sentences with a tag for each word.

The first column is the word, the last column its tag. An empty line or a ``-DOCSTART-`` line ends a sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bert.data.corpus.files import numbered_lines
from bert.data.records import listed_numbers
from bert.data.tables import file_suffix, table_dialect, table_rows
from bert.errors import UserError, WarningText, require
from bert.files import write_atomic
from bert.metrics.tagging_schemes import (
    CANONICAL,
    IO,
    OUTSIDE,
    SCHEMES,
    Spelling,
    convert,
    detect_scheme,
    find_spelling,
    first_invalid_tag,
    is_span_tag,
    join_tag,
    split_tag,
)

DOCUMENT_START = "-DOCSTART-"

SEPARATORS = {"\t": "tabs", " ": "spaces", ",": "commas"}
PLAIN = "plain"
"""The scheme of tags that do not mark spans, such as parts of speech."""

LONG_SENTENCE = 200
"""Number of words above which a file with a single sentence logs a warning about missing sentence ends."""

OTHER_SCHEMES = ("BILOU", "BMES")
"""Schemes that are read as BIOES."""

Reading = Literal["error", "count", "plain"]
"""Treatment of tags that violate their scheme: error or count. Plain tags have no scheme."""

Row = tuple[int, list[str]]
"""(line, cells); without cells it ends a sentence."""


@dataclass(frozen=True)
class Sentences:
    """The S sentences of a file."""

    words: list[list[str]]
    tags: list[list[str]] | None
    """The tags in BIO, or unchanged for the scheme plain; None without tags."""
    scheme: str = "BIO"
    """The scheme of the file: one of `bert.metrics.tagging_schemes.SCHEMES`, or PLAIN."""
    columns: list[list[list[str]]] | None = None
    """All columns of each word."""
    lines: list[int] = field(default_factory=list)
    """[S] line of the first word of each sentence, from 1."""
    delimiter: str = " "
    """Tab or space."""
    broken: list[int] = field(default_factory=list)
    """Line of the first fault in each sentence that violates the scheme; such tags are read as in conlleval."""
    path: Path | None = None
    texts: list[str] | None = None
    """The texts of sentences that do not come from columns."""
    spans: list[list[tuple[int, int]]] | None = None
    """[start, end) characters of each word in its text."""
    labels: tuple[str, ...] = ()
    """The labels of `label_names`."""
    unit: str = "line"
    """The unit of ``lines``: lines of a file, or rows of a data set."""
    lines_a_word: int = 1
    """1 in columns; 0 if each line holds a whole sentence."""
    spelling: Spelling = CANONICAL
    """The spelling of the tags in the file."""
    comments: int = 0
    """Number of lines skipped as comments."""
    remarks: tuple[str, ...] = ()
    """Sentences about tags that are read in an unusual way."""

    def __len__(self) -> int:
        return len(self.words)

    @property
    def labelled(self) -> bool:
        """Whether the sentences have tags."""
        return self.tags is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about comments, missing sentence ends and tags that violate the scheme."""
        notes = list(self.remarks)
        if self.comments:
            lines = "1 line that begins" if self.comments == 1 else f"{self.comments:,} lines that begin"
            notes.append(f"{self.path}: {lines} with # before a sentence skipped as comments")
        if len(self) == 1 and self.lines_a_word and len(self.words[0]) > LONG_SENTENCE:
            notes.append(
                f"{self.path} is one sentence of {len(self.words[0]):,} words: put an empty line after each sentence"
            )
        if self.broken:
            lines = ", ".join(map(str, self.broken[:10])) + (", ..." if len(self.broken) > 10 else "")
            notes.append(
                f"{self.path}: the tags of {len(self.broken)} sentence(s) violate the file's scheme, {self.scheme}, "
                f"and are read as in conlleval ({self.unit} {lines})"
            )
        return tuple(note if isinstance(note, WarningText) else WarningText(note) for note in notes)

    def line(self, sentence: int, word: int) -> int:
        """Returns the line of a word."""
        return self.lines[sentence] + word * self.lines_a_word

    def sentences(self) -> Iterator[str]:
        """Yields the words of each sentence, joined by spaces."""
        return (" ".join(words) for words in self.words)

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """The words: equal sentences are one group."""
        return [tuple(words) for words in self.words]

    def take(self, rows: Sequence[int]) -> Sentences:
        """Returns the sentences with these numbers."""
        taken: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in ("words", "tags", "columns", "lines", "texts", "spans")
            if (values := getattr(self, name))
        }
        return replace(self, **taken)


def width(path: Path) -> int:
    """Returns the number of columns of the first line with a word; 0 without words."""
    return len(next((cells for _, cells in split_columns(path)[1] if cells), ()))


def split_columns(path: Path) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Returns the delimiter of a file, plain or compressed, and (number from 1, cells) of each line.

    The delimiter is a tab in ``.tsv`` files and if the first line with a word has a tab; otherwise a space. Lines that
    end a sentence have no cells.
    """
    possible = _possible_comments(path)
    lines = ((line_number, line) for line_number, line in numbered_lines(path, utf_16=True) if _has_word(line))
    first = next((line for line_number, line in lines if line_number not in possible), "")
    delimiter = "\t" if "\t" in first or file_suffix(path) == ".tsv" else " "
    comments = _comments(path, delimiter, possible)
    return delimiter, (
        (line_number, _cells(line, delimiter))
        for line_number, line in numbered_lines(path, utf_16=True)
        if line_number not in comments
    )


def comment_lines(path: Path) -> int:
    """Returns the number of lines that `split_columns` skips as comments."""
    possible = _possible_comments(path)
    return len(_comments(path, split_columns(path)[0], possible)) if possible else 0


def _possible_comments(path: Path) -> set[int]:
    """Returns the numbers of lines before a sentence that start with "# ", or are one word that starts with "#"."""
    numbers, before_sentence = set(), True
    for line_number, line in numbered_lines(path, utf_16=True):
        is_comment = line.startswith("#") and (line[1:2] in ("", " ", "\t") or len(line.split()) == 1)
        if is_possible := before_sentence and is_comment:
            numbers.add(line_number)
        before_sentence = is_possible or not _has_word(line)
    return numbers


def _comments(path: Path, delimiter: str, possible: set[int]) -> set[int]:
    """Returns the possible comments with another number of columns than words, or with a tag that no word has."""
    if not possible:
        return set()
    lines = [(number, _cells(line, delimiter)) for number, line in numbered_lines(path, utf_16=True)]
    words = [cells for number, cells in lines if cells and number not in possible]
    width, tags = len(words[0]) if words else 1, {cells[-1] for cells in words}
    return {
        number
        for number, cells in lines
        if number in possible and (len(cells) != width or (width > 1 and cells[-1] not in tags))
    }


def read(
    path: Path, labelled: bool = True, reading: Reading = "error", types: Collection[str] | None = None
) -> Sentences:
    """Reads CoNLL columns, with the word first and the tag last (see `read_rows`)."""
    path = Path(path)
    delimiter, rows = split_columns(path)
    sentences = read_rows(path, rows, delimiter, labelled, reading, types=types)
    return replace(sentences, comments=comment_lines(path))


def read_rows(
    path: Path,
    rows: Iterable[tuple[int, list[str]]],
    delimiter: str,
    labelled: bool = True,
    reading: Reading = "error",
    word: int = 0,
    tag: int = -1,
    width: int = 0,
    types: Collection[str] | None = None,
) -> Sentences:
    """Returns the sentences of the rows of a file.

    The schemes BIO, IOB1 and BIOES are detected and converted to BIO, also in other spellings (`find_spelling`).

    Args:
      rows: (line, cells) of each row; a row without cells ends a sentence.
      delimiter: a key of SEPARATORS, for messages.
      labelled: whether there is a column of tags; otherwise one column is enough.
      reading: treatment of invalid tags; faults are counted in `Sentences.broken`.
      width: the number of columns; 0: the number of columns of the first row.
      types: the entity types of a model, for tags without prefixes; None if they are unknown.

    Raises:
      UserError: a line is invalid.
    """
    columns: list[list[list[str]]] = []
    lines: list[int] = []
    ended = True
    for line_number, cells in rows:
        if not cells:
            ended = True
            continue
        width = width or len(cells)
        _check_cells(cells, (word, tag), width, delimiter, labelled, path, line_number)
        if ended:
            columns.append([])
            lines.append(line_number)
        ended = False
        columns[-1].append(cells)
    if not columns:
        raise UserError(f"{path} has no words: write a line for each word, with the word first and its tag last")
    words = [[cells[word] for cells in sentence] for sentence in columns]
    untagged = Sentences(words, None, PLAIN, columns, lines, delimiter, path=path)
    if not labelled:
        return untagged
    return attach_tags(untagged, [[cells[tag] for cells in sentence] for sentence in columns], reading, types)


def read_words(path: Path, column: str) -> Sentences | None:
    """Returns the sentences of a file with a row for each word; None if it is a table of texts.

    Args:
      column: the column of words; in a ``.conll`` file without a header, words are the first column.
    """
    delimiter, numbered_rows = column_rows(path, None)
    rows = list(numbered_rows)
    line_number, cells = first_row(rows)
    if "text" in cells or (column not in cells and file_suffix(path) != ".conll"):
        return None
    word = cells.index(column) if column in cells else 0
    if column in cells:
        rows.remove((line_number, cells))
    return read_rows(path, rows, delimiter, labelled=False, word=word, width=len(cells))


def column_rows(path: Path, header: list[str] | None) -> tuple[str, Iterator[Row]]:
    """Returns the delimiter and the rows of a file."""
    if file_suffix(path) in (".csv", ".tsv"):
        dialect = table_dialect(path, header)
        if dialect.quoted:  # in other tables with tabs, a quote is a normal character
            return "\t" if dialect.delimiter == "\t" else ",", _csv_rows(path, header)
    return split_columns(path)


def _csv_rows(path: Path, header: list[str] | None) -> Iterator[Row]:
    """Yields the rows of a CSV file; empty rows, and lines that the csv module skips, have no cells."""
    last = 0
    for line_number, row in table_rows(path, header)[0]:
        if broken := next((cell for cell in row if set(cell) & set("\t\r\n")), None):
            raise UserError(f"{path}, line {line_number}: the cell {broken[:40]!r} has a tab or a line end: remove it")
        if line_number > last + 1:
            yield line_number - 1, []
        cells = [cell.strip(" ") for cell in row]
        yield line_number, cells if any(cells) and not cells[0].startswith(DOCUMENT_START) else []
        last = line_number


def first_row(rows: Iterable[Row]) -> Row:
    """Returns the first row with cells."""
    return next((row for row in rows if row[1]), (1, []))


def label_names(sentences: Sentences, declared: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the labels for the training sentences: O, then B- and I- of each type; or all plain tags.

    The order of ``declared`` labels is kept if they include all labels, and the tags are plain or BIO.
    """
    tags = {tag for sentence in require(sentences.tags, "the tags") for tag in sentence}
    if sentences.scheme == PLAIN:
        needed = tuple(sorted(tags))
    else:
        types = sorted({split_tag(tag)[1] for tag in tags - {OUTSIDE}})
        needed = (OUTSIDE, *(join_tag(prefix, type) for type in types for prefix in "BI"))
    keeps_order = sentences.scheme != "BIOES" and sentences.spelling == CANONICAL and set(needed) <= set(declared)
    return tuple(dict.fromkeys(declared)) if keeps_order else needed


def write_predictions(path: Path, sentences: Sentences, tags: Sequence[Sequence[str]]) -> Path:
    """Writes the columns of the file and the predicted tag in the scheme of the file, for conlleval."""
    lines = []
    for sentence, predicted in enumerate(tags):
        columns = sentences.columns[sentence] if sentences.columns else [[word] for word in sentences.words[sentence]]
        if sentences.scheme in SCHEMES:
            predicted = convert(predicted, sentences.scheme)
            if sentences.spelling != CANONICAL:
                predicted = [sentences.spelling.write(tag) for tag in predicted]
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
    cells: list[str], columns: tuple[int, int], width: int, delimiter: str, labelled: bool, path: Path, line_number: int
) -> None:
    if len(cells) != width:
        raise UserError(
            f"{path}, line {line_number}: {len(cells)} columns between {SEPARATORS[delimiter]}, but the lines above "
            f"have {width}: fix or remove the line"
        )
    if labelled and width < 2:
        raise UserError(f"{path}, line {line_number}: one column: write the word first and its tag last")
    for name, column in zip(("word", "tag") if labelled else ("word",), columns, strict=False):
        if not cells[column]:
            raise UserError(f"{path}, line {line_number}: the {name} is empty: fix or remove the line")


def attach_tags(
    untagged: Sentences, tags: list[list[str]], reading: Reading = "error", types: Collection[str] | None = None
) -> Sentences:
    """Returns the sentences with their tags (see `read_rows`)."""
    if reading == "plain":
        return replace(untagged, tags=tags)
    counts = Counter(tag for sentence in tags for tag in sentence)
    # Types without prefixes mark entities for a model, or if O is the most frequent tag.
    if types is None and counts[OUTSIDE] == max(counts.values(), default=0):
        types = ()
    spelling = find_spelling(counts, types) or CANONICAL
    if spelling != CANONICAL:
        tags = [[spelling.read(tag) or tag for tag in sentence] for sentence in tags]
        untagged = replace(untagged, spelling=spelling)
    remark = ""
    if spelling.scheme == IO:
        remark = "the tags have no B- or I-, and are read as entity types: adjacent words of one type are one entity"
    elif spelling == CANONICAL and len(counts) > 1 and {tag for tag in counts if is_span_tag(tag)} == {OUTSIDE}:
        remark = (
            "O is among the tags, but they are read as plain tags, scored by accuracy: write B- or I- before a type "
            "for entities"
        )
    if remark:
        untagged = replace(untagged, remarks=(*untagged.remarks, f"{untagged.path}: {remark}"))
    places = [(index, word) for index, sentence in enumerate(tags) for word in range(len(sentence))]
    unmarked = [(index, word) for index, word in places if not is_span_tag(tags[index][word])]
    typed = {tag[:2] for sentence in tags for tag in sentence} & {"B-", "I-", "E-", "S-"}
    if unmarked and not typed:
        return replace(untagged, tags=tags)
    if unmarked:
        sentence, word = unmarked[0]
        what = (
            f"the tag {tags[sentence][word]!r} is not part of {', '.join((*SCHEMES, *OTHER_SCHEMES))}: write O, or B-, "
            "I-, E- or S- and a type"
        )
        raise _tag_error(untagged, unmarked, what)
    scheme = detect_scheme(tags)
    firsts = [(index, first_invalid_tag(sentence, scheme)) for index, sentence in enumerate(tags)]
    faults = [(index, word) for index, word in firsts if word is not None]
    if faults and reading == "error":
        sentence, word = faults[0]
        last = tags[sentence][word - 1] if word else "the start of the sentence"
        what = (
            f"the tag {tags[sentence][word]} after {last} violates the file's scheme, {scheme}: fix the tag, or read "
            "such faults as in conlleval: --data.invalid_tags count"
        )
        raise _tag_error(untagged, faults, what)
    broken = [untagged.line(*place) for place in faults]
    return replace(untagged, tags=[convert(sentence, "BIO") for sentence in tags], scheme=scheme, broken=broken)


def _tag_error(sentences: Sentences, places: Sequence[tuple[int, int]], what: str) -> UserError:
    """Returns an error about the first tag, with the lines of all faulty ones. Places are (sentence, word)."""
    numbers = sorted({sentences.line(*place) for place in places})
    more = (
        "" if len(numbers) == 1 else f"; {len(numbers):,} {sentences.unit}s have such tags: {listed_numbers(numbers)}"
    )
    return UserError(f"{sentences.path}, {sentences.unit} {numbers[0]}: {what}{more}")
