"""Resolves the sources of a corpus, reads their documents one at a time, and splits documents into sentences.

A source is a file, a glob, a folder (searched recursively, in sorted order), a folder saved by ``datasets``, a URL of
one of these, ``hub:NAME[:CONFIG][:SPLIT]``, ``docstrings:``, or a list of sources.
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
"""Characters of a paragraph that are split into sentences at once."""

UNSPACED = 500
"""Characters without white space after which a text is divided at a sentence end before sentencex splits it.

sentencex's time per sentence grows with the distance to the last white space.
"""

MAX_QUOTATION = 2000
"""Characters after which an opening quotation mark or bracket is treated as unclosed."""

_OPENING, _CLOSING = "“‘«‹「『（《〈【〔[({", "”’»›」』）》〉】〕])}"

_ENDS = "。！？｡!?।॥။"

_UNSPACED_END = re.compile(rf"[\s{re.escape(_OPENING + _CLOSING)}\"]|[{_ENDS}]+")
"""White space, quotation marks and brackets, and sentence ends that need no white space after them."""

_SPACE_BEFORE_STOP = re.compile(r"[^\S\x00-\x7f](?=\.)")
"""White space outside of ASCII before a full stop."""


def documents(source: list[str] | str, **how: Unpack[Reading]) -> Iterator[Document]:
    """Yields the documents of a corpus, in the order of its sources and, within a source, of its file names.

    A file that is named twice (for example by a glob and by its name) is read once. Rows and files without text are
    skipped, with a warning at the end.

    Args:
      how: see `bert.data.corpus.files.read_documents`.

    Raises:
      UserError: a source does not exist, there is no text, or a file is damaged (with the line number).
    """
    return (document for _, document in numbered_documents(source, **how))


def numbered_documents(source: list[str] | str, **how: Unpack[Reading]) -> Iterator[tuple[int, Document]]:
    """Yields the documents of `documents`, each with the index of its source in the list."""
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
        named = source if isinstance(source, str) else ", ".join(source)
        raise UserError(f"{named} holds no text: name a corpus with at least a few documents")
    skipped.log()
    if empty_files:
        are = "is" if len(empty_files) == 1 else f"and {len(empty_files) - 1:,} more files are"
        warn_once(f"warning: {empty_files[0]} {are} without text and skipped")


def corpus_files(source: list[str] | str) -> list[str]:
    """Returns the paths of the files of a source, each once; ``docstrings:`` and ``hub:`` sources stay as they are.

    Raises:
      UserError: a missing file, a glob without matches, a folder without a corpus file.
    """
    return [path for paths in resolve_sources(source) for path in paths]


def resolve_sources(source: list[str] | str) -> list[list[str]]:
    """Returns the files of each entry of a source; a file belongs to the first entry that names it."""
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
    """Returns a hash, 64 hexadecimal digits, of the content and order of a corpus' files, without names and times.

    With a ``cache_dir``, the digest of each file is cached there by path, size and modification time. A second start
    then does not read the corpus again.
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
    """Returns the nonempty sentences of a document in order.

    With ``keep_space``, all sentences except the first that follow white space or start a line begin with one space.

    sentencex is called separately for each paragraph, because it ignores single line ends: an unclosed quotation mark
    would swallow the following paragraphs.
    """
    pieces = []
    for paragraph in paragraphs:
        pieces += ["\n", *([paragraph] if one_sentence_per_line else _segments(paragraph, language))]
    return _keep_spaces(pieces) if keep_space else [sentence for sentence in map(str.strip, pieces) if sentence]


def _segments(paragraph: str, language: str) -> Iterator[str]:
    """Yields the sentences of a paragraph with the white space after them."""
    for stretch in _cut_unspaced(paragraph):
        for window in _windows(stretch, language):
            yield from _segment(window, language)


def _cut_unspaced(paragraph: str) -> Iterator[str]:
    """Divides a paragraph that is long without white space, as in Chinese and Japanese.

    A stretch ends with a sentence outside of quotation marks and brackets, so that the sentences do not change.
    """
    start = last_space = depth = opened = 0
    in_quotes = False
    is_long = len(paragraph) > UNSPACED and max(map(len, paragraph.split()), default=0) > UNSPACED
    for mark in _UNSPACED_END.finditer(paragraph) if is_long else ():
        character, offset = mark[0], mark.end()
        if depth and offset - opened > MAX_QUOTATION:
            depth, in_quotes = 0, False
        is_opening = character in _OPENING or (character == '"' and not in_quotes)
        if character == '"':
            in_quotes = not in_quotes
        if is_opening:
            opened = opened if depth else offset
            depth += 1
        elif character in _CLOSING or character == '"':
            depth = max(0, depth - 1)
        elif character.isspace():
            last_space = offset
        following = paragraph[offset : offset + 1]
        # A URL continues with small letters. Dialogues have no sentence end outside of quotation marks.
        is_start = following in "“「『" or (following.isalpha() and following.lower() == following.upper())
        is_dialogue = character in "”」』" and following in "“「『" and paragraph[offset - 2] in _ENDS
        is_end = (character[0] in _ENDS and is_start) or is_dialogue
        if is_end and not depth and offset - max(start, last_space) > UNSPACED:
            yield paragraph[start:offset]
            start = offset
    if start < len(paragraph):
        yield paragraph[start:]


def _segment(text: str, language: str) -> list[str]:
    from sentencex import segment

    try:
        return segment(language, text)
    except BaseException as error:
        # sentencex 1.0 panics at a capital, a space of several bytes and a full stop. A space of one byte avoids this
        # and does not change the lengths of sentences.
        if type(error).__name__ != "PanicException":
            raise
    ends = [0, *itertools.accumulate(map(len, segment(language, _SPACE_BEFORE_STOP.sub(" ", text))))]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def _keep_spaces(pieces: list[str]) -> list[str]:
    """Returns consecutive pieces of text as sentences, with a space in front where the text has white space."""
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
    """Divides a long paragraph into windows that end with a sentence.

    In a book on one line, a stray quotation mark would be paired with another one a chapter later, and no sentence
    would end between them (1.1 MB of joined paragraphs: 1048 sentences instead of 7809).
    """
    start = 0
    while len(paragraph) - start > LONG_PARAGRAPH:
        window = paragraph[start : start + LONG_PARAGRAPH]
        window = window[: window.rfind(" ") + 1] or window
        # The last sentence may continue beyond the window, so it begins the next one unless it fills this window.
        last = len(_segment(window, language)[-1])
        window = window[: len(window) - last] or window
        yield window
        start += len(window)
    yield paragraph[start:]


def has_text(document: Document) -> bool:
    """Returns whether a document has a visible character."""
    return not all(map(is_blank, document))


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks a folder like `os.walk`, including linked folders, each once."""
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


class DigestCache:
    """Digests of files, cached between runs. Errors of the cache file are ignored."""

    def __init__(self, cache_dir: Path | None):
        self._file = cache_dir / "fingerprints.json" if cache_dir else None
        self._known: dict[str, str] = {}
        self._changed = False
        if self._file:
            with contextlib.suppress(OSError, ValueError, TypeError):
                self._known = dict(load_json(self._file.read_text(encoding="utf-8")))

    def get(self, state: tuple[str, int], compute: Callable[[], str]) -> str:
        """Returns the cached digest of a state (text, modification time in ns), or computes it."""
        key, modified = state
        if key in self._known:
            return self._known[key]
        digest = compute()
        # A recently changed file may change again within the resolution of its time stamp.
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
    """Returns the key of a file's digest in the cache, and its modification time in ns.

    The key includes the time of the last status change, which, unlike size and modification time, changes with any
    edit (``cp -p``, ``touch -r``).
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    key = f"{os.path.realpath(path)}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"
    return key, stat.st_mtime_ns


def _digest_of_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from None


def _digest_of_docstrings(source: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for document in docstring_documents(source):
        digest.update("\n".join([*document, "", ""]).encode("utf-8"))
    return digest.hexdigest()
