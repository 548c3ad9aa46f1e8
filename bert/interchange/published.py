"""What is read from the files of others, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.interchange.pooling import Pooling


@dataclass(frozen=True)
class Published:
    """What a folder holds.

    Attributes:
        config: sizes of the encoder.
        params: nested dict of float32 arrays: the encoder and the heads that are there.
        tokenizer: its vocabulary.
        architecture: name of our module that the heads fill, a key of `names.ARCHITECTURES`.
        labels: names of the classes of a classifier, by number; () without one.
        problem_type: of a sequence classifier, as in config.json; None where it says nothing.
        classifier_dropout: rate before a task's dense layer in training; None for ``hidden_dropout_prob``.
        null_threshold: of a model that answers questions: above this difference of the null score from the best
            answer's there is no answer; None where it always answers.
        pooling: what a sentence-transformers folder declares; None for any other.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    architecture: str
    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    classifier_dropout: float | None = None
    null_threshold: float | None = None
    pooling: Pooling | None = None
