"""Parameter names and layouts in files of other libraries. Does not import JAX.

The names of each family are in `bert.interchange.families`. The names of this package's parameters are in
`bert.model.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.errors import UserError
from bert.model.names import (
    ARCHITECTURES,
    CLASSIFIER,
    CROSS,
    DECODER,
    DECODER_LAYER,
    DETECTION,
    ENCODER,
    LAYER,
    POOLER,
    PREDICTIONS,
    QA_OUTPUTS,
    SEQ_RELATIONSHIP,
    part_of,
)

ARCHITECTURES_WITH_LABELS = ("BertForSequenceClassification", "BertForTokenClassification")
"""Architectures with one output per label."""

TASKS = "lora_adaptations"
"""Key of config.json: names of tasks with adapters (`bert.interchange.task_adapters`)."""

EMBEDDING = "sentence_embedding"
"""Vector of a sentence encoder, as sentence-transformers names it: in its modules, and as the output of a graph."""

TOKEN_EMBEDDINGS = "token_embeddings"
"""Vectors of tokens, as sentence-transformers names them: in its modules, and as the output of a graph."""

TOKEN_MASK = "token_mask"
"""Output of a graph in which 1 marks the tokens of a document that have a vector."""

SIGNATURE_FILE = "signature.json"
"""File next to an exported graph: its inputs and outputs."""

GRAPH = "model.onnx"
"""File of an ONNX graph in its folder."""

ENCODER_MODULES = {
    "bert/embeddings/word": "table",
    "bert/embeddings/position": "table",
    "bert/embeddings/segment": "table",
    "bert/embeddings/norm": "norm",
    "bert/embeddings/projection": "dense",
    "bert/embeddings/query": "array",
    f"{LAYER}/attention/query": "dense",
    f"{LAYER}/attention/key": "dense",
    f"{LAYER}/attention/value": "dense",
    f"{LAYER}/attention/output": "dense",
    f"{LAYER}/attention/position": "dense",
    f"{LAYER}/attention/distance_query": "dense",
    f"{LAYER}/attention/distance_key": "dense",
    **{f"{LAYER}/attention/global_{part}": "dense" for part in ("query", "key", "value")},
    f"{LAYER}/attention/segment": "array",
    **{f"{LAYER}/attention/{part}_bias": "array" for part in ("content", "position", "segment")},
    f"{LAYER}/attention/query_norm": "norm",
    f"{LAYER}/attention/key_norm": "norm",
    f"{LAYER}/attention_norm": "norm",
    f"{LAYER}/attention_output_norm": "norm",
    f"{LAYER}/feed_forward_norm": "norm",
    f"{LAYER}/intermediate": "dense",
    f"{LAYER}/gate": "dense",
    f"{LAYER}/output": "dense",
    f"{LAYER}/output_norm": "norm",
    "bert/encoder/norm": "norm",
    "bert/encoder/convolution": "dense",
    "bert/encoder/convolution/norm": "norm",
    "bert/encoder/relative_attention_bias": "table",
    "bert/encoder/relative_attention_embeddings": "table",
    "bert/encoder/relative_attention_norm": "norm",
}
"""Modules of both encoders and decoders."""

MODULES = {
    **ENCODER_MODULES,
    **{path.replace(ENCODER, DECODER, 1): kind for path, kind in ENCODER_MODULES.items()},
    **{f"{DECODER_LAYER}/{CROSS}attention/{part}": "dense" for part in ("query", "key", "value", "output")},
    f"{DECODER_LAYER}/{CROSS}norm": "norm",
    POOLER: "dense",
    f"{POOLER}/dense": "dense",
    f"{POOLER}/norm": "norm",
    f"{PREDICTIONS}/transform": "dense",
    f"{PREDICTIONS}/norm": "norm",
    f"{PREDICTIONS}/bias": "array",
    f"{PREDICTIONS}/decoder": "array",
    SEQ_RELATIONSHIP: "output",
    f"{DETECTION}/dense": "dense",
    f"{DETECTION}/output": "dense",
    CLASSIFIER: "output",
    QA_OUTPUTS: "output",
}
"""Modules and single arrays of the model, and the kind of each, which is a key of `Arrays`."""


Arrays = Mapping[str, tuple[tuple[str, str, bool], ...]]
"""Arrays per kind of module: parameter suffix, file suffix, and whether the array is transposed in the file."""

HF_ARRAYS: Arrays = {
    "table": (("/embedding", ".weight", False),),
    "dense": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "output": (("/kernel", ".weight", True), ("/bias", ".bias", False)),
    "norm": (("/scale", ".weight", False), ("/bias", ".bias", False)),
    "array": (("", "", False),),
}
"""Arrays of PyTorch modules."""


class Tensor(NamedTuple):
    """One array of a file.

    Attributes:
        paths: paths of its parameters. Several parameters are concatenated along their last axis.
    """

    paths: tuple[str, ...]
    name: str
    transposed: bool

    @property
    def part(self) -> str:
        """The part of `ARCHITECTURES` to which it belongs; ``bert`` for the encoder."""
        return part_of(self.paths[0])

    def split(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Splits the file's array into float32 parameters by path. An array of the wrong shape is split unevenly."""
        array = array.T if self.transposed else array
        parts = [array] if len(self.paths) == 1 else np.array_split(np.atleast_1d(array), len(self.paths), axis=-1)
        return {path: np.ascontiguousarray(part, np.float32) for path, part in zip(self.paths, parts, strict=True)}

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Joins the parameters at ``paths`` into the file's array. Inverse of `split`."""
        parts = [np.asarray(arrays[path]) for path in self.paths]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return array.T if self.transposed else array


@dataclass(frozen=True)
class Names:
    """Names of a model's parameters in one file format, for reading and writing.

    Attributes:
        modules: names of the `MODULES` that the file may have. Modules with the same name are one module in the file,
            with concatenated arrays.
        heads: overrides per architecture, which is a key of `ARCHITECTURES`; None for modules that it lacks.
        arrays: how the file stores each kind of module.
    """

    modules: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=lambda: HF_ARRAYS)

    def tensors(self, layers: int, architecture: str, decoder_layers: int = 0) -> list[Tensor]:
        """Returns all arrays that a file may have for a model with these numbers of layers.

        Several architectures use the same name for their classifiers. The result has only the names of
        ``architecture``.
        """
        parts = {ENCODER, POOLER, PREDICTIONS, SEQ_RELATIONSHIP, DETECTION, *ARCHITECTURES[architecture]}
        modules: dict[str, list[str]] = {}
        for path, name in {**self.modules, **self.heads.get(architecture, {})}.items():
            if part_of(path) in parts and name is not None:
                modules.setdefault(name, []).append(path)
        return [
            Tensor(tuple(path.format(layer) + path_end for path in paths), name.format(layer) + name_end, transposed)
            for name, paths in modules.items()
            for path_end, name_end, transposed in self.arrays[MODULES[paths[0]]]
            for layer in range(
                1 if "{}" not in paths[0] else decoder_layers if part_of(paths[0]) == DECODER else layers
            )
        ]


def check_layers(layers: int, num_tensors: int, source: Path | str, config: Path | str) -> None:
    """Raises UserError if ``source`` has fewer arrays than the configuration has layers.

    Call this before listing the names of all layers, because a corrupt number may be in the millions.
    """
    if layers > num_tensors:
        raise UserError(
            f"{source} holds {num_tensors:,} tensors, too few for the {layers:,} layers of {config}: correct "
            "num_hidden_layers there, or copy both again"
        )
