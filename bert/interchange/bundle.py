"""A model as plain data, returned by readers and accepted by writers."""

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
    """Configuration, parameters and vocabulary of a model, and how to interpret its outputs.

    Attributes:
        config: configuration of the encoder.
        params: nested dict of float32 arrays, with the encoder and the model's heads.
        tokenizer: the vocabulary.
        architecture: name of the module in `bert.model`, a key of `bert.model.names.ARCHITECTURES`.
        labels: class names of a classifier, in order of their ids; () for other models.
        problem_type: the value in config.json, for sequence classifiers; None if unset.
        classifier_dropout: dropout rate before the head's dense layer in training; None: use ``hidden_dropout_prob``.
        null_score_diff_threshold: for question answering, the maximum of null score minus best score for which an
            answer is returned; None: always return an answer.
        label_thresholds: for multi-label models, the probability from which each label is predicted; () for none.
        score_activation: for a single output, qualified name of the PyTorch class that a sentence-transformers
            cross-encoder applies to its score; None for none.
        texts_per_input: for sequence classifiers, 1, or 2 for pairs; None if unknown.
        pair_truncation: how pairs are truncated: "google" or "longest_first"; None: the tokenizer's default.
        clitics: for taggers, word endings that count as separate words; None if unknown.
        pooling: how embeddings are computed, for sentence-transformers models; None for other models.
        target_tokenizer: target vocabulary of an encoder-decoder; None if it is ``tokenizer``.
        decoding: generation settings with which the model was evaluated or published; None if there are none.
        source: folder or hub name from which the model was read.
        step: step of the run's checkpoint; None if the model does not come from a run.
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
        """Maximum number of tokens of a text. The limit of embeddings may be lower than the model's."""
        positions = self.config.max_position_embeddings
        return positions if self.pooling is None else min(positions, self.pooling.max_length or positions)

    @property
    def embedding_size(self) -> int:
        """Width of an embedding."""
        return (self.pooling or Pooling()).embedding_size(self.config.hidden_size)

    @property
    def origin(self) -> str:
        """Source and step, for log messages."""
        source = on_one_line(self.source)
        return source if self.step is None else f"{source}, step {self.step:,}"

    @property
    def title(self) -> str:
        """Name of the source folder, for headings. Names that are not valid UTF-8 are escaped."""
        return on_one_line(Path(self.source).resolve().name)


OUTPUTS = {"BertForQuestionAnswering": 2, "BertForMultipleChoice": 1}
"""Number of outputs of heads without labels: start and end, or one score per choice."""


MODULE_HOMES = {
    "BertForPreTraining": pretraining,
    "BertForMaskedLM": pretraining,
    "BertForNextSentencePrediction": pretraining,
    "BertForReplacedTokenDetection": electra,
    "BertForCausalLM": decoders,
    "BertForSequenceToSequence": decoders,
}
"""Module classes of architectures that are not in `bert.model.heads`."""


def build_module(model: ModelBundle) -> Any:
    """Returns the Flax module that matches the parameters."""
    if model.architecture == "Bert":
        return Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    module = getattr(MODULE_HOMES.get(model.architecture, heads), model.architecture)
    takes = {field.name for field in dataclasses.fields(module)}
    outputs = len(model.labels) or OUTPUTS.get(model.architecture, 0)
    return module(model.config, **({"num_labels": outputs} if "num_labels" in takes else {}))


def describe_labels(model: ModelBundle) -> str:
    """Returns the labels, with their thresholds if any, for a README.md."""
    if not model.label_thresholds:
        return ", ".join(map(_code_span, model.labels))
    pairs = zip(model.labels, model.label_thresholds, strict=True)
    listed = ", ".join(f"{_code_span(label)} {threshold:.4g}" for label, threshold in pairs)
    return f"{listed} (a label is predicted if the sigmoid of its logit reaches the number next to it)"


def _code_span(text: str) -> str:
    """Formats a text as a Markdown code span on one line, with a fence longer than any backticks in it."""
    text = on_one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.strip("` ") != text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"
