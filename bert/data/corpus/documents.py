"""Text on disk -> documents -> sentences. Streaming: memory holds one document, never a file.

A source is a file, a glob, a folder (searched through, in sorted order), a folder that ``datasets`` saved, a URL of one
of these, ``hub:NAME[:CONFIG][:SPLIT]`` or ``docstrings:``; several make a list. `bert.data.corpus.files` reads each.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

from bert.config import DOCSTRINGS_PREFIX, HUB_PREFIX
from bert.data.corpus.data_sets import dataset_files, is_saved_dataset
from bert.data.corpus.docstrings import docstring_documents, source_state
from bert.data.corpus.files import (
    FOLDER_SUFFIXES,
    Document,
    Reading,
    Skipped,
    corpus_format,
    is_blank,
    read_documents,
    require_readable_kind,
)
from bert.errors import UserError, unreadable, warn_once
from bert.files import atomic_write, load_json
from bert.remote import fetch

LONG_PARAGRAPH = 10_000
"""Characters of a paragraph that are searched for sentences at once."""

UNSPACED = 500
"""Characters without white space after which a text is cut at a sentence end before it is searched: the time that
sentencex needs for a sentence end grows with the distance to the last white space."""

LONGEST_QUOTATION = 2000
"""Characters after which an opening quotation mark or bracket counts as one that is never closed."""

_OPENING, _CLOSING = "“‘«‹「『（《〈【〔[({", "”’»›」』）》〉】〕])}"

_ENDS = "。！？｡!?।॥။"

_UNSPACED_END = re.compile(rf"[\s{re.escape(_OPENING + _CLOSING)}\"]|[{_ENDS}]+")
"""White space, quotation marks and brackets, and sentence ends that need no white space after them."""

_SPACE_BEFORE_STOP = re.compile(r"[^\S\x00-\x7f](?=\.)")
"""White space outside of ASCII before a full stop."""


def documents(source: list[str] | str, **how: Unpack[Reading]) -> Iterator[Document]:
    """Documents of a corpus, in the order of its sources and, within one, of its file names.

    A file that is named twice (by a glob and by itself, say) is read once. Rows and files without text are skipped,
    which is logged at the end.

    Args:
      how: as for `bert.data.corpus.files.read_documents`.

    Raises:
      UserError: nothing at the named place, no text at all, or a file that is damaged (with the number of the
        line).
    """
    return (document for _, document in numbered_documents(source, **how))


def numbered_documents(source: list[str] | str, **how: Unpack[Reading]) -> Iterator[tuple[int, Document]]:
    """The same documents, each with the index of the entry of the list that it is from."""
    skipped, files, empty_files = Skipped(), 0, list[str]()
    for entry, paths in enumerate(resolve_sources(source)):
        for path in paths:
            is_embedded, empty = path.startswith(DOCSTRINGS_PREFIX), True
            for document in docstring_documents(path) if is_embedded else read_documents(path, skipped, **how):
                if has_text(document):
                    empty = False
                    yield entry, document
                else:
                    skipped.add(path)
            files += 1
            if empty:
                empty_files.append(path)
    if len(empty_files) == files:
        raise UserError(f"{_shown(source)} holds no text: name a corpus with at least a few documents")
    skipped.log()
    if empty_files:
        are = "is" if len(empty_files) == 1 else f"and {len(empty_files) - 1:,} more files are"
        warn_once(f"warning: {empty_files[0]} {are} without text and skipped")


def corpus_files(source: list[str] | str) -> list[str]:
    """Paths of the files behind a source, each once; ``docstrings:`` stands for itself.

    Raises:
      UserError: a missing file, a glob that matches nothing, a folder without a corpus file.
    """
    return [path for paths in resolve_sources(source) for path in paths]


def resolve_sources(source: list[str] | str) -> list[list[str]]:
    """The files behind every entry of a source; one that an earlier entry has named is that entry's."""
    seen: set[str] = set()
    files: list[list[str]] = []
    for entry in [source] if isinstance(source, str) else source:
        no_file = entry.startswith((DOCSTRINGS_PREFIX, HUB_PREFIX))
        paths: dict[str, str] = {}
        for path in [entry] if no_file else _expand(fetch(entry)):
            paths.setdefault(entry if no_file else os.path.realpath(path), path)
        files.append([path for key, path in paths.items() if key not in seen])
        seen |= set(paths)
    if not files:
        raise UserError("the corpus is an empty list: name at least one file, glob or folder")
    return files


def corpus_fingerprint(source: list[str] | str, cache_dir: Path | None = None) -> str:
    """Hash of the content and order of a corpus' files: 64 hexadecimal digits.

    Names and times do not enter it. With a ``cache_dir``, the digest of each file is kept in a small JSON
    there under its path, size and modification time, so that the second start does not read the corpus again.
    """
    cache = DigestCache(cache_dir)
    combined = hashlib.blake2b(digest_size=32)
    for path in corpus_files(source):
        if path.startswith(DOCSTRINGS_PREFIX):
            digest = cache.get(source_state(path), lambda: _digest_of_docstrings(path))
            combined.update(f"{DOCSTRINGS_PREFIX} {digest}\n".encode())
            continue
        file_format = corpus_format(path)
        if path.startswith(HUB_PREFIX):  # the split may be a share of the files
            combined.update(f"{path}\n".encode())
        for file in dataset_files(path) if file_format == "dataset" else [path]:
            digest = cache.get(file_signature(file), lambda: _digest_of_file(file))
            combined.update(f"{file_format} {digest}\n".encode())
    cache.save()
    return combined.hexdigest()


def split_sentences(
    paragraphs: list[str], language: str, one_sentence_per_line: bool = False, keep_space: bool = False
) -> list[str]:
    """Sentences of a document, in order, none of them empty.

    With ``keep_space`` a sentence that comes after white space or at the start of a line, but for the first one, has
    one space in front. The others have none.

    A paragraph ends a sentence: sentencex is called once for each, since it looks past single line ends (and
    one open quotation mark would swallow the paragraphs after it), at 100 MB of English per second on one core.
    """
    pieces = []
    for paragraph in paragraphs:
        pieces += ["\n", *([paragraph] if one_sentence_per_line else _segments(paragraph, language))]
    return _keep_spaces(pieces) if keep_space else [sentence for sentence in map(str.strip, pieces) if sentence]


def _segments(paragraph: str, language: str) -> Iterator[str]:
    """Sentences as they stand in a paragraph, with the white space after them."""
    for stretch in _cut_unspaced(paragraph):
        for window in _windows(stretch, language):
            yield from _segment(window, language)


def _cut_unspaced(paragraph: str) -> Iterator[str]:
    """A paragraph, in several stretches if it is long without white space, as in Chinese and Japanese.

    A stretch ends with a sentence outside of quotation marks and brackets, so the sentences are those of the whole.
    """
    start = last_space = depth = opened = 0
    in_quotes = False
    is_long = len(paragraph) > UNSPACED and max(map(len, paragraph.split()), default=0) > UNSPACED
    for mark in _UNSPACED_END.finditer(paragraph) if is_long else ():
        character, place = mark[0], mark.end()
        if depth and place - opened > LONGEST_QUOTATION:
            depth, in_quotes = 0, False
        is_opening = character in _OPENING or (character == '"' and not in_quotes)
        if character == '"':
            in_quotes = not in_quotes
        if is_opening:
            opened = opened if depth else place
            depth += 1
        elif character in _CLOSING or character == '"':
            depth = max(0, depth - 1)
        elif character.isspace():
            last_space = place
        following = paragraph[place : place + 1]
        # A URL goes on with small letters. Dialogues have no sentence end outside of quotation marks.
        is_start = following in "“「『" or (following.isalpha() and following.lower() == following.upper())
        is_dialogue = character in "”」』" and following in "“「『" and paragraph[place - 2] in _ENDS
        is_end = (character[0] in _ENDS and is_start) or is_dialogue
        if is_end and not depth and place - max(start, last_space) > UNSPACED:
            yield paragraph[start:place]
            start = place
    if start < len(paragraph):
        yield paragraph[start:]


def _segment(text: str, language: str) -> list[str]:
    from sentencex import segment

    try:
        return segment(language, text)
    except BaseException as error:
        # sentencex 1.0 panics at a capital, a space of several bytes and a full stop. With a space of one byte it does
        # not, and the sentences are as long.
        if type(error).__name__ != "PanicException":
            raise
    ends = [0, *itertools.accumulate(map(len, segment(language, _SPACE_BEFORE_STOP.sub(" ", text))))]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def _keep_spaces(pieces: list[str]) -> list[str]:
    """Stretches of text, one after the other, as sentences with a space in front where white space was."""
    sentences: list[str] = []
    space = False
    for piece in pieces:
        text = piece.strip()
        space = space or piece[:1].isspace()
        if text:
            sentences.append(f" {text}" if space and sentences else text)
            space = piece[-1:].isspace()
    return sentences


def _windows(paragraph: str, language: str) -> Iterator[str]:
    """A paragraph in stretches that end with a sentence.

    Whole books on one line exist, and in them a stray quotation mark is paired with another a chapter later,
    with no boundary between (1.1 MB of joined paragraphs: 1048 sentences instead of 7809).
    """
    start = 0
    while len(paragraph) - start > LONG_PARAGRAPH:
        window = paragraph[start : start + LONG_PARAGRAPH]
        window = window[: window.rfind(" ") + 1] or window
        # The last sentence may continue beyond the window: it opens the next one, unless it fills this one.
        last = len(_segment(window, language)[-1])
        window = window[: len(window) - last] or window
        yield window
        start += len(window)
    yield paragraph[start:]


def has_text(document: Document) -> bool:
    """Whether clean-up leaves anything: a page of zero-width spaces is no document to draw sentences from."""
    return not all(map(is_blank, document))


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, into linked folders too, each once."""
    seen: set[str] = set()
    for inside, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(inside)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        yield inside, below, names


def _expand(entry: str) -> list[str]:
    if is_saved_dataset(entry):
        return [entry]
    if os.path.isdir(entry):
        inside = []
        for folder, below, names in _walk(entry):
            saved = sorted(name for name in below if is_saved_dataset(os.path.join(folder, name)))
            if "dataset_dict.json" in names:
                listed = ", ".join(saved) or "none"
                raise UserError(f"{folder} is a data set of splits ({listed}): name one of them, as {folder}/SPLIT")
            below[:] = [name for name in below if name not in saved and not name.startswith(".")]
            files = [name for name in names if name.lower().endswith(FOLDER_SUFFIXES) and not name.startswith(".")]
            inside += [os.path.join(folder, name) for name in (*saved, *files)]
        if not inside:
            suffixes = ", ".join("*" + suffix for suffix in FOLDER_SUFFIXES)
            raise UserError(f"the folder {entry} holds no corpus file: it needs {suffixes}, in it or below it")
        return sorted(inside)
    if os.path.exists(entry):
        require_readable_kind(entry)
        return [entry]
    if glob.has_magic(entry):
        matches = sorted(
            path for path in glob.glob(entry, recursive=True) if os.path.isfile(path) or is_saved_dataset(path)
        )
        if not matches:
            raise UserError(f"no file matches {entry}: fix the glob (and quote it for the shell)")
        for path in matches:
            if os.path.isfile(path):
                require_readable_kind(path)
        return matches
    raise UserError(f"{entry} does not exist: name a file, a glob or a folder of the corpus")


def _shown(source: list[str] | str) -> str:
    return source if isinstance(source, str) else ", ".join(source)


class DigestCache:
    """Digests of files, kept between runs. Losing it costs one more read, so its faults are passed over."""

    def __init__(self, cache_dir: Path | None):
        self._file = cache_dir / "fingerprints.json" if cache_dir else None
        self._known: dict[str, str] = {}
        self._changed = False
        if self._file:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._known = dict(load_json(self._file.read_text(encoding="utf-8")))

    def get(self, state: tuple[str, int], compute: Callable[[], str]) -> str:
        """The digest known for a state (text, modification time in ns), or the computed one."""
        key, modified = state
        if key in self._known:
            return self._known[key]
        digest = compute()
        # A file that changed a moment ago may change again within the resolution of its time stamp.
        if time.time_ns() - modified > 2_000_000_000:
            self._known[key] = digest
            self._changed = True
        return digest

    def save(self) -> None:
        if not (self._file and self._changed):
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._file) as temporary:
                temporary.write_text(json.dumps(self._known, indent=0), encoding="utf-8")


def file_signature(path: str | Path) -> tuple[str, int]:
    """Returns the key of a file's digest in the cache, and the time of its last modification in ns.

    The key has the time of the last change of the file's status as well: an edit can keep size and modification time,
    as ``cp -p`` and ``touch -r`` do, but not that.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    key = f"{os.path.realpath(path)}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"
    return key, stat.st_mtime_ns


def _digest_of_file(path: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise unreadable(path, error) from None
    return digest.hexdigest()


def _digest_of_docstrings(source: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for document in docstring_documents(source):
        digest.update("\n".join([*document, "", ""]).encode("utf-8"))
    return digest.hexdigest()
