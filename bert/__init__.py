"""Pretrains, fine-tunes and uses BERT in JAX.

Names are loaded on first use, so ``import bert`` and ``bert --help`` do not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from bert import metrics
    from bert.errors import UserError
    from bert.inference.load import load
    from bert.inference.mteb_encoder import MtebEncoder
    from bert.inference.pretrained import Pretrained
    from bert.model.decoders import BertForCausalLM, BertForSequenceToSequence
    from bert.model.electra import BertForReplacedTokenDetection
    from bert.model.encoder import Bert
    from bert.model.heads import (
        BertForMultipleChoice,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
    )
    from bert.model.pretraining import BertForMaskedLM, BertForNextSentencePrediction, BertForPreTraining
    from bert.runs.loggers import Callback, MlflowLogger, TensorBoardLogger, WandbLogger
    from bert.tasks import register_task
    from bert.training.launch import finetune, pretrain
    from bert.training.runs import Run
    from bert.training.sweep import sweep

_HOMES = {
    "Bert": "bert.model.encoder",
    "BertForCausalLM": "bert.model.decoders",
    "BertForMaskedLM": "bert.model.pretraining",
    "BertForMultipleChoice": "bert.model.heads",
    "BertForNextSentencePrediction": "bert.model.pretraining",
    "BertForPreTraining": "bert.model.pretraining",
    "BertForQuestionAnswering": "bert.model.heads",
    "BertForReplacedTokenDetection": "bert.model.electra",
    "BertForSequenceClassification": "bert.model.heads",
    "BertForSequenceToSequence": "bert.model.decoders",
    "BertForTokenClassification": "bert.model.heads",
    "Callback": "bert.runs.loggers",
    "MlflowLogger": "bert.runs.loggers",
    "MtebEncoder": "bert.inference.mteb_encoder",
    "Pretrained": "bert.inference.pretrained",
    "Run": "bert.training.runs",
    "TensorBoardLogger": "bert.runs.loggers",
    "UserError": "bert.errors",
    "WandbLogger": "bert.runs.loggers",
    "finetune": "bert.training.launch",
    "load": "bert.inference.load",
    "metrics": "bert.metrics",
    "pretrain": "bert.training.launch",
    "register_task": "bert.tasks",
    "sweep": "bert.training.sweep",
}

__all__ = [
    "Bert",
    "BertForCausalLM",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForReplacedTokenDetection",
    "BertForSequenceClassification",
    "BertForSequenceToSequence",
    "BertForTokenClassification",
    "Callback",
    "MlflowLogger",
    "MtebEncoder",
    "Pretrained",
    "Run",
    "TensorBoardLogger",
    "UserError",
    "WandbLogger",
    "finetune",
    "load",
    "metrics",
    "pretrain",
    "register_task",
    "sweep",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'bert' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if home.__name__ == f"bert.{name}" else getattr(home, name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("bert-jax")
    except metadata.PackageNotFoundError:  # a clone that is not installed
        return "0+unknown"
