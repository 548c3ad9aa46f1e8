"""A model as plain data, returned by readers and accepted by writers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, cast, get_args

from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.config.model import LongTextMode, PairTruncation
from bert.data.long_texts import LongTexts
from bert.errors import UserError, on_one_line, shorten
from bert.interchange.names import ARCHITECTURES_WITH_LABELS
from bert.interchange.sentence_transformers.routes import DOCUMENT
from bert.interchange.stored_params import ParamsField, StoredParams
from bert.model.late_interaction import Role
from bert.model.parameters import Params, params_checksum
from bert.model.pooling import Pooling


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """Configuration, parameters and vocabulary of a model, and how to interpret its outputs.

    Attributes:
        config: configuration of the encoder.
        params: nested dict of float32 arrays, with the encoder and the model's heads. `StoredParams` are read on first
            use.
        tokenizer: the vocabulary.
        architecture: name of the module in `bert.model`, a key of `bert.model.names.ARCHITECTURES`.
        labels: class names of a classifier, in order of their ids; () for other models.
        problem_type: the value in config.json, for sequence classifiers; None if unset.
        classifier_dropout: dropout rate before the head's dense layer in training; None: use ``hidden_dropout_prob``.
        null_score_diff_threshold: for question answering, the maximum of null score minus best score for which an
            answer is returned; None: always return an answer.
        label_thresholds: for multi-label models, the probability from which each label is predicted; () for none.
        score_activation: for a single output, qualified name of the PyTorch class that a sentence-transformers
            cross-encoder applies to its score; None if it declares none.
        texts_per_input: for sequence classifiers, 1, or 2 for pairs; None if unknown.
        pair_truncation: how pairs are truncated: "google" or "longest_first"; None: the tokenizer's default.
        long_texts: length of a row, and how longer texts are read; None: they are cut to the model's positions.
        clitics: for taggers, word endings that count as separate words; None if unknown.
        pooling: how embeddings are computed, for sentence-transformers models; None for other models.
        task_adapters: adapters by the name of the task for which they change embeddings, as
            `bert.interchange.task_adapters.TaskAdapter`.
        query_model: model that embeds queries, if it is separate; this model then embeds documents.
        default_route: role of texts without a role, for models with a ``query_model``; None: it must be given.
        target_tokenizer: target vocabulary of an encoder-decoder; None if it is ``tokenizer``.
        decoding: generation settings with which the model was evaluated or published; None if there are none.
        end_ids: for causal language models, ids of the tokens that end a generated text; () for the tokenizer's end
            token.
        source: folder or hub name from which the model was read.
        step: step of the run's checkpoint; None if the model does not come from a run.
        dtype: type of the computation; parameters are float32.
    """

    config: ModelConfig
    params: Params = cast(Any, ParamsField())  # noqa: RUF009  # a descriptor, which is not a default
    tokenizer: Tokenizer
    architecture: str
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    classifier_dropout: float | None = None
    null_score_diff_threshold: float | None = None
    label_thresholds: tuple[float, ...] = ()
    score_activation: str | None = None
    texts_per_input: int | None = None
    pair_truncation: PairTruncation | None = None
    long_texts: LongTexts | None = None
    clitics: tuple[str, ...] | None = None
    pooling: Pooling | None = None
    task_adapters: Mapping[str, Any] = field(default_factory=dict)
    query_model: ModelBundle | None = None
    default_route: Role | None = DOCUMENT
    target_tokenizer: Tokenizer | None = None
    decoding: Decoding | None = None
    end_ids: tuple[int, ...] = ()
    source: str = ""
    step: int | None = None
    dtype: str = "float32"

    def replace(self, **changes: Any) -> Self:
        """Like `dataclasses.replace`, without reading stored parameters."""
        fields = {field.name: vars(self)[field.name] for field in dataclasses.fields(self)}
        return type(self)(**{**fields, **changes})

    def for_role(self, role: Role | None) -> Self:
        """Returns the model for texts of a role, or without a role: ``query_model``, or this model for documents.

        Raises:
            UserError: texts need a role, because the models for queries and documents differ and none is the default.
        """
        if self.query_model is None:
            return self
        role = role or self.default_route
        if role is None:
            raise UserError(f"{self.source} has no default route: pass prompt='query' or prompt='document'")
        return cast(Self, self.query_model) if role == "query" else self

    @property
    def params_checksum(self) -> str:
        """`params_checksum` of the parameters. Stored ones are not read for it."""
        params = vars(self)["params"]
        return params.checksum if isinstance(params, StoredParams) else params_checksum(params)

    @property
    def longest_text(self) -> int:
        """Maximum number of tokens of a text. The limit of embeddings may be lower than the model's."""
        positions = self.config.max_position_embeddings
        limit = None if self.pooling is None else self.pooling.max_length
        if limit is None and self.architecture == "Bert" and self.long_texts is not None:
            limit = self.long_texts.max_length
        return min(positions, limit or positions)

    @property
    def row_length(self) -> int:
        """Maximum number of tokens of a row of the task, which exported tokenizers cut a text to."""
        return self.longest_text if self.long_texts is None else min(self.longest_text, self.long_texts.max_length)

    @property
    def pooling_or_default(self) -> Pooling:
        """`pooling`, or the default of sentence-transformers for a model that declares none."""
        return self.pooling or Pooling()

    @property
    def graph_pooling(self) -> Pooling | None:
        """`pooling` if an exported graph returns embeddings: the architecture computes what it reads."""
        source = "BertForMaskedLM" if self.pooling_or_default.is_lexical else "Bert"
        return self.pooling if self.architecture == source else None

    @property
    def embedding_size(self) -> int:
        """Width of an embedding."""
        return self.pooling_or_default.embedding_size(self.config)

    @property
    def sizes(self) -> str:
        """The sizes of the encoder, for a summary."""
        config = self.config
        if config.is_static:
            return f"a table without layers, hidden size {config.hidden_size}"
        return (
            f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, "
            f"feed-forward size {config.intermediate_size}, up to {config.max_position_embeddings} tokens"
        )

    @property
    def origin(self) -> str:
        """Source and step, for log messages."""
        source = on_one_line(self.source)
        return source if self.step is None else f"{source}, step {self.step:,}"

    @property
    def title(self) -> str:
        """Name of the source folder, for headings. Names that are not valid UTF-8 are escaped."""
        return on_one_line(Path(self.source).resolve().name)


MULTI_LABEL = "multi_label_classification"
PROBLEM_TYPES = ("regression", "single_label_classification", MULTI_LABEL)

PAIR_CLASSIFIERS = ("BertForSequenceClassification", "BertForMultipleChoice")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_word_endings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(ending, str) and ending for ending in value)


class TaskSetting(NamedTuple):
    """A field of `ModelBundle` that config.json holds under the same name; null or absent means None."""

    is_valid: Callable[[Any], bool]
    fix: str
    architectures: tuple[str, ...] | None = None
    """Architectures that have it; None for all."""


TASK_SETTINGS = {
    "classifier_dropout": TaskSetting(
        lambda value: _is_number(value) and 0 <= value < 1, "set it to a number from 0 to below 1, or null"
    ),
    "problem_type": TaskSetting(
        lambda value: value in PROBLEM_TYPES,
        f"set it to one of {', '.join(PROBLEM_TYPES)}, or null",
        ARCHITECTURES_WITH_LABELS,
    ),
    # transformers keeps the following keys, which only this package uses.
    "null_score_diff_threshold": TaskSetting(_is_number, "set it to a number, or null", ("BertForQuestionAnswering",)),
    "texts_per_input": TaskSetting(
        lambda value: type(value) is int and value in (1, 2),
        "set it to 1, or to 2 for pairs, or remove it",
        ("BertForSequenceClassification",),
    ),
    "pair_truncation": TaskSetting(
        lambda value: value in get_args(PairTruncation),
        "set it to google or longest_first, or remove it",
        PAIR_CLASSIFIERS,
    ),
    "clitics": TaskSetting(
        _are_word_endings, "set it to a list of word endings, or remove it", ("BertForTokenClassification",)
    ),
}


def read_task_settings(content: Mapping[str, Any], architecture: str, file: Path) -> dict[str, Any]:
    """Returns the `TASK_SETTINGS` of an architecture from the content of config.json. Raises UserError."""
    values = {}
    for key, setting in TASK_SETTINGS.items():
        if setting.architectures is None or architecture in setting.architectures:
            value = content.get(key)
            if value is not None and not setting.is_valid(value):
                raise UserError(f"{file}: {key} is {shorten(value)}: {setting.fix}")
            values[key] = tuple(value) if isinstance(value, list) else value
    return values


def read_label_thresholds(content: Mapping[str, Any], num_labels: int, file: Path) -> tuple[float, ...]:
    """Returns the thresholds of a multi-label model from the content of config.json; () for none. Raises UserError."""
    thresholds = content.get("label_thresholds") or []
    if content.get("problem_type") != MULTI_LABEL or not num_labels:
        return ()
    if (
        not isinstance(thresholds, list)
        or len(thresholds) not in (0, num_labels)
        or not all(_is_number(number) and 0 <= number <= 1 for number in thresholds)
    ):
        raise UserError(
            f"{file}: label_thresholds is {shorten(thresholds)}: set it to a number from 0 to 1 for each of the "
            f"{num_labels} labels, or remove it"
        )
    return tuple(map(float, thresholds))


LONG_TEXT_FIELDS = {"mode": "mode", "max_length": "max_length", "stride": "doc_stride"}
"""Fields of `LongTexts` and their names in config.json, under ``long_texts``."""


def read_long_texts(content: Mapping[str, Any], file: Path) -> LongTexts | None:
    """Returns ``long_texts`` of the content of config.json; None if there are none. Raises UserError."""
    stored = content.get("long_texts")
    if stored is None:
        return None
    values: dict[str, Any] = {}
    if isinstance(stored, dict):
        values = {name: stored.get(key) for name, key in LONG_TEXT_FIELDS.items()}
    counts = [values.get(name) for name in ("max_length", "stride")]
    if values.get("mode") not in get_args(LongTextMode) or not all(type(n) is int and n > 0 for n in counts):
        raise UserError(
            f"{file}: long_texts is {shorten(stored)}: set its mode to {', '.join(get_args(LongTextMode))}, and "
            "max_length and doc_stride to numbers of tokens, or remove it"
        )
    return LongTexts(**values)


def task_settings(model: ModelBundle) -> dict[str, Any]:
    """Returns the keys of config.json for `TASK_SETTINGS` and the thresholds. The inverse of reading them."""
    keys = ("problem_type", "null_score_diff_threshold", "label_thresholds", "texts_per_input", "pair_truncation")
    values = {key: getattr(model, key) for key in (*keys, "clitics", "classifier_dropout")}
    # "longest_first" is the default of transformers' tokenizers.
    reads_pairs = model.architecture in PAIR_CLASSIFIERS and model.texts_per_input != 1
    if model.pair_truncation != "google" or not reads_pairs:
        del values["pair_truncation"]
    # The tokenizer's model_max_length is enough for the length of a published model.
    if model.long_texts is not None and (model.step is not None or model.long_texts.mode != "cut"):
        values["long_texts"] = {key: getattr(model.long_texts, name) for name, key in LONG_TEXT_FIELDS.items()}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is not None and (key != "label_thresholds" or value)
    }
