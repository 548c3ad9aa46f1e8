"""Pretrain, fine-tune and use BERT in JAX.

Names are loaded when they are first used, so that ``import bert`` and ``bert --help`` need no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert import metrics
    from bert.config import UserError
    from bert.data.tasks import register_task
    from bert.heads import (
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
    )
    from bert.model import Bert
    from bert.pretrained import Pretrained, load

_HOMES = {
    "Bert": "bert.model",
    "BertForMaskedLM": "bert.heads",
    "BertForMultipleChoice": "bert.heads",
    "BertForNextSentencePrediction": "bert.heads",
    "BertForPreTraining": "bert.heads",
    "BertForQuestionAnswering": "bert.heads",
    "BertForSequenceClassification": "bert.heads",
    "BertForTokenClassification": "bert.heads",
    "Pretrained": "bert.pretrained",
    "UserError": "bert.config",
    "load": "bert.pretrained",
    "metrics": "bert.metrics",
    "register_task": "bert.data.tasks",
}

__all__ = [
    "Bert",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "Pretrained",
    "UserError",
    "load",
    "metrics",
    "register_task",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bert' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if home.__name__ == f"bert.{name}" else getattr(home, name)
