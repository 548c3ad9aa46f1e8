"""From which package is the start of a docstring? A labelled task on every machine, with the packages' names taken out.

Rows are docstrings of the embedded corpus (`bert.data.corpus.docstrings`). Dev has those of modules that
``docstrings::train`` leaves out, so that pretraining on it has not read them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bert.config import DOCSTRINGS_PREFIX, TaskDataConfig
from bert.data.corpus.docstrings import SPLITS, parse_source, read_prose
from bert.data.records import Records
from bert.errors import UserError
from bert.tasks.custom_sequence import CustomClassification

MIN_WORDS = 12
"""A shorter text, without the names, is left out."""

MOST_WORDS = 32
"""Words of a text: its start, which fits into short rows."""

ALIASES = frozenset({"np", "pd", "plt", "jnp", "mpl", "pa", "hf", "hugging"})
"""Names under which packages are imported by convention."""

MOST_ROWS = 200
"""Rows of a package in each split, so that none has most of them."""

_CODE = re.compile(r"\w[._]\w")


@dataclass(frozen=True, kw_only=True)
class Packages(CustomClassification):
    """The label is the package; ``data.dir`` is ``docstrings:PACKAGE,...`` with two or more packages."""

    name: str = "packages"
    data_keys: ClassVar[tuple[str, ...]] = ("labels", "metrics")

    def from_config(self, data: TaskDataConfig) -> Packages:
        source = data.dir or ""
        names, split = parse_source(source) if source.startswith(DOCSTRINGS_PREFIX) else ((), None)
        if len(names) < 2 or split is not None:
            raise UserError(
                f"data.dir is {source!r}, and the task packages has its rows from installed packages: set data.dir to "
                "docstrings:PACKAGE,PACKAGE,..."
            )
        return super().from_config(dataclasses.replace(data, labels=sorted(names)))

    def splits(self, folder: Path) -> list[str]:
        return list(SPLITS)

    def records(self, folder: Path, split: str) -> Records:
        rows = enumerate(_rows(Path(folder).as_posix(), split), start=1)
        return Records(f"{folder}, split {split}", rows, ("text", "label"), "row")


def _rows(source: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Texts and labels, at most MOST_ROWS of each package, spread evenly over its modules."""
    packages, _ = parse_source(source)
    prose = read_prose(packages)
    names = Names.of(packages, [module.name for module, _ in prose])
    texts: dict[str, list[str]] = {package: [] for package in sorted(packages)}
    for module, docstrings in prose:
        if module.split == split:
            found = (names.remove_from(" ".join(docstring)) for docstring in docstrings)
            starts = (text.split()[:MOST_WORDS] for text in found)
            texts[module.package] += [" ".join(words) for words in starts if len(words) >= MIN_WORDS]
    for package, every in texts.items():
        count = min(len(every), MOST_ROWS)
        yield from ({"text": every[len(every) * row // count], "label": package} for row in range(count))


class Names(NamedTuple):
    """Words in lower case that give a package away.

    Attributes:
        packages: of packages and their distributions, which no word may have in it.
        modules: of modules, which no word in the form of code (a.b, a_b, `a`) may have in it: many are plain English.
    """

    packages: frozenset[str]
    modules: frozenset[str]

    @classmethod
    def of(cls, packages: frozenset[str], modules: list[str]) -> Names:
        """The names of packages and of the paths of their modules."""
        distributions = importlib.metadata.packages_distributions()
        names = [*packages, *ALIASES, *(name for package in packages for name in distributions.get(package, ()))]
        return cls(*(frozenset(word for name in group for word in _words(name)) for group in (names, modules)))

    def remove_from(self, text: str) -> str:
        """The text without the words that have a name in them: of numpy also NumPy's and numpy.array."""
        return " ".join(word for word in text.split() if not self._are_in(word))

    def _are_in(self, word: str) -> bool:
        parts = set(_words(word))
        is_code = "`" in word or _CODE.search(word) is not None
        return bool(parts & self.packages or (is_code and parts & self.modules))


def _words(text: str) -> list[str]:
    """Runs of letters in lower case."""
    return re.findall(r"[^\W\d_]+", text.lower())


TASKS = (Packages(),)
