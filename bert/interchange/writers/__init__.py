"""Writes models in formats of other libraries."""
