"""Parameter names that other packages rely on, and the model parts to which they belong.

A path joins module names with ``/``, from the top of the parameters. ``{}`` stands for the number of a layer.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from bert.config import ModelConfig

PROJECTIONS = "distillation"
"""Parameters of a run that are not part of the model: projections to a teacher's width."""


ENCODER, POOLER = "bert", "bert/pooler"


PREDICTIONS, SEQ_RELATIONSHIP, CLASSIFIER, QA_OUTPUTS = "predictions", "seq_relationship", "classifier", "qa_outputs"
DETECTION = "discriminator_predictions"
PROJECTION = "projection"
DECODER = "decoder"
COPY_ATTENTION = "copy_attention"


LAYER, DECODER_LAYER = "bert/encoder/layer_{}", "decoder/encoder/layer_{}"


CROSS = "cross_"
"""Name prefix of a layer's cross-attention modules."""


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
    "BertForSequenceToSequence": (DECODER, PREDICTIONS, COPY_ATTENTION),
}
"""Module classes of this package, with their parts besides the encoder. A part is loaded or initialized as a whole."""

ENCODER_DECODER = "BertForSequenceToSequence"

GlobalTokenKind = Literal["first", "before_separator", "after_separator", "given"]
"""Tokens with global attention: the first one, those before the first separator, those from two tokens after it, or
the tokens that a ``global_attention_mask`` selects.
"""

GLOBAL_TOKENS: dict[str, GlobalTokenKind] = {
    "BertForSequenceClassification": "first",
    "BertForQuestionAnswering": "before_separator",
    "BertForMultipleChoice": "after_separator",
}
"""Global tokens of each architecture, if the model has global attention. Others have none.

transformers' classes select the same tokens (modeling_longformer.py). A pair has two separators after its first text.
"""

ARCHITECTURE_OF_KIND = {
    "sequence_classification": "BertForSequenceClassification",
    "token_classification": "BertForTokenClassification",
    "question_answering": "BertForQuestionAnswering",
    "multiple_choice": "BertForMultipleChoice",
    "reranker": "BertForReranking",
}
"""Names of the classes in `bert.model.heads.HEADS`, for code that does not import JAX."""


def num_global_tokens(kind: GlobalTokenKind, limit: Any) -> Any:
    """Returns G, the number of tokens per row for which global attention reserves memory.

    It is even for a single token, because cuDNN's kernel requires even numbers of keys.

    Args:
        limit: number if there may be any number of global tokens; an int, or symbolic like `bert.model.mask.Length`.
    """
    return 2 if kind == "first" else limit


def output_layer(architecture: str) -> str | None:
    """Returns the name of the output layer of a fine-tuning head; None for an architecture without one."""
    return next((part for part in ARCHITECTURES.get(architecture, ()) if part in (CLASSIFIER, QA_OUTPUTS)), None)


def has_decoder(architecture: str) -> bool:
    """Whether an architecture is an encoder-decoder."""
    return DECODER in ARCHITECTURES[architecture]


def word_embeddings(architecture: str) -> str:
    """Returns the path of the word embeddings that a tied decoder uses."""
    return f"{DECODER if has_decoder(architecture) else ENCODER}/embeddings/word/embedding"


def part_of(path: str) -> str:
    """Returns the part of `ARCHITECTURES` to which a path belongs; ``bert`` for the encoder."""
    return POOLER if f"{path}/".startswith(f"{POOLER}/") else path.split("/")[0]


def parts_of(architecture: str, config: ModelConfig) -> tuple[str, ...]:
    """Returns the parts of `ARCHITECTURES` that have parameters for this configuration.

    The head of GPT-2 has no parameters, nor has a pooler of type norm, and causal models have no pooler. A decoder that
    shares all parameters has none besides the encoder's. Token-level heads may read the pooler.
    """
    has_head = config.prediction_transform or config.prediction_bias or not config.tie_word_embeddings
    absent: set[str] = {POOLER} if config.causal or config.pooler_type == "norm" else set()
    absent |= set() if has_head else {PREDICTIONS}
    absent |= {DECODER} if config.share_decoder == "all" else set()
    absent |= set() if config.copy_attention else {COPY_ATTENTION}
    parts = ARCHITECTURES[architecture]
    if config.pools_tokens and POOLER not in parts and not {CLASSIFIER, QA_OUTPUTS}.isdisjoint(parts):
        parts = (POOLER, *parts)
    return tuple(part for part in parts if part not in absent)


def pretraining_architecture(parts: Set[str], config: ModelConfig) -> str:
    """Returns the pretraining architecture that consists of the given parts."""
    if DECODER in parts:
        return "BertForSequenceToSequence"
    if config.causal and parts >= set(parts_of("BertForCausalLM", config)):
        return "BertForCausalLM"
    if DETECTION in parts:
        return "BertForReplacedTokenDetection"
    if PREDICTIONS in parts:
        return "BertForPreTraining" if SEQ_RELATIONSHIP in parts else "BertForMaskedLM"
    return "BertForNextSentencePrediction" if SEQ_RELATIONSHIP in parts else "Bert"
