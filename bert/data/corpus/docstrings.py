"""The embedded corpus: the prose in the docstrings of installed packages and of Python's standard library.

It is English text that needs no download. Sources are parsed, never imported. Sentences of docstrings are kept; code,
sessions, tables and headings are left out.
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
"""Name of the whole standard library in a list of packages."""

SPLITS = ("train", "dev")

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "bert"}
    | {"_vendor", "vendor", "_vendored", "externals", "third_party", "__pycache__"}
)
"""Excluded folders: tests, copies of other packages, and this package, whose prose changes."""

PACKAGE_BYTES = 16_000_000
"""Maximum bytes of source files per package, in the order of their paths: limits the largest packages."""

_MIN_WORDS = 30
"""Minimum words of a document; shorter modules are left out."""

_HELD_OUT = 10
"""One module in ten is held out, selected by the hash of its name."""

_SHINGLE = 5

_SEEN_SHARE = 0.6
"""Share of a paragraph's runs of 5 words that must occur before it to make it a near-duplicate."""

_PARALLEL_BYTES = 8_000_000
"""Bytes of source files above which several processes parse them."""

_PARSED: dict[Path, list[list[str]]] = {}
"""Parsed files of this process; the corpus and a task may use the same packages."""

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
        path: absolute path.
        is_stdlib: whether it belongs to the standard library.
    """

    name: str
    path: Path
    is_stdlib: bool

    @property
    def package(self) -> str:
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def split(self) -> str:
        """``dev`` for one module in ten, else ``train``; depends only on the name, not on other installed packages."""
        number = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "big")
        return "train" if number % _HELD_OUT else "dev"


class ModuleProse(NamedTuple):
    """The docstrings of a module as paragraphs, without near-duplicates and empty docstrings."""

    module: Module
    docstrings: tuple[tuple[str, ...], ...]


def docstring_documents(source: str = DOCSTRINGS_PREFIX) -> Iterator[list[str]]:
    """Yields the documents of ``docstrings:[PACKAGE,...][:SPLIT]``, one per module, as lists of paragraphs.

    Raises:
      UserError: a package is not installed, or the split is unknown.
    """
    packages, split = parse_source(source)
    for module, docstrings in read_prose(packages):
        document = [paragraph for docstring in docstrings for paragraph in docstring]
        if split in (None, module.split) and sum(text.count(" ") + 1 for text in document) >= _MIN_WORDS:
            yield document


def source_state(source: str) -> tuple[str, int]:
    """Returns a hash of interpreter, sources and rules, which determine the documents, and the newest change in ns.

    Raises:
      UserError: see `docstring_documents`.
    """
    packages, split = parse_source(source)
    digest = hashlib.blake2b(f"{sys.version} {split}".encode(), digest_size=16)
    digest.update(Path(__file__).read_bytes())  # the rules
    newest = 0
    for module in installed_modules(packages):
        stat = module.path.stat()
        digest.update(f"{module.name}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}\n".encode())
        newest = max(newest, stat.st_mtime_ns)
    return f"docstrings|{digest.hexdigest()}", newest


@functools.cache
def read_prose(packages: frozenset[str]) -> tuple[ModuleProse, ...]:
    """Returns the prose of the modules of some packages (an empty set: all), held-out modules first, sorted by name.

    A repeated paragraph is kept only in its first module, so that paragraphs of held-out modules occur in no other
    module.

    Raises:
      UserError: a package is not installed.
    """
    modules = sorted(installed_modules(packages), key=lambda module: (module.split, module.name))
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
    """Returns the packages of ``docstrings:[PACKAGE,...][:SPLIT]`` (an empty set: all) and the split (None: both).

    Raises:
      UserError: the split is unknown.
    """
    names, colon, split = source.removeprefix(DOCSTRINGS_PREFIX).partition(":")
    if colon and split not in SPLITS:
        raise UserError(f"{source} has the split {split!r}: use one of {', '.join(SPLITS)}")
    return frozenset(filter(None, names.split(","))), split or None


def installed_modules(packages: frozenset[str] = frozenset()) -> list[Module]:
    """Returns the modules of some packages (an empty set: all), at most PACKAGE_BYTES of each."""
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
    """Returns the modules of each package, sorted by name."""
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
    """Yields the paths of Python files below a folder, without the folders of `_LEFT_OUT`."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        files = (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
        yield from (file.as_posix() for file in files if _is_wanted(file))


def _is_wanted(file: PurePath) -> bool:
    outside = ".." in file.parts
    return not (outside or _LEFT_OUT & {*file.parts[:-1], file.stem} or file.name.startswith("test_"))


def _parse_modules(modules: list[Module]) -> list[list[list[str]]]:
    """Returns [module][docstring][paragraph], parsed by several processes if there is much to parse."""
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
    """Returns for each paragraph whether it differs from all earlier paragraphs. Only letters are compared."""
    if not paragraphs:
        return []
    ids: dict[str, int] = {}
    padding = [0] * (_SHINGLE - 1)  # separates paragraphs, so that no run spans two of them
    tokens: list[int] = []
    lengths = []
    for paragraph in paragraphs:
        words = [ids.setdefault(word, len(ids) + 1) for word in re.findall(r"[^\W\d_]+", paragraph.lower())] or [0]
        tokens += [*words, *padding]
        lengths.append(len(words))
    # With random odd factors, two different runs most likely have different sums.
    factors = np.random.Philox(key=0).random_raw(_SHINGLE) | np.uint64(1)
    runs = np.convolve(np.array([*tokens, *padding], np.uint64), factors, "valid")
    _, first, numbers = np.unique(runs, return_index=True, return_inverse=True)
    spans = np.array(lengths) + len(padding)
    starts = np.cumsum(spans) - spans
    is_seen = first[numbers] < np.repeat(starts, spans)
    is_seen &= np.arange(len(runs)) < np.repeat(starts + lengths, spans)  # except for runs that begin with padding
    shares = np.add.reduceat(is_seen, starts, dtype=np.int64) / lengths
    return list(map(bool, shares < _SEEN_SHARE))


def module_docstrings(source: bytes) -> list[str]:
    """Returns the docstrings of a module, its classes and functions in source order, none if it cannot be parsed."""
    return [inspect.cleandoc(text) for text in _documented(syntax_tree(source))]


def syntax_tree(source: bytes) -> ast.Module:
    """Returns the syntax tree of a module, an empty one if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the sources
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])  # some packages include broken files on purpose


def _documented(node: ast.AST) -> Iterator[str]:
    """Yields the docstrings of a node and of the definitions in its blocks. Expressions are not walked."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
        yield text
    for block in ("body", "handlers", "orelse", "finalbody"):
        for statement in getattr(node, block, ()):
            if isinstance(statement, _BLOCKS):
                yield from _documented(statement)


def prose_paragraphs(docstring: str) -> list[str]:
    """Returns the paragraphs of a cleaned docstring, with wrapped lines joined.

    Blocks of at least four words that are mostly letters are kept. Ambiguous paragraphs are dropped, because code would
    degrade a vocabulary.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", docstring):
        paragraphs += [text for lines in _items(block.split("\n")) if (text := _paragraph(lines))]
    return paragraphs


def _items(lines: list[str]) -> Iterator[list[str]]:
    """Divides a block before every list item, and removes interactive sessions."""
    item: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith((">>>", "...")):
            break  # the output of a session extends to the end of its block
        if _RULE.match(stripped):
            # An underline: the line above is a heading.
            item = item[:-1]
            continue
        if item and (_BULLET.match(stripped) or _FIELD.match(stripped)):
            yield item
            item = []
        item.append(line)
    yield item


def _paragraph(lines: list[str]) -> str | None:
    """Returns the joined lines, or None if they are not prose."""
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
