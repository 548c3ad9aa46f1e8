"""A model's data without its methods: readers return it, writers take it."""

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
    """A model's sizes, parameters and vocabulary, and how its outputs are read.

    Attributes:
        config: sizes of the encoder.
        params: nested dict of float32 arrays: the encoder and the heads that are there.
        tokenizer: its vocabulary.
        architecture: name of our module that the heads fill, a key of `bert.model.names.ARCHITECTURES`.
        labels: names of the classes of a classifier, by number; () without one.
        problem_type: of a sequence classifier, as in config.json; None where it says nothing.
        classifier_dropout: rate before a task's dense layer in training; None for ``hidden_dropout_prob``.
        null_score_diff_threshold: of a model that answers questions: there is no
            answer above this difference of the null score from the best answer's; None if it always answers.
        label_thresholds: of a classifier of several labels at once: from which probability on each is predicted; () if
            there are none.
        score_activation: of a classifier with one output: the class of PyTorch that a cross-encoder of
            sentence-transformers declares for its score, by its full name; None for none.
        texts_per_input: of a sequence classifier: 1, or 2 of pairs; None where it is unknown.
        pair_truncation: how pairs are cut to a row: "google" or "longest_first"; None for the tokenizer's own way.
        clitics: of a tagger: word endings that are separate words in texts; None where they are unknown.
        pooling: how embeddings are made, as a sentence-transformers folder declares it; None for any other.
        target_tokenizer: of an encoder-decoder with two vocabularies: that of its targets; None if ``tokenizer`` is.
        decoding: of a model that generates: the settings it was evaluated or published with; None if there are none.
        source: the folder or hub name the model was read from.
        step: the checkpoint it was read from; None if it is not a run's.
        dtype: what it computes in; its parameters are float32.
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
        """Tokens of the longest text that is read; an embedding may cut texts before its positions end."""
        positions = self.config.max_position_embeddings
        return positions if self.pooling is None else min(positions, self.pooling.max_length or positions)

    @property
    def embedding_size(self) -> int:
        """E, the width of an embedding."""
        return (self.pooling or Pooling()).embedding_size(self.config.hidden_size)

    @property
    def origin(self) -> str:
        """The source and a run's step, for messages."""
        source = on_one_line(self.source)
        return source if self.step is None else f"{source}, step {self.step:,}"

    @property
    def title(self) -> str:
        """The name of the source's folder, for headings. Names that are not UTF-8 are escaped."""
        return on_one_line(Path(self.source).resolve().name)


OUTPUTS = {"BertForQuestionAnswering": 2, "BertForMultipleChoice": 1}
"""L of the heads whose outputs have no names: start and end, and one score a choice."""


MODULE_HOMES = {
    "BertForPreTraining": pretraining,
    "BertForMaskedLM": pretraining,
    "BertForNextSentencePrediction": pretraining,
    "BertForReplacedTokenDetection": electra,
    "BertForCausalLM": decoders,
    "BertForSequenceToSequence": decoders,
}
"""Where the architectures are that are not among `bert.model.heads`."""


def build_module(model: ModelBundle) -> Any:
    """The Flax module that the parameters fill."""
    if model.architecture == "Bert":
        return Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    module = getattr(MODULE_HOMES.get(model.architecture, heads), model.architecture)
    takes = {field.name for field in dataclasses.fields(module)}
    outputs = len(model.labels) or OUTPUTS.get(model.architecture, 0)
    return module(model.config, **({"num_labels": outputs} if "num_labels" in takes else {}))


def describe_labels(model: ModelBundle) -> str:
    """Its labels for a README.md, and from which probability on each is predicted where there are such thresholds."""
    if not model.label_thresholds:
        return ", ".join(map(_code_span, model.labels))
    pairs = zip(model.labels, model.label_thresholds, strict=True)
    listed = ", ".join(f"{_code_span(label)} {threshold:.4g}" for label, threshold in pairs)
    return f"{listed} (a label is predicted if the sigmoid of its logit reaches the number next to it)"


def _code_span(text: str) -> str:
    """A text in Markdown that stays code: its fence is longer than any run of backticks in it, and it is one line."""
    text = on_one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.strip("` ") != text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"
