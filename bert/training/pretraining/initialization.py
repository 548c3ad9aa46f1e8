"""Initial parameters of a pretraining run: a branched run, a teacher's layers, rows of new tokens, the MLM bias."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from flax import traverse_util

from bert.config import ModelConfig
from bert.data.pretraining.dataset import PretrainingDataset, open_rows
from bert.errors import Log
from bert.metrics import unigram_log_probabilities
from bert.model.names import PROJECTIONS
from bert.model.parameters import Params
from bert.training.initialization import taken_layers
from bert.training.pretraining.cooccurrence import cooccurrence_embeddings
from bert.training.pretraining.distillation import Teacher

VOCAB_PARAMS = (
    ("bert", "embeddings", "word", "embedding"),
    *((*head, name) for head in (("predictions",), ("generator", "predictions")) for name in ("decoder", "bias")),
)
"""Parameters [V, ...] with a row for each token; a model may lack some of them."""


def extend_embeddings(params: Params, rows: dict[int, list[int]], size: int) -> Params:
    """Extends a model's parameters to V = ``size`` rows for tokens; new rows are means of old rows.

    Args:
      rows: new row -> the old rows whose mean it becomes, from `bert.tokenizer.extension.decompose_new_tokens`.
      size: new number of rows, at least the current number. A row without a token becomes the mean of all old rows.
    """
    params = _copy(params)
    for *path, name in VOCAB_PARAMS:
        module = params
        for step in path:
            module = module.get(step, {})
        if name in module:
            table = np.asarray(module[name])
            filling = np.repeat(table.mean(axis=0, keepdims=True), size - len(table), axis=0)
            module[name] = np.concatenate([table, filling])
            for row, token_ids in rows.items():
                module[name][row] = table[token_ids].mean(axis=0)
    return params


def _copy(params: Params) -> Params:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in params.items()}


def init_mlm_bias(method: str, counts: np.ndarray, head: Sequence[str], params: Params) -> Params:
    """Sets the MLM head's output bias to the log frequencies of the tokens.

    Returns the parameters unchanged for the method ``zeros`` and for heads without bias.

    A bias that starts at zero moves by at most the learning rate per step, although it is several nats away from its
    target. Meanwhile the encoder learns the frequencies instead: it maps all tokens to one vector, which the tied
    decoder reads. A short run then spends its steps on undoing this.

    Args:
        method: ``unigram`` or ``zeros``.
        counts: [V] occurrences of each token in the training rows.
        head: path of the MLM head in ``params``.
    """
    flat, path = traverse_util.flatten_dict(params), (*head, "bias")
    if method == "zeros" or path not in flat:
        return params
    bias = np.zeros(flat[path].shape, np.float32)
    bias[: len(counts)] = unigram_log_probabilities(counts)
    bias[len(counts) :] = bias[: len(counts)].min()  # rows of the embedding beyond the vocabulary
    return traverse_util.unflatten_dict({**flat, path: bias})


SAMPLED_ROWS = 65_536
"""Maximum number of training rows in which neighbouring tokens are counted."""


def init_embeddings(examples: PretrainingDataset, ignored: Sequence[int], params: Params) -> Params:
    """Sets the word embeddings of the encoder to `cooccurrence_embeddings` of the training rows.

    Tokens without neighbours keep their random vectors.

    Args:
        examples: the training rows.
        ignored: ids of the special tokens.
        params: random weights.
    """
    rows = open_rows(examples.train)
    if not len(rows):  # a stream
        return params
    sample = rows.take(np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED_ROWS)).astype(int)))
    flat, path = traverse_util.flatten_dict(params), VOCAB_PARAMS[0]
    random = np.asarray(flat[path])
    (vocab_size, width), deviation = random.shape, float(random.std())
    vectors = cooccurrence_embeddings(sample["input_ids"], np.array(ignored), vocab_size, width, deviation)
    has_neighbours = np.abs(vectors).max(axis=1, keepdims=True) > 1e-6
    return traverse_util.unflatten_dict({**flat, path: np.where(has_neighbours, vectors, random)})


LAYER_FIELDS = (
    "num_attention_heads",
    "num_key_value_heads",
    "attention_softcap",
    "hidden_act",
    "position_embedding_type",
    "disentangled_products",
    "pre_layer_norm",
    "causal",
    "norm_type",
    "layer_groups",
    "conv_kernel_size",
)
"""Settings, besides the shapes of layers, that two models must share for a layer of one to be useful in the other."""


def start_from_teacher(params: Params, config: ModelConfig, teacher: Teacher, log: Log) -> Params:
    """Initializes a student from its random parameters and the teacher's parameters that fit.

    - A narrower student gets the principal components of the embeddings: the best approximation of the word embeddings
      of its width by squared error. Positions are rotated in the same way. Projections to the teacher's width start as
      the inverse map, so that states are compared in the teacher's directions from the first step.
    - A student of the teacher's width gets the embeddings unchanged, and `taken_layers` if the layers have the same
      shape.
    - A wider student keeps its random parameters.

    Args:
        params: the student's parameters; not modified.
        teacher: the teacher, which has the student's vocabulary.
    """
    own, source = params["bert"]["embeddings"], teacher.params["bert"]["embeddings"]
    words = np.asarray(source["word"]["embedding"], np.float32)
    width = own["word"]["embedding"].shape[-1]
    if width > words.shape[-1]:
        return params
    basis = np.eye(width, dtype=np.float32) if width == words.shape[-1] else principal_directions(words, width)
    offsets = {"position": (config.position_offset, teacher.config.position_offset)}
    tables = {
        name: {"embedding": _with_rows(own[name], source[name], basis, *offsets.get(name, (0, 0)))}
        for name in ("word", "position", "segment")
        if name in own and name in source
    }
    encoder = {**params["bert"], "embeddings": {**own, **tables}}
    if width == words.shape[-1]:
        encoder, layers = _with_layers(encoder, config, teacher)
        taken = f"embeddings, layers {layers} of {teacher.config.num_distinct_layers}" if layers else "embeddings"
    else:
        taken = f"the {width} principal components of its embeddings"
    log(f"taken from the teacher: {taken}")
    started = {**params, "bert": encoder}
    if PROJECTIONS in params and (config.hidden_size, teacher.config.hidden_size) == basis.shape[::-1]:
        started[PROJECTIONS] = {layer: {"kernel": basis.T.copy()} for layer in params[PROJECTIONS]}
    return started


def _with_layers(encoder: Params, config: ModelConfig, teacher: Teacher) -> tuple[Params, list[int]]:
    """Returns the student's encoder with the teacher's layers, embedding LayerNorm and projection, if shapes match.

    Returns:
        The encoder, and the numbers of the teacher's layers that it contains, from 1.
    """
    source = teacher.params["bert"]
    fields_agree = all(getattr(config, name) == getattr(teacher.config, name) for name in LAYER_FIELDS)
    if not fields_agree or config.num_distinct_layers > teacher.config.num_distinct_layers:
        return encoder, []
    sources = taken_layers(config.num_distinct_layers, teacher.config.num_distinct_layers)
    names = {f"layer_{layer}": f"layer_{number}" for layer, number in enumerate(sources)}
    layers = {
        name: _of_one_shape(own, source["encoder"].get(names.get(name, name)))
        for name, own in encoder["encoder"].items()
    }
    parts = {
        name: _of_one_shape(encoder["embeddings"][name], source["embeddings"].get(name))
        for name in ("norm", "projection")
        if name in encoder["embeddings"]
    }
    fitting = [
        number + 1 for name, number in zip(names, sources, strict=True) if layers[name] is not encoder["encoder"][name]
    ]
    return {**encoder, "encoder": layers, "embeddings": {**encoder["embeddings"], **parts}}, fitting


def _of_one_shape(own: Params, source: Params | None) -> Params:
    """Returns the source parameters if they have the names and shapes of the student's, else the student's."""
    return source if source is not None and jax.tree.map(np.shape, own) == jax.tree.map(np.shape, source) else own


def principal_directions(table: np.ndarray, width: int) -> np.ndarray:
    """Returns [D, width] orthonormal directions that maximize the squared lengths of the projected rows [N, D]."""
    _, vectors = np.linalg.eigh(table.T.astype(np.float64) @ table)
    return np.ascontiguousarray(vectors[:, ::-1][:, :width], np.float32)


def _with_rows(own: Params, source: Params, basis: np.ndarray, first: int, first_source: int) -> np.ndarray:
    """Returns the student's table, overwritten with the teacher's rows as far as both have them."""
    table, rows = np.array(own["embedding"]), np.asarray(source["embedding"], np.float32)[first_source:]
    size = min(len(table) - first, len(rows))
    table[first : first + size] = rows[:size] @ basis
    return table
