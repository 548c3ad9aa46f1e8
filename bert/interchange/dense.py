"""The module Dense of sentence-transformers: a linear layer and an activation over pooled vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import erf, expit

from bert.errors import UserError, WarningText, require
from bert.files import read_json
from bert.interchange.tensor_files import read_tensors, write_tensors

Activation = Callable[[np.ndarray], np.ndarray]

ACTIVATIONS: dict[str, Activation] = {
    "Tanh": np.tanh,
    "Identity": lambda x: x,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "Sigmoid": expit,
    "SiLU": lambda x: x * expit(x),
}
"""The classes of ``torch.nn`` that are read as activations."""

TANH = "torch.nn.modules.activation.Tanh"

CROSS_ENCODER = "sentence_transformers"
"""The key of config.json under which cross-encoders keep their settings."""

FEATURES = "sentence_embedding"
"""The name of the vector that the modules read and write."""


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense layer: activation(x W + b).

    Attributes:
        kernel: W [in_features, out_features] float32.
        bias: b [out_features] float32; None for none.
        activation: the class of PyTorch, by its full name.
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str

    @property
    def in_features(self) -> int:
        return int(self.kernel.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.kernel.shape[1])

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """[B, in_features] -> [B, out_features]."""
        product = vectors @ self.kernel
        activation = require(find_activation(self.activation), "an activation that is read")
        return activation(product if self.bias is None else product + self.bias)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[Any, ...]:
        bias = None if self.bias is None else self.bias.tobytes()
        return self.kernel.shape, self.kernel.tobytes(), bias, self.activation

    @property
    def config(self) -> dict[str, Any]:
        """The content of the module's config.json."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "activation_function": self.activation,
        }

    def write_weights(self, folder: Path) -> None:
        """Writes the module's model.safetensors."""
        bias = {} if self.bias is None else {"linear.bias": self.bias}
        write_tensors(folder / "model.safetensors", {"linear.weight": self.kernel.T, **bias})


def read_dense(folder: Path, content: dict[str, Any], say: Callable[[str], None]) -> Dense:
    """Reads the weights of a module's folder.

    Args:
        folder: of the module.
        content: of its config.json.
        say: called with keys that are not applied.

    Raises:
        UserError: an activation or a setting that `Dense` does not compute, or weights of another form.
    """
    file = folder / "config.json"
    activation = content.get("activation_function", TANH)
    if find_activation(activation) is None:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{file}: activation_function is {str(activation)[:80]!r}: one of torch.nn's {known} is read")
    if content.get("use_residual") not in (None, False):
        raise UserError(f"{file}: use_residual is {content['use_residual']!r}, and only false is read")
    check_names(file, content)
    known_keys = ("in_features", "out_features", "bias", "activation_function", "use_residual", *NAMES)
    warn_unknown(file, content, known_keys, say)
    tensors, source = read_tensors(folder)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or set(tensors) - {"linear.weight", "linear.bias"}:
        raise UserError(
            f"{source} holds {', '.join(sorted(tensors))}: a Dense module has linear.weight and linear.bias"
        )
    shape = (content.get("out_features"), content.get("in_features"))
    if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        raise UserError(f"{source}: linear.weight is {list(weight.shape)}, but config.json makes it {list(shape)}")
    if bool(content.get("bias", True)) != (bias is not None):
        raise UserError(f"{source}: linear.bias does not fit bias {content.get('bias', True)} in config.json")
    kernel = np.ascontiguousarray(weight.T.astype(np.float32))
    return Dense(kernel, None if bias is None else bias.astype(np.float32), activation)


def find_activation(name: Any) -> Activation | None:
    """The activation of a class of ``torch.nn`` by its full name; None for any other name."""
    return ACTIVATIONS.get(name.rsplit(".", 1)[-1]) if isinstance(name, str) and name.startswith("torch.nn.") else None


def read_score_activation(
    folder: Path, content: Mapping[str, Any], settings: str, num_labels: int, say: Callable[[str], None]
) -> str | None:
    """The class of PyTorch that a cross-encoder of sentence-transformers applies to its score; None for none.

    Args:
        folder: of the model.
        content: of its config.json.
        settings: name of the file with the settings of sentence-transformers.
        num_labels: outputs of the model. The activation is read of a single one.
        say: called with an activation that is not applied.
    """
    file, declared = folder / "config.json", content.get("sbert_ce_default_activation_function")
    if isinstance(nested := content.get(CROSS_ENCODER), dict):
        declared = nested.get("activation_fn", declared)
    given = read_json(folder / settings) if (folder / settings).is_file() else {}
    if isinstance(given, dict) and given.get("model_type") == "CrossEncoder" and given.get("activation_fn"):
        file, declared = folder / settings, given["activation_fn"]
    if declared is None or str(declared).endswith(".Identity"):
        return None
    if num_labels == 1 and find_activation(declared) is not None:
        return str(declared)
    say(WarningText(f"{file}: activation_fn is {str(declared)[:80]}, which is not applied"))
    return None


NAMES = ("module_input_name", "module_output_name")


def check_names(file: Path, content: dict[str, Any]) -> None:
    """Raises UserError if a module reads or writes something else than the pooled vector."""
    for key in NAMES:
        if content.get(key) not in (None, FEATURES):
            raise UserError(f"{file}: {key} is {str(content[key])[:80]!r}, and only {FEATURES} is read")


def warn_unknown(file: Path, content: dict[str, Any], known: Collection[str], say: Callable[[str], None]) -> None:
    """Reports keys of a file that have no effect here."""
    if unknown := sorted(content.keys() - set(known)):
        say(WarningText(f"not loaded from {file}: {', '.join(unknown)}"))
