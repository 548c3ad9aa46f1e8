"""The one table of names: our parameters and what others call them, read in both directions.

A path of ours names modules from the top of the parameters, with ``/`` between them. ``{}`` is the number of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

BERT, ROBERTA = "bert", "roberta"
"""Families of Hugging Face's models, by the ``model_type`` of config.json."""


class Row(NamedTuple):
    """A module, or a single array, under each of its names.

    Attributes:
        kind: a key of `ARRAYS`.
        ours: path in the parameters.
        bert: in Hugging Face's BERT.
        roberta: in Hugging Face's RoBERTa; None where it is BERT's with ``roberta`` for ``bert``.
    """

    kind: str
    ours: str
    bert: str
    roberta: str | None = None


TABLE = (
    Row("table", "bert/embeddings/word", "bert.embeddings.word_embeddings"),
    Row("table", "bert/embeddings/position", "bert.embeddings.position_embeddings"),
    Row("table", "bert/embeddings/segment", "bert.embeddings.token_type_embeddings"),
    Row("norm", "bert/embeddings/norm", "bert.embeddings.LayerNorm"),
    Row("dense", "bert/encoder/layer_{}/attention/query", "bert.encoder.layer.{}.attention.self.query"),
    Row("dense", "bert/encoder/layer_{}/attention/key", "bert.encoder.layer.{}.attention.self.key"),
    Row("dense", "bert/encoder/layer_{}/attention/value", "bert.encoder.layer.{}.attention.self.value"),
    Row("dense", "bert/encoder/layer_{}/attention/output", "bert.encoder.layer.{}.attention.output.dense"),
    Row("norm", "bert/encoder/layer_{}/attention_norm", "bert.encoder.layer.{}.attention.output.LayerNorm"),
    Row("dense", "bert/encoder/layer_{}/intermediate", "bert.encoder.layer.{}.intermediate.dense"),
    Row("dense", "bert/encoder/layer_{}/output", "bert.encoder.layer.{}.output.dense"),
    Row("norm", "bert/encoder/layer_{}/output_norm", "bert.encoder.layer.{}.output.LayerNorm"),
    Row("dense", "bert/pooler", "bert.pooler.dense"),
    Row("dense", "predictions/transform", "cls.predictions.transform.dense", "lm_head.dense"),
    Row("norm", "predictions/norm", "cls.predictions.transform.LayerNorm", "lm_head.layer_norm"),
    Row("array", "predictions/bias", "cls.predictions.bias", "lm_head.bias"),
    Row("array", "predictions/decoder", "cls.predictions.decoder.weight", "lm_head.decoder.weight"),
    Row("dense", "seq_relationship", "cls.seq_relationship"),
    Row("dense", "classifier", "classifier"),
    Row("dense", "qa_outputs", "qa_outputs"),
)

ROBERTA_CLASSIFIER = {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"}
"""RoBERTa's ForSequenceClassification has BERT's pooler as the first layer of its classifier."""

ARRAYS = {
    "table": (("/embedding", ".weight", False),),
    "dense": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "norm": (("/scale", ".weight", False), ("/bias", ".bias", False)),
    "array": (("", "", False),),
}
"""Arrays of each kind of module: ends of our and of Hugging Face's names, and whether theirs is transposed."""

ENCODER, POOLER = "bert", "bert/pooler"
PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "Bert": (POOLER,),
    "BertForPreTraining": (POOLER, PREDICTIONS, SEQ_RELATIONSHIP),
    "BertForMaskedLM": (PREDICTIONS,),
    "BertForNextSentencePrediction": (POOLER, SEQ_RELATIONSHIP),
    "BertForSequenceClassification": (POOLER, CLASSIFIER),
    "BertForTokenClassification": (CLASSIFIER,),
    "BertForQuestionAnswering": (QA_OUTPUTS,),
    "BertForMultipleChoice": (POOLER, CLASSIFIER),
}
"""Our modules, and the parts each has beside the encoder. A part is afresh, or there as a whole."""


class Tensor(NamedTuple):
    """One array: its path in our parameters, its name in a file, and whether the file holds it transposed."""

    ours: str
    theirs: str
    transposed: bool

    @property
    def part(self) -> str:
        """The part of `ARCHITECTURES` that it belongs to; ``bert`` for the encoder."""
        return POOLER if self.ours.startswith(f"{POOLER}/") else self.ours.split("/")[0]


def tensors(layers: int, family: str, architecture: str) -> list[Tensor]:
    """Every array that a file of this family may hold for a model of ``layers`` layers.

    Classifiers are named alike in several architectures: only those of ``architecture`` (a key of ARCHITECTURES) are
    among them.
    """
    parts = {ENCODER, POOLER, PREDICTIONS, SEQ_RELATIONSHIP, *ARCHITECTURES[architecture]}
    found = []
    for row in TABLE:
        theirs = row.bert if family == BERT else row.roberta or row.bert.replace("bert.", "roberta.", 1)
        if family == ROBERTA and architecture == "BertForSequenceClassification":
            theirs = ROBERTA_CLASSIFIER.get(row.ours, theirs)
        for our_end, their_end, transposed in ARRAYS[row.kind]:
            for number in range(layers) if "{}" in row.ours else (0,):
                found.append(
                    Tensor(row.ours.format(number) + our_end, theirs.format(number) + their_end, transposed),
                )
    return [tensor for tensor in found if tensor.part in parts]


def decoder_bias(family: str) -> str:
    """The MLM head's bias under its second name, that of the decoder's own bias."""
    return "cls.predictions.decoder.bias" if family == BERT else "lm_head.decoder.bias"


def published_name(architecture: str, family: str) -> str:
    """Our module's name -> Hugging Face's: ``Bert`` -> ``BertModel``, ``RobertaModel``."""
    return {BERT: "Bert", ROBERTA: "Roberta"}[family] + (architecture.removeprefix("Bert") or "Model")


def our_name(architecture: str, family: str) -> str | None:
    """Hugging Face's name -> our module's; None for one that is not read."""
    by_name = {published_name(name, family): name for name in ARCHITECTURES}
    return by_name.get(architecture)
