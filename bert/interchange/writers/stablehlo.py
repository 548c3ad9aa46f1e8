"""Exports models as StableHLO functions, serialized by `jax.export`, with the weights in a separate file.

The weights are an argument of the function and not constants. A 45 MB model then has a graph of 70 KB that loads
immediately, where XLA would otherwise parse and fold 45 MB at every compilation. The weights can also be put on a
device once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export as jax_export
from safetensors.numpy import load_file

from bert.errors import Log, UserError
from bert.files import atomic_directory
from bert.interchange.bundle import ModelBundle
from bert.interchange.tensor_files import write_tensors
from bert.interchange.writers.signature import (
    BATCH,
    CHOICES,
    LENGTH,
    TARGET_LENGTH,
    Signature,
    make_forward,
    parameters,
    resolve_shape,
    sample_inputs,
    signature,
    text_usage,
    verify_outputs,
    write_metadata_files,
)

PLATFORMS = ("cpu", "cuda", "tpu")
GRAPH, WEIGHTS = "model.jaxexport", "model.safetensors"


def export(
    model: ModelBundle,
    out: Path,
    log: Log,
    *,
    length: int | None = None,
    dynamic_length: bool = False,
) -> None:
    """Writes ``out`` atomically: graph, weights, tokenizer files, signature.json and README.md.

    Args:
        length: T of every input; None for the model's maximum.
        dynamic_length: leave T free, up to the model's maximum.

    Raises:
        UserError: the length is not supported, weights are missing, or ``out`` exists.
        ExportError: the outputs of the graph, when read back, differ.
    """
    positions = model.config.max_position_embeddings
    if length is not None and dynamic_length:
        raise UserError(f"length is {length} and dynamic_length is set: choose one of the two")
    if length is not None and not 1 <= length <= positions:
        raise UserError(f"length is {length}, and the model reads 1 to {positions} tokens: choose one of these")
    full = length or positions
    ports = signature(model, None if dynamic_length else full)
    with atomic_directory(out) as draft:
        (draft / GRAPH).write_bytes(serialized(model, ports))
        write_tensors(draft / WEIGHTS, parameters(model))
        os.chmod(draft / WEIGHTS, (draft / GRAPH).stat().st_mode)  # the library restricts its file to the owner
        write_metadata_files(model, draft, ports, "int32", _usage(model, ports))
        graph = jax.jit(jax_export.deserialize(bytearray((draft / GRAPH).read_bytes())).call)
        weights = load_file(draft / WEIGHTS)
        sizes = ((1, full), (3, (full + 1) // 2 if dynamic_length else full))
        samples = (sample_inputs(model.config, ports.inputs, *size) for size in sizes)
        log(verify_outputs(model, samples, lambda inputs: jax.device_get(graph(weights, inputs))))
    log(f"{out} holds {', '.join(sorted(path.name for path in out.iterdir()))}")


def serialized(model: ModelBundle, ports: Signature) -> bytes:
    """Serializes the function from (weights by name, inputs by name) to outputs by name, for all `PLATFORMS`."""
    named = {dim for shape in ports.inputs.values() for dim in shape if isinstance(dim, str)}
    free = [dim for dim in (BATCH, CHOICES, LENGTH, TARGET_LENGTH) if dim in named]
    positions = model.config.max_position_embeddings
    bounds = [f"{dim} <= {positions}" for dim in free if dim in (LENGTH, TARGET_LENGTH)]
    scope = jax_export.SymbolicScope(bounds)
    sizes = dict(zip(free, jax_export.symbolic_shape(", ".join(free), scope=scope), strict=True))
    inputs = {
        name: jax.ShapeDtypeStruct(resolve_shape(shape, sizes), jnp.int32) for name, shape in ports.inputs.items()
    }
    weights = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in parameters(model).items()}
    with _without_source_files():
        exported = jax_export.export(jax.jit(make_forward(model)), platforms=PLATFORMS)(weights, inputs)
    return bytes(exported.serialize())


@contextlib.contextmanager
def _without_source_files() -> Iterator[None]:
    """Omits the paths of source files on this machine, which JAX records for every operation."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _usage(model: ModelBundle, ports: Signature) -> list[str]:
    """Returns the paragraphs of README.md that show how to call it."""
    positions = model.config.max_position_embeddings
    tokens = ports.inputs["input_ids"][-1]
    sizes = {BATCH: 1, CHOICES: 2, LENGTH: min(8, positions)}
    shape = resolve_shape(ports.inputs["input_ids"], sizes)
    free = f"any up to {positions}" if tokens == LENGTH else f"{tokens}: pad the inputs to it at their end"
    lines = [
        "A function for CPUs, NVIDIA's GPUs and TPUs. It needs `pip install jax flatbuffers safetensors`, for texts "
        "also tokenizers:",
        "```python\n"
        "import jax, jax.export, numpy as np\n"
        "from safetensors.numpy import load_file\n"
        f'model = jax.jit(jax.export.deserialize(open("{GRAPH}", "rb").read()).call)\n'
        f"inputs = {{name: np.ones({shape}, np.int32) for name in {json.dumps(list(ports.inputs))}}}\n"
        f'outputs = model(load_file("{WEIGHTS}"), inputs)\n'
        "```",
        f"The number of rows is free, and compiled once for each; the number of tokens is {free}. "
        "`jax.device_put(load_file(...))` keeps the weights on the device between calls.",
    ]
    if "decoder_input_ids" in ports.inputs:
        lines.append(
            "`logits[:, t]` belong to the token after the first t + 1 of `decoder_input_ids`, which begin with "
            "`decoder_start_token_id` of signature.json. To generate, write the most likely token behind them and call "
            "it again, until that is `eos_token_id`. Tokens behind position t do not change `logits[:, t]`."
        )
    elif CHOICES not in ports.inputs["input_ids"]:
        length = None if isinstance(tokens, str) else tokens
        lines += text_usage(model, "int32", f'model(load_file("{WEIGHTS}"), inputs)', length)
    lines.append(
        f"Written with JAX {jax.__version__}; newer versions read it for at least six months after that one's release."
    )
    return lines
