"""Checkpoints of others, by a file for each model family (`families`). Imports no JAX by itself."""

from bert.errors import UserError, cut_at_word

FORMATS = ("hf", "stablehlo", "onnx")
"""What a model can be written as."""


class ExportError(UserError):
    """The exported model's outputs differ from the original's; the export is discarded."""


def first_line(error: Exception) -> str:
    """What an exception of another library says, short enough for a sentence."""
    return cut_at_word((str(error).strip().splitlines() or [type(error).__name__])[0])
