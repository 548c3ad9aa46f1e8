"""The task of tagging words: entities, or a tag for each."""

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
from bert.data.rows import pad_and_stack
from bert.errors import UserError, require, without_surrogates
from bert.files import write_tsv
from bert.metrics.tagging_schemes import OUTSIDE, SCHEMES, Spelling, convert, is_span_tag, join_tag, split_tag
from bert.tasks import split_files
from bert.tasks.base import Outputs, Task, json_input
from bert.tasks.token_classification import conll, word_features
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.word_features import (
    CLITICS,
    WordFeatures,
    plain_apostrophes,
    separate_clitics,
    split_text,
)

FILES: split_files.Names = {
    "train": ("train.txt", "eng.train", "train.conll", "wnut17train.conll", "train.tsv"),
    "dev": ("valid.txt", "dev.txt", "eng.testa", "dev.conll", "valid.conll", "emerging.dev.conll", "dev.tsv"),
    "test": ("test.txt", "eng.testb", "test.conll", "emerging.test.annotated", "test.tsv"),
}
"""Of CoNLL-2003's copies and its original, of WNUT-17's, and of what is laid out like them."""


class Tagged(NamedTuple):
    """A tag for every word of every sentence, and its probability."""

    tags: list[list[str]]
    probabilities: list[list[float]]


class Entities(NamedTuple):
    """An answer: type, text, start (first character), end (one past the last) and probability of each entity."""

    entities: list[dict[str, Any]]


class Words(NamedTuple):
    """An answer where tags mark no entities: text, tag, start, end and probability of each word."""

    words: list[dict[str, Any]]


MOST_TAGS = 20
"""A file with more different tags than this, and than different words, is taken for one with swapped columns."""

TAG_KEYS = ("labels", "invalid_tags", "clitics")
"""Keys of ``data`` that tagging reads."""


@dataclass(frozen=True, kw_only=True)
class TokenClassificationTask(Task):
    """Tags of words in CoNLL columns; whether they mark entities, the tags themselves tell."""

    name: str
    labels: tuple[str, ...] = ()
    """As `bert.tasks.token_classification.conll.label_names` gives them; () until the training file is read."""
    may_be_broken: bool = False
    """Tags that break their scheme are counted, and no error."""
    spelling: Spelling | None = None
    """How the labels of a published model spell tags of entities; None for B-PER, I-PER and O, or plain tags."""
    clitics: tuple[str, ...] | None = None
    """Endings that `split_text` separates; None for CLITICS, until the training file is read."""
    lexicon: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The most common tag of each word of the training sentences, for the baseline."""
    most_frequent_tag: str = field(default=OUTSIDE, repr=False, compare=False)
    """Of all words of the training sentences, for the baseline."""
    kind: ClassVar[str] = "token_classification"
    baseline: str = "commonest_tag"
    windows: ClassVar[bool] = True
    data_keys: ClassVar[tuple[str, ...]] = TAG_KEYS

    @property
    def tags(self) -> tuple[str, ...]:
        """The labels as they are spelled here: B-PER for PER-B."""
        return tuple(self.spelling.read(label) or label for label in self.labels) if self.spelling else self.labels

    @property
    def marks_entities(self) -> bool:
        """Whether the tags are those of entities, and not parts of speech, say."""
        return all(map(is_span_tag, self.tags))

    @property
    def known_types(self) -> list[str] | None:
        """The types of entities; None until the training file is read."""
        return self.types if self.labels else None

    @property
    def names_types(self) -> bool:
        """Whether the tags are the types of entities without prefixes, and O."""
        return OUTSIDE in self.tags and not any(is_span_tag(tag) for tag in self.tags if tag != OUTSIDE)

    @property
    def finds_entities(self) -> bool:
        """Whether answers are entities; neighbours of one type without prefixes are one entity, as in transformers."""
        return self.marks_entities or self.names_types

    @property
    def reading(self) -> conll.Reading:
        """How tags are read: plain ones, once the training file has shown that they are, as they stand."""
        if self.labels and not self.marks_entities:
            return "plain"
        return "count" if self.may_be_broken else "error"

    @property
    def types(self) -> list[str]:
        """The types of entities."""
        return sorted({split_tag(label)[1] for label in self.tags} - {""}) if self.marks_entities else []

    @property  # of other tasks a field
    def main_metric(self) -> str:  # type: ignore[override]
        return "f1" if self.marks_entities else "accuracy"

    def higher_is_better(self, metric: str) -> bool | None:
        """Of f1_TYPE as of f1."""
        return super().higher_is_better("f1" if metric in {f"f1_{type}" for type in self.types} else metric)

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
        """With the labels, unless data.labels names them, and each word's most common tag."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for words, tags in zip(train.words, require(train.tags, "the tags"), strict=True):
            for word, tag in zip(words, tags, strict=True):
                counts[word][tag] += 1
        lexicon = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
        [(tag, _)] = sum(counts.values(), Counter()).most_common(1)
        labels = self.labels or train.labels
        if len(labels) < 2:
            raise UserError(f"every training word has the tag {tag!r}: a tagger needs two or more tags")
        if not self.labels and len(labels) > max(len(counts), MOST_TAGS):
            raise UserError(
                f"{train.path} has {len(labels):,} tags and {len(counts):,} different words: are the columns swapped? "
                "Set data.columns.words and data.columns.tags, or list all tags as data.labels"
            )
        clitics = self.clitics
        if clitics is None:
            clitics = separate_clitics({word: sum(tags.values()) for word, tags in counts.items()})
        return replace(self, labels=labels, lexicon=lexicon, most_frequent_tag=tag, clitics=clitics)

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return replace(data, labels=list(self.labels), clitics=None if self.clitics is None else list(self.clitics))

    def from_config(self, data: TaskDataConfig) -> Self:
        labels, clitics = tuple(data.labels or ()), None
        if data.clitics is not None or labels:  # a run that began before the setting existed has labels
            clitics = tuple(map(plain_apostrophes, data.clitics or ()))
        return replace(self, labels=labels, may_be_broken=data.invalid_tags == "count", clitics=clitics)

    def splits(self, folder: Path) -> list[str]:
        return split_files.splits_in(Path(folder), FILES)

    def read(self, folder: Path, split: str) -> Sentences:
        """A test file with as many columns as the training file has its tags."""
        path = split_files.find_split_file(folder, FILES, split, "CoNLL columns")
        labelled = split != "test" or conll.width(path) == conll.width(self._train(folder))
        sentences = conll.read(path, labelled, self.reading, self.known_types)
        return replace(sentences, labels=conll.label_names(sentences) if labelled else ())

    def features(self, tokenizer: Tokenizer, examples: Sentences, data: TaskDataConfig) -> WordFeatures:
        return word_features.tokenize(tokenizer, examples, self.labels, data.max_length)

    def predict(self, outputs: Outputs, features: WordFeatures, examples: Sentences) -> Tagged:
        """[T, L] logits of each row -> the most likely tag of each word, where the word is labelled.

        Tags of entities become sound BIO, for a head may well begin an entity with I-; probabilities stay as they were.
        """
        shares = metrics.softmax(np.nan_to_num(pad_and_stack(outputs, (0, self.num_labels))))
        tags = word_features.decode_tags(examples, features, shares.argmax(-1), self.tags)
        if self.marks_entities:
            tags = [convert(sentence, "BIO") for sentence in tags]
        best = iter(word_features.gather_word_values(features, shares.max(-1)).tolist())
        return Tagged(tags, [[next(best) for _ in words] for words in examples.words])

    def score(self, predictions: Tagged, examples: Sentences) -> dict[str, float]:
        """Entities: precision, recall, f1 and more over all, and f1_TYPE of each type; plain tags: accuracy."""
        return self._scores(predictions.tags, examples)

    def _scores(self, tags: Sequence[Sequence[str]], examples: Sentences) -> dict[str, float]:
        right: Sequence[Sequence[str]] = require(examples.tags, "the tags")
        if self.marks_entities and examples.scheme in SCHEMES:  # accuracy depends on the scheme: that of the file
            tags, right = (
                [convert(sentence, examples.scheme) for sentence in sentences] for sentences in (tags, right)
            )
        scores = metrics.entity_metrics(tags, right)
        if not self.marks_entities:
            return {"accuracy": scores["accuracy"]}
        by_type = metrics.entities_by_type(tags, right)
        return {**scores, **{f"f1_{type}": by_type.get(type, {"f1": 0.0})["f1"] for type in self.types}}

    def baseline_scores(self, examples: Sentences) -> dict[str, float]:
        """Scores of the most frequent tag of each word in train; a new word gets the most frequent tag of all."""
        unknown = OUTSIDE if self.marks_entities else self.most_frequent_tag
        return self._scores([[self.lexicon.get(word, unknown) for word in words] for words in examples.words], examples)

    def is_degenerate(self, predictions: Tagged, examples: Sentences) -> bool:
        """One tag (B- and I- count as one) for every word where there should be several, or not one entity right."""
        both = (predictions.tags, require(examples.tags, "the tags"))
        ours, right = ({self._kind(tag) for sentence in tags for tag in sentence} for tags in both)
        return len(ours) == 1 < len(right) or self.score(predictions, examples)[self.main_metric] == 0

    def never_predicted(self, predictions: Tagged, examples: Sentences) -> list[str]:
        """Returns types of entities, or tags."""
        both = (require(examples.tags, "the tags"), predictions.tags)
        right, ours = ({self._kind(tag) for sentence in tags for tag in sentence} for tags in both)
        missing = sorted(right - ours - ({OUTSIDE} if self.marks_entities else set()))
        return [split_tag(tag)[1] or tag if self.marks_entities else tag for tag in missing]

    def _kind(self, tag: str) -> str:
        return join_tag("B", split_tag(tag)[1]) if self.marks_entities and tag != OUTSIDE else tag

    def write_predictions(self, folder: Path, split: str, predictions: Tagged, examples: Sentences) -> list[Path]:
        """The columns of the file with the predicted tag as one more, as conlleval reads them; next to the scores of
        each type, where the right tags are known."""
        paths = [conll.write_predictions(folder / f"{split}.conll", examples, predictions.tags)]
        if examples.tags is not None and self.marks_entities:
            paths.append(_write_types(folder / f"{split}_types.tsv", predictions.tags, examples.tags))
        return paths

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("text",)

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Sentences:
        """Each input is a text, or a list of words. Both may be empty.

        The text of a list is its words with a space between.
        """
        texts, words, spans = [], [], []
        for index, given in enumerate(inputs, 1):
            if isinstance(given, str):
                texts.append(without_surrogates(given))
                found = split_text(texts[-1], CLITICS if self.clitics is None else self.clitics)
            else:
                found = _given_words(self.name, given, index)
                texts.append(" ".join(found[0]))
            words.append(found[0])
            spans.append(found[1])
        return Sentences(words, None, texts=texts, spans=spans)

    def read_inputs(self, path: Path) -> Iterator[tuple[int, list[str]]] | None:
        """Yields the sentences of a file with a row for each word."""
        found = conll.read_words(path, self.words_column)
        return None if found is None else zip(found.lines, found.words, strict=True)

    @property
    def words_column(self) -> str:
        """The name of the field with a list of words."""
        return "words"

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """The field of words, if there is no text."""
        has_words = "text" not in names and self.words_column in names
        return (self.words_column,) if has_words else super().columns_among(names)

    def input_of_row(self, fields: Mapping[str, Any]) -> Any:
        """A text, or the list of words of a row."""
        if self.columns_among(fields) != (self.words_column,):
            return super().input_of_row(fields)
        words = fields[self.words_column]
        if not isinstance(words, list) or not words:
            raise ValueError(
                f"{self.words_column} is {json.dumps(words, default=str)[:40]}: it must be a list of words"
            )
        return words

    def parse_line(self, line: str) -> Any:
        """A text, or a JSON object with the words of a sentence."""
        fields = json_input(line, (self.words_column,)) if _names_words(line, self.words_column) else None
        return super().parse_line(line) if fields is None else self.input_of_row(fields)

    def input_fields(self, given: Any) -> dict[str, Any]:
        return {"text": given} if isinstance(given, str) else {"words": list(given)}

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
        return split_files.find_split_file(folder, FILES, "train", "CoNLL columns")


def _names_words(line: str, name: str) -> bool:
    """Whether a line is meant as a JSON object with words, and not as a text that begins with a brace."""
    return line.lstrip().startswith("{") and json.dumps(name) in line


def _given_words(task: str, given: Any, index: int) -> tuple[list[str], list[tuple[int, int]]]:
    """The words of an input that lists them, and their spans in the text with a space between two. Raises UserError."""
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(given, list | tuple) or not all(isinstance(word, str) and word for word in given):
        raise UserError(
            f"input {index} is {shown(given)}, and {task} takes a text or a list of words, none of them empty: pass a "
            "string or a list of strings"
        )
    words = [without_surrogates(word) for word in given]
    starts = itertools.accumulate((len(word) + 1 for word in words), initial=0)
    return words, [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]


def _write_types(path: Path, tags: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> Path:
    names = ("precision", "recall", "f1", "support", "predicted", "correct")
    rows: list[tuple[str, ...]] = [("type", *names)]
    for type, scores in metrics.entities_by_type(tags, right).items():
        rows.append((type, *(f"{scores[name]:.6g}" for name in names)))
    return write_tsv(path, rows)


TASKS = tuple(TokenClassificationTask(name=name) for name in ("ner", "conll2003", "wnut17"))
