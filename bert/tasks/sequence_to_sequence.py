"""Sequence to sequence: generates a target text for a source text, as in translation and summarization."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert.config import ColumnsConfig, TaskDataConfig
from bert.data.corpus.files import DECOMPRESSORS, numbered_lines
from bert.data.encoding import tokenize_sources
from bert.data.inputs import as_texts
from bert.data.records import BAD_ROWS_FIX, Records, SkippedRows, is_dataset_dict, listed_numbers
from bert.data.rows import SourceTargetRows
from bert.errors import UserError, require, without_surrogates
from bert.metrics import text as text_metrics
from bert.tasks.base import Outputs
from bert.tasks.columns import FILE_STEMS, KEYS, ColumnFilesTask, read_columns, record_files
from bert.tasks.splits import ExampleColumns
from bert.tokenizer.library import detokenize, lowercases

METRICS = ("bleu", "chrf", *text_metrics.ROUGE, "exact_match")


@dataclass(frozen=True)
class TextPairs(ExampleColumns):
    """Sources with one or more reference targets each. The first reference is the training target."""

    sources: Sequence[str]
    references: Sequence[Sequence[str]] | None
    ids: Sequence[str]
    notes: tuple[str, ...] = ()
    columns: ClassVar[tuple[str, ...]] = ("sources", "references", "ids")

    @property
    def labelled(self) -> bool:
        """Whether the targets are known."""
        return self.references is not None

    @property
    def targets(self) -> list[str] | None:
        """The first reference of each source."""
        return None if self.references is None else [first for first, *_ in self.references]

    def sentences(self) -> Iterator[str]:
        """Yields all sources, then all targets, for a shared vocabulary."""
        yield from self.sources
        yield from self.targets or []


class Written(NamedTuple):
    """The generated text for each source, and whether the vocabulary is lower case."""

    texts: list[str]
    lowercase: bool


class TargetText(NamedTuple):
    """An answer: the generated text for a source."""

    target: str


@dataclass(frozen=True, kw_only=True)
class SequenceToSequenceTask(ColumnFilesTask):
    """Generated texts. The model is the encoder-decoder of `bert.model.decoders`; its outputs are token ids."""

    name: str
    metrics: tuple[str, ...]
    """The first metric selects the best checkpoint."""
    target_tokenizer: Tokenizer | None = None
    """Vocabulary of the targets; None for the vocabulary of the sources."""
    kind: ClassVar[str] = "sequence_to_sequence"
    architecture: ClassVar[str] = "BertForSequenceToSequence"
    answer_type: ClassVar[type] = TargetText
    baseline: str = ""
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, "metrics", "source", "target", "max_target_length")
    num_labels = 0
    input_columns = ("source",)

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # follows from the metrics
        """The first of the metrics."""
        return self.metrics[0]

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | {"generate"}

    def with_target_tokenizer(self, tokenizer: Tokenizer | None) -> Self:
        return dataclasses.replace(self, target_tokenizer=tokenizer)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return ((self.data.columns.source,),)

    def from_config(self, data: TaskDataConfig) -> Self:
        metrics = tuple(data.metrics or self.metrics)
        for name in metrics:
            if name not in METRICS:
                raise UserError(f"data.metrics has {name!r}, but {self.name} has the metrics {', '.join(METRICS)}")
        return dataclasses.replace(self, data=data, metrics=metrics)

    def fit(self, train: TextPairs) -> SequenceToSequenceTask:
        text_metrics.require_libraries(name for name in self.metrics if name != "exact_match")
        if set(self.metrics) & set(text_metrics.ROUGE):
            text_metrics.require_latin(train.targets or ())
        return self

    def splits(self, folder: Path) -> list[str]:
        if self._is_parallel(Path(folder)):
            return parallel_splits(Path(folder), self.data)
        return super().splits(folder)

    def _is_parallel(self, folder: Path) -> bool:
        """Returns whether the rows are lines of parallel files; otherwise they are rows of a table or a data set."""
        if self.data.source is None or is_dataset_dict(folder.as_posix()):
            return False
        tables = (folder / name for name in record_files(*FILE_STEMS["train"]))
        return _find(folder, _stem(folder, "train", self.data), self.data.source) is not None or not any(
            path.is_file() for path in tables
        )

    def _columns(self, fields: Collection[str]) -> ColumnsConfig:
        """Returns the names of the columns: the languages ``data.source`` and ``data.target``, if these are set.

        In data sets with translations, the columns of the languages are ``translation.de`` and so on.
        """
        columns = self.data.columns
        if self.data.source is None:
            return columns
        names = (self.data.source, require(self.data.target, "data.target"))
        source, target = (f"translation.{name}" if f"translation.{name}" in fields else name for name in names)
        return dataclasses.replace(columns, source=source, target=target)

    def read(self, folder: Path, split: str) -> TextPairs:
        folder = Path(folder)
        if self._is_parallel(folder):
            sources, targets, notes = read_parallel(folder, split, self.data, self.skips_bad_rows)
            references = None if targets is None else [[target] for target in targets]
            return TextPairs(sources, references, [str(row) for row in range(len(sources))], notes)
        try:
            records = self.checked_records(folder, split)
        except UserError as error:
            raise UserError(f"{error}, or data.source and data.target to the ends of parallel files") from None
        first = next(records.rows, None)
        rows = itertools.chain([] if first is None else [first], records.rows)
        records = dataclasses.replace(records, rows=rows)
        columns, names = self._columns({} if first is None else first[1]), "data.columns"
        labels = {columns.target: f"{names}.target"}
        if columns.references is not None and split != "train":
            labels[columns.references] = f"{names}.references"
        split_columns = read_columns(
            records,
            {columns.source: f"{names}.source"},
            labels,
            None if columns.id is None else (columns.id, f"{names}.id"),
            needed=split != "test",
            leave_out=True,
            optional=() if columns.references is None else (columns.references,),
            raise_faults=False,
        )
        references = None
        if split_columns.labels is not None:
            cells = zip(split_columns.line_numbers, *split_columns.labels, strict=True)
            references = records.read_each(cells, _references, split_columns.faults)
        records.require_sound(split_columns.faults)
        return TextPairs(split_columns.texts[0], references, split_columns.ids, split_columns.notes)

    def features(self, tokenizer: Tokenizer, examples: TextPairs, data: TaskDataConfig) -> SourceTargetRows:
        lengths = (data.max_length, min(data.max_target_length or data.max_length, data.max_length))
        return tokenize_sources(
            (tokenizer, self.target_tokenizer or tokenizer), examples.sources, examples.targets, lengths
        )

    def predict(self, outputs: Outputs, features: SourceTargetRows, examples: TextPairs) -> Written:
        """Returns the texts of the token ids of each row, which include the end token, on one line each."""
        texts = [detokenize(features.tokenizer, ids.tolist()) for ids in outputs]
        return Written(list(one_line(texts)), lowercases(features.tokenizer))

    def score(self, predictions: Written, examples: TextPairs) -> dict[str, float]:
        return {name: score for name, (score, _) in self._scores(predictions, examples).items()}

    def details(self, predictions: Written, examples: TextPairs) -> dict[str, Any]:
        """Returns the settings and version of sacreBLEU for each of its scores."""
        signatures = {name: signature for name, (_, signature) in self._scores(predictions, examples).items()}
        signatures = {name: signature for name, signature in signatures.items() if signature is not None}
        return {"signatures": signatures} if signatures else {}

    def _scores(self, predictions: Written, examples: TextPairs) -> dict[str, tuple[float, str | None]]:
        """Returns each metric in percent and its signature or None; case is ignored for lower-case vocabularies."""
        texts, references = predictions.texts, require(examples.references, "the targets")
        rouge = text_metrics.rouge(texts, references) if set(self.metrics) & set(text_metrics.ROUGE) else {}
        scores: dict[str, tuple[float, str | None]] = {}
        for name in self.metrics:
            if name == "exact_match":
                scores[name] = (exact_match(texts, references, predictions.lowercase), None)
            elif name in rouge:
                scores[name] = (rouge[name], None)
            else:
                score = {"bleu": text_metrics.bleu, "chrf": text_metrics.chrf}[name]
                scores[name] = score(texts, references, predictions.lowercase)
        return scores

    def is_degenerate(self, predictions: Written, examples: TextPairs) -> bool:
        """Returns whether all generated texts are the same."""
        return len(set(predictions.texts)) == 1 < len(set(examples.targets or []))

    def write_predictions(self, folder: Path, split: str, predictions: Written, examples: TextPairs) -> list[Path]:
        if len(examples) != len(predictions.texts):
            raise ValueError(f"{len(examples)} rows, {len(predictions.texts)} predictions")
        path = folder / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in predictions.texts), encoding="utf-8", newline="\n")
        return [path]

    def examples_from_inputs(self, inputs: Sequence[Any]) -> TextPairs:
        expected = f"{self.name} takes a single text: pass a string"
        texts = [as_texts(value, index, expected)[0] for index, value in enumerate(inputs, 1)]
        if self.data.source is not None:  # the lines of parallel files have no white space at their ends
            texts = [text.strip() for text in texts]
        return TextPairs(texts, None, [str(row) for row in range(len(texts))])

    def format_predictions(self, predictions: Written, examples: Any) -> list[TargetText]:
        return [TargetText(text) for text in predictions.texts]


def exact_match(texts: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool) -> float:
    """Returns the percentage of texts that equal a reference, ignoring spaces, and case if ``lowercase``."""

    def plain(text: str) -> str:
        return "".join(text.split()).lower() if lowercase else "".join(text.split())

    hits = [plain(text) in map(plain, right) for text, right in zip(texts, references, strict=True)]
    return 100 * float(np.mean(hits))


def _references(records: Records, line_number: int, target: Any, more: Any = None) -> list[str]:
    """Returns the target and the further references of a row. Raises UserError."""
    texts = [target, *(more if isinstance(more, list) else [] if more is None else [more])]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            wrong = repr(text)[:40]
            fix = f"write one or remove the {records.unit}, {BAD_ROWS_FIX}"
            raise records.error(line_number, f"the target {wrong} is no text: {fix}")
    return [without_surrogates(text) for text in texts]


DEV_STEMS = ("val", "dev", "valid", "validation")
"""Names of the dev files without their suffix; the first one that exists is used."""


def parallel_splits(folder: Path, data: TaskDataConfig) -> list[str]:
    """Returns train, dev if it has files, and all test files by their name without suffix."""
    source = require(data.source, "data.source")
    stems = {path.name.removesuffix(ending) for ending in _endings(source) for path in folder.glob(f"test*{ending}")}
    tests = [data.test] if data.test is not None else sorted(stems)
    has_dev = data.dev is not None or _dev_stem(folder, source) is not None
    return ["train", *(["dev"] if has_dev else []), *tests]


def read_parallel(
    folder: Path, split: str, data: TaskDataConfig, skip_bad: bool = False
) -> tuple[list[str], list[str] | None, tuple[str, ...]]:
    """Returns the sources and the targets of a split, and notes; only splits to predict may have no targets.

    Args:
      skip_bad: whether lines that are empty in one of the files are skipped.

    Raises:
      UserError: a file is missing, the files have different numbers of lines, or a line is empty.
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
        _, notes = _filled({source_path: sources}, skip_bad)
        return list(filter(None, sources)), None, notes
    targets = _lines(target_path)
    if len(sources) != len(targets):
        raise UserError(
            f"{source_path} has {len(sources):,} lines and {target_path} {len(targets):,}: write each text and its "
            "target on the same line of both"
        )
    rows, notes = _filled({source_path: sources, target_path: targets}, skip_bad)
    return [sources[row] for row in rows], [targets[row] for row in rows], notes


def _filled(lines: Mapping[Path, Sequence[str]], skip_bad: bool) -> tuple[list[int], tuple[str, ...]]:
    """Returns the numbers of the lines, from 0, that are empty in none of the files, and notes on the others.

    Raises:
      UserError: there are empty lines, unless they are skipped.
    """
    empty = {path: [row for row, line in enumerate(texts) if not line] for path, texts in lines.items()}
    bad = sorted(set(itertools.chain.from_iterable(empty.values())))
    rows = sorted(set(range(max(map(len, lines.values())))) - set(bad))
    if not bad:
        return rows, ()
    path = next(path for path, numbers in empty.items() if numbers)
    numbered = listed_numbers([row + 1 for row in bad])
    if skip_bad and rows:
        counted = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
        return rows, (SkippedRows(f"{path}: {counted} without a text left out (line {numbered})", len(bad)),)
    fix = f"write a text, or remove the line from both files, {BAD_ROWS_FIX}"
    more = f"; {len(bad):,} lines are empty: {numbered}" if len(bad) > 1 else ""
    raise UserError(f"{path}, line {empty[path][0] + 1}: an empty line: {fix}{more}")


def _stem(folder: Path, split: str, data: TaskDataConfig) -> str:
    """Returns the name of a split's files without suffix."""
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
    """Returns the lines of a file, without white space at their ends. Raises UserError if there are none."""
    texts = [line.strip() for _, line in numbered_lines(path)]
    if not texts:
        raise UserError(f"{path} has no lines: write a text on each")
    return texts


def one_line(texts: Iterable[str]) -> Sequence[str]:
    """Returns each text on one line."""
    return [" ".join(text.split()) for text in texts]


TASKS = (
    SequenceToSequenceTask(name="translation", metrics=("bleu", "chrf")),
    SequenceToSequenceTask(name="summarization", metrics=("rouge2", "rouge1", "rougeL")),
    SequenceToSequenceTask(name="multi30k", metrics=("bleu", "chrf")),
    SequenceToSequenceTask(name="aeslc", metrics=("rouge1", "rouge2", "rougeL")),
)
