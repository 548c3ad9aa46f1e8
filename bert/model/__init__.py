"""Flax modules: attention, layers, encoder, heads. Knows no task and no training loop."""
