"""Initial parameters of a fine-tuning run: head, decoder and low-rank adapters (LoRA)."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import FinetuneConfig, LoraConfig, ModelConfig
from bert.errors import UserError, listed
from bert.interchange.names import ARCHITECTURES_WITH_LABELS
from bert.model.decoders import BertForSequenceToSequence
from bert.model.linear import LORA_A, LORA_B, FrozenWeights
from bert.model.names import CROSS, PROJECTION, output_layer
from bert.model.parameters import Params, params_checksum
from bert.model.pooling import Pooling
from bert.runs.folder import RunFolder
from bert.runs.orbax_io import read_frozen_weights, write_frozen_weights
from bert.training.initialization import LabelRows, ParameterPath, is_cross_attention
from bert.training.optimizer import STACKS


class Head(NamedTuple):
    """The head of a fine-tuned model or of a task.

    Attributes:
        architecture: the name of our module, a key of `bert.model.names.ARCHITECTURES`.
        problem_type: the meaning of the outputs, as in Hugging Face's config.json.
        names: the names of the outputs, in order; () for outputs without names.
        words: the names that the data has for the same outputs.
        num_feature_layers: the number of layers that the head reads, in a run that trains only the head.
    """

    architecture: str
    problem_type: str | None = None
    names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    num_feature_layers: int | None = None

    @property
    def output_layer(self) -> str | None:
        """The module whose last axis holds the outputs; None for an encoder, a decoder or a pretraining head."""
        return output_layer(self.architecture)

    @property
    def kind(self) -> str | None:
        """The problem type of a sequence classifier, with the default filled in; None for other heads."""
        if self.architecture != "BertForSequenceClassification":
            return None
        return self.problem_type or ("single_label_classification" if len(self.names) > 1 else "regression")

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the outputs; () for scores, for start and end positions, and for scores of choices."""
        has_labels = self.architecture in ARCHITECTURES_WITH_LABELS and self.kind != "regression"
        return self.names if has_labels else ()


class HeadStart(NamedTuple):
    """The weights that a task's head starts from.

    Attributes:
        modules: modules to copy from the source.
        rows: the source rows of modules that are copied label by label.
        message: the log message on what is copied and what is not; "" if there is nothing to report.
        incomplete: whether the source has trained weights of a head that are not copied.
    """

    modules: tuple[str, ...] = ()
    rows: LabelRows = MappingProxyType({})
    message: str = ""
    incomplete: bool = False


def match_head(task: Head, source: Head, name: str) -> HeadStart:
    """Finds the weights that a task's head can copy from the source's head.

    Outputs that belong to labels are matched by label name, because the order of the labels may differ. Other outputs
    are copied if their number is the same.
    """
    module = source.output_layer
    if module is None:
        return HeadStart()
    if difference := _difference(task, source):
        return HeadStart((), {}, f"the head of {name} is not loaded: {difference}", True)
    if not task.labels:
        return HeadStart((module,))
    rows = _label_rows(task, source.names)
    if all(row is None for row in rows):
        fix = "name them in id2label of its config.json" if _are_numbered(source.names) else "give them the same names"
        difference = f"its labels are {listed(source.names)}, and none of them is among {listed(task.names)}"
        return HeadStart((), {}, f"the head of {name} is not loaded: {difference}; if they are the same, {fix}", True)
    used = set(rows)
    parts = {
        "kept": [label for label, row in zip(task.names, rows, strict=True) if row is not None],
        "randomly initialized": [label for label, row in zip(task.names, rows, strict=True) if row is None],
        "not loaded": [label for row, label in enumerate(source.names) if row not in used],
    }
    message = "; ".join(f"{what}: {listed(labels)}" for what, labels in parts.items() if labels)
    return HeadStart((module,), {module: rows}, f"labels of {name}: {message}", bool(parts["not loaded"]))


def _difference(task: Head, source: Head) -> str | None:
    """Returns the reason why the task cannot use a source's head; None if it can."""
    if task.architecture != source.architecture:
        return f"it is the head of {source.architecture}, and the task trains {task.architecture}"
    if task.num_feature_layers != source.num_feature_layers:
        layers = [head.num_feature_layers or "null" for head in (source, task)]
        return f"num_feature_layers was {layers[0]}, and is {layers[1]}"
    if task.labels and source.kind != task.kind:
        return f"it was trained for {source.kind}, and the task is {task.kind}"
    if not task.labels and len(source.names) > 1:
        return f"it has {len(source.names)} outputs, and the task has one"
    return None


def _label_rows(task: Head, source_labels: Sequence[str]) -> tuple[int | None, ...]:
    """Returns the source row of each of the task's labels; None for labels without one.

    Exact matches have priority over matches in another case, and a label's name over its word in the data. Numbered
    labels of a source (LABEL_0, LABEL_1) match data labels that are the same numbers.
    """
    words = task.words or task.names
    numbered = {str(row): row for row in range(len(source_labels))}
    if _are_numbered(source_labels) and set(words) == set(numbered):
        return tuple(numbered[word] for word in words)
    rows: dict[int, int] = {}
    used: set[int] = set()
    for spelling in (str, str.casefold):
        for labels in (task.names, words):
            indices = _unique(map(spelling, source_labels))
            for spelled, label in _unique(map(spelling, labels)).items():
                row = indices.get(spelled)
                if row is not None and label not in rows and row not in used:
                    rows[label] = row
                    used.add(row)
    return tuple(rows.get(label) for label in range(len(task.names)))


def _unique(labels: Iterable[str]) -> dict[str, int]:
    """Returns the indices of the labels that occur once."""
    labels = list(labels)
    counts = Counter(labels)
    return {label: number for number, label in enumerate(labels) if counts[label] == 1}


def _are_numbered(labels: Sequence[str]) -> bool:
    """Returns whether a model's labels are numbers instead of names."""
    return list(labels) == [f"LABEL_{number}" for number in range(len(labels))]


def with_projection(params: Params, pooling: Pooling | None) -> Params:
    """Returns the parameters of a model with the projection of its vectors of tokens, which its pooling has."""
    kernel = None if pooling is None else pooling.projection
    return params if kernel is None else {**params, PROJECTION: {"kernel": kernel}}


SHARES = ("none", "embeddings", "all")
"""Values of ``share_decoder``, from no shared parameters to all parameters shared."""


class EncoderDecoderInit(NamedTuple):
    """Draws the parameters of an encoder-decoder, whose initialization needs a source and a target."""

    model: BertForSequenceToSequence

    def init(self, key: jax.Array, input_ids: jax.Array) -> Any:
        """Returns parameters; the same ids serve as source and target."""
        return self.model.init(key, input_ids, input_ids % self.model.config.decoder.known_vocab_size)


def decoder_source(config: FinetuneConfig, params: Params, name: str) -> Params:
    """Returns the parameters of an encoder-decoder that ``init`` provides.

    - An encoder-decoder provides all of its parameters. Parameters that it shares and the run does not are duplicated.
    - An encoder also initializes the decoder, and its MLM head the decoder's head; cross-attention is not initialized.
      The decoder has no convolution.
    - With ``decoder_init: none`` only the encoder is initialized.

    Raises:
        UserError: the decoder has more layers than the initial model, or shares parameters that the model does not
            share.
    """
    encoder = {part: tree for part, tree in params["bert"].items() if part != "pooler"}
    source = {**params, "bert": encoder}
    share, layers = config.model.share_decoder, config.model.decoder.num_hidden_layers
    distinct = config.model.decoder.num_distinct_layers
    if (shared := _shared_parts(source)) is not None and config.decoder_init == "encoder":
        return _unshared(config.model, source, shared, name)
    if shared is not None:
        encoder = _without_cross_attention(encoder)
        source = {"bert": encoder, "predictions": source["predictions"]}
    if config.decoder_init == "none" and share != "all":
        return {"bert": encoder}
    if layers > config.model.num_hidden_layers:
        raise UserError(
            f"model.decoder_layers is {layers}, but {name} has {config.model.num_hidden_layers} layers: use no more, "
            "or set decoder_init to none"
        )
    parts = encoder["encoder"].items()
    stack = {part: tree for part, tree in parts if _layer(part) < distinct and part != "convolution"}
    own = {"none": {**encoder, "encoder": stack}, "embeddings": {"encoder": stack}}
    return {**source, "decoder": own[share]} if share in own else source


def _shared_parts(source: Params) -> str | None:
    """Returns the value of ``share_decoder`` that matches an encoder-decoder's parameters; None for an encoder."""
    if "decoder" in source:
        return "none" if "embeddings" in source["decoder"] else "embeddings"
    return "all" if "cross_attention" in source["bert"]["encoder"]["layer_0"] else None


def _unshared(config: ModelConfig, source: Params, shared: str, name: str) -> Params:
    """Returns an encoder-decoder's parameters with the sharing of the run.

    Raises:
        UserError: the run shares more parameters than the source, or has other parameters.
    """
    if SHARES.index(config.share_decoder) > SHARES.index(shared):
        raise UserError(
            f"model.share_decoder is {config.share_decoder}, but the two sides of {name} have parameters of their own "
            f"({shared}): set it to {shared}"
        )
    encoder, decoder = source["bert"], source.get("decoder", {})
    layers = decoder.get("encoder", encoder["encoder"])
    tokens = len(decoder.get("embeddings", encoder["embeddings"])["word"]["embedding"])
    pairs = {
        "model.decoder_layers": (config.decoder.num_distinct_layers, sum(_layer(part) >= 0 for part in layers)),
        "model.decoder_vocab_size": (config.decoder.known_vocab_size, tokens),
    }
    for key, (value, source_value) in pairs.items():
        if value != source_value:
            raise UserError(
                f"{key} is {value}, but the decoder of {name} has {source_value}: set decoder_init to none, or "
                "init to another model"
            )
    if config.share_decoder == shared:
        return source
    decoder = {"encoder": layers}
    if config.share_decoder == "none":
        decoder["embeddings"] = encoder["embeddings"]
    return {**source, "bert": _without_cross_attention(encoder), "decoder": decoder}


def _without_cross_attention(encoder: Params) -> Params:
    stack = {
        name: {part: tree for part, tree in parts.items() if not part.startswith(CROSS)} if _layer(name) >= 0 else parts
        for name, parts in encoder["encoder"].items()
    }
    return {**encoder, "encoder": stack}


def _layer(part: str) -> int:
    """Returns the index of a layer; -1 for other modules."""
    match = re.fullmatch(r"layer_(\d+)", part)
    return int(match[1]) if match else -1


def is_frozen(path: ParameterPath) -> bool:
    """Returns whether a parameter is not trained.

    All parameters of the encoder and the decoder are frozen, except the pooler and cross-attention, which may both
    start from random weights.
    """
    return path[0] in STACKS and path[1] != "pooler" and not is_cross_attention(path)


def take_frozen_weights(
    run: RunFolder[FinetuneConfig], source: Params | None, stacks: tuple[str, ...]
) -> FrozenWeights:
    """Returns the frozen weights of a run, which are written into its folder when it starts.

    Args:
        source: parameters of the initial model; None reads the frozen weights of a run that has begun.
        stacks: the modules of the run's model that have layers.

    Raises:
        UserError: the weights differ from the ones that the run, or its configuration, began with.
    """
    lora = run.config.lora
    if source is None:
        return FrozenWeights(read_frozen_weights(run.path, lora.checksum), lora.scale)
    flat = traverse_util.flatten_dict(source)
    params = traverse_util.unflatten_dict(
        {path: leaf for path, leaf in flat.items() if is_frozen(path) and path[0] in stacks}
    )
    checksum = params_checksum(params)
    if lora.checksum not in (None, checksum):
        raise UserError(
            f"init {run.config.init} is not the model that the run began with (lora.checksum): restore it, or pass "
            "another output_dir and remove lora.checksum"
        )
    if run.is_writer:
        write_frozen_weights(run.path, params)
    run.save_config(dataclasses.replace(run.config, lora=dataclasses.replace(lora, checksum=checksum)))
    return FrozenWeights(params, lora.scale)


def trained_params(params: Params, config: LoraConfig, seed: int) -> Params:
    """Returns the trained parameters of a model, with new adapters (A random, B zero); all without a rank.

    A is uniform up to 1 / sqrt(D), as in the authors' code (microsoft/LoRA, layers.py); the paper does not state the
    standard deviation of its normal distribution. The values of A depend on the seed and on the path of the matrix in
    the model.

    Args:
        params: parameters of the whole model, or their shapes.
    """
    if (rank := config.rank) is None:
        return params
    flat = traverse_util.flatten_dict(params)
    trained = {path: leaf for path, leaf in flat.items() if not is_frozen(path)}
    for path, kernel in flat.items():
        if is_frozen(path) and path[-3:] in {("attention", name, "kernel") for name in config.projections}:
            inputs, outputs = kernel.shape
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
            bound = inputs**-0.5
            trained[*path[:-1], LORA_A] = jax.random.uniform(key, (inputs, rank), minval=-bound, maxval=bound)
            trained[*path[:-1], LORA_B] = jnp.zeros((rank, outputs))
    return traverse_util.unflatten_dict(trained)
