"""The module Dense of sentence-transformers: a linear layer and an activation over pooled vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import erf, expit

from bert.errors import UserError
from bert.interchange.tensor_files import read_tensors, write_tensors
from bert.messages import WarningText

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.GELU": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "torch.nn.modules.activation.Sigmoid": expit,
    "torch.nn.modules.activation.SiLU": lambda x: x * expit(x),
}
"""The classes of PyTorch that ``activation_function`` may name."""

FEATURES = "sentence_embedding"
"""The name of the vector that the modules read and write."""


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense layer: activation(x W + b).

    Attributes:
        kernel: W [in_features, out_features] float32.
        bias: b [out_features] float32; None for none.
        activation: a key of `ACTIVATIONS`.
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
        return ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)

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
    activation = content.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"{file}: activation_function is {str(activation)[:80]!r}: one of {known} is read")
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
