"""Token classification: entities, or a tag for each word."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import TaskDataConfig
from bert.data.inputs import shown
from bert.data.records import RECORDS, Records, is_dataset_dict, read_records
from bert.data.rows import pad_and_stack
from bert.data.tables import file_suffix
from bert.errors import UserError, require, without_surrogates
from bert.files import write_tsv
from bert.metrics.tagging_schemes import OUTSIDE, SCHEMES, Spelling, convert, is_span_tag, join_tag, split_tag
from bert.tasks.bag_of_words import WINDOWS, window_tags
from bert.tasks.base import Outputs, Task, json_input
from bert.tasks.columns import dataset_split, dataset_splits, record_files
from bert.tasks.error_files import write_errors
from bert.tasks.splits import SplitNames, find_split_file, splits_in
from bert.tasks.token_classification import conll, word_features
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.sentence_records import SentenceColumns, read_sentences
from bert.tasks.token_classification.word_features import (
    CLITICS,
    WordFeatures,
    plain_apostrophes,
    separate_clitics,
    split_text,
)

FILES: SplitNames = {
    "train": ("train.txt", "eng.train", "train.conll", "wnut17train.conll", "train.tsv", *record_files("train")),
    "dev": (
        *("valid.txt", "dev.txt", "eng.testa", "dev.conll", "valid.conll", "emerging.dev.conll", "dev.tsv"),
        *record_files("dev", "valid", "validation"),
    ),
    "test": ("test.txt", "eng.testb", "test.conll", "emerging.test.annotated", "test.tsv", *record_files("test")),
}
"""File names of CoNLL-2003, its copies, WNUT-17 and data with their layout."""


class Tagged(NamedTuple):
    """The tag of each word of each sentence, and its probability."""

    tags: list[list[str]]
    probabilities: list[list[float]]


class Entities(NamedTuple):
    """An answer: type, text, start (first character), end (one past the last) and probability of each entity."""

    entities: list[dict[str, Any]]


class Words(NamedTuple):
    """An answer for plain tags: text, tag, start, end and probability of each word."""

    words: list[dict[str, Any]]


USUAL_COLUMNS = SentenceColumns()

MAX_TAGS = 20
"""A file with more distinct tags than this, and with more tags than words, is assumed to have swapped columns."""

TAG_KEYS = ("labels", "invalid_tags", "clitics")
"""Keys of ``data`` that token classification reads."""


@dataclass(frozen=True, kw_only=True)
class TokenClassificationTask(Task):
    """Tags of words in CoNLL columns. The tags themselves determine whether they mark entities."""

    name: str
    labels: tuple[str, ...] = ()
    """The labels of `conll.label_names`; () before the training file is read."""
    may_be_broken: bool = False
    """Whether tags that violate their scheme are counted instead of rejected."""
    spelling: Spelling | None = None
    """Spelling of entity tags in a published model; None for B-PER, I-PER and O, or plain tags."""
    clitics: tuple[str, ...] | None = None
    """Word endings that `split_text` separates; None for CLITICS before the training file is read."""
    lexicon: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The most frequent tag of each training word, for the baseline."""
    most_frequent_tag: str = field(default=OUTSIDE, repr=False, compare=False)
    """The most frequent tag of all training words, for the baseline."""
    skips_bad_rows: bool = False
    kind: ClassVar[str] = "token_classification"
    baseline: str = "commonest_tag"
    windows: ClassVar[bool] = True
    data_keys: ClassVar[tuple[str, ...]] = TAG_KEYS
    input_columns = ("text",)

    @property
    def tags(self) -> tuple[str, ...]:
        """The labels in the canonical spelling: B-PER for PER-B."""
        return tuple(self.spelling.read(label) or label for label in self.labels) if self.spelling else self.labels

    @property
    def marks_entities(self) -> bool:
        """Whether the tags mark entities; otherwise they are plain tags such as parts of speech."""
        return all(map(is_span_tag, self.tags))

    @property
    def known_types(self) -> list[str] | None:
        """The entity types; None before the training file is read."""
        return self.types if self.labels else None

    @property
    def names_types(self) -> bool:
        """Whether the tags are O and entity types without prefixes."""
        return OUTSIDE in self.tags and not any(is_span_tag(tag) for tag in self.tags if tag != OUTSIDE)

    @property
    def finds_entities(self) -> bool:
        """Whether answers are entities. Without prefixes, adjacent words of one type are one entity."""
        return self.marks_entities or self.names_types

    @property
    def reading(self) -> conll.Reading:
        """How files are read: plain tags are read unchanged if the training file has plain tags."""
        if self.labels and not self.marks_entities:
            return "plain"
        return "count" if self.may_be_broken else "error"

    @property
    def types(self) -> list[str]:
        """The entity types."""
        return sorted({split_tag(label)[1] for label in self.tags} - {""}) if self.marks_entities else []

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # a field in other tasks
        return "f1" if self.marks_entities else "accuracy"

    def higher_is_better(self, metric: str) -> bool | None:
        """Returns the direction of a metric; f1_TYPE has the direction of f1."""
        return super().higher_is_better("f1" if metric in {f"f1_{type}" for type in self.types} else metric)

    @property
    def text_clitics(self) -> tuple[str, ...]:
        """Word endings that are separate words in labelled texts, and then also in the texts of `predict`."""
        return CLITICS if self.clitics is None else self.clitics

    @property
    def bundle_fields(self) -> dict[str, Any]:
        return {"clitics": self.clitics}

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.labels

    def fit(self, train: Sentences) -> TokenClassificationTask:
        """Returns the task with labels (unless ``data.labels`` is set), clitics and the most frequent tags."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for words, tags in zip(train.words, require(train.tags, "the tags"), strict=True):
            for word, tag in zip(words, tags, strict=True):
                counts[word][tag] += 1
        lexicon = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
        [(tag, _)] = sum(counts.values(), Counter()).most_common(1)
        labels = self.labels or train.labels
        if len(labels) < 2:
            raise UserError(f"every training word has the tag {tag!r}, but token classification needs two or more tags")
        if not self.labels and len(labels) > max(len(counts), MAX_TAGS):
            raise UserError(
                f"{train.path} has {len(labels):,} tags and {len(counts):,} different words: are the columns swapped? "
                "Set data.columns.words and data.columns.tags, or list all tags as data.labels"
            )
        clitics = self.clitics if train.texts is None else self.text_clitics
        if clitics is None:
            clitics = separate_clitics({word: sum(tags.values()) for word, tags in counts.items()})
        return replace(self, labels=labels, lexicon=lexicon, most_frequent_tag=tag, clitics=clitics)

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return replace(data, labels=list(self.labels), clitics=None if self.clitics is None else list(self.clitics))

    def from_config(self, data: TaskDataConfig) -> Self:
        labels, clitics = tuple(data.labels or ()), None
        if data.clitics is not None or labels:  # runs older than the setting have labels
            clitics = tuple(map(plain_apostrophes, data.clitics or ()))
        return replace(self, labels=labels, may_be_broken=data.invalid_tags == "count", clitics=clitics)

    def splits(self, folder: Path) -> list[str]:
        return dataset_splits(Path(folder)) or splits_in(Path(folder), FILES)

    def read(self, folder: Path, split: str) -> Sentences:
        """Returns the sentences; a test file has tags if it has as many columns as the training file."""
        if is_dataset_dict(Path(folder).as_posix()):
            return self.read_records(dataset_split(Path(folder), split), split)
        path = find_split_file(folder, FILES, split, "CoNLL columns")
        if file_suffix(path) in RECORDS:
            return self.read_records(read_records(path), split)
        self.require_errors(path)
        labelled = split != "test" or conll.width(path) == conll.width(self._train(folder))
        sentences = conll.read(path, labelled, self.reading, self.known_types)
        return replace(sentences, labels=conll.label_names(sentences) if labelled else ())

    def require_errors(self, path: Path) -> None:
        """Raises UserError if bad rows would be skipped in a file with a row for each word."""
        if self.skips_bad_rows:
            raise UserError(
                f"data.bad_rows is skip, but {path} has a row for each word, and a sentence needs all of its words: "
                "set it to error, or write a sentence in each row of a .jsonl or .parquet file"
            )

    def read_records(self, records: Records, split: str, names: SentenceColumns = USUAL_COLUMNS) -> Sentences:
        """Returns the sentences of records, which may have no tags in a test split."""
        records = replace(records, skips_bad_rows=self.skips_bad_rows)
        sentences = read_sentences(records, names, split != "test", self.reading, self.known_types, self.text_clitics)
        declared = next((labels for name in names.tags if (labels := records.declared_labels.get(name))), ())
        return replace(sentences, labels=conll.label_names(sentences, declared) if sentences.labelled else ())

    def features(self, tokenizer: Tokenizer, examples: Sentences, data: TaskDataConfig) -> WordFeatures:
        return word_features.tokenize(tokenizer, examples, self.labels, data.max_length)

    def predict(self, outputs: Outputs, features: WordFeatures, examples: Sentences) -> Tagged:
        """Returns the most likely tag of each word for logits [T, L] at the labelled tokens.

        Entity tags are converted to valid BIO, because the head may start an entity with I-; probabilities do not
        change.
        """
        shares = metrics.softmax(np.nan_to_num(pad_and_stack(outputs, (0, self.num_labels))))
        tags = word_features.decode_tags(examples, features, shares.argmax(-1), self.tags)
        if self.marks_entities:
            tags = [convert(sentence, "BIO") for sentence in tags]
        best = iter(word_features.gather_word_values(features, shares.max(-1)).tolist())
        return Tagged(tags, [[next(best) for _ in words] for words in examples.words])

    def score(self, predictions: Tagged, examples: Sentences) -> dict[str, float]:
        """Returns precision, recall, f1, ... and f1_TYPE of entities, or the accuracy of plain tags."""
        return self._scores(predictions.tags, examples)

    def _scores(self, tags: Sequence[Sequence[str]], examples: Sentences) -> dict[str, float]:
        expected: Sequence[Sequence[str]] = require(examples.tags, "the tags")
        if self.marks_entities and examples.scheme in SCHEMES:  # accuracy depends on the scheme of the file
            tags, expected = (
                [convert(sentence, examples.scheme) for sentence in sentences] for sentences in (tags, expected)
            )
        scores = metrics.entity_metrics(tags, expected)
        if not self.marks_entities:
            return {"accuracy": scores["accuracy"]}
        by_type = metrics.entities_by_type(tags, expected)
        return {**scores, **{f"f1_{type}": by_type.get(type, {"f1": 0.0})["f1"] for type in self.types}}

    def details(self, predictions: Tagged, examples: Sentences) -> dict[str, Any]:
        """Returns the scores of each entity type, or of each plain tag."""
        expected = require(examples.tags, "the tags")
        if self.marks_entities:
            return {"classes": metrics.entities_by_type(predictions.tags, expected)}
        number = {tag: index for index, tag in enumerate(self.tags)}
        sides = [
            [number.get(tag, -1) for sentence in tags for tag in sentence] for tags in (predictions.tags, expected)
        ]
        return {"classes": metrics.by_class(self.tags, *map(np.array, sides))["classes"]}

    def baseline_scores(self, examples: Sentences) -> dict[str, float]:
        """Returns the scores of each word's most frequent training tag, or the most frequent tag for new words."""
        unknown = OUTSIDE if self.marks_entities else self.most_frequent_tag
        return self._scores([[self.lexicon.get(word, unknown) for word in words] for words in examples.words], examples)

    def bag_of_words(self, train: Sentences, dev: Sentences) -> tuple[str, dict[str, float]] | None:
        """Returns the scores of the best of `window_tags`; None if the training words have one tag."""
        if len({tag for tags in require(train.tags, "the tags") for tag in tags}) < 2:
            return None
        scores = [self._scores(window_tags(train, dev, window), dev) for window in WINDOWS]
        return "window_logistic_regression", max(scores, key=lambda score: score[self.main_metric])

    def is_degenerate(self, predictions: Tagged, examples: Sentences) -> bool:
        """Returns whether all words have one tag (B- and I- count as one), or no entity is correct."""
        both = (predictions.tags, require(examples.tags, "the tags"))
        predicted, expected = ({self._kind(tag) for sentence in tags for tag in sentence} for tags in both)
        return len(predicted) == 1 < len(expected) or self.score(predictions, examples)[self.main_metric] == 0

    def never_predicted(self, predictions: Tagged, examples: Sentences) -> list[str]:
        """Returns entity types or tags."""
        both = (require(examples.tags, "the tags"), predictions.tags)
        expected, predicted = ({self._kind(tag) for sentence in tags for tag in sentence} for tags in both)
        missing = sorted(expected - predicted - ({OUTSIDE} if self.marks_entities else set()))
        return [split_tag(tag)[1] or tag if self.marks_entities else tag for tag in missing]

    def _kind(self, tag: str) -> str:
        return join_tag("B", split_tag(tag)[1]) if self.marks_entities and tag != OUTSIDE else tag

    def write_predictions(self, folder: Path, split: str, predictions: Tagged, examples: Sentences) -> list[Path]:
        """Writes the columns of the file and the predicted tag, for conlleval, and the scores of each type."""
        paths = [conll.write_predictions(folder / f"{split}.conll", examples, predictions.tags)]
        if examples.tags is not None and self.marks_entities:
            paths.append(_write_types(folder / f"{split}_types.tsv", predictions.tags, examples.tags))
        return paths

    def write_details(self, folder: Path, split: str, predictions: Tagged, examples: Sentences) -> list[Path]:
        """Writes the words with a wrong tag and their sentences to errors.tsv, the most confident errors first."""
        tagged = zip(examples.words, *predictions, require(examples.tags, "the tags"), strict=True)
        errors = [
            (word, tag, right, float(share), " ".join(words))
            for words, tags, shares, expected in tagged
            for word, tag, share, right in zip(words, tags, shares, expected, strict=True)
            if tag != right
        ]
        columns = ("word", "prediction", "label", "probability", "sentence")
        return [write_errors(folder, split, columns, sorted(errors, key=lambda error: -error[3]))]

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Sentences:
        """Accepts a text or a list of words per input; both may be empty. Words of a list are joined by spaces."""
        texts, words, spans = [], [], []
        for index, value in enumerate(inputs, 1):
            if isinstance(value, str):
                texts.append(without_surrogates(value))
                clitics = CLITICS if self.clitics is None else self.clitics
                words_of_text, spans_of_text = split_text(texts[-1], clitics)
            else:
                words_of_text, spans_of_text = _listed_words(self.name, value, index)
                texts.append(" ".join(words_of_text))
            words.append(words_of_text)
            spans.append(spans_of_text)
        return Sentences(words, None, texts=texts, spans=spans)

    def read_inputs(self, path: Path) -> Iterator[tuple[int, list[str]]] | None:
        """Yields the sentences of a file with a row for each word."""
        sentences = conll.read_words(path, self.words_column)
        return None if sentences is None else zip(sentences.lines, sentences.words, strict=True)

    @property
    def words_column(self) -> str:
        """Name of the column with lists of words."""
        return "words"

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns the column of words if there is no column of texts."""
        has_words = "text" not in names and self.words_column in names
        return (self.words_column,) if has_words else super().columns_among(names)

    def input_of_row(self, fields: Mapping[str, Any]) -> Any:
        """Returns the text or the list of words of a row."""
        if self.columns_among(fields) != (self.words_column,):
            return super().input_of_row(fields)
        words = fields[self.words_column]
        if not isinstance(words, list) or not words:
            raise ValueError(
                f"{self.words_column} is {json.dumps(words, default=str)[:40]}: it must be a list of words"
            )
        return words

    def parse_line(self, line: str) -> Any:
        """Parses a text, or a JSON object with the words of a sentence."""
        fields = json_input(line, (self.words_column,)) if _names_words(line, self.words_column) else None
        return super().parse_line(line) if fields is None else self.input_of_row(fields)

    def input_fields(self, value: Any) -> dict[str, Any]:
        return {"text": value} if isinstance(value, str) else {"words": list(value)}

    def format_predictions(self, predictions: Tagged, examples: Sentences) -> list[Entities | Words]:
        answered: list[Entities | Words] = []
        texts, all_spans = require(examples.texts, "the texts"), require(examples.spans, "the words' spans")
        for index, (tags, shares) in enumerate(zip(*predictions, strict=True)):
            text, spans = texts[index], all_spans[index]
            if self.finds_entities:
                if self.names_types:
                    tags = [tag if tag == OUTSIDE else join_tag("I", tag) for tag in tags]
                answered.append(
                    Entities([entity._asdict() for entity in word_features.entities(text, spans, tags, shares)])
                )
                continue
            words = zip(spans, tags, shares, strict=True)
            answered.append(
                Words(
                    [
                        {"text": text[start:end], "tag": tag, "start": start, "end": end, "probability": share}
                        for (start, end), tag, share in words
                    ]
                )
            )
        return answered

    def _train(self, folder: Path) -> Path:
        return find_split_file(folder, FILES, "train", "CoNLL columns")


def _names_words(line: str, name: str) -> bool:
    """Returns whether a line is a JSON object with words and not a text that starts with a brace."""
    return line.lstrip().startswith("{") and json.dumps(name) in line


def _listed_words(task: str, value: Any, index: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the words of an input that lists them, and their spans in the joined text. Raises UserError."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) and word for word in value):
        raise UserError(
            f"input {index} is {shown(value)}, but {task} takes a text or a list of words, none of them empty: pass a "
            "string or a list of strings"
        )
    words = [without_surrogates(word) for word in value]
    starts = itertools.accumulate((len(word) + 1 for word in words), initial=0)
    return words, [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]


def _write_types(path: Path, tags: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> Path:
    names = ("precision", "recall", "f1", "support", "predicted", "correct")
    rows: list[tuple[str, ...]] = [("type", *names)]
    for type, scores in metrics.entities_by_type(tags, expected).items():
        rows.append((type, *(f"{scores[name]:.6g}" for name in names)))
    return write_tsv(path, rows)


TASKS = tuple(TokenClassificationTask(name=name) for name in ("ner", "conll2003", "wnut17"))
