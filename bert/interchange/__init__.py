"""Checkpoints of others: one table of names (`names`), read in both directions. Imports no JAX by itself."""

from bert.errors import UserError

FORMATS = ("hf", "stablehlo", "onnx")
"""What a model can be written as."""


class ExportError(UserError):
    """What was written does not answer as the model does: it is thrown away, and the command says so."""


def first_line(error: Exception) -> str:
    """What an exception of another library says, short enough for a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
