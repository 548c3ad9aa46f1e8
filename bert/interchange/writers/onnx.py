"""Exports models as ONNX graphs.

Graphs are built from operators and not traced, so batch size and length are free, and weights are stored unchanged.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert.errors import Log, UserError, first_line
from bert.files import atomic_directory, write_atomic
from bert.interchange import ExportError
from bert.interchange.bundle import ModelBundle
from bert.interchange.names import GRAPH
from bert.interchange.sentence_transformers.writer import write_pooling_files
from bert.interchange.writers.hf_files import published_config
from bert.interchange.writers.onnx_graph import OPSET
from bert.interchange.writers.onnx_layers import build
from bert.interchange.writers.signature import (
    CHOICES,
    Signature,
    parameters,
    sample_inputs,
    signature,
    text_usage,
    verify_outputs,
    write_metadata_files,
)
from bert.model import names

if TYPE_CHECKING:
    import onnxruntime


WEIGHTS = "model.onnx_data"
FLOAT_FOLDER = "float"
"""Subfolder of the float graph until the int8 graph made from it is accepted."""
LARGEST = 2**31 - 2**24
"""Maximum bytes of weights inside the graph's file, whose format is limited to 2 GiB. More are stored separately."""

CALL = "dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs)))"
"""Python expression for the graph's outputs by name."""


def export(model: ModelBundle, out: Path, log: Log, *, accept: Callable[[Path, Path], str] | None = None) -> None:
    """Writes ``out`` atomically: the graph, config.json, tokenizer files, signature.json and README.md.

    A sentence encoder also has the files of sentence-transformers, which text-embeddings-inference requires.

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
        if model.graph_pooling is not None:
            write_pooling_files(model.graph_pooling, model.config, draft)
    log(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")


def check_exportable(model: ModelBundle) -> None:
    """Raises UserError if the model has no graph, or if the extra ``onnx`` is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'bert-jax[onnx]'") from None
    if names.has_decoder(model.architecture):
        raise UserError(f"{model.source} is an encoder-decoder, which the ONNX graph lacks: use format stablehlo")
    config = model.config
    for key, lacks in (("position_embedding_type", ("transformer_xl",)), ("halting", (config.halting,))):
        if (value := getattr(config, key)) is not None and value in lacks:
            raise UserError(f"{model.source} has model.{key} {value}, which the ONNX graph lacks: use format stablehlo")


def write_graph(model: ModelBundle, folder: Path, log: Log, *, quantize: bool) -> None:
    """Writes only the graph for ONNX Runtime into a folder, after its outputs were compared.

    Args:
        quantize: write weights of 8 bits.

    Raises:
        ExportError: ONNX Runtime does not load the graph, or its outputs differ.
    """
    if not quantize:
        _write_verified(model, folder / GRAPH, signature(model), log, fused=True)
        return
    with tempfile.TemporaryDirectory(dir=folder) as floats:
        _write_verified(model, Path(floats, GRAPH), signature(model), log, fused=True)
        write_int8(Path(floats, GRAPH), folder / GRAPH)


def _write_verified(model: ModelBundle, file: Path, ports: Signature, log: Log, fused: bool = False) -> None:
    """Writes the float graph and compares its outputs in ONNX Runtime. Raises ExportError."""
    import onnx

    large = sum(array.nbytes for array in parameters(model).values()) > LARGEST
    onnx.save_model(build(model, fused), file, save_as_external_data=large, location=WEIGHTS if large else None)
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
    from onnx import TensorProto
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source.with_name("prepared.onnx")
    large = (source.parent / WEIGHTS).exists()
    options = {"save_as_external_data": large, "external_data_location": f"{prepared.name}_data" if large else None}
    quant_pre_process(source, prepared, skip_optimization=True, skip_symbolic_shape=True, **options)
    floats = {"DefaultTensorType": TensorProto.FLOAT}  # shapes behind ONNX Runtime's own operators are not inferred
    quantize_dynamic(
        prepared, target, per_channel=True, reduce_range=True, use_external_data_format=large, extra_options=floats
    )


def _session(model: ModelBundle, file: Path) -> onnxruntime.InferenceSession:
    """Checks and loads the graph. Raises ExportError."""
    import onnx
    import onnxruntime

    try:
        onnx.checker.check_model(file, full_check=True)
        return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # the two libraries raise different exceptions
        raise ExportError(f"{model.source}: its graph cannot be run ({first_line(error)}): not exported") from error


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
