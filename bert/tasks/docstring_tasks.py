"""Small labelled tasks from the source code of installed packages, written as the files that a user would have.

=================  ==================  ==================================================================
`word_order`       classification      whether the words of a sentence are in their order, or shuffled
`parameters`       tagging             which words of a sentence are parameters of the function it describes
`which_parameter`  question answering  the only parameter that a sentence names
=================  ==================  ==================================================================

The labels follow from the source code and are exact. Dev has modules that ``docstrings::train`` leaves out, so that
pretraining has not seen them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bert.data.corpus.docstrings import Module, installed_modules
from bert.data.corpus.functions import Function, module_functions
from bert.errors import UserError
from bert.files import atomic_write

Row = dict[str, Any]

TRAIN_ROWS, DEV_ROWS = 400, 500
"""Number of rows per task."""

ROWS_PER_MODULE = 6
"""Maximum number of rows per task and module, so that no module dominates."""

MAX_WORDS = 20
"""Maximum number of words of a sentence, so that it fits into short rows."""

_WORD = re.compile(r"\w+(?:[-']\w+)*|[^\w\s]")
_NAME_PART = re.compile(r"[^\W_]+")
_ROLE = re.compile(r":[\w:]+:`~?([^`]*)`")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def plain_sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text in lower case, without markup that would reveal code."""
    text = re.sub(r"[`*]", "", _ROLE.sub(r"\1", text)).lower().strip()
    yield from filter(None, _SENTENCE.split(text))


def word_order(functions: list[Function], rng: random.Random) -> Iterator[Row]:
    """Yields sentences without punctuation, half of them with shuffled words."""
    for function in functions:
        parts = function.docstring
        for text in (*parts.prose, *parts.parameters, parts.returns):
            for sentence in plain_sentences(text):
                words = sentence.rstrip(".!?").split()
                if 8 <= len(words) <= MAX_WORDS and all(word.isalpha() for word in words):
                    label = rng.choice(("original", "shuffled"))
                    if label == "shuffled":
                        rng.shuffle(words)
                    yield {"text": " ".join(words), "label": label}


def parameters(functions: list[Function], rng: random.Random) -> Iterator[Row]:
    """Yields sentences that name a parameter of their function, with a tag for each word."""
    for function in functions:
        names = {name.lower() for name in function.parameters if len(name) > 1}
        for text in (*function.docstring.prose, function.docstring.returns):
            for sentence in plain_sentences(text):
                words = _WORD.findall(sentence)
                tags = ["B-PARAMETER" if word in names else "O" for word in words]
                if 5 <= len(words) <= MAX_WORDS and "B-PARAMETER" in tags:
                    yield {"words": words, "tags": tags}


def which_parameter(functions: list[Function], rng: random.Random) -> Iterator[Row]:
    """Yields questions about sentences that name one parameter of their function, once. The answer is its name."""
    for function in functions:
        question = f"which parameter of {' '.join(_NAME_PART.findall(function.name.lower()))}?"
        for row in parameters([function], rng):
            if row["tags"].count("B-PARAMETER") == 1:
                words, index = row["words"], row["tags"].index("B-PARAMETER")
                start = sum(len(word) + 1 for word in words[:index])
                context = " ".join(words)
                yield {"question": question, "context": context, "answer": words[index], "answer_start": start}


DOCSTRING_TASKS: dict[str, Callable[[list[Function], random.Random], Iterator[Row]]] = {
    "word_order": word_order,
    "parameters": parameters,
    "which_parameter": which_parameter,
}
"""Functions that yield the rows of a module, by the name of the recipe that trains on them."""


def write_docstring_task(name: str, folder: Path) -> None:
    """Writes train.jsonl and dev.jsonl of a task of `DOCSTRING_TASKS`, unless they exist.

    Raises:
        UserError: the installed packages have too few docstrings.
    """
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "dev")}
    if all(path.is_file() for path in paths.values()):
        return
    rows = collect_rows(name)
    folder.mkdir(parents=True, exist_ok=True)
    for split, path in paths.items():
        if len(rows[split]) < 2:
            raise UserError(
                f"transfer {name} finds {len(rows[split])} rows for {split} in the docstrings of the installed "
                "packages: install more packages, or set transfer to null"
            )
        with atomic_write(path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows[split]), encoding="utf-8")


def collect_rows(name: str) -> dict[str, list[Row]]:
    """Returns the rows of each split. Modules are read in a fixed random order, until there are enough rows."""
    rows: dict[str, list[Row]] = {"dev": [], "train": []}
    sizes = {"dev": DEV_ROWS, "train": TRAIN_ROWS}
    seen: set[str] = set()
    for module in sorted(installed_modules(), key=lambda module: (module.split, _hash(module.name))):
        split = rows[module.split]
        if len(split) < sizes[module.split]:
            for row in _of_module(name, module):
                words = " ".join(sorted(_WORD.findall(str(row.get("words") or row.get("text") or row["context"]))))
                if words not in seen and len(split) < sizes[module.split]:
                    seen.add(words)
                    split.append(row)
    return rows


def _of_module(name: str, module: Module) -> list[Row]:
    """Returns at most `ROWS_PER_MODULE` rows, evenly spread over a module."""
    rng = random.Random(module.name)
    rows = list(DOCSTRING_TASKS[name](_read_functions(module.path), rng))
    count = min(len(rows), ROWS_PER_MODULE)
    return [rows[len(rows) * index // count] for index in range(count)]


@functools.cache
def _read_functions(path: Path) -> list[Function]:
    try:
        return module_functions(path.read_bytes())
    except OSError:
        return []


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
