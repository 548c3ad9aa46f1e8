"""Parameters and floating point operations of a model by part, and the time of a step from published device speeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bert.config import FinetuneConfig, ModelConfig, PretrainConfig
from bert.data.pretraining.masking import Masking
from bert.errors import UserError, require
from bert.model.names import (
    COPY_ATTENTION,
    ENCODER_DECODER,
    GLOBAL_TOKENS,
    PROJECTION,
    GlobalTokenKind,
    num_global_tokens,
    pretraining_architecture,
)
from bert.model.parameters import arrays_by_path
from bert.parallel.devices import DeviceFigures

Facts = dict[str, Any]
Shapes = dict[tuple[str, ...], tuple[int, ...]]
RunConfig = PretrainConfig | FinetuneConfig

ATTENTION, FEED_FORWARD, POOLER, PREDICTIONS = "layers/attention", "layers/feed_forward", "pooler", "predictions"
GENERATOR, DECODER, EMBEDDING_PROJECTION, CONVOLUTION = "generator", "decoder", "embeddings/projection", "convolution"

TRAINING = 3
"""FLOPs of a training step per FLOP of the forward pass: the backward pass has two products for each one."""

FORMULA = {
    ATTENTION: "a layer: 4 D H (N + M) (8 D^2 in BERT; M heads of keys) + 4 T D (scores and mix), in place of T: three "
    "blocks if local, T plus buckets or memory, 2 T if transformer_xl",
    FEED_FORWARD: "a layer: 4 D F, 6 D F if it is gated",
    EMBEDDING_PROJECTION: "2 E D",
    CONVOLUTION: "2 D^2 for each token of its kernel",
    POOLER: "2 D^2 / T: one token a row; 2 D^2 where the head reads every token through it",
    PREDICTIONS: "(2 D E + 2 E V) P / T, without 2 D E if there is no transform: the P predicted positions alone are "
    "decoded",
    GENERATOR: "layers and predictions by these formulas, with the generator's D and F",
    DECODER: "a layer: 16 D^2 + 8 T D (attention to the target and to the source, of T tokens each) + 4 D F, "
    "6 D F if it is gated",
    COPY_ATTENTION: "2 D^2 + 4 D + 4 T D",
}
"""FLOPs per token of the forward pass of each part."""

PERMUTED_FORMULA = {
    "layers of permuted rows": "these operations for each of T + 2 P tokens in place of T, or T + P in transformer_xl"
}
"""Addition to `FORMULA` for permuted language modelling."""

GLOBAL_FORMULA = {
    "global tokens of layers": "a layer: 4 D H M + 4 G D, 8 G D in blocks, and 2 D^2 for each of their queries"
}
"""Addition to `FORMULA` for models with G global tokens per row."""

DEFAULT_MASKED_LM_PROB = 0.15
"""Share of predicted tokens if there is no run configuration (Devlin et al. 2018, section 3.1)."""

PUBLISHED_LENGTH = 128
"""Tokens per row if there is no run configuration, as in the paper's first phase."""

PART_ORDER = (
    *(f"embeddings/{table}" for table in ("word", "position", "segment", "norm")),
    *(ATTENTION, FEED_FORWARD, "layers/norm", CONVOLUTION, POOLER, DECODER, COPY_ATTENTION, PREDICTIONS, GENERATOR),
)
"""Order of the parts; further heads come last."""


TOKEN_HEADS = ("BertForTokenClassification", "BertForQuestionAnswering", "BertForReplacedTokenDetection")
"""Architectures whose head reads every token instead of one per row."""


def forward_flops(
    config: ModelConfig,
    length: int,
    components: Collection[str],
    predictions: int,
    outputs: Mapping[str, tuple[int, bool]],
    permuted: bool = False,
    global_tokens: GlobalTokenKind | None = None,
) -> dict[str, float]:
    """Returns the FLOPs per token of the forward pass over rows of T tokens, by part.

    Args:
        components: keys of `FORMULA` that the model has.
        predictions: P, number of positions that the MLM head decodes.
        outputs: for each further head, the elements of its matrix and whether it reads every token or one per row.
        permuted: whether rows have T + 2 P tokens, as in permuted language modelling, or XLNet's T + P.
        global_tokens: the tokens with global attention; None for none.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    streams = 1 if config.has_query_embedding else 2
    read = length + streams * predictions if permuted else length  # permuted rows are not computed in blocks
    memory = config.memory_length or 0
    keys = [memory + (read if permuted else config.keys_per_query(layer, length)) for layer in range(layers)]
    vectors = 0.0  # products with vectors of distances, as a number of keys
    if config.is_disentangled:
        vectors = require(config.relative_attention_buckets, "the buckets") * (config.num_products - 1) / 2
    if config.position_embedding_type == "transformer_xl":
        keys = [2 * count for count in keys]  # a query is also multiplied by about 2 T distances
    products = config.num_attention_heads * config.head_size
    projections = 4.0 * width * config.head_size * (config.num_attention_heads + config.key_value_heads)
    flops = {
        ATTENTION: layers * 4.0 * width * config.head_size * config.key_value_heads * memory / length
        + read / length * sum(projections + 4.0 * (count + vectors) * products for count in keys),
        FEED_FORWARD: read / length * layers * _feed_forward_flops(config),
    }
    if global_tokens is not None:
        flops[ATTENTION] += layers * _global_attention_flops(config, length, global_tokens)
    if EMBEDDING_PROJECTION in components:
        flops[EMBEDDING_PROJECTION] = read / length * 2.0 * config.embedding_width * width
    if config.conv_kernel_size is not None:
        flops[CONVOLUTION] = 2.0 * config.conv_kernel_size * width**2
    if POOLER in components:
        pools_tokens = config.pools_tokens and any(every_token for _, every_token in outputs.values())
        has_weights = config.pooler_type != "norm"
        flops[POOLER] = has_weights * 2.0 * width**2 / (1 if pools_tokens else length)
    if PREDICTIONS in components:
        narrow = config.embedding_width
        transform = 2.0 * width * narrow if config.prediction_transform else 0.0
        flops[PREDICTIONS] = (transform + 2.0 * narrow * config.known_vocab_size) * predictions / length
    for name, (elements, every_token) in outputs.items():
        flops[name] = 2.0 * elements / (1 if every_token else length)
    return flops


def _global_attention_flops(config: ModelConfig, length: int, kind: GlobalTokenKind) -> float:
    """Returns the FLOPs per token of a layer's global tokens, if they fit the memory that is reserved for them.

    In blocks, all tokens are projected to global queries if there may be any number of global tokens.
    """
    block = config.local_block(length)
    count = num_global_tokens(kind, block or length)
    queries = length if block is not None and kind != "first" else count
    products = config.num_attention_heads * config.head_size
    projections = 4.0 * config.key_value_heads * config.head_size + 2.0 * products * queries / length
    return config.hidden_size * projections + 4.0 * products * count * (1 if block is None else 2)


def _feed_forward_flops(config: ModelConfig) -> float:
    return (6.0 if config.gated_feed_forward else 4.0) * config.hidden_size * config.intermediate_size


def decoder_flops(config: ModelConfig, length: int) -> float:
    """Returns the FLOPs per target token of a decoder's forward pass, for sources and targets of T tokens."""
    products = config.num_attention_heads * config.head_size
    projections = 8.0 * config.hidden_size * config.head_size * (config.num_attention_heads + config.key_value_heads)
    return config.num_hidden_layers * (projections + 8.0 * length * products + _feed_forward_flops(config))


def training_flops(
    forward: Mapping[str, float],
    num_hidden_layers: int,
    num_frozen_layers: int = 0,
    frozen: Collection[str] = (),
    adapters: bool = False,
) -> float:
    """Returns the FLOPs per token of a training step: three times the forward pass, for frozen parts once.

    Args:
        frozen: other frozen parts.
        adapters: whether layers are frozen but have adapters: gradients pass through them, without gradients of their
            own weights.
    """
    learned = 0.5 if adapters else 1 - num_frozen_layers / max(num_hidden_layers, 1)
    total = 0.0
    for name, flops in forward.items():
        share = learned if name.startswith("layers/") else float(name not in frozen)
        total += flops * (1 + (TRAINING - 1) * share)
    return total


UTILIZATION = 0.19
"""Default share of the devices' peak: 60 of 312 TFLOP/s.

mosaicml/examples reports 111,000 tokens per second for a plain BERT-base on an A100.
"""


@dataclass(frozen=True)
class Term:
    """Time of a part of a step, and its calculation."""

    name: str
    seconds: float
    arithmetic: str


def num_hosts(count: int, figures: DeviceFigures) -> int:
    """Returns the number of hosts of ``count`` devices."""
    return -(-count // figures.per_host)


def compute_term(tokens: int, flops: float, count: int, figures: DeviceFigures, utilization: float) -> Term:
    """Returns the time of a step's matrix products.

    Args:
        flops: FLOPs per token, from `training_flops`.
    """
    seconds = tokens * flops / (count * figures.peak_tflops * 1e12 * utilization)
    peak = f"{count} x {figures.peak_tflops:g} TFLOP/s x {utilization:g}"
    return Term("compute", seconds, f"{tokens:,} tokens x {flops / 1e6:,.1f} MFLOP / ({peak})")


def all_reduce_terms(gradients: float, count: int, figures: DeviceFigures) -> list[Term]:
    """Returns the time of summing gradients over the devices of a ring without waiting.

    Each of N devices sends 2 (N - 1) / N times the bytes. If links end at the host, there are two levels: over the n
    devices of a host, then over the hosts, where each device sends its n-th part.
    """
    if figures.network is None:
        return [_ring("all-reduce", gradients, count, figures.link)]
    local, hosts = min(count, figures.per_host), num_hosts(count, figures)
    terms = [_ring("all-reduce in a host", gradients, local, figures.link)]
    return [*terms, _ring("all-reduce of hosts", gradients / local, hosts, figures.network)]


def _ring(name: str, array_bytes: float, count: int, speed: float) -> Term:
    sent = 2 * (count - 1) / count * array_bytes
    arithmetic = f"2 x {count - 1}/{count} x {array_bytes / 1e6:,.1f} MB = {sent / 1e6:,.1f} MB at {speed:g} GB/s"
    return Term(name, sent / (speed * 1e9), arithmetic)


def step_lines(compute: Term, all_reduce: list[Term], tokens: int, steps: int | None) -> list[str]:
    """Returns lines with the time of a step, if no terms overlap, and of ``steps`` steps."""
    adding = sum(term.seconds for term in all_reduce)
    step = compute.seconds + adding
    lines = [f"  {term.name:20} {_time(term.seconds):>10} = {term.arithmetic}" for term in (compute, *all_reduce)]
    share = f", {adding / step:.1%} of it all-reduce if none overlaps" if all_reduce else ""
    lines.append(f"  {'step':20} {_time(step):>10}{share}; {tokens / step:,.0f} tokens per second")
    if steps is not None:
        lines.append(f"  {f'{steps:,} steps':20} {steps * step / 3600:>8.1f} h")
    return lines


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.3f} ms"


def shapes_of(params: Any) -> Shapes:
    return {tuple(path.split("/")): array.shape for path, array in arrays_by_path(params).items()}


def _table_line(path: tuple[str, ...]) -> str:
    """Returns the part of a parameter."""
    if path[:2] == ("bert", "embeddings"):
        return f"embeddings/{path[2]}"
    if path[:2] == ("bert", "encoder"):
        if path[2] == CONVOLUTION:
            return CONVOLUTION
        module = path[3] if path[2].startswith("layer_") else path[2]
        return "layers/norm" if module.endswith("norm") else ATTENTION if "attention" in module else FEED_FORWARD
    return path[1] if path[0] == "bert" else path[0]


def _sort_key(part: str) -> tuple[int, str]:
    return (PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)), part


def flops_per_token(config: PretrainConfig, shapes: Shapes) -> float:
    """Returns the FLOPs of a training step per token of a pretraining run without phases."""
    architecture = pretraining_architecture({path[0] for path in shapes}, config.model)
    return float(count_parts(config.model, shapes, architecture, config, None)["flops_per_token"]["training"])


def finetuning_flops_per_token(config: FinetuneConfig, shapes: Shapes, architecture: str, length: int) -> float | None:
    """Returns the FLOPs of a training step per token of a fine-tuning run whose rows have T tokens on average.

    Returns None for a model with a decoder or a language model, because their FLOPs also depend on the predicted
    tokens.
    """
    if config.language_model_weight or {DECODER, PREDICTIONS} & {path[0] for path in shapes}:
        return None
    return float(count_parts(config.model, shapes, architecture, config, length)["flops_per_token"]["training"])


def count_parts(
    model: ModelConfig, shapes: Shapes, architecture: str, config: RunConfig | None, length: int | None
) -> Facts:
    """Returns parameters and FLOPs by part and in total."""
    parameters: dict[str, int] = {}
    for path, shape in shapes.items():
        part = _table_line(path)
        parameters[part] = parameters.get(part, 0) + math.prod(shape)
    if architecture == "BertForCausalLM":
        parameters.setdefault(PREDICTIONS, 0)  # the decoder may consist of the word embeddings
    tokens, predictions = row_sizes(model, config, length)
    if architecture == ENCODER_DECODER:
        parameters.setdefault(DECODER, 0)  # the decoder may share all parameters with the encoder
        predictions = tokens
    elements: dict[str, int] = {}
    for path, shape in shapes.items():
        if path[0] not in ("bert", PREDICTIONS, GENERATOR, DECODER, COPY_ATTENTION) and path[-1] == "kernel":
            elements[path[0]] = elements.get(path[0], 0) + math.prod(shape)
    outputs = {name: (count, name == PROJECTION or architecture in TOKEN_HEADS) for name, count in elements.items()}
    permuted = isinstance(config, PretrainConfig) and config.training.objective == "plm"
    kind = GLOBAL_TOKENS.get(architecture) if model.global_attention_sep_id is not None else None
    forward = forward_flops(model, tokens, parameters, predictions, outputs, permuted, kind)
    if GENERATOR in parameters:
        from bert.model.electra import make_generator_config  # imported here because it imports JAX

        width = shapes[GENERATOR, PREDICTIONS, "transform", "kernel"][0]
        sizes = make_generator_config(model, width)
        forward[GENERATOR] = sum(forward_flops(sizes, tokens, (PREDICTIONS,), predictions, {}).values())
    if architecture == ENCODER_DECODER:
        forward |= {DECODER: decoder_flops(model.decoder, tokens)}
        if model.copy_attention:
            forward[COPY_ATTENTION] = 2.0 * model.hidden_size * (model.hidden_size + 2 * tokens + 2)
        forward[PREDICTIONS] *= model.decoder.known_vocab_size / model.known_vocab_size
    num_frozen_layers, adapters = 0, False
    frozen: tuple[str, ...] = ()
    if isinstance(config, FinetuneConfig):
        num_frozen_layers, adapters = config.num_frozen_layers or 0, config.lora.rank is not None
        if config.num_feature_layers is not None:
            num_frozen_layers, frozen = model.num_hidden_layers, (EMBEDDING_PROJECTION, CONVOLUTION, POOLER)
        elif num_frozen_layers or adapters:
            frozen = (EMBEDDING_PROJECTION, CONVOLUTION)
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
            | (PERMUTED_FORMULA if permuted else {})
            | ({} if kind is None else GLOBAL_FORMULA),
        },
    }


def row_sizes(model: ModelConfig, config: RunConfig | None, length: int | None) -> tuple[int, int]:
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
