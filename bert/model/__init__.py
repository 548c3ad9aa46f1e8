"""Flax modules: attention, layers, encoder, heads, decoders. Independent of tasks and training."""
