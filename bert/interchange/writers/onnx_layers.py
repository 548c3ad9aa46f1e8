"""Builds the ONNX graph of a model: the encoder with every option of `ModelConfig`, and its head.

Shapes as in `bert.model.encoder`; P distance buckets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

from bert.config import ModelConfig
from bert.errors import require
from bert.interchange.bundle import ModelBundle
from bert.interchange.names import EMBEDDING, TOKEN_EMBEDDINGS, TOKEN_MASK
from bert.interchange.writers.onnx_graph import Graph
from bert.interchange.writers.onnx_pooling import mean, sentence_embedding, token_embeddings, token_mask
from bert.interchange.writers.signature import CHOICES, Signature, parameters, scored_ids, signature
from bert.model.names import GLOBAL_TOKENS, GlobalTokenKind
from bert.model.positions import (
    MAX_RELATIVE_DISTANCE,
    Rotation,
    alibi_slopes,
    buckets_by_distance,
    sinusoidal_position_table,
    step_embeddings,
)
from bert.model.reductions import MASKED_IN_TRAINING

if TYPE_CHECKING:
    import onnx

BY_HEAD, KEYS_BY_HEAD = [0, 2, 1, 3], [0, 2, 3, 1]
"""Orders of axes that turn [B, T, N, H] into [B, N, T, H] and [B, N, H, T]."""

SWAPPED = [0, 1, 3, 2]
"""Order of axes that transposes the matrices of an array [B, N, ...]."""


def build(model: ModelBundle, fused: bool = False) -> onnx.ModelProto:
    """Returns the graph with its weights included, regardless of size.

    Args:
        fused: use ONNX Runtime's operator for attention where it has one, which other runtimes lack.
    """
    graph = Graph(parameters(model), fused)
    ports = signature(model)
    results = _outputs(graph, model, ports)
    for name, result in zip(ports.outputs, results, strict=True):
        graph.node("Identity", result, output=name)
    return graph.proto(ports)


def _outputs(graph: Graph, model: ModelBundle, ports: Signature) -> list[str]:
    """Returns the graph's outputs in the order of its signature."""
    config, architecture = model.config, model.architecture
    inputs = {name: name for name in ports.inputs}
    if CHOICES in ports.inputs["input_ids"]:  # each choice is a row: [B, C, T] -> [B * C, T]
        length = graph.node("Shape", "input_ids", start=2)
        rows = graph.node("Concat", graph.constant([-1]), length, axis=0)
        inputs = {name: graph.node("Reshape", name, rows) for name in inputs}
    hidden = _encoder(graph, config, inputs, GLOBAL_TOKENS.get(architecture))

    def pooled() -> str:
        mask = inputs["attention_mask"]
        if config.causal:
            return graph.last_token(hidden, mask)
        if config.pooler_input == "each":
            return mean(graph, _pooler(graph, config, hidden), mask)
        if config.pooler_input == "first":
            return _pooler(graph, config, graph.first_token(hidden))
        last = config.pooler_input == "last"
        return _pooler(graph, config, graph.last_token(hidden, mask) if last else mean(graph, hidden, mask))

    def tokens() -> str:
        return _pooler(graph, config, hidden) if config.pools_tokens else hidden

    if architecture == "Bert":
        named = {
            "last_hidden_state": lambda: hidden,
            "pooler_output": pooled,
            EMBEDDING: lambda: sentence_embedding(graph, require(model.pooling, "the pooling"), hidden),
            TOKEN_EMBEDDINGS: lambda: token_embeddings(graph, require(model.pooling, "the pooling"), hidden),
            TOKEN_MASK: lambda: token_mask(graph, scored_ids(model)),
        }
        return [named[name]() for name in ports.outputs]
    if architecture == "BertForPreTraining":
        return [_masked_lm(graph, config, hidden), graph.dense(pooled(), "seq_relationship")]
    if architecture in ("BertForMaskedLM", "BertForCausalLM"):
        logits = _masked_lm(graph, config, hidden)
        pooling = model.graph_pooling
        return [logits] if pooling is None else [logits, sentence_embedding(graph, pooling, logits)]
    if architecture == "BertForNextSentencePrediction":
        return [graph.dense(pooled(), "seq_relationship")]
    if architecture == "BertForReplacedTokenDetection":
        inner = graph.activation(graph.dense(hidden, "discriminator_predictions/dense"), config.hidden_act)
        return [graph.node("Squeeze", graph.dense(inner, "discriminator_predictions/output"), graph.constant([-1]))]
    if architecture == "BertForTokenClassification":
        return [graph.dense(tokens(), "classifier")]
    if architecture == "BertForQuestionAnswering":
        logits, last = graph.dense(tokens(), "qa_outputs"), graph.constant([2])
        return [graph.node("Squeeze", graph.slice(logits, i, i + 1, axis=2), last) for i in (0, 1)]
    logits = graph.dense(pooled(), "classifier")
    if architecture == "BertForMultipleChoice":  # [B * C, 1] -> [B, C]
        choices = graph.node("Shape", "input_ids", start=1, end=2)
        logits = graph.node("Reshape", logits, graph.node("Concat", graph.constant([-1]), choices, axis=0))
    return [logits]


def _encoder(graph: Graph, config: ModelConfig, inputs: dict[str, str], kind: GlobalTokenKind | None) -> str:
    """Maps ids, mask and segments [B, T] to hidden states [B, T, D]."""
    node = graph.node

    def norm(x: str, path: str) -> str:
        return graph.norm(x, path, config.layer_norm_eps, config.norm_type)

    def after(x: str, path: str) -> str:
        return x if config.pre_layer_norm else norm(x, path)

    x = embedded = _embeddings(graph, config, inputs)
    contexts = _contexts(graph, config, inputs, kind)
    for index in range(config.num_hidden_layers):
        layer = f"bert/encoder/layer_{config.group_of(index)}"
        if config.step_embedding:
            x = node("Add", x, graph.array(f"step_{index}", np.asarray(step_embeddings(config)[index])))
        has_norm = config.pre_layer_norm and (index > 0 or config.first_layer_norm)
        read = norm(x, f"{layer}/attention_norm") if has_norm else x
        attended = _attention(graph, config, read, contexts[config.is_local(index)], f"{layer}/attention")
        attended = norm(attended, f"{layer}/attention_output_norm") if config.sublayer_output_norm else attended
        x = after(node("Add", x, attended), f"{layer}/attention_norm")
        read = norm(x, f"{layer}/output_norm") if config.pre_layer_norm else x
        inner = graph.activation(graph.dense(read, f"{layer}/intermediate"), config.hidden_act)
        if config.gated_feed_forward:
            inner = node("Mul", inner, graph.dense(read, f"{layer}/gate"))
        outputs = graph.dense(inner, f"{layer}/output")
        outputs = norm(outputs, f"{layer}/feed_forward_norm") if config.sublayer_output_norm else outputs
        x = after(node("Add", x, outputs), f"{layer}/output_norm")
        if index == 0 and config.conv_kernel_size is not None:
            path = "bert/encoder/convolution"
            read = norm(embedded, f"{path}/norm") if config.pre_layer_norm else embedded
            outputs = _convolution(graph, config.conv_kernel_size, read, inputs["attention_mask"], path)
            x = after(node("Add", x, graph.activation(outputs, config.hidden_act)), f"{path}/norm")
    return norm(x, "bert/encoder/norm") if config.pre_layer_norm else x


def _convolution(graph: Graph, size: int, x: str, attention_mask: str, path: str) -> str:
    """Applies the convolution at ``path``, whose kernel has ``size`` tokens, [B, T, D] -> [B, T, D]."""
    node, side = graph.node, size // 2
    real = node("Unsqueeze", graph.cast(attention_mask, "FLOAT"), graph.constant([-1]))
    padded = node("Pad", node("Mul", x, real), graph.constant([0, side, 0, 0, side, 0]))
    ends = [*range(1 - size, 0), np.iinfo(np.int64).max]  # a negative end counts from the end of the padded row
    read = [graph.slice(padded, start, int(end), axis=1) for start, end in enumerate(ends)]
    return graph.dense(node("Concat", *read, axis=2), path)


def _embeddings(graph: Graph, config: ModelConfig, inputs: dict[str, str]) -> str:
    """Maps ids and segments [B, T] to the input of the first layer [B, T, D]. Rows that are too long fail."""
    node, path, ids = graph.node, "bert/embeddings", inputs["input_ids"]
    x = node("Gather", graph.weight(f"{path}/word/embedding"), ids)
    if config.scale_embeddings:
        x = node("Mul", x, graph.constant(math.sqrt(config.embedding_width)))
    if config.token_dropout_id is not None:
        x = node("Mul", x, _token_dropout(graph, config.token_dropout_id, ids, inputs["attention_mask"]))
    if config.has_position_table or config.position_embedding_type == "sinusoidal":
        if config.has_position_table:
            table = graph.weight(f"{path}/position/embedding")
        else:
            table = graph.array("sinusoids", np.asarray(sinusoidal_position_table(config)))
        first = config.position_offset
        end = node("Add", node("Shape", ids, start=1), graph.constant([first]))
        x = node("Add", x, graph.slice(table, first, end, axis=0))
    if config.type_vocab_size:
        segments = graph.weight(f"{path}/segment/embedding")  # the only row, if there is no input of segments
        if "token_type_ids" in inputs:
            segments = node("Gather", segments, inputs["token_type_ids"])
        x = node("Add", x, segments)
    if config.embedding_norm:
        x = graph.norm(x, f"{path}/norm", config.layer_norm_eps, config.norm_type)
    return x if config.embedding_width == config.hidden_size else graph.dense(x, f"{path}/projection")


def _token_dropout(graph: Graph, mask_id: int, ids: str, attention_mask: str) -> str:
    """Returns the factors of word embeddings [B, T, 1] (see `bert.model.reductions.token_dropout_factors`)."""
    node, last = graph.node, graph.constant([-1])
    is_mask = node("Equal", ids, graph.integer(mask_id))
    total, count = graph.token_sum(
        *(node("Unsqueeze", graph.cast(x, "FLOAT"), last) for x in (is_mask, attention_mask))
    )
    rest = node("Max", node("Sub", count, total), graph.constant(1.0))
    factor = node("Mul", node("Div", count, rest), graph.constant(1 - MASKED_IN_TRAINING))
    is_other = graph.cast(node("Not", node("Unsqueeze", is_mask, last)), "FLOAT")
    return node("Mul", node("Unsqueeze", factor, last), is_other)


class Context(NamedTuple):
    """Mask and positions of the attention of global or of local layers.

    Attributes:
        visible: [B, 1, #T, S] booleans.
        has_keys: [B, 1, T, 1] booleans, false for queries that attend to no key, whose result is zero; None if all do.
        padding: [B, S] int32, 0 for padding, if ONNX Runtime's operator computes the attention; None for others.
        rotation: cosine and sine [1, 1, T, R / 2] of rotary positions; None for others.
        bias: [1, N, T, S], added to the scores; None for none.
        vectors: [P, D], the embeddings of distances of disentangled attention; None for others.
        buckets: [B, N, T, S] and [B, N, S, T], the bucket of the distance from a query to a key; None for others.
        global_tokens: [B, T] booleans, and the keys that they attend to, [B, 1, 1, S]; None for none.
    """

    visible: str
    has_keys: str | None = None
    padding: str | None = None
    rotation: tuple[str, str] | None = None
    bias: str | None = None
    vectors: str | None = None
    buckets: tuple[str, str] | None = None
    global_tokens: tuple[str, str] | None = None


def _contexts(
    graph: Graph, config: ModelConfig, inputs: dict[str, str], kind: GlobalTokenKind | None
) -> dict[bool, Context]:
    """Returns the contexts of global layers (key False) and local layers (key True), for those that the model has."""
    node = graph.node
    length = node("Shape", inputs["input_ids"], start=1)
    visible = node("Unsqueeze", graph.cast(inputs["attention_mask"], "BOOL"), graph.constant([1, 2]))
    kinds = sorted(set(map(config.is_local, range(config.num_hidden_layers))))
    alibi = config.position_embedding_type == "alibi"
    has_buckets = config.relative_attention_buckets is not None
    needs_distances = config.causal or config.attention_window is not None or has_buckets or alibi
    distances = _distances(graph, length) if needs_distances else ""
    if config.causal:
        visible = node("And", visible, node("GreaterOrEqual", distances, graph.integer(0)))
    plain_padding = graph.cast(inputs["attention_mask"], "INT32") if _is_plain(graph, config) else None
    shared = Context(visible, padding=plain_padding)
    if config.is_disentangled:
        shared = _disentangled(graph, config, distances, inputs["input_ids"])._replace(visible=visible)
    elif alibi:
        slopes = graph.array("slopes", -alibi_slopes(config.num_attention_heads)[:, None, None])
        shared = shared._replace(bias=node("Mul", slopes, graph.cast(node("Abs", distances), "FLOAT")))
    elif has_buckets:
        shared = shared._replace(bias=_relative_bias(graph, config, distances))
    if kind is not None and config.global_attention_sep_id is not None:
        flags = _global_flags(graph, kind, config.global_attention_sep_id, inputs, length)
        shared = shared._replace(global_tokens=(flags, visible))
    contexts = {}
    for local in kinds:
        context = shared
        if local:
            window = graph.integer(require(config.attention_window, "model.attention_window"))
            within = node("LessOrEqual", node("Abs", distances), window)
            if context.global_tokens is not None:
                within = node("Or", within, node("Unsqueeze", context.global_tokens[0], graph.constant([1, 2])))
            context = context._replace(visible=node("And", visible, within))
            if context.global_tokens is None:
                num_keys = node("ReduceSum", graph.cast(context.visible, "FLOAT"), graph.constant([-1]))
                context = context._replace(has_keys=node("Greater", num_keys, graph.constant(0.0)))
        if config.position_embedding_type == "rotary":
            context = context._replace(rotation=_rotation(graph, config, local, length))
        contexts[local] = context
    return contexts


def _global_flags(graph: Graph, kind: GlobalTokenKind, separator: int, inputs: dict[str, str], length: str) -> str:
    """Returns [B, T], true for a global token (see `bert.model.mask.GlobalTokens`)."""
    node = graph.node
    positions = node("Range", graph.integer(0), node("Squeeze", length), graph.integer(1))
    is_separator = graph.cast(node("Equal", inputs["input_ids"], graph.integer(separator)), "INT64")
    is_before = node("Equal", node("CumSum", is_separator, graph.integer(1)), graph.integer(0))
    if kind == "first":
        flags = node("Equal", positions, graph.integer(0))
    elif kind == "before_separator":
        flags = is_before
    else:
        end = node("ReduceSum", graph.cast(is_before, "INT64"), graph.constant([1]))
        flags = node("Greater", positions, node("Add", end, graph.integer(1)))
    return node("And", flags, graph.cast(inputs["attention_mask"], "BOOL"))


def _is_plain(graph: Graph, config: ModelConfig) -> bool:
    """Returns whether ONNX Runtime's operator computes the attention of all layers."""
    plain_positions = config.position_embedding_type in ("learned", "sinusoidal", "none")
    restricted = config.causal or config.attention_window is not None or config.relative_attention_buckets is not None
    changed = config.query_key_norm or (config.attention_softcap, config.query_pre_attn_scalar) != (None, None)
    grouped = config.key_value_heads != config.num_attention_heads
    return graph.fused and plain_positions and not (restricted or changed or grouped)


def _distances(graph: Graph, length: str) -> str:
    """Returns query position minus key position, [T, T]."""
    node = graph.node
    positions = node("Range", graph.integer(0), node("Squeeze", length), graph.integer(1))
    rows, columns = (node("Unsqueeze", positions, graph.constant([axis])) for axis in (1, 0))
    return node("Sub", rows, columns)


def _rotation(graph: Graph, config: ModelConfig, local: bool, length: str) -> tuple[str, str]:
    """Returns cosine and sine [1, 1, T, R / 2]. The tables have a row for each position up to the model's maximum."""
    positions = jnp.arange(config.max_position_embeddings)[None]
    rotation = Rotation.from_config(config, local, positions)
    tables = {f"cos_{local}": rotation.cos, f"sin_{local}": rotation.sin}
    names = [graph.array(name, np.asarray(table)[None]) for name, table in tables.items()]
    cos, sin = (graph.slice(name, 0, length, axis=2) for name in names)
    return cos, sin


def _by_distance(graph: Graph, name: str, one_sided: np.ndarray, distances: str, after: int, sign: int) -> str:
    """Looks up the bucket of each distance.

    Args:
        one_sided: bucket of the distances 0, 1, ...; longer ones have the last.
        after: added to the buckets of keys after the query.
        sign: factor of the buckets of keys after the query.
    """
    longest = len(one_sided) - 1
    table = np.concatenate([sign * one_sided[:0:-1] + after, one_sided]).astype(np.int64)
    limit = graph.integer(longest)
    near = graph.node("Max", graph.node("Min", distances, limit), graph.integer(-longest))
    return graph.node("Gather", graph.array(name, table), graph.node("Add", near, limit))


def _relative_bias(graph: Graph, config: ModelConfig, distances: str) -> str:
    """Returns the bias of the scores [1, N, T, T] (see `bert.model.positions.relative_attention_bias`)."""
    count = require(config.relative_attention_buckets, "model.relative_attention_buckets")
    one_sided = buckets_by_distance(count, MAX_RELATIVE_DISTANCE)
    buckets = _by_distance(graph, "relative_buckets", one_sided, distances, after=count // 2, sign=1)
    table = graph.weight("bert/encoder/relative_attention_bias/embedding")
    by_head = graph.node("Transpose", graph.node("Gather", table, buckets), perm=[2, 0, 1])
    return graph.node("Unsqueeze", by_head, graph.constant([0]))


def _disentangled(graph: Graph, config: ModelConfig, distances: str, ids: str) -> Context:
    """Returns the embeddings of distances, and the buckets as indices of scores (see `Disentangled`)."""
    node, path = graph.node, "bert/encoder/relative_attention_"
    count = require(config.relative_attention_buckets, "model.relative_attention_buckets")
    is_linear = config.position_embedding_type == "deberta_v1"
    buckets = distances
    if not is_linear:
        one_sided = buckets_by_distance(count, config.max_position_embeddings - 1, round_up=True)
        buckets = _by_distance(graph, "distance_buckets", one_sided, distances, after=0, sign=-1)
    buckets = node("Add", buckets, graph.integer(count // 2))
    if is_linear:
        buckets = node("Max", node("Min", buckets, graph.integer(count - 1)), graph.integer(0))
    rows, heads = node("Shape", ids, start=0, end=1), graph.constant([config.num_attention_heads])
    shape = node("Concat", rows, heads, node("Shape", buckets), axis=0)
    vectors = graph.weight(f"{path}embeddings/embedding")
    if not is_linear:
        vectors = graph.norm(vectors, f"{path}norm", config.layer_norm_eps, config.norm_type)
    by_query, by_key = (node("Expand", each, shape) for each in (buckets, node("Transpose", buckets, perm=[1, 0])))
    return Context("", vectors=vectors, buckets=(by_query, by_key))


def _attention(graph: Graph, config: ModelConfig, x: str, context: Context, path: str) -> str:
    """Computes self-attention, [B, T, D] -> [B, T, D]. Empty rows attend equally to all positions."""
    node, size = graph.node, config.head_size
    if context.padding is not None:
        query, key, value = (graph.dense(x, f"{path}/{name}") for name in ("query", "key", "value"))
        mixed = graph.attention(query, key, value, context.padding, config.num_attention_heads)
        return graph.dense(mixed, f"{path}/output")
    shared = config.num_attention_heads // config.key_value_heads

    def project(x: str, name: str, order: list[int]) -> str:
        is_query = name.endswith("query")
        split = graph.constant([0, -1, config.num_attention_heads if is_query else config.key_value_heads, size])
        x = node("Reshape", graph.dense(x, f"{path}/{name}"), split)
        if config.query_key_norm and name != "value":
            x = graph.norm(x, f"{path}/{name}_norm", config.layer_norm_eps, config.norm_type)
        if shared > 1 and not is_query:  # each head is repeated for the heads of queries that it serves
            copies = node("Concat", *[node("Unsqueeze", x, graph.constant([3]))] * shared, axis=3)
            x = node("Reshape", copies, graph.constant([0, 0, config.num_attention_heads, size]))
        return node("Transpose", x, perm=order)

    num_products = 1 if context.buckets is None else config.num_products
    scale = graph.constant((num_products * (config.query_pre_attn_scalar or size)) ** -0.5)
    query, bias = project(x, "query", BY_HEAD), context.bias
    if context.rotation is None:
        key = project(x, "key", KEYS_BY_HEAD)
    else:
        query = _rotate(graph, config, query, context.rotation)
        key = node("Transpose", _rotate(graph, config, project(x, "key", BY_HEAD), context.rotation), perm=SWAPPED)
    query = node("Mul", query, scale)
    if context.buckets is not None and context.vectors is not None:
        vectors = node("Unsqueeze", context.vectors, graph.constant([0]))
        owner = "distance_" if config.position_embedding_type == "deberta_v1" else ""
        products: list[str] = []
        if config.disentangled_products != "position_to_content":
            by_query = node("MatMul", query, project(vectors, f"{owner}key", KEYS_BY_HEAD))
            products.append(node("GatherElements", by_query, context.buckets[0], axis=-1))
        if config.disentangled_products != "content_to_position":
            keys = node("Mul", node("Transpose", key, perm=SWAPPED), scale)
            by_key = node("MatMul", keys, project(vectors, f"{owner}query", KEYS_BY_HEAD))
            by_key = node("GatherElements", by_key, context.buckets[1], axis=-1)
            products.append(node("Transpose", by_key, perm=SWAPPED))
        bias = node("Add", *products) if len(products) == 2 else products[0]
    mixed = _mix(graph, config, query, key, project(x, "value", BY_HEAD), context.visible, bias)
    if context.has_keys is not None:
        mixed = node("Where", context.has_keys, mixed, graph.constant(0.0))
    if context.global_tokens is not None:
        flags, visible = context.global_tokens
        query = node("Mul", project(x, "global_query", BY_HEAD), scale)
        key, value = project(x, "global_key", KEYS_BY_HEAD), project(x, "global_value", BY_HEAD)
        own = _mix(graph, config, query, key, value, visible, None)
        mixed = node("Where", node("Unsqueeze", flags, graph.constant([1, 3])), own, mixed)
    joined = graph.constant([0, 0, config.num_attention_heads * size])
    return graph.dense(node("Reshape", node("Transpose", mixed, perm=BY_HEAD), joined), f"{path}/output")


def _mix(graph: Graph, config: ModelConfig, query: str, key: str, value: str, visible: str, bias: str | None) -> str:
    """Computes weighted sums of values from scaled queries [B, N, T, H] and keys [B, N, H, S]."""
    node = graph.node
    scores = node("MatMul", query, key)
    if config.attention_softcap is not None:
        scores = graph.soft_cap(scores, config.attention_softcap)
    if bias is not None:
        scores = node("Add", scores, bias)
    scores = node("Where", visible, scores, graph.constant(float(np.finfo(np.float32).min)))
    return node("MatMul", node("Softmax", scores, axis=-1), value)


def _rotate(graph: Graph, config: ModelConfig, x: str, rotation: tuple[str, str]) -> str:
    """Rotates queries or keys [B, N, T, H] (see `bert.model.positions.Rotation`)."""
    node, (cos, sin) = graph.node, rotation
    half, rest = config.rotated_size // 2, config.head_size - config.rotated_size
    sizes = [half, half, *([rest] if rest else [])]
    left, right, *others = graph.nodes("Split", x, graph.constant(sizes), outputs=len(sizes), axis=-1)
    first = node("Sub", node("Mul", left, cos), node("Mul", right, sin))
    second = node("Add", node("Mul", right, cos), node("Mul", left, sin))
    return node("Concat", first, second, *others, axis=-1)


def _pooler(graph: Graph, config: ModelConfig, x: str) -> str:
    """Applies the pooler, [..., D] -> [..., D]."""
    if config.pooler_type == "norm":
        return graph.standardized(x, config.hidden_size, config.layer_norm_eps)
    if config.pooler_type == "dense":
        return graph.activation(graph.dense(x, "bert/pooler"), config.pooler_act)
    x = graph.activation(graph.dense(x, "bert/pooler/dense"), config.hidden_act)
    return graph.norm(x, "bert/pooler/norm", config.layer_norm_eps, config.norm_type)


def _masked_lm(graph: Graph, config: ModelConfig, hidden: str) -> str:
    """Computes logits, [B, T, D] -> [B, T, V]. A tied decoder is the word embeddings, stored once."""
    x = hidden
    if config.prediction_transform:
        x = graph.activation(graph.dense(x, "predictions/transform"), config.hidden_act)
        x = graph.norm(x, "predictions/norm", config.layer_norm_eps, config.norm_type)
    table = graph.weight("bert/embeddings/word/embedding" if config.tie_word_embeddings else "predictions/decoder")
    logits = graph.node("MatMul", x, graph.node("Transpose", table, perm=[1, 0]))
    if config.prediction_bias:
        logits = graph.node("Add", logits, graph.weight("predictions/bias"))
    return logits if config.prediction_softcap is None else graph.soft_cap(logits, config.prediction_softcap)
