"""The one table of names: our parameters and what others call them, read in both directions.

A path of ours names modules from the top of the parameters, with ``/`` between them. ``{}`` is the number of a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bert.errors import UserError
from bert.interchange import electra

BERT, ROBERTA, ELECTRA, GOOGLE = "bert", "roberta", "electra", "google"
"""Whose names: those of Hugging Face's models, by the ``model_type`` of config.json, and of google-research/bert."""

PROJECTIONS = "distillation"
"""Parameters of a run that belong to no model: projections to a teacher's width (`bert.training.distillation`)."""


class NameMapping(NamedTuple):
    """A module, or a single array, under each of its names.

    Attributes:
        kind: a key of `HF_ARRAYS` and `GOOGLE_ARRAYS`.
        ours: path in the parameters.
        bert: in Hugging Face's BERT; None for what it never has.
        google: in Google's checkpoints; None for what they never hold.
        roberta: in Hugging Face's RoBERTa; None where it is BERT's with ``roberta`` for ``bert``.

    Names of ELECTRA are in `bert.interchange.electra`.
    """

    kind: str
    ours: str
    bert: str | None
    google: str | None
    roberta: str | None = None


_LAYER, _HF, _GOOGLE = "bert/encoder/layer_{}", "bert.encoder.layer.{}", "bert/encoder/layer_{}"

TABLE = (
    NameMapping("table", "bert/embeddings/word", "bert.embeddings.word_embeddings", "bert/embeddings/word_embeddings"),
    NameMapping("table", "bert/embeddings/position", "bert.embeddings.position_embeddings",
        "bert/embeddings/position_embeddings"),
    NameMapping("table", "bert/embeddings/segment", "bert.embeddings.token_type_embeddings",
        "bert/embeddings/token_type_embeddings"),
    NameMapping("norm", "bert/embeddings/norm", "bert.embeddings.LayerNorm", "bert/embeddings/LayerNorm"),
    NameMapping("dense", "bert/embeddings/projection", None, None),
    NameMapping("dense", f"{_LAYER}/attention/query", f"{_HF}.attention.self.query", f"{_GOOGLE}/attention/self/query"),
    NameMapping("dense", f"{_LAYER}/attention/key", f"{_HF}.attention.self.key", f"{_GOOGLE}/attention/self/key"),
    NameMapping("dense", f"{_LAYER}/attention/value", f"{_HF}.attention.self.value", f"{_GOOGLE}/attention/self/value"),
    NameMapping("dense", f"{_LAYER}/attention/output", f"{_HF}.attention.output.dense",
        f"{_GOOGLE}/attention/output/dense"),
    NameMapping("norm", f"{_LAYER}/attention_norm", f"{_HF}.attention.output.LayerNorm",
        f"{_GOOGLE}/attention/output/LayerNorm"),
    NameMapping("dense", f"{_LAYER}/intermediate", f"{_HF}.intermediate.dense", f"{_GOOGLE}/intermediate/dense"),
    NameMapping("dense", f"{_LAYER}/output", f"{_HF}.output.dense", f"{_GOOGLE}/output/dense"),
    NameMapping("norm", f"{_LAYER}/output_norm", f"{_HF}.output.LayerNorm", f"{_GOOGLE}/output/LayerNorm"),
    NameMapping("dense", "bert/pooler", "bert.pooler.dense", "bert/pooler/dense"),
    NameMapping("dense", "predictions/transform", "cls.predictions.transform.dense", "cls/predictions/transform/dense",
        "lm_head.dense"),
    NameMapping("norm", "predictions/norm", "cls.predictions.transform.LayerNorm",
        "cls/predictions/transform/LayerNorm", "lm_head.layer_norm"),
    NameMapping("array", "predictions/bias", "cls.predictions.bias", "cls/predictions/output_bias", "lm_head.bias"),
    NameMapping("array", "predictions/decoder", "cls.predictions.decoder.weight", None, "lm_head.decoder.weight"),
    NameMapping("output", "seq_relationship", "cls.seq_relationship", "cls/seq_relationship/"),
    NameMapping("dense", "discriminator_predictions/dense", None, None),
    NameMapping("dense", "discriminator_predictions/output", None, None),
    NameMapping("output", "classifier", "classifier", ""),  # Google's: run_classifier.py
    NameMapping("output", "qa_outputs", "qa_outputs", "cls/squad/"),  # Google's: run_squad.py
)  # fmt: skip

ROBERTA_CLASSIFIER = {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"}
"""RoBERTa's ForSequenceClassification has BERT's pooler as the first layer of its classifier."""

HF_ARRAYS = {
    "table": (("/embedding", ".weight", False),),
    "dense": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "output": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "norm": (("/scale", ".weight", False), ("/bias", ".bias", False)),
    "array": (("", "", False),),
}
"""Arrays of each kind of module: ends of our and of Hugging Face's names, and whether theirs is transposed."""

GOOGLE_ARRAYS = {
    "table": (("/embedding", "", False),),
    "dense": (("/kernel", "/kernel", False), ("/bias", "/bias", False)),
    "output": (("/kernel", "output_weights", True), ("/bias", "output_bias", False)),
    "norm": (("/scale", "/gamma", False), ("/bias", "/beta", False)),
    "array": (("", "", False),),
}
"""The same with Google's names. The last dense layer of a head is a bare matrix [outputs, D] there."""

ENCODER, POOLER = "bert", "bert/pooler"
PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"
DETECTION = "discriminator_predictions"

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "Bert": (POOLER,),
    "BertForPreTraining": (POOLER, PREDICTIONS, SEQ_RELATIONSHIP),
    "BertForMaskedLM": (PREDICTIONS,),
    "BertForNextSentencePrediction": (POOLER, SEQ_RELATIONSHIP),
    "BertForReplacedTokenDetection": (DETECTION,),
    "BertForSequenceClassification": (POOLER, CLASSIFIER),
    "BertForTokenClassification": (CLASSIFIER,),
    "BertForQuestionAnswering": (QA_OUTPUTS,),
    "BertForMultipleChoice": (POOLER, CLASSIFIER),
}
"""Our modules, and the parts each has in addition to the encoder. A part is complete or randomly initialized."""

ONLY_FAMILY = {
    "BertForPreTraining": BERT,
    "BertForNextSentencePrediction": BERT,
    "BertForReplacedTokenDetection": ELECTRA,
}
"""The architectures that Hugging Face has in one family alone."""


class Tensor(NamedTuple):
    """One array: its path in our parameters, its name in a file, and whether the file holds it transposed."""

    ours: str
    theirs: str
    transposed: bool

    @property
    def part(self) -> str:
        """The part of `ARCHITECTURES` that it belongs to; ``bert`` for the encoder."""
        return part_of(self.ours)


def part_of(path: str) -> str:
    """The part of `ARCHITECTURES` that a parameter of ours belongs to, by its path; ``bert`` for the encoder."""
    return POOLER if path.startswith(f"{POOLER}/") else path.split("/")[0]


def tensors(layers: int, family: str, architecture: str) -> list[Tensor]:
    """Every array that a file of this family may hold for a model of ``layers`` layers.

    Several architectures name their classifiers alike: the result has only those of ``architecture`` (a key of
    ARCHITECTURES).
    """
    parts = {ENCODER, POOLER, PREDICTIONS, SEQ_RELATIONSHIP, DETECTION, *ARCHITECTURES[architecture]}
    table = []
    for row in TABLE:
        theirs = _name(row, family, architecture)
        if theirs is None:
            continue
        for our_end, their_end, transposed in (GOOGLE_ARRAYS if family == GOOGLE else HF_ARRAYS)[row.kind]:
            for layer in range(layers) if "{}" in row.ours else (0,):
                table.append(
                    Tensor(row.ours.format(layer) + our_end, theirs.format(layer) + their_end, transposed),
                )
    return [tensor for tensor in table if tensor.part in parts]


def check_layers(layers: int, held: int, source: Path | str, config: Path | str) -> None:
    """Raises UserError where ``source`` holds fewer arrays than the configuration has layers.

    To be called before the names of all layers are written out: a number that is wrong may be so by millions.
    """
    if layers > held:
        raise UserError(
            f"{source} holds {held:,} tensors, too few for the {layers:,} layers of {config}: fix num_hidden_layers "
            "there, or copy both again"
        )


def _name(row: NameMapping, family: str, architecture: str) -> str | None:
    if family == GOOGLE:
        return row.google
    if family == ELECTRA:
        return electra.find_name(row.ours, row.bert, architecture)
    if family == BERT or row.bert is None:
        return row.bert
    if architecture == "BertForSequenceClassification" and row.ours in ROBERTA_CLASSIFIER:
        return ROBERTA_CLASSIFIER[row.ours]
    return row.roberta or row.bert.replace("bert.", "roberta.", 1)


def pretraining_architecture(parts: set[str]) -> str:
    """The module of the pretraining heads that are among the parts."""
    if DETECTION in parts:
        return "BertForReplacedTokenDetection"
    if PREDICTIONS in parts:
        return "BertForPreTraining" if SEQ_RELATIONSHIP in parts else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if SEQ_RELATIONSHIP in parts else "Bert"


def decoder_bias(family: str) -> str:
    """The MLM head's bias under its second name, that of the decoder's own bias; ELECTRA's has one name."""
    return {
        BERT: "cls.predictions.decoder.bias",
        ROBERTA: "lm_head.decoder.bias",
        ELECTRA: electra.DECODER_BIAS,
    }[family]


def architectures(family: str) -> list[str]:
    """Our modules that Hugging Face has in a family."""
    return [name for name in ARCHITECTURES if ONLY_FAMILY.get(name, family) == family]


def hf_class_name(architecture: str, family: str) -> str:
    """Our module's name -> Hugging Face's: ``Bert`` -> ``BertModel``, ``RobertaModel``."""
    if architecture == "BertForReplacedTokenDetection":
        return "ElectraForPreTraining"
    return family.capitalize() + (architecture.removeprefix("Bert") or "Model")


def architecture_from_hf(architecture: str, family: str) -> str | None:
    """Hugging Face's name -> our module's; None for one that is not read."""
    by_name = {hf_class_name(name, family): name for name in architectures(family)}
    return by_name.get(architecture)
