"""Reads models from checkpoints of other libraries."""
