"""Reads and writes checkpoints of other libraries, with one module per model family. Does not import JAX."""

from bert.errors import UserError

FORMATS = ("hf", "stablehlo", "onnx", "peft")
"""Export formats."""


class ExportError(UserError):
    """The outputs of an exported model differ from the original. The export is deleted."""
