"""Model families of other libraries. Readers and writers look them up in `FAMILIES`."""

from __future__ import annotations

from bert.interchange.bundle import ModelBundle
from bert.interchange.families.base import Family
from bert.interchange.families.bert import ALBERT, BERT, DISTILBERT, ELECTRA, GOOGLE_NAMES
from bert.interchange.families.deberta import DEBERTA, DEBERTA_V1
from bert.interchange.families.encoder_decoder import ENCODER_DECODER
from bert.interchange.families.ernie import ERNIE
from bert.interchange.families.esm import ESM
from bert.interchange.families.eurobert import EUROBERT
from bert.interchange.families.gemma import GEMMA, GEMMA2, GEMMA3
from bert.interchange.families.gpt2 import GPT2
from bert.interchange.families.gte import GTE, JINA_V3, NEW
from bert.interchange.families.llama import LLAMA
from bert.interchange.families.longformer import LONGFORMER
from bert.interchange.families.megatron_bert import MEGATRON_BERT
from bert.interchange.families.modernbert import MODERNBERT
from bert.interchange.families.neobert import NEOBERT
from bert.interchange.families.nomic_bert import NOMIC_BERT
from bert.interchange.families.qwen import QWEN2, QWEN3
from bert.interchange.families.roberta import (
    CAMEMBERT,
    MPNET,
    ROBERTA,
    ROBERTA_PRELAYERNORM,
    XLM_ROBERTA,
    XLM_ROBERTA_XL,
)
from bert.interchange.families.roformer import ROFORMER
from bert.interchange.families.xlnet import XLNET
from bert.tokenizer.library import vocabulary_kind

__all__ = ["FAMILIES", "GOOGLE_NAMES", "Family", "family_of", "family_of_classes", "family_of_type"]

FAMILIES: tuple[Family, ...] = (
    *(BERT, ROBERTA_PRELAYERNORM, ROBERTA, CAMEMBERT, XLM_ROBERTA, DISTILBERT, ELECTRA, ALBERT, MPNET),
    *(DEBERTA, DEBERTA_V1, GPT2, MODERNBERT, ROFORMER, ERNIE, MEGATRON_BERT, XLM_ROBERTA_XL, NEOBERT, NOMIC_BERT),
    *(GTE, NEW, JINA_V3, ESM, EUROBERT, LLAMA, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, XLNET, LONGFORMER),
    ENCODER_DECODER,
)
"""All supported families. Later entries take precedence; the first one matches every model."""


def family_of(model: ModelBundle) -> Family:
    """Returns the family as which a model is exported: the last one whose ``has_form`` is true."""
    kind = vocabulary_kind(model.tokenizer)
    families = (family for family in reversed(FAMILIES) if family.vocabulary in (None, kind))
    return next((family for family in families if family.has_form(model.config, model.architecture)), FAMILIES[0])


def family_of_type(model_type: object) -> Family | None:
    """Returns the family for a ``model_type`` in config.json; None if it is not supported."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)


def family_of_classes(declared: str) -> Family:
    """Returns the family of a transformers class, for a config.json without a ``model_type``."""
    return next((family for family in FAMILIES if declared.startswith(family.class_prefix)), FAMILIES[0])
