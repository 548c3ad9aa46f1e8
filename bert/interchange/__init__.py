"""Reads and writes checkpoints of other libraries, with one file per model family. Does not import JAX by itself."""

from bert.errors import UserError

FORMATS = ("hf", "stablehlo", "onnx")
"""Export formats."""


class ExportError(UserError):
    """The exported model's outputs differ from the original's; the export is discarded."""
