"""The embedded corpus: the prose in the docstrings of installed packages and of Python's standard library.

Real English that is on every machine: no download, no licence to ask for. Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from bert.config import DOCSTRINGS_PREFIX
from bert.data.worker_processes import WorkerPool, available_cores, start_worker
from bert.errors import UserError

STDLIB = "stdlib"
"""Stands for all packages of the standard library in a list of packages."""

SPLITS = ("train", "dev")

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "bert"}
    | {"_vendor", "vendor", "_vendored", "externals", "third_party", "__pycache__"}
)
"""Folders without prose of their own (tests), copies of other packages, and this package, whose prose is edited."""

PACKAGE_BYTES = 16_000_000
"""Source files that are read of one package, the first in the order of their paths: keeps the largest ones short."""

_MIN_WORDS = 30
"""A document has at least a couple of sentences; a module with less is left out."""

_HELD_OUT = 10
"""One module in so many is held out, by the hash of its name."""

_SHINGLE = 5

_SEEN_SHARE = 0.6
"""A paragraph is a near-duplicate if this share of its runs of 5 words occurs before it."""

_PARALLEL_BYTES = 8_000_000
"""Sources from which on several processes parse them."""

_PARSED: dict[Path, list[list[str]]] = {}
"""What was parsed in this process, by file: the corpus and a task may have the same packages."""

_SENTENCE_END = re.compile(r"[.!?:;)\"'][)\"']?$")

_SIGNATURE = re.compile(r"^[\w.\[\], ]*\w\(.*\)\s*(->.*|[-:=].*)?$")

_RULE = re.compile(r"^[\W_]+$")

_CODE = re.compile(r"^(import |from \w+ import |def |class |return |for \w+ in |if .*:$|print\(|@\w|[\w.]+ = |\$ |% )")

_BULLET = re.compile(r"^([-*+o•]|\d+[.)]|:\w[\w ]*:|@\w+)\s+")

_FIELD = re.compile(r"^\w[\w.,*' ]{0,30}\s(--|-)\s")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (*_DOCUMENTED, ast.If, ast.Try, ast.With, ast.ExceptHandler)


class Module(NamedTuple):
    """A source file.

    Attributes:
        name: path below its root with ``/`` between folders, such as ``json/decoder.py``.
        path: on this machine.
        is_stdlib: whether it is of the standard library.
    """

    name: str
    path: Path
    is_stdlib: bool

    @property
    def package(self) -> str:
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def split(self) -> str:
        """dev for one module in ten, by its name alone, so that it does not depend on what else is installed."""
        number = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "big")
        return "train" if number % _HELD_OUT else "dev"


class ModuleProse(NamedTuple):
    """The paragraphs of each docstring of a module that have any, near-duplicates removed."""

    module: Module
    docstrings: tuple[tuple[str, ...], ...]


def docstring_documents(source: str = DOCSTRINGS_PREFIX) -> Iterator[list[str]]:
    """Documents of ``docstrings:[PACKAGE,...][:SPLIT]``, one a module, each a list of paragraphs.

    Raises:
      UserError: a package that is not installed, or an unknown split.
    """
    packages, split = parse_source(source)
    for module, docstrings in read_prose(packages):
        document = [paragraph for docstring in docstrings for paragraph in docstring]
        if split in (None, module.split) and sum(text.count(" ") + 1 for text in document) >= _MIN_WORDS:
            yield document


def source_state(source: str) -> tuple[str, int]:
    """Hash of what the documents depend on (interpreter, sources, rules), and the newest change in ns.

    Raises:
      UserError: as `docstring_documents`.
    """
    packages, split = parse_source(source)
    digest = hashlib.blake2b(f"{sys.version} {split}".encode(), digest_size=16)
    digest.update(Path(__file__).read_bytes())  # the rules
    newest = 0
    for module in _modules(packages):
        stat = module.path.stat()
        digest.update(f"{module.name}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}\n".encode())
        newest = max(newest, stat.st_mtime_ns)
    return f"docstrings|{digest.hexdigest()}", newest


@functools.cache
def read_prose(packages: frozenset[str]) -> tuple[ModuleProse, ...]:
    """Prose of the modules of some packages (of all, for an empty set): those held out first, each in sorted order.

    A paragraph stays where it occurs first, so that what held-out modules have is in no other.
    They are read up to three times (vocabulary, fingerprint, examples) but put together once.

    Raises:
      UserError: a package that is not installed.
    """
    modules = sorted(_modules(packages), key=lambda module: (module.split, module.name))
    parsed = _parse_modules(modules)
    paragraphs = [paragraph for docstrings in parsed for docstring in docstrings for paragraph in docstring]
    is_new = iter(_find_new(paragraphs))
    return tuple(
        ModuleProse(module, tuple(kept for docstring in docstrings if (kept := tuple(_take(docstring, is_new)))))
        for module, docstrings in zip(modules, parsed, strict=True)
    )


def _take(docstring: list[str], is_new: Iterator[bool]) -> Iterator[str]:
    return itertools.compress(docstring, itertools.islice(is_new, len(docstring)))


def parse_source(source: str) -> tuple[frozenset[str], str | None]:
    """The packages of ``docstrings:[PACKAGE,...][:SPLIT]``, none for all of them, and the split, None for both.

    Raises:
      UserError: an unknown split.
    """
    names, colon, split = source.removeprefix(DOCSTRINGS_PREFIX).partition(":")
    if colon and split not in SPLITS:
        raise UserError(f"{source} has the split {split!r}: use one of {', '.join(SPLITS)}")
    return frozenset(filter(None, names.split(","))), split or None


def _modules(packages: frozenset[str]) -> list[Module]:
    """The modules of some packages, of all for an empty set; at most PACKAGE_BYTES of each."""
    every = _installed()
    missing = sorted(packages - every.keys() - {STDLIB})
    if missing:
        raise UserError(f"docstrings: has the package {missing[0]!r}, which is not installed: install or remove it")
    chosen = []
    for package, modules in sorted(every.items()):
        if packages and package not in packages:
            modules = [module for module in modules if module.is_stdlib and STDLIB in packages]
        sizes = itertools.accumulate(module.path.stat().st_size for module in modules)
        chosen += [module for module, size in zip(modules, sizes, strict=True) if size <= PACKAGE_BYTES]
    return chosen


@functools.cache
def _installed() -> dict[str, list[Module]]:
    """The modules of each package, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {name: Module(name, root / name, is_stdlib=True) for name in _python_files(root)}
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if file.suffix == ".py" and _is_wanted(file):
                path = Path(str(distribution.locate_file(file)))
                if path.is_file():
                    names.setdefault(file.as_posix(), Module(file.as_posix(), path, is_stdlib=False))
    packages: dict[str, list[Module]] = {}
    for _, module in sorted(names.items()):
        packages.setdefault(module.package, []).append(module)
    return packages


def _python_files(root: Path) -> Iterator[str]:
    """Paths below a folder, without those of `_LEFT_OUT`, which are not walked."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        files = (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
        yield from (file.as_posix() for file in files if _is_wanted(file))


def _is_wanted(file: PurePath) -> bool:
    outside = ".." in file.parts
    return not (outside or _LEFT_OUT & {*file.parts[:-1], file.stem} or file.name.startswith("test_"))


def _parse_modules(modules: list[Module]) -> list[list[list[str]]]:
    """[module][docstring][paragraph], parsed by as many processes as pay."""
    paths = [module.path for module in modules if module.path not in _PARSED]
    processes = available_cores()
    if processes < 2 or sum(path.stat().st_size for path in paths) < _PARALLEL_BYTES:
        _PARSED.update(zip(paths, map(_parse_module, paths), strict=True))
    else:
        _PARSED.update(zip(paths, _parse_in_workers(paths, processes), strict=True))
    return [_PARSED[module.path] for module in modules]


def _parse_in_workers(paths: list[Path], processes: int) -> list[list[list[str]]]:
    try:
        with WorkerPool(processes, start_worker) as pool:
            return list(pool.map(_parse_module, paths, chunksize=32))
    except BrokenProcessPool:
        raise UserError(
            "a process that reads docstrings was killed, most likely for lack of memory: free some and run again, or "
            "name fewer packages after docstrings:"
        ) from None


def _parse_module(path: Path) -> list[list[str]]:
    try:
        source = path.read_bytes()
    except OSError:
        return []
    return [prose_paragraphs(docstring) for docstring in module_docstrings(source)]


def _find_new(paragraphs: list[str]) -> list[bool]:
    """Whether each paragraph is new: less than 60% of its runs of 5 words, letters alone, occur in those before it."""
    if not paragraphs:
        return []
    ids: dict[str, int] = {}
    padding = [0] * (_SHINGLE - 1)  # between paragraphs, so that a run is of one alone
    tokens: list[int] = []
    lengths = []
    for paragraph in paragraphs:
        words = [ids.setdefault(word, len(ids) + 1) for word in re.findall(r"[^\W\d_]+", paragraph.lower())] or [0]
        tokens += [*words, *padding]
        lengths.append(len(words))
    # Random odd numbers: the sums of two different runs are most likely different.
    factors = np.random.Philox(key=0).random_raw(_SHINGLE) | np.uint64(1)
    runs = np.convolve(np.array([*tokens, *padding], np.uint64), factors, "valid")
    _, first, numbers = np.unique(runs, return_index=True, return_inverse=True)
    spans = np.array(lengths) + len(padding)
    starts = np.cumsum(spans) - spans
    is_seen = first[numbers] < np.repeat(starts, spans)
    is_seen &= np.arange(len(runs)) < np.repeat(starts + lengths, spans)  # not the runs that begin with padding
    shares = np.add.reduceat(is_seen, starts, dtype=np.int64) / lengths
    return list(map(bool, shares < _SEEN_SHARE))


def module_docstrings(source: bytes) -> list[str]:
    """Docstrings of a module, its classes and functions, in the order of the source; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # some files are broken on purpose
    return [inspect.cleandoc(text) for text in _documented(tree)]


def _documented(node: ast.AST) -> Iterator[str]:
    """Docstrings of a node and of what is defined in its blocks: expressions, most of a tree, are not walked."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
        yield text
    for block in ("body", "handlers", "orelse", "finalbody"):
        for statement in getattr(node, block, ()):
            if isinstance(statement, _BLOCKS):
                yield from _documented(statement)


def prose_paragraphs(docstring: str) -> list[str]:
    """Paragraphs of a cleaned docstring: hard-wrapped lines joined; code, sessions, tables and rules left
    out.

    What it keeps are blocks that read like sentences: at least four words, mostly letters. It would rather
    drop a paragraph than keep code, since a vocabulary learns from what is kept.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", docstring):
        paragraphs += [text for lines in _items(block.split("\n")) if (text := _paragraph(lines))]
    return paragraphs


def _items(lines: list[str]) -> Iterator[list[str]]:
    """A block, cut before every item of a list and without interactive sessions."""
    item: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith((">>>", "...")):
            break  # the output of a session reaches to the end of its block
        if _RULE.match(stripped):
            # An underline: what stands above is a heading, not a sentence.
            item = item[:-1]
            continue
        if item and (_BULLET.match(stripped) or _FIELD.match(stripped)):
            yield item
            item = []
        item.append(line)
    yield item


def _paragraph(lines: list[str]) -> str | None:
    """The lines joined, or None where they are not prose."""
    stripped = [line.strip() for line in lines]
    while stripped and _SIGNATURE.match(stripped[0]):
        stripped = stripped[1:]
    if not stripped or sum(bool(_CODE.match(line)) for line in stripped) * 2 > len(stripped):
        return None
    if sum("   " in line or "\t" in line for line in stripped) * 2 > len(stripped):
        return None  # columns: a table
    text = " ".join(stripped)
    text = re.sub(r"\s+", " ", _BULLET.sub("", text)).replace("``", "").strip()
    words = text.split()
    plain = sum(word.strip("\"'`.,:;!?()*").replace("-", "").replace("'", "").isalpha() for word in words)
    if len(words) < 4 or plain < 0.6 * len(words):
        return None
    return text if _SENTENCE_END.search(text) else text + "."
