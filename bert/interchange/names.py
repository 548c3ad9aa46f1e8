"""Our parameters by path, the parts they belong to, and how files of others name and store them.

A path names modules from the top of the parameters, with ``/`` between them. ``{}`` is the number of a layer. The names
of each model family are in `bert.interchange.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bert.config import ModelConfig
from bert.errors import UserError

PROJECTIONS = "distillation"
"""Parameters of a run that belong to no model: projections to a teacher's width (`bert.training.distillation`)."""

ENCODER, POOLER = "bert", "bert/pooler"
PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"
DETECTION = "discriminator_predictions"

LAYER = "bert/encoder/layer_{}"

MODULES = {
    "bert/embeddings/word": "table",
    "bert/embeddings/position": "table",
    "bert/embeddings/segment": "table",
    "bert/embeddings/norm": "norm",
    "bert/embeddings/projection": "dense",
    f"{LAYER}/attention/query": "dense",
    f"{LAYER}/attention/key": "dense",
    f"{LAYER}/attention/value": "dense",
    f"{LAYER}/attention/output": "dense",
    f"{LAYER}/attention_norm": "norm",
    f"{LAYER}/intermediate": "dense",
    f"{LAYER}/output": "dense",
    f"{LAYER}/output_norm": "norm",
    POOLER: "dense",
    f"{PREDICTIONS}/transform": "dense",
    f"{PREDICTIONS}/norm": "norm",
    f"{PREDICTIONS}/bias": "array",
    f"{PREDICTIONS}/decoder": "array",
    SEQ_RELATIONSHIP: "output",
    f"{DETECTION}/dense": "dense",
    f"{DETECTION}/output": "dense",
    CLASSIFIER: "output",
    QA_OUTPUTS: "output",
}
"""Our modules and single arrays, and the kind of each: a key of `Arrays`."""

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "Bert": (POOLER,),
    "BertForPreTraining": (POOLER, PREDICTIONS, SEQ_RELATIONSHIP),
    "BertForMaskedLM": (PREDICTIONS,),
    "BertForCausalLM": (PREDICTIONS,),
    "BertForNextSentencePrediction": (POOLER, SEQ_RELATIONSHIP),
    "BertForReplacedTokenDetection": (DETECTION,),
    "BertForSequenceClassification": (POOLER, CLASSIFIER),
    "BertForTokenClassification": (CLASSIFIER,),
    "BertForQuestionAnswering": (QA_OUTPUTS,),
    "BertForMultipleChoice": (POOLER, CLASSIFIER),
}
"""Our modules, and the parts each has in addition to the encoder. A part is complete or randomly initialized."""

Arrays = Mapping[str, tuple[tuple[str, str, bool], ...]]
"""Arrays of each kind of module: ends of our and of their names, and whether theirs is transposed."""

HF_ARRAYS: Arrays = {
    "table": (("/embedding", ".weight", False),),
    "dense": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "output": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "norm": (("/scale", ".weight", False), ("/bias", ".bias", False)),
    "array": (("", "", False),),
}
"""Arrays as PyTorch's modules hold them."""


class Tensor(NamedTuple):
    """One array: its path in our parameters, its name in a file, and whether the file holds it transposed."""

    ours: str
    theirs: str
    transposed: bool

    @property
    def part(self) -> str:
        """The part of `ARCHITECTURES` that it belongs to; ``bert`` for the encoder."""
        return part_of(self.ours)


@dataclass(frozen=True)
class Names:
    """The names of a model's parameters in a kind of file, read in both directions.

    Attributes:
        modules: names of those of `MODULES` that the file may hold.
        heads: names that differ in an architecture, a key of `ARCHITECTURES`.
        arrays: how it stores them.
    """

    modules: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=lambda: HF_ARRAYS)

    def tensors(self, layers: int, architecture: str) -> list[Tensor]:
        """Every array that a file may hold for a model of ``layers`` layers.

        Several architectures name their classifiers alike: the result has only those of ``architecture``.
        """
        parts = {ENCODER, POOLER, PREDICTIONS, SEQ_RELATIONSHIP, DETECTION, *ARCHITECTURES[architecture]}
        names = {**self.modules, **self.heads.get(architecture, {})}
        return [
            Tensor(ours.format(layer) + our_end, names[ours].format(layer) + their_end, transposed)
            for ours, kind in MODULES.items()
            if ours in names and part_of(ours) in parts
            for our_end, their_end, transposed in self.arrays[kind]
            for layer in range(layers if "{}" in ours else 1)
        ]


def part_of(path: str) -> str:
    """The part of `ARCHITECTURES` that a parameter of ours belongs to, by its path; ``bert`` for the encoder."""
    return POOLER if f"{path}/".startswith(f"{POOLER}/") else path.split("/")[0]


def has_prediction_parameters(config: ModelConfig) -> bool:
    """Whether the MLM head has parameters of its own."""
    return config.prediction_transform or config.prediction_bias or not config.tie_word_embeddings


def check_layers(layers: int, held: int, source: Path | str, config: Path | str) -> None:
    """Raises UserError where ``source`` holds fewer arrays than the configuration has layers.

    To be called before the names of all layers are written out: a number that is wrong may be so by millions.
    """
    if layers > held:
        raise UserError(
            f"{source} holds {held:,} tensors, too few for the {layers:,} layers of {config}: fix num_hidden_layers "
            "there, or copy both again"
        )


def pretraining_architecture(parts: set[str], config: ModelConfig) -> str:
    """The module of the pretraining heads that are among the parts.

    The head of a language model may have no parameters: that of GPT-2 has none.
    """
    if config.causal and (PREDICTIONS in parts or not has_prediction_parameters(config)):
        return "BertForCausalLM"
    if DETECTION in parts:
        return "BertForReplacedTokenDetection"
    if PREDICTIONS in parts:
        return "BertForPreTraining" if SEQ_RELATIONSHIP in parts else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if SEQ_RELATIONSHIP in parts else "Bert"
