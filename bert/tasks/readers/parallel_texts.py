"""Parallel files: a source text on each line of one, and its target on the same line of the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bert.config import TaskDataConfig
from bert.data.corpus.files import DECOMPRESSORS, numbered_lines
from bert.errors import UserError, require

DEV_STEMS = ("val", "dev", "valid", "validation")
"""Names of the dev files without their end; the first that is there counts."""


def parallel_splits(folder: Path, data: TaskDataConfig) -> list[str]:
    """train, dev if it has files, and each file whose name begins with test, by its name without the end."""
    source = require(data.source, "data.source")
    stems = {path.name.removesuffix(ending) for ending in _endings(source) for path in folder.glob(f"test*{ending}")}
    tests = [data.test] if data.test is not None else sorted(stems)
    has_dev = data.dev is not None or _dev_stem(folder, source) is not None
    return ["train", *(["dev"] if has_dev else []), *tests]


def read_parallel(folder: Path, split: str, data: TaskDataConfig) -> tuple[list[str], list[str] | None]:
    """The sources of a split and their targets, which only a split to predict may be without.

    Raises:
      UserError: a file is missing, they have different numbers of lines, or a line is empty.
    """
    source, target = require(data.source, "data.source"), require(data.target, "data.target")
    stem = _stem(folder, split, data)
    source_path, target_path = (_find(folder, stem, ending) for ending in (source, target))
    if source_path is None or (target_path is None and split in ("train", "dev")):
        missing = source if source_path is None else target
        raise UserError(
            f"{folder} has no {stem}.{missing}: set data.dir to the folder with parallel files such as "
            f"train.{source} and train.{target}, and data.source and data.target to their ends"
        )
    sources = _lines(source_path)
    if target_path is None:
        return sources, None
    targets = _lines(target_path)
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources):,} lines and {target_path} {len(targets):,}: write each text and its "
            "target on the same line of both"
        )
    return sources, targets


def _stem(folder: Path, split: str, data: TaskDataConfig) -> str:
    """The name of a split's files without their end."""
    if split == "train":
        return data.train or "train"
    if split == "dev":
        return data.dev or _dev_stem(folder, require(data.source, "data.source")) or DEV_STEMS[0]
    return split


def _dev_stem(folder: Path, source: str) -> str | None:
    return next((stem for stem in DEV_STEMS if _find(folder, stem, source)), None)


def _endings(ending: str) -> list[str]:
    return [f".{ending}{packed}" for packed in ("", *DECOMPRESSORS)]


def _find(folder: Path, stem: str, ending: str) -> Path | None:
    paths = (folder / f"{stem}{end}" for end in _endings(ending))
    return next((path for path in paths if path.is_file()), None)


def _lines(path: Path) -> list[str]:
    """The texts of a file, of which none is empty."""
    texts = []
    for line_number, line in numbered_lines(path):
        if not line.strip():
            raise UserError(
                f"{path}, line {line_number}: an empty line: write a text, or remove the line from both files"
            )
        texts.append(line.strip())
    if not texts:
        raise UserError(f"{path} has no lines: write a text on each")
    return texts


def one_line(texts: Iterable[str]) -> Sequence[str]:
    """Each text on one line."""
    return [" ".join(text.split()) for text in texts]
