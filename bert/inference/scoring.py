"""Predictions without fine-tuning: log-probabilities of texts, tokens for masks, and zero-shot labels.

Does not import JAX. `bert.inference.text_scorer` has the compiled functions of the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from bert.config.model import LongTextMode
from bert.data.encoding import tokenize
from bert.data.inputs import Text, as_filled_texts, as_list, as_text_or_pair, as_texts, check_count, shown
from bert.data.long_texts import with_long_texts
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.metrics import softmax
from bert.model.names import ENCODER_DECODER
from bert.tasks.base import Task
from bert.tasks.sequence_classification.base import LabelTask
from bert.tasks.sequence_classification.classification import Label
from bert.tokenizer.hf_settings import NO_LIMIT
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import embedding_rows, token_text


class TextScore(NamedTuple):
    """Log-probability of a text.

    Attributes:
        log_probability: sum over the tokens, in nats.
        num_tokens: number of tokens of the text.
    """

    log_probability: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability per token; NaN for an empty text."""
        return math.exp(-self.log_probability / self.num_tokens) if self.num_tokens else math.nan


def plain_texts(texts: Sequence[str]) -> list[str]:
    """Returns the inputs as a list of texts. Raises UserError."""
    return [as_texts(text, index, "a text is needed: pass a string")[0] for index, text in enumerate(as_list(texts), 1)]


def score_texts(model: Any, texts: str | Sequence[str], *, stride: int | None = None, batch_size: int = 8) -> Any:
    """Returns the log-probability of texts under a causal language model (see `score`)."""
    if isinstance(texts, str):
        return score_texts(model, [texts], stride=stride, batch_size=batch_size)[0]
    check_count("batch_size", batch_size)
    positions = model.config.max_position_embeddings
    default = positions if model.config.memory_length is not None else max(1, positions // 2)
    stride = default if stride is None else stride
    check_count("stride", stride)
    if stride > positions:
        raise UserError(f"stride is {stride}, but {model.source} reads {positions} tokens: pass at most {positions}")
    model.require_language_model()
    return model._text_scorer(plain_texts(texts), stride, batch_size)


class MaskPrediction(NamedTuple):
    """A candidate for a [MASK]: token, probability and id."""

    token: str
    probability: float
    token_id: int


def fill_mask(model: Any, text: Text, top_k: int = 5) -> list[list[MaskPrediction]]:
    """Returns the ``top_k`` most likely tokens for each [MASK] of a text, the most likely first.

    For a run with replaced token detection, the generator makes the predictions.

    Args:
        text: a string, or a tuple of two strings for a pair.
        top_k: number of tokens for each [MASK].

    Raises:
        UserError: the text has no [MASK], or has one beyond the model's positions, or the model has no masked-LM head
            (for example because it is fine-tuned).
    """
    check_count("top_k", top_k)
    if "generator" in model.params:
        return fill_mask(model.generator, text, top_k)
    if model.config.causal or model.architecture == ENCODER_DECODER:
        raise UserError(f"{model.source} generates texts and has no masked-LM head: use generate")
    if "predictions" not in model.params:
        raise UserError(f"{model.source} has no masked-LM head to fill masks with: load a pretraining run")
    features, positions = _encode_masked(model.tokenizer, text, model.config.max_position_embeddings, model.source)
    logits = model._compiled.predict_masks(features)[0, positions, : embedding_rows(model.tokenizer)]
    return [_rank_tokens(model.tokenizer, of_mask, top_k) for of_mask in logits]


def _encode_masked(tokenizer: Tokenizer, text: Any, max_length: int, source: str) -> tuple[TokenRows, np.ndarray]:
    """Returns a text as one row, and the positions of its masks. ``source`` is the name of the model."""
    if isinstance(text, list):
        raise UserError(f"the text is {shown(text)}: pass one string, or a tuple of two for a pair")
    texts = [as_text_or_pair(text, 1)]
    features = tokenize(tokenizer, texts, max_length)
    mask = special_ids(tokenizer).mask
    positions = np.flatnonzero(features.ids == mask)
    complete = tokenize(tokenizer, texts, NO_LIMIT) if len(features.ids) == max_length else features
    total, name = np.count_nonzero(complete.ids == mask), tokenizer.id_to_token(mask)
    if not total:
        raise UserError(f"no {name} in {shown(text)}: write one where a word should be predicted")
    if total > len(positions):
        raise UserError(
            f"{total - len(positions)} {name} in {shown(text)} beyond the {max_length} tokens that {source} reads: "
            "pass a shorter text"
        )
    return features, positions


def _rank_tokens(tokenizer: Tokenizer, logits: np.ndarray, top_k: int) -> list[MaskPrediction]:
    """Returns the ``top_k`` most likely tokens given logits [V], most likely first."""
    probabilities = softmax(logits)
    best = np.argsort(-probabilities, kind="stable")[:top_k]
    return [MaskPrediction(token_text(tokenizer, int(i)), float(probabilities[i]), int(i)) for i in best]


TEMPLATE = "This example is {}."


def zero_shot(
    model: Any,
    text: str | Sequence[str],
    labels: Sequence[str],
    template: str = TEMPLATE,
    multi_label: bool = False,
    batch_size: int = 32,
    *,
    long_texts: LongTextMode | None = None,
) -> Any:
    """Chooses among labels on which an entailment model (MNLI) was not trained.

    Args:
        text: a text, whose answer is a `Label`, or a list of texts for a list of answers.
        labels: candidate labels.
        template: a sentence about the text, with {} for the label. The model predicts whether the text entails it.
        multi_label: whether several labels may apply. Each label then has a separate probability.
        batch_size: number of (text, label) pairs per batch.
        long_texts: how texts that are too long are read, as ``data.long_texts``; None: as in training, or cut for a
            model that does not declare it.

    Raises:
        UserError: the model lacks the labels entailment and contradiction, or a text, label or template is invalid.
    """
    if isinstance(text, str):
        return zero_shot(model, [text], labels, template, multi_label, batch_size, long_texts=long_texts)[0]
    if model.task is None:
        raise UserError(f"{model.source} is no entailment model: use zero_shot with a model fine-tuned on MNLI")
    if labels is not None and not isinstance(labels, str):
        labels = as_list(labels)
    task: Task = model.task
    entailed, opposite = entailment_labels(task, model.source)
    sentences = _hypotheses(labels, template)
    pairs = [(each, sentence) for each in as_filled_texts("text", text) for sentence in sentences]
    data = with_long_texts(model.data, long_texts, task)
    features = task.features(model.tokenizer, task.examples_from_inputs(pairs), data)
    logits = np.array(model.outputs(features, batch_size)).reshape(-1, len(sentences), task.num_labels)
    logits = logits / cast(LabelTask, task).temperature
    return [best_label(of_text, labels, entailed, opposite, multi_label) for of_text in logits]


def entailment_labels(task: Task, source: str) -> tuple[int, int]:
    """Returns the indices of the labels entailment and contradiction.

    Contradiction is found by name. If there are only two labels, it is the other one. Otherwise it is the last or first
    label, as in transformers.

    Raises:
        UserError: the model is not a classifier, or has no label entailment.
    """
    names = [name.lower() for name in task.exclusive_labels]
    entailed = [number for number, name in enumerate(names) if name.startswith("entail")]
    if len(names) < 2 or len(entailed) != 1:
        raise UserError(
            f"{source} has no labels entailment and contradiction ({task.name}): use a model fine-tuned on MNLI or a "
            "similar task"
        )
    opposite = [number for number, name in enumerate(names) if name.startswith("contr")]
    if len(names) == 2 or len(opposite) != 1:
        opposite = [len(names) - 1 if entailed[0] == 0 else 0]
    return entailed[0], opposite[0]


def _hypotheses(labels: Sequence[str], template: str) -> list[str]:
    """Returns one sentence per label. Raises UserError for a template without {} and for duplicate labels."""
    if labels is None or isinstance(labels, str) or not labels:
        raise UserError("labels must be a list of at least one label: pass the labels to choose from")
    as_filled_texts("label", labels)
    if not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
        raise UserError("labels has a label twice, or a pair of texts: pass each label once, as a string")
    if not isinstance(template, str) or template.count("{}") != 1:
        raise UserError(f"template is {shown(template)}: write {{}} once for the label")
    return [template.replace("{}", label) for label in labels]


def best_label(logits: np.ndarray, labels: Sequence[str], entailed: int, opposite: int, multi_label: bool) -> Label:
    """Returns the best label of one text.

    Args:
        logits: [labels, classes], logits for the text paired with each label's sentence.
        multi_label: normalize each label over entailment and contradiction, as for a single label. Otherwise normalize
            over the labels.
    """
    independent = multi_label or len(labels) == 1
    shares = softmax(logits[:, [opposite, entailed]])[:, 1] if independent else softmax(logits[:, entailed])
    ranked = sorted(zip(labels, map(float, shares), strict=True), key=lambda pair: -pair[1])
    return Label(ranked[0][0], dict(ranked))
