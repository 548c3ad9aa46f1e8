"""Our parameters by path, the parts they belong to, and how files of others name and store them.

A path names modules from the top of the parameters, with ``/`` between them. ``{}`` is the number of a layer. The names
of each model family are in `bert.interchange.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError

PROJECTIONS = "distillation"
"""Parameters of a run that belong to no model: projections to a teacher's width (pretraining/distillation.py)."""

ENCODER, POOLER = "bert", "bert/pooler"
PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"
DETECTION = "discriminator_predictions"
DECODER = "decoder"

LAYER, DECODER_LAYER = "bert/encoder/layer_{}", "decoder/encoder/layer_{}"

CROSS = "cross_"
"""Beginning of the names of the modules of a layer that read the source."""

ENCODER_MODULES = {
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
    f"{LAYER}/gate": "dense",
    f"{LAYER}/output": "dense",
    f"{LAYER}/output_norm": "norm",
    "bert/encoder/norm": "norm",
    "bert/encoder/relative_attention_bias": "table",
    "bert/encoder/relative_attention_embeddings": "table",
    "bert/encoder/relative_attention_norm": "norm",
}
"""The modules of `MODULES` that a decoder has as well."""

MODULES = {
    **ENCODER_MODULES,
    **{path.replace(ENCODER, DECODER, 1): kind for path, kind in ENCODER_MODULES.items()},
    **{f"{DECODER_LAYER}/{CROSS}attention/{part}": "dense" for part in ("query", "key", "value", "output")},
    f"{DECODER_LAYER}/{CROSS}norm": "norm",
    POOLER: "dense",
    f"{POOLER}/dense": "dense",
    f"{POOLER}/norm": "norm",
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
    "BertForSequenceToSequence": (DECODER, PREDICTIONS),
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
    """One array of a file.

    Attributes:
        paths: of our parameters that it holds: one, or several side by side along their last axis.
        theirs: its name in the file.
        transposed: whether the file holds it transposed.
    """

    paths: tuple[str, ...]
    theirs: str
    transposed: bool

    @property
    def part(self) -> str:
        """The part of `ARCHITECTURES` that it belongs to; ``bert`` for the encoder."""
        return part_of(self.paths[0])

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """The file's array -> ours by path, as float32; uneven ones of an array whose shape is wrong."""
        array = array.T if self.transposed else array
        parts = [array] if len(self.paths) == 1 else np.array_split(np.atleast_1d(array), len(self.paths), axis=-1)
        return {path: np.ascontiguousarray(part, np.float32) for path, part in zip(self.paths, parts, strict=True)}

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split`, of any arrays that have ``paths``."""
        parts = [np.asarray(arrays[path]) for path in self.paths]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return array.T if self.transposed else array


@dataclass(frozen=True)
class Names:
    """The names of a model's parameters in a kind of file, read in both directions.

    Attributes:
        modules: names of those of `MODULES` that the file may hold. Those of one name are one module there, whose
            arrays hold theirs side by side.
        heads: names that differ in an architecture, a key of `ARCHITECTURES`; None for what it does not have.
        arrays: how it stores them.
    """

    modules: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=lambda: HF_ARRAYS)

    def tensors(self, layers: int, architecture: str, decoder_layers: int = 0) -> list[Tensor]:
        """Every array that a file may hold for a model of ``layers`` layers, and ``decoder_layers`` of a decoder.

        Several architectures name their classifiers alike: the result has only those of ``architecture``.
        """
        parts = {ENCODER, POOLER, PREDICTIONS, SEQ_RELATIONSHIP, DETECTION, *ARCHITECTURES[architecture]}
        modules: dict[str, list[str]] = {}
        for ours, theirs in {**self.modules, **self.heads.get(architecture, {})}.items():
            if part_of(ours) in parts and theirs is not None:
                modules.setdefault(theirs, []).append(ours)
        return [
            Tensor(tuple(path.format(layer) + our_end for path in ours), theirs.format(layer) + their_end, transposed)
            for theirs, ours in modules.items()
            for our_end, their_end, transposed in self.arrays[MODULES[ours[0]]]
            for layer in range(_number_of_layers(ours[0], layers, decoder_layers))
        ]


def _number_of_layers(path: str, layers: int, decoder_layers: int) -> int:
    """Of the modules of a path; 1 for one that is not in a layer."""
    if "{}" not in path:
        return 1
    return decoder_layers if part_of(path) == DECODER else layers


def output_layer(architecture: str) -> str | None:
    """The module with the outputs of a fine-tuned head; None for an architecture without such a head."""
    return next((part for part in ARCHITECTURES.get(architecture, ()) if part in (CLASSIFIER, QA_OUTPUTS)), None)


def has_decoder(architecture: str) -> bool:
    """Whether a model reads a source and writes a target."""
    return DECODER in ARCHITECTURES[architecture]


def word_embeddings(architecture: str) -> str:
    """The path of the table that the head decodes with if it has no matrix of its own."""
    return f"{DECODER if has_decoder(architecture) else ENCODER}/embeddings/word/embedding"


def part_of(path: str) -> str:
    """The part of `ARCHITECTURES` that a parameter of ours belongs to, by its path; ``bert`` for the encoder."""
    return POOLER if f"{path}/".startswith(f"{POOLER}/") else path.split("/")[0]


def parts_of(architecture: str, config: ModelConfig) -> tuple[str, ...]:
    """The parts of `ARCHITECTURES` that have parameters in a model of these settings.

    The head of GPT-2 has none, and a model that reads left to right no pooler: its first token has seen no other. A
    decoder that shares all has its parameters within the encoder's. Heads over every token may read the pooler.
    """
    has_head = config.prediction_transform or config.prediction_bias or not config.tie_word_embeddings
    absent: set[str] = {POOLER} if config.causal else set()
    absent |= set() if has_head else {PREDICTIONS}
    absent |= {DECODER} if config.share_decoder == "all" else set()
    parts = ARCHITECTURES[architecture]
    if config.pools_tokens and POOLER not in parts and not {CLASSIFIER, QA_OUTPUTS}.isdisjoint(parts):
        parts = (POOLER, *parts)
    return tuple(part for part in parts if part not in absent)


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
    """The module of the pretraining heads that are among the parts."""
    if DECODER in parts:
        return "BertForSequenceToSequence"
    if config.causal and parts.issuperset(parts_of("BertForCausalLM", config)):
        return "BertForCausalLM"
    if DETECTION in parts:
        return "BertForReplacedTokenDetection"
    if PREDICTIONS in parts:
        return "BertForPreTraining" if SEQ_RELATIONSHIP in parts else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if SEQ_RELATIONSHIP in parts else "Bert"
