"""Models, losses and baselines of the pretraining objectives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import ModelConfig, PretrainConfig
from bert.data.pretraining.input_formats import INPUT_FORMATS, InputFormat
from bert.data.pretraining.loader import Batch, RowSource
from bert.inference.pretrained import Pretrained
from bert.model.decoders import BertForCausalLM
from bert.model.electra import Electra, make_generator_config
from bert.model.layers import LayerExecution
from bert.model.parameters import Params
from bert.model.pretraining import BertForMaskedLM, BertForPermutedLM, BertForPreTraining
from bert.parallel.backends import Parallelism
from bert.runs.metrics_log import Metrics
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import continues_word, token_text
from bert.training.initialization import Initializable
from bert.training.losses import (
    Loss,
    make_permuted_token_loss,
    make_pretraining_loss,
    make_replaced_token_loss,
    with_ponder_loss,
)
from bert.training.pretraining.distillation import Distillation, Teacher, with_projections
from bert.training.recurrence import with_memory
from bert.training.token_losses import make_next_token_loss

MakeExecution = Callable[[ModelConfig], LayerExecution]

SENTENCE_ENDS = frozenset(".!?。！？।؟")

MAX_CANDIDATES = 50
"""Number of tokens among which the most likely words for a mask are looked for."""


@dataclass(frozen=True)
class PretrainingObjective:
    """A pretraining objective.

    Attributes:
        build_model: (config, function from the sizes of a model to the execution of its layers) -> the model.
        build_loss: (model, config) -> the training loss.
        baselines: (held-out batches, their input format, [V] occurrences of predictable tokens in training, scores of
            the last evaluation) -> scores without a model.
        perplexity_loss: the loss whose exponential is the perplexity.
        main_metric: the score that is the first in the plot of the curves.
        modules: top-level modules of its parameters that ``init`` may fill.
        mlm_head: path of its masked-LM head in the parameters, whose output bias ``mlm_bias_init`` sets.
        special_tokens: whether special tokens are predicted as well.
        examples: (model, held-out rows) -> example outputs of the model for some of them, for results.json.
        examples_name: key of the examples in results.json.
    """

    build_model: Callable[[PretrainConfig, MakeExecution], nn.Module]
    build_loss: Callable[[nn.Module, PretrainConfig], Loss]
    baselines: Callable[[Iterable[Batch], InputFormat, np.ndarray, Metrics], dict[str, Any]]
    perplexity_loss: str
    main_metric: str
    modules: tuple[str, ...] = ("bert", "predictions")
    mlm_head: tuple[str, ...] = ("predictions",)
    special_tokens: bool = False
    examples: Callable[[Pretrained, RowSource], list[dict[str, Any]]] = lambda *inputs: fill_some_masks(*inputs)
    examples_name: str = "filled_masks"


def _masked_model(config: PretrainConfig, make_execution: MakeExecution) -> nn.Module:
    model_class = BertForPreTraining if INPUT_FORMATS[config.data.input_format].label else BertForMaskedLM
    return model_class(config.model, jnp.dtype(config.training.dtype), make_execution(config.model))


def _masked_loss(model: nn.Module, config: PretrainConfig) -> Loss:
    rows = INPUT_FORMATS[config.data.input_format]
    return make_pretraining_loss(model.apply, rows.label, rows.metric, config.training.z_loss)


def _replaced_model(config: PretrainConfig, make_execution: MakeExecution) -> nn.Module:
    generator = make_generator_config(config.model, config.electra.generator_width(config.model))
    dtype, executions = jnp.dtype(config.training.dtype), map(make_execution, (config.model, generator))
    return Electra(config.model, generator, dtype, *executions)


def _replaced_loss(model: nn.Module, config: PretrainConfig) -> Loss:
    return make_replaced_token_loss(model.apply, config.electra.disc_weight)


def _model_of(model_class: type[nn.Module]) -> Callable[[PretrainConfig, MakeExecution], nn.Module]:
    """Returns the `PretrainingObjective.build_model` of a class without options."""

    def build_model(config: PretrainConfig, make_execution: MakeExecution) -> nn.Module:
        return cast(Any, model_class)(config.model, jnp.dtype(config.training.dtype), make_execution(config.model))

    return build_model


def _next_loss(model: nn.Module, config: PretrainConfig) -> Loss:
    return make_next_token_loss(cast(BertForCausalLM, model), config.training.label_smoothing)


def masked_baselines(
    batches: Iterable[Batch], input_format: InputFormat, counts: np.ndarray, scores: Metrics
) -> dict[str, Any]:
    """Returns the scores on held-out rows of a predictor that uses only token frequencies and the majority label."""
    tokens, labels = [], []
    for batch in batches:
        tokens.append(batch["masked_lm_ids"][batch["masked_lm_weights"] > 0])
        if input_format.label:
            labels.append(batch[f"{input_format.label}_labels"][batch[f"{input_format.label}_weights"] > 0])
    predicted = np.concatenate(tokens)
    unigram = metrics.unigram_baseline(counts, predicted) if len(predicted) else {}
    if not input_format.label:
        return {"unigram": unigram}
    share_of_ones = float(np.mean(np.concatenate(labels)))
    return {"unigram": unigram, f"{input_format.metric}_majority_accuracy": max(share_of_ones, 1 - share_of_ones)}


def replaced_baselines(
    batches: Iterable[Batch], input_format: InputFormat, counts: np.ndarray, scores: Metrics
) -> dict[str, Any]:
    """Returns the generator's `masked_baselines`, and the accuracy of the better constant answer."""
    share = scores["replaced_share"]
    return {**masked_baselines(batches, input_format, counts, scores), "disc_majority_accuracy": max(share, 1 - share)}


def next_baselines(
    batches: Iterable[Batch], input_format: InputFormat, counts: np.ndarray, scores: Metrics
) -> dict[str, Any]:
    """Returns the scores on held-out rows of a predictor that uses only token frequencies."""
    tokens = np.concatenate([batch["next_token_ids"][batch["next_token_weights"] > 0] for batch in batches])
    return {"unigram": metrics.unigram_baseline(counts, tokens) if len(tokens) else {}}


def continue_some_rows(model: Pretrained, rows: RowSource, count: int = 3, tokens: int = 24) -> list[dict[str, Any]]:
    """Returns the beginnings of evenly spaced held-out rows, and the model's greedy continuations."""
    samples: list[dict[str, Any]] = []
    for index in np.unique(np.linspace(0, len(rows) - 1, count).astype(int)):
        row = rows.take(np.array([index]))
        ids = row["input_ids"][0, : row["length"][0]]
        middle = len(ids) // 2
        text, truth = (model.tokenizer.decode(part.tolist()) for part in (ids[:middle], ids[middle : middle + tokens]))
        length = len(model.tokenizer.encode(text, add_special_tokens=False).ids)
        if 0 < length < model.config.max_position_embeddings:  # a truncated character is encoded to more tokens
            samples.append({"text": text, "truth": truth})
    if not samples:
        return []
    continuations = model.generate([sample["text"] for sample in samples], max_tokens=tokens)
    return [{**sample, "continuation": text} for sample, text in zip(samples, continuations, strict=True)]


def fill_some_masks(model: Pretrained, rows: RowSource, count: int = 3) -> list[dict[str, Any]]:
    """Returns held-out sentences with one masked word, and the three most likely words for each.

    The choice does not depend on the model's guesses. Of evenly spaced rows, the first ones with a whole sentence of at
    least ten tokens are used; if these are too few, the first other rows. The masked word is the first one after the
    middle that is a single token of at least two letters.
    """
    indices = np.unique(np.linspace(0, len(rows) - 1, 8 * count).astype(int)).tolist()
    samples: dict[int, dict[str, Any]] = {}
    for tokens_of in (_first_sentence, _from_first_word):
        for index in indices:
            if len(samples) == count:
                break
            row = rows.take(np.array([index]))
            ids = [int(i) for i in row["input_ids"][0, 1 : row["segment_a_length"][0] - 1]]
            if index not in samples and (sample := _predict_one_word(model, tokens_of(model.tokenizer, ids)[:40])):
                samples[index] = sample
    return list(samples.values())


def _first_sentence(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Returns the tokens between two sentence ends, with the second one; empty if there is no such sentence."""
    ends = [position for position, i in enumerate(ids) if token_text(tokenizer, i).strip() in SENTENCE_ENDS]
    sentences = (ids[before + 1 : end + 1] for before, end in itertools.pairwise(ends) if end - before >= 10)
    return next(sentences, [])


def _from_first_word(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Returns the tokens without the end of a word that began in the previous row; empty for fewer than twelve."""
    start = next((at for at, i in enumerate(ids) if not continues_word(tokenizer, tokenizer.id_to_token(i) or "")), 0)
    return ids[start:] if len(ids) - start >= 12 else []


def _predict_one_word(model: Pretrained, ids: list[int]) -> dict[str, Any] | None:
    """Returns a text with one masked word, and the model's guesses for it; None if no word is suitable."""
    mask_id = special_ids(model.tokenizer).mask
    tokens = [model.tokenizer.id_to_token(i) or "" for i in ids]
    for position in range(len(tokens) // 2, len(tokens) - 1):
        word = token_text(model.tokenizer, ids[position]).strip()
        inside = any(continues_word(model.tokenizer, token) for token in tokens[position : position + 2])
        if not word.isalpha() or len(word) < 2 or inside:
            continue
        masked = [*ids[:position], mask_id, *ids[position + 1 :]]
        text = model.tokenizer.decode(masked, skip_special_tokens=False)
        if mask_id not in model.tokenizer.encode(text).ids[: model.config.max_position_embeddings - 1]:
            continue  # the text has more tokens than the row, and the mask would be truncated
        [candidates] = model.fill_mask(text, top_k=MAX_CANDIDATES)
        words = [guess for guess in candidates if guess.token.strip().isalpha()]
        guesses = [{"token": guess.token.strip(), "probability": guess.probability} for guess in words or candidates]
        return {"text": text, "truth": word, "guesses": guesses[:3]}
    return None


OBJECTIVES = {
    "mlm": PretrainingObjective(
        _masked_model,
        _masked_loss,
        masked_baselines,
        "mlm_loss",
        "mlm_accuracy",
        modules=("bert", "predictions", "seq_relationship"),
    ),
    "rtd": PretrainingObjective(
        _replaced_model,
        _replaced_loss,
        replaced_baselines,
        "mlm_loss",
        "disc_accuracy",
        modules=("bert", "generator", "discriminator_predictions"),
        mlm_head=("generator", "predictions"),
    ),
    "plm": PretrainingObjective(
        _model_of(BertForPermutedLM),
        lambda model, config: make_permuted_token_loss(model.apply),
        masked_baselines,
        "plm_loss",
        "plm_accuracy",
    ),
    "clm": PretrainingObjective(
        _model_of(BertForCausalLM),
        _next_loss,
        next_baselines,
        "lm_loss",
        "lm_accuracy",
        special_tokens=True,
        examples=continue_some_rows,
        examples_name="continuations",
    ),
}
"""Pretraining objectives by ``training.objective``."""

MakeBody = Callable[[Loss], Callable[..., Any]]
"""Loss -> body of a step or of an evaluation: (state or parameters, batch) -> its result."""
CompileLoss = Callable[[MakeBody, Sequence[int]], Callable[..., Any]]
"""(maker of a body, donated arguments) -> the body for the run's loss, compiled for all devices."""


def build_model_and_loss(config: PretrainConfig, devices: Sequence[Any] | None = None) -> tuple[nn.Module, Loss]:
    """Returns the model of a pretraining run, and its training loss.

    Args:
        devices: devices to compile for; None for the local devices.

    Raises:
        UserError: the devices cannot run the model as configured.
    """
    objective = OBJECTIVES[config.training.objective]
    model = objective.build_model(config, lambda sizes: LayerExecution.from_config(config.training, sizes, devices))
    if config.model.memory_length is not None:
        return model, with_memory(lambda model: objective.build_loss(model, config), model)
    if config.model.halting is None:
        return model, objective.build_loss(model, config)
    return model, with_ponder_loss(lambda model: objective.build_loss(model, config), model, config.model.halting)


def build_with_teacher(
    config: PretrainConfig, teacher: Teacher | None, parallel: Parallelism
) -> tuple[Initializable, Loss, CompileLoss]:
    """Returns a run's model, its loss, and a function that compiles a step of this loss for all devices.

    The teacher's parameters are put onto the devices here. They are arguments of the compiled step; otherwise the step
    would contain them as constants.
    """
    model, loss = build_model_and_loss(config)
    if teacher is None:
        return model, loss, lambda make_body, donate: parallel.compile(make_body(loss), donate)
    distillation = Distillation(loss, model, teacher, config)
    teacher_params = parallel.put_state(teacher.params)

    def compile_with_teacher(make_body: MakeBody, donate: Sequence[int]) -> Callable[..., Any]:
        def body(state: Any, batch: Any, params: Params) -> Any:
            return make_body(distillation.bind(params))(state, batch)

        compiled = parallel.compile(body, donate)
        return lambda state, batch: compiled(state, batch, teacher_params)

    return with_projections(model, config, teacher), distillation.bind(teacher_params), compile_with_teacher
