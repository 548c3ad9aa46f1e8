"""The names of parameters that other packages rely on, and the parts of a model that they belong to.

A path names modules from the top of the parameters, with ``/`` between them. ``{}`` is the number of a layer.
"""

from __future__ import annotations

from bert.config import ModelConfig

PROJECTIONS = "distillation"
"""Parameters of a run that belong to no model: projections to a teacher's width (pretraining/distillation.py)."""


ENCODER, POOLER = "bert", "bert/pooler"


PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"
DETECTION = "discriminator_predictions"
DECODER = "decoder"


LAYER, DECODER_LAYER = "bert/encoder/layer_{}", "decoder/encoder/layer_{}"


CROSS = "cross_"
"""Beginning of the names of the modules of a layer that read the source."""


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

ENCODER_DECODER = "BertForSequenceToSequence"


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
