"""SQuAD v1.1 and v2.0: files -> questions; answers -> the official files. `bert.data.spans` does what lies between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.config import UserError
from bert.data.spans import Answer, Answers, Example, answers, windows
from bert.files import write_durably

__all__ = ["Dataset", "answers", "read", "references", "windows", "write_predictions"]


@dataclass(frozen=True)
class Dataset:
    """A file's questions, in its order."""

    examples: list[Example]
    misplaced: list[str]
    """Ids of the questions with an answer that does not stand where the file says, each once."""

    @property
    def trainable(self) -> list[Example]:
        """The questions one can learn from: impossible, or with an answer that has a place. The others are skipped."""
        return [example for example in self.examples if example.is_impossible or example.answer is not None]

    @property
    def skipped(self) -> list[str]:
        """Ids of the questions that ``trainable`` leaves out."""
        kept = {example.id for example in self.trainable}
        return [example.id for example in self.examples if example.id not in kept]


def read(path: Path, strict: bool = False, labelled: bool = True) -> Dataset:
    """Reads a file in SQuAD's layout, v1.1 or v2.0.

    Args:
      strict: an answer that does not stand where the file says is an error, and not only counted.
      labelled: every question has to come with its answers, or be marked as impossible.

    Raises:
      UserError: the file, the question's id (JSON has no lines to name), what is wrong, and the mend.
    """
    path = Path(path)
    examples: list[Example] = []
    misplaced: list[str] = []
    seen: set[str] = set()
    for context, question, place in _questions(path):
        id = _get(question, "id", str, path, place)
        place = f"question {id}"
        if id in seen:
            raise UserError(f"{path}, {place}: the id occurs twice: give every question an id of its own")
        seen.add(id)
        text = _get(question, "question", str, path, place)
        if not text.strip():
            raise UserError(f"{path}, {place}: the question is empty: write it or remove the entry")
        impossible = "is_impossible" in question and _get(question, "is_impossible", bool, path, place)
        listed = _get(question, "answers", list, path, place) if labelled or "answers" in question else []
        answers = tuple(_answer(entry, context, path, place) for entry in listed)
        if impossible and answers:
            raise UserError(f"{path}, {place}: is_impossible is true but there are answers: remove one or the other")
        if labelled and not impossible and not answers:
            raise UserError(f"{path}, {place}: no answers: list one, or set is_impossible to true")
        if any(answer.start is None for answer in answers):
            if strict:
                number = next(number for number, answer in enumerate(answers) if answer.start is None)
                start = listed[number]["answer_start"]
                raise UserError(
                    f"{path}, {place}: the answer {answers[number].text[:80]!r} does not stand at character {start} "
                    f"of its context, where there is {context[max(start, 0) :][:40]!r}: mend answer_start or the text"
                )
            misplaced.append(id)
        examples.append(Example(id, text, context, answers, impossible))
    if not examples:
        raise UserError(f"{path} holds no questions: copy it again")
    return Dataset(examples, misplaced)


def references(examples: Sequence[Example]) -> dict[str, list[str]]:
    """The right answers of each question, as `bert.metrics.squad` takes them; an empty list: it has none."""
    return {example.id: [answer.text for answer in example.answers] for example in examples}


def write_predictions(folder: Path, answers: Answers) -> list[Path]:
    """Writes predictions.json, nbest_predictions.json and, for v2.0, null_odds.json, as run_squad.py does."""
    n_best = {
        id: [
            {name: getattr(candidate, name) for name in ("text", "probability", "start_logit", "end_logit")}
            for candidate in candidates
        ]
        for id, candidates in answers.n_best.items()
    }
    files = {"predictions.json": answers.texts, "nbest_predictions.json": n_best}
    if answers.null_odds is not None:
        files["null_odds.json"] = answers.null_odds
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_durably(folder / name, json.dumps(content, indent=4) + "\n")
    return [folder / name for name in files]


def _questions(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(context, question's entry, its place in the file) of each question."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name a file in SQuAD's JSON layout") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, byte {error.start}: not UTF-8: convert the file") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}): the file is damaged, copy it") from None
    except (ValueError, RecursionError) as error:  # thousands of digits in a number, or of brackets in one another
        raise UserError(f"{path}: not JSON that can be read ({error}): the file is damaged, copy it") from None
    for a, article in enumerate(_get(content, "data", list, path, "the file")):
        paragraphs = _get(article, "paragraphs", list, path, f"data[{a}]")
        for p, paragraph in enumerate(paragraphs):
            place = f"data[{a}].paragraphs[{p}]"
            context = _get(paragraph, "context", str, path, place)
            for q, question in enumerate(_get(paragraph, "qas", list, path, place)):
                yield context, question, f"{place}.qas[{q}]"


_KINDS = {str: "a text", list: "a list", bool: "true or false", int: "a whole number"}


def _get(entry: Any, key: str, kind: type, path: Path, place: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{path}, {place}: no {key!r}: the file has to follow SQuAD's layout")
    value = entry[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{path}, {place}: {key!r} is {str(value)[:40]!r}: it has to be {_KINDS[kind]}")
    # JSON can spell half a surrogate pair, which UTF-8 cannot: one character takes the place of one, as answers count.
    return value.encode("utf-8", "replace").decode("utf-8") if kind is str else value


def _answer(entry: Any, context: str, path: Path, place: str) -> Answer:
    text, start = _get(entry, "text", str, path, place), _get(entry, "answer_start", int, path, place)
    placed = start >= 0 and text.strip() and context.startswith(text, start)
    return Answer(text, start if placed else None)
