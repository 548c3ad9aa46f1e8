"""A model as plain data: readers return it, and writers accept it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.config.model import PairTruncation
from bert.errors import on_one_line
from bert.model import decoders, electra, heads, pretraining
from bert.model.encoder import Bert
from bert.model.pooling import Pooling


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """Sizes, parameters and vocabulary of a model, and how to read its outputs.

    Attributes:
        config: sizes of the encoder.
        params: nested dict of float32 arrays: the encoder, and the heads that the model has.
        tokenizer: the vocabulary.
        architecture: name of the module in `bert.model`, a key of `bert.model.names.ARCHITECTURES`.
        labels: names of a classifier's classes, by number; () for other models.
        problem_type: as in config.json, for sequence classifiers; None if it is unset.
        classifier_dropout: rate before a task's dense layer in training; None for ``hidden_dropout_prob``.
        null_score_diff_threshold: for question answering: largest null score minus best score for which there is an
            answer; None if there always is.
        label_thresholds: for several labels at once: the probability from which each is predicted; () for none.
        score_activation: for one output: full name of the PyTorch class that a cross-encoder of sentence-transformers
            applies to its score; None for none.
        texts_per_input: for sequence classifiers: 1, or 2 for pairs; None if unknown.
        pair_truncation: how pairs are cut to a row: "google" or "longest_first"; None for the tokenizer's own way.
        clitics: for taggers: word endings that are separate words; None if unknown.
        pooling: how embeddings are made, from a sentence-transformers folder; None for other models.
        target_tokenizer: vocabulary of the targets of an encoder-decoder; None if it is ``tokenizer``.
        decoding: settings with which a generating model was evaluated or published; None if there are none.
        source: folder or hub name that the model was read from.
        step: step of the run's checkpoint; None if the model is not from a run.
        dtype: type of the computation; parameters are float32.
    """

    config: ModelConfig
    params: dict[str, Any]
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
    clitics: tuple[str, ...] | None = None
    pooling: Pooling | None = None
    target_tokenizer: Tokenizer | None = None
    decoding: Decoding | None = None
    source: str = ""
    step: int | None = None
    dtype: str = "float32"

    @property
    def longest_text(self) -> int:
        """Maximum number of tokens of a text; embeddings may have a smaller one than the model."""
        positions = self.config.max_position_embeddings
        return positions if self.pooling is None else min(positions, self.pooling.max_length or positions)

    @property
    def embedding_size(self) -> int:
        """Width of an embedding."""
        return (self.pooling or Pooling()).embedding_size(self.config.hidden_size)

    @property
    def origin(self) -> str:
        """Source and step, for messages."""
        source = on_one_line(self.source)
        return source if self.step is None else f"{source}, step {self.step:,}"

    @property
    def title(self) -> str:
        """Name of the source folder, for headings. Names that are not UTF-8 are escaped."""
        return on_one_line(Path(self.source).resolve().name)


OUTPUTS = {"BertForQuestionAnswering": 2, "BertForMultipleChoice": 1}
"""Number of outputs of heads without labels: start and end, and one score per choice."""


MODULE_HOMES = {
    "BertForPreTraining": pretraining,
    "BertForMaskedLM": pretraining,
    "BertForNextSentencePrediction": pretraining,
    "BertForReplacedTokenDetection": electra,
    "BertForCausalLM": decoders,
    "BertForSequenceToSequence": decoders,
}
"""Modules with architectures that are not in `bert.model.heads`."""


def build_module(model: ModelBundle) -> Any:
    """Returns the Flax module for the parameters."""
    if model.architecture == "Bert":
        return Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    module = getattr(MODULE_HOMES.get(model.architecture, heads), model.architecture)
    takes = {field.name for field in dataclasses.fields(module)}
    outputs = len(model.labels) or OUTPUTS.get(model.architecture, 0)
    return module(model.config, **({"num_labels": outputs} if "num_labels" in takes else {}))


def describe_labels(model: ModelBundle) -> str:
    """Returns the labels, with their thresholds if there are any, for a README.md."""
    if not model.label_thresholds:
        return ", ".join(map(_code_span, model.labels))
    pairs = zip(model.labels, model.label_thresholds, strict=True)
    listed = ", ".join(f"{_code_span(label)} {threshold:.4g}" for label, threshold in pairs)
    return f"{listed} (a label is predicted if the sigmoid of its logit reaches the number next to it)"


def _code_span(text: str) -> str:
    """Returns a text as Markdown code on one line, with a fence longer than any backticks in it."""
    text = on_one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.strip("` ") != text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"
