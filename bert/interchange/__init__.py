"""Checkpoints of others, by a file for each model family (`families`). Imports no JAX by itself."""

from bert.errors import UserError

FORMATS = ("hf", "stablehlo", "onnx")
"""What a model can be written as."""


class ExportError(UserError):
    """The exported model's outputs differ from the original's; the export is discarded."""
