"""Checkpoints of other libraries to a model."""
