"""Data of a fine-tuning run: its splits, and the vocabularies that are trained on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bert.config import FinetuneConfig, TokenizerConfig
from bert.data.corpus.vocabulary import first_texts, measure_losses, report_size, warn_of_losses
from bert.data.rows import Rows
from bert.errors import LOGGER
from bert.parallel import multihost
from bert.tasks.base import Examples
from bert.tokenizer.vocabulary import load_tokenizer, train_tokenizer


class Split(NamedTuple):
    """One split of a task, as read and as rows for the model."""

    examples: Examples
    features: Rows


def make_target_tokenizer(config: TokenizerConfig, train: Any) -> Tokenizer:
    """The vocabulary of the targets alone: read, or trained on those of the training rows."""
    if config.path is not None:
        return load_tokenizer(config.path, config)
    tokenizer = train_tokenizer(iter(train.targets), config)
    report_size(tokenizer, config, "data.dir", "target_tokenizer")
    return tokenizer


def source_texts(config: FinetuneConfig, train: Any) -> Iterable[str]:
    return train.sources if config.has_target_tokenizer else train.sentences()


def warn_of_losses_in_training_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    warn = multihost.main_process_only(LOGGER.warning)
    warn_of_losses(measure_losses(tokenizer, first_texts(texts)), tokenizer, warn, "the training texts")
