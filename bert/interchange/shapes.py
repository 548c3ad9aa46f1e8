"""Expected shapes of a model's parameters, and the comparison of a file's tensors with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.names import ARCHITECTURES_WITH_LABELS, Names
from bert.model.decoders import BertForSequenceToSequence
from bert.model.names import (
    ARCHITECTURES,
    CLASSIFIER,
    DECODER,
    DETECTION,
    ENCODER,
    POOLER,
    QA_OUTPUTS,
    SEQ_RELATIONSHIP,
    has_decoder,
    part_of,
    parts_of,
)
from bert.model.pretraining import BertForPreTraining

INNER_LAYER = "/layer_1/"


def check_tensors(
    table: Names,
    arrays: Mapping[str, np.ndarray],
    source: Path,
    config: ModelConfig,
    architecture: str,
    num_labels: int,
) -> set[str]:
    """Returns the parts in a file. Raises UserError if a part is incomplete or its shapes differ from config.json.

    Args:
        arrays: parameters by path, as read from the file.
    """
    tensors = table.tensors(config.num_distinct_layers, architecture, config.decoder.num_distinct_layers)
    parts = {tensor.part for tensor in tensors if tensor.paths[0] in arrays}
    needed = {ENCODER, *parts, *(ARCHITECTURES[architecture] if has_decoder(architecture) else ())}
    pooled = POOLER in parts_of(architecture, config)
    if SEQ_RELATIONSHIP in parts or (not {CLASSIFIER, QA_OUTPUTS}.isdisjoint(parts) and pooled):
        needed.add(POOLER)
    shapes = expected_shapes(config, architecture, num_labels)
    missing = [
        tensor.name
        for tensor in tensors
        if tensor.part in needed and tensor.paths[0] in shapes and tensor.paths[0] not in arrays
    ]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(f"{source} lacks {', '.join(missing[:4])}{more}: copy it again, or correct config.json")
    for tensor in tensors:
        if tensor.paths[0] not in arrays:
            continue
        if tensor.paths[0] not in shapes:
            raise UserError(f"{source} holds {tensor.name}, which does not belong to config.json: copy both again")
        if any(arrays[path].shape != shapes[path] for path in tensor.paths):
            shape = tensor.join(arrays).shape
            expected = tensor.join({path: np.broadcast_to(np.float32(0), shapes[path]) for path in tensor.paths}).shape
            raise UserError(
                f"{source}: {tensor.name} is {list(shape)}, but config.json makes it {list(expected)}: copy both from "
                "one source"
            )
    return parts


@lru_cache(maxsize=16)
def expected_shapes(config: ModelConfig, architecture: str, num_labels: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter in `Names.tensors`, by path."""
    # All layers have the same shapes, except that the first may lack a LayerNorm.
    shallow = dataclasses.replace(config, num_hidden_layers=2, layer_groups=None, decoder_layers=None)
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = _shapes(BertForPreTraining(shallow), ids)
    if has_decoder(architecture):
        shapes |= _shapes(BertForSequenceToSequence(shallow), ids, ids)
    for path in [path for path in shapes if INNER_LAYER in path]:
        in_decoder, shape = part_of(path) == DECODER, shapes.pop(path)
        for layer in range(1, (config.decoder if in_decoder else config).num_distinct_layers):
            shapes[path.replace(INNER_LAYER, f"/layer_{layer}/")] = shape
    outputs = {CLASSIFIER: num_labels if architecture in ARCHITECTURES_WITH_LABELS else 1, QA_OUTPUTS: 2}
    if architecture == "BertForReplacedTokenDetection":
        for name, features in (("dense", config.hidden_size), ("output", 1)):
            path = f"{DETECTION}/{name}"
            shapes |= {f"{path}/kernel": (config.hidden_size, features), f"{path}/bias": (features,)}
        if not config.use_bias:
            del shapes[f"{DETECTION}/dense/bias"]
    for head in set(ARCHITECTURES[architecture]) & set(outputs):
        shapes |= {f"{head}/kernel": (config.hidden_size, outputs[head]), f"{head}/bias": (outputs[head],)}
    if config.causal and POOLER in ARCHITECTURES[architecture]:  # it reads the last token and has no bias
        shapes.pop(f"{CLASSIFIER}/bias", None)
    return shapes


def _shapes(model: nn.Module, *inputs: jax.Array) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)["params"])
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
