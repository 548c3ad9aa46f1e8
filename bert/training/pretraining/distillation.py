"""Distillation from a teacher's token distributions, hidden states and mean-pooled rows.

Follows DistilBERT (Sanh et al. 2019, section 2: KL divergence and cosine, in addition to the masked tokens) and
TinyBERT (Jiao et al. 2019, section 3.1: mean squared error of hidden states through a projection, layer by layer). The
teacher reads the student's masked inputs without dropout in the same step; its outputs are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from bert.config import DistillationConfig, ModelConfig, PretrainConfig
from bert.config.pretraining import phase_configs
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.errors import Log, UserError
from bert.inference.load import load_for_training
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.encoder import EncoderOutput
from bert.model.layers import LayerExecution
from bert.model.names import ENCODER_DECODER, PROJECTIONS
from bert.model.parameters import Params, params_checksum
from bert.model.pretraining import BertForMaskedLM
from bert.tokenizer.vocabulary import embedding_rows, tokenizer_fingerprint
from bert.training.losses import Batch, Loss, WeightedSums, apply_to_batch, pretraining_losses, softened_divergence

HiddenStates = dict[int, Array]
"""Layer -> its output [B, T, D]; 0 is the embeddings."""

TOKENS, HIDDEN, SENTENCES = "teacher_token_loss", "teacher_hidden_loss", "teacher_sentence_loss"


@dataclass(frozen=True)
class Teacher:
    """Teacher model of a distillation run.

    Attributes:
        source: its name in the configuration.
        params: ``bert`` and, if it has an MLM head, ``predictions``; on the host.
    """

    source: str
    checksum: str
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer

    @property
    def has_mlm_head(self) -> bool:
        return "predictions" in self.params

    def check_vocabulary(self, tokenizer: Tokenizer, source: str) -> None:
        """Raises UserError if a student with this vocabulary would read other token ids."""
        if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(self.tokenizer):
            raise UserError(
                f"{source} has another vocabulary than the teacher {self.source}, and a student reads its teacher's: "
                "remove tokenizer.path and init, or use another teacher"
            )


def load_teacher(config: DistillationConfig, log: Log) -> Teacher | None:
    """Loads the teacher of a configuration; None if it has none.

    Raises:
        UserError: the teacher cannot be read, is not an encoder, or differs from the one that the run began with.
    """
    if config.teacher is None:
        return None
    model = load_for_training(config.teacher, log)
    if model.architecture == ENCODER_DECODER:
        raise UserError(f"the teacher {config.teacher} is an encoder-decoder: use an encoder")
    params: Params = {name: model.params[name] for name in ("bert", "predictions") if name in model.params}
    params["bert"] = {name: value for name, value in params["bert"].items() if name != "pooler"}
    checksum = params_checksum(params)
    if config.checksum not in (None, checksum):
        raise UserError(
            f"distillation.teacher {config.teacher} is not the model that the run began with: restore it, or set "
            "distillation.checksum to null and pass another --output_dir"
        )
    teacher = Teacher(config.teacher, checksum, model.config, params, model.tokenizer)
    head = "with" if teacher.has_mlm_head else "without"
    log(
        f"teacher {config.teacher}: {model.config.num_hidden_layers} layers of {model.config.hidden_size}, {head} an "
        f"MLM head, checksum {checksum[:16]}"
    )
    return teacher


def check_student(config: PretrainConfig, teacher: Teacher) -> None:
    """Raises UserError if a model, or its rows, cannot learn from the teacher."""
    if teacher.config.causal:
        raise UserError(
            f"the teacher {teacher.source} reads text from left to right, and training.objective mlm needs one that "
            "sees the tokens on both sides: use another teacher"
        )
    for phase in phase_configs(config):
        if phase.data.sequence_length > teacher.config.max_position_embeddings:
            raise UserError(
                f"data.sequence_length is {phase.data.sequence_length}, and the teacher {teacher.source} reads at most "
                f"{teacher.config.max_position_embeddings} tokens: use shorter rows"
            )
    if not (teacher.has_mlm_head or config.distillation.hidden_weight or config.distillation.sentence_weight):
        raise UserError(
            f"distillation.token_weight is the only weight, and the teacher {teacher.source} has no MLM head: set "
            "distillation.hidden_weight or use another teacher"
        )
    pairs = layer_pairs(config, teacher)
    for key, layers, model in (
        ("student_layers", pairs, config.model),
        ("teacher_layers", pairs.values(), teacher.config),
    ):
        if max(layers) > model.num_hidden_layers:
            raise UserError(
                f"distillation.{key} has layer {max(layers)}, and there are {model.num_hidden_layers}: use 0 to "
                f"{model.num_hidden_layers}"
            )
    last = (config.model.num_hidden_layers, teacher.config.num_hidden_layers)
    if config.distillation.sentence_weight and last not in pairs.items():
        raise UserError(
            f"distillation.student_layers and teacher_layers lack the pair of last layers {last[0]} and {last[1]}, "
            "whose means distillation.sentence_weight compares: use it, or set the weight to 0"
        )
    if config.training.scan_layers and pairs.keys() - {0, last[0]} | set(pairs.values()) - {0, last[1]}:
        raise UserError(
            "training.scan_layers gives the last hidden states alone: set it to false, or remove "
            "distillation.student_layers and teacher_layers"
        )


def layer_pairs(config: PretrainConfig, teacher: Teacher) -> dict[int, int]:
    """Returns a mapping from layers of the student to layers of the teacher."""
    settings = config.distillation
    if settings.student_layers is None or settings.teacher_layers is None:
        return {config.model.num_hidden_layers: teacher.config.num_hidden_layers}
    return dict(zip(settings.student_layers, settings.teacher_layers, strict=True))


@dataclass(frozen=True)
class StudentWithProjections:
    """A model with projections for some of its layers. The projections are not part of the saved model.

    Attributes:
        widths: layer -> widths of the student's and of the teacher's states.
    """

    student: nn.Module
    widths: Mapping[int, tuple[int, int]]

    def init(self, key: jax.Array, input_ids: Int[Array, "B T"]) -> dict[str, Params]:
        """Returns the student's random parameters, and ``distillation/layer_N/kernel`` [D, teacher's D]."""
        params = self.student.init(key, input_ids)["params"]
        draw = nn.initializers.lecun_normal()
        projections = {
            f"layer_{layer}": {"kernel": draw(jax.random.fold_in(key, layer), shape, jnp.float32)}
            for layer, shape in self.widths.items()
        }
        return {"params": {**params, **({PROJECTIONS: projections} if projections else {})}}


def with_projections(student: nn.Module, config: PretrainConfig, teacher: Teacher) -> StudentWithProjections:
    """Returns the student with a projection for each distilled layer if the widths differ."""
    shape = (config.model.hidden_size, teacher.config.hidden_size)
    return StudentWithProjections(
        student, {} if shape[0] == shape[1] else dict.fromkeys(layer_pairs(config, teacher), shape)
    )


@dataclass(frozen=True)
class Distillation:
    """A loss extended by losses against a teacher's outputs.

    Attributes:
        teacher: the teacher; its parameters are passed to `bind`.
    """

    base: Loss
    student: nn.Module
    teacher: Teacher
    config: PretrainConfig

    @property
    def factors(self) -> dict[str, float]:
        """Factors of the losses that the teacher adds."""
        settings = self.config.distillation
        tokens = settings.token_weight if self.teacher.has_mlm_head else 0.0
        factors = {TOKENS: tokens, HIDDEN: settings.hidden_weight, SENTENCES: settings.sentence_weight}
        return {name: factor for name, factor in factors.items() if factor}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all losses and counts."""
        return (*self.base.metrics, *self.factors)

    @property
    def loss_factors(self) -> dict[str, float]:
        """Factors of all losses in their sum."""
        return {**self.base.factors, **self.factors}

    def bind(self, teacher_params: Params) -> Loss:
        """Returns the loss, for parameters of the teacher that are arguments of the compiled step."""
        return Loss(partial(self._forward, teacher_params), self._weights, self.metrics, self.loss_factors)

    def _weights(self, batch: Batch) -> dict[str, Array]:
        places = _places(batch)
        return {**self.base.weights(batch), **{name: jnp.sum(places[name]) for name in self.factors}}

    def _forward(
        self, teacher_params: Params, params: Params, batch: Batch, dropout: Dropout | None
    ) -> tuple[WeightedSums, WeightedSums]:
        pairs, rows = layer_pairs(self.config, self.teacher), INPUT_FORMATS[self.config.data.input_format]
        output, states = run_with_states(self.student, params, batch, pairs, self.config.model, dropout)
        targets, teacher_states = self._run_teacher(teacher_params, batch, pairs.values())
        states = project(states, params.get(PROJECTIONS, {}))
        last = self.config.model.num_hidden_layers
        losses, counts = pretraining_losses(output, batch, rows.label, rows.metric)
        distances: dict[str, Array] = {}
        if TOKENS in self.factors:
            logits = output if rows.label is None else output.prediction_logits
            size = embedding_rows(self.teacher.tokenizer)  # either may have more rows
            temperature = self.config.distillation.temperature
            distances[TOKENS] = softened_divergence(logits[..., :size], targets[..., :size], temperature)
        if HIDDEN in self.factors:
            distance_of = DISTANCES[self.config.distillation.hidden_loss]
            each = [distance_of(states[layer], teacher_states[of_teacher]) for layer, of_teacher in pairs.items()]
            distances[HIDDEN] = sum(each[1:], each[0]) / len(each)
        if SENTENCES in self.factors:
            distances[SENTENCES] = cosine_distance(
                mean_of_examples(states[last], batch), mean_of_examples(teacher_states[pairs[last]], batch)
            )
        places = _places(batch)
        for name, distance in distances.items():
            losses[name] = (jnp.sum(distance * places[name]), jnp.sum(places[name]))
        return losses, counts

    def _run_teacher(self, params: Params, batch: Batch, layers: Iterable[int]) -> tuple[Any, HiddenStates]:
        """Returns the logits (not usable from a teacher without an MLM head) and the hidden states."""
        execution = LayerExecution.from_config(self.config.training, self.teacher.config)
        model = BertForMaskedLM(self.teacher.config, jnp.dtype(self.config.training.dtype), execution)
        options = {} if TOKENS in self.factors else {"method": _encode}
        return run_with_states(model, params, batch, layers, self.teacher.config, None, **options)


def _encode(model: BertForMaskedLM, *inputs: Array, **options: Any) -> Array:
    """Returns the encoder of a model without its head."""
    ids, segments, mask, _ = inputs
    return model.bert(ids, segments, mask, **options).last_hidden_state


def run_with_states(
    model: nn.Module,
    params: Params,
    batch: Batch,
    layers: Iterable[int],
    config: ModelConfig,
    dropout: Dropout | None,
    **options: Any,
) -> tuple[Any, HiddenStates]:
    """Returns the model's output for a batch, and hidden states of some layers from the same pass."""
    last = config.num_hidden_layers
    # Modules and methods; the output of the last layer includes its LayerNorm.
    ends = {0: ("bert", "embeddings", "project"), last: ("bert", "encoder", "__call__")}
    inner = {layer: f"layer_{config.group_of(layer - 1)}" for layer in layers}
    paths = {layer: ends.get(layer, ("bert", "encoder", inner[layer], "__call__")) for layer in layers}
    output, captured = apply_to_batch(
        model.apply,
        params,
        batch,
        dropout,
        capture_intermediates=lambda module, name: (*module.path, name) in paths.values(),
        mutable=["intermediates"],
        **options,
    )
    flat = traverse_util.flatten_dict(captured["intermediates"])
    # Layers that share parameters are consecutive calls of one module.
    calls = {layer: 0 if layer in ends else (layer - 1) % config.layers_per_group for layer in layers}
    outputs = {layer: flat[path][calls[layer]] for layer, path in paths.items()}
    return output, {layer: _hidden_state(value).astype(jnp.float32) for layer, value in outputs.items()}


def _hidden_state(output: Any) -> jax.Array:
    """Returns the hidden states [B, T, D] in the output of the embeddings, a layer or the stack."""
    if isinstance(output, EncoderOutput):
        return output.last_hidden_state
    return output[0] if isinstance(output, tuple) else output


def project(states: HiddenStates, projections: Params) -> HiddenStates:
    """Returns the states in the teacher's width, if they have a projection."""
    kernels = {layer: projections.get(f"layer_{layer}", {}).get("kernel") for layer in states}
    return {layer: state if kernels[layer] is None else state @ kernels[layer] for layer, state in states.items()}


def cosine_distance(student: Float[Array, "*places D"], teacher: Float[Array, "*places D"]) -> Float[Array, "*places"]:
    """Computes 1 - cosine; 1 with a zero gradient for a zero vector."""
    student, teacher = (
        x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-12)) for x in (student, teacher)
    )
    return 1 - jnp.sum(student * teacher, axis=-1)


def squared_distance(student: Float[Array, "*places D"], teacher: Float[Array, "*places D"]) -> Float[Array, "*places"]:
    """Computes the mean of the squared differences."""
    return jnp.mean(jnp.square(student - teacher), axis=-1)


DISTANCES = {"cosine": cosine_distance, "mse": squared_distance}
"""Values of distillation.hidden_loss."""


def mean_of_examples(hidden: Float[Array, "B T D"], batch: Batch) -> Float[Array, "B K D"]:
    """Returns means over the tokens of each example; K is 1 if rows are not packed."""
    tokens = _tokens_of_examples(batch)
    return jnp.einsum("btk,btd->bkd", tokens, hidden) / jnp.maximum(tokens.sum(axis=1), 1)[..., None]


def _tokens_of_examples(batch: Batch) -> Float[Array, "*rows T K"]:
    """Returns 1 for tokens that belong to an example; for rows [B], or for micro-batches of rows."""
    ids = batch.get("example_ids", batch["attention_mask"])
    count = batch["cls_positions"].shape[-1] if "cls_positions" in batch else 1
    return (ids[..., None] == 1 + jnp.arange(count)).astype(jnp.float32)


def _places(batch: Batch) -> dict[str, Array]:
    """Returns the weights of each loss, for predicted tokens [..., P], tokens [..., T] and examples [..., K]."""
    return {
        TOKENS: batch["masked_lm_weights"],
        HIDDEN: batch["attention_mask"].astype(jnp.float32),
        SENTENCES: _tokens_of_examples(batch).max(axis=-2),
    }
