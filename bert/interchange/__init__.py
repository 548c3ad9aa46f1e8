"""Checkpoints of others: one table of names (`names`), read in both directions. Imports no JAX by itself."""

FORMATS = ("hf", "stablehlo", "onnx")
"""What a model can be written as."""
