"""Facts for `bert inspect`: parameters, FLOPs, vocabulary and provenance of a run or a model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from tokenizers import Tokenizer

from bert.analysis.flops import (
    ATTENTION,
    DECODER,
    FEED_FORWARD,
    FORMULA,
    GENERATOR,
    PERMUTED_FORMULA,
    POOLER,
    PREDICTIONS,
    PROJECTION,
    decoder_flops,
    forward_flops,
    training_flops,
)
from bert.config import FinetuneConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.config.pretraining import phase_configs
from bert.config.run_file import config_class_of_run, load_run_config
from bert.data.pretraining.masking import Masking
from bert.errors import UserError
from bert.inference.load import fetch_model, load
from bert.model.decoders import BertForSequenceToSequence
from bert.model.electra import make_generator_config
from bert.model.heads import BertForMultipleChoice
from bert.model.names import ENCODER_DECODER, pretraining_architecture
from bert.runs.checkpoint import Checkpointer
from bert.runs.environment import read_environment
from bert.runs.folder import KINDS, run_and_step
from bert.tasks import make_task
from bert.tokenizer.library import is_wordpiece, special_tokens, vocabulary_kind
from bert.tokenizer.vocabulary import load_tokenizer, normalization, tokenizer_fingerprint
from bert.training.finetuning.initialization import EncoderDecoderInit
from bert.training.finetuning.kinds import build_task_model
from bert.training.pretraining.objectives import build_model_and_loss

Facts = dict[str, Any]
Shapes = dict[tuple[str, ...], tuple[int, ...]]
RunConfig = PretrainConfig | FinetuneConfig

DEFAULT_MASKED_LM_PROB = 0.15
"""Share of predicted tokens if there is no run configuration (Devlin et al. 2018, section 3.1)."""

PUBLISHED_LENGTH = 128
"""Tokens per row if there is no run configuration, as in the paper's first phase."""

PART_ORDER = (
    *(f"embeddings/{table}" for table in ("word", "position", "segment", "norm")),
    *(ATTENTION, FEED_FORWARD, "layers/norm", POOLER, DECODER, PREDICTIONS, GENERATOR),
)
"""Order of the parts; further heads come last."""

KIND_TITLES = {"wordpiece": "WordPiece", "byte_level": "byte-level BPE", "unigram": "Unigram"}
"""Titles of the values of `vocabulary_kind`."""

TOKEN_HEADS = ("BertForTokenClassification", "BertForQuestionAnswering", "BertForReplacedTokenDetection")
"""Architectures whose head reads every token instead of one per row."""


def summarize(source: str | Path, length: int | None = None) -> Facts:
    """Returns facts of a run or another source of `bert.load`, as JSON values.

    Args:
        source: folder of a run or of a model, or a name on the hub.
        length: tokens T per row for FLOPs; None for the run's length.

    Raises:
        UserError: there is no model, a file is damaged, or ``length`` is out of range.
    """
    path, _ = fetch_model(source)
    config = load_run_config(path) if (path / "config.yaml").is_file() else None
    read: list[str] = []
    if (
        config is not None
        and not Checkpointer(path / "checkpoints", 1, read.append).steps()
        and _is_single_seed(config)
    ):
        model, step = config.model, None
        if model.vocab_size is None:
            raise UserError(f"{path} has neither a checkpoint nor a vocabulary yet: let the run get that far")
        architecture, shapes = _expected_parameters(config)
        tokenizer, task = load_tokenizer(path), config.task if isinstance(config, FinetuneConfig) else None
        read.append("no checkpoint yet: sizes are from config.yaml")
    else:
        pretrained = load(source, read.append)
        model, step, tokenizer = pretrained.config, pretrained.step, pretrained.tokenizer
        architecture = pretrained.architecture
        shapes = _shapes(pretrained.params)
        task = None if pretrained.task is None else pretrained.task.name
    facts = {
        "source": str(source),
        "kind": "published model" if config is None else f"{KINDS[type(config)]} run",
        "architecture": architecture,
        "task": task,
        "step": step,
        "model": dataclasses.asdict(model),
        **_parts(model, shapes, architecture, config, length),
        "vocabulary": _vocabulary(tokenizer, model),
        "read": read,
    }
    if config is not None:
        facts["initial_weights"] = _initial_weights(config)
        facts["sessions"] = read_environment(path)
    return facts


def _is_single_seed(config: RunConfig) -> bool:
    return not isinstance(config, FinetuneConfig) or config.num_seeds == 1


def _expected_parameters(config: RunConfig) -> tuple[str, Shapes]:
    """Returns the architecture and parameter shapes of a run without a checkpoint."""
    on_any_device = dataclasses.replace(config, training=TrainingConfig(objective=config.training.objective))
    model: nn.Module
    if isinstance(on_any_device, PretrainConfig):
        model, _ = build_model_and_loss(on_any_device)
    else:
        model = build_task_model(make_task(on_any_device), on_any_device)
    ids = jnp.zeros((1, 2, 8) if isinstance(model, BertForMultipleChoice) else (1, 8), jnp.int32)
    drawn = EncoderDecoderInit(model) if isinstance(model, BertForSequenceToSequence) else model
    params = jax.eval_shape(drawn.init, jax.random.key(0), ids)["params"]
    if isinstance(config, PretrainConfig):
        return pretraining_architecture(set(params), config.model), _shapes(params)
    return type(model).__name__, _shapes(params)


def pretraining_costs(config: PretrainConfig) -> tuple[int, list[float]]:
    """Returns the number of parameters of a run, and the FLOPs of a training step per token for each phase."""
    architecture, shapes = _expected_parameters(config)
    phases = [_parts(phase.model, shapes, architecture, phase, None) for phase in phase_configs(config)]
    return phases[0]["parameters"], [phase["flops_per_token"]["training"] for phase in phases]


def _shapes(params: Any) -> Shapes:
    return {name: leaf.shape for name, leaf in traverse_util.flatten_dict(params).items()}


def _table_line(path: tuple[str, ...]) -> str:
    """Returns the part of a parameter."""
    if path[:2] == ("bert", "embeddings"):
        return f"embeddings/{path[2]}"
    if path[:2] == ("bert", "encoder"):
        module = path[3] if path[2].startswith("layer_") else path[2]
        return "layers/norm" if module.endswith("norm") else ATTENTION if "attention" in module else FEED_FORWARD
    return path[1] if path[0] == "bert" else path[0]


def _sort_key(part: str) -> tuple[int, str]:
    return (PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)), part


def _parts(
    model: ModelConfig, shapes: Shapes, architecture: str, config: RunConfig | None, length: int | None
) -> Facts:
    """Returns parameters and FLOPs by part and in total."""
    parameters: dict[str, int] = {}
    for path, shape in shapes.items():
        part = _table_line(path)
        parameters[part] = parameters.get(part, 0) + math.prod(shape)
    if architecture == "BertForCausalLM":
        parameters.setdefault(PREDICTIONS, 0)  # the decoder may consist of the word embeddings
    tokens, predictions = _row(model, config, length)
    if architecture == ENCODER_DECODER:
        parameters.setdefault(DECODER, 0)  # the decoder may share all parameters with the encoder
        predictions = tokens
    elements: dict[str, int] = {}
    for path, shape in shapes.items():
        if path[0] not in ("bert", PREDICTIONS, GENERATOR, DECODER) and path[-1] == "kernel":
            elements[path[0]] = elements.get(path[0], 0) + math.prod(shape)
    outputs = {name: (count, architecture in TOKEN_HEADS) for name, count in elements.items()}
    permuted = isinstance(config, PretrainConfig) and config.training.objective == "plm"
    forward = forward_flops(model, tokens, parameters, predictions, outputs, permuted)
    if GENERATOR in parameters:
        width = shapes[GENERATOR, PREDICTIONS, "transform", "kernel"][0]
        sizes = make_generator_config(model, width)
        forward[GENERATOR] = sum(forward_flops(sizes, tokens, (PREDICTIONS,), predictions, {}).values())
    if architecture == ENCODER_DECODER:
        forward |= {DECODER: decoder_flops(model.decoder, tokens)}
        forward[PREDICTIONS] *= model.decoder.known_vocab_size / model.known_vocab_size
    num_frozen_layers, adapters = 0, False
    frozen: tuple[str, ...] = ()
    if isinstance(config, FinetuneConfig):
        num_frozen_layers, adapters = config.num_frozen_layers or 0, config.lora.rank is not None
        if config.num_feature_layers is not None:
            num_frozen_layers, frozen = model.num_hidden_layers, (PROJECTION, POOLER)
        elif num_frozen_layers or adapters:
            frozen = (PROJECTION,)
    return {
        "parameters": sum(parameters.values()),
        "parts": [
            {"part": part, "parameters": count, "flops_per_token": forward.get(part, 0.0)}
            for part, count in sorted(parameters.items(), key=lambda item: _sort_key(item[0]))
        ],
        "flops_per_token": {
            "sequence_length": tokens,
            "predictions": predictions if {PREDICTIONS, GENERATOR} & set(parameters) else 0,
            "forward": sum(forward.values()),
            "training": training_flops(forward, model.num_hidden_layers, num_frozen_layers, frozen, adapters),
            "formula": {part: text for part, text in FORMULA.items() if part in parameters}
            | (PERMUTED_FORMULA if permuted else {}),
        },
    }


def _row(model: ModelConfig, config: RunConfig | None, length: int | None) -> tuple[int, int]:
    """Returns tokens T per row and predictions P."""
    if length is not None and not 1 <= length <= model.max_position_embeddings:
        raise UserError(
            f"length is {length}, but the model reads 1 to {model.max_position_embeddings} tokens: choose one of these"
        )
    if isinstance(config, PretrainConfig):
        tokens = length or config.data.sequence_length
        if config.training.objective == "clm":
            return tokens, tokens
        max_predictions, prob = config.data.predictions_per_row, config.data.masked_lm_prob
        if config.data.packing:
            places = Masking(2, 0, (0,), max_predictions, prob)  # any vocabulary
            return tokens, places.predictions_per_row(tokens, config.data.max_sequences_per_pack)
        return tokens, max(1, min(max_predictions, round(prob * tokens)))
    default = PUBLISHED_LENGTH if config is None else config.data.max_length
    tokens = length or min(default, model.max_position_embeddings)
    return tokens, tokens if model.causal else max(1, round(DEFAULT_MASKED_LM_PROB * tokens))


def _vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> Facts:
    tokens = tokenizer.get_vocab()
    facts: Facts = {
        "kind": KIND_TITLES[vocabulary_kind(tokenizer)],
        "tokens": len(tokens),
        "rows": model.vocab_size,
        "special": {token: tokens[token] for token in special_tokens(tokens).values()},
        "fingerprint": tokenizer_fingerprint(tokenizer),
    }
    if is_wordpiece(tokenizer):
        facts |= dict(zip(("lowercase", "strip_accents"), normalization(tokenizer), strict=True))
    return facts


def _initial_weights(config: RunConfig) -> str:
    """Returns the source of a run's initial weights."""
    if config.init is None or config.init == "none":
        sizes_from = getattr(config, "architecture_from", None)
        return "random weights" + (f" of the sizes of {sizes_from}" if sizes_from else "")
    source, _ = run_and_step(config.init)
    if (source / "config.yaml").is_file():
        kind = f"{KINDS[config_class_of_run(source)]} run"
    else:
        kind = "a published model" if source.is_dir() else "on the hub, or removed"
    return f"{config.init} ({kind}){_adapters(config)}"


def _adapters(config: RunConfig) -> str:
    """Describes the adapters that are merged into a run's weights."""
    if not isinstance(config, FinetuneConfig) or config.lora.rank is None:
        return ""
    return f", with adapters of rank {config.lora.rank} on {', '.join(config.lora.projections)} (LoRA)"
