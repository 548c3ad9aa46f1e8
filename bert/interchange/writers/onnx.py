"""Exports models as ONNX graphs.

Graphs are built from the few operators of BERT and not traced, so batch size and length are free, and weights are
stored unchanged. They use operator set 17 (LayerNormalization), which servers from 2022 on support.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError, first_line
from bert.files import atomic_directory, write_atomic
from bert.interchange import ExportError
from bert.interchange.bundle import ModelBundle
from bert.interchange.writers.hf_files import published_config
from bert.interchange.writers.signature import (
    CHOICES,
    Signature,
    check_no_dense,
    parameters,
    sample_inputs,
    signature,
    text_usage,
    verify_outputs,
    write_metadata_files,
)
from bert.model import names
from bert.model.positions import sinusoidal_position_table, step_embeddings

if TYPE_CHECKING:
    import onnx
    import onnxruntime


OPSET, IR_VERSION = 17, 8
GRAPH, WEIGHTS = "model.onnx", "model.onnx_data"
FLOAT_FOLDER = "float"
"""Subfolder of the float graph until the int8 graph made from it is accepted."""
LARGEST = 2**31 - 2**24
"""Maximum bytes of weights inside the graph's file, whose format is limited to 2 GiB. More are stored separately."""

CALL = "dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs)))"
"""Python expression for the graph's outputs by name."""

LACKS = (
    *("causal", "norm_type", "norm_bias", "use_bias", "attention_window", "gated_feed_forward", "first_layer_norm"),
    *("pooler_type", "pooler_input", "relative_attention_buckets"),
)
"""Keys of `ModelConfig` of which the graph supports only the default. It also lacks rotary positions."""


def export(
    model: ModelBundle, out: Path, log: Callable[[str], None], *, accept: Callable[[Path, Path], str] | None = None
) -> None:
    """Writes ``out`` atomically: the graph, config.json, tokenizer files, signature.json and README.md.

    Args:
        accept: if given, weights are written in 8 bits. It is called with the files of the float and the int8 graph,
            compares them, and returns a paragraph for README.md or raises ExportError.

    Raises:
        UserError: the extra ``onnx`` is not installed, weights are missing, or ``out`` exists.
        ExportError: ONNX Runtime does not load the graph, or its outputs differ.
    """
    check_exportable(model)
    ports = signature(model)
    with atomic_directory(out) as draft:
        folder = draft if accept is None else draft / FLOAT_FOLDER
        folder.mkdir(exist_ok=True)
        _write_verified(model, folder / GRAPH, ports, log)
        text = _usage(model, ports)
        if accept is not None:
            write_int8(folder / GRAPH, draft / GRAPH)
            comparison = accept(folder / GRAPH, draft / GRAPH)
            shutil.rmtree(folder)
            log(comparison)
            text += ["Its weights have 8 bits. Next to float weights, on the machine of the export:", comparison]
        write_metadata_files(model, draft, ports, "int64", text)
        config = json.dumps(published_config(model), indent=2, ensure_ascii=False)
        write_atomic(draft / "config.json", config + "\n")
    log(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")


def check_exportable(model: ModelBundle) -> None:
    """Raises UserError if the model has no graph, or if the extra ``onnx`` is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'bert-jax[onnx]'") from None
    check_no_dense(model)
    if names.has_decoder(model.architecture):
        raise UserError(f"{model.source} is an encoder-decoder, which the ONNX graph lacks: use format stablehlo")
    if (key := lacking_key(model.config)) is not None:
        value = str(getattr(model.config, key)).lower()
        raise UserError(f"{model.source} has model.{key} {value}, which the ONNX graph lacks: use format stablehlo")


def _write_verified(model: ModelBundle, file: Path, ports: Signature, log: Callable[[str], None]) -> None:
    """Writes the float graph and compares its outputs in ONNX Runtime. Raises ExportError."""
    import onnx

    large = sum(array.nbytes for array in parameters(model).values()) > LARGEST
    onnx.save_model(build(model), file, save_as_external_data=large, location=WEIGHTS if large else None)
    session = _session(model, file)
    output_names = [output.name for output in session.get_outputs()]
    positions = model.config.max_position_embeddings
    sizes = ((1, positions), (3, (positions + 1) // 2))
    samples = (sample_inputs(model.config, ports.inputs, *size, np.int64) for size in sizes)
    log(verify_outputs(model, samples, lambda inputs: dict(zip(output_names, session.run(None, inputs), strict=True))))


def write_int8(source: Path, target: Path) -> None:
    """Writes the float graph ``source`` with 8-bit weights, with ONNX Runtime's dynamic quantization.

    Each column of a matrix has a separate scale. Weights use 7 bits, because sums of 8-bit products overflow on CPUs
    without VNNI, which would change the outputs.
    """
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source.with_name("prepared.onnx")
    large = (source.parent / WEIGHTS).exists()
    options = {"save_as_external_data": large, "external_data_location": f"{prepared.name}_data" if large else None}
    quant_pre_process(source, prepared, skip_optimization=True, skip_symbolic_shape=True, **options)
    quantize_dynamic(prepared, target, per_channel=True, reduce_range=True, use_external_data_format=large)


def lacking_key(config: ModelConfig) -> str | None:
    """Returns a key whose value the graph does not support; None if all are supported."""
    if config.position_embedding_type == "rotary":
        return "position_embedding_type"
    poolers = ("pooler_type", "pooler_input") if config.pooler_type == "norm" else ()
    lacks = (key for key in LACKS if key not in poolers)
    return next((key for key in lacks if getattr(config, key) != getattr(ModelConfig, key)), None)


def _session(model: ModelBundle, file: Path) -> onnxruntime.InferenceSession:
    """Checks and loads the graph. Raises ExportError."""
    import onnx
    import onnxruntime

    try:
        onnx.checker.check_model(file, full_check=True)
        return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # the two libraries raise different exceptions
        raise ExportError(f"{model.source}: its graph cannot be run ({first_line(error)}): not exported") from error


def build(model: ModelBundle) -> onnx.ModelProto:
    """Returns the graph with its weights included, regardless of size."""
    graph = Graph(parameters(model))
    ports = signature(model)
    results = _outputs(graph, model, ports)
    for name, result in zip(ports.outputs, results, strict=True):
        graph.node("Identity", result, output=name)
    return graph.proto(ports)


class Graph:
    """Nodes in the order of their creation, and the constants that they read."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self._weights = weights
        self._constants: dict[str, np.ndarray] = {}
        self._nodes: list[onnx.NodeProto] = []

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Adds an operator and returns the name of its only output."""
        from onnx import helper

        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output or name], name=name, **attributes))
        return output or name

    def weight(self, path: str) -> str:
        """Adds a parameter and returns its name."""
        self._constants[path] = self._weights[path]
        return path

    def array(self, name: str, array: np.ndarray) -> str:
        """Adds a constant with a new name and returns the name."""
        self._constants[name] = array
        return name

    def constant(self, value: float | list[int]) -> str:
        """Adds a float32 scalar or an int64 vector [n] and returns its name."""
        array = np.asarray(value, np.int64 if isinstance(value, list) else np.float32)
        name = f"constant_{array.dtype}_{'_'.join(map(str, array.reshape(-1)))}"
        self._constants[name] = array
        return name

    def dense(self, x: str, path: str) -> str:
        """Applies the dense layer at ``path``, with kernel [D, F] and bias [F]: [..., D] -> [..., F]."""
        product = self.node("MatMul", x, self.weight(f"{path}/kernel"))
        return self.node("Add", product, self.weight(f"{path}/bias"))

    def norm(self, x: str, path: str, epsilon: float) -> str:
        """Applies LayerNorm over the last axis."""
        scale, bias = self.weight(f"{path}/scale"), self.weight(f"{path}/bias")
        return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=epsilon)

    def standardized(self, x: str, width: int, epsilon: float) -> str:
        """Applies LayerNorm without parameters over the last axis of size ``width``."""
        scale = self.array("ones", np.ones(width, np.float32))
        return self.node("LayerNormalization", x, scale, axis=-1, epsilon=epsilon)

    def activation(self, x: str, name: str) -> str:
        """Applies a `bert.config.model.Activation`. Both forms of gelu are written out, because opset 17 has none."""
        if name == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        if name in ("relu", "elu", "tanh"):
            return self.node(name.capitalize(), x)
        if name == "gelu":
            inner = self.node("Erf", self.node("Div", x, self.constant(math.sqrt(2))))
        else:
            cube = self.node("Mul", x, self.node("Mul", x, x))
            total = self.node("Add", x, self.node("Mul", cube, self.constant(0.044715)))
            inner = self.node("Tanh", self.node("Mul", total, self.constant(math.sqrt(2 / math.pi))))
        gate = self.node("Add", inner, self.constant(1.0))
        return self.node("Mul", self.node("Mul", x, gate), self.constant(0.5))

    def first_token(self, x: str) -> str:
        """Selects the first token, [B, T, D] -> [B, D]."""
        self._constants["first"] = np.asarray(0, np.int64)
        return self.node("Gather", x, "first", axis=1)

    def proto(self, ports: Signature) -> onnx.ModelProto:
        """Returns the graph as a protocol buffer."""
        from onnx import TensorProto, helper, numpy_helper

        graph = helper.make_graph(
            self._nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in ports.inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in self._constants.items()],
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="bert-jax")


def _outputs(graph: Graph, model: ModelBundle, ports: Signature) -> list[str]:
    """Returns the graph's outputs in the order of its signature."""
    config, architecture = model.config, model.architecture
    inputs = {name: name for name in ports.inputs}
    if CHOICES in ports.inputs["input_ids"]:  # each choice is a row: [B, C, T] -> [B * C, T]
        length = graph.node("Shape", "input_ids", start=2)
        rows = graph.node("Concat", graph.constant([-1]), length, axis=0)
        inputs = {name: graph.node("Reshape", name, rows) for name in inputs}
    hidden = _encoder(graph, config, inputs)

    def pooled() -> str:
        if config.pooler_type == "norm":
            is_first, mask = config.pooler_input == "first", inputs["attention_mask"]
            read = graph.first_token(hidden) if is_first else _mean(graph, hidden, mask)
            return graph.standardized(read, config.hidden_size, config.layer_norm_eps)
        return graph.activation(graph.dense(graph.first_token(hidden), "bert/pooler"), config.pooler_act)

    if architecture == "Bert":
        return [hidden, *([pooled()] if "pooler_output" in ports.outputs else [])]
    if architecture == "BertForPreTraining":
        return [_masked_lm(graph, config, hidden), graph.dense(pooled(), "seq_relationship")]
    if architecture == "BertForMaskedLM":
        return [_masked_lm(graph, config, hidden)]
    if architecture == "BertForNextSentencePrediction":
        return [graph.dense(pooled(), "seq_relationship")]
    if architecture == "BertForReplacedTokenDetection":
        inner = graph.activation(graph.dense(hidden, "discriminator_predictions/dense"), config.hidden_act)
        return [graph.node("Squeeze", graph.dense(inner, "discriminator_predictions/output"), graph.constant([-1]))]
    if architecture == "BertForTokenClassification":
        return [graph.dense(hidden, "classifier")]
    if architecture == "BertForQuestionAnswering":
        logits, last = graph.dense(hidden, "qa_outputs"), graph.constant([2])
        return [
            graph.node("Squeeze", graph.node("Slice", logits, graph.constant([i]), graph.constant([i + 1]), last), last)
            for i in (0, 1)
        ]
    logits = graph.dense(pooled(), "classifier")
    if architecture == "BertForMultipleChoice":  # [B * C, 1] -> [B, C]
        choices = graph.node("Shape", "input_ids", start=1, end=2)
        logits = graph.node("Reshape", logits, graph.node("Concat", graph.constant([-1]), choices, axis=0))
    return [logits]


def _encoder(graph: Graph, config: ModelConfig, inputs: dict[str, str]) -> str:
    """Maps ids, mask and segments [B, T] to hidden states [B, T, D]. Rows that are too long fail at run time."""
    from onnx import TensorProto

    node, path = graph.node, "bert/embeddings"

    def before(x: str, path: str) -> str:
        return graph.norm(x, path, config.layer_norm_eps) if config.pre_layer_norm else x

    def after(x: str, path: str) -> str:
        return x if config.pre_layer_norm else graph.norm(x, path, config.layer_norm_eps)

    ids = inputs["input_ids"]
    first, axis = graph.constant([config.position_offset]), graph.constant([0])
    end = node("Add", node("Shape", ids, start=1), first)
    x = node("Gather", graph.weight(f"{path}/word/embedding"), ids)
    if config.scale_embeddings:
        x = node("Mul", x, graph.constant(math.sqrt(config.embedding_width)))
    if config.position_embedding_type == "learned":
        x = node("Add", x, node("Slice", graph.weight(f"{path}/position/embedding"), first, end, axis))
    elif config.position_embedding_type == "sinusoidal":
        sinusoids = graph.array("sinusoids", np.asarray(sinusoidal_position_table(config)))
        x = node("Add", x, node("Slice", sinusoids, first, end, axis))
    if config.type_vocab_size:
        segments = graph.weight(f"{path}/segment/embedding")  # the only row, if there is no input of segments
        if "token_type_ids" in inputs:
            segments = node("Gather", segments, inputs["token_type_ids"])
        x = node("Add", x, segments)
    if config.embedding_norm:
        x = graph.norm(x, f"{path}/norm", config.layer_norm_eps)
    if config.embedding_width != config.hidden_size:
        x = graph.dense(x, f"{path}/projection")
    visible = node("Unsqueeze", node("Cast", inputs["attention_mask"], to=TensorProto.BOOL), graph.constant([1, 2]))
    for index in range(config.num_hidden_layers):
        layer = f"bert/encoder/layer_{config.group_of(index)}"
        if config.step_embedding:
            x = node("Add", x, graph.array(f"step_{index}", np.asarray(step_embeddings(config)[index])))
        read = before(x, f"{layer}/attention_norm")
        attended = _attention(graph, config, read, visible, f"{layer}/attention")
        x = after(node("Add", x, attended), f"{layer}/attention_norm")
        read = before(x, f"{layer}/output_norm")
        inner = graph.activation(graph.dense(read, f"{layer}/intermediate"), config.hidden_act)
        x = after(node("Add", x, graph.dense(inner, f"{layer}/output")), f"{layer}/output_norm")
    return before(x, "bert/encoder/norm")


def _mean(graph: Graph, hidden: str, mask: str) -> str:
    """Returns the mean of the tokens of each row, [B, T, D] and mask [B, T] -> [B, D]; 0 for empty rows."""
    from onnx import TensorProto

    node, tokens = graph.node, graph.constant([1])
    weights = node("Unsqueeze", node("Cast", mask, to=TensorProto.FLOAT), graph.constant([2]))
    total = node("ReduceSum", node("Mul", hidden, weights), tokens, keepdims=0)
    return node("Div", total, node("Max", node("ReduceSum", weights, tokens, keepdims=0), graph.constant(1.0)))


def _attention(graph: Graph, config: ModelConfig, x: str, visible: str, path: str) -> str:
    """Attends with a mask [B, 1, 1, S], [B, T, D] -> [B, T, D]. Empty rows attend equally to all positions."""
    node, heads = graph.node, config.num_attention_heads
    split = graph.constant([0, 0, heads, config.hidden_size // heads])

    def project(name: str, order: list[int]) -> str:
        return node("Transpose", node("Reshape", graph.dense(x, f"{path}/{name}"), split), perm=order)

    scale = graph.constant((config.hidden_size // heads) ** -0.5)
    query, key = node("Mul", project("query", [0, 2, 1, 3]), scale), project("key", [0, 2, 3, 1])
    scores = node("Where", visible, node("MatMul", query, key), graph.constant(float(np.finfo(np.float32).min)))
    mixed = node("MatMul", node("Softmax", scores, axis=-1), project("value", [0, 2, 1, 3]))
    joined = graph.constant([0, 0, config.hidden_size])
    return graph.dense(node("Reshape", node("Transpose", mixed, perm=[0, 2, 1, 3]), joined), f"{path}/output")


def _masked_lm(graph: Graph, config: ModelConfig, hidden: str) -> str:
    """Computes logits, [B, T, D] -> [B, T, V]. A tied decoder is the word embeddings, stored once."""
    x = hidden
    if config.prediction_transform:
        x = graph.activation(graph.dense(x, "predictions/transform"), config.hidden_act)
        x = graph.norm(x, "predictions/norm", config.layer_norm_eps)
    table = graph.weight("bert/embeddings/word/embedding" if config.tie_word_embeddings else "predictions/decoder")
    logits = graph.node("MatMul", x, graph.node("Transpose", table, perm=[1, 0]))
    return graph.node("Add", logits, graph.weight("predictions/bias")) if config.prediction_bias else logits


def _usage(model: ModelBundle, ports: Signature) -> list[str]:
    """Returns the paragraphs of README.md that show how to run the graph."""
    shape = tuple(2 if dim == CHOICES else 1 if i == 0 else 8 for i, dim in enumerate(ports.inputs["input_ids"]))
    return [
        f"An ONNX graph of operator set {OPSET}; rows and tokens may be any number, tokens up to max_length of "
        "signature.json:",
        "```python\n"
        "import numpy as np, onnxruntime\n"
        f'session = onnxruntime.InferenceSession("{GRAPH}")\n'
        f"inputs = {{name: np.ones({shape}, np.int64) for name in {json.dumps(list(ports.inputs))}}}\n"
        "outputs = session.run(None, inputs)\n"
        "```",
        *(() if CHOICES in ports.inputs["input_ids"] else text_usage(model, "int64", CALL)),
    ]
